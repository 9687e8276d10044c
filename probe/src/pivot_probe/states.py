"""States as records describe them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pivot_probe.prints import Prints, Sent, norms, rounded


def slices(states: Any, count: int) -> list[torch.Tensor]:
    """Captured states as a list, whether they come packed ([rows, count * width]) or as a list already."""
    if not isinstance(states, torch.Tensor):
        return list(states)
    if count > 1 and states.shape[-1] % count == 0:
        return list(states.chunk(count, dim=-1))
    return [states]


def first_rows(state: torch.Tensor, rows: int) -> torch.Tensor:
    """A copy of the rows that are recorded: engines reuse these buffers within the forward."""
    return state.detach()[:rows].clone()


def dtype_name(state: torch.Tensor) -> str:
    """``float32``, ``bfloat16``, …"""
    return str(state.dtype).removeprefix("torch.")


class Described:
    """Several states and what else is printed with them; `fields` is for the writer."""

    def __init__(self, states: Sequence[torch.Tensor], rows: int, beside: Sequence[torch.Tensor] = ()) -> None:
        """states: of which norms are taken too; rows: how many are printed; beside: prints only."""
        self._count = len(states)
        self._width = states[0].shape[-1] if states else 0
        self._norms: Sent | None = norms(states)
        self._prints = Prints([state[:rows] for state in (*states, *beside)])

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
