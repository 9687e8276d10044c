"""What a handed-over state is: which layer's state it equals, and if it equals none, what was done to one.

Fingerprints of equal rows are equal bit for bit within one process, so equality is a proof. They are linear, so that a
state that was scaled, rounded, moved to another position or cleared can be told from one that is nobody's.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pivot.wirings.records import Handed, Recording, Rows, Target

# how far two fingerprints may lie apart, relative to the larger, and still be called close: rounding, not a layer
CLOSE = 1e-5
# the relative distances that rounding to a narrower type and back leaves: type, from, to. Measured over 4 and 64 rows
# of random states, width 96 and 7168: 1e-4 to 3e-4, 6e-4 to 3e-3, 2e-2 and more; a single row strays further
ROUNDED = (("float16", 3e-5, 4.5e-4), ("bfloat16", 4.5e-4, 5e-3), ("an 8-bit type", 5e-3, 1e-1))
# of two candidates the nearer one has to be this much nearer, or nothing is claimed
CLEARLY = 4.0
# positions that a state may have been moved by and still be looked for
FARTHEST = 4

# a factor that differs from row to row
PER_ROW = "another factor in each row"

SAME, ROUND, SCALE, MOVED, OLD, ZERO, NONE = "same", "rounded", "scaled", "moved", "old", "zero", "none"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Match:
    """What one slice is in one call.

    kind: ``same``, ``rounded`` (detail: to which type), ``scaled`` (detail: by what, or PER_ROW), ``moved`` (detail:
    by how many positions, -1 is the position before), ``old`` (an earlier forward's), ``zero``, ``none`` (detail: the
    nearest layer, where one clearly is). layer: the layer whose input it is or was made of, None where there is none.
    """

    kind: str
    layer: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        """``input of layer 3 (output of layer 2) of the position before``."""
        name = "" if self.layer is None else layer_name(self.layer)
        if self.kind == SAME:
            return name
        if self.kind == ROUND:
            return f"{name}, rounded as by {self.detail}"
        if self.kind == SCALE:
            return f"{name}, times {self.detail}"
        if self.kind == MOVED:
            count = int(self.detail)
            side = "before" if count < 0 else "after"
            return f"{name}, of the position {side}" if abs(count) == 1 else f"{name}, of {abs(count)} positions {side}"
        if self.kind == OLD:
            return f"{name}, of an earlier forward"
        nearest = f", nearest to the {self.detail}" if self.detail else ""
        return "zero" if self.kind == ZERO else f"none of the recorded states{nearest}"


def layer_name(layer: int) -> str:
    """``input of layer 3 (output of layer 2)``; the input of layer 0 is the embedding."""
    return "the embedding (input of layer 0)" if layer == 0 else f"input of layer {layer} (output of layer {layer - 1})"


# --- equality


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """How often two states were equal bit for bit, equal up to rounding, and compared at all."""

    exact: int = 0
    close: int = 0
    compared: int = 0

    @property
    def same(self) -> bool:
        """Whether they agreed every time they were compared."""
        return self.compared > 0 and self.exact + self.close == self.compared

    def __str__(self) -> str:
        """``exact in 41 of 41``, and how often close where that happened."""
        kind = f"exact in {self.exact} of {self.compared}"
        return f"{kind}, close in {self.close} more" if self.close else kind


def agreement(rows: Rows, others: Rows, *, aligned: bool) -> str:
    """``exact``, ``close``, ``different``, or ``unseen`` where the recorded rows cannot tell.

    aligned: both hold the same rows in the same order. Otherwise `rows` is a selection of the other's rows, of
    which only the first few are recorded: a row that is missing there may be one that was not recorded.
    """
    if aligned:
        count = min(len(rows), len(others))
        rows, others = rows[:count], others[:count]
    if not rows or not others:
        return "unseen"
    if rows == others:
        return "exact"
    if not aligned:
        there = set(others)
        return "exact" if all(row in there for row in rows) else "unseen"
    return "close" if all(map(_close, rows, others)) else "different"


def shared_rows(handed: Handed, rows: int, positions: Sequence[int]) -> int | None:
    """How many of the first rows of `handed` are surely those of the forward before it, which has so many rows at these
    positions; None when `handed` is a selection of them.

    As many rows at other positions are what is kept of a tree of drafts, the accepted path first: there the rows at
    positions that stand only once in the tree are the same.
    """
    if handed.rows != rows:
        return None
    if not handed.positions or not positions or tuple(positions) == handed.positions:
        return rows
    pairs = zip(handed.positions, positions, strict=False)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1] and positions.count(pair[1]) == 1, pairs)
    return len(list(same)) or None


def _close(one: bytes, other: bytes) -> bool:
    """Whether two fingerprints differ by no more than rounding does."""
    first, second = _numbers(one), _numbers(other)
    scale = max(math.hypot(*first), math.hypot(*second))
    return math.dist(first, second) <= CLOSE * scale


def _numbers(row: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(row) // 4}f", row)


def tally(verdicts: Iterable[str]) -> Tally:
    """Verdicts of `agreement` as a tally; what could not be told is left out."""
    counts = Counter(verdicts)
    return Tally(
        exact=counts["exact"],
        close=counts["close"],
        compared=counts["exact"] + counts["close"] + counts["different"],
    )


def worst(slices: Sequence[Rows], others: Sequence[Rows], *, shared: int | None) -> str:
    """The verdict of the slice that agrees least; another number of slices is a difference. shared: `shared_rows`."""
    if len(slices) != len(others):
        return "different"
    aligned = shared is not None
    pairs = zip(slices, others, strict=True)
    verdicts = {agreement(rows[:shared], other[:shared], aligned=aligned) for rows, other in pairs}
    order = ("different", "unseen", "close", "exact")
    return next((verdict for verdict in order if verdict in verdicts), "unseen")


# --- what is equal to nothing


class History:
    """The states of all forwards of one process, to look up what a slice is when it is none of its own forward's."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    @functools.cached_property
    def _known(self) -> dict[bytes, list[tuple[int, int, int]]]:
        """Fingerprint → forward, layer and row, wherever it was seen."""
        known: dict[bytes, list[tuple[int, int, int]]] = {}
        for number, target in self._recording.targets.items():
            for layer, rows in target.states.items():
                for row, data in enumerate(rows):
                    known.setdefault(data, []).append((number, layer, row))
        return known

    def explain(self, rows: Rows, number: int, dtype: str) -> Match:
        """What a slice is that equals no state of forward `number` row by row."""
        target = self._recording.targets[number]
        return (
            (Match(ZERO) if cleared(rows) else None)
            or self._moved(rows, number)
            or _scaled(rows, target.states, dtype)
            or _rounded(rows, target.states)
            or self._old(rows, number)
            or _unknown(rows, target.states)
        )

    def _moved(self, rows: Rows, number: int) -> Match | None:
        """A layer's state of another position of the same request.

        The rows whose source lies in the same forward decide; where there are none, those whose source lies in an
        earlier forward do. Others, such as a request's first row, may hold anything.
        """
        target = self._recording.targets[number]
        for step in sorted((*range(-FARTHEST, 0), *range(1, FARTHEST + 1)), key=abs):
            for layer, states in target.states.items():
                within = [
                    data == states[index + step]
                    for index, data in enumerate(rows)
                    if 0 <= index + step < len(states) and _follows(target, index, step)
                ]
                found = within or list(self._across(rows, number, layer, step))
                if found and all(found):
                    return Match(MOVED, layer, str(step))
        return None

    def _across(self, rows: Rows, number: int, layer: int, step: int) -> Iterator[bool]:
        """For each row whose source was recorded in an earlier forward: whether it is that state."""
        for index, data in enumerate(rows):
            earlier = self._earlier(self._recording.targets[number], index, step, number, layer)
            if earlier:
                yield data in earlier

    def _earlier(self, target: Target, index: int, step: int, number: int, layer: int) -> set[bytes]:
        """The states of a layer at the position `step` from a row's, in the forwards before this one."""
        key = target.places.key(index)
        if key is None:
            return set()
        wanted = (key[0], key[1] + step)
        states = self._by_place.get((layer, wanted), ())
        return {data for forward, data in states if forward < number}

    @functools.cached_property
    def _by_place(self) -> dict[tuple[int, tuple[int, int]], list[tuple[int, bytes]]]:
        """Layer and place (request, position) → forward and fingerprint."""
        places: dict[tuple[int, tuple[int, int]], list[tuple[int, bytes]]] = {}
        for number, target in self._recording.targets.items():
            for layer, rows in target.states.items():
                for row, data in enumerate(rows):
                    key = target.places.key(row)
                    if key is not None:
                        places.setdefault((layer, key), []).append((number, data))
        return places

    def _old(self, rows: Rows, number: int) -> Match | None:
        """A layer's state of an earlier forward, as a buffer that was not written again holds it."""
        layers: set[int] | None = None
        for data in rows:
            seen = {layer for forward, layer, _row in self._known.get(data, ()) if forward < number}
            layers = seen if layers is None else layers & seen
        return Match(OLD, min(layers)) if layers else None


def _follows(target: Target, row: int, step: int) -> bool:
    """Whether the row `step` further is the same request's, `step` positions further; without positions, the rows of
    one forward are taken to follow each other."""
    places = target.places
    if not places.positions:
        return True
    here, there = places.key(row), places.key(row + step)
    return here is not None and there is not None and there == (here[0], here[1] + step)


def cleared(rows: Rows) -> bool:
    """Whether every recorded number is zero."""
    return bool(rows) and not any(any(_numbers(row)) for row in rows)


def _flat(rows: Rows, count: int) -> tuple[float, ...]:
    """The numbers of the first rows, one after another."""
    return _numbers(b"".join(rows[:count]))


def _scaled(rows: Rows, states: Mapping[int, Rows], dtype: str) -> Match | None:
    """One layer's state times a number, or times one number a row, as a norm without weights leaves it."""
    tolerance = {"bfloat16": 5e-3, "float16": 6e-4}.get(dtype, 1e-4)
    fits = []
    for layer, state in states.items():
        pairs = [(_numbers(ours), _numbers(theirs)) for ours, theirs in zip(rows, state, strict=False)]
        if pairs and all(any(ours) and any(theirs) for ours, theirs in pairs):
            factors = [math.sumprod(ours, theirs) / math.sumprod(theirs, theirs) for ours, theirs in pairs]
            distance = max(
                math.dist(ours, [factor * value for value in theirs]) / math.hypot(*ours)
                for factor, (ours, theirs) in zip(factors, pairs, strict=True)
            )
            fits.append((distance, layer, factors))
    fits.sort()
    if not fits or fits[0][0] > tolerance or (len(fits) > 1 and fits[1][0] < CLEARLY * tolerance):
        return None
    _distance, layer, factors = fits[0]
    if max(factors) - min(factors) > 4 * tolerance * max(map(abs, factors)):
        return Match(SCALE, layer, PER_ROW)
    factor = math.fsum(factors) / len(factors)
    return Match(SCALE, layer, f"{factor:.4g}") if abs(factor - 1) > tolerance else None


def _nearest(rows: Rows, states: Mapping[int, Rows]) -> list[tuple[float, int]]:
    """Relative distance and layer, the nearest first."""
    near = []
    for layer, state in states.items():
        count = min(len(rows), len(state))
        ours, theirs = _flat(rows, count), _flat(state, count)
        length = math.hypot(*theirs)
        if length:
            near.append((math.dist(ours, theirs) / length, layer))
    return sorted(near)


def _rounded(rows: Rows, states: Mapping[int, Rows]) -> Match | None:
    """One layer's state after a stay in a narrower type."""
    near = _nearest(rows, states)
    if not near or (len(near) > 1 and near[1][0] < CLEARLY * near[0][0]):
        return None
    distance, layer = near[0]
    kind = next((name for name, least, most in ROUNDED if least <= distance < most), None)
    return Match(ROUND, layer, kind) if kind else None


def _unknown(rows: Rows, states: Mapping[int, Rows]) -> Match:
    """None of the states, and which of them is nearest where one clearly is."""
    near = _nearest(rows, states)
    clear = near and near[0][0] < 1 and (len(near) == 1 or near[1][0] > 1.5 * near[0][0])
    return Match(NONE, None, layer_name(near[0][1]) if clear else "")
