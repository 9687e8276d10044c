"""What a bundle, or a single log, says about a server, read once for `pivot.logs.suspects` and `pivot.logs.diagnosis`.

Nothing here looks at anything but the bundle: the answer is the same wherever and whenever it is opened.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pivot.logs import machine
from pivot.logs.gpu_logs import FlightLog, KernelLog, NcclLog
from pivot.logs.log_lines import Evidence, Note, line_text
from pivot.logs.machine import Machine
from pivot.logs.server_log import Run, ServerLog

RECENT = 6  # runs among which a failure is looked for
FLIGHT_LIMIT = 64 << 20  # bytes of one rank's dump


class BundleError(ValueError):
    """A path that is no bundle; the text says what is missing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """A process of the unit, looked at twice. state: the letter of /proc; busy: CPU seconds between the two looks."""

    pid: int
    name: str
    state: str
    busy: float | None
    seconds: float | None
    waits_in: str


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What the server answered to one path. status: None when it did not; seconds: how long that took."""

    path: str
    status: int | None
    seconds: float
    error: str


@dataclasses.dataclass(slots=True)
class Facts:
    """Everything that a diagnosis is made of; what the bundle lacks is empty."""

    name: str
    host: str
    unit: str
    time: float | None
    log: ServerLog
    before: ServerLog
    manifest: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    properties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    processes: list[Process] = dataclasses.field(default_factory=list)
    answers: dict[str, Answer] = dataclasses.field(default_factory=dict)
    nccl: NcclLog = dataclasses.field(default_factory=NcclLog)
    kernel: KernelLog = dataclasses.field(default_factory=KernelLog)
    arguments: dict[str, str] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    flight: FlightLog = dataclasses.field(default_factory=FlightLog)
    machine: Machine = dataclasses.field(default_factory=Machine)
    unit_text: str = ""
    lacks: list[str] = dataclasses.field(default_factory=list)

    @property
    def run(self) -> Run | None:
        """The current run of the server."""
        return self.log.current

    def note(self, kind: str) -> Note | None:
        """What is said of this kind by the run in question, or by NCCL's own files.

        The run in question is the current one and, while that is not ready, the latest that failed.
        """
        for run in (self.run, self.failure):
            if run is not None and (found := run.note(kind)):
                return found
        return self.log.nccl.notes.get(kind) or self.nccl.notes.get(kind)

    @property
    def well(self) -> bool:
        """Whether the current run came up and nothing has broken it since: what the machine reports may be past."""
        run, health = self.run, self.answers.get("/health")
        up = run is not None and (run.ready is not None or run.decode.lines > 0) and self.failure is None
        return up and (health is None or (health.status is not None and health.status < 500))

    def gave_up(self, run: Run) -> bool:
        """Whether a log alone, which nobody explains, ends in an error of its start."""
        return not self.manifest and run is self.run and run.gave_up is not None

    @property
    def failure(self) -> Run | None:
        """The latest run that ended badly; None when the server came up after it."""
        run = self.run
        for one in reversed([*self.earlier, *([run] if run else [])][-RECENT:]):
            if one.broken or (one.ended and not one.clean) or self.gave_up(one):
                return one if one is run or run is None or run.ready is None else None
        return None

    def unit_line(self, name: str, pattern: str) -> Evidence | None:
        """The first line of the unit as written that sets `name`, and to something that has the pattern."""
        for number, line in enumerate(self.unit_text.splitlines(), start=1):
            if re.search(rf"\b{name}=\S*{pattern}", line):
                return Evidence("unit.txt", number, line_text(line.encode()))
        return None

    @property
    def earlier(self) -> list[Run]:
        """Runs before the current one, oldest first."""
        return [*self.before.runs, *list(self.log.runs)[:-1]]


def read(path: Path) -> Facts:
    """A bundle's directory, or a server's log as a file. BundleError names what it is not."""
    if path.is_file():
        return _alone(path)
    if not path.is_dir():
        raise BundleError(f"there is no bundle {path}: pivot bundle list shows those that there are")
    manifest = read_json(path / "manifest.json")
    if not isinstance(manifest, dict):
        inside = sorted(file.parent.name for file in path.glob("*/manifest.json"))
        why = f"it holds those of {', '.join(inside)}" if inside else "it has no readable manifest.json"
        raise BundleError(f"{path} is no bundle: {why}")
    schema = manifest.get("schema", manifest.get("format"))
    if schema not in (1, 2):
        raise BundleError(f"{path} has schema {schema}; this version of Pivot reads 1 and 2")
    unit = str(manifest.get("unit", ""))
    facts = Facts(
        path.name,
        str(manifest.get("host", "")),
        unit,
        machine.unix_time(str(manifest.get("time", ""))),
        _server_log(path, "server.log", unit),
        _server_log(path, "server-before.log", unit),
        manifest=manifest,
        properties=_pairs(machine.text(path / "unit-properties.txt")),
    )
    facts.lacks = [
        f"{entry.get('name')}: {entry.get('reason')}"
        for entry in mappings(manifest.get("files"))
        if (entry.get("sha256") is None and (entry.get("required") or entry.get("failed")))
        or (entry.get("truncated") and not entry.get("tail"))
    ]
    _processes(facts, path)
    facts.machine = machine.read(path)
    facts.unit_text = machine.text(path / "unit.txt")
    _gpu_logs(facts, path)
    return facts


def _alone(path: Path) -> Facts:
    """A log as a file; one that no server wrote may be the kernel's."""
    with path.open("rb") as stream:
        facts = Facts(path.name, "", "", None, ServerLog(path.name).read(stream), ServerLog("", ""))
        if not any(run.begin or run.milestones or run.decode.lines for run in facts.log.runs):
            stream.seek(0)
            facts.kernel = KernelLog(path.name).read(stream)
    return facts


def _server_log(path: Path, name: str, unit: str) -> ServerLog:
    log = ServerLog(name, unit)
    if (path / name).is_file():
        with (path / name).open("rb") as stream:
            log.read(stream)
    return log


def _gpu_logs(facts: Facts, path: Path) -> None:
    """NCCL's logs, the flight recorder's dumps and the kernel's messages."""
    for file in sorted((path / "nccl").rglob("*")):
        if file.is_file():
            with file.open("rb") as stream:
                facts.nccl.read(stream, file.relative_to(path).as_posix())
    for file in sorted((path / "flight").rglob("*.json")):
        if rank := re.search(r"(\d{1,5})\.json$", file.name):
            facts.flight.add(read_json(file, FLIGHT_LIMIT), int(rank.group(1)), file.relative_to(path).as_posix())
    facts.kernel.container = _container(facts.manifest)
    for name in ("system/kernel.log", "node/kernel.log", "node/container.log"):
        if (path / name).is_file():
            with (path / name).open("rb") as stream:
                facts.kernel.name = name
                facts.kernel.read(stream)


def _container(manifest: Mapping[str, Any]) -> str:
    """The container's id on its node, as the node was asked for it; "" when it was not."""
    sources = (str(e.get("source")) for e in mappings(manifest.get("files")) if e.get("name") == "node/container.conf")
    return next((source[11:] for source in sources if re.fullmatch(r"pct config \d+", source)), "")


def _processes(facts: Facts, path: Path) -> None:
    """The unit's processes, how they were started and what the server answered."""
    for one in mappings(read_json(path / "processes.json")):
        facts.processes.append(
            Process(
                whole(one.get("pid")),
                str(one.get("name", "")),
                str(one.get("state", ""))[:1],
                _figure(one.get("busy")),
                _figure(one.get("seconds")),
                str(one.get("waits_in", "")),
            )
        )
    for one in mappings(read_json(path / "answers.json")):
        status = one.get("status")
        if status is not None and not isinstance(status, int):
            continue
        facts.answers[str(one.get("path", ""))] = Answer(
            str(one.get("path", "")),
            status,
            _figure(one.get("seconds")) or 0.0,
            str(one.get("error", "")),
        )
    facts.arguments = arguments(path)
    environment = read_json(path / "process/environment.json")
    if isinstance(environment, dict):
        facts.environment = {name: str(value) for name, value in environment.items() if value is not None}


def arguments(path: Path) -> dict[str, str]:
    """Flags as the server was started with them: launch.yaml, overruled by the command line; dashes left away."""
    found: dict[str, str] = {}
    for file in sorted((path / "config").rglob("launch.yaml")):
        for line in machine.text(file).splitlines():
            match = re.match(r"[\"']?([a-z][\w-]*)[\"']?\s*:\s*(\S.*?)\s*$", line)
            if match:
                found[match.group(1).replace("_", "-")] = match.group(2).strip("\"'")
    words = read_json(path / "process/cmdline.json")
    words = [str(word) for word in words] if isinstance(words, list) else []
    for position, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            behind = words[position + 1] if position + 1 < len(words) else "--"
            found[name.replace("_", "-")] = value if equals else "true" if behind.startswith("--") else behind
    return found


def read_json(path: Path, limit: int = machine.TEXT_LIMIT) -> Any:
    """A JSON file's content; None when there is none, or when it is no JSON (a cut file)."""
    try:
        return json.loads(machine.text(path, limit) or "null")
    except (ValueError, RecursionError):
        return None


def mappings(found: object) -> list[Mapping[str, Any]]:
    """The mappings of a list; none where it is no list, as in a damaged file."""
    return [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, list) else []


def _pairs(text: str) -> dict[str, str]:
    return {name: value for name, equals, value in (line.partition("=") for line in text.splitlines()) if equals}


def whole(value: object) -> int:
    """A whole number; 0 for anything else."""
    return value if isinstance(value, int) else 0


def _figure(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
