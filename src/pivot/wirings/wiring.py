"""Probe records → which layers of the target really reach the drafter, and what is wrong with that.

A layer is named by its INPUT: the input of layer 3 is the output of layer 2, and the input of layer 0 is the embedding.
`pivot.wirings.records` reads, `pivot.wirings.matching` tells what a state is and `pivot.wirings.slices` what a slice is
over all calls, this module says what that means, and `pivot.wirings.wiring_findings` what to do about it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pivot.drafters import layers
from pivot.engines import descriptions
from pivot.findings import Finding
from pivot.wirings import wiring_findings
from pivot.wirings.matching import (
    Tally,
    agreement,
    cleared,
    layer_name,
    shared_rows,
    tally,
    worst,
)
from pivot.wirings.records import SCHEMA, Places, Recording, Rows, parse, read
from pivot.wirings.slices import Slice, slices

__all__ = [
    "SCHEMA", "Acceptance", "Slice", "Tally", "Wiring", "acceptance", "agreement", "analyse", "as_inputs",
    "asked_layers", "compare", "layer_name", "parse", "read",
]  # fmt: skip

IDS = "eagle_aux_hidden_state_layer_ids"
# the fixed prompts' requests; their replays generate one token, which nothing verifies
PROMPT, REPLAY = "pivot-prompt-", "pivot-replay-"
VERIFYING = "TARGET_VERIFY"  # the mode of a forward that verifies drafts
# the class whose layers run → an architecture of the engine's description that it belongs to
ARCHITECTURES = {"DeepseekV2Model": "DeepseekV3ForCausalLM", "LlamaModel": "LlamaForCausalLM"}


@dataclasses.dataclass(frozen=True, slots=True)
class Acceptance:
    """What verifications accepted. histogram[k]: how many of them accepted k drafted tokens."""

    histogram: tuple[int, ...] = ()

    @property
    def verifications(self) -> int:
        """How many there were."""
        return sum(self.histogram)

    @property
    def length(self) -> float | None:
        """Tokens per verification, the target's own included; None when nothing was verified."""
        if not self.verifications:
            return None
        return 1 + sum(accepted * count for accepted, count in enumerate(self.histogram)) / self.verifications

    @property
    def per_position(self) -> tuple[float, ...]:
        """The share of verifications that accepted at least 1, 2, … drafted tokens."""
        total = self.verifications
        return tuple(sum(self.histogram[k:]) / total for k in range(1, len(self.histogram))) if total else ()

    def as_dict(self) -> dict[str, Any]:
        """The acceptance as plain values."""
        return {
            "histogram": list(self.histogram),
            "verifications": self.verifications,
            "length": None if self.length is None else round(self.length, 4),
            "per_position": [round(share, 4) for share in self.per_position],
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Wiring:
    """What the records prove.

    capture: the layer inputs the engine was told to keep, None when never seen; asked: those the drafter's config asks
    for; expected: what the drafter was trained on; both as layer inputs in ascending order, None when not given.
    given: calls of a drafter that was handed a state as wide as its own, past its fc. drafts: draft step, what the
    state it consumed is, and how often. rule: how this engine reads layer ids, a name of `pivot.drafters.layers`.
    blind: drafts were verified, but none of the forwards that did it was seen.
    """

    sglang: tuple[str, ...]
    ranks: tuple[int, ...]
    forwards: int
    calls: int
    given: int
    capture: tuple[int, ...] | None
    asked: tuple[int, ...] | None
    expected: tuple[int, ...] | None
    depth: int | None
    slices: tuple[Slice, ...]
    captured: Tally
    packed: Tally
    fed: Tally
    acceptance: Acceptance
    drafts: tuple[tuple[int, str, int], ...] = ()
    rule: str | None = None
    blind: bool = False
    findings: tuple[Finding, ...] = ()

    @property
    def layers(self) -> tuple[int | None, ...]:
        """The layer input that each slice is, in the order `fc` receives them."""
        return tuple(piece.layer for piece in self.slices)

    @property
    def verdict(self) -> str:
        """Where the fault lies as far as the wiring goes.

        ``right``: every slice is what the drafter was trained on; ``consistent``: nothing is wrong, but what it was
        trained on is not given; ``config``: the engine does what it is told, and is told the wrong layers;
        ``engine``: it does not do what it is told; ``bypassed``: `fc` is never run; ``unseen``: too little was
        recorded.
        """
        if not self.slices:
            return "bypassed" if self.given else "unseen"
        if self.engine_faults:
            return "engine"
        if self.expected is not None and self.layers != self.expected:
            return "config"
        if self.blind:
            return "unseen"
        return "consistent" if self.expected is None else "right"

    @property
    def engine_faults(self) -> bool:
        """Whether the states are not what the engine was told to hand over."""
        told = self.asked if self.asked is not None else None if self.capture is None else tuple(sorted(self.capture))
        changed = any(item.compared and not item.same for item in (self.captured, self.packed, self.fed))
        return changed or None in self.layers or (told is not None and self.layers != told)

    def as_dict(self) -> dict[str, Any]:
        """The answer as plain values, for JSON and for Ansible."""
        return {
            "verdict": self.verdict,
            "sglang": list(self.sglang),
            "ranks": list(self.ranks),
            "forwards": self.forwards,
            "calls": self.calls,
            "given": self.given,
            "capture": _listed(self.capture),
            "asked": _listed(self.asked),
            "expected": _listed(self.expected),
            "layers": list(self.layers),
            "slices": [str(piece) for piece in self.slices],
            "pieces": [piece.as_dict() for piece in self.slices],
            "drafts": [{"step": step, "consumes": what, "times": times} for step, what, times in self.drafts],
            "acceptance": self.acceptance.as_dict(),
            "findings": [finding.as_dict() for finding in self.findings],
            "text": self.text(),
        }

    def text(self) -> str:
        """The answer in a few lines for a person; findings are rendered elsewhere."""
        versions = ", ".join(self.sglang) or "of an unknown version"
        ranks = f" on {len(self.ranks)} ranks" if len(self.ranks) > 1 else ""
        lines = [
            f"SGLang {versions}: {self.forwards} forwards of the target, {self.calls} calls of the drafter's fc{ranks}"
        ]
        lines.extend(str(piece) for piece in self.slices)
        if self.given:
            lines.append(f"past its fc, the drafter was given one state of its own width {self.given} times")
        if self.captured.compared and not self.captured.same:
            lines.append(f"captured = inputs of layers {_listed(self.capture)}, {self.captured} forwards")
        if self.packed.compared:
            lines.append(f"packed = captured, {self.packed} forwards")
        if self.fed.compared:
            lines.append(f"fc input = packed, {self.fed} calls")
        if self.asked is not None and self.capture and self.asked != tuple(sorted(self.capture)):
            lines.append(f"the config asks for the inputs of layers {list(self.asked)}: the engine keeps others")
        if self.slices and self.expected is not None:
            agree = "agree" if self.layers == self.expected else "DISAGREE"
            lines.append(f"expected are the inputs of layers {list(self.expected)}: they {agree}")
        if self.drafts and all(what == wiring_findings.OWN_STATE for _step, what, _times in self.drafts):
            steps = ", ".join(str(step) for step, _what, _times in self.drafts)
            lines.append(f"the draft steps {steps} consume the drafter's own states")
        if self.acceptance.length is not None:
            lines.append(acceptance_line(self.acceptance))
        return "\n".join(lines)


def acceptance_line(seen: Acceptance) -> str:
    """``accept length 2.92 over 88 verifications, by position 0.79 0.65 0.49``."""
    shares = " ".join(f"{share:.2f}" for share in seen.per_position)
    return f"accept length {seen.length or 0:.2f} over {seen.verifications} verifications, by position {shares}"


def _listed(values: Sequence[int] | None) -> list[int] | None:
    return None if values is None else list(values)


def as_inputs(layers: Sequence[int], convention: str) -> tuple[int, ...]:
    """Layer numbers of either convention as layer inputs, ascending as the engine packs them.

    convention: ``input`` (the number names a layer's input) or ``output`` (its output, so -1 is the embedding).
    """
    if convention not in ("input", "output"):
        raise ValueError(f"convention {convention!r} is neither input nor output")
    shift = 1 if convention == "output" else 0
    return tuple(sorted(layer + shift for layer in layers))


def setter_rule(recordings: Sequence[Recording]) -> str | None:
    """How the recorded engine reads layer ids for the recorded target, as `pivot.drafters.layers` calls it, or None."""
    versions = {str(recording.header.get("sglang")) for recording in recordings if recording.header}
    models = {target.model for recording in recordings for target in recording.targets.values()}
    if len(versions) != 1 or len(models) != 1:
        return None
    engine = descriptions.load(versions.pop()) or {}
    rule = (engine.get("eagle3") or {}).get(ARCHITECTURES.get(models.pop(), ""), {}).get("rule")
    return str(rule) if rule else None


def asked_layers(recordings: Sequence[Recording], config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layer inputs that a drafter's config.json makes the recorded engine keep, ascending; None when unknown."""
    rule = setter_rule(recordings)
    depth = _depth(recordings)
    eagle_config = config.get("eagle_config")
    ids = eagle_config.get(IDS) if isinstance(eagle_config, Mapping) else None
    if ids is None:
        return None if depth is None else tuple(sorted(layers.default_layers(depth)))
    usable = isinstance(ids, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in ids)
    return tuple(sorted(layers.kept_layers(ids, rule))) if rule and usable else None


def _depth(recordings: Sequence[Recording]) -> int | None:
    """How many layers the target has."""
    depths = {target.layers for recording in recordings for target in recording.targets.values()}
    return depths.pop() if len(depths) == 1 else None


def analyse(
    recordings: Sequence[Recording],
    expected: Sequence[int] | None = None,
    asked: Sequence[int] | None = None,
    meta: Mapping[str, Mapping[str, Any]] | None = None,
) -> Wiring:
    """All recordings of one service → one answer.

    expected: what the drafter was trained on, asked: what its config makes the engine keep, both as layer inputs, see
    `as_inputs` and `asked_layers`; meta: request id → the server's meta_info, to compare the acceptance with.
    """
    files, old = recordings, superseded(recordings)
    recordings = [recording for recording in files if all(recording is not other for other in old)]
    served = [recording for recording in recordings if recording.targets or recording.fed or recording.given]
    captures = set[tuple[int, ...]]().union(*(recording.captures for recording in served))
    capture = captures.pop() if len(captures) == 1 else None
    wiring = Wiring(
        sglang=tuple(sorted({str(item.header.get("sglang")) for item in recordings if item.header})),
        ranks=tuple(sorted({recording.rank for recording in served})),
        forwards=sum(len(recording.targets) for recording in served),
        calls=sum(len(recording.fed) for recording in served),
        given=sum(len(recording.given) for recording in served),
        capture=capture,
        asked=None if asked is None else tuple(sorted(asked)),
        expected=None if expected is None else tuple(sorted(expected)),
        depth=_depth(recordings),
        slices=slices(served, sorted(capture or ())),
        captured=tally(verdict for recording in served for verdict in _captured_verdicts(recording)),
        packed=tally(verdict for recording in served for verdict in _packed_verdicts(recording)),
        fed=tally(verdict for recording in served for verdict in _fed_verdicts(recording)),
        acceptance=acceptance(recordings),
        drafts=draft_steps(served),
        rule=setter_rule(recordings),
        blind=blind(served),
    )
    found = [
        *wiring_findings.of_reading(files),
        *wiring_findings.of_starts(old),
        *wiring_findings.of_wiring(wiring),
        *wiring_findings.of_ranks(rank_differences(served)),
        *wiring_findings.of_acceptance({name: acceptance(recordings, name) for name in meta or {}}, meta or {}),
    ]
    return dataclasses.replace(wiring, findings=tuple(found))


def superseded(recordings: Sequence[Recording]) -> list[Recording]:
    """Those of a start of the service after which the same rank was told to keep other layers."""
    latest = {recording.rank: recording.captures for recording in recordings if recording.targets}
    return [item for item in recordings if item.targets and item.captures != latest[item.rank]]


def blind(recordings: Sequence[Recording]) -> bool:
    """Whether drafts were verified and every forward is of another kind, as replayed CUDA graphs run no hook."""
    modes = {target.mode for recording in recordings for target in recording.targets.values()}
    return any(recording.verified for recording in recordings) and bool(modes) and not modes & {VERIFYING, ""}


# --- from point to point


def _captured_verdicts(recording: Recording) -> Iterable[str]:
    """Whether what was captured is the inputs of the layers the engine was told to keep, a verdict a forward."""
    for target in recording.targets.values():
        told = [target.states.get(layer, ()) for layer in sorted(target.capture)]
        if target.captured and all(told):
            yield worst(target.captured, told, shared=target.rows)


def _packed_verdicts(recording: Recording) -> Iterable[str]:
    """Whether what was packed is what was captured, a verdict a forward."""
    for handed in recording.packed:
        target = recording.targets.get(handed.target)
        if target is not None and target.capture:
            shared = shared_rows(handed, target.rows, target.places)
            yield worst(handed.slices, target.captured, shared=shared)


def _fed_verdicts(recording: Recording) -> Iterable[str]:
    """Whether what `fc` was fed is what was packed for it, a verdict a call."""
    packed = {handed.target: handed for handed in recording.packed}
    for handed in recording.fed:
        source, target = packed.get(handed.target), recording.targets.get(handed.target)
        if source is not None:
            places = target.places if target is not None and source.positions else Places()
            shared = shared_rows(handed, source.rows, places, recording.paths.get(handed.target))
            yield worst(handed.slices, source.slices, shared=shared)


# --- the drafter's own steps


def draft_steps(recordings: Iterable[Recording]) -> tuple[tuple[int, str, int], ...]:
    """Draft step, what the state it consumed is, and how often. Step 0 is the pass over the target's states."""
    seen: Counter[tuple[int, str]] = Counter()
    for recording in recordings:
        outputs = {handed.target: set(handed.output) for handed in recording.fed}
        before: tuple[int, Rows] = (-1, ())
        for draft in recording.drafts:
            if not draft.hidden:
                continue
            target = recording.targets.get(draft.target)
            states = target.states if target is not None else {}
            equal = [layer for layer, state in states.items() if set(draft.hidden) <= set(state)]
            what = wiring_findings.OWN_STATE
            if cleared(draft.hidden):
                what = "zero"
            elif equal:
                what = f"the target's {layer_name(equal[0])}"
            elif set(draft.hidden) <= outputs.get(draft.target, set()):
                what = "fc's output"
            elif before == (draft.target, draft.hidden):
                what = "the state of the step before"
            before = (draft.target, draft.hidden)
            seen[draft.step, what] += 1
    return tuple((step, what, times) for (step, what), times in sorted(seen.items()))


# --- acceptance


def acceptance(recordings: Sequence[Recording], request: str = "") -> Acceptance:
    """What was accepted of the fixed prompts' drafts, or of everyone's where there are none; request: of this one
    alone. With tensor parallelism every rank records the same verifications: those of the lowest count."""
    verifying = [recording for recording in recordings if recording.verified]
    rank = min((recording.rank for recording in verifying), default=0)
    seen = [item for recording in verifying if recording.rank == rank for item in recording.verified]
    if request:
        seen = [item for item in seen if item.request == request]
    else:
        seen = [item for item in seen if not item.request.startswith(REPLAY)]
        seen = [item for item in seen if item.request.startswith(PROMPT)] or seen
    if not seen:
        return Acceptance()
    counts = Counter(item.accepted for item in seen)
    most = max(*(item.steps for item in seen), *counts)
    return Acceptance(tuple(counts[accepted] for accepted in range(most + 1)))


# --- two runs


def compare(one: Wiring, other: Wiring) -> str:
    """What differs between two runs, in lines for a person."""
    lines: list[str] = []
    for name, first, second in (
        ("SGLang", ", ".join(one.sglang), ", ".join(other.sglang)),
        ("verdict", one.verdict, other.verdict),
        ("captured", _listed(one.capture), _listed(other.capture)),
        ("asked for", _listed(one.asked), _listed(other.asked)),
        ("expected", _listed(one.expected), _listed(other.expected)),
    ):
        if first != second:
            lines.append(f"{name}: {first} → {second}")
    for index in range(max(len(one.slices), len(other.slices))):
        first, second = (_what(wiring.slices, index) for wiring in (one, other))
        if first != second:
            lines.append(f"fc slice {index}: {first} → {second}")
    if one.acceptance.length is not None and other.acceptance.length is not None:
        lines.append(f"{acceptance_line(one.acceptance)} → {acceptance_line(other.acceptance)}")
    return "\n".join(lines) or "nothing differs"


def _what(pieces: Sequence[Slice], index: int) -> str:
    """What a slice is in every call, in a few words."""
    if index >= len(pieces):
        return "not there"
    match = pieces[index].match
    return "not always the same state" if match is None else str(match)


def rank_differences(recordings: Sequence[Recording]) -> dict[int, tuple[str, ...]]:
    """What each rank's slices are, where the ranks do not agree; empty where they do."""
    by_rank: dict[int, list[Recording]] = {}
    for recording in recordings:
        if recording.fed:
            by_rank.setdefault(recording.rank, []).append(recording)
    seen = {}
    for rank, items in sorted(by_rank.items()):
        pieces = slices(items)
        seen[rank] = tuple(_what(pieces, index) for index in range(len(pieces)))
    return seen if len(set(seen.values())) > 1 else {}
