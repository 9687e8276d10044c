"""Filters over pivot.experiment: what to evaluate, and the answer. Thin adapters, no decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

from pivot import experiment


def _experiment(left: Mapping[str, Any]) -> experiment.Experiment:
    """The fields of `pivot.experiment.Experiment` by name; a path as text."""
    try:
        return experiment.Experiment(**{**left, "records": Path(left["records"])})
    except (KeyError, TypeError) as error:
        raise AnsibleFilterError(f"an experiment needs subject, records and asked: {error}") from error


def pivot_experiment_question(
    left: Mapping[str, Any],
    tensors: Sequence[str],
    drafter: str,
    target: str | None = None,
    others: Mapping[str, Sequence[int]] | None = None,
    device: str = "cpu",
) -> dict[str, Any] | None:
    """What an experiment left on the controller → the argument of whatif.py on the host; null when it cannot be asked.

    tensors, drafter, target: paths on the host.
    """
    return experiment.question(
        _experiment(left), tensors=tensors, drafter=drafter, target=target, others=others, device=device
    )


def pivot_experiment_answer(left: Mapping[str, Any]) -> dict[str, Any]:
    """What an experiment left on the controller, with the evaluation where there is one → the answer."""
    return experiment.answer(_experiment(left)).as_dict()


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name → function, as Ansible asks for them."""
        return {
            "pivot_experiment_question": pivot_experiment_question,
            "pivot_experiment_answer": pivot_experiment_answer,
        }
