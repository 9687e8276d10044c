"""Wheels for another interpreter, brought by pip: where it looks, how far it is, and what it said when it failed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pivot.engines import engine
from pivot.engines.engine import EngineError

FIND_LINKS = "PIVOT_FIND_LINKS"

Report = Callable[[str], None]


def download(
    wanted: Iterable[engine.LockedWheel], target: engine.Target, into: Path, log: Path, report: Report
) -> None:
    """Download wheels for another interpreter; those of local builds (`+cpu`) first, as they are missing most often."""
    ordered = sorted(wanted, key=lambda wheel: "+" not in wheel.version)
    local = [wheel for wheel in ordered if "+" in wheel.version]
    log.write_text("", encoding="utf-8")
    for group in (local, ordered[len(local) :]):
        if group:
            _pip_download(group, target, into, log, report)


def _pip_download(
    wheels: Sequence[engine.LockedWheel], target: engine.Target, into: Path, log: Path, report: Report
) -> None:
    """One run of pip; its output goes to the log, its progress to report every few seconds."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--progress-bar", "off"]
    command += ["--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", str(into)]
    command += ["--implementation", "cp", "--python-version", target.python, "--abi", target.abi]
    for platform in target.platforms():
        command += ["--platform", platform]
    for place in extra_find_links():
        command += ["--find-links", place]
    begin = last = time.monotonic()
    with tempfile.NamedTemporaryFile("w", prefix="pivot-lock-", suffix=".txt", encoding="utf-8") as requirements:
        requirements.write("".join(wheel.line() + "\n" for wheel in wheels))
        requirements.flush()
        lines: list[str] = []
        with (
            log.open("a", encoding="utf-8") as output,
            subprocess.Popen(
                [*command, "--requirement", requirements.name],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ) as process,
        ):
            started = 0
            for line in process.stdout or ():
                output.write(line)
                lines.append(line)
                started += line.startswith("Collecting ")
                if time.monotonic() - last > 5:
                    last = time.monotonic()
                    report(f"  wheel {started} of {len(wheels)}, {last - begin:.0f} s (log: {log})")
    if process.returncode != 0:
        raise EngineError(_explain("".join(lines), wheels, target, log))


def _explain(output: str, wheels: Sequence[engine.LockedWheel], target: engine.Target, log: Path) -> str:
    """One sentence for what pip said."""
    match = re.search(r"No matching distribution found for ([A-Za-z0-9._-]+)", output)
    if match:
        name = engine.canonical(match[1])
        version = next((wheel.version for wheel in wheels if wheel.name == name), "?")
        return (
            f"no wheel of {name} {version} for Python {target.python} was found in {sources()};"
            f" set {FIND_LINKS} to a directory or page that holds it and run again (pip's output: {log})"
        )
    if "DO NOT MATCH THE HASHES" in output:
        match = re.search(r"^\s+([A-Za-z0-9._-]+)==\S+ from (\S+)", output, re.MULTILINE)
        which = f"{match[1]} from {without_password(match[2])}" if match else "a wheel"
        return f"{which} is not the locked file, its sha256 differs: the source changed, or the lock is stale ({log})"
    return f"pip could not download the wheels: {without_password(last_line(output))} (its output: {log})"


def extra_find_links() -> list[str]:
    """Directories and pages with wheels from PIVOT_FIND_LINKS, separated by spaces."""
    return os.environ.get(FIND_LINKS, "").split()


def pip_setting(name: str) -> list[str]:
    """The values of a pip option from its configuration files and environment, e.g. find-links; may be empty."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found: list[str] = []
    for line in result.stdout.splitlines():
        key, separator, value = line.partition("=")
        if separator and key.rpartition(".")[2] == name and key.split(".")[0] in {":env:", "global", "download"}:
            found += str(ast.literal_eval(value)).split()
    return list(dict.fromkeys(found))


def sources() -> str:
    """Where pip looked, for an error message."""
    places = [*extra_find_links(), *pip_setting("find-links"), *pip_setting("extra-index-url")]
    known = ", ".join(without_password(place) for place in dict.fromkeys(places))
    return "the package index" + (f" and {known}" if known else " (no find-links are configured)")


def without_password(text: str) -> str:
    """A text as it may be shown: no user and password in its addresses."""
    return re.sub(r"//[^/\s]+@", "//***@", text)


def last_line(text: str) -> str:
    """The last line with something in it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
