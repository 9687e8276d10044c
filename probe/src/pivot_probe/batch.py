"""Whose rows a forward holds, as the engine's batch tells."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pivot_probe.prints import Sent

# only of requests that Pivot itself makes are token ids recorded, and only of these whole states
OWN = "pivot-"
REPLAY = "pivot-replay-"


class Rows(NamedTuple):
    """requests: ids in the order of their rows, None where the engine has none; positions: of the first rows."""

    requests: list[str] | None
    positions: Sent | None

    def fields(self) -> dict[str, Any]:
        """Both as records hold them; waits, so only the writer calls it."""
        return {"requests": self.requests, "positions": numbers(self.positions)}


NOBODY = Rows(None, None)


def rows_of(forward_batch: Any, count: int) -> Rows:
    """What a ForwardBatch says of its rows now; the engine goes on to change it. count: how many are recorded."""
    return Rows(named(getattr(forward_batch, "rids", None)), first(forward_batch.positions, count))


def own(requests: list[str] | None, prefix: str = OWN) -> bool:
    """Whether there are requests and the id of every one begins so."""
    return bool(requests) and all(name.startswith(prefix) for name in requests or ())


def named(requests: Any) -> list[str] | None:
    """Requests' ids as text."""
    return None if requests is None else [str(name) for name in requests]


def first(values: torch.Tensor | None, count: int) -> Sent | None:
    """The first of some numbers, on their way to the host: a copy, since engines count on in place."""
    return None if values is None else Sent(values[:count].clone())


def numbers(values: Sent | None) -> list[int] | None:
    """Whole numbers as records hold them; waits, so only the writer calls it."""
    return None if values is None else [int(value) for value in values.arrived().flatten().tolist()]


def lengths_of(forward_batch: Any, requests: list[str] | None) -> list[int] | None:
    """Rows of each request: what the batch says of a prefill, else equal shares; None where they cannot be told, or
    where the engine has padded the batch with rows of nobody."""
    tokens = forward_batch.input_ids
    if not requests or tokens is None:
        return None
    total = int(tokens.shape[0])
    if getattr(forward_batch, "_original_num_tokens", None) not in (None, total):
        return None
    said = getattr(forward_batch, "extend_seq_lens_cpu", None)
    if said is not None:
        lengths = [int(value) for value in said]
        if len(lengths) == len(requests) and sum(lengths) == total:
            return lengths
    share, rest = divmod(total, len(requests))
    return [share] * len(requests) if not rest else None
