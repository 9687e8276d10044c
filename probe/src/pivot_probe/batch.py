"""Whose rows a forward holds, as the engine's batch tells."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from pivot_probe.prints import Sent

# only of requests that Pivot itself makes are token ids recorded, and only of these whole states
OWN = "pivot-"
REPLAY = "pivot-replay-"


@dataclasses.dataclass(frozen=True)
class Batch:
    """requests: ids in the order of their rows, None where the engine has none; lengths: rows of each, None where
    they cannot be told; positions and tokens: of the first rows; tokens only where `own`."""

    mode: str
    requests: list[str] | None
    lengths: list[int] | None
    positions: Sent | None
    tokens: Sent | None

    @property
    def own(self) -> bool:
        """Whether every request is one of Pivot's."""
        return own(self.requests)

    def fields(self) -> dict[str, Any]:
        """Requests and positions as records hold them; waits, so only the writer calls it."""
        return {"requests": self.requests, "positions": numbers(self.positions)}


def own(requests: list[str] | None, prefix: str = OWN) -> bool:
    """Whether there are requests and the id of every one begins so."""
    return bool(requests) and all(name.startswith(prefix) for name in requests or ())


def seen(forward_batch: Any, rows: int) -> Batch:
    """What a ForwardBatch says of itself now; the engine goes on to change it. rows: how many are recorded."""
    requests = named(getattr(forward_batch, "rids", None))
    tokens = forward_batch.input_ids if own(requests) else None
    return Batch(
        mode=forward_batch.forward_mode.name,
        requests=requests,
        lengths=_lengths(forward_batch, requests),
        positions=first(forward_batch.positions, rows),
        tokens=first(tokens, rows),
    )


def named(requests: Any) -> list[str] | None:
    """Requests' ids as text."""
    return None if requests is None else [str(name) for name in requests]


def first(values: torch.Tensor | None, rows: int) -> Sent | None:
    """The first of some numbers, on their way to the host: a copy, since engines count on in place."""
    return None if values is None else Sent(values.detach()[:rows].clone())


def numbers(values: Sent | None) -> list[int] | None:
    """Whole numbers as records hold them; waits, so only the writer calls it."""
    return None if values is None else [int(value) for value in values.arrived().flatten().tolist()]


def _lengths(forward_batch: Any, requests: list[str] | None) -> list[int] | None:
    """Rows of each request: what the batch says of a prefill, else equal shares."""
    tokens = forward_batch.input_ids
    if not requests or tokens is None:
        return None
    total = int(tokens.shape[0])
    said = getattr(forward_batch, "extend_seq_lens_cpu", None)
    if said is not None:
        lengths = [int(value) for value in said]
        if len(lengths) == len(requests) and sum(lengths) == total:
            return lengths
    share, rest = divmod(total, len(requests))
    return [share] * len(requests) if not rest else None
