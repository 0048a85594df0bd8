"""The program of `program.py` with a store beside recomputation: what is paged out, and when it is paged in.

Class of schedules: a storage is paged out at most once, right after its last use in the forward pass, and is paged in
before any of its points. Each transfer runs beside the ops, or everything waits for it. Beside the ops, a storage that
goes is freed where the write alone would be over, and one that comes gets its memory where the read alone would take
until its point, if nothing but the step's own ops ran meanwhile; so what is on its way counts, position by position.

                  forward                    │ backward
    storage s   make ── use ├─ write ─┤      │      ├─ read ─┤ point
                            out       freed  │      in
    O[s,w]      1: it goes to the store      I[s,t,w]   1: it comes back for point t        w: all wait for it

    need, inputs, retention     as in program.py, with I beside K and R
    store      Σ_w I[s,t,w] ≤ Σ_w O[s,w];  Σ_w O[s,w] + K[s,0] ≤ 1
    memory     what is on its way counts by O and I
    channel    the store moves one thing at a time: what must be moved between two instants takes no longer than the
               ops, the recomputes X and the waiting W between them
    least      Σ R·time + Σ W + the transfers that all wait for; or the energy of the recomputes, the transfers and of
               idling all the while

Where the program is `wide` (`program.py`) all wait for every transfer: then a storage may as well be written as soon as
it is made, whether it is kept for a while or not, gradients too, and be read back for any op.

The channel has a row for each pair of instants out of a few (`INSTANTS`), so a solution may wait a little longer than
it says; the schedule is played through to know (`timing.py`), and the bound stays one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from edgetrain.costs.table import Store
from edgetrain.plan.budget import Objective
from edgetrain.plan.mip.program import Formulation, Row, Values
from edgetrain.plan.plan import Free, Item, PageIn, PageOut
from edgetrain.plan.problem import Problem

INSTANTS = 25
MIN_PART = 1 / 1000  # of what keeping all takes above what lasts: smaller storages are not paged


class PagingFormulation(Formulation):
    """
    freed: storage, whether all wait → the op before which it is freed when it is paged out.
    begin: storage, point, whether all wait → the op before which it gets memory again.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        depth: int,
        reach: int | None = None,
        recompute: bool = True,
        overlap: bool = True,
        wide: bool = False,
    ) -> None:
        assert not (wide and overlap)
        super().__init__(problem, depth=depth, reach=reach, recompute=recompute, wide=wide)
        assert problem.costs.store is not None
        self.store: Store = problem.costs.store
        self.ways = (False, True) if overlap else (True,)
        phases = [problem.graph.ops[number].phase for number in self.ops]
        self.first_update = phases.index("update") if "update" in phases else len(phases)
        self.time_at = np.cumsum([0.0, *(problem.costs.ops[number].time_s for number in self.ops)])
        self.freed: dict[tuple[int, bool], int] = {}
        self.begin: dict[tuple[int, int, bool], int] = {}
        self.O: dict[tuple[int, bool], int] = {}
        self.I: dict[tuple[int, int, bool], int] = {}
        self._until = problem.tables.until
        for s in self._worth_paging():
            self._page(s)
        self._storage = {v: key[0] for key, v in (*self.O.items(), *self.I.items())}
        self._transit: dict[int, Row] = {}
        self._count_transit()
        self._add_channel()

    # ---- the variables

    def _worth_paging(self) -> list[int]:
        p = self.problem
        if self.wide:
            return [s for s in self.points if s in p.pageable]
        min_bytes = MIN_PART * (p.keep_all.peak_bytes - p.keep_all.persistent_bytes)
        return [
            s for s, points in self.points.items()
            if s in self.uses and s in p.pageable and self._safe(s, points[-1]) and p.size[s] >= min_bytes
        ]  # fmt: skip

    def _safe(self, s: int, point: int) -> bool:
        """Once something is updated it must be possible to recompute it when it does not come back."""
        p = self.problem
        updates = p.updates in ("early", "final") or (p.updates == "together" and point >= self.first_update)
        return not updates or self._until[s] >= p.position[self.ops[point]]

    def _page(self, s: int) -> None:
        first, points = self.forward_last[s] + 1, self.points[s]
        out_s, in_s = self.store.out_s(self.problem.size[s]), self.store.in_s(self.problem.size[s])
        for waits in self.ways:
            freed = first if waits else int(bisect_left(self.time_at, self.time_at[first] + out_s))
            if freed > points[-1] or (freed == first and not waits):
                continue
            self.freed[s, waits] = freed
            self.O[s, waits] = self._variable()
        if not any((s, waits) in self.O for waits in self.ways):
            return
        earliest = min(self.freed[s, waits] for waits in self.ways if (s, waits) in self.O)
        for before, point in zip((first - 1, *points), points, strict=False):
            for waits in self.ways if self._safe(s, point) else ():
                begin = point if waits else self.begin_of(point, in_s)
                begin = max(begin, before + 1, earliest)
                if begin > point or (begin == point and not waits):
                    continue
                self.begin[s, point, waits] = begin
                self.I[s, point, waits] = self._variable()

    def begin_of(self, point: int, in_s: float) -> int:
        """The op with which a read that ends at the point begins, if it runs beside the ops."""
        return max(int(bisect_right(self.time_at, self.time_at[point] - in_s)) - 1, 0)

    def _count_transit(self) -> None:
        size = self.problem.size
        for (s, waits), v in self.O.items():
            for index in range(self.forward_last[s] + 1, self.freed[s, waits]):
                self._transit.setdefault(index, {})[v] = float(size[s])
        for (s, point, waits), v in self.I.items():
            for index in range(self.begin[s, point, waits], point):
                self._transit.setdefault(index, {})[v] = float(size[s])

    def transit(self, index: int) -> Row:
        return self._transit.get(index, {})

    # ---- the rows

    def brings(self, s: int, stage: int) -> list[int]:
        return [self.I[s, stage, waits] for waits in self.ways if (s, stage, waits) in self.I]

    def _sends(self, s: int) -> list[int]:
        return [self.O[s, waits] for waits in self.ways if (s, waits) in self.O]

    def logic(self) -> Iterator[tuple[Row, float]]:
        yield from super().logic()
        for s, point in {(s, point) for s, point, _ in self.I}:
            yield dict.fromkeys(self.brings(s, point), 1.0) | dict.fromkeys(self._sends(s), -1.0), 0.0
        for s in {s for s, _ in self.O} if not self.wide else ():
            yield dict.fromkeys((*self._sends(s), self.K[s, 0]), 1.0), 1.0
        for (s, point, waits), v in self.I.items():
            # It cannot come back before it has gone.
            late = [self.O[s, w] for w in self.ways if self.freed.get((s, w), -1) > self.begin[s, point, waits]]
            yield from (({v: 1.0, o: 1.0}, 1.0) for o in late)

    # ---- the channel

    def _add_channel(self) -> None:
        """The waiting W and the recomputes X between two instants that follow each other, and what is moved."""
        whole = float(self.time_at[-1])
        at = sorted({int(bisect_left(self.time_at, whole * n / INSTANTS)) for n in range(INSTANTS)} | {len(self.ops)})
        self.instants = [0, *(index for index in at if index > 0)]
        parts = range(len(self.instants) - 1)
        self.W = [self._variable() for _ in parts]
        self.X = [self._variable() for _ in parts]
        self.continuous = [*self.W, *self.X]
        self.moved: dict[tuple[int, int], int] = {}  # part where it begins, part where it is over → seconds
        self._moves: dict[tuple[int, int], Row] = {}
        for (s, point, waits), v in self.I.items():
            if not waits:
                begin, end = self._part(self.begin[s, point, waits]), self._part(point - 1)
                self._move(begin, end, v, self.store.in_s(self.problem.size[s]))
        for (s, waits), v in self.O.items():
            if not waits:
                begin, end = self._part(self.forward_last[s] + 1), self._part(self.freed[s, waits] - 1)
                self._move(begin, end, v, self.store.out_s(self.problem.size[s]))
        for key in self._moves:
            self.moved[key] = self._variable()
        self.continuous += self.moved.values()

    def _part(self, index: int) -> int:
        return min(bisect_right(self.instants, index), len(self.instants) - 1) - 1

    def _move(self, begin: int, end: int, v: int, seconds: float) -> None:
        row = self._moves.setdefault((begin, max(begin, end)), {})
        row[v] = row.get(v, 0.0) + seconds

    def limits(self) -> Iterator[tuple[Row, float]]:
        """What is moved is at least what the decisions say; the recomputes give at most the time that they take."""
        for key, row in self._moves.items():
            yield {**row, self.moved[key]: -1.0}, 0.0
        again: list[Row] = [{} for _ in self.X]
        for (t, i), v in self.R.items():
            again[self._part(t)][v] = -self.problem.costs.ops[i].again_s
        for x, row in zip(self.X, again, strict=True):
            yield {**row, x: 1.0}, 0.0
        for a in range(len(self.W)):
            for b in range(a + 1, len(self.W) + 1):
                row = {v: 1.0 for (begin, end), v in self.moved.items() if a <= begin and end < b}
                if row:
                    row |= dict.fromkeys((*self.W[a:b], *self.X[a:b]), -1.0)
                    yield row, float(self.time_at[self.instants[b]] - self.time_at[self.instants[a]])

    def extra(self, objective: Objective) -> Row:
        size, store = self.problem.size, self.store
        moving = {(v, waits): store.out_s(size[s]) for (s, waits), v in self.O.items()}
        moving |= {(v, waits): store.in_s(size[s]) for (s, _, waits), v in self.I.items()}
        row = super().extra(objective)
        for (v, waits), seconds in moving.items():
            joules = None if store.power_w is None else store.power_w * seconds
            row[v] = self._weigh(objective, seconds if waits else 0.0, joules)
        return row | dict.fromkeys(self.W, self._weigh(objective, 1.0, 0.0))

    # ---- from a solution to an order and back

    def between(self, first: int, last: int) -> list[int]:
        near = {s for s, point, _ in self.I if first <= point <= last}
        back = [v for (s, point, _), v in self.I.items() if s in near and first <= point]
        return [*super().between(first, last), *back, *(v for s in near for v in self._sends(s))]

    def brought(self, order: Sequence[Item]) -> dict[int, set[int]]:
        return {s: set(points) for s, points in self._comings(order).items()}

    def _comings(self, order: Sequence[Item]) -> dict[int, dict[int, bool]]:
        """Storage → the points for which it is paged in, and whether it gets its memory there alone."""
        comings: dict[int, dict[int, bool]] = {}
        coming: dict[int, int] = {}  # storage → the op before which it gets memory
        done: set[int] = set()
        begun: list[int] = []
        for item in order:
            if isinstance(item, PageIn):
                begun.append(item.storage)
            elif isinstance(item, int) and item in self.at and item not in done:
                done.add(item)
                index = self.at[item]
                coming.update(dict.fromkeys(begun, index))
                begun.clear()
                for s in [s for s in coming if self.brings(s, index)]:
                    comings.setdefault(s, {})[index] = coming.pop(s) == index
        return comings

    def values(self, order: Sequence[Item]) -> Values | None:
        values = super().values(order)
        if values is None:
            return None
        for s, points in self._comings(order).items():
            # The last of what there is: it waits, and is always possible.
            values[self._sends(s)[0]] = 1.0
            for point, alone in points.items():
                values[self.brings(s, point)[-1 if alone else 0]] = 1.0
        self._fill_channel(values)
        return values

    def _fill_channel(self, values: Values) -> None:
        """The least waiting with which a solution keeps the rows of the channel."""
        for key, row in self._moves.items():
            values[self.moved[key]] = sum(a * values[v] for v, a in row.items())
        for (t, i), v in self.R.items():
            values[self.X[self._part(t)]] += values[v] * self.problem.costs.ops[i].again_s
        for b in range(1, len(self.W) + 1):
            for a in range(b):
                moved = sum(values[v] for (begin, end), v in self.moved.items() if a <= begin and end < b)
                there = float(self.time_at[self.instants[b]] - self.time_at[self.instants[a]])
                there += float(values[self.X[a:b]].sum() + values[self.W[a:b]].sum())
                values[self.W[b - 1]] += max(0.0, moved - there)

    def _there(self, values: Values, t: int, i: int, s: int) -> int | None:
        paged = (v for v in self.brings(s, t) if values[v] > 0.5)
        variable = super()._there(values, t, i, s)
        return next(paged, None) if variable is None else variable

    def _reasons(self, values: Values, t: int, i: int, s: int) -> list[int] | None:
        moving = (v for v in self.transit(t) if self._storage[v] == s and values[v] > 0.5)
        in_transit = next(moving, None)
        return [in_transit] if in_transit is not None else super()._reasons(values, t, i, s)

    def _before(self, index: int, values: Values) -> list[Item]:
        """What has gone is freed, and what comes gets memory."""
        freed = (s for (s, waits), at in self.freed.items() if at == index and values[self.O[s, waits]] > 0.5)
        begun = (key for key, at in self.begin.items() if at == index and values[self.I[key]] > 0.5)
        gone: list[Item] = [Free(s) for s in freed if self._goes(s, values)]
        return [*gone, *dict.fromkeys(PageIn(s) for s, point, _ in begun if self._comes(s, point, values))]

    def _after(self, index: int, values: Values) -> list[Item]:
        ends = {s for s, _ in self.O if self.forward_last[s] == index}
        return [PageOut(s) for s in sorted(ends) if self._goes(s, values)]

    def _goes(self, s: int, values: Values) -> bool:
        return any(self._comes(s, point, values) for point in self.points[s])

    def _comes(self, s: int, point: int, values: Values) -> bool:
        """Where it is kept all the same, or recomputed, nothing has to come."""
        brings = self.brings(s, point)
        others = [v for v in self.present(s, point) if v not in brings]
        return any(values[v] > 0.5 for v in brings) and all(values[v] < 0.5 for v in others)
