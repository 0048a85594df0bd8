"""The planner `optimal`: mixed-integer programming over storages.

In:  a problem, a budget in bytes, a schedule to start from.
Out: the order of least extra time that was found within the budget, and a proven bound on the best of its class.

The program and its class of schedules are those of `program.py`. It is solved by HiGHS:

1. the whole program, from the schedule to start from. What a solution holds is played through; where that is too much,
   a row is added that says so, and it is solved again;
2. where that did not come near the bound: windows. All stays as it is but for a few stages, which are solved again,
   those first where most is recomputed.

Tight budgets need longer chains: where none of the class fits, `depth` is doubled. Graphs of up to `SMALL` ops have the
whole class of POET's program instead (`wide`); where transfers run beside the ops, the search begins from its best.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from edgetrain.errors import InternalError
from edgetrain.plan.budget import Objective
from edgetrain.plan.page_instead import page_instead
from edgetrain.plan.paging_program import PagingFormulation
from edgetrain.plan.plan import Item
from edgetrain.plan.problem import Problem
from edgetrain.plan.program import Formulation, MemoryRow, Row, Values, places_over
from edgetrain.plan.timing import Timing

DEPTH = 6
REACH = 4  # where the chains are longer than a few ops, and the smallest peak alone is sought
DEEPEST = 48
MOST_VARIABLES = 4000  # for chains of more than DEPTH ops
WINDOW = 20  # stages that are solved again together
WINDOW_TIME_S = 2.0  # the most for one of them
LAST_PART = 0.05  # of the time, for windows at the end; the bound needs the rest
PART_ALONE = 0.25  # of the time, for paging alone and as much for recomputing alone, before both together
TIMES_TO_BUILD = 4  # a larger program for them is built if so often its time is left
SMALL = 40  # ops, for which all schedules are searched that POET's program knows
WIDE_CLASS = "recompute of forward ops before any op, each at most once there, in the order of the step"
CLASS = "recompute of forward ops before ops of the backward pass that read activations, in chains of at most {} ops"


@dataclass(frozen=True)
class Aim:
    """What is sought among which schedules.

    most: the most that a step may take: seconds and joules. page: to the store that the costs know, if they do.
    overlap: transfers run beside the ops.
    """

    objective: Objective = "time"
    most: Mapping[Objective, float] = field(default_factory=dict)
    recompute: bool = True
    page: bool = True
    overlap: bool = True

    def pages(self, problem: Problem) -> bool:
        return self.page and problem.costs.store is not None

    def wide(self, problem: Problem) -> bool:
        """Whether any op may be run again before any other, and anything paged at any time."""
        return _is_small(problem) and not (self.overlap and self.pages(problem))

    def formulation(self, problem: Problem, *, depth: int, reach: int | None = None) -> Formulation:
        wide = self.wide(problem)
        if self.pages(problem):
            return PagingFormulation(
                problem, depth=depth, reach=reach, recompute=self.recompute, overlap=self.overlap, wide=wide
            )  # fmt: skip
        return Formulation(problem, depth=depth, reach=reach, recompute=self.recompute, wide=wide)

    def schedules(self, depth: int, *, wide: bool) -> str:
        """The class that they are of, in words."""
        paging = "paging to the store" if self.page else ""
        recompute = (WIDE_CLASS if wide else CLASS.format(depth)) if self.recompute else ""
        return " and ".join(part for part in (recompute, paging) if part)


def _is_small(problem: Problem) -> bool:
    return sum(not view for view in problem.is_view) <= SMALL


@dataclass(frozen=True)
class Found:
    """order: None if none was found in the time. extra: the seconds, or joules, that it takes above keeping all; no
    schedule of the class takes less than extra_bound. infeasible: the class holds no schedule within the budget
    (proven); an order is then the one it started from."""

    order: tuple[Item, ...] | None
    extra: float
    extra_bound: float
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
    """HiGHS with the rows of a formulation. Without a budget the budget itself is the objective.

    most: what a step may take more than keeping all does, in seconds and in joules.
    """

    def __init__(
        self,
        form: Formulation,
        budget: int | None,
        objective: Objective = "time",
        most: Mapping[Objective, float] | None = None,
    ) -> None:
        import highspy

        self.form, self.budget = form, budget
        self._highs: Any = highspy.Highs()
        self._infinity = highspy.kHighsInf
        self._none = highspy.HighsModelStatus.kInfeasible
        self._highs.setOptionValue("output_flag", False)
        # The solver's tolerances are absolute: what is small in seconds or megabytes must not be small for it.
        sizes = [n for n, lasts in zip(form.problem.size, form.problem.lasting, strict=True) if not lasts]
        self._unit_bytes = min(1e6, float(max([*sizes, 1])))
        self._unit = self._unit_bytes  # of what is sought
        # After the decisions: the budget, and for each stage what all its recomputes have in common.
        again = form.while_recomputing()
        self._shared = [_common(rows) for rows in again]
        n, m = form.count, form.count + 1 + len(self._shared)
        cost, low, high = np.zeros(m), np.zeros(m), np.ones(m)
        high[n:] = high[form.continuous] = math.inf
        if budget is None:
            cost[n] = 1.0
        else:
            extra, waits = form.extra(objective), set(form.continuous)
            self._unit = max((a for v, a in extra.items() if v not in waits), default=0.0) or 1.0
            for v, a in extra.items():
                cost[v] = a / self._unit
            low[n] = high[n] = budget / self._unit_bytes
        self._highs.addVars(m, low, high)
        columns = np.arange(m, dtype=np.int32)
        self._highs.changeColsCost(m, columns, cost)
        kinds = np.full(m, highspy.HighsVarType.kInteger)
        kinds[n:] = kinds[form.continuous] = highspy.HighsVarType.kContinuous
        self._highs.changeColsIntegrality(m, columns, kinds)
        self._high = high[:n]
        self._add([*form.logic(), *form.limits()])
        for limited, amount in (most or {}).items():
            self.limit(limited, amount)
        self.forbid(form.while_running())
        for at, (shared, rows) in enumerate(zip(self._shared, again, strict=True)):
            self._add([({**{v: a / self._unit_bytes for v, a in shared.items()}, n + 1 + at: -1.0}, 0.0)])
            self.forbid([MemoryRow(_without(row.row, shared), row.fixed_bytes) for row in rows], also=n + 1 + at)

    def limit(self, what: Objective, amount: float) -> None:
        extra = self.form.extra(what)
        unit = max(extra.values(), default=0.0) or 1.0
        self._add([({v: a / unit for v, a in extra.items()}, amount / unit)])

    def forbid(self, rows: Iterable[MemoryRow], *, also: int | None = None) -> None:
        """also: a variable that is part of each row."""
        limit = {self.form.count: -1.0} | ({} if also is None else {also: 1.0})
        unit = self._unit_bytes
        self._add([({v: a / unit for v, a in m.row.items()} | limit, -m.fixed_bytes / unit) for m in rows])

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
        shared = [sum(a * values[v] for v, a in row.items()) / self._unit_bytes for row in self._shared]
        solution.col_value = [*values, 0.0 if self.budget is None else self.budget / self._unit_bytes, *shared]
        self._highs.setSolution(solution)

    def hold(self, values: Values, free: Sequence[int]) -> None:
        """From now on every decision is as in the solution, but for those that are free."""
        low, high = values.copy(), values.copy()
        open_ = [*free, *self.form.continuous]
        low[open_], high[open_] = 0.0, self._high[open_]
        self._highs.changeColsBounds(len(values), np.arange(len(values), dtype=np.int32), low, high)

    def release(self) -> None:
        n = self.form.count
        self._highs.changeColsBounds(n, np.arange(n, dtype=np.int32), np.zeros(n), self._high)

    def run(self, time_limit_s: float, relative_gap: float, absolute_gap: float) -> None:
        # HiGHS counts the time of all runs of one model together.
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + max(time_limit_s, 0.0))
        self._highs.setOptionValue("mip_rel_gap", relative_gap)
        self._highs.setOptionValue("mip_abs_gap", absolute_gap / self._unit)
        self._highs.run()

    @property
    def infeasible(self) -> bool:
        return bool(self._highs.getModelStatus() == self._none)

    @property
    def values(self) -> Values | None:
        if self._highs.getInfo().primal_solution_status != 2:
            return None
        return np.array(self._highs.getSolution().col_value)[: self.form.count]

    @property
    def bound(self) -> float:
        """In seconds or joules; without a budget, in bytes."""
        found: float = self._highs.getInfo().mip_dual_bound
        return found * self._unit


def optimal(
    problem: Problem,
    budget_bytes: int,
    *,
    aim: Aim | None = None,
    start: Sequence[Item] | None = None,
    time_limit_s: float = 10.0,
    gap: float = 0.005,
) -> Found:
    """The order of least time, or energy, within the budget. It stops when that of the whole step is within `gap` of
    the bound, or when the time is up."""
    end = time.monotonic() + time_limit_s
    aim = aim or Aim()

    def part_s(part: float) -> float:
        return max(0.0, min(part * time_limit_s, end - time.monotonic()))

    if aim.most and (start is None or not _Search(problem, budget_bytes, aim, 1).keeps(start)):
        start = _within_limits(problem, budget_bytes, aim, start, part_s(2 * PART_ALONE), gap)
    if aim.overlap and aim.pages(problem) and _is_small(problem):
        # A larger class, where all wait for transfers; what is found there takes no longer beside the ops.
        found = optimal(
            problem, budget_bytes, aim=replace(aim, overlap=False), start=start, time_limit_s=part_s(PART_ALONE),
            gap=gap,
        )  # fmt: skip
        start = _better(_Search(problem, budget_bytes, aim, 1), start, found.order)
    if aim.recompute and aim.pages(problem):
        # Joint is never worse than either alone.
        for part in (replace(aim, recompute=False), replace(aim, page=False)):
            found = optimal(problem, budget_bytes, aim=part, start=start, time_limit_s=part_s(PART_ALONE), gap=gap)
            start = found.order or start
        if start is not None:
            search = _Search(problem, budget_bytes, aim, DEPTH)
            if search.keeps(start):
                start = page_instead(
                    problem, start, budget_bytes, search.worth, until=time.monotonic() + part_s(PART_ALONE),
                    overlap=aim.overlap,
                )  # fmt: skip
    depth = DEPTH if aim.wide(problem) else _depth(problem)
    while True:
        found = _at_depth(problem, budget_bytes, aim, start, end, gap, depth)
        deepest = aim.wide(problem) or depth >= min(DEEPEST, len(problem.order))
        if not found.infeasible or deepest or time.monotonic() > end:
            return found
        depth *= 2


def _better(search: _Search, *orders: Sequence[Item] | None) -> Sequence[Item] | None:
    """Of those that keep every limit."""
    kept = [order for order in orders if order is not None and search.keeps(order)]
    return min(kept, key=lambda order: search.worth(search.timing(order)), default=None)


def _within_limits(
    problem: Problem, budget: int, aim: Aim, start: Sequence[Item] | None, time_limit_s: float, gap: float
) -> Sequence[Item] | None:
    """A schedule that keeps the limits, if seeking the least of what is limited finds one."""
    for what in aim.most:
        free = replace(aim, objective=what, most={})
        found = optimal(problem, budget, aim=free, start=start, time_limit_s=time_limit_s / len(aim.most), gap=gap)
        if found.order is not None and _Search(problem, budget, aim, 1).keeps(found.order):
            return found.order
    return None


def _depth(problem: Problem) -> int:
    """Longer chains for smaller problems: the class is larger, and with more points its relaxation is tighter."""
    depth = DEPTH
    while depth < 2 * DEPTH and Formulation(problem, depth=depth + 2).count <= MOST_VARIABLES:
        depth += 2
    return depth


def _at_depth(
    problem: Problem, budget: int, aim: Aim, start: Sequence[Item] | None, end: float, gap: float, depth: int
) -> Found:
    search = _Search(problem, budget, aim, depth)
    if start is not None and search.keeps(start):
        search.take(tuple(start))
    infeasible = search.solve(end - LAST_PART * (end - time.monotonic()), gap)
    if not infeasible and search.extra - search.bound > gap * (search.whole + search.bound):
        _improve(search, end)
    # A start from outside the class may be better than all of it.
    bound = min(search.bound, search.extra)
    return Found(search.best, search.extra, bound, aim.schedules(depth, wide=search.form.wide), infeasible)


def _improve(search: _Search, end: float) -> None:
    """Windows of the best order, in a program whose chains are as long as those of the order."""
    for depth in range(search.form.depth, 2 * DEPTH + 1, 2):
        if depth > search.form.depth and end - time.monotonic() < TIMES_TO_BUILD * search.build_s:
            return
        same = depth == search.form.depth
        deeper = search if same else _Search(search.problem, search.budget, search.aim, depth)
        if search.best is not None and deeper.form.values(search.best) is not None:
            deeper.take(search.best)
            deeper.improve(end)
            search.take(deeper.best or search.best)
            return
        if search.form.wide:
            return  # it is no larger for longer chains


class _Search:
    """best: the order of least extra time, or energy, so far. bound: no order of the class takes less."""

    def __init__(self, problem: Problem, budget: int, aim: Aim, depth: int) -> None:
        self.problem, self.budget, self.aim = problem, budget, aim
        self.form = aim.formulation(problem, depth=depth)
        self.keep_all = self.timing(problem.order)
        self.whole = self._value(self.keep_all)
        self.best: tuple[Item, ...] | None = None
        self.extra, self.bound = math.inf, 0.0
        self.build_s = 0.0
        self.tightened = False
        self._room_taken: dict[Objective, float] = {}  # by how much limits were tightened

    @cached_property
    def solver(self) -> _Solver:
        begin = time.monotonic()
        most = {what: limit - self._value(self.keep_all, what) for what, limit in self.aim.most.items()}
        found = _Solver(self.form, self.budget, self.aim.objective, most)
        self.build_s = time.monotonic() - begin
        return found

    def timing(self, order: Sequence[Item]) -> Timing:
        return self.problem.timing(order, overlap=self.aim.overlap)

    def _value(self, timing: Timing, what: Objective | None = None) -> float:
        if (what or self.aim.objective) == "time":
            return timing.time_s
        if timing.energy_j is None:
            raise InternalError("a plan is sought by energy, and its costs know none")
        return timing.energy_j

    def worth(self, timing: Timing) -> float:
        """What is to be least; without end where a limit is not kept."""
        within = all(self._value(timing, what) <= most for what, most in self.aim.most.items())
        return self._value(timing) if within else math.inf

    def keeps(self, order: Sequence[Item]) -> bool:
        """Whether an order keeps every limit."""
        return math.isfinite(self.worth(self.timing(order))) and self.problem.peak_bytes(order) <= self.budget

    def take(self, order: tuple[Item, ...]) -> bool:
        """Whether the order, which keeps the budget, is the best so far."""
        extra = self._value(self.timing(order)) - self.whole
        better = extra < self.extra
        if better:
            self.best, self.extra = order, extra
        return better

    def solve(self, end: float, gap: float) -> bool:
        """The whole program, until the bound is near or the time is up. True: the class holds nothing."""
        while time.monotonic() < end:
            first = None if self.best is None else self.form.values(self.best)
            if first is not None:
                self.solver.start_from(first)
            self.solver.run(end - time.monotonic(), 0.0, gap * (self.whole + self.bound))
            if self.solver.infeasible:
                return not self.tightened
            if math.isfinite(self.solver.bound) and not self.tightened:
                self.bound = max(self.bound, self.solver.bound)
            if not self._cut_off():
                break
        return False

    def improve(self, end: float) -> None:
        """Solve a few stages again at a time, round after round, for as long as that helps."""
        stages, form = self.form.stages, self.form
        begins = range(0, max(len(stages) - WINDOW // 2, 1), WINDOW // 2)
        windows = [form.between(stages[n], stages[min(n + WINDOW, len(stages)) - 1]) for n in begins] if stages else []
        cost = form.extra(self.aim.objective)
        better = True
        while better and self.best is not None and (values := form.values(self.best)) is not None:
            spent = {v: a * values[v] for v, a in cost.items()}
            windows.sort(key=lambda free: -sum(spent.get(v, 0.0) for v in free))
            better = sum(self._window(free, end) for free in windows) > 0
        self.solver.release()

    def _window(self, free: list[int], end: float) -> bool:
        values = None if self.best is None else self.form.values(self.best)
        if values is None:
            return False
        before = self.extra
        self.solver.hold(values, free)
        end = min(end, time.monotonic() + WINDOW_TIME_S)
        while time.monotonic() < end:
            self.solver.start_from(values)
            self.solver.run(end - time.monotonic(), 0.0, 1e-4 * self.whole)
            if not self._cut_off():
                break
        return self.extra < before

    def _cut_off(self) -> bool:
        """Take the solution if it keeps the budget. True: it does not, and rows were added that forbid it."""
        values = self.solver.values
        if values is None:
            return False
        order = self.form.order(values)
        over = places_over(self.problem, order, self.budget)
        if not over:
            return self._too_long(order)
        cuts = [self.form.cut(values, place) for place in over if place.again]
        if not any(cut.breaks(values, self.budget) for cut in cuts):
            return False
        self.solver.forbid(cuts)
        return True

    def _too_long(self, order: tuple[Item, ...]) -> bool:
        """Take the order if it keeps the limits of time and energy too. True: it waits longer than the program knew,
        and the limit is tighter by as much from now on."""
        timing = self.timing(order)
        over = {what: self._value(timing, what) - most for what, most in self.aim.most.items()}
        if all(excess <= 1e-9 for excess in over.values()):
            self.take(order)
            return False
        for what, excess in over.items():
            if excess > 0:
                room = self.aim.most[what] - self._value(self.keep_all, what)
                self.solver.limit(what, room - self._room_taken.get(what, 0.0) - excess)
                self._room_taken[what] = self._room_taken.get(what, 0.0) + excess
        self.tightened = True
        return True


def smallest(
    problem: Problem, *, aim: Aim | None = None, time_limit_s: float = 10.0, depth: int = 2 * DEPTH
) -> tuple[Item, ...]:
    """An order of the class whose peak is as small as was found in the time."""
    end = time.monotonic() + time_limit_s
    form = (aim or Aim()).formulation(problem, depth=depth, reach=REACH)
    solver = _Solver(form, None)
    best: tuple[Item, ...] = problem.order
    while time.monotonic() < end:
        solver.run(end - time.monotonic(), 0.002, 0.0)
        values = solver.values
        if values is None:
            break
        order = form.order(values)
        if problem.peak_bytes(order) < problem.peak_bytes(best):
            best = order
        target = solver.bound * 1.002
        over = places_over(problem, order, target)
        if not over:
            break
        cuts = [form.cut(values, place) for place in over if place.again]
        if not any(cut.breaks(values, target) for cut in cuts):
            break
        solver.forbid(cuts)
    return tuple(best)
