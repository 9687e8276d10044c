"""What-if without a restart: which wirings and repairs to evaluate, and what predicted against served means.

The evaluator (``roles/debug_probes/files/whatif``, on the host) predicts the accept length of a drafter for every
candidate; this module makes the candidates and judges. A layer is named by its input, and a wiring is the layer inputs
in the order of `fc`'s slices.

A difference counts when both hold: the accept lengths over all prompts differ by more than ACCURACY, which is how
exactly the evaluator predicts, and the mean of the differences prompt by prompt lies further from zero than chance puts
it one time in two hundred (Student's t over the prompts, `pivot.spread`). So the bar rises by itself where prompts are
few or disagree, and one prompt alone proves nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pivot.findings import Finding, Severity, render
from pivot.layers import default_layers, numbers
from pivot.program import program
from pivot.spread import margin, mean_error

ACCURACY = 0.15
FORMAT = 1
REFERENCE = "docs/faults.md"
EVALUATOR = Path(__file__).resolve().parents[2] / "roles/debug_probes/files/whatif"
# factors that one block of fc, or all of it, is tried with
FACTORS = (0.25, 0.5, 2.0, 4.0)
# thetas that drafters in the field were trained with
THETAS = (1e4, 5e4, 1e5, 5e5, 1e6)
NORMS = (
    "layers.0.input_layernorm.weight",
    "layers.0.hidden_norm.weight",
    "layers.0.post_attention_layernorm.weight",
    "norm.weight",
)
GET_AGAIN = "get the drafter's files again from their source, and compare them with its manifest"
MAKE_D2T = "d2t holds token id minus draft id; take it from the drafter's source, or make it anew from t2d"
WRITE_ROPE = "write rope_theta and rope_scaling of its training into the drafter's config.json"
FEEDS = ("shift", "shuffle")  # what is done to the states, not to the drafter
Json = Mapping[str, Any]
Layers = tuple[int, ...]


# --- the candidates


def wirings(
    depth: int,
    count: int,
    *,
    served: Sequence[int] | None = None,
    contract: Sequence[int] | None = None,
    others: Mapping[str, Sequence[int]] | None = None,
) -> dict[Layers, str]:
    """Layer choices to evaluate → what each is. depth: layers of the target; count: states that `fc` takes.

    others: further choices by name, such as what a training sample suggests. Choices that the target has no states
    for are left out; the output of the last layer (input `depth`) can be evaluated, though no engine captures it.
    """
    default = _default(depth, count)
    base = _base(depth, count, served, contract)
    named: list[tuple[str, Sequence[int]]] = [
        ("served", served or []),
        ("contract", contract or []),
        ("the engine's default", default),
        *(others or {}).items(),
        *_shifted("contract", contract or []),
        *_shifted("served", served or []),
        *([] if contract else _shifted("default", default)),
    ]
    for index, shift in itertools.product(range(len(base)), (-1, 1)):
        changed = [layer + shift if other == index else layer for other, layer in enumerate(base)]
        if len(set(changed)) == len(changed):
            named.append((f"slice {index} {shift:+d}", changed))
    if base and base[0] != 0:
        named += [("embedding first", [0, *base[:-1]]), ("embedding for the first", [0, *base[1:]])]
    named.append(("the last layers", list(range(depth - count, depth))))
    orders = list(itertools.permutations(range(len(base))))[1:] if len(base) <= 3 else []
    named += [(f"order {' '.join(map(str, order))}", [base[index] for index in order]) for order in orders]
    found: dict[Layers, list[str]] = {}
    for name, layers in named:
        if len(layers) == count and all(0 <= layer <= depth for layer in layers):
            found.setdefault(tuple(layers), []).append(name)
    return {layers: ", ".join(names) for layers, names in found.items()}


def _default(depth: int, count: int) -> list[int]:
    return sorted(default_layers(depth)) if count == 3 else []


def _base(depth: int, count: int, served: Sequence[int] | None, contract: Sequence[int] | None) -> list[int]:
    """The choice that counts as right: the first of contract, served and default that `fc` can take; else empty."""
    return next((list(one) for one in (contract, served, _default(depth, count)) if one and len(one) == count), [])


def _shifted(name: str, layers: Sequence[int]) -> list[tuple[str, list[int]]]:
    return [(f"{name} {shift:+d}", [layer + shift for layer in layers]) for shift in (-1, 1)] if layers else []


def repairs(count: int) -> dict[str, dict[str, Any]]:
    """Changes to a single part of the drafter, or to what it is fed, by name."""
    found: dict[str, dict[str, Any]] = {"states of other positions": {"shuffle": True}}
    for index in range(count):
        found[f"slice {index} from the position before"] = {"shift": [int(index == other) for other in range(count)]}
        for factor in FACTORS:
            scale = [factor if other == index else 1.0 for other in range(count)]
            found[f"fc block {index} x {factor:g}"] = {"fc_scale": scale}
    found["all slices from the position before"] = {"shift": [1] * count}
    found |= {f"fc x {factor:g}": {"fc_scale": [factor] * count} for factor in FACTORS}
    found |= {f"d2t from {source}": {"d2t": source} for source in ("t2d", "absolute", "head")}
    found["the target's head"] = {"head": "target"}
    found |= {f"rope theta {theta:g}": {"rope": {"theta": theta}} for theta in THETAS}
    found["the target's rope"] = {"rope": "target"}
    found["rope in the other style"] = {"rope": "other style"}
    found |= {f"{name} of ones": {"ones": [name]} for name in NORMS}
    found |= {f"next step fed {how}": {"norm_output": value} for how, value in (("normed", True), ("raw", False))}
    found |= {f"without {part}": {"off": [part]} for part in ("attention", "mlp")}
    return found


def candidates(
    depth: int,
    count: int,
    *,
    served: Sequence[int] | None = None,
    contract: Sequence[int] | None = None,
    others: Mapping[str, Sequence[int]] | None = None,
) -> list[dict[str, Any]]:
    """Everything to evaluate, as the evaluator takes it: wirings, then repairs at the wiring that counts as right."""
    chosen = wirings(depth, count, served=served, contract=contract, others=others)
    found: list[dict[str, Any]] = [{"name": name, "layers": list(layers)} for layers, name in chosen.items()]
    base = _base(depth, count, served, contract)
    if tuple(base) in chosen:
        found += [{"name": name, "layers": base, "repair": repair} for name, repair in repairs(count).items()]
    return found


# --- figures


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One accept length against another. total: over all prompts; mean: of the differences by prompt, margin: how far
    chance puts that mean (infinite for one prompt)."""

    total: float
    mean: float
    margin: float

    @property
    def counts(self) -> bool:
        """Whether it is more than inexactness and chance."""
        return abs(self.total) > ACCURACY and abs(self.mean) > self.margin


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """Accept length over all prompts and by prompt, and the share of verifications that accept 1, 2, … drafts."""

    length: float
    by_prompt: Mapping[str, float]
    per_position: tuple[float, ...]

    def against(self, other: Figures) -> Difference:
        """This minus the other, over the prompts that both have."""
        pairs = [(self.by_prompt[name], other.by_prompt[name]) for name in self.by_prompt if name in other.by_prompt]
        apart = [one - two for one, two in pairs]
        mean = mean_error(apart)[0]
        # the lengths over all prompts say something about each other only where they are of the same prompts
        total = self.length - other.length if self.by_prompt.keys() == other.by_prompt.keys() else mean
        return Difference(total, mean, margin(apart))


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One candidate and what is predicted for it. first: by prompt, how many of the first drafts are accepted;
    at_most: with a tree of drafts, what it could accept at best."""

    name: str
    layers: Layers
    repair: Json
    figures: Figures
    first: tuple[float, ...] = ()
    at_most: float | None = None

    @property
    def is_wiring(self) -> bool:
        """Whether only the choice of layers is changed."""
        return not self.repair

    @property
    def is_feed(self) -> bool:
        """Whether something is done to the states that the drafter is fed."""
        return any(name in self.repair for name in FEEDS)

    @property
    def is_repair(self) -> bool:
        """Whether a part of the drafter is changed."""
        return bool(self.repair) and not self.is_feed


def rows_of(evaluation: Json) -> list[Row]:
    """The candidates of an evaluation; a KeyError names what it lacks."""
    ids = evaluation["sequences"]
    found = []
    for entry in evaluation["candidates"]:
        lengths = {name: one["length"] for name, one in zip(ids, entry["sequences"], strict=True) if one["length"]}
        first = tuple(one["passed"][0] / one["reached"][0] for one in entry["sequences"] if one["reached"][0])
        figures = Figures(entry["length"], lengths, tuple(entry["per_position"]))
        found.append(Row(entry["name"], tuple(entry["layers"]), entry["repair"], figures, first, entry.get("at_most")))
    return found


def served_figures(asked: Json) -> Figures | None:
    """What was served, from the record of the asked prompts; None when nothing was drafted."""
    lengths = {one["id"]: one["accept_length"] for one in asked["prompts"] if one["accept_length"] is not None}
    if asked["accept_length"] is None or not lengths:
        return None
    return Figures(asked["accept_length"], lengths, tuple(asked["per_position"]))


# --- the judgement


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is judged. evaluation: the evaluator's answer; asked: `pivot.ask.as_dict`; served: the layer inputs that
    reach `fc`, slice by slice, None where they are not known; contract: those the drafter was trained on, ascending;
    flags: of the launch, any spelling; least: the accept length that is expected at least, 0 when nobody says."""

    subject: str
    evaluation: Json
    asked: Json
    served: Sequence[int | None] | None = None
    contract: Sequence[int] | None = None
    flags: Json = dataclasses.field(default_factory=dict)
    environment: Json = dataclasses.field(default_factory=dict)
    least: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Judgement:
    """The answer. reference: the row that what was served is compared with; base: the row at which the drafter's
    parts are judged; findings: of serving first, then of the choice of layers, then of the drafter."""

    served: Figures | None
    reference: Row | None
    base: Row | None
    rows: tuple[Row, ...]
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]

    def by_family(self, *families: str) -> list[Finding]:
        """The findings whose code begins so."""
        return [finding for finding in self.findings if finding.code.startswith(families)]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for Ansible."""
        return {
            "format": FORMAT,
            "served": None if self.served is None else _figures(self.served),
            "reference": None if self.reference is None else self.reference.name,
            "base": None if self.base is None else self.base.name,
            "rows": [
                {"name": row.name, "layers": list(row.layers), "repair": dict(row.repair), **_figures(row.figures)}
                for row in self.rows
            ],
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
            "notes": list(self.notes),
            "findings": [finding.as_dict() for finding in self.findings],
            "text": self.text(),
        }

    def text(self, most: int = 12) -> str:
        """The table for a terminal: what was served, then wirings and repairs, best first."""
        lines = [f"{'layer inputs':<14} {'predicted':>9} {'+-':>5}  {'by position':<18} what it is"]
        if self.served:
            lines.append(f"{'':<14} {self.served.length:>9.2f} {'':>5}  {_shares(self.served):<18} SERVED")
        parts = [
            ("", [row for row in self.rows if row.is_wiring]),
            ("parts of the drafter, and what it is fed:", [row for row in self.rows if not row.is_wiring]),
        ]
        for title, rows in parts:
            shown = sorted(rows, key=lambda row: -row.figures.length)
            kept = shown[:most] + [row for row in shown[most:] if row in (self.reference, self.base)]
            lines += [title] if title and kept else []
            lines += [self._line(row) for row in kept]
            if len(shown) > len(kept):
                lines.append(f"… and {len(shown) - len(kept)} more")
        return "\n".join(line for line in lines if line)

    def _line(self, row: Row) -> str:
        spread = ""
        if self.base is not None and row is not self.base:
            chance = row.figures.against(self.base.figures).margin
            spread = f"{chance:.2f}" if math.isfinite(chance) else ""
        return (
            f"{numbers(row.layers):<14} {row.figures.length:>9.2f} {spread:>5}  {_shares(row.figures):<18} {row.name}"
        )


def _figures(figures: Figures) -> dict[str, Any]:
    return {
        "length": figures.length,
        "per_position": list(figures.per_position),
        "by_prompt": dict(figures.by_prompt),
    }


def _shares(figures: Figures) -> str:
    return " ".join(f"{share:.2f}" for share in figures.per_position)


def judge(question: Question) -> Judgement:
    """All findings about predicted against served, worst suspects first within each part."""
    rows = rows_of(question.evaluation)
    served = served_figures(question.asked)
    wired = _known(question.served)
    contract = tuple(question.contract) if question.contract else None
    base = _row(rows, contract) or _row(rows, wired) or (rows[0] if rows else None)
    reference = _row(rows, wired) or base
    look = _Look(question, rows, served, wired, contract, reference, base)
    found = [*_serving(look), *_blamed(look)]
    return Judgement(
        served,
        reference,
        base,
        tuple(rows),
        tuple((item["name"], item["reason"]) for item in question.evaluation.get("left_out", [])),
        tuple(question.evaluation.get("notes", [])),
        tuple(found),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Look:
    question: Question
    rows: Sequence[Row]
    served: Figures | None
    wired: Layers | None
    contract: Layers | None
    reference: Row | None
    base: Row | None

    @property
    def parts(self) -> Json:
        """What the evaluator says about the drafter's parts."""
        parts: Json = self.question.evaluation.get("parts", {})
        return parts

    def finding(self, code: str, severity: Severity, message: str, fix: str) -> Finding:
        """A finding about the host in question."""
        return Finding(code, severity, self.question.subject, message, fix, REFERENCE)


def _known(layers: Sequence[int | None] | None) -> Layers | None:
    """The layers, when every one of them is known."""
    if not layers:
        return None
    known = tuple(layer for layer in layers if layer is not None)
    return known if len(known) == len(layers) else None


def _row(rows: Iterable[Row], layers: Layers | None) -> Row | None:
    return next((row for row in rows if row.is_wiring and row.layers == layers), None)


# --- serving


def _serving(look: _Look) -> Iterator[Finding]:
    """Whether what is served is what the drafter can do with the layers that it is fed."""
    if look.served is None or look.reference is None:
        return
    difference = look.served.against(look.reference.figures)
    if len(look.served.by_prompt) < 2:
        message = "predicted and served are compared on one prompt only, so nothing can be concluded from them"
        yield look.finding("WHATIF-FEW", Severity.WARNING, message, "ask more prompts: debug_probes_prompts")
    low, high = _bounds(look.reference)
    if not difference.counts or low - ACCURACY <= look.served.length <= high + ACCURACY:
        return
    wiring = (
        f"the layers that reach fc ({numbers(look.reference.layers)})"
        if look.wired
        else f"the layers that should reach fc ({numbers(look.reference.layers)})"
    )
    predicted = look.reference.figures.length
    way = "below" if difference.total < 0 else "above"
    message = f"served is {look.served.length:.2f}, far {way} the {predicted:.2f} predicted for {wiring}"
    reasons = list(launch_reasons(look.question.flags, look.question.environment, below=difference.total < 0))
    if reasons:
        message += f": {'; '.join(reason for reason, _ in reasons)}"
        fix = "; ".join(change for _, change in reasons)
    else:
        like = [
            row.name
            for row in look.rows
            if row.is_feed
            and abs(row.figures.length - look.served.length) <= ACCURACY
            and not look.served.against(row.figures).counts
        ]
        message += "; the drafter is not what loses it"
        message += f" (as much as with {' or '.join(like)})" if like else ""
        fix = (
            "no flag of the launch explains it: look for a plugin, a patch or a bug of this engine's version, the "
            "attention backend and the quantisation of the drafter"
        )
    code = "WHATIF-SERVED-LESS" if difference.total < 0 else "WHATIF-SERVED-MORE"
    yield look.finding(code, Severity.ERROR, message, fix)


def _bounds(row: Row) -> tuple[float, float]:
    """Between which accept lengths an engine can be. A tree of drafts may accept more than the chain that is evaluated,
    or less, where it spends its few tokens on width; the best first draft it always holds."""
    if row.at_most is None:
        return row.figures.length, row.figures.length
    return 1 + row.figures.per_position[0], row.at_most


def launch_reasons(flags: Json, environment: Json, *, below: bool) -> Iterator[tuple[str, str]]:
    """Settings of a launch that let an engine accept less (or more) than the drafter could: what and change."""
    given = {str(name).lstrip("-").replace("-", "_"): value for name, value in flags.items()}
    simulated = environment.get("SGLANG_SIMULATE_ACC_LEN")
    if simulated not in (None, "", "-1", -1):
        yield f"SGLANG_SIMULATE_ACC_LEN={simulated} makes acceptance up", "remove it: its figures mean nothing"
    algorithm = given.get("speculative_algorithm")
    if below and algorithm is not None and str(algorithm).upper() != "EAGLE3":
        yield (
            f"speculative-algorithm is {algorithm}, with which no layer states are captured and fc is not run",
            "write speculative-algorithm: EAGLE3",
        )
    texts = {
        "speculative_draft_window_size": "limits what the drafter attends to",
        "speculative_draft_model_quantization": "rounds the drafter's weights",
        "speculative_token_map": "is another map from draft ids to tokens",
    }
    for name, what in texts.items():
        value = given.get(name)
        if below and value not in (None, "", "unquant"):
            flag = name.replace("_", "-")
            yield f"{flag} {value} {what}", f"serve once without {flag}"
    if below and str(given.get("kv_cache_dtype", "auto")).startswith("fp8"):
        yield "kv-cache-dtype rounds keys and values to fp8", "serve once with kv-cache-dtype: auto"
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        value = given.get(name)
        if not below and isinstance(value, int | float) and value < 1:
            flag = name.replace("_", "-")
            yield f"{flag} {value} accepts drafts that the target would not choose", f"remove {flag}"


# --- the choice of layers


def _blamed(look: _Look) -> list[Finding]:
    """What the choice of layers and the drafter are blamed for.

    What a part shows by itself is a proof. Of the two explanations by prediction the one that explains more counts:
    other layers may make up for a part that is wrong, and a repair for layers that are.
    """
    layers, (proofs, guesses) = list(_layers(look)), _drafter(look)
    drafter = [*proofs, *guesses]
    if not layers or not drafter:
        return [*layers, *drafter]
    wired = max((row.figures.length for row in look.rows if _packable(row)), default=0.0)
    mended = max((row.figures.length for row in look.rows if not _packable(row) and not row.is_feed), default=0.0)
    if proofs or wired <= mended:
        return [*drafter, *(layers if look.reference is not look.base else [])]
    return [*layers, *(finding for finding in guesses if finding.code != "WHATIF-TARGET")]


def _packable(row: Row) -> bool:
    """Whether it is a choice of layers, in the order in which an engine packs them."""
    return row.is_wiring and row.layers == tuple(sorted(row.layers))


def _layers(look: _Look) -> Iterator[Finding]:
    """Whether another choice of layers, in an order that an engine can pack, predicts far more than what is fed."""
    reference = look.reference
    if reference is None:
        return
    better = [row for row in look.rows if _packable(row) and _better(row, reference)]
    if not better:
        return
    best = max(better, key=lambda row: row.figures.length)
    order = max((row for row in look.rows if row.is_wiring), key=lambda row: row.figures.length)
    if order is not best and _better(order, best):
        return  # the order of fc's blocks explains more: see the drafter
    where = f"the inputs of layers {numbers(best.layers)}"
    gain = f"{best.figures.length:.2f} is predicted with {where}, {reference.figures.length:.2f} with those"
    if look.contract and best.layers != look.contract and reference.layers == look.contract:
        message = f"{gain} of the contract ({numbers(look.contract)}): the contract may be wrong"
        fix = "look up what the drafter was trained on (pivot compare-training), then correct the contract in the pins"
        yield look.finding("WHATIF-CONTRACT", Severity.ERROR, message, fix)
        return
    message = f"{gain} that reach fc ({numbers(reference.layers)})"
    fix = f"make the engine keep {where}: sglang_server_eagle_layer_ids, as read by this engine"
    yield look.finding("WHATIF-LAYERS", Severity.ERROR, message, fix)


def _better(row: Row, other: Row) -> bool:
    difference = row.figures.against(other.figures)
    return difference.total > 0 and difference.counts


# --- the drafter


def _mends(row: Row, base: Row) -> bool:
    """Whether a repair gains enough for its part to be blamed.

    Rope settings have to gain twice as much: at the length of the prompts neighbouring thetas draft nearly alike, and
    none of them is then wrong.
    """
    gain = row.figures.length - base.figures.length
    return _better(row, base) and not ("rope" in row.repair and gain <= 2 * ACCURACY)


def _drafter(look: _Look) -> tuple[list[Finding], list[Finding]]:
    """What of the drafter itself is wrong: what its parts prove, and what a repair of one part would gain."""
    base = look.base
    if base is None:
        return [], []
    poor = little(look)
    proofs = list(_proofs(look, poor))
    repaired = [row for row in look.rows if row.is_repair or _reordered(row, base)]
    better = sorted((row for row in repaired if _mends(row, base)), key=lambda row: -row.figures.length)
    if not better:
        return proofs, [_stranger(look)] if poor and not proofs else []
    best = better[0]
    code, what, fix = _repair(best, look)
    gain = (
        f"{best.figures.length:.2f} is predicted with {best.name}, {base.figures.length:.2f} with the drafter as it is"
    )
    proven = next((finding for finding in proofs if finding.code == code), None)
    if proven is not None:
        said = dataclasses.replace(proven, message=f"{proven.message}; {gain}")
        return [said, *(finding for finding in proofs if finding is not proven)], []
    others = [f"{row.name} {row.figures.length:.2f}" for row in better[1:4]]
    less = f"; less with {', '.join(others)}" if others else ""
    return proofs, [look.finding(code, Severity.ERROR, f"{what}: {gain}{less}", fix)]


def little(look: _Look) -> bool:
    """Whether the drafter predicts little even with the right layers.

    That is: more often wrong than right with its first draft, or below what the inventory expects, by more than chance
    over the prompts; or fewer than one draft in three accepted, and not clearly less with the neighbours of all its
    layers: a drafter that fits its target notices those.
    """
    assert look.base is not None  # noqa: S101 - the callers look
    figures, first = look.base.figures, look.base.first
    lengths = list(figures.by_prompt.values())
    mean, error = mean_error(lengths)
    expected = look.question.least
    if mean_error(first)[0] + margin(first) < 0.5 or (expected > 0 and mean + margin(lengths) < expected):
        return True
    shifted = [tuple(layer + shift for layer in look.base.layers) for shift in (-1, 1)]
    beside = [row.figures.length for row in look.rows if row.is_wiring and row.layers in shifted]
    few = mean + error < 1 + len(figures.per_position) / 3
    return few and bool(beside) and figures.length - max(beside) <= ACCURACY


def _reordered(row: Row, base: Row) -> bool:
    """The same layers in another order than an engine packs them: as if fc's blocks stood in that order."""
    return row.is_wiring and row.layers != base.layers and sorted(row.layers) == sorted(base.layers)


def _proofs(look: _Look, poor: bool) -> Iterator[Finding]:
    """What the parts show by themselves. poor: the drafter predicts little, so that what is odd is to blame."""
    parts = look.parts
    for index, norm in enumerate((parts.get("fc") or {}).get("blocks", [])):
        if norm == 0:
            message = f"block {index} of fc.weight is zero: the drafter does not see that layer"
            yield look.finding("WHATIF-FC-ZERO", Severity.ERROR, message, GET_AGAIN)
    for name in parts.get("not_finite", []):
        message = f"{name} of the drafter holds numbers that are not finite"
        yield look.finding("WHATIF-ZERO", Severity.ERROR, message, GET_AGAIN)
    for name in parts.get("zero", []):
        if not name.endswith("bias") and name != "fc.weight":
            yield look.finding("WHATIF-ZERO", Severity.ERROR, f"{name} of the drafter is all zero", GET_AGAIN)
    d2t = parts.get("d2t") or {}
    reason = ""
    if d2t.get("outside"):
        reason = f"leads {d2t['outside']} draft ids outside the vocabulary: it holds token ids, not differences"
    elif poor and d2t.get("zero") and d2t.get("agrees_with_t2d") is not True and _reduced(d2t):
        reason = f"is all zero, so that only the first {d2t['rows']} tokens can be drafted"
    elif poor and d2t.get("present") is False and _reduced(d2t):
        reason = f"is missing, so that only the first {d2t['rows']} tokens can be drafted"
    if reason:
        yield look.finding("WHATIF-D2T", Severity.ERROR, f"d2t {reason}", MAKE_D2T)


def _reduced(d2t: Json) -> bool:
    """Whether the drafter's vocabulary is smaller than the target's."""
    return bool(d2t.get("vocabulary")) and d2t["rows"] < d2t["vocabulary"]


def _repair(row: Row, look: _Look) -> tuple[str, str, str]:
    """The code, what is wrong, and the change to make, for the repair that gains most."""
    repair, parts = row.repair, look.parts
    if not repair:
        order = [sorted(row.layers).index(layer) for layer in row.layers]
        what = f"the blocks of fc.weight stand in the order {order} of the layers"
        return "WHATIF-FC-ORDER", what, "put them in the order of the layers, or ask whoever exported the drafter"
    blocks = [round(norm, 2) for norm in (parts.get("fc") or {}).get("blocks", [])]
    cosine = (parts.get("head") or {}).get("cosine")
    seen = "" if cosine is None else f" (cosine to the target's rows of the same tokens: {cosine:.2f})"
    theta = (parts.get("rope") or {}).get("theta")
    said = "" if theta is None else f" (theta {theta:g})"
    part = "attention" if "attention" in repair.get("off", []) else "MLP"
    known = {
        "fc_scale": ("WHATIF-FC-SCALE", f"fc.weight is out of scale (norms of its blocks: {blocks})", GET_AGAIN),
        "head": ("WHATIF-HEAD", f"the drafter's lm_head is not one for this target{seen}", GET_AGAIN),
        "d2t": ("WHATIF-D2T", "d2t does not lead to the tokens that the head means", MAKE_D2T),
        "rope": ("WHATIF-ROPE", f"the drafter's rope settings are not those of its training{said}", WRITE_ROPE),
        "ones": ("WHATIF-NORM", f"{repair.get('ones', [''])[0]} does more harm than ones would", GET_AGAIN),
        "norm_output": (
            "WHATIF-NORM",
            "the state that goes from one draft step to the next is normed the wrong way",
            "write norm_output as in its training into the drafter's config.json",
        ),
        "off": ("WHATIF-PART", f"the drafter's {part} does more harm than good", GET_AGAIN),
    }
    return known[next(iter(repair))]


def _stranger(look: _Look) -> Finding:
    """No wiring and no repair helps: a drafter of another target, or one that was never trained."""
    assert look.base is not None  # noqa: S101 - the caller looks
    first, _ = mean_error(look.base.first)
    message = (
        f"no choice of layers and no repair of one part predicts more than {look.base.figures.length:.2f} "
        f"({first:.0%} of first drafts are right): the drafter belongs to another target or checkpoint, or is untrained"
    )
    control = next((row for row in look.rows if row.repair.get("shuffle")), None)
    if control is not None:
        message += f"; with states of other positions it would be {control.figures.length:.2f}"
    head, embedding = look.parts.get("head") or {}, look.parts.get("embedding") or {}
    if head.get("cosine") is not None:
        message += f"; its head points {head['cosine']:.2f} the target's way (cosine)"
    if embedding.get("distance"):
        message += f"; its own embedding is {embedding['distance']:.2g} away from the target's"
    fix = "serve the drafter that was trained for this very checkpoint of the target, or train one"
    return look.finding("WHATIF-TARGET", Severity.ERROR, message, fix)


# --- the command line


def question_for(
    *,
    tensors: Sequence[str],
    drafter: str,
    target: str | None,
    asked: Json,
    candidates: Sequence[Json],
    device: str = "cpu",
    since: str = "",
) -> dict[str, Any]:
    """The evaluator's argument. asked: `pivot.ask.as_dict`, of which the replayed prompts are evaluated; since: UTC, of
    which recordings on states count."""
    server = asked.get("server") or {}
    return {
        "tensors": list(tensors),
        "drafter": drafter,
        "target": target,
        "steps": int(server.get("speculative_num_steps") or 3),
        "topk": int(server.get("speculative_eagle_topk") or 1),
        "sequences": [
            {
                "id": one["id"],
                "rid": one["rid"],
                "prompt_tokens": one["prompt_tokens"],
                "tokens": one["prompt_tokens"] + len(one["output_ids"]),
            }
            for one in asked["prompts"]
            if one["replayed"]
        ],
        "candidates": list(candidates),
        "device": device,
        "since": since,
    }


def layers_of(text: str) -> list[int]:
    """``3,5,7`` as numbers; an ArgumentTypeError is a sentence."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers such as 3,5,7") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pivot whatif",
        description="What a drafter would get accepted with other layers or parts, from recorded states. "
        "Runs where the records and the engine are; playbooks/experiment.yml does all of it on a host.",
    )
    parser.add_argument("--python", required=True, help="the engine's interpreter, with torch and safetensors")
    parser.add_argument("--tensors", required=True, help="directory with the probe's tensors files")
    parser.add_argument("--asked", required=True, type=Path, help="what was asked and served (asked.json)")
    parser.add_argument("--drafter", required=True, help="directory of the drafter")
    parser.add_argument("--target", help="directory of the target: lets its head be tried in the drafter's place")
    parser.add_argument("--depth", required=True, type=int, help="layers of the target")
    parser.add_argument("--served", type=layers_of, help="layer inputs that reach fc, e.g. 3,5,7")
    parser.add_argument("--contract", type=layers_of, help="layer inputs that the drafter was trained on")
    parser.add_argument("--layers", type=layers_of, action="append", default=[], help="a further choice to evaluate")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print the whole answer as JSON")
    return parser


def run_evaluator(python: str, question: Json) -> Any:
    """The evaluator's answer; ValueError with a sentence when it has none."""
    line = [python, "-I", "-", json.dumps(question)]
    done = subprocess.run(line, input=program(EVALUATOR), capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"{python} could not run the evaluator: {last}") from None
    if "failed" in answer:
        raise ValueError(answer["failed"])
    return answer


def main(arguments: list[str]) -> int:
    """``pivot whatif``: 0 when nothing is wrong, 1 when something is, 2 when there is no answer."""
    given = _parser().parse_args(arguments)
    try:
        asked = json.loads(given.asked.read_text(encoding="utf-8"))
        count = len(given.contract or given.served or [0, 0, 0])
        further = {f"given {numbers(layers)}": layers for layers in given.layers}
        wanted = candidates(given.depth, count, served=given.served, contract=given.contract, others=further)
        question = question_for(
            tensors=[given.tensors],
            drafter=given.drafter,
            target=given.target,
            asked=asked,
            candidates=wanted,
            device=given.device,
        )
        evaluation = run_evaluator(given.python, question)
    except (OSError, ValueError, KeyError) as error:
        print(f"pivot whatif: {error}", file=sys.stderr)
        return 2
    judgement = judge(
        Question(
            subject=Path(given.drafter).name,
            evaluation=evaluation,
            asked=asked,
            served=given.served,
            contract=given.contract,
            flags=asked.get("server") or {},
        )
    )
    if given.json:
        print(json.dumps(judgement.as_dict(), indent=1))
    else:
        print("\n".join(filter(None, [judgement.text(), *judgement.notes, render(judgement.findings)])))
    return 1 if judgement.findings else 0
