"""The logs beneath a server: NCCL's, of one rank or all, and the kernel's with the Xids of the NVIDIA driver."""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import BinaryIO

from pivot.logs.log_kinds import kinds_of
from pivot.logs.log_lines import KEPT, SHOWN, Clock, Evidence, Line, Note, add_note, line_text, split_lines
from pivot.machines import xids

NCCL = re.compile(r"^(?:\[[^\]]*\] )?(\S+?):(\d+):(\d+) \[(\d+)\] (?:\S+:\d+ )?NCCL (\w+) ?(.*)")
NCCL_KINDS = frozenset(
    {"shm-full", "shm-name", "shm-denied", "volume-full", "memlock", "gpu-memory"}
    | {"devices", "driver", "cuda", "peer", "graph-file"}
)
_NCCL_INIT = re.compile(rb"\brank (\d{1,6}) nranks (\d{1,6})\b.*\bInit (START|COMPLETE)")


# --- NCCL


@dataclasses.dataclass(slots=True)
class NcclRank:
    """One process and device as NCCL's log shows it."""

    device: int
    rank: int | None = None
    started: Evidence | None = None
    complete: Evidence | None = None
    collectives: int = 0
    last: tuple[str, int, bytes] | None = None
    transports: set[bytes] = dataclasses.field(default_factory=set)


class NcclLog:
    """NCCL's lines, of one file per rank or of all ranks in one."""

    MAX_RANKS = 256
    WARNINGS = 24

    def __init__(self, name: str = "nccl") -> None:
        self.name = name
        self.ranks: dict[str, NcclRank] = {}
        self.version = ""
        self.warnings: list[tuple[str, Evidence]] = []
        self.warning_count = 0
        self.notes: dict[str, Note] = {}
        self.size: int | None = None
        self._by_prefix: dict[bytes, NcclRank] = {}

    def read(self, stream: BinaryIO, name: str | None = None) -> NcclLog:
        """Take all of a stream; several may be read one after another."""
        file, clock = name or self.name, Clock()
        for number, raw in split_lines(stream):
            if b" NCCL INFO " in raw:
                self.info(number, raw, file)
                continue
            if b"NCCL" not in raw:
                continue
            line = clock.line(number, raw)
            match = NCCL.search(line.text)
            if match:
                self.add(match, line, Evidence(file, number, line_text(raw)))
        return self

    def add(self, match: re.Match[str], line: Line, evidence: Evidence) -> None:
        """Take one line that NCCL has matched."""
        host, process, thread, device, level, text = match.groups()
        one = self._of(f"{host}:{process}:{thread} [{device}]".encode())
        if one is None:
            return
        one.last = (evidence.file, evidence.line, evidence.text.encode())
        if level == "WARN":
            self.warning_count += 1
            if len(self.warnings) < self.WARNINGS:
                self.warnings.append((text[:SHOWN], evidence))
            for kind, groups in kinds_of(text):
                if kind in NCCL_KINDS:
                    add_note(self.notes, kind, evidence, line.time, groups)
        if version := re.match(r"(?:NCCL )?version (\d[\w.+]*)", text):
            self.version = self.version or version.group(1)

    def info(self, number: int, raw: bytes, file: str = "") -> None:
        """Take one line of level INFO; a server can write hundreds of thousands of them."""
        at = raw.find(b" NCCL INFO ")
        one = self._by_prefix.get(raw[:at]) or self._of(raw[:at])
        if one is None:
            return
        text = raw[at + 11 : at + 400]
        one.last = (file or self.name, number, raw)
        via = text.find(b" via ")
        if via >= 0:
            name = text[via + 5 : via + 20].partition(b" ")[0].partition(b"/")[0]
            if name not in one.transports and len(one.transports) < 8:
                one.transports.add(name)
        elif b": opCount " in text[:40]:
            one.collectives += 1
        elif text.startswith(b"cuMem host "):
            evidence = Evidence(file or self.name, number, line_text(raw))
            for kind, groups in kinds_of(evidence.text):
                add_note(self.notes, kind, evidence, None, groups)
        elif b" nranks " in text and (init := _NCCL_INIT.search(text)):
            self.size = max(self.size or 0, int(init.group(2)))
            evidence = Evidence(file or self.name, number, line_text(raw))
            one.rank = int(init.group(1))
            if init.group(3) == b"START":
                one.started = one.started or evidence
            else:
                one.complete = one.complete or evidence

    def _of(self, prefix: bytes) -> NcclRank | None:
        """The rank of a line's beginning, `host:process:thread [device]`; None for another text, or too many ranks."""
        where, _, device = prefix.rpartition(b" ")
        process = where.rpartition(b" ")[2].rpartition(b":")[0]
        if not process or not re.fullmatch(rb"\[\d{1,5}\]", device):
            return None
        key = (process + device).decode("utf-8", "replace")
        if key not in self.ranks and len(self.ranks) >= self.MAX_RANKS:
            return None
        one = self.ranks.setdefault(key, NcclRank(int(device[1:-1])))
        if len(self._by_prefix) < 8 * self.MAX_RANKS:  # with a time before it every line has another one
            self._by_prefix[prefix] = one
        return one

    @property
    def collectives(self) -> int:
        """How many collectives all ranks have logged."""
        return sum(rank.collectives for rank in self.ranks.values())

    @property
    def complete(self) -> list[NcclRank]:
        """Ranks whose communicator is there."""
        return [rank for rank in self.ranks.values() if rank.complete]

    @property
    def missing(self) -> list[NcclRank]:
        """Ranks that began and did not get there, while the log shows beginnings."""
        return [rank for rank in self.ranks.values() if rank.started and not rank.complete]


# --- torch's flight recorder


@dataclasses.dataclass(frozen=True, slots=True)
class Last:
    """The last collective of a rank in a group. sequence: which one of the group's; pending: it did not come back."""

    rank: int
    group: str
    sequence: int
    name: str
    pending: bool
    evidence: Evidence


class FlightLog:
    """Dumps of the flight recorder, one a rank, as JSON."""

    def __init__(self) -> None:
        self.last: list[Last] = []
        self.empty: list[Evidence] = []

    def add(self, dump: object, rank: int, file: str) -> None:
        """Take the dump of one rank; what is no dump says nothing."""
        entries = dump.get("entries") if isinstance(dump, dict) else None
        if not isinstance(entries, list):
            return
        if not entries:
            self.empty.append(Evidence(file, 0, "no entries"))
        groups: dict[str, Last] = {}
        for entry in entries:
            sequence = entry.get("collective_seq_id") if isinstance(entry, dict) else None
            if not isinstance(sequence, int):
                continue
            group, name, state = (str(entry.get(key)) for key in ("process_group", "profiling_name", "state"))
            evidence = Evidence(file, 0, f"rank {rank}, group {group}: {name} {sequence} is {state}"[:SHOWN])
            if group not in groups or sequence >= groups[group].sequence:
                groups[group] = Last(rank, group, sequence, name, state != "completed", evidence)
        self.last += groups.values()

    def behind(self) -> list[Last]:
        """Ranks that are not where the others of their group wait: at an earlier collective, or at another one."""
        return [last for last in self.last if last not in self._waiting() and self._waited_for(last)]

    def ahead(self) -> list[Last]:
        """Ranks that wait for those."""
        groups = {last.group for last in self.behind()}
        return [last for last in self._waiting() if last.group in groups]

    def _waiting(self) -> list[Last]:
        """Those at the furthest collective of a group, which has not come back; where they differ, the most of them."""
        found = []
        for group in dict.fromkeys(last.group for last in self.last):
            members = [last for last in self.last if last.group == group]
            most = max(last.sequence for last in members)
            there = [last for last in members if last.sequence == most and last.pending]
            names = collections.Counter(last.name for last in there).most_common(1)
            found += [last for last in there if last.name == names[0][0]]
        return found

    def _waited_for(self, last: Last) -> bool:
        return any(one.group == last.group for one in self._waiting())


# --- the kernel


@dataclasses.dataclass(frozen=True, slots=True)
class Xid:
    """A GPU's error report. klass: "application", "memory", "fatal" or "unknown" (data/xids.yml), and "recovered" once
    the driver has said that the card needs no action any more.
    """

    device: str
    number: int
    klass: str
    evidence: Evidence


_BOOT = re.compile(r"\bLinux version \d+\.\d+\S* \(")
_LOST = re.compile(r"GPU has fallen off the bus|NVRM: GPU at \S+ has been lost")
_ADDRESS = re.compile(r"\b([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})\b")
# whose process was killed, of a container or a virtual machine, and which
_VICTIM = re.compile(r"oom-kill:.*task_memcg=/(?:lxc|qemu\.slice)/(\d+)\b.*,pid=(\d+)")
_KILLED = re.compile(r"Killed process (\d+)\b")
_KERNEL = {
    "host-memory": re.compile(r"Out of memory: Killed process|oom-kill:|Memory cgroup out of memory"),
    "driver": re.compile(r"NVRM: API mismatch"),
    "link": re.compile(r"AER: .*(?:Uncorrect|Fatal)|Surprise Link Down|PCIe Bus Error: severity=(?:Uncorrect|Fatal)"),
    "modules": re.compile(
        r"RmInitAdapter failed|rm_init_adapter failed|requires use of the NVIDIA open kernel modules"
        r"|does not include the required GPU"
    ),
    "late-device": re.compile(r"Could not get mode or device ID|/dev/nvidia\S* is not a device"),  # Proxmox's own hook
    "segfault": re.compile(r"segfault at|general protection fault|traps: "),
    "missed": re.compile(r"[Mm]issed (\d+) kernel messages|Suppressed (\d+) messages"),
}


class KernelLog:
    """Kernel messages since boot, from dmesg or the journal. container: the id on the node, "" where it is not known.

    lost: cards that fell off the bus, "" for one that the line does not name.
    """

    def __init__(self, name: str = "kernel.log", container: str = "") -> None:
        self.name = name
        self.container = container
        self.notes: dict[str, Note] = {}
        self.lost: dict[str, Evidence] = {}
        self._xids: dict[tuple[str, int], list[Xid]] = {}  # of each card and number the first and the last
        self._others: set[str] = set()  # killed processes that are none of the container's

    @property
    def xids(self) -> list[Xid]:
        """Error reports, of each card and number the first and the last: a program can write hundreds at once."""
        return [xid for found in self._xids.values() for xid in found]

    def read(self, stream: BinaryIO) -> KernelLog:
        """Take all of a stream."""
        clock = Clock()
        for number, raw in split_lines(stream):
            line = clock.line(number, raw)
            if _BOOT.search(line.text):  # what was before it is of another boot
                self.notes, self.lost, self._xids = {}, {}, {}
            evidence = Evidence(self.name, number, line_text(raw))
            self._card(line.text, evidence)
            for kind, pattern in _KERNEL.items():
                if pattern.search(line.text) and not (kind == "host-memory" and self._of_another(line.text)):
                    add_note(self.notes, kind, evidence, line.time)
        return self

    def _card(self, text: str, evidence: Evidence) -> None:
        """What a line says about one card."""
        if match := xids.LINE.search(text):
            address, number = match[1].lower(), int(match[2])
            if xids.is_recovered(number, match[3]):
                self._recovered(address)
            elif (address, number) in self._xids or len(self._xids) < KEPT:
                first = [xid for xid in self._xids.get((address, number), []) if xid.klass != "recovered"][:1]
                self._xids[address, number] = [*first, Xid(address, number, xids.kind(number), evidence)]
        elif _LOST.search(text) and len(self.lost) < KEPT:
            named = _ADDRESS.search(text)
            self.lost.setdefault(named[1].lower() if named else "", evidence)

    def _recovered(self, address: str) -> None:
        self.lost.pop(address, None)
        for (card, _), found in self._xids.items():
            if card == address:
                found[:] = [dataclasses.replace(xid, klass="recovered") for xid in found]

    def _of_another(self, text: str) -> bool:
        """Whether a line about memory that ran out is of another container or a virtual machine."""
        if (victim := _VICTIM.search(text)) and self.container:
            other = victim[1] != self.container
            (self._others.add if other and len(self._others) < KEPT else self._others.discard)(victim[2])
            return other
        killed = _KILLED.search(text)
        return killed is not None and killed[1] in self._others
