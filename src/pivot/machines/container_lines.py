"""A container's file in /etc/pve/lxc: lines that stand behind the API's back, and what they do with cards."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pivot.findings import Finding, Severity
from pivot.machines.device_nodes import parse_majors

ERROR, WARNING = Severity.ERROR, Severity.WARNING
_ENTRY = re.compile(r"([\w.\[\]-]+)\s*[:=]\s*(.*)")
_RULE = re.compile(r"c\s+(\d+):\S+")
_ALL = re.compile(r"a\b|c\s+\*:")
# numbers that the kernel gives out when a driver is loaded (Documentation/admin-guide/devices.txt): the others' owners
# are the same everywhere
GIVEN_OUT = (range(234, 255), range(384, 512))
Wrong = tuple[str, Severity, str, str]
"""A finding's code, severity, message and fix."""


@dataclasses.dataclass(slots=True)
class Lines:
    """The main section as pairs, in order, and the raw lxc.* keys of each snapshot's section."""

    main: list[tuple[str, str]]
    snapshots: dict[str, set[str]]

    def all(self, key: str) -> list[str]:
        """Values of a key that may stand more than once."""
        return [value for name, value in self.main if name == key]

    def one(self, key: str) -> str:
        """The value of a key, empty where it is absent."""
        return next(iter(self.all(key)), "")


def parse(text: str) -> Lines:
    """The file; everything from the first ``[name]`` on belongs to snapshots."""
    found = Lines([], {})
    section = ""
    for raw in text.splitlines():
        line = raw.strip()
        if header := re.fullmatch(r"\[(.+)\]", line):
            section = header[1]
            found.snapshots[section] = set()
        elif entry := _ENTRY.match(line):
            if not section:
                found.main.append((entry[1], entry[2].strip()))
            elif entry[1].startswith("lxc."):
                found.snapshots[section].add(entry[1])
    return found


def container_findings(facts: Mapping[str, Any], vmid: int | None, host: str) -> list[Finding]:
    """Everything wrong with the lines of one container. facts: of node_facts.py; empty text: it does not exist yet."""
    if not facts["config"]:
        return []
    lines = parse(facts["config"])
    wrong = [*_rules(lines, parse_majors(facts["drivers"])), *_mounts(lines), *_sections(lines), *_rights(lines)]
    wrong += _pressure(facts["cgroup"])
    subject = f"{host}, container {vmid}"
    return [Finding(code, severity, subject, message, fix) for code, severity, message, fix in wrong]


def _rules(lines: Lines, majors: Mapping[str, int]) -> Iterator[Wrong]:
    """Raw rules of the control group, whose numbers do not follow the driver."""
    known = {number: name for name, number in majors.items()}
    rules = lines.all("lxc.cgroup2.devices.allow")
    numbers = {value: int(match[1]) for value in rules if (match := _RULE.match(value))}
    raw = any("/dev/nvidia" in value for key, value in lines.main if key == "lxc.mount.entry")
    works = (
        any("/dev/nvidia-uvm" in value for key, value in lines.main if key.startswith("dev"))
        or majors.get("nvidia-uvm") in numbers.values()
        or any(_ALL.match(value) for value in rules)
    )
    for value, number in numbers.items():
        owner = known.get(number, "")
        given_out = any(number in span for span in GIVEN_OUT)
        if not given_out or owner.startswith("nvidia") or (owner and (works or not raw)):
            continue
        now = ", ".join(f"{name} {major}" for name, major in sorted(majors.items()) if name.startswith("nvidia"))
        text = f"lxc.cgroup2.devices.allow: {value} allows {owner or 'no driver'}, now it is {now or 'none loaded'}" + (
            "" if works else ": CUDA ends with error 999 while nvidia-smi still works"
        )
        fix = "remove the line and give the device as dev[n] (proxmox_container_devices), which follows the driver"
        yield "HOST-CT-CGROUP", WARNING if works else ERROR, text, fix
    if lines.all("lxc.cgroup.devices.allow"):
        text = "lxc.cgroup.devices.allow is of version 1 of control groups, and is ignored"
        yield "HOST-CT-CGROUP1", WARNING, text, "remove the lines: dev[n] (proxmox_container_devices) brings its own"


def _mounts(lines: Lines) -> Iterator[Wrong]:
    """Devices that are mounted by raw lines."""
    given = {value.partition(",")[0].removeprefix("path=") for key, value in lines.main if re.fullmatch(r"dev\d+", key)}
    for value in lines.all("lxc.mount.entry"):
        fields = value.split()
        if len(fields) < 4 or not fields[0].startswith("/dev/nvidia"):
            continue
        if "create=file" in fields[3].split(","):
            text = (
                f"lxc.mount.entry: {fields[0]} with create=file leaves an empty file where the device should be, if"
                " the node does not have it yet when the container starts"
            )
            fix = "remove the line and give it as dev[n] (proxmox_container_devices)"
            yield "HOST-CT-CREATE", WARNING, text, fix
        if fields[0] in given:
            text = f"{fields[0]} is given twice, as dev[n] and as lxc.mount.entry: which of them counts is chance"
            yield "HOST-CT-TWICE", WARNING, text, "remove the raw line"


def _sections(lines: Lines) -> Iterator[Wrong]:
    """Raw lines that only a snapshot has: somebody appended them to the file's end."""
    own = {key for key, _ in lines.main}
    for name, keys in lines.snapshots.items():
        if lost := sorted(keys - own):
            text = f"{', '.join(lost)} stand only in the section of the snapshot {name}, where they do nothing"
            yield "HOST-CT-SNAPSHOT", WARNING, text, "put them above the first [section]; leave the snapshot as it is"


def _rights(lines: Lines) -> Iterator[Wrong]:
    if "nesting=1" not in lines.one("features").split(","):
        text = "features has no nesting=1: sandboxed units in the container end with status 226/NAMESPACE"
        yield "HOST-CT-NESTING", WARNING, text, "proxmox_container_features: nesting=1, then restart the container"
    if lines.one("lxc.apparmor.profile") == "unconfined" and lines.one("unprivileged") != "1":
        text = "the container is privileged and unconfined (lxc.apparmor.profile): its root is the node's"
        yield "HOST-CT-UNCONFINED", WARNING, text, "remove the line; a server needs neither"


def _pressure(cgroup: Mapping[str, str]) -> Iterator[Wrong]:
    """What the container's memory limit did since it started."""
    match = re.search(r"^oom_kill (\d+)$", cgroup.get("memory.events", ""), re.MULTILINE)
    if match and int(match[1]):
        text = f"{match[1]} processes were killed since it started, for its memory was full; other ranks wait for ever"
        yield "HOST-CT-OOM", WARNING, text, "raise proxmox_container_memory"
