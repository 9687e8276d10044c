"""Fingerprints: a hidden state of any width as 16 numbers that tell it from any other."""

from __future__ import annotations

import base64
import functools
import random
from collections.abc import Sequence

import torch

DIMENSIONS = 16
SEED = 1


@functools.lru_cache(maxsize=8)
def projection(width: int, device: torch.device) -> torch.Tensor:
    """Fixed random signs, scaled: float64 [width, DIMENSIONS]. Drawn by Python's generator, so that any program
    on any machine can draw them again: bit ``column * width + row`` of ``Random(SEED).getrandbits(…)``."""
    bits = random.Random(SEED).getrandbits(width * DIMENSIONS)  # noqa: S311 - no secret is made of it
    text = bits.to_bytes((width * DIMENSIONS + 7) // 8, "little")
    packed = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    flat = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)).bitwise_and(1).flatten()
    signs = flat[: width * DIMENSIONS].to(torch.float64).mul(2).sub(1)
    return signs.reshape(DIMENSIONS, width).T.div(width**0.5).contiguous().to(device)


def fingerprints(states: Sequence[torch.Tensor]) -> list[str]:
    """Each state ([rows, width], all of one width and device) as base64 of little-endian float32 [rows, DIMENSIONS].

    The product is formed in float64 and rounded once, so that the same row gives the same bits whatever rows
    stand beside it and whichever kernel multiplies; all states cost one product and one copy to the host.
    """
    if not states:
        return []
    rows = torch.cat([state.detach() for state in states]).to(torch.float64)
    numbers = (rows @ projection(rows.shape[1], rows.device)).to(torch.float32).cpu()
    return [
        base64.b64encode(part.contiguous().numpy().tobytes()).decode("ascii")
        for part in numbers.split([state.shape[0] for state in states])
    ]


def norms(states: Sequence[torch.Tensor]) -> list[float]:
    """The Frobenius norm of each state over all its rows."""
    if not states:
        return []
    values = torch.stack([state.detach().to(torch.float32).norm() for state in states])
    return [round(value, 6) for value in values.tolist()]
