"""From a graph, its costs and a budget to a plan: `et.plan`.

In:  a graph, what its ops cost here, a budget in bytes, the name of a planner.
Out: a plan that keeps the budget and has passed the validator; or `Infeasible`, with the smallest budget that works, a
     proven bound below which none can, and what is alive where it is tightest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgetrain import child
from edgetrain.costs.table import Costs
from edgetrain.errors import Infeasible, UserError
from edgetrain.graph.ir import Graph
from edgetrain.plan.budget import Budget, show_bytes
from edgetrain.plan.chen import chen
from edgetrain.plan.dtr import dtr
from edgetrain.plan.fast import fast
from edgetrain.plan.keep_all import exactness, keep_all
from edgetrain.plan.known_plans import KnownPlans
from edgetrain.plan.lifetimes import Moment, new_storages, overwrites
from edgetrain.plan.melon import melon
from edgetrain.plan.optimal import Found, optimal, smallest
from edgetrain.plan.plan import Bound, Compute, Exact, Free, Plan, Updates
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.process import in_process, left_for_tensors
from edgetrain.plan.validate import validate

Planner = Callable[[Problem, int], tuple[int, ...] | None]
SIMPLE: dict[str, Planner] = {"fast": fast, "chen": chen, "dtr": dtr, "melon": melon}
STARTS = 48  # greedy walks from which the best one is what "optimal" starts from: half a second
SMALLEST = "as small as can be"
SMALLEST_STEP = 0.005  # how finely a planner's smallest budget is sought
PLANNERS = ("auto", "keep-all", "optimal", *SIMPLE)


def plan(
    graph: Graph,
    costs: Costs,
    budget: Budget,
    *,
    planner: str = "auto",
    time_limit_s: float = 10.0,
    updates: Updates | None = None,
    exact: Exact = "bitwise",
    use_cache: bool = True,
    solver_bytes: int | None = None,
) -> Plan:
    """The plan of least time that keeps the budget.

    planner: "auto" keeps all where that fits and is "optimal" otherwise, which starts from "fast".
    time_limit_s: for the search of "optimal"; it stops sooner when it has proven to be near the best.
    updates: where the updates stand (see `Plan`); by default early where nothing can fail after the first.
    solver_bytes: what the search may take above what this process holds; without more, "fast" serves.

    A smaller budget never gives a larger peak than a larger one did: plans are known from one call to the next, and
    with the cache from one run to the next (`known_plans.py`).
    """
    check_planner(planner)
    for name in ("time_s", "energy_j"):
        if getattr(budget, name) is not None:
            raise UserError(f"a budget of {name} is not kept yet", next_step="give memory_bytes alone")
    task = problem(graph, costs, updates or keep_all(graph).updates)
    memory_bytes, left = budget.memory_bytes, None
    if budget.process_memory_bytes is not None:
        left = left_for_tensors(graph, budget.process_memory_bytes)
        memory_bytes = left if memory_bytes is None else min(left, memory_bytes)
        solver_bytes = solver_bytes or left - task.keep_all.persistent_bytes
    try:
        made = _Planning(task, planner, time_limit_s, use_cache, solver_bytes).within(memory_bytes)
    except Infeasible as answer:
        if left is None or budget.process_memory_bytes is None or left != memory_bytes:
            raise
        raise in_process(answer, left, budget.process_memory_bytes) from None
    made = replace(made, exact=exactness(graph, exact))
    validate(graph, made)
    return made


def check_planner(planner: str) -> None:
    if planner not in PLANNERS:
        raise UserError(f"there is no planner {planner!r}", expected=", ".join(PLANNERS))


@dataclass(frozen=True)
class _Planning:
    task: Problem
    planner: str
    time_limit_s: float
    use_cache: bool
    solver_bytes: int | None

    def within(self, budget: int | None) -> Plan:
        keep_all = self.task.keep_all
        fits = budget is None or keep_all.peak_bytes <= budget
        if self.planner == "keep-all" or (self.planner != "chen" and fits):
            if not fits:
                assert budget is not None
                raise _infeasible(self.task, budget, self.task.order, keep_all.peak_bytes)
            return keep_all
        if budget is None:
            raise UserError(f"the planner {self.planner} needs a budget", next_step="give memory_bytes")
        known = self._known(self.planner if self.planner in SIMPLE else f"optimal, {self.time_limit_s} s")
        made = known.keeping(budget)
        if made is None:
            below = known.below(budget)
            made = self._simple(budget) if self.planner in SIMPLE else self._optimal(budget, below)
            more = known.holding_more(budget, made.peak_bytes)
            if more is not None:
                made = replace(more, bound=made.bound)
            if self.planner in SIMPLE or made.planner != "fast":  # not what served because the search was cut off
                known.keep(budget, made)
        return made

    def _known(self, way: str) -> KnownPlans:
        return KnownPlans(self.task, way, use_cache=self.use_cache)

    def _simple(self, budget: int) -> Plan:
        planner = SIMPLE[self.planner]
        order = planner(self.task, budget)
        if order is None:
            order, smallest_bytes = _smallest_by(self.task, planner)
            if smallest_bytes > budget:  # a greedy planner may fail here and keep a smaller budget
                raise _infeasible(self.task, budget, order, smallest_bytes)
        return self.task.plan(order, planner=self.planner)

    def _optimal(self, budget: int, below: Plan | None) -> Plan:
        """below: a plan for a smaller budget."""
        task = self.task
        least = self._known(SMALLEST).keeping(budget)
        starts = [fast(task, budget, tries=STARTS), *(plan.order for plan in (below, least) if plan is not None)]
        start = min((order for order in starts if order is not None), key=task.costs.time_s, default=None)
        try:
            # In a process of its own: the solver's 50 MB and more go with it.
            found = Found(
                **self._apart(lambda: asdict(optimal(task, budget, start=start, time_limit_s=self.time_limit_s)))
            )
        except child.Ended:
            if start is not None:
                return task.plan(start, planner="fast")
            raise _infeasible(task, budget, *self._least()) from None
        order = None if found.order is None else tuple(found.order)
        if order is None:
            order, peak = self._least()
            if peak > budget:
                raise _infeasible(task, budget, order, peak)
        bound = Bound(task.keep_all_time_s + found.extra_bound_s, found.schedules)
        return task.plan(order, planner="optimal", bound=bound)

    def _apart(self, work: Callable[[], Any]) -> Any:
        return child.forked(work, most_bytes=self.solver_bytes)

    def _least(self) -> tuple[tuple[int, ...], int]:
        """An order with a peak as small as was found, now or before, and that peak."""
        task, known = self.task, self._known(SMALLEST)
        least = known.keeping(task.keep_all.peak_bytes)
        if least is None:
            greedy, _ = _smallest_by(task, fast)
            try:
                searched = tuple(self._apart(lambda: smallest(task, time_limit_s=self.time_limit_s)))
            except child.Ended:
                searched = greedy
            least = task.plan(min(greedy, searched, key=task.peak_bytes), planner="optimal")
            known.keep(task.keep_all.peak_bytes, least)
        return least.order, least.peak_bytes


def _smallest_by(task: Problem, planner: Planner) -> tuple[tuple[int, ...], int]:
    """The smallest budget that a planner was found to keep, by bisection, and its order there."""
    best, high, low = task.order, task.peak_bytes(task.order), least_bytes(task)
    while high - low > SMALLEST_STEP * high:
        middle = (low + high) // 2
        order = planner(task, middle)
        if order is None:
            low = middle
        else:
            best, high = order, middle
    return best, high


def least_bytes(task: Problem) -> int:
    """No schedule at all takes less: the lasting tensors, and what the hungriest op reads and makes."""
    most = 0
    ways = task.costs.workspace_bytes
    for number, op in enumerate(task.graph.ops):
        if op.view:
            continue
        own = sum(task.size[s] for s in {*task.reads[number], *task.makes[number]})
        fresh = own + ways["first"].get(number, 0)
        if overwrites(task.graph, number):
            fresh = min(fresh, own - task.size[task.makes[number][0]] + ways["over"].get(number, 0))
        most = max(most, fresh)
    return sum(n for n, lasting in zip(task.size, task.lasting, strict=True) if lasting) + most


def _infeasible(task: Problem, budget: int, order: Sequence[int], smallest_bytes: int) -> Infeasible:
    moment, alive = tightest(task, order)
    op = task.graph.ops[moment.op]
    bound = least_bytes(task)
    names = [f"{name} ({show_bytes(n_bytes)})" for name, n_bytes in alive]
    lasting = sum(n for n, lasts in zip(task.size, task.lasting, strict=True) if lasts)
    where = f" of {op.module}" if op.module else ""
    return Infeasible(
        f"no plan was found that keeps {show_bytes(budget)}: the smallest that is known to work is "
        f"{show_bytes(smallest_bytes)} ({smallest_bytes} bytes), and none below {show_bytes(bound)} can\n"
        f"  tightest at: {op.name}{where}\n"
        f"  alive there: {show_bytes(lasting)} of parameters, state, buffers and inputs; {', '.join(names[:4])}"
        f"{f' and {len(names) - 4} more' if len(names) > 4 else ''}\n"
        f"  next step: ask for {smallest_bytes} bytes or more, or take a smaller batch",
        smallest_bytes=smallest_bytes, bound_bytes=bound, op=op.name, alive=[name for name, _ in alive],
    )  # fmt: skip


def tightest(task: Problem, order: Sequence[int]) -> tuple[Moment, list[tuple[str, int]]]:
    """Where the schedule holds most, and what is alive there that does not last, largest first."""
    moments = task.moments(order)
    at = max(range(len(moments)), key=lambda n: moments[n].during_bytes)
    alive: set[int] = set()
    computed = -1
    for action in task.actions(order):
        if isinstance(action, Free):
            alive.discard(action.storage)
            continue
        assert isinstance(action, Compute)
        computed += 1
        alive |= set(new_storages(task.graph, action.op))
        if action.into is not None:
            alive.discard(action.into)
        if computed == at:
            break
    names = {tensor.storage: tensor.name for tensor in reversed(task.graph.tensors)}
    found = sorted(((names[s], task.size[s]) for s in alive), key=lambda pair: -pair[1])
    return moments[at], found
