"""The program of `program.py` with a store beside recomputation: what is paged out, and when it is paged in.

Class of schedules: a storage is paged out at most once, right after its last use in the forward pass; it is freed there
where the write alone would be over, if nothing but the step's own ops ran meanwhile. It is paged in before any of its
points, beginning where the read alone would take until that point. So what is on its way counts, position by position.

                  forward                    │ backward
    storage s   make ── use ├─ write ─┤      │      ├─ read ─┤ point
                            out       freed  │      in
    O[s]        1: it goes to the store      I[s,t]     1: it comes back for point t

    need, inputs, retention     as in program.py, with I[s,t] beside K and R
    store      I[s,t] ≤ O[s];  O[s] + K[s,0] ≤ 1
    memory     what is on its way counts by O and I
    channel    the store moves one thing at a time: what must be moved between two instants takes no longer than the
               ops, the recomputes X and the waiting W between them
    least      Σ R·time + Σ W, or the energy of the recomputes, the transfers and of idling all the while

The channel has a row for each pair of instants out of a few (`INSTANTS`), so a solution may wait a little longer than
it says; the schedule is played through to know (`timing.py`), and the bound stays one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence, Set

import numpy as np

from edgetrain.costs.table import Store
from edgetrain.plan.budget import Objective
from edgetrain.plan.fast import prepare
from edgetrain.plan.plan import Free, Item, PageIn, PageOut
from edgetrain.plan.problem import Problem
from edgetrain.plan.program import Formulation, Row, Values

INSTANTS = 25
LEAST_PART = 1 / 1000  # of what keeping all takes above what lasts: smaller storages are not paged


class PagingFormulation(Formulation):
    """
    written: storage → the op before which it is freed when it is paged out.
    begin:   storage, point → the op before which it begins to come back.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        depth: int,
        reach: int | None = None,
        recompute: bool = True,
        overlap: bool = True,
    ) -> None:
        super().__init__(problem, depth=depth, reach=reach, recompute=recompute)
        assert problem.costs.store is not None
        self.store: Store = problem.costs.store
        self.overlap = overlap
        self.time_at = np.cumsum([0.0, *(problem.costs.ops[number].time_s for number in self.ops)])
        self.written: dict[int, int] = {}
        self.begin: dict[tuple[int, int], int] = {}
        self.O: dict[int, int] = {}
        self.I: dict[tuple[int, int], int] = {}
        for s in self._worth_paging():
            self._page(s)
        self._paged_for: dict[int, list[int]] = {}
        for s, point in self.I:
            self._paged_for.setdefault(point, []).append(s)
        self._transit: dict[int, Row] = {}
        self._count_transit()
        self._storage = {v: s for s, v in self.O.items()} | {v: s for (s, _), v in self.I.items()}
        self._add_channel()

    # ---- the variables

    def _worth_paging(self) -> list[int]:
        p = self.problem
        least = LEAST_PART * (p.keep_all.peak_bytes - p.keep_all.persistent_bytes)
        until = prepare(p).until
        found = []
        for s, points in self.points.items():
            # With early updates it must be possible to make it again when it does not come back.
            safe = p.updates != "early" or until[s] >= p.position[self.ops[points[-1]]]
            if s in self.uses and s in p.pageable and safe and p.size[s] >= least:
                found.append(s)
        return found

    def _page(self, s: int) -> None:
        first, n_bytes, store = self.forward_last[s] + 1, self.problem.size[s], self.store
        out_s, in_s = store.out_s(n_bytes), store.in_s(n_bytes)
        written = bisect_left(self.time_at, self.time_at[first] + out_s) if self.overlap else first
        begins = {}
        for before, point in zip((written - 1, *self.points[s]), self.points[s], strict=False):
            begin = bisect_right(self.time_at, self.time_at[point] - in_s) - 1 if self.overlap else point
            if written <= point:
                begins[point] = max(min(begin, point), before + 1, written)
        if not begins:
            return
        self.written[s] = written
        self.O[s] = self._variable()
        for point, begin in begins.items():
            self.begin[s, point] = begin
            self.I[s, point] = self._variable()

    def _count_transit(self) -> None:
        size = self.problem.size
        for s, v in self.O.items():
            for index in range(self.forward_last[s] + 1, self.written[s]):
                self._transit.setdefault(index, {})[v] = float(size[s])
        for (s, point), v in self.I.items():
            for index in range(self.begin[s, point], point):
                self._transit.setdefault(index, {})[v] = float(size[s])

    def transit(self, index: int) -> Row:
        return self._transit.get(index, {})

    def arrived(self, t: int, own: Set[int]) -> Row:
        return {self.I[s, t]: float(self.problem.size[s]) for s in self._paged_for.get(t, ()) if s not in own}

    # ---- the rows

    def present(self, s: int, stage: int) -> list[int]:
        found = super().present(s, stage)
        paged = self.I.get((s, stage))
        return found if paged is None else [*found, paged]

    def logic(self) -> Iterator[tuple[Row, float]]:
        yield from super().logic()
        for (s, _), v in self.I.items():
            yield {v: 1.0, self.O[s]: -1.0}, 0.0
        for s, v in self.O.items():
            yield {v: 1.0, self.K[s, 0]: 1.0}, 1.0

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
        if not self.overlap:
            return
        for (s, point), v in self.I.items():
            n_bytes, first = self.problem.size[s], point == self._first_paged(s)
            self._move(self._part(self.begin[s, point]), self._part(point - 1), v, self.store.in_s(n_bytes))
            if first:
                begin = self._part(self.forward_last[s] + 1)
                self._move(begin, self._part(point - 1), v, self.store.out_s(n_bytes))
        for key in self._moves:
            self.moved[key] = self._variable()
        self.continuous += self.moved.values()

    def _first_paged(self, s: int) -> int:
        return next(point for point in self.points[s] if (s, point) in self.I)

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
        moving = {v: store.out_s(size[s]) for s, v in self.O.items()}
        moving |= {v: store.in_s(size[s]) for (s, _), v in self.I.items()}
        found = super().extra(objective)
        for v, seconds in moving.items():
            joules = None if store.power_w is None else store.power_w * seconds
            found[v] = self._weigh(objective, 0.0 if self.overlap else seconds, joules)
        return found | dict.fromkeys(self.W, self._weigh(objective, 1.0, 0.0))

    # ---- from a solution to an order and back

    def between(self, first: int, last: int) -> list[int]:
        near = {s for s, point in self.I if first <= point <= last}
        back = [v for (s, point), v in self.I.items() if s in near and first <= point]
        return [*super().between(first, last), *back, *(self.O[s] for s in near)]

    def brought(self, order: Sequence[Item]) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        coming: list[int] = []
        done: set[int] = set()
        for item in order:
            if isinstance(item, PageIn):
                coming.append(item.storage)
            elif isinstance(item, int) and item in self.at and item not in done:
                done.add(item)
                for s in [s for s in coming if (s, self.at[item]) in self.I]:
                    found.setdefault(s, set()).add(self.at[item])
                    coming.remove(s)
        return found

    def values(self, order: Sequence[Item]) -> Values | None:
        found = super().values(order)
        if found is None:
            return None
        for s, stages in self.brought(order).items():
            found[self.O[s]] = 1.0
            found[[self.I[s, t] for t in stages]] = 1.0
        if self.overlap:
            self._fill_channel(found)
        return found

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
        paged = self.I.get((s, t))
        found = super()._there(values, t, i, s)
        return paged if found is None and paged is not None and values[paged] > 0.5 else found

    def _reasons(self, values: Values, t: int, i: int, s: int) -> list[int] | None:
        moving = (v for v in self.transit(t) if self._storage[v] == s and values[v] > 0.5)
        found = next(moving, None)
        return [found] if found is not None else super()._reasons(values, t, i, s)

    def _before(self, index: int, values: Values) -> list[Item]:
        out: list[Item] = [Free(s) for s, written in self.written.items() if written == index and self._goes(s, values)]
        back = [
            PageIn(s)
            for (s, point), begin in self.begin.items()
            if begin == index and self._comes(s, point, values)
        ]  # fmt: skip
        return [*out, *back]

    def _after(self, index: int, values: Values) -> list[Item]:
        return [PageOut(s) for s in self.O if self.forward_last[s] == index and self._goes(s, values)]

    def _goes(self, s: int, values: Values) -> bool:
        return any(self._comes(s, point, values) for point in self.points[s])

    def _comes(self, s: int, point: int, values: Values) -> bool:
        v = self.I.get((s, point))
        if v is None or values[v] < 0.5:
            return False
        # Where it is kept all the same, or made again, nothing has to come.
        others = super().present(s, point)
        return all(values[other] < 0.5 for other in others)
