"""What each op takes, from samples that are longer than the ops.

    ops       │  conv  │bn│relu│    conv2    │ … the next step │  conv  │bn│relu│ …
    windows   └────w1────┴────w2────┴────w3────┴────w4────┴────w5────┴────w6────┘

A sensor tells what was spent in a window (joules, CPU seconds, byte seconds), not in an op. Each window is an equation:

    amount(w)  =  Σ over ops  overlap_s(w, op) × level(op)   +   gap_s(w) × level(idle)   +   noise

and over many steps, met at other places each time, there are far more equations than ops. They are solved by least
squares, weighted by the noise, with no level below 0, and held weakly to the mean where the windows say nothing.
(Smearing the mean of a window over its ops would give each op the power of its neighbours.)

In:  `Ops`, when each op ran; `Windows`, from what was sampled of a counter or a gauge (`windows_of`).
Out: `Attribution`: a `Share` for each op, with its 95 % interval, and one for the gaps.

Promised: ops that the windows cannot tell apart are merged into one share and shown so: their sum is known though the
parts are not. An op that no window met has no figure. The order of ops, instances and windows changes nothing.

Assumed: the instances of an op have one level, or each takes the same amount however long it lasts (one that had to
wait for a core does the same work): whichever explains the windows better. What they differ by beyond that is noise.
Ops that run at the same time add up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgetrain.errors import UserError
from edgetrain.measure.intervals import student
from edgetrain.measure.samples import Series

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Constant = Literal["level", "amount"]

_LEAST_GAP = 1e-3  # of all time; below that, gaps are no share of their own
_TOLD_APART = 0.5  # an op whose level is known to within so much of the mean level stands alone
_AGAINST = -0.1  # errors that are correlated less than this do not cancel
_GUESSED_NOISE = 0.1  # of a window's amount, where there are too few windows to measure it
_LEAST_FREE = 10  # degrees of freedom that noise is measured with
_ROUNDS = 4
_SAME_LENGTH = 1e-3
_SURER_TOTAL = 10.0  # than the noise of the windows would have it
_NOISE_BINS = 12
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
            raise UserError("Ops are told apart by their names.", expected=f"names that differ, and from {IDLE}")
        if not len(self.op) == len(self.start_ns) == len(self.end_ns):
            raise UserError("Each instance of an op has a start and an end.")
        if len(self.op) and (self.op.min() < 0 or self.op.max() >= len(self.names)):
            raise UserError("An instance belongs to no op.", received=f"op {self.op.max()} of {len(self.names)}")
        if (self.end_ns < self.start_ns).any():
            raise UserError("An op ends before it starts.")

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
            raise UserError("Each window has a start, an end and an amount.")
        ordered = (np.diff(self.start_ns) >= 0).all() and (np.diff(self.end_ns) >= 0).all()
        if not ordered or (self.end_ns <= self.start_ns).any() or not np.isfinite(self.amount).all():
            raise UserError("Windows come in the order of time, last longer than 0 and hold finite amounts.")


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
        raise UserError(f"No op is called {name!r}.")


# Windows from samples


def windows_of(series: Series, name: str, *, averaged_s: float | None = None) -> Windows:
    """Windows of one channel of a sampled source. averaged_s: as in `gauged`."""
    channel, values = series.column(name)
    if channel.counter:
        return counted(series.at_ns, values, least_window_s=channel.least_window_s)
    return gauged(series.at_ns, values, averaged_s=averaged_s)


def counted(at_ns: Ints, total: Floats, *, least_window_s: float = 0.0) -> Windows:
    """Windows between the readings of a counter. Readings closer than `least_window_s` make one window together."""
    there = np.isfinite(total)
    at_ns, total = at_ns[there], total[there]
    keep = _spaced(at_ns, max(1, math.ceil(least_window_s * 1e9)))
    at_ns, total = at_ns[keep], total[keep]
    grown = np.diff(total) >= 0  # one that fell was set back between the two
    return Windows(at_ns[:-1][grown], at_ns[1:][grown], np.diff(total)[grown])


def gauged(at_ns: Ints, level: Floats, *, averaged_s: float | None = None) -> Windows:
    """Windows of a gauge: its value holds for the time since the reading before, or for the last `averaged_s` seconds
    where the sensor is known to average over them."""
    there = np.isfinite(level)
    at_ns, level = at_ns[there], level[there]
    keep = _spaced(at_ns, 1)
    at_ns, level = at_ns[keep], level[keep]
    start = at_ns[:-1] if averaged_s is None else at_ns[1:] - max(1, round(averaged_s * 1e9))
    return Windows(start, at_ns[1:], level[1:] * (at_ns[1:] - start) * 1e-9)


def _spaced(at_ns: Ints, least_ns: int) -> list[int]:
    """Places of readings that lie so far apart at least."""
    kept: list[int] = []
    free_from = -(1 << 62)
    for place, at in enumerate(at_ns.tolist()):
        if at >= free_from:
            kept.append(place)
            free_from = at + least_ns
    return kept


# Attribution


def attribute(ops: Ops, windows: Windows) -> Attribution:
    """The level of each op that explains the windows best."""
    met = _equations(ops, windows)
    if not len(met.amount):
        return Attribution(tuple(_unmet(ops)), None, 0.0, 0.0, 0, math.inf, "level")
    constant: Constant = "level"
    fit = _solve(met)
    least = 1e-9 * float(np.abs(met.amount).mean())  # where both explain all, rounding does not decide
    if (evened := _same_amounts(ops, met)) is not None and _off(met, other := _solve(evened)) + least < _off(met, fit):
        met, fit, constant = evened, other, "amount"
    off = np.sqrt(np.mean((met.amount - fit.fitted) ** 2)) / max(abs(met.amount.mean()), 1e-300)
    shares = [*_shares(ops, met, fit), *_unmet(ops, met)]
    idle = next((share for share in shares if IDLE in share.names), None)
    number = {name: place for place, name in enumerate(ops.names)}
    shares = sorted((share for share in shares if share.names != (IDLE,)), key=lambda share: number[share.names[0]])
    totals = (float(met.amount.sum()), float(fit.fitted.sum()), len(met.amount))
    return Attribution(tuple(shares), idle, *totals, float(off), constant)


def _off(met: _Equations, fit: _Fit) -> float:
    """How far windows lie from what they should hold, the wild ones counting little."""
    return float(np.abs(met.amount - fit.fitted).mean())


def _shares(ops: Ops, met: _Equations, fit: _Fit) -> Iterator[Share]:
    times = _summed(ops.op, ops.lengths_s, len(ops.names))
    all_s = np.array([met.time_s[n] if op is None else times[op] for n, op in enumerate(met.columns)])
    for group in _merge(fit, all_s):
        part = all_s[group] / all_s[group].sum()
        level, free = float(part @ fit.level[group]), float(part @ fit.free[group])
        half = fit.errors * math.sqrt(max(float(part @ fit.covariance[np.ix_(group, group)] @ part), 0.0))
        members = [met.columns[column] for column in group]
        names = [
            *(ops.names[op] for op in sorted(op for op in members if op is not None)),
            *([IDLE] * (None in members)),
        ]
        low, high = min(max(0.0, free - half), level), max(level, free + half)
        yield Share(tuple(names), float(all_s[group].sum()), level, low, high)


def _unmet(ops: Ops, met: _Equations | None = None) -> Iterator[Share]:
    """Ops that no window met."""
    columns = () if met is None else met.columns
    for op in range(len(ops.names)):
        if op not in columns:
            yield Share(
                (ops.names[op],), float((ops.end_ns - ops.start_ns)[ops.op == op].sum() * 1e-9), None, None, None
            )


# Equations


def _summed(place: Ints, values: Floats, count: int) -> Floats:
    """The sum of the values of each place."""
    return np.bincount(place, values, count).astype(np.float64, copy=False)


@dataclass(frozen=True)
class _Equations:
    """One row a window, as its entries that are not 0, row by row: (row, column, seconds).

    columns: the op of each column; None: idle. time_s: of each column, inside windows. instance: of each entry; −1: no
    op's.
    """

    row: Ints
    column: Ints
    instance: Ints
    seconds: Floats
    amount: Floats
    columns: tuple[int | None, ...]
    time_s: Floats


def _equations(ops: Ops, windows: Windows) -> _Equations:
    row, instance, seconds = _overlaps(ops.start_ns, ops.end_ns, windows)
    op = ops.op[instance]
    length = (windows.end_ns - windows.start_ns) * 1e-9
    covered = _covered(ops, windows)
    gap = np.where(length - covered > 1e-9, length - covered, 0.0)
    if gap.sum() > _LEAST_GAP * length.sum():
        there = np.flatnonzero(gap)
        row, op = np.concatenate([row, there]), np.concatenate([op, np.full(len(there), -1)])
        instance, seconds = np.concatenate([instance, np.full(len(there), -1)]), np.concatenate([seconds, gap[there]])
    # Columns in the order in which they are met, so that results do not depend on how ops were numbered.
    start = np.append(ops.start_ns, 1 << 62)[instance]
    order = np.lexsort((op, start, row))
    row, op, instance, seconds = row[order], op[order], instance[order], seconds[order]
    known, first, column = np.unique(op, return_index=True, return_inverse=True)
    by_place = np.argsort(first, kind="stable")
    rank = np.empty(len(known), dtype=np.int64)
    rank[by_place] = np.arange(len(known))
    columns = tuple(None if known[n] < 0 else int(known[n]) for n in by_place)
    column = rank[column]
    used, row = np.unique(row, return_inverse=True)
    time_s = _summed(column, seconds, len(known))
    return _Equations(row, column, instance, seconds, windows.amount[used], columns, time_s)


def _same_amounts(ops: Ops, met: _Equations) -> _Equations | None:
    """The same with seconds counted as if all instances of an op lasted as long as they do on average; None where they
    do anyway."""
    lengths, count = ops.lengths_s, np.maximum(np.bincount(ops.op, minlength=len(ops.names)), 1)
    mean = _summed(ops.op, lengths, len(ops.names)) / count
    factor = np.append(mean[ops.op] / np.maximum(lengths, 1e-12), 1.0)[met.instance]
    if np.abs(factor - 1).max() < _SAME_LENGTH:
        return None
    seconds = met.seconds * factor
    return replace(met, seconds=seconds, time_s=_summed(met.column, seconds, len(met.columns)))


def _overlaps(start_ns: Ints, end_ns: Ints, windows: Windows) -> tuple[Ints, Ints, Floats]:
    """Every pair of a window and a span that meet: window, span, seconds."""
    first = np.searchsorted(windows.end_ns, start_ns, side="right")
    last = np.searchsorted(windows.start_ns, end_ns, side="left")
    count = np.maximum(last - first, 0)
    span = np.repeat(np.arange(len(start_ns)), count)
    window = np.arange(len(span)) - np.repeat(np.cumsum(count) - count, count) + first[span]
    left = np.maximum(start_ns[span], windows.start_ns[window])
    seconds = (np.minimum(end_ns[span], windows.end_ns[window]) - left) * 1e-9
    there = seconds > 0
    return window[there], span[there], seconds[there]


def _covered(ops: Ops, windows: Windows) -> Floats:
    """Seconds of each window in which some op ran; those of ops that ran at the same time count once."""
    order = np.argsort(ops.start_ns, kind="stable")
    start, reached = ops.start_ns[order], np.maximum.accumulate(ops.end_ns[order])
    begins = np.concatenate([[True], start[1:] > reached[:-1]]) if len(start) else np.empty(0, dtype=bool)
    ends = np.concatenate([begins[1:], [True]]) if len(start) else begins
    window, _, seconds = _overlaps(start[begins], reached[ends], windows)
    return _summed(window, seconds, len(windows.amount))


# Least squares


@dataclass(frozen=True)
class _Gram:
    """Normal equations: all that is kept of the windows. gram × level = right."""

    gram: Floats
    right: Floats


@dataclass(frozen=True)
class _Prior:
    """What is taken for granted before any window is seen: levels lie around the mean of all, by about `spread`.

    The windows outweigh it wherever they say something. Where they say nothing, it keeps a level from being anything at
    all, and its interval as wide as levels differ.
    """

    mean: float
    spread: float


@dataclass(frozen=True)
class _Fit:
    """level: of each column, not below 0. free: the same without that bound. covariance: of `free`.
    errors: how many standard errors make half of an interval. fitted: amount of each window."""

    level: Floats
    free: Floats
    covariance: Floats
    errors: float
    fitted: Floats


def _solve(met: _Equations) -> _Fit:
    n, rows = len(met.columns), len(met.amount)
    mean = max(float(met.amount.sum() / met.time_s.sum()), 0.0) or 1.0
    prior = _Prior(mean, mean)
    variance = np.full(rows, (_GUESSED_NOISE * max(float(np.abs(met.amount).mean()), 1e-300)) ** 2)
    degrees = _LEAST_FREE
    for _ in range(_ROUNDS):
        gram = _gram(met, 1 / variance, n)
        free, covariance = _posterior(gram, prior)
        prior = _wider(prior, free, covariance)
        unused = rows - math.ceil(float((gram.gram * covariance).sum()))  # equations that the levels do not use up
        if unused < max(_LEAST_FREE, rows / 4):
            break  # too few to tell the noise from what is to be found: the guess stands
        degrees, variance = unused, _noise(met.amount, _fitted(met, free)) * rows / unused
    gram = _gram(met, 1 / variance, n)
    _, covariance = _posterior(gram, prior)
    gram = _with_total(gram, met, variance)
    free, _ = _posterior(gram, prior)
    off = float(((met.amount - _fitted(met, free)) ** 2 / variance).sum()) / max(degrees, rows / 4)
    level = _not_negative(gram, prior)
    return _Fit(level, free, covariance * max(1.0, off), student(degrees), _fitted(met, level))


def _with_total(gram: _Gram, met: _Equations, variance: Floats) -> _Gram:
    """One more equation: all ops together take what all windows hold. It follows from the others if each op has one
    level; where it has not, parts that do not add up would be the first thing a reader sees."""
    weight = _SURER_TOTAL**2 / float(variance.sum())
    return _Gram(
        gram.gram + weight * np.outer(met.time_s, met.time_s),
        gram.right + weight * met.time_s * float(met.amount.sum()),
    )


def _posterior(gram: _Gram, prior: _Prior) -> tuple[Floats, Floats]:
    """Levels and their covariance."""
    covariance = np.linalg.inv(gram.gram + np.eye(len(gram.right)) / prior.spread**2)
    covariance = (covariance + covariance.T) / 2
    return covariance @ (gram.right + prior.mean / prior.spread**2), covariance


def _wider(prior: _Prior, level: Floats, covariance: Floats) -> _Prior:
    """The prior, with the spread that the levels show if that is more."""
    shown = math.sqrt(float(np.mean((level - prior.mean) ** 2 + np.diag(covariance))))
    return _Prior(prior.mean, max(prior.mean, shown))


def _not_negative(gram: _Gram, prior: _Prior) -> Floats:
    """The same levels with none below 0: the set of those held at 0 is changed until nothing is gained."""
    n = len(gram.right)
    matrix, right = gram.gram + np.eye(n) / prior.spread**2, gram.right + prior.mean / prior.spread**2
    level, held = np.zeros(n), np.zeros(n, dtype=bool)
    for _ in range(3 * n + 10):
        free = np.flatnonzero(~held)
        level[:] = 0.0
        level[free] = np.linalg.solve(matrix[np.ix_(free, free)], right[free])
        if (level < 0).any():
            held |= level < 0
            continue
        gain = np.where(held, right - matrix @ level, 0.0) / np.diag(matrix)
        best = int(np.argmax(gain))
        if gain[best] <= 1e-9 * prior.mean:
            break
        held[best] = False
    return np.maximum(level, 0.0)


def _fitted(met: _Equations, level: Floats) -> Floats:
    return _summed(met.row, met.seconds * level[met.column], len(met.amount))


def _gram(met: _Equations, weight: Floats, n: int) -> _Gram:
    values = met.seconds * np.sqrt(weight)[met.row]
    gram = (_gram_of_few if len(met.row) < len(met.amount) * n / 8 else _gram_of_many)(met, values, n)
    right = _summed(met.column, met.seconds * (weight * met.amount)[met.row], n)
    return _Gram(gram, right)


def _gram_of_few(met: _Equations, values: Floats, n: int) -> Floats:
    """Where a window meets few of the ops: all pairs of entries in one row, by how far they stand apart."""
    half = np.zeros(n * n)
    first, apart = np.arange(len(met.row) - 1), 1
    while len(first):
        first = first[met.row[first] == met.row[first + apart]]
        half += _summed(met.column[first] * n + met.column[first + apart], values[first] * values[first + apart], n * n)
        apart += 1
        first = first[first + apart < len(met.row)]
    square = half.reshape(n, n)
    return square + square.T + np.diag(_summed(met.column, values**2, n))


def _gram_of_many(met: _Equations, values: Floats, n: int) -> Floats:
    """Where a window meets many of them: blocks of whole rows."""
    gram, rows, step = np.zeros((n, n)), len(met.amount), 1024
    bounds = np.searchsorted(met.row, np.arange(0, rows + step, step))
    for block, (left, right) in enumerate(itertools.pairwise(bounds)):
        place = (met.row[left:right] - block * step) * n + met.column[left:right]
        dense = _summed(place, values[left:right], step * n).reshape(step, n)
        gram += dense.T @ dense
    return gram


def _noise(amount: Floats, fitted: Floats) -> Floats:
    """The variance of each window: a part that is always there and a part that grows with the amount.

    From medians within bins of about the same amount, so that a few wild windows do not set it.
    """
    bins = np.array_split(np.argsort(fitted, kind="stable"), min(_NOISE_BINS, max(1, len(amount) // 20)))
    size = np.array([np.median(fitted[one]) ** 2 for one in bins])
    spread = np.array([np.median((amount - fitted)[one] ** 2) / 0.4549 for one in bins])  # χ²₁ has this median
    least = max(float(spread.min()) * 0.1, (1e-6 * float(np.abs(amount).mean())) ** 2, 1e-300)
    constant, growing = _two_not_negative(size, spread)
    return np.maximum(constant + growing * fitted**2, least)


def _two_not_negative(size: Floats, spread: Floats) -> tuple[float, float]:
    """constant + growing × size ≈ spread, relatively, with neither below 0."""
    unit = np.maximum(spread, 1e-300)
    design = np.stack([1 / unit, size / unit], axis=1)
    both = np.linalg.lstsq(design, np.ones(len(size)), rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = [float(column.sum() / max((column**2).sum(), 1e-300)) for column in design.T]
    left = [float(((1 - alone[n] * design[:, n]) ** 2).sum()) for n in (0, 1)]
    return (alone[0], 0.0) if left[0] <= left[1] else (0.0, alone[1])


# Merging


def _merge(fit: _Fit, time_s: Floats) -> list[list[int]]:
    """Groups of columns that the windows cannot tell apart: their errors cancel in the sum.

    The column whose level is least known joins the one whose error goes most against its own, and so on, until the
    level of every group is known, or nothing cancels.
    """
    most = _TOLD_APART * float(fit.level @ time_s / time_s.sum())
    errors, times = np.outer(time_s, time_s) * fit.covariance, time_s.copy()
    groups: list[list[int]] = [[column] for column in range(len(time_s))]
    left = np.ones(len(groups), dtype=bool)  # to be looked at: those not part of another, and not without a partner
    while left.any():
        half = np.where(left, fit.errors * np.sqrt(np.maximum(np.diag(errors), 0.0)) / times, 0.0)
        place = int(np.argmax(half))
        if half[place] <= most:
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
    return best if correlation[best] < _AGAINST else None


def _join(groups: list[list[int]], errors: Floats, times: Floats, first: int, second: int) -> None:
    """In place: the second becomes part of the first, and is empty."""
    groups[first], groups[second] = sorted(groups[first] + groups[second]), []
    errors[first] += errors[second]
    errors[:, first] += errors[:, second]
    errors[second], errors[:, second] = 0.0, 0.0
    times[first] += times[second]
