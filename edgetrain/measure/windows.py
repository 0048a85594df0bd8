"""When ops ran, and what was spent in windows of time, from samples of a counter or a gauge.

In:  times and values as a sensor gave them. Out: `Windows`, on the clock of `Ops`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgetrain.errors import UserError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
IDLE = "(idle)"  # in the names of a share: time without any op


@dataclass(frozen=True)
class Ops:
    """When ops ran: instance i is op `names[op[i]]`, from start_ns[i] up to end_ns[i], on the clock of the windows."""

    names: tuple[str, ...]
    op: Ints
    start_ns: Ints
    end_ns: Ints

    def __post_init__(self) -> None:
        if len({*self.names, IDLE}) <= len(self.names):
            raise UserError("ops need names that differ", expected=f"names that differ, and from {IDLE}")
        if not len(self.op) == len(self.start_ns) == len(self.end_ns):
            raise UserError("each instance of an op has a start and an end")
        if len(self.op) and (self.op.min() < 0 or self.op.max() >= len(self.names)):
            raise UserError("an instance belongs to no op", received=f"op {self.op.max()} of {len(self.names)}")
        if (self.end_ns < self.start_ns).any():
            raise UserError("an op ends before it starts")

    @property
    def lengths_s(self) -> Floats:
        return (self.end_ns - self.start_ns).astype(np.float64) * 1e-9


@dataclass(frozen=True)
class Windows:
    """What was spent from start_ns up to end_ns: a level times seconds. In the order of time."""

    start_ns: Ints
    end_ns: Ints
    amount: Floats

    def __post_init__(self) -> None:
        if not len(self.start_ns) == len(self.end_ns) == len(self.amount):
            raise UserError("each window has a start, an end and an amount")
        ordered = (np.diff(self.start_ns) >= 0).all() and (np.diff(self.end_ns) >= 0).all()
        if not ordered or (self.end_ns <= self.start_ns).any() or not np.isfinite(self.amount).all():
            raise UserError("windows come in the order of time, last longer than 0 and hold finite amounts")


def counted(at_ns: Ints, total: Floats, *, least_window_s: float = 0.0) -> Windows:
    """Windows between the readings of a counter. Readings closer than `least_window_s` make one window together."""
    known = np.isfinite(total)
    at_ns, total = at_ns[known], total[known]
    keep = spaced(at_ns, max(1, math.ceil(least_window_s * 1e9)))
    at_ns, total = at_ns[keep], total[keep]
    grown = np.diff(total) >= 0  # one that fell was set back between the two
    return Windows(at_ns[:-1][grown], at_ns[1:][grown], np.diff(total)[grown])


def gauged(at_ns: Ints, level: Floats) -> Windows:
    """Windows of a gauge: its value holds for the time since the reading before."""
    known = np.isfinite(level)
    at_ns, level = at_ns[known], level[known]
    keep = spaced(at_ns, 1)
    at_ns, level = at_ns[keep], level[keep]
    return Windows(at_ns[:-1], at_ns[1:], level[1:] * np.diff(at_ns) * 1e-9)


def spaced(at_ns: Ints, min_ns: int) -> list[int]:
    """Places of readings that lie so far apart at least."""
    kept: list[int] = []
    free_from = -(1 << 62)
    for place, at in enumerate(at_ns.tolist()):
        if at >= free_from:
            kept.append(place)
            free_from = at + min_ns
    return kept
