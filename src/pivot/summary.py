"""The table on top of a run's bundles: every host in one line, those that did not answer too."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

NAME = "summary.txt"
HEAD = ("host", "state", "files", "MiB", "masked", "lacks", "findings")


def manifests(run: Path) -> dict[str, dict[str, Any]]:
    """Manifests of a run's bundles by host; a directory without a readable one is left out."""
    found = {}
    for path in sorted(run.glob("*/manifest.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            found[str(content.get("host", path.parent.name))] = content
    return found


def rows(found: Mapping[str, Mapping[str, Any]], hosts: Iterable[str]) -> list[Sequence[str]]:
    """One row a host: those of the bundles, and the ones of `hosts` that have none."""
    made: list[Sequence[str]] = []
    for host in sorted({*found, *hosts}):
        if host not in found:
            made.append((host, "no bundle: unreachable, or its collection failed", "", "", "", "", ""))
            continue
        manifest = found[host]
        files = [entry for entry in manifest.get("files", []) if isinstance(entry, Mapping)]
        present = [entry for entry in files if entry.get("sha256")]
        lacks = [entry for entry in files if not entry.get("sha256") and (entry.get("required") or entry.get("failed"))]
        lacks += [entry for entry in present if entry.get("truncated") and not entry.get("tail")]
        codes = [str(finding.get("code")) for finding in manifest.get("findings", []) if isinstance(finding, Mapping)]
        size = sum(int(entry.get("bytes") or 0) for entry in present) / (1 << 20)
        state, masked = str(manifest.get("state", "not diagnosed")), str(manifest.get("masked", ""))
        made.append(
            (host, state, str(len(present)), f"{size:.1f}", masked, str(len(lacks)), " ".join(dict.fromkeys(codes)))
        )
    return made


def text(run: str, found: Mapping[str, Mapping[str, Any]], hosts: Iterable[str] = ()) -> str:
    """The table."""
    lines = [HEAD, *rows(found, hosts)]
    widths = [max(len(line[column]) for line in lines if line[2] or column == 0) for column in range(len(HEAD))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([f"bundles of the run {run}", "", *shown, ""])


def write(run: Path, hosts: Iterable[str] = ()) -> str:
    """Write the table into the run's folder, one writer at a time; hosts: those that should be there."""
    directory = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        made = text(run.name, manifests(run), hosts)
        fresh = run / f".{NAME}.new"
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as sink:
            sink.write(made)
        fresh.replace(run / NAME)
    finally:
        os.close(directory)
    return made


def main(arguments: list[str]) -> int:
    """``python -m pivot.summary RUN HOST …``: the table of a run with these hosts, written and printed."""
    parser = argparse.ArgumentParser("python -m pivot.summary")
    parser.add_argument("run", type=Path)
    parser.add_argument("hosts", nargs="*")
    given = parser.parse_args(arguments)
    if not given.run.is_dir():
        print(f"no host gave a bundle: {given.run.name} is not there")
        return 1
    print(write(given.run, given.hosts), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
