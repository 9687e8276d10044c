"""A systemd unit that somebody wrote for an inference server: what its text gives away before it matters."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from pivot.findings import Finding, Severity

ERROR, WARNING = Severity.ERROR, Severity.WARNING
# seconds: what running requests and eight ranks need to end at least [inf]; a kill in the middle can wedge a GPU
LEAST_STOP = 30
# seconds: a server loads its weights for minutes, so a limit over less than this counts no two starts [inf]
LEAST_LIMIT = 600
UNITS = {
    "us": 1e-6, "ms": 1e-3, "s": 1, "sec": 1, "second": 1, "seconds": 1,
    "m": 60, "min": 60, "minute": 60, "minutes": 60, "h": 3600, "hr": 3600, "hour": 3600, "hours": 3600,
    "d": 86400, "day": 86400, "days": 86400, "w": 604800, "week": 604800, "weeks": 604800,
}  # fmt: skip
RESTARTS = frozenset({"always", "on-failure", "on-abnormal", "on-abort"})
# what systemd puts in for a letter, of those that NCCL reads itself
SPECIFIERS = {"h": "the user's home", "p": "the unit's name"}
Wrong = tuple[str, Severity, str, str]
"""A finding's code, severity, message and fix."""


def check(subject: str, text: str) -> list[Finding]:
    """Everything about a unit's text, its drop-ins behind it in their order."""
    service = settings(text)
    wrong = [*_specifiers(service), *_stop(service), *_loop(service)]
    return [Finding(code, severity, subject, message, fix) for code, severity, message, fix in wrong]


def settings(text: str) -> dict[str, list[str]]:
    """Assignments of all sections, name → values; an empty one clears those before it, as systemd has it."""
    found: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        match = re.fullmatch(r"\s*([A-Za-z]+)\s*=\s*(.*?)\s*", line)
        if not match or line.lstrip().startswith(("#", ";")):
            continue
        if match[2]:
            found.setdefault(match[1], []).append(match[2])
        else:
            found[match[1]] = []
    return found


def _last(service: dict[str, list[str]], *names: str) -> str | None:
    values = [value for name in names for value in service.get(name, [])]
    return values[-1] if values else None


def seconds(text: str) -> float | None:
    """A span as systemd reads it: 10, 1min 30s, infinity; None for what is none."""
    if text.strip() == "infinity":
        return float("inf")
    parts = re.findall(r"([0-9.]{1,12})\s*([a-z]*)", text)
    if not parts or re.sub(r"([0-9.]{1,12})\s*([a-z]*)", "", text).strip():
        return None
    try:
        return float(sum(float(number) * UNITS[unit or "s"] for number, unit in parts))
    except (KeyError, ValueError):
        return None


def _specifiers(service: dict[str, list[str]]) -> Iterator[Wrong]:
    for line in service.get("Environment", []):
        try:
            pairs = shlex.split(line)
        except ValueError:
            pairs = line.split()
        for pair in pairs:
            name, _, value = pair.partition("=")
            letters = sorted(set(re.findall(r"%([hp])", value.replace("%%", ""))))
            if not name.startswith("NCCL_") or not letters:
                continue
            eaten = " and ".join(f"%{letter} ({SPECIFIERS[letter]})" for letter in letters)
            message = f"Environment={name} has {eaten}, which systemd puts in before NCCL sees it"
            right = re.sub(r"(?<!%)%(?=[hp])", "%%", value)
            yield "INSPECT-SPECIFIER", WARNING, message, f"write {name}={right}, or put it into an EnvironmentFile="


def _stop(service: dict[str, list[str]]) -> Iterator[Wrong]:
    mode = _last(service, "KillMode")
    if mode in ("process", "none"):
        message = f"KillMode={mode} leaves the schedulers behind, with all memory of their GPUs"
        yield "INSPECT-KILL", ERROR, message, "write KillMode=mixed"
    limit = _last(service, "TimeoutStopSec", "TimeoutSec")
    span = seconds(limit) if limit else None
    if span is not None and span < LEAST_STOP:
        message = f"TimeoutStopSec={limit}: requests and ranks are killed before they can end"
        yield "INSPECT-STOP", WARNING, message, "write TimeoutStopSec=120 or more"


def _loop(service: dict[str, list[str]]) -> Iterator[Wrong]:
    restart = _last(service, "Restart")
    if restart not in RESTARTS:
        return
    limit = _last(service, "StartLimitIntervalSec", "StartLimitInterval")
    span: Any = seconds(limit) if limit else 10.0
    if span is not None and span < LEAST_LIMIT:
        said = f"StartLimitIntervalSec={limit}" if limit else "no StartLimitIntervalSec (systemd's own is 10 s)"
        message = f"Restart={restart} with {said}: a server that fails after minutes of loading is started for ever"
        yield "INSPECT-LOOP", WARNING, message, "write StartLimitIntervalSec=14400 and StartLimitBurst=3 under [Unit]"
