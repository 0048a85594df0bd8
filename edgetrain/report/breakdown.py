"""Where a step's time, work and energy go: by phase, by layer, by kind of op, op by op.

In:  a `Timeline`, and what was attributed to its ops. Out: `Row`s, the largest first.

The time of a row is the median over steps of the time that its ops take together; its energy is the mean of a step.

Energy of ops that could not be told apart: a group that lies wholly in a row counts whole. One that lies in several
rows is split by time, which is what its one level says; then the row's interval reaches as far as the group's would
if all of it, or none, belonged here, and the row is marked. Widths of several groups are added as independent errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from edgetrain.measure.attributed import Attributed, Group
from edgetrain.measure.record import Origin
from edgetrain.measure.timeline import OpRun, Timeline
from edgetrain.ops.entry import Category, entry_of

Floats = NDArray[np.float64]

CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True)
class Energy:
    """Energy of one step.

    low, high: None where they are not known. merged: a part of it could not be told apart from ops that are not in this
    row.
    """

    amount_j: float
    low_j: float | None
    high_j: float | None
    origin: Origin
    merged: bool


@dataclass(frozen=True)
class Row:
    """Some ops of a step together. low_s, high_s: nine steps of ten lie between. recomputed_s: of it, recomputed.

    share: of the step's time. places: in the timeline.
    """

    name: str
    time_s: float
    low_s: float
    high_s: float
    share: float
    recomputed_s: float
    flops: int
    n_bytes: int
    places: tuple[int, ...]
    energy: Energy | None = None

    @property
    def flops_per_s(self) -> float | None:
        return self.flops / self.time_s if self.flops and self.time_s > 0 else None

    @property
    def bytes_per_s(self) -> float | None:
        return self.n_bytes / self.time_s if self.n_bytes and self.time_s > 0 else None


def category(kind: str) -> Category:
    """What sort of work an op is, for its colour."""
    return entry_of(kind).category


def category_of(op: OpRun) -> Category:
    """As the run tells it, which knew the ops that others had registered there."""
    return next((known for known in CATEGORIES if known == op.category), category(op.kind))


def by_phase(timeline: Timeline, energy: Attributed | None = None) -> list[Row]:
    """Forward, backward and update, in this order; what a phase recomputes is in `recomputed_s`."""
    by_name = {row.name: row for row in rows(timeline, lambda op, _: op.phase, energy)}
    return [by_name[phase] for phase in ("forward", "backward", "update") if phase in by_name]


def by_layer(timeline: Timeline, energy: Attributed | None = None) -> list[Row]:
    """By the module that an op came from."""
    return rows(timeline, lambda op, _: op.module or "(no layer)", energy)


def by_kind(timeline: Timeline, energy: Attributed | None = None) -> list[Row]:
    return rows(timeline, lambda op, _: op.shown_kind, energy)


def by_op(timeline: Timeline, energy: Attributed | None = None) -> list[Row]:
    """Each op as it runs: one that is recomputed, or runs in several micro-batches, has a row for each time."""
    return rows(timeline, lambda _, place: place, energy, lambda op: op.name)


def between_ops_s(timeline: Timeline) -> float:
    """The time of a step in which no op ran: the median over steps."""
    return max(0.0, float(np.median(timeline.step_s - timeline.op_s.sum(axis=1)))) if timeline.steps else 0.0


def rows(
    timeline: Timeline,
    key: Callable[[OpRun, int], Hashable],
    energy: Attributed | None,
    name: Callable[[OpRun], str] | None = None,
) -> list[Row]:
    """One row for each key, the longest first."""
    if not timeline.steps or not timeline.ops:
        return []
    members: dict[Hashable, list[int]] = {}
    for place, op in enumerate(timeline.ops):
        members.setdefault(key(op, place), []).append(place)
    op_s, step_s = timeline.op_s, float(np.median(timeline.step_s))
    recomputed_s = np.where([op.why == "recomputed" for op in timeline.ops], op_s, 0.0)
    times = np.quantile(_sums(op_s, members.values()), (0.05, 0.5, 0.95), axis=0)
    recomputed = np.median(_sums(recomputed_s, members.values()), axis=0)
    energies = _energies(energy, list(members.values()), op_s.mean(axis=0))
    unsorted = []
    for number, (which, places) in enumerate(members.items()):
        ops = [timeline.ops[place] for place in places]
        low, middle, high = times[:, number].tolist()
        unsorted.append(
            Row(
                name=name(ops[0]) if name else str(which),
                time_s=middle, low_s=low, high_s=high,
                share=middle / step_s if step_s else 0.0,
                recomputed_s=float(recomputed[number]),
                flops=sum(op.flops for op in ops),
                n_bytes=sum(op.read_bytes + op.written_bytes for op in ops),
                places=tuple(places),
                energy=energies[number],
            )
        )  # fmt: skip
    return sorted(unsorted, key=lambda row: -row.time_s)


def _sums(op_s: Floats, members: Collection[Sequence[int]]) -> Floats:
    """Steps × groups: the time of each group in each step."""
    order = [place for places in members for place in places]
    starts = np.cumsum([0, *(len(places) for places in members)])[:-1]
    return np.asarray(np.add.reduceat(op_s[:, order], starts, axis=1))


def _energies(energy: Attributed | None, members: Sequence[Sequence[int]], mean_s: Floats) -> list[Energy | None]:
    if energy is None:
        return [None] * len(members)
    owner = _owners(energy, len(mean_s))
    return [_energy(energy, owner, places, mean_s) for places in members]


def _owners(energy: Attributed, n_ops: int) -> list[int | None]:
    """The group of each op."""
    owner: list[int | None] = [None] * n_ops
    for number, group in enumerate(energy.groups):
        for place in group.ops:
            owner[place] = number
    return owner


def _energy(energy: Attributed, owner: Sequence[int | None], places: Sequence[int], mean_s: Floats) -> Energy | None:
    """Of the ops at these places; None where nothing is known of one of them."""
    inside: dict[int, list[int]] = {}
    for place in places:
        number = owner[place]
        if number is None or energy.groups[number].amount is None:
            return None
        inside.setdefault(number, []).append(place)
    parts = [_part(energy.groups[number], known, mean_s) for number, known in inside.items()]
    amount = sum(part.amount for part in parts)
    down, up = _width([part.down for part in parts]), _width([part.up for part in parts])
    return Energy(
        amount,
        None if down is None else max(0.0, amount - down),
        None if up is None else amount + up,
        energy.origin,
        any(part.merged for part in parts),
    )


@dataclass(frozen=True)
class _Part:
    amount: float
    down: float | None
    up: float | None
    merged: bool


def _part(group: Group, places: Sequence[int], mean_s: Floats) -> _Part:
    """What of a group belongs to the ops at these places."""
    whole = group.amount or 0.0
    if len(places) == len(group.ops) and not group.idle:
        down = None if group.low is None else whole - group.low
        return _Part(whole, down, None if group.high is None else group.high - whole, False)
    total = float(mean_s[list(group.ops)].sum())
    amount = whole * float(mean_s[list(places)].sum()) / total if total > 0 else whole * len(places) / len(group.ops)
    return _Part(amount, amount, None if group.high is None else group.high - amount, True)


def _width(widths: Sequence[float | None]) -> float | None:
    known = [width for width in widths if width is not None]
    return math.hypot(*known) if len(known) == len(widths) else None
