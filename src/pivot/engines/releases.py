"""What a host has of the engine against what it should have, and what to do about it.

Pure: judges what `roles/sglang_engine/files/engine_state.py` found there. Which release is wanted is
`pivot.engines.engine`'s.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from pivot.engines.engine import Release, canonical
from pivot.findings import Finding, Severity


def installed_findings(wanted: Release, installed: Mapping[str, str], subject: str) -> list[Finding]:
    """The distributions found in a release, {name: version}, against the wanted set; every difference is an ERROR."""
    have = {canonical(name): version for name, version in installed.items()}
    differences: list[tuple[str, str]] = []
    for name, version in wanted.installed.items():
        if name not in have:
            differences.append((name, f"{name} {version} is missing"))
        elif not _same_version(have[name], version):
            differences.append((name, f"{name} is {have[name]}, locked is {version}"))
    extra = sorted(set(have) - set(wanted.installed))
    differences += [(name, f"{name} {have[name]} is not in the lock") for name in extra]
    return [
        Finding("ENGINE-INSTALLED", Severity.ERROR, subject, text, "deploy again: the release is built anew")
        for _, text in sorted(differences)
    ]


def architecture_findings(subject: str, built_for: Sequence[str], cards: Sequence[str]) -> list[Finding]:
    """Cards that a release's torch has no code for. Untested on a GPU.

    built_for: as torch names them, e.g. sm_120 or compute_90; cards: compute capabilities, e.g. 12.0.
    """
    return [
        Finding(
            "ENGINE-ARCH",
            Severity.ERROR,
            subject,
            f"torch of this release has code for {', '.join(built_for) or 'no card'}, and a card here is {card}",
            "lock a torch that is built for these cards",
        )
        for card in cards
        if not any(_runs(name, card) for name in built_for)
    ]


def _runs(name: str, card: str) -> bool:
    """Whether code for an architecture runs on a card: compiled code on later ones of its major number (not the code
    for one card alone, sm_120a), intermediate code on all later ones."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name)
    if not match:
        return False
    kind, own, wanted = match[1], (int(match[2]), int(match[3])), tuple(map(int, card.split(".")))
    if match[4]:
        return own == wanted
    return own <= wanted and (kind == "compute" or own[0] == wanted[0])


def _same_version(left: str, right: str) -> bool:
    """Equal as versions, or as texts where one of them is none."""
    try:
        return Version(left) == Version(right)
    except InvalidVersion:
        return left == right


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to do on a host; reasons are sentences for people, remove are release ids that can go."""

    action: Literal["none", "link", "install"]
    reasons: tuple[str, ...]
    remove: tuple[str, ...]


def host_findings(wanted: Release, state: Mapping[str, Any], subject: str, free_bytes: int) -> list[Finding]:
    """Why the wanted release cannot be built on a host; state is what files/engine_state.py printed.

    free_bytes: how much room a new release needs.
    """
    python = state["python"]
    path, target = python["path"], wanted.target

    def error(code: str, message: str, fix: str) -> Finding:
        return Finding(code, Severity.ERROR, subject, message, fix)

    if python.get("error"):
        fix = f"install CPython {target.python} there, or set sglang_engine_python to its interpreter"
        return [error("ENGINE-PYTHON", f"the interpreter {path} cannot be used: {python['error']}", fix)]
    findings: list[Finding] = []
    found = f"{python['implementation']} {python['version']}"
    if not found.startswith(f"cpython {target.python}."):
        message = f"{path} is {found}, and the lock is for CPython {target.python}"
        findings.append(error("ENGINE-PYTHON", message, "set sglang_engine_python or sglang_engine_lock to the other"))
    if python["machine"] != target.machine:
        message = f"the host is {python['machine']}, and the lock is for {target.machine}"
        findings.append(error("ENGINE-PLATFORM", message, "use a lock made for this machine"))
    glibc = tuple(int(part) for part in re.findall(r"\d+", python["glibc"])[:2])
    if glibc < target.glibc:
        needed = ".".join(map(str, target.glibc))
        message = f"the host has '{python['glibc']}', and the lock is for glibc {needed} or later"
        findings.append(error("ENGINE-PLATFORM", message, "use a newer system, or a lock made for this one"))
    if state["shared"] is None:
        fix = "mount it into the container (proxmox_container_mounts), or leave sglang_engine_shared_wheels empty"
        findings.append(error("ENGINE-SHARED", "sglang_engine_shared_wheels is no directory of the host", fix))
    if state["free_bytes"] < free_bytes:
        message = f"{_gib(state['free_bytes'])} are free under {state['root']}, a release needs {_gib(free_bytes)}"
        fix = "make room there, or lower sglang_engine_keep_releases"
        findings.append(error("ENGINE-SPACE", message, fix))
    return findings


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def plan(wanted: Release, state: Mapping[str, Any], keep: int) -> Plan:
    """Install, only switch the link, or nothing; and which older releases are beyond `keep`.

    state is what files/engine_state.py printed for the wanted release.
    """
    release = state["release"]
    reasons = tuple(release_problems(wanted, release))
    if reasons:
        return Plan("install", reasons, superseded(wanted.id, state, keep))
    if state["current"] != wanted.id:
        now = state["current"] or "nothing"
        return Plan("link", (f"current is {now}",), superseded(wanted.id, state, keep))
    return Plan("none", (), superseded(wanted.id, state, keep))


def release_problems(wanted: Release, release: Mapping[str, Any] | None) -> list[str]:
    """Why a release directory is not the wanted release, complete and unchanged; empty if it is."""
    if release is None:
        return ["not installed"]
    record = release["record"]
    if record is None:
        return ["its release.json is missing or unreadable"]
    problems: list[str] = list(release["problems"])
    if record.get("id") != wanted.id or record.get("lock_sha256") != wanted.lock_sha256:
        problems.append("its release.json is another release's")
    problems += [finding.message for finding in installed_findings(wanted, release["installed"], wanted.id)]
    records = record.get("records", {})  # none in releases of earlier versions of this project
    changed = sorted(name for name in records if records[name] != release["records"].get(name))
    problems += [f"the RECORD of {name} is not the one that was installed" for name in changed]
    return problems


def superseded(wanted_id: str, state: Mapping[str, Any], keep: int) -> tuple[str, ...]:
    """Releases to remove, oldest first: beyond the wanted one and the `keep` newest others, unless a process uses it.

    The other that was last found healthy stays whatever its age: it is what a rollback goes back to. The release that
    is current before a switch counts as one of the others, so that a second run finds no more.
    """
    others = [item for item in state["releases"] if item["id"] != wanted_id]
    others.sort(key=lambda item: (item["built"], item["id"]))
    kept = {item["id"] for item in others[max(0, len(others) - keep) :]} | set(state["in_use"])
    served = sorted((item for item in others if item["healthy"]), key=lambda item: str(item["healthy"]))
    kept |= {item["id"] for item in served[-1:]}
    return tuple(item["id"] for item in others if item["id"] not in kept)
