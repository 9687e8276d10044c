"""Every slice of the drafter's `fc` against every state of the target: what each one is, over all calls."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pivot.wirings.matching import (
    MOVED,
    ROUND,
    SAME,
    SCALE,
    History,
    Match,
    Piece,
    Tally,
    agreement,
    layer_name,
    shared_rows,
    tally,
)
from pivot.wirings.records import Handed, Recording


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """One slice of `fc`'s input. layers: the layer inputs it was equal to, with their tallies, best first; odd: what
    it was in the calls where it equalled none, the most frequent first; modes: the same by the target's mode."""

    index: int
    calls: int
    layers: tuple[tuple[int, Tally], ...]
    odd: tuple[tuple[Match, int], ...] = ()
    modes: tuple[tuple[str, str, int], ...] = ()

    @property
    def layer(self) -> int | None:
        """The layer whose input this slice is in every call, None when there is no such layer."""
        always = [layer for layer, tally in self.layers if tally.same and tally.compared == self.calls]
        return always[0] if always else None

    @property
    def match(self) -> Match | None:
        """What this slice is in every call, None when it is not always the same."""
        if self.layer is not None:
            return Match(SAME, self.layer)
        kinds = {(match.kind, match.layer) for match, _count in self.odd}
        return self.odd[0][0] if len(kinds) == 1 and sum(count for _, count in self.odd) == self.calls else None

    @property
    def source(self) -> int | None:
        """The layer this slice is made of in every call, whatever was done to it; None when there is none."""
        match = self.match
        return None if match is None else match.layer

    @property
    def what(self) -> str:
        """What it is, in how many calls."""
        if self.layer is not None:
            return f"{layer_name(self.layer)}, {dict(self.layers)[self.layer]} calls"
        if self.match is not None:
            return f"{self.match}, in {self.calls} calls"
        seen = "; ".join(f"{what} {count} times{f' in {mode}' if mode else ''}" for mode, what, count in self.modes)
        return f"not always the same state in {self.calls} calls: {seen}"

    def __str__(self) -> str:
        """The line a person reads about this slice."""
        return f"fc slice {self.index} = {self.what}"

    def as_dict(self) -> dict[str, Any]:
        """The slice as plain values."""
        match = self.match
        return {
            "index": self.index,
            "calls": self.calls,
            "kind": "unstable" if match is None else match.kind,
            "layer": self.source,
            "detail": "" if match is None else match.detail,
            "text": str(self),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """One slice in one call. found: layer → verdict; odd: what it is when it equals none; mode: the target's."""

    piece: Piece
    history: History
    found: Mapping[int, str]
    odd: Match | None
    mode: str

    @property
    def equal(self) -> list[int]:
        """The layers whose input it is."""
        return [layer for layer, verdict in self.found.items() if verdict in ("exact", "close")]


def slices(recordings: Iterable[Recording], told: Sequence[int] = ()) -> tuple[Slice, ...]:
    """Every slice of every `fc` call against every state of the forward before it. told: the layer inputs the engine
    was told to keep, ascending: where layers are equal, a slice is the one that belongs there."""
    seen: dict[int, list[_Call]] = {}
    for recording in recordings:
        history = History(recording)
        for handed in recording.fed:
            for index, call in _calls(recording, history, handed):
                seen.setdefault(index, []).append(call)
    return tuple(
        _slice(index, _settled(seen[index]), told[index] if index < len(told) else None) for index in sorted(seen)
    )


def _calls(recording: Recording, history: History, handed: Handed) -> Iterator[tuple[int, _Call]]:
    """Each slice of one call with its number; without those that are a selection of rows which were not recorded."""
    target = recording.targets.get(handed.target)
    if target is None:
        return
    shared = shared_rows(handed, target.rows, target.places, recording.paths.get(handed.target))
    for index, rows in enumerate(handed.slices):
        piece = Piece(rows, handed.target, handed.positions, shared, handed.dtype)
        found = {
            layer: agreement(piece.same, state[:shared], aligned=shared is not None)
            for layer, state in target.states.items()
        }
        call = _Call(piece, history, found, None, target.mode)
        if piece.same and call.equal:
            yield index, call
        elif piece.same and shared is not None:
            yield index, dataclasses.replace(call, odd=history.explain(piece))


def _settled(calls: Sequence[_Call]) -> list[_Call]:
    """The calls that can tell what a slice is: one whose few rows fit what the others show counts as that, and one
    whose rows cannot tell it from that is left out."""
    odd = Counter(call.odd for call in calls if call.odd is not None and call.odd.kind in (MOVED, SCALE, ROUND))
    if not odd:
        return list(calls)
    usual = odd.most_common(1)[0][0]
    settled = []
    for call in calls:
        allowed = call.odd != usual and call.history.allows(usual, call.piece)
        if allowed is not None:
            settled.append(dataclasses.replace(call, odd=usual) if allowed and call.odd is not None else call)
    return settled


def _slice(index: int, calls: Sequence[_Call], told: int | None) -> Slice:
    """One slice from what was seen; layers that never matched are left out."""
    verdicts: dict[int, list[str]] = {}
    for call in calls:
        for layer, verdict in call.found.items():
            verdicts.setdefault(layer, []).append(verdict)
    tallies = {layer: tally(items) for layer, items in verdicts.items()}
    matched = [(layer, item) for layer, item in tallies.items() if item.exact + item.close]
    matched.sort(key=lambda item: (-item[1].exact, -item[1].close, item[0] != told, item[0]))
    odd = Counter(call.odd for call in calls if call.odd is not None)
    modes = Counter((call.mode, str(call.odd) if call.odd is not None else layer_name(call.equal[0])) for call in calls)
    seen = tuple((mode, what, count) for (mode, what), count in modes.most_common())
    return Slice(index, len(calls), tuple(matched), tuple(odd.most_common()), seen)
