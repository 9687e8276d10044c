"""How sure a mean over few prompts is: its standard error, and how many of them a difference has to exceed."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Student's t, 99.5 % on one side, by degrees of freedom
STUDENT = {
    1: 63.66,
    2: 9.92,
    3: 5.84,
    4: 4.60,
    5: 4.03,
    6: 3.71,
    7: 3.50,
    9: 3.25,
    11: 3.11,
    15: 2.95,
    19: 2.86,
    29: 2.76,
}


def mean_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, which is infinite where fewer than two values cannot tell."""
    if not values:
        return 0.0, math.inf
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.inf
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def margin(values: Sequence[float]) -> float:
    """How far the mean may lie from its true value: one time in two hundred it lies further on that side."""
    _, error = mean_error(values)
    if math.isinf(error):
        return math.inf
    freedom = max(known for known in STUDENT if known <= len(values) - 1)
    return STUDENT[freedom] * error
