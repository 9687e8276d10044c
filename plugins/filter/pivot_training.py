"""Filters over pivot.experiments.training: a sample of a drafter's training against what is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pivot.experiments import training


def pivot_training_wirings(matched: Mapping[str, Any]) -> dict[str, list[int]]:
    """What the sample was trained on, as a layer choice to evaluate; empty when it cannot be told."""
    found = training.suggested(matched)
    return {"training sample": found} if found else {}


def pivot_training_answer(
    matched: Mapping[str, Any],
    subject: str,
    served: Sequence[int | None],
    contract: Sequence[int] | None = None,
    rule: str | None = None,
) -> dict[str, Any]:
    """The evaluator's answer to "match sample" and the layers that reach fc → the comparison as plain values."""
    return training.compare(subject, matched, served, contract=contract, rule=rule).as_dict()


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name → function, as Ansible asks for them."""
        return {
            "pivot_training_wirings": pivot_training_wirings,
            "pivot_training_answer": pivot_training_answer,
        }
