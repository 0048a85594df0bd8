"""The planner `optimal`: mixed-integer programming over storages.

In:  a problem, a budget in bytes, a schedule to start from.
Out: the order of least extra time that was found within the budget, and a proven bound on the best of its class.

The program and its class of schedules are those of `program.py`. It is solved by HiGHS:

1. the whole program, from the schedule to start from. What a solution holds is played through; where that is too much,
   a row is added that says so, and it is solved again;
2. where that did not come near the bound: windows. All stays as it is but for a few stages, which are solved again,
   those first where most is recomputed.

Tight budgets need longer chains: where none of the class fits, `depth` is doubled.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from edgetrain.plan.problem import Problem
from edgetrain.plan.program import Formulation, MemoryRow, Row, Values, places_over

DEPTH = 6
REACH = 4  # where the chains are longer than a few ops, and the smallest peak alone is sought
DEEPEST = 48
MOST_VARIABLES = 4000  # for chains of more than DEPTH ops
WINDOW = 20  # stages that are solved again together
WINDOW_TIME_S = 2.0  # the most for one of them
LAST_PART = 0.2  # of the time, for windows at the end
TIMES_TO_BUILD = 4  # a larger program for them is built if so often its time is left
CLASS = "recompute of forward ops before ops of the backward pass that read activations, in chains of at most {} ops"


@dataclass(frozen=True)
class Found:
    """order: None if none was found in the time. extra_bound_s: no schedule of the class takes less extra time.
    infeasible: the class holds no schedule within the budget (proven); an order is then the one it started from."""

    order: tuple[int, ...] | None
    extra_s: float
    extra_bound_s: float
    schedules: str
    infeasible: bool = False


def _common(rows: Sequence[MemoryRow]) -> Row:
    """The terms that are in most of the rows."""
    count = Counter(term for row in rows for term in row.row.items())
    return {v: a for (v, a), times in count.items() if 2 * times > len(rows)}


def _without(row: Row, shared: Row) -> Row:
    """What is left of a row when the shared terms are in it already."""
    left = {v: row.get(v, 0.0) - shared.get(v, 0.0) for v in {**row, **shared}}
    return {v: a for v, a in left.items() if a}


class _Solver:
    """HiGHS with the rows of a formulation. Without a budget the budget itself is the objective."""

    def __init__(self, form: Formulation, budget: int | None) -> None:
        import highspy

        self.form, self.budget = form, budget
        self._highs: Any = highspy.Highs()
        self._infinity = highspy.kHighsInf
        self._none = highspy.HighsModelStatus.kInfeasible
        self._highs.setOptionValue("output_flag", False)
        # After the decisions: the budget in megabytes, and for each stage what all its recomputes have in common.
        again = form.while_recomputing()
        self._shared = [_common(rows) for rows in again]
        n, m = len(form.cost), len(form.cost) + 1 + len(self._shared)
        cost, low, high = np.zeros(m), np.zeros(m), np.ones(m)
        high[n:] = math.inf
        if budget is None:
            cost[n] = 1.0
        else:
            cost[:n] = form.cost
            low[n] = high[n] = budget / 1e6
        self._highs.addVars(m, low, high)
        columns = np.arange(m, dtype=np.int32)
        self._highs.changeColsCost(m, columns, cost)
        kinds = np.full(m, highspy.HighsVarType.kInteger)
        kinds[n:] = highspy.HighsVarType.kContinuous
        self._highs.changeColsIntegrality(m, columns, kinds)
        self._add(list(form.logic()))
        self.forbid(form.while_running())
        for at, (shared, rows) in enumerate(zip(self._shared, again, strict=True)):
            self._add([({**{v: a / 1e6 for v, a in shared.items()}, n + 1 + at: -1.0}, 0.0)])
            self.forbid([MemoryRow(_without(row.row, shared), row.fixed_bytes) for row in rows], also=n + 1 + at)

    def forbid(self, rows: Iterable[MemoryRow], *, also: int | None = None) -> None:
        """also: a variable that is part of each row."""
        limit = {len(self.form.cost): -1.0} | ({} if also is None else {also: 1.0})
        self._add([({v: a / 1e6 for v, a in m.row.items()} | limit, -m.fixed_bytes / 1e6) for m in rows])

    def _add(self, rows: list[tuple[Row, float]]) -> None:
        index = [v for row, _ in rows for v in row]
        value = [a for row, _ in rows for a in row.values()]
        starts = np.cumsum([0, *(len(row) for row, _ in rows)])[:-1]
        self._highs.addRows(
            len(rows), np.full(len(rows), -self._infinity), np.array([limit for _, limit in rows]), len(index),
            starts.astype(np.int32), np.array(index, dtype=np.int32), np.array(value),
        )  # fmt: skip

    def start_from(self, values: Values) -> None:
        import highspy

        solution = highspy.HighsSolution()
        shared = [sum(a * values[v] for v, a in row.items()) / 1e6 for row in self._shared]
        solution.col_value = [*values, 0.0 if self.budget is None else self.budget / 1e6, *shared]
        self._highs.setSolution(solution)

    def hold(self, values: Values, free: Sequence[int]) -> None:
        """From now on every decision is as in the solution, but for those that are free."""
        low, high = values.copy(), values.copy()
        low[free], high[free] = 0.0, 1.0
        self._highs.changeColsBounds(len(values), np.arange(len(values), dtype=np.int32), low, high)

    def release(self) -> None:
        n = len(self.form.cost)
        self._highs.changeColsBounds(n, np.arange(n, dtype=np.int32), np.zeros(n), np.ones(n))

    def run(self, time_limit_s: float, relative_gap: float, absolute_gap: float) -> None:
        # HiGHS counts the time of all runs of one model together.
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + max(time_limit_s, 0.0))
        self._highs.setOptionValue("mip_rel_gap", relative_gap)
        self._highs.setOptionValue("mip_abs_gap", absolute_gap)
        self._highs.run()

    @property
    def infeasible(self) -> bool:
        return bool(self._highs.getModelStatus() == self._none)

    @property
    def values(self) -> Values | None:
        if self._highs.getInfo().primal_solution_status != 2:
            return None
        return np.array(self._highs.getSolution().col_value)[: len(self.form.cost)]

    @property
    def bound(self) -> float:
        found: float = self._highs.getInfo().mip_dual_bound
        return found


def optimal(
    problem: Problem,
    budget_bytes: int,
    *,
    start: Sequence[int] | None = None,
    time_limit_s: float = 10.0,
    gap: float = 0.005,
) -> Found:
    """The order of least time within the budget. It stops when the time of the whole step is within `gap` of the bound,
    or when the time is up."""
    end = time.monotonic() + time_limit_s
    depth = _depth(problem)
    while True:
        found = _at_depth(problem, budget_bytes, start, end, gap, depth)
        if not found.infeasible or depth >= min(DEEPEST, len(problem.order)) or time.monotonic() > end:
            return found
        depth *= 2


def _depth(problem: Problem) -> int:
    """Longer chains for smaller problems: the class is larger, and with more points its relaxation is tighter."""
    depth = DEPTH
    while depth < 2 * DEPTH and len(Formulation(problem, depth=depth + 2).cost) <= MOST_VARIABLES:
        depth += 2
    return depth


def _at_depth(problem: Problem, budget: int, start: Sequence[int] | None, end: float, gap: float, depth: int) -> Found:
    search = _Search(problem, budget, depth)
    if start is not None and problem.peak_bytes(start) <= budget:
        search.take(tuple(start))
    infeasible = search.solve(end - LAST_PART * (end - time.monotonic()), gap)
    if not infeasible and search.extra_s - search.bound_s > gap * (search.whole_s + search.bound_s):
        _improve(search, end)
    # A start from outside the class may be better than all of it.
    bound = min(search.bound_s, search.extra_s)
    return Found(search.best, search.extra_s, bound, CLASS.format(depth), infeasible)


def _improve(search: _Search, end: float) -> None:
    """Windows of the best order, in a program whose chains are as long as those of the order."""
    for depth in range(search.form.depth, 2 * DEPTH + 1, 2):
        if depth > search.form.depth and end - time.monotonic() < TIMES_TO_BUILD * search.build_s:
            return
        deeper = search if depth == search.form.depth else _Search(search.problem, search.budget, depth)
        if search.best is not None and deeper.form.values(search.best) is not None:
            deeper.take(search.best)
            deeper.improve(end)
            search.take(deeper.best or search.best)
            return


class _Search:
    """best: the order of least extra time so far. bound_s: no order of the class takes less."""

    def __init__(self, problem: Problem, budget: int, depth: int) -> None:
        self.problem, self.budget = problem, budget
        self.form = Formulation(problem, depth=depth)
        self.whole_s = problem.keep_all_time_s
        self.best: tuple[int, ...] | None = None
        self.extra_s, self.bound_s = math.inf, 0.0
        self.build_s = 0.0

    @cached_property
    def solver(self) -> _Solver:
        begin = time.monotonic()
        found = _Solver(self.form, self.budget)
        self.build_s = time.monotonic() - begin
        return found

    def take(self, order: tuple[int, ...]) -> bool:
        """Whether the order, which keeps the budget, is the best so far."""
        extra_s = self.problem.costs.time_s(order) - self.whole_s
        better = extra_s < self.extra_s
        if better:
            self.best, self.extra_s = order, extra_s
        return better

    def solve(self, end: float, gap: float) -> bool:
        """The whole program, until the bound is near or the time is up. True: the class holds nothing."""
        while time.monotonic() < end:
            first = None if self.best is None else self.form.values(self.best)
            if first is not None:
                self.solver.start_from(first)
            self.solver.run(end - time.monotonic(), 0.0, gap * (self.whole_s + self.bound_s))
            if self.solver.infeasible:
                return True
            if math.isfinite(self.solver.bound):
                self.bound_s = max(self.bound_s, self.solver.bound)
            if not self._cut_off():
                break
        return False

    def improve(self, end: float) -> None:
        """Solve a few stages again at a time, round after round, for as long as that helps."""
        stages, form = self.form.stages, self.form
        begins = range(0, max(len(stages) - WINDOW // 2, 1), WINDOW // 2)
        windows = [form.between(stages[n], stages[min(n + WINDOW, len(stages)) - 1]) for n in begins]
        better = True
        while better and self.best is not None and (values := form.values(self.best)) is not None:
            spent = values * form.cost
            windows.sort(key=lambda free: -float(spent[free].sum()))
            better = sum(self._window(free, end) for free in windows) > 0
        self.solver.release()

    def _window(self, free: list[int], end: float) -> bool:
        values = None if self.best is None else self.form.values(self.best)
        if values is None:
            return False
        before = self.extra_s
        self.solver.hold(values, free)
        end = min(end, time.monotonic() + WINDOW_TIME_S)
        while time.monotonic() < end:
            self.solver.start_from(values)
            self.solver.run(end - time.monotonic(), 0.0, 1e-4 * self.whole_s)
            if not self._cut_off():
                break
        return self.extra_s < before

    def _cut_off(self) -> bool:
        """Take the solution if it keeps the budget. True: it does not, and rows were added that forbid it."""
        values = self.solver.values
        if values is None:
            return False
        order = self.form.order(values)
        over = places_over(self.problem, order, self.budget)
        if not over:
            self.take(order)
            return False
        cuts = [self.form.cut(values, place) for place in over if place.again]
        if not any(cut.breaks(values, self.budget) for cut in cuts):
            return False
        self.solver.forbid(cuts)
        return True


def smallest(problem: Problem, *, time_limit_s: float = 10.0, depth: int = 2 * DEPTH) -> tuple[int, ...]:
    """An order of the class whose peak is as small as was found in the time."""
    end = time.monotonic() + time_limit_s
    form = Formulation(problem, depth=depth, reach=REACH)
    solver = _Solver(form, None)
    best = problem.order
    while time.monotonic() < end:
        solver.run(end - time.monotonic(), 0.002, 0.0)
        values = solver.values
        if values is None:
            break
        order = form.order(values)
        if problem.peak_bytes(order) < problem.peak_bytes(best):
            best = order
        target = solver.bound * 1e6 * 1.002
        over = places_over(problem, order, target)
        if not over:
            break
        cuts = [form.cut(values, place) for place in over if place.again]
        if not any(cut.breaks(values, target) for cut in cuts):
            break
        solver.forbid(cuts)
    return tuple(best)
