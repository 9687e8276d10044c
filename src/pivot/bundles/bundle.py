"""Bundles of logs and state: what is collected, how it travels, and what the controller makes of it.

What is collected is `pivot.bundles.bundle_table`, the host's part `roles/log_bundle/files/collect`; `finish` is the
controller's: known secrets masked once more, every file hashed into ``manifest.json``, gaps turned
into findings.
"""

from __future__ import annotations

import collections
import hashlib
import json
import re
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pivot import summary
from pivot.bundles.bundle_table import MIB
from pivot.bundles.redact import MASK, Redactor, spellings
from pivot.findings import Finding, Severity
from pivot.logs.diagnosis import diagnose, render
from pivot.logs.evidence import read
from pivot.transfer import rsync_from

SCHEMA = 2
BLOCK = 4 * MIB
KEEP_FREE = 64 * MIB


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


def transfer(connection: Mapping[str, Any], source: str, destination: str) -> list[str]:
    """The rsync command that brings a host's directory to the controller; its files are the caller's alone.

    connection: as for `pivot.transfer.rsync_to`, which also says what cannot be used.
    """
    # without --whole-file: what an interrupted transfer has left, also the beginning of a file, is not sent again
    options = ["--recursive", "--times", "--partial", "--compress", "--chmod=D0700,F0600", "--stats"]
    # where one side does not know zstd, the next one is taken; rsync 3.5.0 cannot read its own lz4 with this list
    quick = "RSYNC_COMPRESS_LIST=zstd zlibx zlib"
    return ["env", quick, *rsync_from(source, destination, connection, options)]


def transferred(stats: Iterable[str]) -> dict[str, int]:
    """What ``rsync --stats`` says of several transfers. sent: bytes of files; kept: those that were here already."""
    found = {"sent": 0, "kept": 0}
    for text in stats:
        for name, words in (("sent", "Literal"), ("kept", "Matched")):
            if figure := re.search(rf"(?m)^{words} data: ([\d,.]+) bytes", text):
                found[name] += int(re.sub(r"\D", "", figure.group(1)))
    return found


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
    _sweep(partial, {str(entry["name"]) for entry in entries if entry["sha256"] is not None})
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
        "transfer": transferred(request.get("transfers", [])),
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


def _sweep(partial: Path, names: set[str]) -> None:
    """Remove what an interrupted transfer has left and this one did not bring."""
    for path in sorted(partial.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(partial).as_posix() not in names:
            path.unlink()


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


def no_node(reason: str, node: str) -> dict[str, Any]:
    """The entry that stands for all of a node, when nothing of it could be collected."""
    return _entry("node", node, reason=reason, failed=True)


def _own_entry(name: str, source: str, text: str) -> dict[str, Any]:
    """The manifest's entry of a file that the controller wrote itself."""
    raw = text.encode()
    digest = hashlib.sha256(raw).hexdigest()
    return _entry(name, source, bytes=len(raw), sha256=digest, masked=text.count(MASK), required=True)


def _entry(name: str, source: str, **more: Any) -> dict[str, Any]:
    plain = {"bytes": None, "sha256": None, "truncated": False, "reason": "", "failed": False, "masked": 0}
    fixed = {"sensitivity": "plain", "required": False, "tail": False}
    return {"name": name, "item": name, "source": source, **plain, **fixed, **more}


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def main() -> int:
    """``python -m pivot.bundles.bundle``: `finish`, its request on stdin, because a command line is no place for
    secrets.

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
