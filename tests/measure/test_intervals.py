"""Intervals that hold what they should, as often as they say."""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np
import pytest

from edgetrain.errors import UserError
from edgetrain.measure.intervals import (
    Interval,
    bootstrap_median,
    median_interval,
    ratio_interval,
    student,
)


@pytest.mark.parametrize(
    ("degrees", "level", "expected"),
    # From the tables of Student's distribution.
    [
        (1, 0.95, 12.7062), (2, 0.95, 4.30265), (3, 0.95, 3.18245), (4, 0.95, 2.77645), (9, 0.95, 2.26216),
        (30, 0.95, 2.04227), (120, 0.95, 1.97993), (500, 0.95, 1.96472), (10**6, 0.95, 1.95996),
        (5, 0.99, 4.03214), (6, 0.9, 1.94318),
    ],
)  # fmt: skip
def test_student(degrees: int, level: float, expected: float) -> None:
    assert student(degrees, level) == pytest.approx(expected, rel=1e-5)
    assert student(0) == math.inf


def test_a_median_of_order_statistics() -> None:
    # n = 10: ranks 2 and 9 leave 1.07 % on each side, ranks 3 and 8 would leave 5.5 %.
    assert median_interval([float(n) for n in range(1, 11)]) == Interval(5.5, 2.0, 9.0)
    assert median_interval([3.0, 1.0, 2.0]) == Interval(2.0, 1.0, 3.0)
    assert median_interval([7.0]) == Interval(7.0, 7.0, 7.0)


@pytest.mark.parametrize("n", [6, 25, 100, 1000, 1100, 5000])
def test_the_ranks_of_a_median_are_exact_for_any_number_of_values(n: int) -> None:
    """Whole numbers here; a profile of small steps has thousands."""
    subsets = list(accumulate(math.comb(n, size) for size in range(n // 2 + 1)))
    rank = max(size for size, count in enumerate(subsets) if 1000 * count <= 25 * 2**n)
    assert median_interval([float(value) for value in range(n)]) == Interval((n - 1) / 2, rank, n - 1 - rank)


@pytest.mark.parametrize("kind", ["normal", "exponential", "standard_cauchy"])
def test_a_median_is_covered_whatever_the_distribution(kind: str) -> None:
    draw = np.random.default_rng(0)
    truth = {"normal": 0.0, "exponential": math.log(2), "standard_cauchy": 0.0}[kind]
    held = [median_interval(list(getattr(draw, kind)(size=25))) for _ in range(600)]
    assert 0.94 <= np.mean([one.low <= truth <= one.high for one in held]) <= 0.99


def test_a_ratio_is_taken_within_rounds() -> None:
    """A machine that gets slower and slower does not hide that one way is 10 % faster."""
    slow = np.linspace(1.0, 3.0, 21)
    found = ratio_interval(list(0.9 * slow), list(slow))
    assert found.value == pytest.approx(0.9)
    assert found.high < 0.91
    apart = median_interval(list(0.9 * slow)).apart(median_interval(list(slow)))
    assert not apart  # medians of each alone would not show it
    with pytest.raises(UserError, match="round by round"):
        ratio_interval([1.0], [1.0, 2.0])
    with pytest.raises(UserError, match="above 0"):
        ratio_interval([1.0], [0.0])


def test_intervals_apart() -> None:
    assert Interval(1, 0, 2).apart(Interval(4, 3, 5))
    assert Interval(4, 3, 5).apart(Interval(1, 0, 2))
    assert not Interval(1, 0, 3).apart(Interval(4, 3, 5))


def test_a_bootstrap_median_is_covered() -> None:
    draw = np.random.default_rng(1)
    held = [bootstrap_median([list(draw.exponential(size=30))], seed=n) for n in range(100)]
    assert np.mean([one.low <= math.log(2) <= one.high for one in held]) >= 0.88


def test_what_differs_between_processes_widens_the_interval() -> None:
    draw = np.random.default_rng(2)
    same = [list(draw.normal(10.0, 0.1, 40)) for _ in range(5)]
    shifted = [list(np.array(group) + shift) for group, shift in zip(same, (-1.0, -0.5, 0.0, 0.5, 1.0), strict=True)]
    narrow, wide = bootstrap_median(same), bootstrap_median(shifted)
    pooled = bootstrap_median([[value for group in shifted for value in group]])
    assert narrow.high - narrow.low < 0.1
    assert wide.high - wide.low > 2 * (pooled.high - pooled.low)
    assert bootstrap_median(shifted) == wide
    assert wide.low <= wide.value <= wide.high
    uneven = bootstrap_median([[1.0], [2.0, 2.0, 2.0], [3.0] * 5])
    assert (uneven.value, uneven.low, uneven.high) == (3.0, 1.0, 3.0)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_values_that_are_none(values: list[float]) -> None:
    for interval in (median_interval, lambda v: bootstrap_median([v])):
        with pytest.raises(UserError, match="finite values"):
            interval(values)
    with pytest.raises(UserError):
        bootstrap_median([])
