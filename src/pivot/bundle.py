"""Bundles of logs and state: what is collected, how it travels, and what the controller makes of it.

`table` is the one place that says what is collected. The host's part is `roles/log_bundle/files/collect.py`;
`finish` is the controller's: known secrets masked once more, every file hashed into ``manifest.json``, gaps turned
into findings.
"""

from __future__ import annotations

import collections
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

from pivot import summary
from pivot.diagnosis import diagnose, render
from pivot.evidence import read
from pivot.findings import Finding, Severity
from pivot.redact import MASK, Redactor, spellings
from pivot.transfer import rsync_from

SCHEMA = 2
MIB = 1 << 20
BLOCK = 4 * MIB
KEEP_FREE = 64 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One row of the table.

    name: file of the bundle, or directory where one item becomes several files; kind: how the host collects it;
    what: command, paths or globs; limit: bytes taken per file; sensitivity: "plain", "secrets" (masked) or "prompts"
    (listed, or copied when asked for); purpose: what it is needed for; required: absence is worth a warning and a
    failure an error; tail: only the end is wanted, a cut is no fault.
    """

    name: str
    kind: str
    what: tuple[str, ...]
    limit: int
    sensitivity: str
    purpose: str
    required: bool = False
    tail: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What a table is made for.

    unit: systemd unit with its suffix; config_paths, probe_records, nccl_logs, flight_records, dumps: files,
    directories or globs; listed_paths: looked at, never copied; copy_dumps: whether dumps are; log_limit: bytes of
    the current log; python: the engine's interpreter ("": that of the running process); url: of the server ("": from
    the launch configuration); extra: rows that a role or an inventory adds, see `added`.
    """

    unit: str
    config_paths: Sequence[str]
    probe_records: Sequence[str]
    listed_paths: Sequence[str]
    log_limit: int
    nccl_logs: Sequence[str] = ()
    flight_records: Sequence[str] = ()
    dumps: Sequence[str] = ()
    copy_dumps: bool = False
    state_paths: Sequence[str] = ()
    python: str = ""
    url: str = ""
    extra: Sequence[Mapping[str, Any]] = ()


SMI = "nvidia-smi"
COMPUTE = "pid,process_name,used_gpu_memory,gpu_uuid"


def table(**options: Any) -> list[dict[str, Any]]:
    """What is collected of a host, most important first: when the total limit is reached, the rest is left out.

    options: those of `Options`. Plain dicts, for a host's JSON.
    """
    given = Options(**options)
    unit, url = given.unit, given.url
    group = f"/sys/fs/cgroup/system.slice/{unit}/memory.*"
    rows = [
        _command("unit.txt", ("systemctl", "cat", "--no-pager", unit), "as written", required=True),
        _command("unit-properties.txt", ("systemctl", "show", unit), "as systemd sees it", required=True),
        Item(
            "unit-status.txt",
            "status",
            ("systemctl", "status", "--no-pager", "--full", "--lines=0", unit),
            MIB,
            "secrets",
            "state and processes",
        ),
        Item("process", "process", (unit,), MIB, "secrets", "what really runs", True),
        Item("processes.json", "processes", (unit,), MIB, "secrets", "which process computes, waits or is stopped"),
        Item("answers.json", "answers", (url,), MIB, "secrets", "what the server answers, and how fast"),
        Item("config", "files", tuple(given.config_paths), MIB, "secrets", "the configuration as rendered", True),
        Item("server_info.json", "answer", (url, "/server_info"), 4 * MIB, "secrets", "what the server made of it"),
        Item("metrics.txt", "answer", (url, "/metrics"), 4 * MIB, "plain", "requests, acceptance and speed since boot"),
        Item("packages.json", "packages", (given.python,), MIB, "plain", "the engine's distributions"),
        Item(
            "state", "files", tuple(given.state_paths), MIB, "plain", "release, verified weights, what the start read"
        ),
        *_system(group),
        Item(
            "system/listing.txt",
            "list",
            tuple(given.listed_paths),
            MIB,
            "prompts",
            "core files, dumps and shared memory, never copied",
        ),
        Item("server.log", "journal", (unit, "current"), given.log_limit, "secrets", "the current run", True),
        Item(
            "server-before.log", "journal", (unit, "before"), given.log_limit // 4, "secrets", "earlier runs", tail=True
        ),
        Item("nccl", "nccl", tuple(given.nccl_logs), given.log_limit // 4, "secrets", "each rank's NCCL"),
        Item("flight", "flight", tuple(given.flight_records), 16 * MIB, "plain", "collectives before a time-out"),
        Item("probe", "files", tuple(given.probe_records), given.log_limit, "plain", "what reached the drafter"),
    ]
    rows += [added(row, given.log_limit) for row in given.extra]
    if given.copy_dumps:
        rows.append(Item("dumps", "dumps", tuple(given.dumps), 1 << 50, "prompts", "a crash, to be replayed"))
    return [dataclasses.asdict(row) for row in rows]


def _command(name: str, argv: tuple[str, ...], purpose: str, *, required: bool = False, kind: str = "command") -> Item:
    return Item(name, kind, argv, MIB, "secrets" if name.startswith("unit") else "plain", purpose, required)


def _system(group: str) -> list[Item]:
    """Rows about container and node."""
    files = ("/usr/lib/os-release", "/proc/meminfo", "/proc/cpuinfo", "/proc/devices", "/proc/driver/nvidia/version")
    cgroups = ("/sys/fs/cgroup/memory.*", group)
    libraries = ("/usr/lib/x86_64-linux-gnu/libcuda.so*", "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so*")
    return [
        _command("system/uname.txt", ("uname", "-a"), "kernel", required=True),
        _command("system/df.txt", ("df", "-h", "-T"), "full volumes, /dev/shm"),
        _command("system/ip.txt", ("ip", "address"), "addresses"),
        _command("system/sockets.txt", ("ss", "-ltnp"), "who listens where"),
        _command("system/devices.txt", ("ls", "-lR", "/dev"), "device nodes"),
        _command("system/gpus.txt", (SMI, "-q"), "GPUs: driver, memory, errors, links", kind="tool"),
        _command("system/topology.txt", (SMI, "topo", "-m"), "paths between GPUs", kind="tool"),
        _command(
            "system/gpu-processes.txt",
            (SMI, f"--query-compute-apps={COMPUTE}", "--format=csv"),
            "who holds memory of the GPUs",
            kind="tool",
        ),
        Item("system/libraries.txt", "list", libraries, MIB, "plain", "the container's driver"),
        Item("system", "files", (*files, *cgroups), MIB, "plain", "memory, limits and driver"),
        Item("system/kernel.log", "kernel", (), 4 * MIB, "plain", "Xid, OOM killer, driver", tail=True),
    ]


ADDED = {"name", "kind", "what", "limit_mib", "sensitivity", "purpose", "required", "tail"}


def added(row: Mapping[str, Any], log_limit: int) -> Item:
    """A row that a role or an inventory adds; ValueError says what is wrong with it.

    Its kind is "files" (paths and globs) or "command" (an argument list); only its name, kind and what are needed.
    """
    where = f"the row {dict(row)!r:.120} of log_bundle_extra_items"
    unknown, missing = set(row) - ADDED, {"name", "kind", "what"} - set(row)
    if unknown or missing:
        raise ValueError(f"{where} {f'has no {min(missing)}' if missing else f'has an unknown {min(unknown)}'}")
    name, what = str(row["name"]), row["what"]
    if row["kind"] not in ("files", "command") or not isinstance(what, Sequence) or isinstance(what, str):
        raise ValueError(f"{where} needs the kind files or command, and a list as what")
    if name.startswith("/") or ".." in name.split("/") or not name:
        raise ValueError(f"{where} needs a relative name")
    sensitivity = str(row.get("sensitivity", "secrets"))
    if sensitivity not in ("plain", "secrets"):
        raise ValueError(f"{where} has the sensitivity {sensitivity}: plain or secrets is right")
    return Item(
        name,
        str(row["kind"]),
        tuple(str(part) for part in what),
        int(row["limit_mib"]) * MIB if "limit_mib" in row else log_limit,
        sensitivity,
        str(row.get("purpose", "added by the inventory")),
        bool(row.get("required", False)),
        bool(row.get("tail", False)),
    )


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


def room(home: str, hosts: int) -> int:
    """Bytes that one of `hosts` bundles may take below `home` on this machine; ValueError when there is no room."""
    where = Path(home)
    while not where.exists():
        where = where.parent
    free = shutil.disk_usage(where).free
    share = (free - KEEP_FREE) // max(1, hosts)
    if share < MIB:
        raise ValueError(
            f"no room for bundles of {hosts} hosts on this machine: {where} has {free} bytes free (log_bundle_dest)"
        )
    return share


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
    options = ["--recursive", "--times", "--partial", "--whole-file", "--compress", "--chmod=D0700,F0600"]
    # where one side does not know zstd, the next one is taken; rsync 3.5.0 cannot read its own lz4 with this list
    quick = "RSYNC_COMPRESS_LIST=zstd zlibx zlib"
    return ["env", quick, *rsync_from(source, destination, connection, options)]


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
    ``entries`` and ``context`` (the host's answer), ``host``, ``unit``, ``time``, ``pins``, ``secrets`` and
    ``verify`` (file with what the last verification printed).
    Returns path, findings, files, bytes, the number of masked places and the diagnosis: state and why.
    """
    partial, final = Path(request["partial"]), Path(request["directory"])
    redactor = Redactor(str(secret) for secret in request["secrets"] if secret)
    host = str(request["host"])
    findings: list[Finding] = []
    entries = [dict(entry) for entry in request["entries"]]
    for entry in entries:
        if entry["sha256"] is not None:
            findings += _settle(partial / entry["name"], entry, redactor, host)
    for name, text in _own_files(request, redactor):
        (partial / name).write_text(text, encoding="utf-8")
        entries.append(_own_entry(name, "controller", text))
    findings += _leaks(partial, request["secrets"], host)
    findings += gaps(entries, host)
    masked_as = collections.Counter(redactor.report)
    for entry in request["entries"]:
        masked_as.update(entry.get("masked_as", {}))
    for entry in entries:
        entry["masked_as"] = _counted(entry.get("masked_as", {}))
    manifest = {
        "schema": SCHEMA,
        "host": host,
        "run": final.parent.name,
        "unit": request["unit"],
        "time": request["time"],
        "host_facts": request["context"],
        "masked": redactor.masked + sum(int(entry["masked"]) for entry in request["entries"]),
        "masked_as": _counted(masked_as),
        "files": sorted(entries, key=lambda entry: str(entry["name"])),
        "findings": [finding.as_dict() for finding in findings],
    }
    _write_manifest(partial, manifest, redactor)
    diagnosed = diagnose(read(partial))
    text = redactor.text(render(diagnosed) + "\n")
    (partial / "diagnosis.txt").write_text(text, encoding="utf-8")
    entries.append(_own_entry("diagnosis.txt", "controller", text))
    manifest["files"] = sorted(entries, key=lambda entry: str(entry["name"]))
    manifest["state"] = str(diagnosed.verdict.state)
    _write_manifest(partial, manifest, redactor)
    for path in (partial, *partial.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    if final.exists():
        raise FileExistsError(f"{final} is there already: two runs in one second? collect again")
    final.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial.rename(final)
    for left in partial.parent.glob(f".{host}.*.partial"):  # of interrupted runs
        shutil.rmtree(left)
    summary.write(final.parent)
    present = [entry for entry in entries if entry["sha256"] is not None]
    return {
        "path": str(final),
        "findings": [finding.as_dict() for finding in findings],
        "files": len(present),
        "bytes": sum(int(entry["bytes"]) for entry in present),
        "masked": manifest["masked"],
        "state": str(diagnosed.verdict.state),
        "why": diagnosed.verdict.why,
        "suspects": [suspect.finding.code for suspect in diagnosed.suspects],
    }


def _own_files(request: Mapping[str, Any], redactor: Redactor) -> Iterable[tuple[str, str]]:
    """Names and texts of what the controller adds."""
    if request.get("pins"):
        yield "pins.json", json.dumps(redactor.data(request["pins"]), indent=1, sort_keys=True) + "\n"
    verified = Path(request["verify"]) if request.get("verify") else None
    if verified and verified.is_file():
        yield "verify.txt", redactor.text(verified.read_text(encoding="utf-8", errors="replace")[-MIB:])


def _write_manifest(directory: Path, manifest: Mapping[str, Any], redactor: Redactor) -> None:
    text = json.dumps(redactor.data(manifest), indent=1) + "\n"
    (directory / "manifest.json").write_text(text, encoding="utf-8")


def _counted(report: Mapping[str, int]) -> list[dict[str, Any]]:
    """How often what was masked; names as values, so that nobody takes a count for a secret."""
    return [{"name": name, "count": count} for name, count in sorted(report.items(), key=lambda item: -item[1])]


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
    if entry["item"] == "dumps":  # asked for as they are
        return []
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
    """A file in blocks of whole lines; what has no lines comes in blocks that overlap by what a secret may be long."""
    rest = b""
    while chunk := source.read(BLOCK):
        head, newline, tail = (rest + chunk).rpartition(b"\n")
        if newline:
            yield head + newline
        rest = tail
        if len(rest) > 4 * BLOCK:
            yield rest
            rest = b""
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
