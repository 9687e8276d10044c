"""What was predicted for each candidate and what was served, as figures that can be compared.

A difference counts when both hold: the accept lengths over all prompts differ by more than ACCURACY, which is how
exactly the evaluator predicts, and the mean of the differences prompt by prompt lies further from zero than chance puts
it one time in two hundred (Student's t over the prompts, `pivot.experiments.spread`). So the bar rises by itself where
prompts are few or disagree, and one prompt alone proves nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pivot.experiments.spread import margin, mean_error
from pivot.findings import Finding, Severity

ACCURACY = 0.15
REFERENCE = "docs/faults.md"
FEEDS = ("shift", "shuffle")  # what is done to the states, not to the drafter
Json = Mapping[str, Any]
Layers = tuple[int, ...]


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is judged. evaluation: the evaluator's answer; asked: `pivot.experiments.ask.as_dict`; served: the layer
    inputs that reach `fc`, slice by slice, None where they are not known; contract: those the drafter was trained on,
    ascending; flags: of the launch, any spelling; least: the accept length that is expected at least, 0 when nobody
    says."""

    subject: str
    evaluation: Json
    asked: Json
    served: Sequence[int | None] | None = None
    contract: Sequence[int] | None = None
    flags: Json = dataclasses.field(default_factory=dict)
    environment: Json = dataclasses.field(default_factory=dict)
    least: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """What the judgement is about: the question, the candidates' rows, what was served, and three choices of layers:
    those that reach `fc` (None where they are not all known), the contract's, and the rows that are compared with."""

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


def known(layers: Sequence[int | None] | None) -> Layers | None:
    """The layers, when every one of them is known."""
    if not layers:
        return None
    known = tuple(layer for layer in layers if layer is not None)
    return known if len(known) == len(layers) else None


def wiring_row(rows: Iterable[Row], layers: Layers | None) -> Row | None:
    """The row of a choice of layers, with nothing else changed."""
    return next((row for row in rows if row.is_wiring and row.layers == layers), None)
