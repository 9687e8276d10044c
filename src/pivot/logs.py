"""Logs → facts: phases of a start, what was served, what went wrong, each with the lines that say so.

Every reader takes a binary stream of any length and keeps a bounded summary of it. Texts it does not know change
nothing; cut lines, colours, carriage returns, interleaved ranks and lines of megabytes are ordinary input.
The wording is that of SGLang 0.5.9 to 0.5.23, NCCL 2.x, systemd and the NVIDIA driver's kernel messages.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO

READY = "The server is fired up and ready to roll"
BLOCK = 1 << 20
SHM = "/dev/shm"  # noqa: S108 - a text that is looked for
MAX_LINE = 1 << 14  # bytes of one line that are looked at
SHOWN = 300  # characters of a line that serve as evidence
KEPT = 200  # milestones of one run
RUNS = 24  # runs of one log that are kept in detail
_BEGIN = "Load weight begin"
_END = re.compile(r"Load weight end\b.*?\btype=(\w+)")
_CAPTURE = re.compile(r"Capture [\w \-]*?\b(begin|end)\b")
_OWN = re.compile(r"\[(?:(\d{4}-\d\d-\d\d)[ T])?(\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?((?: [A-Z]+\d+)*)\] ?")
_ERROR = re.compile(r"^(?:\[[^\]]*\] )?([A-Za-z_.]*(?:Error|Exception)\b: .*|.*error: .*)$")
# what every start prints on the way down, whatever the cause
_FOLLOW_UP = ("SIGQUIT", "Child process", "EOFError", "scheduler died during initialization", "Initialization failed")


# --- phases and cause of one start, from messages that somebody else has read


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A part of a start: what it was and how many seconds it took."""

    name: str
    seconds: float


def phases(lines: Sequence[tuple[float, str]]) -> list[Phase]:
    """Phases of one start from its journal: (unix time, message) pairs, the first being the start itself.

    Every milestone ends a phase, so that the seconds add up to the whole start. Of several ranks, which all print
    the same milestones, the first that is seen counts.
    """
    found: list[Phase] = []
    if not lines:
        return found
    last = lines[0][0]
    leader: str | None = None

    def end(name: str, now: float) -> None:
        nonlocal last
        found.append(Phase(name, round(now - last, 1)))
        last = now

    for now, message in lines:
        loaded, capture = _END.search(message), _CAPTURE.search(message)
        if READY in message:
            end("warm-up", now)
            break
        if not (loaded or capture or _BEGIN in message):
            continue
        prefix = _OWN.match(message)
        rank = prefix.group(4).strip() if prefix else ""
        leader = rank if leader is None else leader
        if rank != leader:
            continue
        if loaded:
            end(f"weights of {loaded.group(1)}", now)
        elif capture:
            end("CUDA graphs" if capture.group(1) == "end" else "memory pools", now)
        else:
            end("imports" if not found else "memory pools", now)
    return found


def cause(messages: Sequence[str]) -> str | None:
    """The message that explains a failed start: the first error that is not the consequence of another."""
    for message in messages:
        match = _ERROR.match(message.strip())
        if match and not any(word in message for word in _FOLLOW_UP):
            return match.group(1)
    return None


# --- lines


@dataclasses.dataclass(frozen=True, slots=True)
class Evidence:
    """A line of a file, from 1, as it stands there (colours and what is too long left out); 0: of the whole file."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        """As compilers name a place."""
        return f"{self.file}:{self.line}: {self.text}" if self.line else f"{self.file}: {self.text}"


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A line without its prefixes. time: unix seconds, None when the line has none; zone: whether that is sure.

    rank: as SGLang writes it ("TP3", "DP1 TP0"), "" for the main process; source: who wrote it, by the journal.
    """

    number: int
    time: float | None
    zone: bool
    rank: str
    source: str
    text: str


_COLOUR = re.compile(rb"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])?")
_JOURNAL = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))? ?(Z|UTC|[+-]\d\d:?\d\d)?"
    r"[ \t]+(?:\S+ ([^\s:\[\]]+(?:\[\d+\])?): ?|)"
)


def split_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    r"""Numbers and contents of the lines, without line ends and colours; what follows a ``\r`` counts as a line.

    At most MAX_LINE bytes of each, so that memory stays constant.
    """
    number, rest, skipping = 1, b"", False
    while chunk := stream.read(BLOCK):
        block = rest + chunk
        lines = block.split(b"\n")
        rest = lines.pop()
        plain = b"\x1b" not in block and b"\r" not in block
        for line in lines:
            if plain and line and not skipping:
                yield number, line if len(line) <= MAX_LINE else line[:MAX_LINE]
            elif line and not skipping:
                yield from ((number, part) for part in _parts(line))
            skipping = False
            number += 1
        if len(rest) > BLOCK or skipping:  # a line of megabytes: its beginning is looked at, the rest passes by
            yield from ((number, part) for part in _parts(b"" if skipping else rest))
            rest, skipping = b"", True
    yield from ((number, part) for part in _parts(rest))


def _parts(line: bytes) -> Iterator[bytes]:
    line = line[: 8 * MAX_LINE]
    if b"\x1b" in line:
        line = _COLOUR.sub(b"", line)
    for part in line.split(b"\r"):
        if part:
            yield part[:MAX_LINE]


class Clock:
    """Times of one log's lines. A log without dates counts seconds, over midnight too."""

    def __init__(self) -> None:
        self._day = 0
        self._before: float | None = None
        self._dates: dict[str, int] = {}

    def line(self, number: int, raw: bytes) -> Line:
        """The line in its parts; the journal's time wins over the message's own, because it names its zone."""
        text = raw.decode("utf-8", "replace")
        time, zone, source, rank = None, False, "", ""
        outer = _JOURNAL.match(text)
        if outer:
            time, zone = self._at(outer.group(1), outer.group(2), outer.group(3)), outer.group(4) is not None
            time -= _offset(outer.group(4))
            source = outer.group(5) or ""
            text = text[outer.end() :]
        own = _OWN.match(text)
        if own:
            if time is None:
                time = self._at(own.group(1), own.group(2), own.group(3))
            rank = own.group(4).strip()
            text = text[own.end() :]
        return Line(number, time, zone, rank, source, text)

    def _at(self, date: str | None, clock: str, fraction: str | None) -> float:
        seconds = int(clock[:2]) * 3600 + int(clock[3:5]) * 60 + int(clock[6:8]) + float(f"0.{fraction or 0}")
        if date is not None:
            if date not in self._dates:
                self._dates = {date: _midnight(date)}  # one day at a time is enough
            return self._dates[date] + seconds
        if self._before is not None and seconds < self._before - 43200:
            self._day += 1
        self._before = seconds
        return self._day * 86400 + seconds


def _midnight(date: str) -> int:
    try:
        day = datetime.date.fromisoformat(date)
    except ValueError:  # digits that are no date
        return 0
    return (day - datetime.date(1970, 1, 1)).days * 86400


def _offset(zone: str | None) -> int:
    if zone is None or zone in ("Z", "UTC"):
        return 0
    digits = zone[1:].replace(":", "")
    return (1 if zone[0] == "+" else -1) * (int(digits[:2]) * 3600 + int(digits[2:]) * 60)


# --- what a log says


@dataclasses.dataclass(slots=True)
class Note:
    """Something that lines have said: how often, the first and the last of them, and what the first captured."""

    first: Evidence
    last: Evidence
    count: int = 1
    time: float | None = None
    last_time: float | None = None
    groups: tuple[str, ...] = ()


def _kind(hints: str, pattern: str) -> tuple[tuple[str, ...], re.Pattern[str]]:
    """Texts of which one has to be in a line (plain searches are quick), and what the line looks like then."""
    return tuple(hints.split("|")), re.compile(pattern)


# kind → what a line of it looks like; a line counts for every kind that it matches
NOTES: Mapping[str, tuple[tuple[str, ...], re.Pattern[str]]] = {
    "watchdog": _kind(
        "atchdog timeout", r"(?:(\w+) )?[Ww]atchdog timeout \(self\.watchdog_timeout=([\d.]+)(?!.*soft=T)"
    ),
    "watchdog-soft": _kind("soft=True", r"(?:(\w+) )?[Ww]atchdog timeout \(self\.watchdog_timeout=([\d.]+), .*soft=T"),
    "gpu-memory": _kind(
        "OutOfMemory|CUDA out of mem|CUDA error: out|Not enough memory|CUDA calloc|CUDA host alloc|CUDA malloc"
        "|ALLOC_FAILED|cudaErrorMemory|Cuda failure",
        r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|Not enough memory\. Please try"
        r"|to CUDA (?:host )?\w+|CUBLAS_\w+ALLOC_FAILED|cudaErrorMemoryAllocation|Cuda failure '?\d* ?'?out of memory",
    ),
    "kv-memory": _kind(
        "out of memory. Try|runs out of mem|KV cache pool is full",
        r"(?:Prefill|Decode) out of memory|alloc_\w+ runs out of memory|KV cache pool is full\. Retract",
    ),
    "host-memory": _kind(
        "Killed process|oom-kill|OOM killer|bad_alloc|Cannot allocate mem",
        r"Out of memory: Killed process|oom-kill|by the OOM killer|std::bad_alloc|Cannot allocate memory",
    ),
    "unbalanced": _kind("capacity is unbalanced", r"memory capacity is unbalanced"),
    "shm-full": _kind(
        f"{SHM}|Bus error|SIGBUS",
        rf"{SHM}\S*.*(?:No space left|\(28\)|errno 28)|(?:No space left|Errno 28).*{SHM}|Bus error|SIGBUS",
    ),
    "shm-name": _kind("shared memory segment", r"(?:attaching to|creating) shared memory segment (.*?) ?\(size 0\)"),
    "shm-denied": _kind(f"{SHM}|shm_open", rf"(?:{SHM}|shm_open).*[Pp]ermission denied"),
    "volume-full": _kind(
        "No space left|Errno 28|Disk quota|ENOSPC", r"No space left on device|Errno 28\b|Disk quota exceeded|ENOSPC"
    ),
    "driver": _kind(
        "ersion mismatch|API mismatch|CUDA driver version|forward compatibility|unsupported display driver",
        r"[Dd]river/library version mismatch|API mismatch|CUDA driver version is insufficient"
        r"|forward compatibility was attempted|unsupported display driver / cuda driver combination",
    ),
    "cuda": _kind(
        "CUDA error|cudaError|Cuda failure|CUDA initialization|illegal memory|device-side assert",
        r"CUDA error: (?!out of memory)|cudaError(?!MemoryAllocation)\w+|Cuda failure (?!.*out of memory)"
        r"|CUDA initialization:|illegal memory access|device-side assert",
    ),
    "no-kernel": _kind(
        "kernel image|rchitecture|not supported on ",
        r"no kernel image is available|[Uu]nsupported architecture|is not supported on (?:SM|sm_?)\d+",
    ),
    "jit": _kind(
        "ninja|building extension|undefined symbol|ELF|.cache/|.so: cannot",
        r"ninja: build stopped|[Ee]rror building extension|undefined symbol: |(?:invalid|bad) ELF"
        r"|\.cache/\S*(?:flashinfer|triton|tvm-ffi|torch_extensions|inductor)\S*.*(?:rror|No such file|cannot open)"
        r"|(?:flashinfer|triton|tvm.ffi|torch_extensions|inductor)\S*/\S+\.so: cannot open",
    ),
    "peer": _kind(
        "peer access|P2P is |p2p access|cudaIpc|allreduce is disabled",
        r"peer access (?:is not|between)|P2P is (?:disabled|not supported)|p2p access|cudaIpc\w+.*(?:fail|rror)"
        r"|[Cc]ustom allreduce is disabled because",
    ),
    "port": _kind(
        "lready in use|lready occupied|not available", r"already (?:in use|occupied)|port \d+ is not available"
    ),
    "dead": _kind(
        "crashed with exit|scheduler is dead|scheduler died|terminated with|prematurely with",
        r"Subprocess (\S+) \(pid=\d+\) crashed with exit code (-?\d+)"
        r"|Rank (\d+) scheduler (?:is dead|died during initialization(?: \(exit code: (-?\d+)\))?)"
        r"|Scheduler or DataParallelController (\d+) terminated with (-?\d+)|exited prematurely with code (-?\d+)",
    ),
    "hit": _kind("hit an exception", r"(\w+) hit an exception"),
    "quit": _kind("sigquit|SIGQUIT", r"[Rr]eceived sigquit|SIGQUIT received|Triggering SIGQUIT"),
    "asked": _kind("SIGTERM received|Gracefully exit", r"SIGTERM received|Gracefully exiting"),
    "health-failed": _kind("Health check failed", r"Health check failed\. Server couldn't get a response"),
    "warmup-failed": _kind("warmup error", r"Initialization failed\. warmup error"),
    "collective": _kind(
        "collective operation timeout",
        r"Watchdog caught collective operation timeout: WorkNCCL\((?:[^)]*OpType=(\w+))?",
    ),
    "unexpected-weight": _kind(
        "unexpected weight|not initialized", r"skipping unexpected weight|[Ss]ome weights? .*not initialized"
    ),
    "simulated": _kind("SGLANG_SIMULATE", r"SGLANG_SIMULATE_ACC\w*"),
    "suppressed": _kind("Suppressed ", r"Suppressed (\d+) messages from"),
    "missed": _kind("issed ", r"[Mm]issed (\d+) (?:kernel )?messages"),
    "exited": _kind("process exited, code", r"[Mm]ain process exited, code=(\w+), status=(\S+)"),
    "failed": _kind("Failed with result", r"Failed with result '([\w-]+)'"),
    "gave-up": _kind("repeated too quickly|start-limit-hit", r"repeated too quickly|start-limit-hit"),
    "start-timeout": _kind(
        "operation timed out|no token was generated",
        # by systemd, or by the guard of Pivot's unit
        r"[Ss]tart(?:-post)? operation timed out|no token was generated within [\d.]+ s",
    ),
    "restart": _kind("restart counter", r"Scheduled restart job, restart counter is at (\d+)"),
    "left-behind": _kind("left-over process", r"[Ff]ound left-over process (\d+)"),
}
_SYSTEMD = re.compile(r"(Starting|Started|Stopping|Stopped) (\S+)|(\S+): (Deactivated successfully)")
_EXCEPTION = re.compile(r"(?:\w+\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault|Timeout))(?:: ?.*)?$")
_NCCL = re.compile(r"^(?:\[[^\]]*\] )?(\S+?):(\d+):(\d+) \[(\d+)\] (?:\S+:\d+ )?NCCL (\w+) ?(.*)")
_NCCL_INIT = re.compile(rb"\brank (\d{1,6}) nranks (\d{1,6})\b.*\bInit (START|COMPLETE)")
_ACCESS = re.compile(r'"GET /(health\w*)[ ?][^"]*" (\d{3})|GET /(health\w*) (\d{3})')
_MILESTONES = "Load weight |Capture |fired up|max_total_num_tokens|server_args|ServerArgs(|systemd[|/health"
_FAILURES = "Error|Exception|error: |Interrupt|Exit|Fault|Timeout"


def _any_of(words: Iterable[str]) -> str:
    """A pattern for any of the words, common beginnings taken together: three times as quick as one after another."""
    by_first: dict[str, set[str]] = {}
    for word in words:
        by_first.setdefault(word[:1], set()).add(word[1:])
    if "" in by_first:
        return ""
    branches = [re.escape(first) + _any_of(rests) for first, rests in sorted(by_first.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


# a line without one of these says nothing that is kept
_HINT = re.compile(
    _any_of(
        [*_MILESTONES.split("|"), *_FAILURES.split("|"), *(word for hints, _ in NOTES.values() for word in hints)]
    ).encode()
)
_POOL = re.compile(r"max_total_num_tokens=(\d+)")
_AVAILABLE = re.compile(r"avail(?:able)?[_ ](?:gpu_|cpu_)?mem=([\d.]+)")
_ELAPSED = re.compile(r"elapsed=([\d.]+) ?s")
_QUANT = re.compile(r"\bquant(?:ization)?=([^,\s]+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Weights that were loaded. seconds, available: as logged, GB; None where the line does not say."""

    model: str
    seconds: float | None
    quant: str
    available: float | None
    evidence: Evidence


Raw = tuple[int, bytes]  # a line's number and contents: made into evidence only when somebody asks


class Decode:
    """What the decode lines say: acceptance and speed, whole, at the end, and by the length of the context."""

    def __init__(self) -> None:
        self.lines = 0
        self.with_length = 0
        self.total = 0.0
        self.lowest: tuple[float, Raw] | None = None
        self.highest: tuple[float, Raw] | None = None
        self.recent: collections.deque[tuple[float, Raw]] = collections.deque(maxlen=5)
        self.steps: collections.Counter[float] = collections.Counter()  # accept length in steps of 0.25 → lines
        # power of two of the tokens a request holds → lines, sum of accept lengths, the last line
        self.by_context: dict[int, tuple[int, float, Raw]] = {}
        self.speed_total = 0.0
        self.speeds = 0
        self.last: Raw | None = None

    @property
    def accept_length(self) -> float | None:
        """Mean over the lines, None without speculation."""
        return self.total / self.with_length if self.with_length else None

    @property
    def speed(self) -> float | None:
        """Mean generated tokens per second over the lines."""
        return self.speed_total / self.speeds if self.speeds else None

    def add(self, number: int, raw: bytes, start: int) -> None:
        """Take one line; start: where its message begins."""
        self.lines += 1
        self.last = place = (number, raw)
        speed = _figure(raw, b"gen throughput (token/s): ", start)
        if speed is not None:
            self.speeds += 1
            self.speed_total += speed
        value = _figure(raw, b", accept len: ", start)
        if value is None:
            return
        self.with_length += 1
        self.total += value
        self.recent.append((value, place))
        self.steps[min(int(value * 4 + 0.5) / 4, 64.0)] += 1
        if self.lowest is None or value < self.lowest[0]:
            self.lowest = (value, place)
        if self.highest is None or value > self.highest[0]:
            self.highest = (value, place)
        running, tokens = _figure(raw, b"#running-req: ", start), _figure(raw, b"token: ", start)
        if running and tokens:
            bucket = int(tokens / running).bit_length()
            count, total, _ = self.by_context.get(bucket, (0, 0.0, place))
            self.by_context[bucket] = (count + 1, total + value, place)


def _figure(raw: bytes, name: bytes, start: int) -> float | None:
    """The number behind a name, None when there is none; digits and dots alone, so that nothing is infinite."""
    begin = raw.find(name, start)
    if begin < 0:
        return None
    begin += len(name)
    end = raw.find(b",", begin)
    text = raw[begin : end if end >= 0 else None]
    if len(text) > 15 or not text[:1].isdigit():
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _number(text: str) -> float:
    """A logged figure; digits and dots that are no number count as nothing."""
    try:
        return float(text)
    except ValueError:
        return 0.0


class Run:
    """One run of the server, from its start to its end, or to the end of the log."""

    def __init__(self, evidence: Evidence | None, time: float | None) -> None:
        self.begin = evidence
        self.begin_time = time
        self.first_time: float | None = time
        self.last_time: float | None = time
        self.last: Raw | None = None
        self.zone = False
        self.milestones: list[tuple[float, str, Evidence]] = []
        self.leader: str | None = None  # the rank whose milestones count
        self.loads: list[Load] = []
        self.loading: Evidence | None = None
        self.capturing: Evidence | None = None
        self.pool_tokens: int | None = None
        self.ready: Evidence | None = None
        self.ready_time: float | None = None
        self.decode = Decode()
        self.notes: dict[str, Note] = {}
        self.errors: list[tuple[str, Evidence, str]] = []  # exception with its message, line, rank
        self.error_count = 0
        self.health_good: Note | None = None
        self.health_bad: Note | None = None
        self.ended: Evidence | None = None
        self.clean = False  # ended because somebody asked it to

    @property
    def phases(self) -> list[Phase]:
        """Phases of its start; the first one counts from the start, or from the first line that has a time."""
        marks = [(time, text) for time, text, _ in self.milestones]
        return phases([(self.first_time, ""), *marks]) if marks and self.first_time is not None else []

    @property
    def start_seconds(self) -> float | None:
        """How long the start took; None while it is not ready, or without times."""
        if self.ready_time is None or self.first_time is None:
            return None
        return round(self.ready_time - self.first_time, 1)

    @property
    def cause(self) -> tuple[str, Evidence] | None:
        """The first error that is not the consequence of another."""
        for text, evidence, _ in self.errors:
            if not any(word in text for word in _FOLLOW_UP):
                return text, evidence
        return None

    def note(self, kind: str) -> Note | None:
        """What was said of this kind."""
        return self.notes.get(kind)


class ServerLog:
    """A server's log or its unit's journal, read line by line; `runs` has the last RUNS runs, the current one last."""

    def __init__(self, name: str = "server.log", unit: str = "") -> None:
        self.name = name
        self.unit = unit
        self.runs: collections.deque[Run] = collections.deque(maxlen=RUNS)
        self.starts = 0
        self.cuts: list[Evidence] = []
        self.gaps: dict[str, Note] = {}
        self.lines = 0
        self.nccl = NcclLog(name)
        self._clock = Clock()
        self._run: Run | None = None
        self._armed = False  # a start was announced, and the server itself has said nothing yet

    def read(self, stream: BinaryIO) -> ServerLog:
        """Take all of a stream."""
        number = 0
        hint, feed = _HINT.search, self._line
        for number, raw in split_lines(stream):
            at = raw.find(b" batch, #", 0, 240)
            if at >= 6:
                if raw.startswith(b"Decode", at - 6):
                    self._decode(number, raw, at)
            elif b" NCCL INFO " in raw:
                self.nccl.info(number, raw)
            elif raw.endswith(b'" 200 OK') and b'"GET /h' not in raw:
                continue
            elif hint(raw) or raw.startswith(b"[cut: "):
                feed(number, raw)
        self.lines += number
        return self

    @property
    def current(self) -> Run | None:
        """The last run."""
        return self.runs[-1] if self.runs else None

    def evidence(self, place: Raw | None) -> Evidence | None:
        """A line that was kept as it came."""
        return Evidence(self.name, place[0], line_text(place[1])) if place else None

    def time(self, place: Raw | None) -> float | None:
        """When a line that was kept was written."""
        return self._clock.line(*place).time if place else None

    def _decode(self, number: int, raw: bytes, at: int) -> None:
        run = self._run
        if run is None:
            run = self._of(self._clock.line(number, raw))
        run.decode.add(number, raw, at)
        run.last = (number, raw)

    def _of(self, line: Line) -> Run:
        """The run that a line belongs to."""
        if self._run is None:
            self._open(None, line)
        run = self._run
        assert run is not None  # noqa: S101 - _open has set it
        if line.time is not None:
            run.first_time = line.time if run.first_time is None else run.first_time
            run.last_time = line.time
        run.zone = run.zone or line.zone
        return run

    def _open(self, evidence: Evidence | None, line: Line) -> None:
        self._run = Run(evidence, line.time)
        self.runs.append(self._run)
        self.starts += 1

    def _line(self, number: int, raw: bytes) -> None:
        line = self._clock.line(number, raw)
        evidence = Evidence(self.name, number, line_text(raw))
        if line.text.startswith("[cut: "):
            if len(self.cuts) < KEPT:
                self.cuts.append(evidence)
            return
        if line.source.startswith("systemd"):
            self._systemd(line, evidence)
        nccl = _NCCL.search(line.text) if "NCCL" in line.text else None
        if nccl:
            self.nccl.add(nccl, line, evidence)
        if "server_args=" in line.text or ("ServerArgs(" in line.text and not self._armed):
            run = self._run
            if run is None or run.ended is not None or ((run.milestones or run.errors) and not self._armed):
                self._open(evidence, line)
            self._armed = False
        run = self._of(line)
        run.last = (number, raw)
        if not nccl:
            self._milestone(run, line, evidence)
        self._notes(run, line, evidence, nccl is not None)

    def _systemd(self, line: Line, evidence: Evidence) -> None:
        match = _SYSTEMD.search(line.text)
        if not match or (self.unit and self.unit not in line.text):
            return
        word = match.group(1) or match.group(4)
        run = self._run
        if word == "Starting" or (word == "Started" and (run is None or run.ended is not None)):
            # a start whose server has not said anything is still the same one
            if run is None or run.ended is not None or run.milestones or run.errors:
                self._open(evidence, line)
            self._armed = True
        elif word == "Stopping" and run is not None:
            run.clean = run.clean or not run.notes.keys() & {"dead", "hit", "quit", "exited", "watchdog"}
        elif word in ("Stopped", "Deactivated successfully") and run is not None and run.ended is None:
            run.ended, run.clean = evidence, run.clean or word != "Stopped"

    def _milestone(self, run: Run, line: Line, evidence: Evidence) -> None:
        text = line.text
        loaded = _END.search(text) if "Load weight end" in text else None
        capture = _CAPTURE.search(text) if "Capture " in text else None
        begin = _BEGIN in text
        if READY in text:
            run.ready = run.ready or evidence
            run.ready_time = line.time if run.ready_time is None else run.ready_time
            run.loading = run.capturing = None
            self._mark(run, line, evidence)
        elif "max_total_num_tokens=" in text and run.pool_tokens is None:
            pool = _POOL.search(text)
            run.pool_tokens = int(pool.group(1)[:15]) if pool else None
        if not (begin or loaded or capture):
            return
        run.leader = line.rank if run.leader is None else run.leader
        if line.rank != run.leader:
            return
        if begin:
            if run.ready is not None and not self._armed:  # a server that loads again is another run
                self._open(evidence, line)
                run = self._of(line)
                run.leader = line.rank
            run.loading = evidence
        elif loaded and len(run.loads) < KEPT:
            run.loading = None
            seconds, quant, available = _ELAPSED.search(text), _QUANT.search(text), _AVAILABLE.search(text)
            run.loads.append(
                Load(
                    loaded.group(1),
                    _number(seconds.group(1)) if seconds else None,
                    quant.group(1) if quant else "",
                    _number(available.group(1)) if available else None,
                    evidence,
                )
            )
        elif capture:
            run.capturing = evidence if capture.group(1) == "begin" else None
        self._mark(run, line, evidence)
        self._armed = False

    @staticmethod
    def _mark(run: Run, line: Line, evidence: Evidence) -> None:
        if line.time is not None and len(run.milestones) < KEPT:
            run.milestones.append((line.time, line.text[:SHOWN], evidence))

    def _notes(self, run: Run, line: Line, evidence: Evidence, nccl: bool) -> None:
        text = line.text
        access = _ACCESS.search(text) if "GET /h" in text else None
        if access:
            code = access.group(2) or access.group(4)
            good = code == "200"
            _count_into(run, "health_good" if good else "health_bad", evidence, line.time)
            return
        if "ServerArgs(" in text or "server_args=" in text:  # quotes words that mean something elsewhere
            return
        for kind, (hints, pattern) in NOTES.items():
            match = pattern.search(text) if any(hint in text for hint in hints) else None
            if match is None or (kind == "volume-full" and SHM in text):
                continue
            groups = tuple(group for group in match.groups() if group)
            _add_note(self.gaps if kind in ("suppressed", "missed") else run.notes, kind, evidence, line.time, groups)
            if kind in ("exited", "failed", "dead"):
                run.ended = run.ended or evidence
            elif kind == "asked":
                run.clean = run.clean or not run.notes.keys() & {"dead", "hit", "quit", "watchdog"}
        failure = None if nccl else (_EXCEPTION.match(text) or _argparse(text))
        if failure:
            run.error_count += 1
            if len(run.errors) < 12:
                run.errors.append((failure.group()[:SHOWN], evidence, line.rank))


def _argparse(text: str) -> re.Match[str] | None:
    return re.match(r"[\w.]+: error: .+", text) if ": error: " in text else None


def _add_note(
    notes: dict[str, Note], kind: str, evidence: Evidence, time: float | None, groups: tuple[str, ...] = ()
) -> None:
    found = notes.get(kind)
    if found is None:
        notes[kind] = Note(evidence, evidence, 1, time, time, groups)
        return
    found.count += 1
    found.last = evidence
    found.last_time = time if time is not None else found.last_time


def _count_into(run: Run, name: str, evidence: Evidence, time: float | None) -> None:
    note: Note | None = getattr(run, name)
    if note is None:
        setattr(run, name, Note(evidence, evidence, 1, time, time))
    else:
        note.count += 1
        note.last = evidence
        note.last_time = time if time is not None else note.last_time


def line_text(raw: bytes) -> str:
    """A line as evidence: control characters as blanks, the end of a long one left out."""
    text = raw[: 4 * SHOWN].decode("utf-8", "replace")
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else " " for letter in text)
    text = text.strip()
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


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
            match = _NCCL.search(line.text)
            if match:
                self.add(match, line, Evidence(file, number, line_text(raw)))
        return self

    def add(self, match: re.Match[str], line: Line, evidence: Evidence) -> None:
        """Take one line that _NCCL has matched."""
        host, process, thread, device, level, text = match.groups()
        one = self._of(f"{host}:{process}:{thread} [{device}]".encode())
        if one is None:
            return
        one.last = (evidence.file, evidence.line, evidence.text.encode())
        if level == "WARN":
            self.warning_count += 1
            if len(self.warnings) < self.WARNINGS:
                self.warnings.append((text[:SHOWN], evidence))
        for kind in ("shm-full", "shm-name", "shm-denied", "gpu-memory", "driver", "cuda", "peer"):
            if level == "WARN" and (found := NOTES[kind][1].search(text)):
                groups = tuple(group for group in found.groups() if group)
                _add_note(self.notes, kind, evidence, line.time, groups)
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
    def complete(self) -> list[NcclRank]:
        """Ranks whose communicator is there."""
        return [rank for rank in self.ranks.values() if rank.complete]

    @property
    def missing(self) -> list[NcclRank]:
        """Ranks that began and did not get there, while the log shows beginnings."""
        return [rank for rank in self.ranks.values() if rank.started and not rank.complete]


# --- the kernel


@dataclasses.dataclass(frozen=True, slots=True)
class Xid:
    """A GPU's error report. klass: "application", "memory", "fatal" or "unknown" (what the number means for a run)."""

    device: str
    number: int
    klass: str
    evidence: Evidence


XIDS = {
    "application": frozenset({13, 31, 43, 45, 69}),
    "memory": frozenset({48, 63, 64, 92, 94, 95}),
    "fatal": frozenset({62, 74, 79, 119, 120, 154, 169}),
}
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([\w:.]+?)\): (\d{1,5})")
_KERNEL = {
    "host-memory": re.compile(r"Out of memory: Killed process|oom-kill:|Memory cgroup out of memory"),
    "driver": re.compile(r"NVRM: API mismatch"),
    "fell-off": re.compile(r"GPU has fallen off the bus|NVRM: GPU at \S+ has been lost"),
    "link": re.compile(r"AER: .*(?:Uncorrect|Fatal)|Surprise Link Down|PCIe Bus Error: severity=(?:Uncorrect|Fatal)"),
    "segfault": re.compile(r"segfault at|general protection fault|traps: "),
    "missed": re.compile(r"[Mm]issed (\d+) kernel messages|Suppressed (\d+) messages"),
}


class KernelLog:
    """Kernel messages since boot, from dmesg or the journal."""

    def __init__(self, name: str = "kernel.log") -> None:
        self.name = name
        self.xids: list[Xid] = []
        self.notes: dict[str, Note] = {}

    def read(self, stream: BinaryIO) -> KernelLog:
        """Take all of a stream."""
        clock = Clock()
        for number, raw in split_lines(stream):
            line = clock.line(number, raw)
            evidence = Evidence(self.name, number, line_text(raw))
            xid = _XID.search(line.text) if "Xid" in line.text else None
            if xid and len(self.xids) < KEPT:
                code = int(xid.group(2))
                klass = next((name for name, codes in XIDS.items() if code in codes), "unknown")
                self.xids.append(Xid(xid.group(1), code, klass, evidence))
            for kind, pattern in _KERNEL.items():
                if pattern.search(line.text):
                    _add_note(self.notes, kind, evidence, line.time)
        return self
