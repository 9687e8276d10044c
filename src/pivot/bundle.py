"""Bundles of logs and state: what is collected, how it travels, and what the controller makes of it.

`table` is the one place that says what is collected. The host's part is `roles/log_bundle/files/collect.py`;
`finish` is the controller's: known secrets masked once more, every file hashed into ``manifest.json``, gaps turned
into findings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pivot.findings import Finding, Severity
from pivot.redact import MASK, Redactor, spellings
from pivot.transfer import rsync_from

FORMAT = 1
MIB = 1 << 20
BLOCK = 4 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One row of the table.

    name: file of the bundle, or directory where one item becomes several files; kind: how the host collects it;
    what: command, paths or globs; limit: bytes taken per file; sensitivity: "plain", "secrets" (masked) or "prompts";
    required: absence is worth a warning and a failure an error; tail: only the end is wanted, a cut is no fault;
    purpose: the question it answers.
    """

    name: str
    kind: str
    what: tuple[str, ...]
    limit: int
    sensitivity: str
    purpose: str
    required: bool = False
    tail: bool = False


def table(
    *,
    unit: str,
    config_paths: Sequence[str],
    probe_records: Sequence[str],
    listed_paths: Sequence[str],
    log_limit: int,
    python: str = "",
    url: str = "",
) -> list[dict[str, Any]]:
    """What is collected of a host, most important first: when the total limit is reached, the rest is left out.

    unit: systemd unit with its suffix; config_paths, probe_records: files, directories or globs; listed_paths:
    looked at, never copied; log_limit: bytes of the current log; python: the engine's interpreter ("": that of the
    running process); url: of the server ("": from the launch configuration). Plain dicts, for a host's JSON.
    """
    rows = [
        Item("unit.txt", "command", ("systemctl", "cat", "--no-pager", unit), MIB, "secrets", "as written", True),
        Item("unit-properties.txt", "command", ("systemctl", "show", unit), MIB, "secrets", "as systemd sees it", True),
        Item(
            "unit-status.txt",
            "status",
            ("systemctl", "status", "--no-pager", "--full", "--lines=0", unit),
            MIB,
            "secrets",
            "state and processes",
        ),
        Item("process", "process", (unit,), MIB, "secrets", "what really runs", True),
        Item("config", "files", tuple(config_paths), MIB, "secrets", "the configuration as rendered", True),
        Item("server_info.json", "server_info", (url,), 4 * MIB, "secrets", "what the server made of it"),
        Item("packages.json", "packages", (python,), MIB, "plain", "the engine's distributions"),
        Item("system/uname.txt", "command", ("uname", "-a"), MIB, "plain", "kernel", True),
        Item("system/df.txt", "command", ("df", "-h", "-T"), MIB, "plain", "full volumes, /dev/shm"),
        Item("system/ip.txt", "command", ("ip", "address"), MIB, "plain", "addresses"),
        Item("system/sockets.txt", "command", ("ss", "-ltnp"), MIB, "plain", "who listens where"),
        Item("system/devices.txt", "command", ("ls", "-lR", "/dev"), MIB, "plain", "device nodes"),
        Item(
            "system",
            "files",
            ("/usr/lib/os-release", "/proc/meminfo", "/proc/cpuinfo", "/proc/devices", "/sys/fs/cgroup/memory.*"),
            MIB,
            "plain",
            "memory and limits",
        ),
        Item("system/listing.txt", "list", tuple(listed_paths), MIB, "prompts", "core files and dumps, never copied"),
        Item("server.log", "journal", (unit, "current"), log_limit, "secrets", "the current run", True),
        Item("server-before.log", "journal", (unit, "before"), log_limit // 4, "secrets", "earlier runs", tail=True),
        Item("probe", "files", tuple(probe_records), log_limit, "plain", "what reached the drafter"),
    ]
    return [dataclasses.asdict(row) for row in rows]


def collector(script: str) -> str:
    """The host's program in one piece: `pivot.redact` of this very version, then `script`, which imports it."""
    found = importlib.util.find_spec("pivot.redact")
    if found is None or found.origin is None:
        raise FileNotFoundError("pivot.redact has no source file: install the project with `make setup`")
    redact = Path(found.origin).read_text(encoding="utf-8")
    return "\n".join(
        [
            "import sys, types",
            "for name in ('pivot', 'pivot.redact'): sys.modules[name] = types.ModuleType(name)",
            f"exec(compile({redact!r}, 'redact.py', 'exec'), sys.modules['pivot.redact'].__dict__)",
            f"exec(compile({script!r}, 'collect.py', 'exec'), dict(__name__='__main__'))",
            "",
        ]
    )


def owner(home: str) -> str:
    """For whom a host collects, as a word: this controller's directory of bundles for the host."""
    return hashlib.sha256(f"{socket.gethostname()}\0{home}".encode()).hexdigest()[:12]


def describe(rows: Iterable[Mapping[str, Any]], where: str) -> str:
    """What a run without check mode would collect, as lines for a person."""
    lines = [f"would collect into {where}:"]
    for row in rows:
        what = " ".join(str(part) for part in row["what"] if part)
        lines.append(f"  {row['name']:<22} {row['purpose']}: {row['kind']} {what} (at most {row['limit'] // 1024} KiB)")
    return "\n".join(lines)


def transfer(connection: Mapping[str, Any], source: str, destination: str) -> list[str]:
    """The rsync command that brings a host's directory to the controller; its files are the caller's alone.

    connection: as for `pivot.transfer.rsync_to`, which also says what cannot be used.
    """
    options = ["--recursive", "--times", "--compress", "--chmod=D0700,F0600"]
    return rsync_from(source, destination, connection, options)


def gaps(entries: Iterable[Mapping[str, Any]], host: str) -> list[Finding]:
    """What a bundle lacks: an error where something is cut or failed that should not be, a warning for absences."""
    found = []
    for entry in entries:
        subject = f"{host}, {entry['name']}"
        if entry.get("sha256") is None and entry["required"]:
            failed = entry.get("failed", False)
            found.append(
                Finding(
                    "BUNDLE-MISSING",
                    Severity.ERROR if failed else Severity.WARNING,
                    subject,
                    f"not collected: {entry['reason']}",
                    "" if not failed else "see the reason, then collect again",
                )
            )
        elif entry.get("sha256") is None and entry.get("failed"):
            found.append(Finding("BUNDLE-MISSING", Severity.WARNING, subject, f"not collected: {entry['reason']}", ""))
        elif entry["truncated"]:
            found.append(
                Finding(
                    "BUNDLE-CUT",
                    Severity.INFO if entry["tail"] else Severity.ERROR,
                    subject,
                    f"not whole: {entry['reason']}",
                    ""
                    if entry["tail"]
                    else "raise log_bundle_log_limit_mib or log_bundle_total_limit_mib; where the host's own volume is "
                    "the limit, name a larger one in log_bundle_staging_directories",
                )
            )
    return found


def finish(request: Mapping[str, Any]) -> dict[str, Any]:
    """Turn what rsync brought into a bundle: check, mask, describe, move into place.

    request: ``partial`` (directory with the files), ``directory`` (where the bundle goes, must not exist),
    ``entries`` and ``context`` (the host's answer), ``host``, ``unit``, ``time``, ``pins`` and ``secrets``.
    Returns path, findings, files, bytes and the number of masked places.
    """
    partial, final = Path(request["partial"]), Path(request["directory"])
    redactor = Redactor(str(secret) for secret in request["secrets"] if secret)
    host = str(request["host"])
    findings: list[Finding] = []
    entries = [dict(entry) for entry in request["entries"]]
    for entry in entries:
        if entry["sha256"] is not None:
            findings += _settle(partial / entry["name"], entry, redactor, host)
    if request.get("pins"):
        text = redactor.text(json.dumps(request["pins"], indent=1, sort_keys=True) + "\n")
        (partial / "pins.json").write_text(text, encoding="utf-8")
        entries.append(_own_entry("pins.json", "controller", text))
    findings += _leaks(partial, request["secrets"], host)
    findings += gaps(entries, host)
    manifest = {
        "format": FORMAT,
        "host": host,
        "unit": request["unit"],
        "time": request["time"],
        "host_facts": request["context"],
        "masked": redactor.masked + sum(int(entry["masked"]) for entry in request["entries"]),
        "files": sorted(entries, key=lambda entry: str(entry["name"])),
        "findings": [finding.as_dict() for finding in findings],
    }
    text = redactor.text(json.dumps(manifest, indent=1) + "\n")
    (partial / "manifest.json").write_text(text, encoding="utf-8")
    for path in (partial, *partial.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    if final.exists():
        raise FileExistsError(f"{final} is there already: two runs in one second? collect again")
    final.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial.rename(final)
    for left in partial.parent.glob(".*.partial"):  # of interrupted runs
        shutil.rmtree(left)
    present = [entry for entry in entries if entry["sha256"] is not None]
    return {
        "path": str(final),
        "findings": [finding.as_dict() for finding in findings],
        "files": len(present),
        "bytes": sum(int(entry["bytes"]) for entry in present),
        "masked": manifest["masked"],
    }


def _settle(path: Path, entry: dict[str, Any], redactor: Redactor, host: str) -> list[Finding]:
    """Compare one file with what the host sent, mask it, and write its final size and hash into the entry."""
    if not path.is_file() or _sha256(path) != entry["sha256"]:
        entry.update(sha256=None, bytes=None, failed=True, reason="changed or lost on the way")
        path.unlink(missing_ok=True)
        return [
            Finding(
                "BUNDLE-TRANSFER",
                Severity.ERROR,
                f"{host}, {entry['name']}",
                "the file that arrived is not the one the host had prepared",
                "collect again; look at free space on both sides",
            )
        ]
    before = redactor.masked
    staged = path.with_name(path.name + ".masked")
    with path.open("rb") as source, staged.open("wb") as sink:
        for block in _blocks(source):
            text = block.decode("utf-8", "surrogateescape")
            sink.write(redactor.text(text).encode("utf-8", "surrogateescape"))
    staged.replace(path)
    entry.update(bytes=path.stat().st_size, sha256=_sha256(path), masked=entry["masked"] + redactor.masked - before)
    return []


def _blocks(source: Any) -> Iterable[bytes]:
    """A file in blocks of whole lines."""
    rest = b""
    while chunk := source.read(BLOCK):
        head, newline, tail = (rest + chunk).rpartition(b"\n")
        if newline:
            yield head + newline
        rest = tail
    if rest:
        yield rest


def _leaks(directory: Path, secrets: Iterable[str], host: str) -> list[Finding]:
    """The last look: no spelling of a known secret may be left. A file that has one is removed, not kept."""
    needles = {form.encode("utf-8", "surrogateescape") for secret in secrets for form in spellings(str(secret))}
    needles = {needle for needle in needles if len(needle) >= 8}
    found = []
    for path in sorted(entry for entry in directory.rglob("*") if entry.is_file()):
        with path.open("rb") as source:
            leaking = any(needle in block for block in _blocks(source) for needle in needles)
        if leaking:
            path.unlink()
            message = "a known secret was left in the file after masking; it was removed from the bundle"
            name = path.relative_to(directory)
            found.append(Finding("BUNDLE-SECRET", Severity.ERROR, f"{host}, {name}", message, "report this as a bug"))
    return found


def _own_entry(name: str, source: str, text: str) -> dict[str, Any]:
    """The manifest's entry of a file that the controller wrote itself."""
    raw = text.encode()
    return {
        "name": name,
        "item": name,
        "source": source,
        "bytes": len(raw),
        "sha256": hashlib.sha256(raw).hexdigest(),
        "truncated": False,
        "reason": "",
        "failed": False,
        "masked": text.count(MASK),
        "sensitivity": "plain",
        "required": True,
        "tail": False,
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def main() -> int:
    """``python -m pivot.bundle``: `finish`, its request on stdin, because a command line is no place for secrets.

    Problems are answered as ``{"error": …}`` with status 0: the caller hides this task's output and shows that alone.
    """
    try:
        answer = finish(json.load(sys.stdin))
    except (OSError, KeyError, TypeError, ValueError) as error:
        answer = {"error": f"the bundle could not be finished: {error}"}
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
