"""The level of each op that explains the windows best: least squares, with no level below 0.

In:  `Equations`. Out: `Fit`: levels, and how sure they are.

Each window is weighted by its noise, which is measured from what the levels leave unexplained. Levels are held weakly
to the mean of all: where no window says anything of one, it stays there, with an interval as wide as levels differ.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from edgetrain.measure.equations import Equations, summed
from edgetrain.measure.intervals import student
from edgetrain.measure.windows import Floats

_GUESSED_NOISE = 0.1  # of a window's amount, where there are too few windows to measure it
_MIN_FREE = 10  # degrees of freedom that noise is measured with
_ROUNDS = 4
_TOTAL_FACTOR = 10.0  # the total is surer by so much than the noise of the windows would have it
_NOISE_BINS = 12


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
class Fit:
    """level: of each column, not below 0. free: the same without that bound. covariance: of `free`.
    standard_errors: how many of them make half of an interval. fitted: amount of each window."""

    level: Floats
    free: Floats
    covariance: Floats
    standard_errors: float
    fitted: Floats


def solve(equations: Equations) -> Fit:
    n, rows = len(equations.columns), len(equations.amount)
    mean = max(float(equations.amount.sum() / equations.time_s.sum()), 0.0) or 1.0
    prior = _Prior(mean, mean)
    variance = np.full(rows, (_GUESSED_NOISE * max(float(np.abs(equations.amount).mean()), 1e-300)) ** 2)
    degrees = _MIN_FREE
    for _ in range(_ROUNDS):
        gram = _gram(equations, 1 / variance, n)
        free, covariance = _posterior(gram, prior)
        prior = _wider(prior, free, covariance)
        unused = rows - math.ceil(float((gram.gram * covariance).sum()))  # equations that the levels do not use up
        if unused < max(_MIN_FREE, rows / 4):
            break  # too few to tell the noise from what is looked for: the guess stands
        degrees, variance = unused, _noise(equations.amount, _fitted(equations, free)) * rows / unused
    gram = _gram(equations, 1 / variance, n)
    _, covariance = _posterior(gram, prior)
    gram = _with_total(gram, equations, variance)
    free, _ = _posterior(gram, prior)
    off = float(((equations.amount - _fitted(equations, free)) ** 2 / variance).sum()) / max(degrees, rows / 4)
    level = _not_negative(gram, prior)
    return Fit(level, free, covariance * max(1.0, off), student(degrees), _fitted(equations, level))


def _with_total(gram: _Gram, equations: Equations, variance: Floats) -> _Gram:
    """One more equation: all ops together take what all windows hold.

    It follows from the others if each op has one level; where it has not, parts that do not add up would be the first
    thing a reader sees.
    """
    weight = _TOTAL_FACTOR**2 / float(variance.sum())
    return _Gram(
        gram.gram + weight * np.outer(equations.time_s, equations.time_s),
        gram.right + weight * equations.time_s * float(equations.amount.sum()),
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


def _fitted(equations: Equations, level: Floats) -> Floats:
    return summed(equations.row, equations.seconds * level[equations.column], len(equations.amount))


def _gram(equations: Equations, weight: Floats, n: int) -> _Gram:
    values = equations.seconds * np.sqrt(weight)[equations.row]
    gram = (_gram_of_few if len(equations.row) < len(equations.amount) * n / 8 else _gram_of_many)(equations, values, n)
    right = summed(equations.column, equations.seconds * (weight * equations.amount)[equations.row], n)
    return _Gram(gram, right)


def _gram_of_few(equations: Equations, values: Floats, n: int) -> Floats:
    """Where a window meets few of the ops: all pairs of entries in one row, by how far they stand apart."""
    half = np.zeros(n * n)
    first, apart = np.arange(len(equations.row) - 1), 1
    while len(first):
        first = first[equations.row[first] == equations.row[first + apart]]
        second = first + apart
        place = equations.column[first] * n + equations.column[second]
        half += summed(place, values[first] * values[second], n * n)
        apart += 1
        first = first[first + apart < len(equations.row)]
    square = half.reshape(n, n)
    return square + square.T + np.diag(summed(equations.column, values**2, n))


def _gram_of_many(equations: Equations, values: Floats, n: int) -> Floats:
    """Where a window meets many of them: blocks of whole rows."""
    gram, rows, step = np.zeros((n, n)), len(equations.amount), 1024
    bounds = np.searchsorted(equations.row, np.arange(0, rows + step, step))
    for block, (left, right) in enumerate(itertools.pairwise(bounds)):
        place = (equations.row[left:right] - block * step) * n + equations.column[left:right]
        dense = summed(place, values[left:right], step * n).reshape(step, n)
        gram += dense.T @ dense
    return gram


def _noise(amount: Floats, fitted: Floats) -> Floats:
    """The variance of each window: a part that is always there and a part that grows with the amount.

    From medians within bins of about the same amount, so that a few wild windows do not set it.
    """
    bins = np.array_split(np.argsort(fitted, kind="stable"), min(_NOISE_BINS, max(1, len(amount) // 20)))
    size = np.array([np.median(fitted[each]) ** 2 for each in bins])
    spread = np.array([np.median((amount - fitted)[each] ** 2) / 0.4549 for each in bins])  # χ²₁ has this median
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
