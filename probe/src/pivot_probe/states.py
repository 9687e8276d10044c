"""States as records describe them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pivot_probe.prints import Prints, norms, rounded


def first_rows(state: torch.Tensor, rows: int) -> torch.Tensor:
    """A copy of the rows that are recorded: engines reuse these buffers within the forward."""
    return (state if state.shape[0] <= rows else state[:rows]).clone()


def dtype_name(state: torch.Tensor) -> str:
    """``float32``, ``bfloat16``, …"""
    return str(state.dtype).removeprefix("torch.")


class Described:
    """Several states and what else is printed with them; `fields` is for the writer."""

    def __init__(self, states: Any, count: int, rows: int, beside: Sequence[torch.Tensor] = ()) -> None:
        """states: packed as [rows, count * width], or a list; rows: how many are printed; beside: copies, prints only.

        A tensor that `count` does not divide, or of which nobody knows the count (0), is one state.
        """
        if isinstance(states, torch.Tensor):
            count = count if count and states.shape[-1] % count == 0 else 1
            firsts = list(first_rows(states, rows).chunk(count, dim=-1))
        else:
            states = list(states)
            count = len(states)
            firsts = [first_rows(state, rows) for state in states]
        self._count = count
        self._width = firsts[0].shape[-1] if firsts else 0
        self._norms = norms(states, count)
        self._prints = Prints([*firsts, *beside])

    def fields(self) -> tuple[dict[str, Any], list[str]]:
        """The fields that every recorded set of states has, and the prints of what stood beside it."""
        printed = self._prints.texts()
        fields = {
            "count": self._count,
            "width": self._width,
            "norms": rounded(self._norms),
            "prints": printed[: self._count],
        }
        return fields, printed[self._count :]
