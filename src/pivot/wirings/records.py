"""The probe's records (``probe/README.md``) as plain values: one `Recording` per process of the engine.

Whatever is in a file, reading it raises nothing: a line that is no record is counted, a last line without its end is
noted, points of later schemas are passed over.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 2
SUFFIX = ".jsonl"
DIMENSIONS = 16

Rows = tuple[bytes, ...]
"""One fingerprint a row: little-endian float32 numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Which position of which request each recorded row belongs to; empty where the records do not tell."""

    positions: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()

    def key(self, row: int) -> tuple[int, int] | None:
        """Owner and position of a row, None where it is not known."""
        return (self.owners[row], self.positions[row]) if row < len(self.positions) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One forward of the target. rows: of the whole forward; the fingerprints hold the first few of them.

    capture: the layer inputs the engine was told to keep; captured: what it kept, in its order; states: every
    layer's input, keyed by layer, and under the number of layers the output of the last one where it was recorded.
    """

    rows: int
    capture: tuple[int, ...]
    captured: tuple[Rows, ...]
    states: Mapping[int, Rows]
    layers: int | None = None
    model: str = ""
    mode: str = ""
    dtype: str = ""
    rank: int = 0
    requests: tuple[str, ...] = ()
    places: Places = Places()


@dataclasses.dataclass(frozen=True, slots=True)
class Handed:
    """What was packed, what `fc` was fed, or what a drafter was given past its `fc`, after one forward of the target
    (its record number). positions: of the recorded rows, empty where the records do not tell."""

    target: int
    rows: int
    slices: tuple[Rows, ...]
    dtype: str = ""
    output: Rows = ()
    positions: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """One draft step: the hidden state it consumed."""

    target: int
    step: int
    hidden: Rows


@dataclasses.dataclass(frozen=True, slots=True)
class Verified:
    """One verification of one request. accepted: how many of the drafted tokens; steps: how many there could be."""

    request: str
    accepted: int
    steps: int
    drafted: tuple[int, ...] = ()


@dataclasses.dataclass(slots=True)
class Recording:
    """One file: the records of one process. paths: forward that verified trees of drafts → rows of the first request's
    accepted path, the root included; damaged: the numbers of the lines that could not be read."""

    name: str
    header: Mapping[str, Any] | None = None
    targets: dict[int, Target] = dataclasses.field(default_factory=dict)
    packed: list[Handed] = dataclasses.field(default_factory=list)
    fed: list[Handed] = dataclasses.field(default_factory=list)
    given: list[Handed] = dataclasses.field(default_factory=list)
    drafts: list[Draft] = dataclasses.field(default_factory=list)
    verified: list[Verified] = dataclasses.field(default_factory=list)
    paths: dict[int, int] = dataclasses.field(default_factory=dict)
    failures: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    ended: str = ""
    dropped: int = 0
    damaged: list[int] = dataclasses.field(default_factory=list)
    cut_off: bool = False

    @property
    def rank(self) -> int:
        """The rank of the process, 0 where it recorded no forward."""
        return next((target.rank for target in self.targets.values()), 0)

    @property
    def captures(self) -> set[tuple[int, ...]]:
        """The layer inputs that the engine was told to keep; one tuple, unless that changed."""
        return {target.capture for target in self.targets.values()}


def read(directory: Path, since: str = "") -> list[Recording]:
    """The recordings in a directory, in the order of their names, which is the order of their starts.

    since: UTC time as ``2026-11-29T17:04:27Z``; recordings of earlier starts are left out.
    """
    first = since.replace("-", "").replace(":", "")
    return [
        parse(path.name, path.read_text(encoding="utf-8", errors="replace"))
        for path in sorted(directory.glob(f"*{SUFFIX}"))
        if path.name >= first
    ]


def parse(name: str, text: str) -> Recording:
    """One file's text. A line that is no record is noted, never fatal; a last line without its end is cut off."""
    recording = Recording(name)
    owners: dict[str, int] = {}
    lines = text.split("\n")
    recording.cut_off = bool(lines.pop())
    for number, line in enumerate(lines, 1):
        try:
            _add(recording, json.loads(line), owners)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, binascii.Error):
            recording.damaged.append(number)
    return recording


def _add(recording: Recording, record: Mapping[str, Any], owners: dict[str, int]) -> None:
    """File one record under its point. owners: request → a number, over the whole file."""
    point = record["point"]
    if point == "header":
        recording.header = record
    elif point == "target":
        recording.targets[_whole(record["n"])] = _target(record, owners)
    elif point in ("packed", "fc", "given"):
        prints = record.get("received") or record["prints"]
        slices = tuple(rows_of(text) for text in prints)
        output = rows_of(record["output"]) if record.get("output") else ()
        handed = Handed(
            target=_whole(record["target"]),
            rows=_whole(record["rows"]),
            slices=slices,
            dtype=str(record.get("dtype") or ""),
            output=output,
            positions=_positions(record),
        )
        {"packed": recording.packed, "fc": recording.fed, "given": recording.given}[point].append(handed)
    elif point == "draft":
        hidden = rows_of(record["hidden"]) if record.get("hidden") else ()
        recording.drafts.append(Draft(_whole(record["target"]), _whole(record["step"]), hidden))
    elif point == "verify":
        verified = list(_verified(record))
        recording.verified.extend(verified)
        if verified and _whole(record.get("topk") or 1) > 1:
            recording.paths[_whole(record["target"])] = verified[0].accepted + 1
    elif point == "dropped":
        recording.dropped = _whole(record["count"])
    elif point == "failure":
        recording.failures[str(record["hook"])] = (_whole(record["count"]), str(record["error"]))
    elif point == "end":
        recording.ended = str(record["reason"])


def _target(record: Mapping[str, Any], owners: dict[str, int]) -> Target:
    """A target record; what only schema 2 has may be missing."""
    states = {int(layer): rows_of(text) for layer, text in record["inputs"].items()}
    layers = None if record.get("layers") is None else _whole(record["layers"])
    last = (record.get("outputs") or {}).get(str(layers - 1)) if layers else None
    if layers and last:
        states[layers] = rows_of(last)
    rows = _whole(record["rows"])
    requests = tuple(str(request) for request in record.get("requests") or ())
    return Target(
        rows=rows,
        capture=tuple(_whole(layer) for layer in record["capture"]),
        captured=tuple(rows_of(text) for text in record["captured"]["prints"]),
        states=states,
        layers=layers,
        model=str(record.get("model") or ""),
        mode=str(record.get("mode") or ""),
        dtype=str(record.get("dtype") or ""),
        rank=_whole(record.get("rank") or 0),
        requests=requests,
        places=_places(record, requests, owners),
    )


def _positions(record: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(_whole(position) for position in record.get("positions") or ())


def _places(record: Mapping[str, Any], requests: Sequence[str], owners: dict[str, int]) -> Places:
    """Positions, and a number for the request that each belongs to: one that no other forward has where the engine
    names no requests or does not say which rows are whose."""
    positions = _positions(record)
    lengths = record.get("lengths") or [len(positions)]
    named = requests if len(requests) == len(lengths) else [f"{record['n']}/{index}" for index in range(len(lengths))]
    numbers = [
        owners.setdefault(name, len(owners)) for name, length in zip(named, lengths, strict=True) for _ in range(length)
    ]
    return Places(positions, tuple(numbers[: len(positions)])) if len(numbers) >= len(positions) else Places()


def _verified(record: Mapping[str, Any]) -> Iterator[Verified]:
    """One verification, request by request."""
    accepted = [_whole(count) for count in record["accepted"]]
    requests = record.get("requests") or [""] * len(accepted)
    drafted = record.get("drafted") or [[]] * len(accepted)
    for request, tokens, count in zip(requests, drafted, accepted, strict=True):
        yield Verified(str(request), count, _whole(record["steps"]), tuple(_whole(token) for token in tokens))


def _whole(value: object) -> int:
    """A whole number; TypeError for anything else, so that the line counts as damaged."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("not a whole number")
    return value


def rows_of(text: str, dimensions: int = DIMENSIONS) -> Rows:
    """A base64 fingerprint as its rows; ValueError when it holds no whole rows."""
    data = base64.b64decode(text, validate=True)
    size = 4 * dimensions
    if len(data) % size:
        raise ValueError("a fingerprint that ends within a row")
    return tuple(data[start : start + size] for start in range(0, len(data), size))
