"""Probe records → which layers of the target really reach the drafter.

The records are JSON lines (``probe/README.md``). A layer is named by its INPUT: the input of layer 3 is the output
of layer 2, and the input of layer 0 is the embedding. Fingerprints of equal rows are equal bit for bit within one
process, so a match is a proof, not a likelihood.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pivot.findings import Finding, Severity

SCHEMA = 1
SUFFIX = ".jsonl"
# how far two fingerprints may lie apart, relative to the larger, and still be called close: rounding, not a layer
CLOSE = 1e-5
REFERENCE = "docs/faults.md"

Rows = tuple[bytes, ...]
"""One fingerprint a row: little-endian float32 numbers."""


# --- reading


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One forward of the target. rows: of the whole forward; the fingerprints hold the first few of them.

    capture: the layer inputs the engine was told to keep; captured: what it kept, in its order; states: every
    layer's input, keyed by layer.
    """

    rows: int
    capture: tuple[int, ...]
    captured: tuple[Rows, ...]
    states: Mapping[int, Rows]


@dataclasses.dataclass(frozen=True, slots=True)
class Handed:
    """What was packed, or what `fc` was fed, after one forward of the target (its record number)."""

    target: int
    rows: int
    slices: tuple[Rows, ...]


@dataclasses.dataclass(slots=True)
class Recording:
    """One file: the records of one process. damaged: the numbers of the lines that could not be read."""

    name: str
    header: Mapping[str, Any] | None = None
    targets: dict[int, Target] = dataclasses.field(default_factory=dict)
    packed: list[Handed] = dataclasses.field(default_factory=list)
    fed: list[Handed] = dataclasses.field(default_factory=list)
    failures: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    ended: str = ""
    damaged: list[int] = dataclasses.field(default_factory=list)
    cut_off: bool = False


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
    lines = text.split("\n")
    recording.cut_off = bool(lines.pop())
    for number, line in enumerate(lines, 1):
        try:
            _add(recording, json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error):
            recording.damaged.append(number)
    return recording


def _add(recording: Recording, record: Mapping[str, Any]) -> None:
    """File one record under its point; points of later schemas are passed over."""
    point = record["point"]
    if point == "header":
        recording.header = record
    elif point == "target":
        recording.targets[record["n"]] = Target(
            rows=record["rows"],
            capture=tuple(record["capture"]),
            captured=tuple(_rows(text) for text in record["captured"]["prints"]),
            states={int(layer): _rows(text) for layer, text in record["inputs"].items()},
        )
    elif point in ("packed", "fc"):
        prints = record.get("received") or record["prints"]
        handed = Handed(record["target"], record["rows"], tuple(_rows(text) for text in prints))
        (recording.packed if point == "packed" else recording.fed).append(handed)
    elif point == "failure":
        recording.failures[record["hook"]] = (record["count"], record["error"])
    elif point == "end":
        recording.ended = record["reason"]


def _rows(text: str, dimensions: int = 16) -> Rows:
    """A base64 fingerprint as its rows; ValueError when it holds no whole rows."""
    data = base64.b64decode(text, validate=True)
    size = 4 * dimensions
    if len(data) % size:
        raise ValueError("a fingerprint that ends within a row")
    return tuple(data[start : start + size] for start in range(0, len(data), size))


# --- comparing


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
    which only the first few were recorded: one that is not found proves nothing.
    """
    if not rows or not others:
        return "unseen"
    if not aligned:
        return "exact" if set(rows) <= set(others) else "unseen"
    if rows == others:
        return "exact"
    if len(rows) == len(others) and all(map(_close, rows, others)):
        return "close"
    return "different"


def _close(one: bytes, other: bytes) -> bool:
    """Whether two fingerprints differ by no more than rounding does."""
    form = f"<{len(one) // 4}f"
    first, second = struct.unpack(form, one), struct.unpack(form, other)
    scale = max(math.hypot(*first), math.hypot(*second))
    return math.dist(first, second) <= CLOSE * scale


def _tally(verdicts: Iterable[str]) -> Tally:
    """Verdicts of `agreement` as a tally; what could not be told is left out."""
    counts = Counter(verdicts)
    return Tally(
        exact=counts["exact"],
        close=counts["close"],
        compared=counts["exact"] + counts["close"] + counts["different"],
    )


# --- the answer


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """One slice of `fc`'s input. layers: the layer inputs it was equal to, with their tallies, best first."""

    index: int
    calls: int
    layers: tuple[tuple[int, Tally], ...]

    @property
    def layer(self) -> int | None:
        """The layer whose input this slice is in every call, None when there is no such layer."""
        always = [layer for layer, tally in self.layers if tally.same and tally.compared == self.calls]
        return always[0] if always else None

    def __str__(self) -> str:
        """The line a person reads about this slice."""
        name = f"fc slice {self.index}"
        if self.layer is not None:
            return f"{name} = {layer_name(self.layer)}, {dict(self.layers)[self.layer]} calls"
        if not self.layers:
            return f"{name} = none of the recorded states, in {self.calls} calls"
        seen = "; ".join(f"{layer_name(layer)} {tally.exact + tally.close} times" for layer, tally in self.layers)
        return f"{name} = not always the same state in {self.calls} calls: {seen}"


@dataclasses.dataclass(frozen=True, slots=True)
class Wiring:
    """What the records prove. capture: the layer inputs the engine was told to keep, None when never seen;
    expected: what the drafter was trained on, as layer inputs in ascending order, None when not given."""

    sglang: tuple[str, ...]
    forwards: int
    calls: int
    capture: tuple[int, ...] | None
    expected: tuple[int, ...] | None
    slices: tuple[Slice, ...]
    packed: Tally
    fed: Tally
    findings: tuple[Finding, ...]

    @property
    def layers(self) -> tuple[int | None, ...]:
        """The layer input that each slice is, in the order `fc` receives them."""
        return tuple(piece.layer for piece in self.slices)

    def as_dict(self) -> dict[str, Any]:
        """The answer as plain values, for JSON and for Ansible."""
        return {
            "sglang": list(self.sglang),
            "forwards": self.forwards,
            "calls": self.calls,
            "capture": None if self.capture is None else list(self.capture),
            "expected": None if self.expected is None else list(self.expected),
            "layers": list(self.layers),
            "slices": [str(piece) for piece in self.slices],
            "findings": [finding.as_dict() for finding in self.findings],
            "text": self.text(),
        }

    def text(self) -> str:
        """The answer in a few lines for a person; findings are rendered elsewhere."""
        versions = ", ".join(self.sglang) or "of an unknown version"
        lines = [f"SGLang {versions}: {self.forwards} forwards of the target, {self.calls} calls of the drafter's fc"]
        lines.extend(str(piece) for piece in self.slices)
        if self.packed.compared:
            lines.append(f"packed = captured, {self.packed} forwards")
        if self.fed.compared:
            lines.append(f"fc input = packed, {self.fed} calls")
        if self.slices and self.expected is not None:
            agree = "agree" if self.layers == self.expected else "DISAGREE"
            lines.append(f"expected are the inputs of layers {list(self.expected)}: they {agree}")
        return "\n".join(lines)


def layer_name(layer: int) -> str:
    """``input of layer 3 (output of layer 2)``; the input of layer 0 is the embedding."""
    return "the embedding (input of layer 0)" if layer == 0 else f"input of layer {layer} (output of layer {layer - 1})"


def as_inputs(layers: Sequence[int], convention: str) -> tuple[int, ...]:
    """Layer numbers of either convention as layer inputs, ascending as the engine packs them.

    convention: ``input`` (the number names a layer's input) or ``output`` (its output, so -1 is the embedding).
    """
    if convention not in ("input", "output"):
        raise ValueError(f"convention {convention!r} is neither input nor output")
    shift = 1 if convention == "output" else 0
    return tuple(sorted(layer + shift for layer in layers))


def analyse(recordings: Sequence[Recording], expected: Sequence[int] | None = None) -> Wiring:
    """All recordings of one service → one answer. expected: layer inputs, see `as_inputs`."""
    served = [recording for recording in recordings if recording.targets or recording.fed]
    captures = {target.capture for recording in served for target in recording.targets.values()}
    slices = _slices(served)
    partial = Wiring(
        sglang=tuple(sorted({str(item.header["sglang"]) for item in recordings if item.header})),
        forwards=sum(len(recording.targets) for recording in served),
        calls=sum(len(recording.fed) for recording in served),
        capture=captures.pop() if len(captures) == 1 else None,
        expected=None if expected is None else tuple(sorted(expected)),
        slices=slices,
        packed=_tally(verdict for recording in served for verdict in _packed_verdicts(recording)),
        fed=_tally(verdict for recording in served for verdict in _fed_verdicts(recording)),
        findings=(),
    )
    return dataclasses.replace(partial, findings=(*_reading_findings(recordings), *_wiring_findings(partial)))


def _slices(recordings: Sequence[Recording]) -> tuple[Slice, ...]:
    """Every slice of every `fc` call against every layer input of the forward before it."""
    verdicts: dict[int, dict[int, list[str]]] = {}
    calls: Counter[int] = Counter()
    for recording in recordings:
        for handed in recording.fed:
            target = recording.targets.get(handed.target)
            if target is None:
                continue
            aligned = handed.rows == target.rows
            for index, rows in enumerate(handed.slices):
                found = {layer: agreement(rows, state, aligned=aligned) for layer, state in target.states.items()}
                if not aligned and "exact" not in found.values():
                    continue  # a selection of rows that were not recorded
                calls[index] += 1
                for layer, verdict in found.items():
                    verdicts.setdefault(index, {}).setdefault(layer, []).append(verdict)
    return tuple(_slice(index, calls[index], verdicts.get(index, {})) for index in sorted(calls))


def _slice(index: int, calls: int, verdicts: Mapping[int, Sequence[str]]) -> Slice:
    """One slice from its verdicts by layer; layers that never matched are left out."""
    tallies = {layer: _tally(items) for layer, items in verdicts.items()}
    matched = [(layer, tally) for layer, tally in tallies.items() if tally.exact + tally.close]
    matched.sort(key=lambda item: (-item[1].exact, -item[1].close, item[0]))
    return Slice(index, calls, tuple(matched))


def _packed_verdicts(recording: Recording) -> Iterable[str]:
    """Whether what was packed is what was captured, a verdict a forward."""
    for handed in recording.packed:
        target = recording.targets.get(handed.target)
        if target is not None:
            yield _worst(handed.slices, target.captured, aligned=handed.rows == target.rows)


def _fed_verdicts(recording: Recording) -> Iterable[str]:
    """Whether what `fc` was fed is what was packed for it, a verdict a call."""
    packed = {handed.target: handed for handed in recording.packed}
    for handed in recording.fed:
        source = packed.get(handed.target)
        if source is not None:
            yield _worst(handed.slices, source.slices, aligned=handed.rows == source.rows)


def _worst(slices: Sequence[Rows], others: Sequence[Rows], *, aligned: bool) -> str:
    """The verdict of the slice that agrees least; another number of slices is a difference."""
    if len(slices) != len(others):
        return "different"
    verdicts = {agreement(rows, other, aligned=aligned) for rows, other in zip(slices, others, strict=True)}
    order = ("different", "unseen", "close", "exact")
    return next((verdict for verdict in order if verdict in verdicts), "unseen")


# --- findings


def _reading_findings(recordings: Sequence[Recording]) -> list[Finding]:
    """What the files themselves say: nothing there, damage, hooks that failed, a recording that ended."""
    if not any(recording.header for recording in recordings):
        return [
            _finding(
                "WIRE-NO-RECORDS",
                Severity.ERROR,
                "probe records",
                f"{len(recordings)} record files were read and none has a header: the probe was not loaded",
                "switch debugging on, look for pivot_probe in the server's log, and send a request",
            )
        ]
    found: list[Finding] = []
    for recording in recordings:
        found.extend(_file_findings(recording))
    if not any(recording.targets for recording in recordings):
        found.append(
            _finding(
                "WIRE-NO-FORWARD",
                Severity.ERROR,
                "probe records",
                f"the probe was loaded but saw no forward of the target ({_missing_hooks(recordings)})",
                "send a request; where the engine uses CUDA graphs, switch them off while debugging",
            )
        )
        return found
    for point, seen, severity in (
        ("packed", any(recording.packed for recording in recordings), Severity.WARNING),
        ("fc", any(recording.fed for recording in recordings), Severity.ERROR),
    ):
        if not seen:
            found.append(
                _finding(
                    "WIRE-POINT-MISSING",
                    severity,
                    f"point {point}",
                    f"forwards of the target were recorded, but nothing at {point} ({_missing_hooks(recordings)})",
                    "check that the drafter is an EAGLE-3 drafter and that speculative decoding is on"
                    if point == "fc"
                    else "the answer rests on the two other points",
                )
            )
    return found


def _file_findings(recording: Recording) -> list[Finding]:
    """The findings of one file."""
    found: list[Finding] = []
    header = recording.header or {}
    if header and header.get("schema") != SCHEMA:
        message = f"its records follow schema {header.get('schema')}, this Pivot reads schema {SCHEMA}"
        fix = "analyse them with the Pivot that recorded them"
        found.append(_finding("WIRE-SCHEMA", Severity.ERROR, recording.name, message, fix))
    if recording.damaged:
        lines = ", ".join(str(number) for number in recording.damaged[:5])
        message = f"{len(recording.damaged)} lines are no records (line {lines}); they were left out"
        found.append(_finding("WIRE-DAMAGED", Severity.WARNING, recording.name, message, "collect the records again"))
    if recording.cut_off:
        message = "its last line is cut off, as when a process is killed while writing; it was left out"
        found.append(_finding("WIRE-CUT-OFF", Severity.INFO, recording.name, message, ""))
    if recording.ended:
        message = f"recording ended before the service did: {recording.ended}"
        fix = "raise debug_probes_max_bytes if later requests matter"
        found.append(_finding("WIRE-ENDED", Severity.INFO, recording.name, message, fix))
    for hook, (count, error) in sorted(recording.failures.items()):
        message = f"the hook {hook} failed at least {count} times ({error}); serving was not affected"
        fix = "report it with the engine's version; what this hook observes is incomplete"
        found.append(_finding("WIRE-HOOK-FAILED", Severity.WARNING, recording.name, message, fix))
    return found


def _wiring_findings(wiring: Wiring) -> list[Finding]:
    """What the comparison proves to be wrong."""
    found: list[Finding] = []
    if wiring.packed.compared and not wiring.packed.same:
        message = f"what the logits processor packs is not what the target captured: {wiring.packed} forwards"
        fix = "the engine loses or reorders states between the two; compare its version with a known good one"
        found.append(_finding("WIRE-PACKED", Severity.ERROR, "hand-over", message, fix))
    if wiring.fed.compared and not wiring.fed.same:
        message = f"what fc is fed is not what was packed for it: {wiring.fed} calls"
        fix = "the engine changes the states on their way to the drafter; compare its version with a known good one"
        found.append(_finding("WIRE-FED", Severity.ERROR, "hand-over", message, fix))
    unknown = [piece for piece in wiring.slices if piece.layer is None]
    for piece in unknown:
        code = "WIRE-UNSTABLE" if piece.layers else "WIRE-UNKNOWN"
        fix = "look for a plugin or a patch that touches hidden states, and for a drafter that normalises its input"
        found.append(_finding(code, Severity.ERROR, f"fc slice {piece.index}", f"{piece}", fix))
    if wiring.expected is None or not wiring.slices or unknown:
        return found
    expected, layers = list(wiring.expected), list(wiring.layers)
    if layers != expected and sorted(layers, key=str) == sorted(expected, key=str):
        message = f"fc receives the right layers in the order {layers}, the drafter was trained on {expected}"
        fix = "the order of the slices is the engine's: look for what exchanges them before fc"
        found.append(_finding("WIRE-ORDER", Severity.ERROR, "fc input", message, fix))
    elif layers != expected:
        message = f"fc receives the inputs of layers {layers}, the drafter was trained on the inputs of {expected}"
        fix = f"set the layer ids so that the engine captures the inputs of {expected}, and restart"
        found.append(_finding("WIRE-IDS", Severity.ERROR, "fc input", message, fix))
    return found


def _missing_hooks(recordings: Sequence[Recording]) -> str:
    """Which hooks this engine has no place for, as the headers tell."""
    states = {
        hook: str(state)
        for recording in recordings
        if recording.header
        for hook, state in recording.header.get("hooks", {}).items()
        if state != "registered"
    }
    if not states:
        return "every hook found its place"
    return "; ".join(f"{hook} {state}" for hook, state in sorted(states.items()))


def _finding(code: str, severity: Severity, subject: str, message: str, fix: str) -> Finding:
    return Finding(code, severity, subject, message, fix, REFERENCE)
