"""Fingerprints: a hidden state of any width as 16 numbers a row that tell it from any other."""

from __future__ import annotations

import base64
import functools
import random
from collections.abc import Sequence

import torch

DIMENSIONS = 16
SEED = 1


@functools.lru_cache(maxsize=16)
def projection(width: int, device: torch.device) -> torch.Tensor:
    """Fixed random signs, scaled: float64 [width, DIMENSIONS]. Drawn by Python's generator, so that any program
    on any machine can draw them again: bit ``column * width + row`` of ``Random(SEED).getrandbits(…)``."""
    bits = random.Random(SEED).getrandbits(width * DIMENSIONS)  # noqa: S311 - no secret is made of it
    text = bits.to_bytes((width * DIMENSIONS + 7) // 8, "little")
    packed = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    flat = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)).bitwise_and(1).flatten()
    signs = flat[: width * DIMENSIONS].to(torch.float64).mul(2).sub(1)
    return signs.reshape(DIMENSIONS, width).T.div(width**0.5).contiguous().to(device)


class Sent:
    """A small tensor on its way to the host. Neither the device nor the thread that serves waits for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Start the copy. The tensor has to be one that nobody writes to any more."""
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._tensor = tensor.cpu()

    def arrived(self) -> torch.Tensor:
        """The tensor on the host; waits for the copy, so only the writer calls it."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


class Prints:
    """The fingerprints of some states ([rows, width] each), read later by the writer.

    The product is formed in float64 and rounded once, so that the same row gives the same bits whatever rows stand
    beside it and whichever kernel multiplies; all states of one width cost one product and one copy to the host. It is
    formed at once: a writer that multiplied would take turns with the thread that serves at every small operation.
    """

    def __init__(self, states: Sequence[torch.Tensor]) -> None:
        """Start the products; the states are all on one device."""
        self._shapes = [(state.shape[0], state.shape[-1]) for state in states]
        self._sent = _products(states)
        self._texts: list[str] | None = None

    def texts(self) -> list[str]:
        """Each state as base64 of little-endian float32 [rows, DIMENSIONS]; waits, so only the writer calls it."""
        if self._texts is None:
            self._texts = self._spelled()
        return self._texts

    def _spelled(self) -> list[str]:
        data = {width: memoryview(sent.arrived().numpy().tobytes()) for width, sent in self._sent.items()}
        start = dict.fromkeys(data, 0)
        found = []
        for rows, width in self._shapes:
            end = start[width] + 4 * DIMENSIONS * rows
            found.append(base64.b64encode(data[width][start[width] : end]).decode("ascii"))
            start[width] = end
        return found


def _products(states: Sequence[torch.Tensor]) -> dict[int, Sent]:
    """The states' numbers by width, those of one width below each other: float32 [all their rows, DIMENSIONS]."""
    found = {}
    for width in dict.fromkeys(state.shape[-1] for state in states):
        rows = torch.cat([state for state in states if state.shape[-1] == width]).to(torch.float64)
        found[width] = Sent((rows @ projection(width, rows.device)).to(torch.float32))
    return found


def norms(states: torch.Tensor | Sequence[torch.Tensor], count: int) -> Sent | None:
    """The Frobenius norms over all rows of `count` states, packed ([rows, count * width]) or a list of them."""
    if isinstance(states, torch.Tensor):
        return Sent(torch.linalg.vector_norm(states.unflatten(-1, (count, -1)), dim=(0, 2), dtype=torch.float32))
    if not states:
        return None
    return Sent(torch.stack([torch.linalg.vector_norm(state, dtype=torch.float32) for state in states]))


def rounded(values: Sent | None) -> list[float]:
    """Norms as they are recorded; waits, so only the writer calls it."""
    return [] if values is None else [round(value, 6) for value in values.arrived().tolist()]
