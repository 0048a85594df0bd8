"""One equation a window: what was spent in it, and for how long each op ran in it.

In:  `Ops` and `Windows`. Out: `Equations`, sparse, and sums over them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edgetrain.measure.windows import Floats, Ints, Ops, Windows

_MIN_GAP = 1e-3  # of all time; below that, gaps are no share of their own
_SAME_LENGTH = 1e-3


def summed(place: Ints, values: Floats, count: int) -> Floats:
    """The sum of the values of each place."""
    return np.bincount(place, values, count).astype(np.float64, copy=False)


@dataclass(frozen=True)
class Equations:
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


def equations_of(ops: Ops, windows: Windows) -> Equations:
    row, instance, seconds = _overlaps(ops.start_ns, ops.end_ns, windows)
    op = ops.op[instance]
    length = (windows.end_ns - windows.start_ns) * 1e-9
    covered = _covered(ops, windows)
    gap = np.where(length - covered > 1e-9, length - covered, 0.0)
    if gap.sum() > _MIN_GAP * length.sum():
        with_gap = np.flatnonzero(gap)
        row, op = np.concatenate([row, with_gap]), np.concatenate([op, np.full(len(with_gap), -1)])
        instance, seconds = (
            np.concatenate([instance, np.full(len(with_gap), -1)]),
            np.concatenate([seconds, gap[with_gap]]),
        )
    # Columns in the order in which windows meet them, so that results do not depend on how ops were numbered.
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
    time_s = summed(column, seconds, len(known))
    return Equations(row, column, instance, seconds, windows.amount[used], columns, time_s)


def same_amounts(ops: Ops, equations: Equations) -> Equations | None:
    """The same, as if all instances of an op lasted as long as they do on average; None where they do anyway."""
    lengths, count = ops.lengths_s, np.maximum(np.bincount(ops.op, minlength=len(ops.names)), 1)
    mean = summed(ops.op, lengths, len(ops.names)) / count
    factor = np.append(mean[ops.op] / np.maximum(lengths, 1e-12), 1.0)[equations.instance]
    if np.abs(factor - 1).max() < _SAME_LENGTH:
        return None
    seconds = equations.seconds * factor
    return replace(equations, seconds=seconds, time_s=summed(equations.column, seconds, len(equations.columns)))


def _overlaps(start_ns: Ints, end_ns: Ints, windows: Windows) -> tuple[Ints, Ints, Floats]:
    """Every pair of a window and a span that meet: window, span, seconds."""
    first = np.searchsorted(windows.end_ns, start_ns, side="right")
    last = np.searchsorted(windows.start_ns, end_ns, side="left")
    count = np.maximum(last - first, 0)
    span = np.repeat(np.arange(len(start_ns)), count)
    window = np.arange(len(span)) - np.repeat(np.cumsum(count) - count, count) + first[span]
    left = np.maximum(start_ns[span], windows.start_ns[window])
    seconds = (np.minimum(end_ns[span], windows.end_ns[window]) - left) * 1e-9
    overlapping = seconds > 0
    return window[overlapping], span[overlapping], seconds[overlapping]


def _covered(ops: Ops, windows: Windows) -> Floats:
    """Seconds of each window in which some op ran; those of ops that ran at the same time count once."""
    order = np.argsort(ops.start_ns, kind="stable")
    start, reached = ops.start_ns[order], np.maximum.accumulate(ops.end_ns[order])
    begins = np.concatenate([[True], start[1:] > reached[:-1]]) if len(start) else np.empty(0, dtype=bool)
    ends = np.concatenate([begins[1:], [True]]) if len(start) else begins
    window, _, seconds = _overlaps(start[begins], reached[ends], windows)
    return summed(window, seconds, len(windows.amount))
