"""A server's log → facts: phases of a start, what was served, what went wrong, each with the lines that say so.

Every reader takes a binary stream of any length and keeps a bounded summary of it. Texts it does not know change
nothing; cut lines, colours, carriage returns, interleaved ranks and lines of megabytes are ordinary input.
The wording is that of SGLang 0.5.9 to 0.5.23, NCCL 2.x, systemd and the NVIDIA driver's kernel messages.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import BinaryIO

from pivot.gpu_logs import NCCL, NcclLog
from pivot.log_kinds import NOTES, SHM
from pivot.log_lines import KEPT, PREFIX, SHOWN, Clock, Evidence, Line, Note, add_note, line_text, split_lines

READY = "The server is fired up and ready to roll"
RUNS = 24  # runs of one log that are kept in detail
_BEGIN = "Load weight begin"
_END = re.compile(r"Load weight end\b.*?\btype=(\w+)")
_CAPTURE = re.compile(r"Capture [\w \-]*?\b(begin|end)\b")
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
        prefix = PREFIX.match(message)
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


# --- what a server says, apart from what any log may say (`pivot.log_kinds`)

_SYSTEMD = re.compile(r"(Starting|Started|Stopping|Stopped) (\S+)|(\S+): (Deactivated successfully)")
_EXCEPTION = re.compile(r"(?:\w+\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault|Timeout))(?:: ?.*)?$")
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
        nccl = NCCL.search(line.text) if "NCCL" in line.text else None
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
            add_note(self.gaps if kind in ("suppressed", "missed") else run.notes, kind, evidence, line.time, groups)
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


def _count_into(run: Run, name: str, evidence: Evidence, time: float | None) -> None:
    note: Note | None = getattr(run, name)
    if note is None:
        setattr(run, name, Note(evidence, evidence, 1, time, time))
    else:
        note.count += 1
        note.last = evidence
        note.last_time = time if time is not None else note.last_time
