"""Means over few prompts."""

import math

import pytest

from pivot.experiments import spread


def test_mean_and_standard_error():
    assert spread.mean_error([1.0, 2.0, 3.0]) == (2.0, pytest.approx(1 / math.sqrt(3)))
    assert spread.mean_error([2.0]) == (2.0, math.inf)
    assert spread.mean_error([]) == (0.0, math.inf)


def test_few_values_have_to_agree_more():
    # the same spread: two values 63.66 standard errors, four 5.84, eight 3.50, forty those of the last known entry
    assert spread.margin([0.0, 2.0]) == pytest.approx(63.66 * 1.0)
    assert spread.margin([0.0, 2.0] * 2) == pytest.approx(5.84 * math.sqrt(4 / 3) / 2)
    assert spread.margin([0.0, 2.0] * 20) == pytest.approx(2.76 * math.sqrt(40 / 39) / math.sqrt(40))
    assert spread.margin([0.3, 0.3, 0.3]) == 0.0
    assert spread.margin([0.3]) == math.inf
