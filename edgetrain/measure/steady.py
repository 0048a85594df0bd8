"""When a run has warmed up: the step from which on times stay the same.

    time │ x
         │  x  ·                 x            one slow step is an outlier, not a change
         │   x x x
         │         x x x x x x x   x x x x x
         └──────────┬───────────────────────── step
                    first

In:  seconds of steps. Out: `Steady`, with the first steady step, or None: "not reached".

How: the run is cut into pieces that have one level each, at the places where that explains it best; a cut must pay for
itself. What a piece costs is the sum of distances from its median, so that outliers count little. The steady part is
the last piece, with those before it that have the same level to within `tolerance`; it must be long and must not drift,
and its times must lie close together: of times that differ by more than MAX_SPREAD, one number says nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgetrain.errors import UserError

TOLERANCE = 0.02
MIN_STEPS = 10
MAX_SPREAD = 2.0  # of the times of steps: the 95th of a hundred over the 5th
_MIN_PART = 0.2  # of the run: a run that has just settled at its end may be settling still
_MIN_PIECE = 5  # steps of a piece, but for the first: the first step alone may be the slow one
_PRICE = 1.8  # of a cut, in standard deviations × log(steps): of runs without a change, one in 25 is cut
_MAX_POINTS = 300  # a longer run is looked at in medians of neighbours
_MIN_NOISE = 1e-4
_DRIFTS = 3.0  # standard deviations of Kendall's count of rising pairs


@dataclass(frozen=True)
class Steady:
    """first: from which step on times are steady; None: not reached. changes: the first step of each new level.
    spread: of the last level (see `spread_of`)."""

    first: int | None
    changes: tuple[int, ...]
    steps: int
    spread: float = 1.0

    def __str__(self) -> str:
        if self.first is not None:
            return f"from step {self.first} on"
        return f"not reached in {self.steps} steps{_spread_words(self.spread)}"

    def of_measured(self, times_s: Sequence[float]) -> str:
        """The same for a run whose measured steps came after: steady only if these are, too."""
        measured = spread_of(times_s)
        if self.first is None or measured <= MAX_SPREAD:
            return str(self)
        return f"not reached in {len(times_s)} measured steps{_spread_words(measured)}"


def _spread_words(spread: float) -> str:
    return f": nine of ten differ by up to {spread:.1f} times" if spread > MAX_SPREAD else ""


def spread_of(times_s: Sequence[float]) -> float:
    """How far apart nine of ten times lie: the 95th of a hundred over the 5th."""
    return float(np.quantile(times_s, 0.95) / np.quantile(times_s, 0.05))


def steady(times_s: Sequence[float], *, tolerance: float = TOLERANCE, least_steps: int = MIN_STEPS) -> Steady:
    """tolerance: levels that differ by less than this part are the same. least_steps: of the steady part."""
    first_steps = changes(times_s)
    levels = [
        statistics.median(times_s[a:b]) for a, b in zip((0, *first_steps), (*first_steps, len(times_s)), strict=True)
    ]
    first = len(times_s)
    for start, level in zip(reversed((0, *first_steps)), reversed(levels), strict=True):
        if abs(math.log(level / levels[-1])) > math.log1p(tolerance):
            break
        first = start
    long_enough = len(times_s) - first >= max(least_steps, _MIN_PART * len(times_s))
    spread = spread_of(times_s[min(first, len(times_s) - 1) :])
    reached = long_enough and spread <= MAX_SPREAD and not _drifts(times_s[first:], tolerance)
    return Steady(first if reached else None, first_steps, len(times_s), spread)


def warm_up(
    step: Callable[[], float],
    *,
    most_steps: int = 200,
    tolerance: float = TOLERANCE,
    least_steps: int = MIN_STEPS,
) -> tuple[Steady, list[float]]:
    """Call `step`, which says how long it took, until times are steady or `most_steps` are done."""
    times: list[float] = []
    look = least_steps
    while True:
        times += [step() for _ in range(min(look, most_steps) - len(times))]
        result = steady(times, tolerance=tolerance, least_steps=least_steps)
        if result.first is not None or len(times) >= most_steps:
            return result, times
        look = max(look + 5, round(look * 1.25))


def changes(times_s: Sequence[float]) -> tuple[int, ...]:
    """The first step of each new level."""
    if not len(times_s) or not all(math.isfinite(time) and time > 0 for time in times_s):
        raise UserError("times of steps are above 0", received=f"{len(times_s)} times, {list(times_s)[:5]}")
    width = -(-len(times_s) // _MAX_POINTS)
    points = [math.log(statistics.median(times_s[place : place + width])) for place in range(0, len(times_s), width)]
    return tuple(place * width for place in _cuts(points))


def _cuts(points: Sequence[float]) -> list[int]:
    """Optimal partitioning: the least of all costs, over all ways to cut."""
    n, price = len(points), _PRICE * _noise(points) * math.log(max(len(points), 2))
    best, back = [0.0] + [math.inf] * n, [0] * (n + 1)
    for start in range(n):
        if best[start] == math.inf:
            continue
        for length, cost in enumerate(_costs(points[start:]), 1):
            end = start + length
            if length < _MIN_PIECE and start > 0:
                continue
            total = best[start] + cost + (price if start else 0.0)
            if total < best[end]:
                best[end], back[end] = total, start
    cuts, place = [], n
    while back[place] > 0:
        place = back[place]
        cuts.append(place)
    return cuts[::-1]


def _costs(points: Sequence[float]) -> list[float]:
    """For each length, the sum of distances of the first so many points from their median: two heaps around it."""
    below: list[float] = []  # negated
    above: list[float] = []
    low = high = 0.0
    costs = []
    for point in points:
        moved = -heapq.heappushpop(below, -point)
        low, high = low + point - moved, high + moved
        heapq.heappush(above, moved)
        if len(above) > len(below):
            moved = heapq.heappop(above)
            low, high = low + moved, high - moved
            heapq.heappush(below, -moved)
        costs.append(high - low + (-below[0] if len(below) > len(above) else 0.0))
    return costs


def _noise(points: Sequence[float]) -> float:
    """Standard deviation of one point, from the differences of neighbours, which changes of level hardly touch."""
    steps = [abs(b - a) for a, b in itertools.pairwise(points)]
    return max(statistics.median(steps) / (0.6745 * math.sqrt(2)) if steps else 0.0, _MIN_NOISE)


def _drifts(times_s: Sequence[float], tolerance: float) -> bool:
    """Do they rise or fall all along, by more than `tolerance`? By Kendall's count of rising pairs."""
    width = -(-len(times_s) // _MAX_POINTS)
    times = [statistics.median(times_s[place : place + width]) for place in range(0, len(times_s), width)]
    n = len(times)
    rising = sum(int(b > a) - int(b < a) for place, a in enumerate(times) for b in times[place + 1 :])
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    third = max(n // 3, 1)
    moved = abs(math.log(statistics.median(times[-third:]) / statistics.median(times[:third])))
    return abs(rising) > _DRIFTS * deviation and moved > math.log1p(tolerance)
