"""How sure a figure is: medians, ratios and means with 95 % intervals.

    one list of values                    median_interval   order statistics: exact, assumes no distribution
    values of several processes           bootstrap_median  processes drawn anew, then the values of each
    two ways that took turns, in rounds   ratio_interval    the ratio within each round, so that a slow minute hits both

Promised: an interval holds its value; too few values give a wide interval or none, never a narrow one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgetrain.errors import UserError

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
_ROUNDS = 2000
_AT_ONCE = 1 << 20  # values drawn in one go


@dataclass(frozen=True)
class Interval:
    """A figure and what it lies between, at 95 %. Infinite ends: nothing is known."""

    value: float
    low: float
    high: float

    def apart(self, other: Interval) -> bool:
        """The two do not overlap."""
        return self.high < other.low or other.high < self.low


def median_interval(values: Sequence[float]) -> Interval:
    """Median with a 95 % interval from order statistics. Below six values it is the whole range, and covers less."""
    ordered, n = sorted(_checked(values)), len(values)
    rank, tail = 0, _share_of_subsets(n, 0)
    while rank < n // 2 and tail + _share_of_subsets(n, rank + 1) <= (1 - LEVEL) / 2:
        rank += 1
        tail += _share_of_subsets(n, rank)
    return Interval(statistics.median(ordered), ordered[rank], ordered[n - 1 - rank])


def _share_of_subsets(n: int, size: int) -> float:
    """Of all subsets of n values those of this size, by logarithms: the counts themselves are beyond a float."""
    return math.exp(math.lgamma(n + 1) - math.lgamma(size + 1) - math.lgamma(n - size + 1) - n * math.log(2))


def ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Of two ways that took turns: the median over the rounds of the ratio within each."""
    if len(ours) != len(theirs):
        raise UserError("two ways are compared round by round", received=f"{len(ours)} and {len(theirs)} rounds")
    return median_interval([a / b for a, b in zip(_positive(ours), _positive(theirs), strict=True)])


def bootstrap_median(groups: Sequence[Sequence[float]], *, seed: int = 0) -> Interval:
    """The median of all values. groups: the values of each process; what differs between processes widens the interval.

    With one group only its values are drawn anew. The interval is that of percentiles.
    """
    lists = [np.asarray(_checked(group), dtype=float) for group in groups]
    if not lists:
        raise UserError("an interval needs values", received="no group of values")
    draw = np.random.default_rng(seed)
    rounds = max(1, _AT_ONCE // (len(lists) * max(map(len, lists))))
    medians = [_medians(lists, draw, min(rounds, _ROUNDS - done)) for done in range(0, _ROUNDS, rounds)]
    value = float(np.median(np.concatenate(lists)))
    low, high = np.quantile(np.concatenate(medians), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, min(float(low), value), max(float(high), value))


def _medians(groups: Sequence[Floats], draw: np.random.Generator, rounds: int) -> Floats:
    """The medians of so many rounds: as many groups as there are, drawn anew, and as many values of each as it has."""
    sizes = np.array([len(group) for group in groups])
    padded = np.full((len(groups), sizes.max()), math.nan)
    for place, group in enumerate(groups):
        padded[place, : len(group)] = group
    chosen = draw.integers(len(groups), size=(rounds, len(groups)))
    which = (draw.random((rounds, len(groups), sizes.max())) * sizes[chosen][:, :, None]).astype(np.int64)
    values = padded[chosen[:, :, None], which]
    values[np.arange(sizes.max()) >= sizes[chosen][:, :, None]] = math.nan
    ordered = np.sort(values.reshape(rounds, -1), axis=1)  # what is missing comes last
    count, row = sizes[chosen].sum(axis=1), np.arange(rounds)
    return np.asarray((ordered[row, (count - 1) // 2] + ordered[row, count // 2]) / 2, dtype=np.float64)


def student(degrees: int, level: float = LEVEL) -> float:
    """How many standard errors to each side hold `level` of Student's distribution; infinite without any freedom."""
    if degrees < 1:
        return math.inf
    if degrees > 500:  # the normal one, with its first correction
        z = statistics.NormalDist().inv_cdf((1 + level) / 2)
        return z + (z**3 + z) / (4 * degrees)
    low, high = 0.0, 1.0
    while _within(high, degrees) < level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < level else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """The probability of −t to t, by the sums for whole degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan2(t, math.sqrt(degrees))
    cos2, term, total = math.cos(angle) ** 2, 1.0, 1.0
    for n in range(2 + degrees % 2, degrees - 1, 2):
        term *= cos2 * (n - 1) / n
        total += term
    if degrees % 2 == 0:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * math.cos(angle) * total if degrees > 1 else 0.0))


def _checked(values: Sequence[float]) -> Sequence[float]:
    if not len(values) or not all(math.isfinite(value) for value in values):
        raise UserError("an interval needs finite values", received=f"{len(values)} values, {list(values)[:5]}")
    return values


def _positive(values: Sequence[float]) -> Sequence[float]:
    if min(_checked(values)) <= 0:
        raise UserError("a ratio needs values above 0", received=f"{min(values)}")
    return values
