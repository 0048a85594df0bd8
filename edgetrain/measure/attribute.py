"""What each op takes, from samples that are longer than the ops.

    ops       │  conv  │bn│relu│    conv2    │ … the next step │  conv  │bn│relu│ …
    windows   └────w1────┴────w2────┴────w3────┴────w4────┴────w5────┴────w6────┘

A sensor measures what was spent in a window (joules, CPU seconds, byte seconds), not in an op. A window is an equation:

    amount(w)  =  Σ over ops  overlap_s(w, op) × level(op)   +   gap_s(w) × level(idle)   +   noise

and over many steps, met at other places each time, there are far more equations than ops. They are solved by least
squares, weighted by the noise, with no level below 0, and held weakly to the mean where the windows say nothing.
(Smearing the mean of a window over its ops would give each op the power of its neighbours.)

In:  `Ops`, when each op ran; `Windows`, from what was sampled of a counter or a gauge (`windows.py`).
Out: `Attribution`: a `Share` for each op, with its 95 % interval, and one for the gaps.

Promised: ops that the windows cannot tell apart are merged into one share and shown so: their sum is known though the
parts are not. An op that no window met has no figure. The order of ops, instances and windows changes nothing.

Assumed: the instances of an op have one level, or each takes the same amount however long it lasts (one that had to
wait for a core does the same work): whichever explains the windows better. What they differ by beyond that is noise.
Ops that run at the same time add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgetrain.errors import UserError
from edgetrain.measure.equations import Equations, equations_of, same_amounts, summed
from edgetrain.measure.least_squares import Fit, solve
from edgetrain.measure.windows import IDLE, Floats, Ops, Windows

Constant = Literal["level", "amount"]

_KNOWN_WITHIN = 0.5  # of the mean level: an op whose level is known to within this stands alone
_MAX_CORRELATION = -0.1  # errors that are correlated less negatively do not cancel


@dataclass(frozen=True)
class Share:
    """What some ops take.

    names: one op, or several that cannot be told apart. time_s: of all their instances.
    level: mean over that time (W for joules); low, high: its 95 % interval. amount: level × time_s, likewise.
    None: no window met them. Infinite: nothing is known.
    """

    names: tuple[str, ...]
    time_s: float
    level: float | None
    level_low: float | None
    level_high: float | None

    @property
    def amount(self) -> float | None:
        return None if self.level is None else self.level * self.time_s

    @property
    def amount_low(self) -> float | None:
        return None if self.level_low is None else self.level_low * self.time_s

    @property
    def amount_high(self) -> float | None:
        return None if self.level_high is None else self.level_high * self.time_s


@dataclass(frozen=True)
class Attribution:
    """shares: each op is in exactly one. idle: time without any op; None where there is none.
    total: what the windows held; explained: what the shares say they should have held. windows: how many were used.
    noise: what one window differs from that, as a part of a window's mean.
    constant: what all instances of an op have in common: their level, or the amount that each takes.
    """

    shares: tuple[Share, ...]
    idle: Share | None
    total: float
    explained: float
    windows: int
    noise: float
    constant: Constant

    def share(self, name: str) -> Share:
        """The share that this op is in."""
        for share in self.shares:
            if name in share.names:
                return share
        raise UserError(f"no op is called {name!r}")


def attribute(ops: Ops, windows: Windows) -> Attribution:
    """The level of each op that explains the windows best."""
    equations = equations_of(ops, windows)
    if not len(equations.amount):
        return Attribution(tuple(_unmet(ops)), None, 0.0, 0.0, 0, math.inf, "level")
    constant: Constant = "level"
    fit = solve(equations)
    tiny = 1e-9 * float(np.abs(equations.amount).mean())  # where both explain all, rounding does not decide
    if (evened := same_amounts(ops, equations)) is not None:
        other = solve(evened)
        if _residual(equations, other) + tiny < _residual(equations, fit):
            equations, fit, constant = evened, other, "amount"
    noise = np.sqrt(np.mean((equations.amount - fit.fitted) ** 2)) / max(abs(equations.amount.mean()), 1e-300)
    shares = [*_shares(ops, equations, fit), *_unmet(ops, equations)]
    idle = next((share for share in shares if IDLE in share.names), None)
    number = {name: place for place, name in enumerate(ops.names)}
    shares = sorted((share for share in shares if share.names != (IDLE,)), key=lambda share: number[share.names[0]])
    totals = (float(equations.amount.sum()), float(fit.fitted.sum()), len(equations.amount))
    return Attribution(tuple(shares), idle, *totals, float(noise), constant)


def _residual(equations: Equations, fit: Fit) -> float:
    """How far windows lie from what they should hold, the wild ones counting little."""
    return float(np.abs(equations.amount - fit.fitted).mean())


def _shares(ops: Ops, equations: Equations, fit: Fit) -> Iterator[Share]:
    times = summed(ops.op, ops.lengths_s, len(ops.names))
    all_s = np.array([equations.time_s[n] if op is None else times[op] for n, op in enumerate(equations.columns)])
    for group in _merge(fit, all_s):
        part = all_s[group] / all_s[group].sum()
        level, free = float(part @ fit.level[group]), float(part @ fit.free[group])
        half = fit.standard_errors * math.sqrt(max(float(part @ fit.covariance[np.ix_(group, group)] @ part), 0.0))
        members = [equations.columns[column] for column in group]
        names = [
            *(ops.names[op] for op in sorted(op for op in members if op is not None)),
            *([IDLE] * (None in members)),
        ]
        low, high = min(max(0.0, free - half), level), max(level, free + half)
        yield Share(tuple(names), float(all_s[group].sum()), level, low, high)


def _unmet(ops: Ops, equations: Equations | None = None) -> Iterator[Share]:
    """Ops that no window met."""
    columns = () if equations is None else equations.columns
    for op in range(len(ops.names)):
        if op not in columns:
            yield Share(
                (ops.names[op],), float((ops.end_ns - ops.start_ns)[ops.op == op].sum() * 1e-9), None, None, None
            )


# Merging


def _merge(fit: Fit, time_s: Floats) -> list[list[int]]:
    """Groups of columns that the windows cannot tell apart: their errors cancel in the sum.

    The column whose level is least known joins the one whose error goes most against its own, and so on, until the
    level of every group is known, or nothing cancels.
    """
    max_half = _KNOWN_WITHIN * float(fit.level @ time_s / time_s.sum())
    errors, times = np.outer(time_s, time_s) * fit.covariance, time_s.copy()
    groups: list[list[int]] = [[column] for column in range(len(time_s))]
    left = np.ones(len(groups), dtype=bool)  # to be looked at: those not part of another, and not without a partner
    while left.any():
        half = np.where(left, fit.standard_errors * np.sqrt(np.maximum(np.diag(errors), 0.0)) / times, 0.0)
        place = int(np.argmax(half))
        if half[place] <= max_half:
            break
        partner = _partner(errors, place)
        if partner is None:
            left[place] = False
        else:
            first, second = min(place, partner), max(place, partner)
            _join(groups, errors, times, first, second)
            left[[first, second]] = True, False
    return [group for group in groups if group]


def _partner(errors: Floats, place: int) -> int | None:
    """The one whose error goes most against that of `place`; None where none does so enough to matter."""
    scale = np.sqrt(np.maximum(np.diag(errors), 1e-300))
    correlation = errors[place] / (scale * scale[place])
    correlation[place] = 0.0
    best = int(np.argmin(correlation))
    return best if correlation[best] < _MAX_CORRELATION else None


def _join(groups: list[list[int]], errors: Floats, times: Floats, first: int, second: int) -> None:
    """In place: the second becomes part of the first, and is empty."""
    groups[first], groups[second] = sorted(groups[first] + groups[second]), []
    errors[first] += errors[second]
    errors[:, first] += errors[:, second]
    errors[second], errors[:, second] = 0.0, 0.0
    times[first] += times[second]
