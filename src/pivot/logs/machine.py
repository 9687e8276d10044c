"""What the files below ``system/`` of a bundle say about container and node: volumes, devices, GPUs, memory, driver."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Iterator
from pathlib import Path

from pivot.logs.log_lines import Evidence, line_text

TEXT_LIMIT = 8 << 20  # bytes of a file that is read as a whole; logs are streamed
VERSION = r"(\d{3}\.\d+(?:\.\d+)?)\b"
# devices whose major the driver is given when it is loaded, and its name in /proc/devices
DRIVERS = (("/dev/nvidia-uvm", "nvidia-uvm"), ("/dev/nvidia-caps/", "nvidia-caps"))


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceNode:
    """A path below /dev that is named after NVIDIA. major: None for what is no device."""

    path: str
    major: int | None
    is_file: bool
    evidence: Evidence

    @property
    def driver(self) -> str:
        """Who gives it its major, "" where that is fixed."""
        return next((name for start, name in DRIVERS if self.path.startswith(start)), "")

    def is_stale(self, majors: dict[str, int]) -> bool:
        """Whether its driver has another major now."""
        return self.major is not None and self.driver in majors and majors[self.driver] != self.major


@dataclasses.dataclass(slots=True)
class Card:
    """A GPU as ``nvidia-smi -q`` shows it; None where it does not say. lanes: now, and as many as there are."""

    name: str
    evidence: Evidence
    memory_mib: int | None = None
    bar1_mib: int | None = None
    lanes: tuple[int, int] | None = None


@dataclasses.dataclass(slots=True)
class Machine:
    """What is known; what the bundle lacks is empty."""

    volumes: list[tuple[str, str, int, Evidence]] = dataclasses.field(default_factory=list)  # mount, type, % used, line
    listing: list[tuple[str, float, str, Evidence]] = dataclasses.field(default_factory=list)  # path, unix time, size
    on_gpus: list[tuple[int, str, Evidence]] = dataclasses.field(default_factory=list)  # pid, name, line
    devices: list[DeviceNode] = dataclasses.field(default_factory=list)
    majors: dict[str, int] = dataclasses.field(default_factory=dict)
    cards: list[Card] = dataclasses.field(default_factory=list)
    memory_events: dict[str, int] = dataclasses.field(default_factory=dict)
    module: str = ""  # versions
    library: str = ""
    closed: Evidence | None = None  # that the kernel modules are not the open ones
    compat: Evidence | None = None  # a libcuda of a compat directory
    command_line: str = ""  # the kernel's


def read(bundle: Path) -> Machine:
    """The machine of a bundle's directory."""
    system = bundle / "system"
    found = Machine(
        list(_volumes(system)),
        list(_listing(system)),
        list(_on_gpus(system)),
        list(_devices(system)),
        {name: int(number) for number, name in re.findall(r"(?m)^ *(\d{1,5}) (\S+)$", text(system / "proc/devices"))},
        _cards(system),
        command_line=text(system / "proc/cmdline").strip(),
    )
    for file in sorted(system.rglob("*memory.events")):
        for name, value in re.findall(r"(?m)^(\w+) (\d{1,18})$", text(file)):
            found.memory_events[name] = max(found.memory_events.get(name, 0), int(value))
    _driver(found, system)
    return found


def _driver(found: Machine, system: Path) -> None:
    version = text(system / "proc/driver/nvidia/version")
    for line in _lines(system, "libraries.txt"):
        library = re.search(rf"libcuda\.so\.{VERSION}", line.text)
        if "/compat/" in line.text and "libcuda" in line.text:
            found.compat = found.compat or line
        elif library and not found.library:
            found.library = library.group(1)
    if module := re.search(rf"\b{VERSION}", version):
        found.module = module.group(1)
        if "Open Kernel Module" not in version:
            words = version.splitlines()[0][:200]
            found.closed = Evidence("system/proc/driver/nvidia/version", 1, words)


def _volumes(system: Path) -> Iterator[tuple[str, str, int, Evidence]]:
    for line in _lines(system, "df.txt"):
        fields = line.text.split()
        used = next((index for index, field in enumerate(fields) if re.fullmatch(r"\d{1,3}%", field)), 0)
        if used >= 4 and used + 1 < len(fields):
            kind = fields[1] if used >= 5 else ""  # without -T there is no type
            yield " ".join(fields[used + 1 :]), kind, int(fields[used][:-1]), line


def _listing(system: Path) -> Iterator[tuple[str, float, str, Evidence]]:
    for line in _lines(system, "listing.txt"):
        size, _, rest = line.text.partition(" ")
        when, _, name = rest.strip().partition(" ")
        if size.isdigit() and (time := unix_time(when)) is not None:
            yield name, time, size, line


def _on_gpus(system: Path) -> Iterator[tuple[int, str, Evidence]]:
    for line in _lines(system, "gpu-processes.txt"):
        fields = [field.strip() for field in line.text.split(",")]
        if len(fields) > 1 and fields[0].isdecimal() and len(fields[0]) < 10:
            yield int(fields[0]), fields[1], line


def _devices(system: Path) -> Iterator[DeviceNode]:
    """Lines of ``ls -lR /dev``."""
    directory = "/dev"
    for line in _lines(system, "devices.txt"):
        if re.fullmatch(r"/dev\S*:", line.text):
            directory = line.text[:-1]
            continue
        fields = line.text.split()
        path = f"{directory}/{fields[-1]}"
        if not path.startswith("/dev/nvidia") or len(fields) < 6:
            continue
        major = re.search(r"\s(\d{1,5}), +\d+ ", line.text)
        if line.text[0] == "c" and major:
            yield DeviceNode(path, int(major.group(1)), is_file=False, evidence=line)
        elif line.text[0] == "-":
            yield DeviceNode(path, None, is_file=True, evidence=line)


def _cards(system: Path) -> list[Card]:
    """Of ``nvidia-smi -q``: headings stand alone on their line, values behind a colon."""
    cards: list[Card] = []
    heading, most = "", 0
    for line in _lines(system, "gpus.txt"):
        name, colon, value = (part.strip() for part in line.text.partition(" : "))
        if card := re.fullmatch(r"GPU ([0-9A-Fa-f]+:[0-9A-Fa-f:.]+)", line.text):
            cards.append(Card(card.group(1), line))
        elif not colon:
            heading = name
        elif cards and (number := re.match(r"(\d{1,9})(?: MiB|x)$", value)):
            amount, here = int(number.group(1)), cards[-1]
            if (heading, name) == ("FB Memory Usage", "Total"):
                here.memory_mib = amount
            elif (heading, name) == ("BAR1 Memory Usage", "Total"):
                here.bar1_mib, here.evidence = amount, line
            elif (heading, name) == ("Link Width", "Max"):
                most = amount
            elif (heading, name) == ("Link Width", "Current"):
                here.lanes = (amount, most)
    return cards


def _lines(system: Path, name: str) -> Iterator[Evidence]:
    """The lines of a file below system/ that are not empty, blanks around them left out."""
    for number, line in enumerate(text(system / name).splitlines(), start=1):
        if words := line_text(line.encode()):
            yield Evidence(f"system/{name}", number, " ".join(words.split()) if name == "df.txt" else words)


def text(path: Path, limit: int = TEXT_LIMIT) -> str:
    """A short file, or its beginning; empty when there is none."""
    try:
        with path.open("rb") as stream:
            return stream.read(limit).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""


def unix_time(stamp: str) -> float | None:
    """Unix time of ``2026-11-29T101500Z`` or ``2026-11-29T10:15:00Z``."""
    try:
        return (
            datetime.datetime.strptime(stamp.replace(":", ""), "%Y-%m-%dT%H%M%S%z").astimezone(datetime.UTC).timestamp()
        )
    except (ValueError, OverflowError):  # no time, or one that UTC has no year for
        return None
