"""What a bundle, or a single log, says about a server, read once for `pivot.suspects` and `pivot.diagnosis`.

Nothing here looks at anything but the bundle: the answer is the same wherever and whenever it is opened.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pivot.gpu_logs import KernelLog, NcclLog
from pivot.log_lines import Evidence, Note
from pivot.server_log import Run, ServerLog

TEXT_LIMIT = 8 << 20  # bytes of a file that is read as a whole; logs are streamed


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
    volumes: list[tuple[str, str, int, Evidence]] = dataclasses.field(default_factory=list)  # mount, type, % used, line
    listing: list[tuple[str, float, str, Evidence]] = dataclasses.field(default_factory=list)  # path, unix time, size
    on_gpus: list[tuple[int, str, Evidence]] = dataclasses.field(default_factory=list)  # pid, name, line
    memory_events: dict[str, int] = dataclasses.field(default_factory=dict)
    driver: tuple[str, str] = ("", "")  # of the module, of libcuda
    lacks: list[str] = dataclasses.field(default_factory=list)

    @property
    def run(self) -> Run | None:
        """The current run of the server."""
        return self.log.current

    def note(self, kind: str) -> Note | None:
        """What the current run's log says of this kind; NCCL's own files count too."""
        found = self.run.note(kind) if self.run else None
        return found or self.log.nccl.notes.get(kind) or self.nccl.notes.get(kind)

    @property
    def earlier(self) -> list[Run]:
        """Runs before the current one, oldest first."""
        return [*self.before.runs, *list(self.log.runs)[:-1]]


def read(path: Path) -> Facts:
    """A bundle's directory, or a server's log as a file. BundleError names what it is not."""
    if path.is_file():
        with path.open("rb") as stream:
            log = ServerLog(path.name).read(stream)
        return Facts(path.name, "", "", None, log, ServerLog("", ""))
    if not path.is_dir():
        raise BundleError(f"there is no bundle {path}: pivot bundle list shows those that there are")
    manifest = read_json(path / "manifest.json")
    if not isinstance(manifest, dict):
        raise BundleError(f"{path} is no bundle: it has no readable manifest.json")
    schema = manifest.get("schema", manifest.get("format"))
    if schema not in (1, 2):
        raise BundleError(f"{path} has schema {schema}; this version of Pivot reads 1 and 2")
    unit = str(manifest.get("unit", ""))
    facts = Facts(
        path.name,
        str(manifest.get("host", "")),
        unit,
        _time(str(manifest.get("time", ""))),
        _server_log(path, "server.log", unit),
        _server_log(path, "server-before.log", unit),
        manifest=manifest,
        properties=_pairs(read_text(path / "unit-properties.txt")),
    )
    facts.lacks = [
        f"{entry.get('name')}: {entry.get('reason')}"
        for entry in _mappings(manifest.get("files"))
        if (entry.get("sha256") is None and (entry.get("required") or entry.get("failed")))
        or (entry.get("truncated") and not entry.get("tail"))
    ]
    _processes(facts, path)
    _machine(facts, path)
    for file in sorted((path / "nccl").rglob("*")):
        if file.is_file():
            with file.open("rb") as stream:
                facts.nccl.read(stream, file.relative_to(path).as_posix())
    for name in ("system/kernel.log", "system/node-kernel.log"):
        if (path / name).is_file():
            with (path / name).open("rb") as stream:
                facts.kernel.name = name
                facts.kernel.read(stream)
    return facts


def _server_log(path: Path, name: str, unit: str) -> ServerLog:
    log = ServerLog(name, unit)
    if (path / name).is_file():
        with (path / name).open("rb") as stream:
            log.read(stream)
    return log


def _processes(facts: Facts, path: Path) -> None:
    """The unit's processes, how they were started and what the server answered."""
    for one in _mappings(read_json(path / "processes.json")):
        facts.processes.append(
            Process(
                _whole(one.get("pid")),
                str(one.get("name", "")),
                str(one.get("state", ""))[:1],
                _figure(one.get("busy")),
                _figure(one.get("seconds")),
                str(one.get("waits_in", "")),
            )
        )
    for one in _mappings(read_json(path / "answers.json")):
        status = one.get("status")
        facts.answers[str(one.get("path", ""))] = Answer(
            str(one.get("path", "")),
            status if isinstance(status, int) else None,
            _figure(one.get("seconds")) or 0.0,
            str(one.get("error", "")),
        )
    facts.arguments = arguments(path)
    environment = read_json(path / "process/environment.json")
    if isinstance(environment, dict):
        facts.environment = {str(name): str(value) for name, value in environment.items()}


def arguments(path: Path) -> dict[str, str]:
    """Flags as the server was started with them: launch.yaml, overruled by the command line; dashes left away."""
    found: dict[str, str] = {}
    for file in sorted((path / "config").rglob("launch.yaml")):
        for line in read_text(file).splitlines():
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


def _machine(facts: Facts, path: Path) -> None:
    """Volumes, shared memory, GPUs, memory and driver."""
    for number, line in enumerate(read_text(path / "system/df.txt").splitlines(), start=1):
        fields = line.split()
        used = next((index for index, field in enumerate(fields) if re.fullmatch(r"\d{1,3}%", field)), 0)
        if used >= 5 and used + 1 < len(fields):
            evidence = Evidence("system/df.txt", number, " ".join(fields))
            facts.volumes.append((fields[used + 1], fields[1], int(fields[used][:-1]), evidence))
    for number, line in enumerate(read_text(path / "system/listing.txt").splitlines(), start=1):
        size, _, rest = line.strip().partition(" ")
        when, _, name = rest.strip().partition(" ")
        if size.isdigit() and (time := _time(when)) is not None:
            facts.listing.append((name, time, size, Evidence("system/listing.txt", number, line.strip())))
    for number, line in enumerate(read_text(path / "system/gpu-processes.txt").splitlines(), start=1):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) > 1 and fields[0].isdigit() and len(fields[0]) < 10:
            facts.on_gpus.append(
                (int(fields[0]), fields[1], Evidence("system/gpu-processes.txt", number, line.strip()))
            )
    for file in sorted((path / "system").rglob("*memory.events")):
        for line in read_text(file).splitlines():
            name, _, value = line.partition(" ")
            if value.strip().isdigit():
                facts.memory_events[name] = max(facts.memory_events.get(name, 0), int(value))
    module = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", read_text(path / "system/proc/driver/nvidia/version"))
    library = re.search(r"libcuda\.so\.(\d{3}\.\d+(?:\.\d+)?)", read_text(path / "system/libraries.txt"))
    facts.driver = (module.group(1) if module else "", library.group(1) if library else "")


def read_text(path: Path) -> str:
    """A short file, or its beginning; empty when there is none."""
    try:
        with path.open("rb") as stream:
            return stream.read(TEXT_LIMIT).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""


def read_json(path: Path) -> Any:
    """A JSON file's content; None when there is none, or when it is no JSON (a cut file)."""
    try:
        return json.loads(read_text(path) or "null")
    except (ValueError, RecursionError):
        return None


def _mappings(found: object) -> Iterable[Mapping[str, Any]]:
    return [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, list) else []


def _pairs(text: str) -> dict[str, str]:
    return {name: value for name, equals, value in (line.partition("=") for line in text.splitlines()) if equals}


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _figure(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _time(text: str) -> float | None:
    """Unix time of ``2026-11-29T101500Z`` or ``2026-11-29T10:15:00Z``."""
    try:
        return datetime.datetime.strptime(text.replace(":", ""), "%Y-%m-%dT%H%M%S%z").timestamp()
    except ValueError:
        return None
