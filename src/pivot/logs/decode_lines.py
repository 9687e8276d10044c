"""What the decode lines of a server's log say: acceptance and speed."""

from __future__ import annotations

import collections

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
        speed = figure(raw, b"gen throughput (token/s): ", start)
        if speed is not None:
            self.speeds += 1
            self.speed_total += speed
        value = figure(raw, b", accept len: ", start)
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
        running, tokens = figure(raw, b"#running-req: ", start), figure(raw, b"token: ", start)
        if running and tokens:
            bucket = int(tokens / running).bit_length()
            count, total, _ = self.by_context.get(bucket, (0, 0.0, place))
            self.by_context[bucket] = (count + 1, total + value, place)


def figure(raw: bytes, name: bytes, start: int) -> float | None:
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
