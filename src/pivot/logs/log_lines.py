"""Lines of any log: split from a stream, without colours and prefixes, with their time, and kept as evidence.

Cut lines, colours, carriage returns, interleaved ranks and lines of megabytes are ordinary input.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

BLOCK = 1 << 20
MAX_LINE = 1 << 14  # bytes of one line that are looked at
SHOWN = 300  # characters of a line that serve as evidence
KEPT = 200  # lines of one kind that are kept
# the time and the ranks that SGLang puts before a message
PREFIX = re.compile(r"\[(?:(\d{4}-\d\d-\d\d)[ T])?(\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?((?: [A-Z_]+\d+)*)\] ?")


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

    rank: as SGLang writes it ("TP3", "DP1 TP0"), "" for the main process; source: who wrote it, by the journal; begins:
    whether SGLang's own time stands before it, so that it does not go on with what the line before says.
    """

    number: int
    time: float | None
    zone: bool
    rank: str
    source: str
    text: str
    begins: bool = False


_COLOUR = re.compile(rb"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])?")
# what others put before a line: compose or syslog, a time, and who wrote it (without a pid only those who are known to)
_WRAPPED = r"[\ufeff\0]*(?:[\w.-]+ +\| |<\d{1,3}>1? ?)?"
_WHEN = (
    r"(?:[A-Z][a-z]{2} (?=\d{4}-))?(?:(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))? ?"
    r"(Z|UTC|[A-Z]{3,5}\b|[+-]\d\d:?\d\d)?[ \t]+"
    r"|(?P<unix>\d{10}\.\d+) |[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? |\[ *\d+\.\d+\] )"
)
_WHO = (
    r"(?:std(?:out|err) [FP] |(?:[\w.-]+ )?(?P<who>[\w@./:-]+\[\d+\]|kernel|systemd[\w-]*|python[\d.]*|sglang): ?"
    r"|[\w.-]+ (?P<app>[\w@./-]+) \d+ \S+ - )?"
)
_OUTER = re.compile(f"{_WRAPPED}(?:{_WHEN}{_WHO})?")
_TEXTS = ("MESSAGE", "message", "msg", "log")  # of the journal, of loggers, of docker
_TIMES = ("time", "timestamp", "asctime", "ts")


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
        text = _unwrapped(raw.decode("utf-8", "replace"))
        time, zone, rank = None, False, ""
        outer = _OUTER.match(text)
        assert outer is not None  # noqa: S101 - every part of the pattern is optional, so it matches any text
        if outer["unix"]:
            time, zone = float(outer["unix"]), True
        elif outer.group(1):
            offset = _offset(outer.group(4))
            time, zone = self._at(outer.group(1), outer.group(2), outer.group(3)) - (offset or 0), offset is not None
        source = outer["who"] or outer["app"] or ""
        text = text[outer.end() :]
        own = PREFIX.match(text)
        if own:
            if time is None:
                time = self._at(own.group(1), own.group(2), own.group(3))
            rank = own.group(4).strip()
            text = text[own.end() :]
        return Line(number, time, zone, rank, source, text, begins=own is not None)

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


def _unwrapped(text: str) -> str:
    """What a line of JSON carries, as the journal would write it; any other text as it is."""
    if not text.startswith("{"):
        return text
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # cut, or no JSON
        return text
    said = next((found[name] for name in _TEXTS if isinstance(found.get(name), str)), None)
    if said is None:
        return text
    if isinstance(who := found.get("SYSLOG_IDENTIFIER"), str):
        said = f"{who}[{found.get('_PID', 0)}]: {said}"
    if (micro := str(found.get("__REALTIME_TIMESTAMP", ""))).isdigit():
        return f"{micro[:-6]}.{micro[-6:]} {said}"
    when = next((found[name] for name in _TIMES if name in found), "")
    return f"{when} {said}".lstrip()


def _offset(zone: str | None) -> int | None:
    """Seconds that a zone is ahead of UTC; None where that is not said, or only by a name of three letters."""
    if zone in ("Z", "UTC"):
        return 0
    if zone is None or zone[0] not in "+-":
        return None
    digits = zone[1:].replace(":", "")
    return (1 if zone[0] == "+" else -1) * (int(digits[:2]) * 3600 + int(digits[2:]) * 60)


@dataclasses.dataclass(slots=True)
class Note:
    """Something that lines have said: how often, the first and the last of them, and what the first captured."""

    first: Evidence
    last: Evidence
    count: int = 1
    time: float | None = None
    last_time: float | None = None
    groups: tuple[str, ...] = ()


def add_note(
    notes: dict[str, Note], kind: str, evidence: Evidence, time: float | None, groups: tuple[str, ...] = ()
) -> None:
    """Count one more line of a kind; `groups` are those of the first."""
    found = notes.get(kind)
    if found is None:
        notes[kind] = Note(evidence, evidence, 1, time, time, groups)
        return
    found.count += 1
    found.last = evidence
    found.last_time = time if time is not None else found.last_time


def line_text(raw: bytes) -> str:
    """A line as evidence: control characters as blanks, the end of a long one left out."""
    text = raw[: 4 * SHOWN].decode("utf-8", "replace")
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else " " for letter in text)
    text = text.strip()
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
