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
from typing import NamedTuple

from pivot.wirings.records import Handed, Places, Recording, Rows, Target

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


def shared_rows(handed: Handed, rows: int, places: Places, path: int | None = None) -> int | None:
    """How many of the first rows of `handed` are surely those of the forward before it, which has so many rows at these
    places; None when `handed` is a selection of them.

    path: where trees of drafts were verified, the rows of the first request's accepted path. Of a tree the accepted
    path is kept first, and after it whatever lies there: a row of the path is the same where its position stands only
    once in the tree. As many rows at other positions are a tree's too, of which the root alone is sure.
    """
    if handed.rows != rows:
        return None
    if not handed.positions or not places.positions:
        return rows
    if path is None and places.positions == handed.positions:
        return rows
    keys = [places.key(row) for row in range(len(places.positions))]
    sure = min(len(keys), len(handed.positions), (path or 1) if len(keys) == rows else 1)
    same = itertools.takewhile(
        lambda row: handed.positions[row] == places.positions[row] and keys.count(keys[row]) == 1, range(sure)
    )
    return len(list(same)) or None


def _close(one: bytes, other: bytes) -> bool:
    """Whether two fingerprints differ by no more than rounding does."""
    first, second = _numbers(one), _numbers(other)
    scale = max(math.hypot(*first), math.hypot(*second))
    return math.isfinite(scale) and math.dist(first, second) <= CLOSE * scale


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


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One slice of one call. forward: the target's before it; rows at positions (empty where the records do not tell):
    all that are recorded, of which the first `shared` are the forward's, see `shared_rows`."""

    rows: Rows
    forward: int
    positions: tuple[int, ...]
    shared: int | None
    dtype: str

    @property
    def same(self) -> Rows:
        """The rows that are the forward's."""
        return self.rows[: self.shared]


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

    def explain(self, piece: Piece) -> Match:
        """What a slice is that equals no state of its forward row by row."""
        states, rows = _distinct(self._recording.targets[piece.forward]), piece.same
        return (
            (Match(ZERO) if cleared(rows) else None)
            or self._moved(piece, states)
            or _scaled(rows, states, piece.dtype)
            or _rounded(rows, states)
            or self._old(rows, piece.forward)
            or _unknown(rows, states)
        )

    def allows(self, match: Match, piece: Piece) -> bool | None:
        """Whether a slice that other calls show to be `match` can be that in this call too; None where its rows cannot
        tell, as those of a forward that holds no position beside another."""
        assert match.layer is not None  # noqa: S101 - the kinds that are asked for are made of a layer
        state = self._recording.targets[piece.forward].states.get(match.layer, ())
        if match.kind == MOVED:
            found = self._sources(piece, match.layer, int(match.detail))
            return all(found) if found else None
        if match.kind == SCALE:
            fit = _fit(piece.same, state)
            tolerance = _tolerance(piece.dtype)
            if fit is None or fit.distance > tolerance:
                return False
            return match.detail == PER_ROW or _factor([float(match.detail), *fit.factors], tolerance) != PER_ROW
        most = {name: most for name, _least, most in ROUNDED}
        return 0 < _apart(piece.same, state) < most[match.detail]

    def _moved(self, piece: Piece, states: Mapping[int, Rows]) -> Match | None:
        """A layer's state of another position of the same request."""
        for step in sorted((*range(-FARTHEST, 0), *range(1, FARTHEST + 1)), key=abs):
            for layer in states:
                found = self._sources(piece, layer, step)
                if found and all(found):
                    return Match(MOVED, layer, str(step))
        return None

    def _sources(self, piece: Piece, layer: int, step: int) -> list[bool]:
        """For the rows that can tell: whether each is the layer's state `step` positions further.

        The rows whose source lies in the same forward decide; where there are none, those whose source lies in an
        earlier forward do. Others, such as a request's first row, may hold anything.
        """
        target = self._recording.targets[piece.forward]
        states = target.states.get(layer, ())[: piece.shared]
        within = [
            data == states[index + step]
            for index, data in enumerate(piece.rows)
            if 0 <= index + step < len(states) and _follows(target, piece, index, step)
        ]
        return within or list(self._across(piece, layer, step))

    def _across(self, piece: Piece, layer: int, step: int) -> Iterator[bool]:
        """For each row whose source was recorded in an earlier forward: whether it is that state. What lies behind a
        row was never made before it, unless for drafts that were not accepted."""
        for index, data in enumerate(piece.same if step < 0 else ()):
            earlier = self._earlier(self._recording.targets[piece.forward], index, step, piece.forward, layer)
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


def _follows(target: Target, piece: Piece, row: int, step: int) -> bool:
    """Whether the row `step` further in the forward is the same request's, `step` positions from this one; without
    positions, the rows of one forward are taken to follow each other."""
    places = target.places
    if not places.positions:
        return True
    here, there = places.key(row), places.key(row + step)
    if here is None or there is None:
        return False
    position = piece.positions[row] if row < len(piece.positions) else here[1]
    return there == (here[0], position + step)


def _distinct(target: Target) -> dict[int, Rows]:
    """The states that differ: of those that are equal, the one that the engine is told to keep, else the first."""
    found: dict[Rows, int] = {}
    for layer in sorted(target.states, key=lambda layer: (layer not in target.capture, layer)):
        found.setdefault(target.states[layer], layer)
    return {layer: rows for rows, layer in found.items()}


def cleared(rows: Rows) -> bool:
    """Whether every recorded number is zero."""
    return bool(rows) and not any(any(_numbers(row)) for row in rows)


class _Fit(NamedTuple):
    """A state as another one times a number a row. distance: of the row that is farthest from that, relative."""

    distance: float
    factors: list[float]


def _tolerance(dtype: str) -> float:
    """How far a factor's rounding in this type may move a state."""
    return {"bfloat16": 5e-3, "float16": 6e-4}.get(dtype, 1e-4)


def _fit(rows: Rows, state: Rows) -> _Fit | None:
    """The factors that bring a state nearest to these rows, None where a row is zero or not finite."""
    pairs = [(_numbers(ours), _numbers(theirs)) for ours, theirs in zip(rows, state, strict=False)]
    if not pairs or not all(any(ours) and any(theirs) for ours, theirs in pairs):
        return None
    factors = [math.sumprod(ours, theirs) / math.sumprod(theirs, theirs) for ours, theirs in pairs]
    distance = max(
        math.dist(ours, [factor * value for value in theirs]) / math.hypot(*ours)
        for factor, (ours, theirs) in zip(factors, pairs, strict=True)
    )
    return _Fit(distance, factors) if math.isfinite(distance) else None


def _factor(factors: Sequence[float], tolerance: float) -> str:
    """The factor of all rows as text, PER_ROW where each has its own, empty where it is 1."""
    if max(factors) - min(factors) > 4 * tolerance * max(map(abs, factors)):
        return PER_ROW
    factor = math.fsum(factors) / len(factors)
    return f"{factor:.4g}" if abs(factor - 1) > tolerance else ""


def _scaled(rows: Rows, states: Mapping[int, Rows], dtype: str) -> Match | None:
    """One layer's state times a number, or times one number a row, as a norm without weights leaves it."""
    tolerance = _tolerance(dtype)
    found = [(_fit(rows, state), layer) for layer, state in states.items()]
    fits = sorted((fit.distance, layer, fit.factors) for fit, layer in found if fit is not None)
    if not fits or fits[0][0] > tolerance or (len(fits) > 1 and fits[1][0] < CLEARLY * tolerance):
        return None
    _distance, layer, factors = fits[0]
    factor = _factor(factors, tolerance)
    return Match(SCALE, layer, factor) if factor else None


def _apart(rows: Rows, state: Rows) -> float:
    """How far a state is from another, each row relative to its own length, so that no long row outweighs the others;
    infinite where nothing can be compared."""
    pairs = [(_numbers(ours), _numbers(theirs)) for ours, theirs in zip(rows, state, strict=False)]
    shares = [math.dist(ours, theirs) / math.hypot(*theirs) for ours, theirs in pairs if any(theirs)]
    return math.hypot(*shares) / math.sqrt(len(shares)) if shares else math.inf


def _nearest(rows: Rows, states: Mapping[int, Rows]) -> list[tuple[float, int]]:
    """Distance and layer, the nearest first."""
    near = ((_apart(rows, state), layer) for layer, state in states.items())
    return sorted(item for item in near if math.isfinite(item[0]))


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
