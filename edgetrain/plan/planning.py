"""From a graph, its costs and a budget to a plan: `et.plan`.

In:  a graph, what its ops cost here, a budget in bytes, the name of a planner.
Out: a plan that keeps the budget and has passed the validator; or `Infeasible`, with a budget that works, a proven
     bound below which none can, what lasts, and what is alive where it is tightest (`refusal.py`).

    time   ├─ bound ─┬─ greedy start ─┬──── search ────┬─ smallest budget ─┤ limit
                     └▶ impossible    └▶ a plan        └▶ a plan           └▶ none was found

What a bound proves to be impossible is not searched for: the budget that works is then a greedy planner's, or what is
found in half a second more.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgetrain import child, ranges
from edgetrain.arguments import checked
from edgetrain.closest import unknown
from edgetrain.costs.kernels import fastest
from edgetrain.costs.table import Costs
from edgetrain.errors import Infeasible, UserError
from edgetrain.graph.ir import Graph
from edgetrain.plan.budget import Budget, Objective, show_bytes
from edgetrain.plan.chen import chen
from edgetrain.plan.dtr import dtr
from edgetrain.plan.fast import fast, prepare, walks_until
from edgetrain.plan.keep_all import exactness, keep_all
from edgetrain.plan.known_plans import KnownPlans
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
from edgetrain.plan.refusal import SMALLEST_STEP as SMALLEST_STEP
from edgetrain.plan.refusal import Planner, infeasible
from edgetrain.plan.refusal import least_bytes as least_bytes
from edgetrain.plan.refusal import smallest_by as smallest_by
from edgetrain.plan.refusal import tightest as tightest
from edgetrain.plan.sage import sage
from edgetrain.plan.validate import validate

SIMPLE: dict[str, Planner] = {"fast": fast, "chen": chen, "dtr": dtr, "melon": melon, "sage": sage}
STARTS = 48  # greedy walks from which the best one is what "optimal" starts from: half a second
SMALLEST = "as small as can be"
WORKS = "known to work"
GREEDY_S = 1.0  # a greedy planner may take so long, however little time is left
AT_ONCE_S = 0.5  # for the smallest budget that works, where the one that is asked for is impossible
ENDING_S = 1.0  # a search that does not end by itself is ended so long after its time
KEPT_PART = 0.25  # of the time: a smallest budget that was sought for less is sought again
SEARCHING = ("optimal", "poet", "recompute-only", "page-only")
PLANNERS = ("auto", "keep-all", *SEARCHING, *SIMPLE)


@checked()
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
    left_s: float | None = None,
) -> Plan:
    """The plan of least time, or energy, that keeps the budget.

    planner: "auto" keeps all where that fits and is "optimal" otherwise, which starts from "fast". Where the costs know
    a store, "optimal" pages to it beside recomputing; "recompute-only" and "page-only" do one of the two. "poet" is
    "optimal" for the least energy.
    time_limit_s: for all that is searched, the smallest budget that works included; a search stops sooner when it has
    proven to be near the best. A budget that is proven to be impossible is refused at once.
    left_s: what other plans have left of this time.
    updates: where the updates stand (see `Plan`); by default early where nothing can fail after the first.
    solver_bytes: what the search may take above what this process holds; without more, "fast" serves.
    page: False leaves the store alone.

    A smaller budget never gives a larger peak than a larger one did: plans are known from one call to the next, and
    with the cache from one run to the next (`known_plans.py`).
    """
    begin = time.monotonic()
    check_planner(planner)
    ranges.number("time_limit_s", time_limit_s, ranges.SECONDS)
    aim = aim_of(costs, budget, planner, page=page)
    costs = fastest(graph, costs, exact)
    task = problem(graph, costs, updates or keep_all(graph).updates)
    memory_bytes, left = budget.memory_bytes, None
    if budget.process_memory_bytes is not None:
        left = left_for_tensors(graph, budget.process_memory_bytes)
        memory_bytes = left if memory_bytes is None else min(left, memory_bytes)
        solver_bytes = solver_bytes or left - task.keep_all.persistent_bytes
    until = begin + (time_limit_s if left_s is None else min(left_s, time_limit_s))
    try:
        made = _Planning(task, planner, aim, time_limit_s, until, use_cache, solver_bytes).within(memory_bytes)
    except Infeasible as answer:
        if left is None or budget.process_memory_bytes is None or left != memory_bytes:
            raise
        raise in_process(answer, left, budget.process_memory_bytes) from None
    full = _overflow(task, made)
    if full:
        if not aim.recompute:
            raise Infeasible(full, smallest_bytes=task.keep_all.peak_bytes, bound_bytes=least_bytes(task))
        without = plan(
            graph, costs, budget, planner=planner, updates=updates,
            time_limit_s=time_limit_s, exact=exact, use_cache=use_cache, solver_bytes=solver_bytes, page=False,
        )  # fmt: skip
        return replace(without, note=f"nothing is paged: {full}")
    made = replace(made, exact=exactness(graph, exact))
    validate(graph, made)
    return made


def _overflow(task: Problem, made: Plan) -> str:
    """What is paged and does not fit into the store, in words."""
    store, paged = task.costs.store, sum(task.size[s] for s in made.paged)
    if store is None or store.n_bytes is None or paged <= store.n_bytes:
        return ""
    return f"the plan pages {show_bytes(paged)}, and the store holds {show_bytes(store.n_bytes)}"


def aim_of(costs: Costs, budget: Budget, planner: str, *, page: bool) -> Aim:
    """What the planner seeks with these costs, or why it cannot."""
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
        raise UserError(f"the planner {planner} seeks the least time", next_step="use the planner optimal or poet")
    store = costs.store if page and planner != "recompute-only" else None
    if store is None and planner == "page-only":
        raise UserError("page-only needs a store", expected="costs with a store", next_step="give page_to, or a device")
    if store is not None and by_energy and store.power_w is None:
        raise UserError("a plan by energy needs the power of the store", next_step="plan without paging: page=False")
    limits: tuple[tuple[Objective, float | None], ...] = (("time", budget.time_s), ("energy", budget.energy_j))
    most = {what: limit for what, limit in limits if limit is not None}
    return Aim(objective, most, recompute=planner != "page-only", page=store is not None)


def check_planner(planner: str) -> None:
    if planner not in PLANNERS:
        raise unknown("planner", planner, PLANNERS)


def known_to_work(
    task: Problem, planner: str, *, until: float, use_cache: bool = True, recompute: bool = True
) -> tuple[tuple[Item, ...], int, str]:
    """An order that a greedy planner finds in as few bytes as it can, its peak, and the planner's name. What is found
    is known from now on, so that a plan is there when this budget is asked for."""
    way = planner if planner in SIMPLE else "fast"
    order, peak = task.order, task.keep_all.peak_bytes
    if planner == "keep-all" or not recompute:
        return order, peak, "keep-all"
    walks = functools.partial(fast, prepared=prepare(task)) if way == "fast" else SIMPLE[way]
    order, peak = smallest_by(task, walks, until=until)
    made = task.plan(order, planner=way)
    _works(task, planner, use_cache).keep(max(task.keep_all.peak_bytes, peak), made)
    return made.items, peak, way


def _works(task: Problem, planner: str, use_cache: bool) -> KnownPlans:
    way = planner if planner in SIMPLE else "fast"
    return KnownPlans(task, f"{WORKS}, {way}", use_cache=use_cache, any_costs=True)


@dataclass(frozen=True)
class _Planning:
    """until: the instant of `time.monotonic` at which the time is up."""

    task: Problem
    planner: str
    aim: Aim
    time_limit_s: float
    until: float
    use_cache: bool
    solver_bytes: int | None

    def within(self, budget: int | None) -> Plan:
        keep_all = self.task.keep_all
        fits = budget is None or keep_all.peak_bytes <= budget
        if fits and self.planner != "chen":
            return self._kept(keep_all)  # nothing takes less time or energy
        if budget is None:
            raise UserError(f"the planner {self.planner} needs a budget", next_step="give a budget: memory_bytes")
        if self.planner == "keep-all" or budget < least_bytes(self.task):
            raise self._refused(budget)
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

    @property
    def _greedy_until(self) -> float:
        return max(self.until, time.monotonic() + GREEDY_S)

    @property
    def _left_s(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def _refused(self, budget: int) -> Infeasible:
        """What is proven to be impossible: a budget that works is named at once, after a short search at most."""
        if self.planner in (*SIMPLE, "keep-all"):
            order, peak, way = known_to_work(
                self.task, self.planner, until=time.monotonic() + GREEDY_S, use_cache=self.use_cache
            )  # fmt: skip
            return infeasible(self.task, budget, order, peak, found_by=f"the {way} planner")
        return self._none_found(budget, min(self._left_s, AT_ONCE_S))

    @property
    def _smallest(self) -> KnownPlans:
        return self._known(SMALLEST if not self.aim.page else f"{SMALLEST}, {self.aim}")

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
        """A greedy planner may fail here and keep a smaller budget."""
        with walks_until(self._greedy_until):
            order: Sequence[Item] | None = SIMPLE[self.planner](self.task, budget)
        if order is None:
            order = self._worked(budget)
        if order is None:
            order, peak, way = known_to_work(
                self.task, self.planner, until=self._greedy_until, use_cache=self.use_cache
            )  # fmt: skip
            if peak > budget:
                raise infeasible(self.task, budget, order, peak, found_by=f"the {way} planner")
        return self._kept(self.task.plan(order, planner=self.planner))

    def _worked(self, budget: int) -> Sequence[Item] | None:
        """What was known to work before, where it keeps this budget with these costs."""
        made = _works(self.task, self.planner, self.use_cache).keeping(budget)
        return made.items if made is not None and self.task.peak_bytes(made.items) <= budget else None

    def _optimal(self, budget: int, below: Plan | None) -> Plan:
        """below: a plan for a smaller budget."""
        task = self.task
        name = "optimal" if self.planner == "auto" else self.planner
        start = self._start(budget, below)
        try:
            # Where nothing is known that keeps the budget, half of the time is for the smallest that can be kept.
            found = self._search(budget, self.aim, start, self._left_s / (1 if start is not None else 2))
        except child.Ended:
            if start is not None:
                return self._kept(replace(task.plan(start, planner="fast"), note=self._why_fast()))
            raise self._none_found(budget, self._left_s) from None
        order = found.order
        if order is None and self.aim.most:
            # What stands in the way: memory alone, or the limits as well?
            only = next(iter(self.aim.most))
            with contextlib.suppress(child.Ended):
                free = self._search(budget, replace(self.aim, most={}, objective=only), start, self._left_s)
                if free.order is not None:
                    self._kept(task.plan(free.order, planner=name))
                order = free.order
        if order is None:
            order, peak, found_by = self._least(self._left_s)
            if peak > budget:
                raise infeasible(task, budget, order, peak, found_by=found_by)
        whole, extra = task.timing(task.order), found.extra_bound
        bound = Bound(whole.time_s + extra, found.schedules)
        if self.aim.objective == "energy":
            assert whole.energy_j is not None
            bound = Bound(None, found.schedules, whole.energy_j + extra)
        made = task.plan(order, planner=name, bound=bound)
        return self._kept(replace(made, note=_why_not_paged(task, made) if self.aim.page else ""))

    def _why_fast(self) -> str:
        room = "" if self.solver_bytes is None else f" ({show_bytes(max(0, self.solver_bytes))} were left for it)"
        why = "time" if self._left_s <= 0 else f"memory{room}"
        return f"the search for a better plan ended for lack of {why}, so the fast planner served"

    def _start(self, budget: int, below: Plan | None) -> Sequence[Item] | None:
        """The best schedule within the budget that is known without a search."""
        if not self.aim.recompute:
            return None
        least = self._known(SMALLEST).keeping(budget)
        with walks_until(time.monotonic() + max(GREEDY_S, self._left_s / 2)):
            greedy = fast(self.task, budget, tries=STARTS)
        known = (plan.items for plan in (below, least, self._searched.keeping(budget)) if plan is not None)
        starts: list[Sequence[Item] | None] = [greedy, self._worked(budget), *known]
        found = [order for order in starts if order is not None]
        return min(found, key=lambda order: self.task.timing(order).time_s, default=None)

    def _search(self, budget: int, aim: Aim, start: Sequence[Item] | None, time_limit_s: float) -> Found:
        def work() -> Any:
            found = optimal(self.task, budget, aim=aim, start=start, time_limit_s=time_limit_s)
            return asdict(replace(found, order=None)) | {"items": found.order and items_to_json(found.order)}

        # In a process of its own: the solver's 50 MB and more go with it.
        answer = child.forked(work, most_bytes=self.solver_bytes, time_limit_s=time_limit_s + ENDING_S)
        items = answer.pop("items")
        return replace(Found(**answer), order=None if items is None else items_from_json(items))

    def _none_found(self, budget: int, search_s: float) -> Infeasible:
        order, peak, found_by = self._least(search_s)
        return infeasible(self.task, budget, order, peak, found_by=found_by)

    def _least(self, search_s: float) -> tuple[tuple[Item, ...], int, str]:
        """An order with a peak as small as was found, now or before, that peak, and what found it."""
        task, most = self.task, self.task.keep_all.peak_bytes
        earlier = self._smallest.keeping(most) or (self._searched.keeping(most) if search_s <= AT_ONCE_S else None)
        if earlier is not None:
            return earlier.items, earlier.peak_bytes, "a search"
        order, peak, way = known_to_work(
            task, self.planner, until=time.monotonic() + GREEDY_S, use_cache=self.use_cache,
            recompute=self.aim.recompute,
        )  # fmt: skip
        begin = time.monotonic()
        with contextlib.suppress(child.Ended):
            found = child.forked(
                lambda: items_to_json(smallest(task, aim=self.aim, time_limit_s=search_s)),
                most_bytes=self.solver_bytes, time_limit_s=search_s + min(search_s, ENDING_S),
            )  # fmt: skip
            least = task.plan(min((order, items_from_json(found)), key=task.peak_bytes), planner="optimal")
            to_the_end = time.monotonic() - begin < search_s
            whole = to_the_end or search_s >= KEPT_PART * self.time_limit_s
            (self._smallest if whole else self._searched).keep(most, least)
            if least.peak_bytes < peak:
                return least.items, least.peak_bytes, "a search"
        return order, peak, f"the {way} planner"

    @property
    def _searched(self) -> KnownPlans:
        """What a short search found."""
        return self._known(f"{SMALLEST}, in short, {self.aim}")


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
