"""How much one step is like the next.

    step        │        1        │        2        │        3        │
    power       │  ▁▃▆▆█▅▂        │  ▁▃▆▆█▅▂        │  ▁▃▆▇█▅▂        │
    laid over each other, part by part of the step: 1 with 2, 2 with 3, …

In:  the windows of a sensor (`windows.py`) and when each step began and ended; or the times
     of the steps alone. Out: `Likeness`: medians over all pairs of neighbours.

Promised: steps that the windows do not cover are left out; steps too short to have a course that can be seen, or fewer
than two, give None.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgetrain.errors import UserError
from edgetrain.measure.windows import Floats, Ints, Windows

MIN_PARTS, MAX_PARTS = 4, 64
_MIN_COVERED = 0.99
_FLAT = 1e-9


@dataclass(frozen=True)
class Likeness:
    """correlation: of the course over one step with that over the next, 1 for the same shape; None where it is flat.
    difference: between the two, as a part of the mean. pairs: of neighbours that were compared."""

    correlation: float | None
    difference: float
    pairs: int


def of_times(times_s: Sequence[float]) -> Likeness | None:
    """Of the times of steps: by how much one differs from the next."""
    if any(not math.isfinite(time) or time <= 0 for time in times_s):
        raise UserError("times of steps are above 0", received=f"{list(times_s)[:5]}")
    apart = [abs(math.log(b / a)) for a, b in itertools.pairwise(times_s)]
    return Likeness(None, math.expm1(statistics.median(apart)), len(apart)) if apart else None


def of_windows(windows: Windows, start_ns: Ints, end_ns: Ints) -> Likeness | None:
    """Of power, utilisation or memory over steps that follow each other."""
    if not len(windows.amount) or not len(start_ns):
        return None
    window_ns = float(np.median(windows.end_ns - windows.start_ns))
    parts = min(int(np.median(end_ns - start_ns) // window_ns), MAX_PARTS)
    if parts < MIN_PARTS:
        return None
    courses = _courses(windows, start_ns, end_ns, parts)
    both = ~np.isnan(courses[:-1]).any(axis=1) & ~np.isnan(courses[1:]).any(axis=1)
    first, second = courses[:-1][both], courses[1:][both]
    if not len(first):
        return None
    mean = max(abs(float(np.concatenate([first, second]).mean())), 1e-300)
    apart = np.abs(first - second).mean(axis=1) / mean
    alike = [
        correlation for a, b in zip(first, second, strict=True) if (correlation := _correlation(a, b, mean)) is not None
    ]
    return Likeness(statistics.median(alike) if alike else None, float(np.median(apart)), len(first))


def _courses(windows: Windows, start_ns: Ints, end_ns: Ints, parts: int) -> Floats:
    """A row a step: the mean level in each of its parts; NaN where the windows do not cover it."""
    edges = start_ns[:, None] + (end_ns - start_ns)[:, None] * np.linspace(0, 1, parts + 1)
    spent = np.diff(_reached(windows, windows.amount, edges), axis=1)
    covered = np.diff(_reached(windows, (windows.end_ns - windows.start_ns).astype(np.float64) * 1e-9, edges), axis=1)
    length = np.diff(edges, axis=1) * 1e-9
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(covered >= _MIN_COVERED * length, spent / covered, math.nan)


def _reached(windows: Windows, amount: Floats, at_ns: Floats) -> Floats:
    """How much had come together by these times; within a window it grows evenly, between windows not at all."""
    times = np.stack([windows.start_ns, windows.end_ns], axis=1).ravel()
    total = np.cumsum(amount)
    return np.interp(at_ns, times, np.stack([total - amount, total], axis=1).ravel())


def _correlation(first: Floats, second: Floats, mean: float) -> float | None:
    if min(first.std(), second.std()) <= _FLAT * mean:
        return None
    return float(np.corrcoef(first, second)[0, 1])
