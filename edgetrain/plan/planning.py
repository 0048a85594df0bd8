"""From a graph, its costs and a budget to a plan: `et.plan`.

In:  a graph, what its ops cost here, a budget in bytes, the name of a planner.
Out: a plan that keeps the budget and has passed the validator; or `Infeasible`, with the smallest budget that works, a
     proven bound below which none can, and what is alive where it is tightest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from edgetrain import child
from edgetrain.costs.table import Costs
from edgetrain.errors import Infeasible, UserError
from edgetrain.graph.ir import Graph
from edgetrain.plan.budget import Budget, Objective, show_bytes
from edgetrain.plan.chen import chen
from edgetrain.plan.dtr import dtr
from edgetrain.plan.fast import fast
from edgetrain.plan.keep_all import exactness, keep_all
from edgetrain.plan.known_plans import KnownPlans
from edgetrain.plan.lifetimes import Moment, alive_during, overwrites
from edgetrain.plan.melon import melon
from edgetrain.plan.optimal import Aim, Found, optimal, smallest
from edgetrain.plan.plan import (
    Bound,
    Exact,
    Item,
    Plan,
    Updates,
    items_from_json,
    items_to_json,
)
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.process import in_process, left_for_tensors
from edgetrain.plan.sage import sage
from edgetrain.plan.validate import validate

Planner = Callable[[Problem, int], tuple[int, ...] | None]
SIMPLE: dict[str, Planner] = {"fast": fast, "chen": chen, "dtr": dtr, "melon": melon, "sage": sage}
STARTS = 48  # greedy walks from which the best one is what "optimal" starts from: half a second
SMALLEST = "as small as can be"
SMALLEST_STEP = 0.005  # how finely a planner's smallest budget is sought
SEARCHING = ("optimal", "poet", "recompute-only", "page-only")
PLANNERS = ("auto", "keep-all", *SEARCHING, *SIMPLE)


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
    page: bool = True,
) -> Plan:
    """The plan of least time, or energy, that keeps the budget.

    planner: "auto" keeps all where that fits and is "optimal" otherwise, which starts from "fast". Where the costs know
    a store, "optimal" pages to it beside recomputing; "recompute-only" and "page-only" do one of the two. "poet" is
    "optimal" for the least energy.
    time_limit_s: for the search of "optimal"; it stops sooner when it has proven to be near the best.
    updates: where the updates stand (see `Plan`); by default early where nothing can fail after the first.
    solver_bytes: what the search may take above what this process holds; without more, "fast" serves.
    page: False leaves the store alone.

    A smaller budget never gives a larger peak than a larger one did: plans are known from one call to the next, and
    with the cache from one run to the next (`known_plans.py`).
    """
    check_planner(planner)
    aim = _aim(costs, budget, planner, page=page)
    task = problem(graph, costs, updates or keep_all(graph).updates)
    memory_bytes, left = budget.memory_bytes, None
    if budget.process_memory_bytes is not None:
        left = left_for_tensors(graph, budget.process_memory_bytes)
        memory_bytes = left if memory_bytes is None else min(left, memory_bytes)
        solver_bytes = solver_bytes or left - task.keep_all.persistent_bytes
    try:
        made = _Planning(task, planner, aim, time_limit_s, use_cache, solver_bytes).within(memory_bytes)
    except Infeasible as answer:
        if left is None or budget.process_memory_bytes is None or left != memory_bytes:
            raise
        raise in_process(answer, left, budget.process_memory_bytes) from None
    made = replace(made, exact=exactness(graph, exact))
    validate(graph, made)
    return made


def _aim(costs: Costs, budget: Budget, planner: str, *, page: bool) -> Aim:
    objective: Objective = "energy" if planner == "poet" else budget.objective
    by_energy = objective == "energy" or budget.energy_j is not None
    if by_energy and (
        costs.idle_w is None or any(run.energy_j is None for op in costs.ops for run in op.ways.values())
    ):
        raise UserError(
            "a plan by energy needs costs that know joules",
            received=f"{costs.origin} costs, which do not", next_step='et.model_costs(graph, device="…")',
        )  # fmt: skip
    if objective == "energy" and planner in SIMPLE:
        raise UserError(f"the planner {planner} seeks the least time", next_step='planner="optimal" or "poet"')
    store = costs.store if page and planner != "recompute-only" else None
    if store is None and planner == "page-only":
        raise UserError("page-only needs a store", expected="costs with a store", next_step="give page_to, or a device")
    if store is not None and by_energy and store.power_w is None:
        raise UserError("a plan by energy needs the power of the store", next_step="page=False")
    limits: tuple[tuple[Objective, float | None], ...] = (("time", budget.time_s), ("energy", budget.energy_j))
    most = {what: limit for what, limit in limits if limit is not None}
    return Aim(objective, most, recompute=planner != "page-only", page=store is not None)


def check_planner(planner: str) -> None:
    if planner not in PLANNERS:
        raise UserError(f"there is no planner {planner!r}", expected=", ".join(PLANNERS))


@dataclass(frozen=True)
class _Planning:
    task: Problem
    planner: str
    aim: Aim
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
            return self._kept(keep_all)  # nothing takes less time or energy
        if budget is None:
            raise UserError(f"the planner {self.planner} needs a budget", next_step="give memory_bytes")
        known = self._known(self.planner if self.planner in SIMPLE else f"optimal, {self.time_limit_s} s, {self.aim}")
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

    def _kept(self, made: Plan) -> Plan:
        """The plan, if it keeps the limits of time and energy."""
        taken: dict[Objective, tuple[float | None, str]] = {"time": (made.time_s, "s"), "energy": (made.energy_j, "J")}
        for what, most in self.aim.most.items():
            found, unit = taken[what]
            if found is not None and found > most * (1 + 1e-9):
                raise Infeasible(
                    f"no plan was found that takes at most {most:.4g} {unit} within {show_bytes(made.peak_bytes)}: the "
                    f"least {what} that was found there is {found:.4g} {unit}\n"
                    f"  next step: allow {found:.4g} {unit}, or more memory",
                    smallest_bytes=made.peak_bytes, bound_bytes=least_bytes(self.task),
                    least_time_s=made.time_s, least_energy_j=made.energy_j,
                )  # fmt: skip
        return made

    def _simple(self, budget: int) -> Plan:
        planner = SIMPLE[self.planner]
        order = planner(self.task, budget)
        if order is None:
            order, smallest_bytes = smallest_by(self.task, planner)
            if smallest_bytes > budget:  # a greedy planner may fail here and keep a smaller budget
                raise _infeasible(self.task, budget, order, smallest_bytes)
        return self._kept(self.task.plan(order, planner=self.planner))

    def _optimal(self, budget: int, below: Plan | None) -> Plan:
        """below: a plan for a smaller budget."""
        task = self.task
        name = "optimal" if self.planner == "auto" else self.planner
        start = self._start(budget, below)
        try:
            found = self._search(budget, self.aim, start)
        except child.Ended:
            if start is not None:
                return self._kept(task.plan(start, planner="fast"))
            raise _infeasible(task, budget, *self._least()) from None
        order = found.order
        if order is None and self.aim.most:
            # What stands in the way: memory alone, or the limits as well?
            only = next(iter(self.aim.most))
            free = self._search(budget, replace(self.aim, most={}, objective=only), start)
            if free.order is not None:
                self._kept(task.plan(free.order, planner=name))
            order = free.order
        if order is None:
            order, peak = self._least()
            if peak > budget:
                raise _infeasible(task, budget, order, peak)
        whole, extra = task.timing(task.order), found.extra_bound
        bound = Bound(whole.time_s + extra, found.schedules)
        if self.aim.objective == "energy":
            assert whole.energy_j is not None
            bound = Bound(None, found.schedules, whole.energy_j + extra)
        made = task.plan(order, planner=name, bound=bound)
        return self._kept(replace(made, note=_why_not_paged(task, made) if self.aim.page else ""))

    def _start(self, budget: int, below: Plan | None) -> Sequence[Item] | None:
        """The best schedule within the budget that is known without a search."""
        if not self.aim.recompute:
            return None
        least = self._known(SMALLEST).keeping(budget)
        starts = [fast(self.task, budget, tries=STARTS), *(plan.items for plan in (below, least) if plan is not None)]
        found = [order for order in starts if order is not None]
        return min(found, key=lambda order: self.task.timing(order).time_s, default=None)

    def _search(self, budget: int, aim: Aim, start: Sequence[Item] | None) -> Found:
        def work() -> Any:
            found = optimal(self.task, budget, aim=aim, start=start, time_limit_s=self.time_limit_s)
            return asdict(replace(found, order=None)) | {"items": found.order and items_to_json(found.order)}

        # In a process of its own: the solver's 50 MB and more go with it.
        answer = child.forked(work, most_bytes=self.solver_bytes)
        items = answer.pop("items")
        return replace(Found(**answer), order=None if items is None else items_from_json(items))

    def _least(self) -> tuple[tuple[Item, ...], int]:
        """An order with a peak as small as was found, now or before, and that peak."""
        task, known = self.task, self._known(SMALLEST if not self.aim.page else f"{SMALLEST}, {self.aim}")
        least = known.keeping(task.keep_all.peak_bytes)
        if least is None:
            greedy, _ = smallest_by(task, fast)
            orders: list[Sequence[Item]] = [greedy] if self.aim.recompute else [task.order]
            with contextlib.suppress(child.Ended):
                found = child.forked(
                    lambda: items_to_json(smallest(task, aim=self.aim, time_limit_s=self.time_limit_s)),
                    most_bytes=self.solver_bytes,
                )
                orders.append(items_from_json(found))
            least = task.plan(min(orders, key=task.peak_bytes), planner="optimal")
            known.keep(task.keep_all.peak_bytes, least)
        return least.items, least.peak_bytes


def _why_not_paged(task: Problem, made: Plan) -> str:
    store = task.costs.store
    if made.paged or store is None:
        return ""
    again_s = made.time_s - task.keep_all_time_s if made.time_s else 0.0
    again = sum(task.size[s] for op in made.recomputed for s in task.makes[op])
    return (
        f"nothing is paged: the store moves {show_bytes(store.out_bytes_s)} out and {show_bytes(store.in_bytes_s)} in "
        f"a second, and {show_bytes(again)} are made again in {again_s:.3g} s"
    )


def smallest_by(task: Problem, planner: Planner) -> tuple[tuple[int, ...], int]:
    """The smallest budget that a planner was found to keep, by bisection, and its order there."""
    best, high, low = task.order, task.peak_bytes(task.order), least_bytes(task)
    while high - low > max(1, SMALLEST_STEP * high):  # in whole bytes
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


def _infeasible(task: Problem, budget: int, order: Sequence[Item], smallest_bytes: int) -> Infeasible:
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


def tightest(task: Problem, order: Sequence[Item]) -> tuple[Moment, list[tuple[str, int]]]:
    """Where the schedule holds most, and what is alive there that does not last, largest first."""
    moments = task.moments(order)
    at = max(range(len(moments)), key=lambda n: moments[n].during_bytes)
    _, alive = next(islice(alive_during(task.graph, task.actions(order)), at, None))
    names = {tensor.storage: tensor.name for tensor in reversed(task.graph.tensors)}
    found = sorted(((names[s], task.size[s]) for s in alive), key=lambda pair: -pair[1])
    return moments[at], found
