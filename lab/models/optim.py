"""Muon for matrices, AdamW for the rest: in these few minutes it learns clearly more than AdamW alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_MOMENTUM = 0.95
_DECAY = 0.05


def _orthogonalise(update: torch.Tensor) -> torch.Tensor:
    """Nearly the closest orthogonal matrices to `update` [n, rows, columns], by five Newton-Schulz steps."""
    a, b, c = _NEWTON_SCHULZ
    wide = update.mT if update.shape[-2] > update.shape[-1] else update
    x = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if update.shape[-2] > update.shape[-1] else x


class Muon:
    """Momentum with orthogonalised updates; parameters of equal matrix shape are stepped as one batch."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.groups: dict[tuple[int, int], list[torch.Tensor]] = {}
        for parameter in parameters:
            shape = (parameter.shape[-2], parameter.shape[-1])
            self.groups.setdefault(shape, []).append(parameter)
        self.momentum: dict[tuple[int, int], torch.Tensor] = {}

    def step(self, rate: float) -> None:
        """One update with learning rate `rate` from the gradients that stand in the parameters."""
        with torch.no_grad():
            for (rows, columns), group in self.groups.items():
                gradient = torch.cat([p.grad.reshape(-1, rows, columns) for p in group])
                kept = self.momentum.setdefault((rows, columns), torch.zeros_like(gradient))
                kept.mul_(_MOMENTUM).add_(gradient)
                update = _orthogonalise(gradient + _MOMENTUM * kept) * (rate * max(1.0, rows / columns) ** 0.5)
                start = 0
                for parameter in group:
                    count = parameter.numel() // (rows * columns)
                    parameter.mul_(1 - rate * _DECAY).sub_(update[start : start + count].view_as(parameter))
                    start += count


class Optimiser:
    """Muon on `matrices`, AdamW on `others`, one schedule: warm-up, flat, linear decay over the last part."""

    def __init__(
        self,
        matrices: list[torch.Tensor],
        others: list[torch.Tensor],
        rates: tuple[float, float],
        steps: int,
        decay_part: float = 0.5,
    ) -> None:
        self.matrices, self.others, self.rates, self.steps, self.decay_part = matrices, others, rates, steps, decay_part
        self.muon = Muon(matrices)
        self.adam: Any = torch.optim.AdamW(others, lr=rates[1], betas=(0.9, 0.95), weight_decay=0.01)

    def step(self, iteration: int, loss: torch.Tensor) -> None:
        """Backward pass and update for step `iteration` (from 0)."""
        factor = min(1.0, (iteration + 1) / 30)
        factor *= min(1.0, max(0.02, (self.steps - iteration) / (self.decay_part * self.steps)))
        for parameter in self.matrices + self.others:
            parameter.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.rates[1] * factor
        self.muon.step(self.rates[0] * factor)
        self.adam.step()
