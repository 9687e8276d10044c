"""Which releases of a host may go: neither wanted by its inventory nor used there, and named by whoever removes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from pivot.checkpoints.progress import gigabytes
from pivot.checkpoints.weights import plain
from pivot.findings import Finding, Severity

SHOWN = 3  # users of a release, or others that link to it


@dataclasses.dataclass(frozen=True, slots=True)
class Pruning:
    """lines: what a person reads, one for each release; removable: names → bytes; remove: those that were confirmed."""

    lines: tuple[str, ...]
    removable: Mapping[str, int]
    remove: tuple[str, ...]
    findings: tuple[Finding, ...]


def keys(paths: Sequence[str], root: str) -> list[str]:
    """The releases that paths of settings name, as repository@revision; paths elsewhere are none."""
    places = [PurePosixPath(plain(path)) for path in paths if path]
    inside = [place.relative_to(root) for place in places if place.is_relative_to(root)]
    return [f"{place.parent}@{place.name}" for place in inside]


def decide(wanted: Sequence[str], report: Mapping[str, Any], confirmed: Sequence[str], host: str) -> Pruning:
    """What can go and what is to go.

    wanted: repository@revision of what the inventory wants; report: what weights_prune.py says; confirmed: the variable
    model_weights_prune. Leftovers of interrupted runs belong to their release: those of a wanted one stay for its next
    run.
    """
    lines: list[str] = []
    removable: dict[str, int] = {}
    kept: dict[str, str] = {}
    for name, found in [*sorted(report["releases"].items()), *sorted(report["leftovers"].items())]:
        reason = _reason(name, wanted, found)
        size = gigabytes(found["bytes"])
        if reason:
            kept[name] = reason
            lines.append(f"{name}: stays, {reason}")
        else:
            removable[name] = int(found["bytes"])
            needed = f", but a rollback to what {' and '.join(found['sets'])} keeps needs it" if found["sets"] else ""
            lines.append(f"{name}: {'is removed' if name in confirmed else 'can go'}, frees {size}{needed}")
    findings = [_not_removed(host, name, kept.get(name, "")) for name in confirmed if name not in removable]
    return Pruning(tuple(lines), removable, tuple(name for name in removable if name in confirmed), tuple(findings))


def _reason(name: str, wanted: Sequence[str], found: Mapping[str, Any]) -> str:
    """Why a release stays; empty when it can go."""
    if any(name == key or _left_of(name) == key for key in wanted):
        return "the inventory wants it"
    if found["links"]:
        return f"{_some(found['links'])} {'link' if len(found['links']) > 1 else 'links'} to it"
    return f"used by {_some(found['users'])}" if found["users"] else ""


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _left_of(name: str) -> str:
    """The release that a leftover belongs to: ``.incoming-<revision>`` or ``.replaced-<revision>-<pid>``."""
    repository, _, directory = name.rpartition("@")
    if directory.startswith(".replaced-"):
        directory = directory.rpartition("-")[0]
    return f"{repository}@{directory.removeprefix('.incoming-').removeprefix('.replaced-')}"


def _not_removed(host: str, name: str, reason: str) -> Finding:
    """reason: why it stays; empty where there is none of that name, as on another host, or when it is gone already."""
    message = f"{name} stays: {reason}" if reason else f"there is no {name}"
    fix = "take it out of model_weights_prune; the run without that variable lists what can go"
    return Finding("WEIGHTS-PRUNE", Severity.ERROR if reason else Severity.WARNING, host, message, fix)


def summary(pruning: Pruning, host: str) -> str:
    """The whole list, and the line that removes all of it from this host."""
    if not pruning.removable:
        return "\n".join([*pruning.lines, "nothing can go"])
    total = gigabytes(sum(pruning.removable.values()))
    names = ", ".join(pruning.removable)
    if pruning.remove:
        return "\n".join(pruning.lines)
    command = f"ansible-playbook playbooks/prune.yml --limit {host} -e '{{model_weights_prune: [{names}]}}'"
    return "\n".join([*pruning.lines, f"all that can go frees {total}; to remove it: {command}"])
