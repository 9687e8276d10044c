"""A server's log → facts: phases of a start, what was served, what went wrong, each with the lines that say so.

Every reader takes a binary stream of any length and keeps a bounded summary of it. Texts it does not know change
nothing; cut lines, colours, carriage returns, interleaved ranks and lines of megabytes are ordinary input.
The wording is that of SGLang 0.5.9 to 0.5.23, NCCL 2.x, systemd and the NVIDIA driver's kernel messages.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable
from typing import BinaryIO

from pivot.logs.decode_lines import Decode, Raw
from pivot.logs.gpu_logs import NCCL, NcclLog
from pivot.logs.log_kinds import NOTES, kinds_of
from pivot.logs.log_lines import KEPT, SHOWN, Clock, Evidence, Line, Note, add_note, line_text, split_lines
from pivot.logs.starts import BEGIN, CAPTURE, END, FOLLOW_UP, READY, Phase, phases

RUNS = 24  # runs of one log that are kept in detail
ERRORS = 12  # errors of one run that are kept
REQUEST_FAILED = "Exception in ASGI application"  # uvicorn's; a traceback follows
# kinds of lines after which a run is broken, and those that end it by a fault
BREAKS = frozenset({"watchdog", "dead", "hit", "quit", "collective"})
# what a rank says when another one is gone
BY_OTHERS = (
    "remote process exited",
    "Connection closed by peer",
    "onnection reset by peer",
    "communicator was aborted",
)
FAILURES = frozenset({"dead", "hit", "quit", "exited", "failed", "warmup-failed", "start-timeout"})

# what a server says, apart from what any log may say (`pivot.logs.log_kinds`)
_SYSTEMD = re.compile(r"(Starting|Started|Stopping|Stopped) (\S+)|(\S+): (Deactivated successfully)")
_EXCEPTION = re.compile(
    r"(?:\[rank\d+\]:\s*)?(?P<said>(?:\w+\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault|Timeout))(?:: ?.*)?)$"
)
_ACCESS = re.compile(r'"GET /(health\w*)[ ?][^"]*" (\d{3})|GET /(health\w*) (\d{3})')
# what somebody asked, or was answered, quotes anything (--log-requests, as text or JSON)
_REQUEST = re.compile(r"\b(?:Receive|Finish)(?: OpenAI)?: obj=|\"event\": \"request\.")
_MILESTONES = "Load weight |Capture |fired up|max_total_num_tokens|server_args|ServerArgs(|systemd[|/health"
_ERRORS = "Error|Exception|error: |Interrupt|Exit|Fault|Timeout"


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
        [*_MILESTONES.split("|"), *_ERRORS.split("|"), *(word for hints, _ in NOTES.values() for word in hints)]
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
        self.beside = 0  # ranks that do the same at the same time, in a log that does not name them
        self.loads: list[Load] = []
        self.loading: Evidence | None = None
        self.capturing: Evidence | None = None
        self.pool_tokens: int | None = None
        self.ready: Evidence | None = None
        self.ready_time: float | None = None
        self.decode = Decode()
        self.notes: dict[str, Note] = {}
        # exception with its message, line, whether it is a request's; what counts is said at `add_error`
        self.errors: list[tuple[str, Evidence, bool]] = []
        self.error_count = 0
        self.request_failed = 0  # line of it, while its traceback may go on
        self.health_good: Note | None = None
        self.health_bad: Note | None = None
        self.ended: Evidence | None = None
        self.clean = False  # ended because somebody asked it to

    def is_beside(self, under_way: Evidence | None, ends: bool) -> bool:
        """Whether another rank begins what is under way, or ends it: of ranks without a name the last end counts."""
        beside = self.beside > 0 if ends else under_way is not None and self.ready is None
        self.beside += (-1 if ends else 1) if beside else 0
        return beside

    def add_error(self, text: str, evidence: Evidence) -> None:
        """Keep an error: the first ones of a start, of a server that is up the last ones, and the first ones since a
        process of its says that it hit an exception.
        """
        self.error_count += 1
        of_request = self.request_failed > (self.decode.last[0] if self.decode.last else 0)
        if self.ready is not None and "hit" not in self.notes:
            if of_request:
                return  # no cause of an end, and many of them must not push one out
            self.errors = self.errors[1 - ERRORS :]
        if len(self.errors) < ERRORS:
            self.errors.append((text, evidence, of_request))

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
        """The first error that is not the consequence of another, of the same rank or of one that is gone.

        A request's is none, unless a process says that it hit an exception.
        """
        own = [
            (text, line)
            for text, line, of_request in self.errors
            if not any(word in text for word in FOLLOW_UP) and not (of_request and "hit" not in self.notes)
        ]
        return next((one for one in own if not any(word in one[0] for word in BY_OTHERS)), own[0] if own else None)

    @property
    def has_begun(self) -> bool:
        """Whether its server has said something itself."""
        return bool(self.ready or self.milestones or self.errors)

    @property
    def broken(self) -> bool:
        """Whether something has broken it, whatever it still answers."""
        return bool(self.notes.keys() & BREAKS)

    @property
    def gave_up(self) -> Evidence | None:
        """The error after which its start did not go on; None when it did, or had none."""
        port = self.notes.get("port")
        lines = [*(evidence for _, evidence, _ in self.errors), *([port.last] if port else [])]
        last = max(lines, key=lambda evidence: evidence.line, default=None)
        further = self.milestones[-1][2].line if self.milestones else 0
        return last if last and self.ready is None and last.line > further else None

    @property
    def failed(self) -> bool:
        """Whether it ended, or is ending, by a fault."""
        return not self.clean and bool(self.notes.keys() & FAILURES)

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
            at = raw.find(b" batch", 0, 240)
            if at >= 6 and raw.startswith((b", #", b" ["), at + 6):  # the second counts iterations
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
        if _REQUEST.search(line.text, 0, 400):
            return
        evidence = Evidence(self.name, number, line_text(raw))
        if line.text.startswith("[cut: "):
            if len(self.cuts) < KEPT:
                self.cuts.append(evidence)
            return
        if line.source.startswith("systemd"):
            self._systemd(line, evidence)
        announced = "server_args=" in line.text
        nccl = NCCL.search(line.text) if "NCCL" in line.text and not announced else None
        if nccl:
            self.nccl.add(nccl, line, evidence)
        if announced or ("ServerArgs(" in line.text and not self._armed):
            run = self._run
            if run is None or run.ended is not None or (run.has_begun and not self._armed):
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
            if run is None or run.ended is not None or run.has_begun:
                self._open(evidence, line)
            self._armed = True
        elif word == "Stopping" and run is not None:
            run.clean = run.clean or not run.notes.keys() & (BREAKS | {"exited"})
        elif word in ("Stopped", "Deactivated successfully") and run is not None and run.ended is None:
            run.ended, run.clean = evidence, run.clean or word != "Stopped"

    def _milestone(self, run: Run, line: Line, evidence: Evidence) -> None:
        text = line.text
        loaded = END.search(text) if "Load weight end" in text else None
        capture = CAPTURE.search(text) if "Capture " in text else None
        begin = BEGIN in text
        if READY in text:
            if run.ready is None:
                run.ready, run.errors = evidence, []  # it came up in spite of them
            run.ready_time = line.time if run.ready_time is None else run.ready_time
            run.loading, run.capturing, run.beside = None, None, 0
            self._mark(run, line, evidence)
        elif "max_total_num_tokens=" in text and run.pool_tokens is None:
            pool = _POOL.search(text)
            run.pool_tokens = int(pool.group(1)[:15]) if pool else None
        if not (begin or loaded or capture):
            return
        run.leader = line.rank if run.leader is None else run.leader
        ends = loaded is not None or (capture is not None and capture.group(1) == "end")
        if line.rank != run.leader or run.is_beside(run.loading if begin else run.capturing, ends):
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
        if REQUEST_FAILED in text:
            run.request_failed = line.number
        elif line.begins:
            run.request_failed = 0
        for kind, groups in kinds_of(text):
            if kind == "hit" and kind not in run.notes and run.ready is not None:
                run.errors = []  # of requests, long ago; of a start the first one counts, whichever rank says it
            add_note(self.gaps if kind in ("suppressed", "missed") else run.notes, kind, evidence, line.time, groups)
            if kind in ("exited", "failed", "dead"):
                run.ended = run.ended or evidence
            elif kind == "asked":
                run.clean = run.clean or not run.broken
        failure = None if nccl else (_EXCEPTION.match(text) or _argparse(text))
        if failure:
            run.add_error(failure.group("said")[:SHOWN], evidence)


def _argparse(text: str) -> re.Match[str] | None:
    return re.match(r"(?P<said>[\w.]+: error: .+)", text) if ": error: " in text else None


def _count_into(run: Run, name: str, evidence: Evidence, time: float | None) -> None:
    note: Note | None = getattr(run, name)
    if note is None:
        setattr(run, name, Note(evidence, evidence, 1, time, time))
    else:
        note.count += 1
        note.last = evidence
        note.last_time = time if time is not None else note.last_time
