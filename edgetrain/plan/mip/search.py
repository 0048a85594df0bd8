"""The search behind `optimal`: mixed-integer programming over storages.

In:  a problem, a budget in bytes, an order to start from.
Out: the order of least extra time that was found within the budget, and a proven bound on the best of its class.

The program and its class of schedules are those of `program.py`. It is solved by HiGHS:

1. the whole program, from the order to start from. What a solution holds is played through; where that is too much,
   a row is added that says so, and it is solved again;
2. where that did not come near the bound: windows. All stays as it is but for a few stages, which are solved again,
   those first where most is recomputed.

Tight budgets need longer chains: where none of the class fits, `depth` is doubled. Graphs of up to `SMALL` ops have the
whole class of POET's program instead (`wide`); where transfers run beside the ops, the search begins from its best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from edgetrain.errors import InternalError
from edgetrain.plan.budget import Objective
from edgetrain.plan.mip.page_instead import page_instead
from edgetrain.plan.mip.paging import PagingFormulation
from edgetrain.plan.mip.places import places_over
from edgetrain.plan.mip.program import Formulation
from edgetrain.plan.mip.solver import Solver
from edgetrain.plan.plan import Item
from edgetrain.plan.planner import Aim
from edgetrain.plan.problem import Problem
from edgetrain.plan.timing import Timing

DEPTH = 6
REACH = 4  # where the chains are longer than a few ops, and the smallest peak alone is sought
DEEPEST = 48
MAX_VARIABLES = 4000  # for chains of more than DEPTH ops
WINDOW = 20  # stages that are solved again together
WINDOW_TIME_S = 2.0  # the most for one of them
LAST_PART = 0.05  # of the time, for windows at the end; the bound needs the rest
PART_ALONE = 0.25  # of the time, for paging alone and as much for recomputing alone, before both together
TIMES_TO_BUILD = 4  # a larger program for them is built if so often its time is left
SMALL = 40  # ops, for which all schedules are searched that POET's program knows
WIDE_CLASS = "recompute of forward ops before any op, each at most once there, in the order of the step"
CLASS = "recompute of forward ops before ops of the backward pass that read activations, in chains of at most {} ops"


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


def is_wide(aim: Aim, problem: Problem) -> bool:
    """Whether any op may be run again before any other, and anything paged at any time."""
    return _is_small(problem) and not (aim.overlap and aim.pages(problem))


def _is_small(problem: Problem) -> bool:
    return sum(not view for view in problem.is_view) <= SMALL


def _formulation(aim: Aim, problem: Problem, *, depth: int, reach: int | None = None) -> Formulation:
    wide = is_wide(aim, problem)
    if aim.pages(problem):
        return PagingFormulation(
            problem, depth=depth, reach=reach, recompute=aim.recompute, overlap=aim.overlap, wide=wide
        )
    return Formulation(problem, depth=depth, reach=reach, recompute=aim.recompute, wide=wide)


def _class_of(aim: Aim, depth: int, *, wide: bool) -> str:
    """The class of schedules, in words."""
    paging = "paging to the store" if aim.page else ""
    recompute = (WIDE_CLASS if wide else CLASS.format(depth)) if aim.recompute else ""
    return " and ".join(part for part in (recompute, paging) if part)


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

    if aim.limits and (start is None or not _Search(problem, budget_bytes, aim, 1).keeps(start)):
        start = _within_limits(problem, budget_bytes, aim, start, part_s(2 * PART_ALONE), gap)
    if aim.overlap and aim.pages(problem) and _is_small(problem):
        # A larger class, where all wait for transfers; what is found there takes no longer beside the ops.
        result = optimal(
            problem, budget_bytes, aim=replace(aim, overlap=False), start=start, time_limit_s=part_s(PART_ALONE),
            gap=gap,
        )  # fmt: skip
        start = _better(_Search(problem, budget_bytes, aim, 1), start, result.order)
    if aim.recompute and aim.pages(problem):
        # Joint is never worse than either alone.
        for part in (replace(aim, recompute=False), replace(aim, page=False)):
            result = optimal(problem, budget_bytes, aim=part, start=start, time_limit_s=part_s(PART_ALONE), gap=gap)
            start = result.order or start
        if start is not None:
            search = _Search(problem, budget_bytes, aim, DEPTH)
            if search.keeps(start):
                start = page_instead(
                    problem, start, budget_bytes, search.worth, until=time.monotonic() + part_s(PART_ALONE),
                    overlap=aim.overlap,
                )  # fmt: skip
    depth = DEPTH if is_wide(aim, problem) else _depth(problem)
    while True:
        result = _at_depth(problem, budget_bytes, aim, start, end, gap, depth)
        deepest = is_wide(aim, problem) or depth >= min(DEEPEST, len(problem.order))
        if not result.infeasible or deepest or time.monotonic() > end:
            return result
        depth *= 2


def _better(search: _Search, *orders: Sequence[Item] | None) -> Sequence[Item] | None:
    """Of those that keep every limit."""
    kept = [order for order in orders if order is not None and search.keeps(order)]
    return min(kept, key=lambda order: search.worth(search.timing(order)), default=None)


def _within_limits(
    problem: Problem, budget: int, aim: Aim, start: Sequence[Item] | None, time_limit_s: float, gap: float
) -> Sequence[Item] | None:
    """A schedule that keeps the limits, if seeking the least of what is limited finds one."""
    for what in aim.limits:
        free = replace(aim, objective=what, limits={})
        result = optimal(problem, budget, aim=free, start=start, time_limit_s=time_limit_s / len(aim.limits), gap=gap)
        if result.order is not None and _Search(problem, budget, aim, 1).keeps(result.order):
            return result.order
    return None


def _depth(problem: Problem) -> int:
    """Longer chains for smaller problems: the class is larger, and with more points its relaxation is tighter."""
    depth = DEPTH
    while depth < 2 * DEPTH and Formulation(problem, depth=depth + 2).count <= MAX_VARIABLES:
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
    return Found(search.best, search.extra, bound, _class_of(aim, depth, wide=search.form.wide), infeasible)


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
        self.form = _formulation(aim, problem, depth=depth)
        self.keep_all = self.timing(problem.order)
        self.whole = self._value(self.keep_all)
        self.best: tuple[Item, ...] | None = None
        self.extra, self.bound = math.inf, 0.0
        self.build_s = 0.0
        self.tightened = False
        self._room_taken: dict[Objective, float] = {}  # by how much limits were tightened

    @cached_property
    def solver(self) -> Solver:
        begin = time.monotonic()
        limits = {what: limit - self._value(self.keep_all, what) for what, limit in self.aim.limits.items()}
        solver = Solver(self.form, self.budget, self.aim.objective, limits)
        self.build_s = time.monotonic() - begin
        return solver

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
        within = all(self._value(timing, what) <= limit for what, limit in self.aim.limits.items())
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
        over = {what: self._value(timing, what) - limit for what, limit in self.aim.limits.items()}
        if all(excess <= 1e-9 for excess in over.values()):
            self.take(order)
            return False
        for what, excess in over.items():
            if excess > 0:
                room = self.aim.limits[what] - self._value(self.keep_all, what)
                self.solver.limit(what, room - self._room_taken.get(what, 0.0) - excess)
                self._room_taken[what] = self._room_taken.get(what, 0.0) + excess
        self.tightened = True
        return True


def smallest(
    problem: Problem, *, aim: Aim | None = None, time_limit_s: float = 10.0, depth: int = 2 * DEPTH
) -> tuple[Item, ...]:
    """An order of the class whose peak is as small as was found in the time."""
    end = time.monotonic() + time_limit_s
    form = _formulation(aim or Aim(), problem, depth=depth, reach=REACH)
    solver = Solver(form, None)
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
