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

import time
from dataclasses import dataclass, replace
from functools import cached_property

from edgetrain import ranges
from edgetrain.arguments import checked
from edgetrain.costs.kernels import fastest
from edgetrain.costs.table import Costs
from edgetrain.errors import Infeasible, UserError
from edgetrain.graph.ir import Graph
from edgetrain.plan.budget import Budget, Objective, show_bytes
from edgetrain.plan.keep_all import exactness, keep_all
from edgetrain.plan.known_plans import KnownPlans
from edgetrain.plan.plan import Exact, Plan, Updates
from edgetrain.plan.planner import GREEDY_S, Aim, Order, Planner, Request
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.process import in_process, left_for_tensors
from edgetrain.plan.refusal import TooSmall, infeasible, lower_bound_bytes, smallest_by
from edgetrain.plan.registry import named, quick
from edgetrain.plan.time_left import TimeLeft
from edgetrain.plan.validate import validate

SMALLEST = "as small as can be"
WORKS = "known to work"
AT_ONCE_S = 0.5  # for the smallest budget that works, where the one that is asked for is impossible
KEPT_PART = 0.25  # of the time: a smallest budget that was sought for less is sought again


@dataclass(frozen=True)
class Effort:
    """How far planning may go: see `plan`."""

    time_limit_s: float = 10.0
    left_s: float | None = None
    use_cache: bool = True
    solver_bytes: int | None = None

    @property
    def until(self) -> float:
        """The instant of `time.monotonic` at which the time is up, if it begins now."""
        return time.monotonic() + (self.time_limit_s if self.left_s is None else min(self.left_s, self.time_limit_s))


@dataclass(frozen=True)
class Series:
    """The plans of one call, which share its time."""

    planner: Planner
    time_limit_s: float
    time_left: TimeLeft
    use_cache: bool = True

    def plan(
        self, task: Problem, budget: Budget, *, exact: Exact, at_once: bool = False, solver_bytes: int | None = None
    ) -> Plan:
        """at_once: a `TooSmall` where a bound rules the budget out."""
        if at_once and budget.memory_bytes is not None and (bound := lower_bound_bytes(task)) > budget.memory_bytes:
            raise TooSmall.by(bound)
        with self.time_left.planning() as left_s:
            effort = Effort(self.time_limit_s, left_s, self.use_cache, solver_bytes)
            return plan_problem(task, budget, self.planner, effort, exact=exact)


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

    planner: a name; `edgetrain plan --help` lists them, with a line of help for each.
    time_limit_s: for all that is searched, the smallest budget that works included; a search stops sooner when it has
    proven to be near the best. A budget that is proven to be impossible is refused at once.
    left_s: what other plans have left of this time.
    updates: where the updates stand (see `Plan`); by default early where nothing can fail after the first.
    solver_bytes: what the search may take above what this process holds; without more, "fast" serves.
    page: False leaves the store alone.

    A smaller budget never gives a larger peak than a larger one did: plans are known from one call to the next, and
    with the cache from one run to the next (`known_plans.py`).
    """
    chosen = named(planner)
    ranges.number("time_limit_s", time_limit_s, ranges.SECONDS)
    effort = Effort(time_limit_s, left_s, use_cache, solver_bytes)
    costs = fastest(graph, costs, exact)
    task = problem(graph, costs, updates or keep_all(graph).updates)
    return plan_problem(task, budget, chosen, effort, exact=exact, page=page)


def plan_problem(
    task: Problem, budget: Budget, planner: Planner, effort: Effort, *, exact: Exact = "bitwise", page: bool = True
) -> Plan:
    """As `plan`, for a problem."""
    until, exact = effort.until, exactness(task.graph, exact)
    aim = aim_of(task.costs, budget, planner, page=page)
    memory_bytes, left = budget.memory_bytes, None
    if budget.process_memory_bytes is not None:
        left = left_for_tensors(task.graph, budget.process_memory_bytes)
        memory_bytes = left if memory_bytes is None else min(left, memory_bytes)
        if not effort.solver_bytes:
            effort = replace(effort, solver_bytes=left - task.keep_all.persistent_bytes)
    try:
        selected = _Planning(task, planner, aim, effort, until, exact).within(memory_bytes)
    except Infeasible as answer:
        if left is None or budget.process_memory_bytes is None or left != memory_bytes:
            raise
        raise in_process(answer, left, budget.process_memory_bytes) from None
    full = _overflow(task, selected)
    if full and not aim.recompute:
        raise Infeasible(full, smallest_bytes=task.keep_all.peak_bytes, bound_bytes=lower_bound_bytes(task))
    if full:
        selected = plan_problem(task, budget, planner, effort, exact=exact, page=False)
        selected = replace(selected, note=f"nothing is paged: {full}")
    return replace(selected, exact=exact)


def _overflow(task: Problem, selected: Plan) -> str:
    """What is paged and does not fit into the store, in words."""
    store, paged = task.costs.store, sum(task.size[s] for s in selected.paged)
    if store is None or store.n_bytes is None or paged <= store.n_bytes:
        return ""
    return f"the plan pages {show_bytes(paged)}, and the store holds {show_bytes(store.n_bytes)}"


def aim_of(costs: Costs, budget: Budget, planner: Planner, *, page: bool) -> Aim:
    """What the planner seeks with these costs, or why it cannot."""
    objective = budget.objective if len(planner.objectives) > 1 else planner.objectives[0]
    by_energy = "energy" in (objective, budget.objective) or budget.energy_j is not None
    if by_energy and (
        costs.idle_w is None or any(run.energy_j is None for op in costs.ops for run in op.ways.values())
    ):
        raise UserError(
            "a plan by energy needs costs that know joules",
            received=f"{costs.origin} costs, which do not", next_step='et.model_costs(graph, device="…")',
        )  # fmt: skip
    if budget.objective == "energy" and "energy" not in planner.objectives:
        raise UserError(f"the planner {planner.name} seeks the least time", next_step="use the planner optimal or poet")
    store = costs.store if page and planner.page else None
    if store is None and planner.page and not planner.recompute:
        raise UserError(
            f"{planner.name} needs a store", expected="costs with a store", next_step="give page_to, or a device"
        )
    if store is not None and by_energy and store.power_w is None:
        raise UserError("a plan by energy needs the power of the store", next_step="plan without paging: page=False")
    limits: tuple[tuple[Objective, float | None], ...] = (("time", budget.time_s), ("energy", budget.energy_j))
    given = {what: limit for what, limit in limits if limit is not None}
    return Aim(objective, given, recompute=planner.recompute, page=store is not None)


def known_to_work(task: Problem, planner: Planner, *, until: float, use_cache: bool = True) -> tuple[Order, int, str]:
    """An order that the quick planner finds in as few bytes as it can, its peak, and that planner's name. It is known
    from now on, so that a plan is there when this budget is asked for."""
    stand_in = quick(planner)
    order, peak = smallest_by(task, stand_in.find, until=until)
    selected = task.plan(order, planner=stand_in.name)
    _works(task, stand_in, use_cache).keep(max(task.keep_all.peak_bytes, peak), selected)
    return selected.items, peak, stand_in.name


def _works(task: Problem, stand_in: Planner, use_cache: bool) -> KnownPlans:
    return KnownPlans(task, f"{WORKS}, {stand_in.name}", use_cache=use_cache, any_costs=True)


@dataclass(frozen=True)
class _Planning:
    """until: the instant of `time.monotonic` at which the time is up."""

    task: Problem
    planner: Planner
    aim: Aim
    effort: Effort
    until: float
    exact: Exact

    @cached_property
    def known(self) -> KnownPlans:
        searched = f"optimal, {self.effort.time_limit_s} s, {self.aim}"
        return self._known(searched if self.planner.searches else self.planner.name)

    def within(self, budget: int | None) -> Plan:
        """A plan that keeps the budget and is legal."""
        task, planner, keep_all = self.task, self.planner, self.task.keep_all
        fits = budget is None or keep_all.peak_bytes <= budget
        if fits and planner.keeps_what_fits:
            return self._finished(keep_all)  # nothing takes less time or energy
        if budget is None:
            raise UserError(f"the planner {planner.name} needs a budget", next_step="give a budget: memory_bytes")
        if budget < lower_bound_bytes(task):  # proven: a budget that works is named after a short search at most
            order, peak, found_by = self._smallest_order(min(self._left_s, AT_ONCE_S))
            raise infeasible(task, budget, order, peak, found_by=found_by)
        earlier = self.known.keeping(budget)
        if earlier is not None:
            return earlier
        selected, cut_short = self._find(budget)
        more = self.known.holding_more(budget, selected.peak_bytes)
        if more is not None:
            selected = replace(more, bound=selected.bound)
        if not cut_short:
            self.known.keep(budget, selected)
        return selected

    def _find(self, budget: int) -> tuple[Plan, bool]:
        """The plan that the planner finds, or a plan that is known to work; and whether the search was cut short."""
        task, planner = self.task, self.planner
        until = self.until if planner.searches else max(self.until, time.monotonic() + GREEDY_S)
        known = self._known_orders(budget) if planner.searches else ()
        schedule = planner.find(Request(task, budget, until, self.aim, known, self.effort.solver_bytes))
        order, name = schedule.order, schedule.planner or planner.name
        if order is None:  # a planner may fail here and keep a smaller budget
            order = self._worked(budget)
        if order is None:
            order, peak, found_by = self._smallest_order(self._left_s)
            if peak > budget:
                raise infeasible(task, budget, order, peak, found_by=found_by)
        selected = task.plan(order, planner=name, bound=schedule.bound)
        note = schedule.note or (_why_not_paged(task, selected) if planner.searches and self.aim.page else "")
        return self._finished(replace(selected, note=note)), schedule.cut_short

    def _finished(self, selected: Plan) -> Plan:
        """The plan, validated, if it keeps the limits of time and energy."""
        amounts: dict[Objective, tuple[float | None, str]] = {
            "time": (selected.time_s, "s"), "energy": (selected.energy_j, "J"),
        }  # fmt: skip
        for what, limit in self.aim.limits.items():
            amount, unit = amounts[what]
            if amount is not None and amount > limit * (1 + 1e-9):
                raise Infeasible(
                    f"no plan takes at most {limit:.4g} {unit} within "
                    f"{show_bytes(selected.peak_bytes)}: the least {what} that was found there is {amount:.4g} {unit}\n"
                    f"  next step: allow {amount:.4g} {unit}, or more memory",
                    smallest_bytes=selected.peak_bytes, bound_bytes=lower_bound_bytes(self.task),
                    least_time_s=selected.time_s, least_energy_j=selected.energy_j,
                )  # fmt: skip
        selected = replace(selected, exact=self.exact)
        validate(self.task.graph, selected)
        return selected

    @property
    def _left_s(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def _known(self, way: str) -> KnownPlans:
        return KnownPlans(self.task, way, use_cache=self.effort.use_cache)

    @property
    def _smallest(self) -> KnownPlans:
        return self._known(SMALLEST if not self.aim.page else f"{SMALLEST}, {self.aim}")

    @property
    def _searched(self) -> KnownPlans:
        """What a short search found."""
        return self._known(f"{SMALLEST}, in short, {self.aim}")

    def _known_orders(self, budget: int) -> list[Order]:
        """Orders that keep the budget, of earlier plans."""
        worked = self._worked(budget)
        earlier = (self.known.below(budget), self._known(SMALLEST).keeping(budget), self._searched.keeping(budget))
        return [*([] if worked is None else [worked]), *(plan.items for plan in earlier if plan is not None)]

    def _worked(self, budget: int) -> Order | None:
        """What was known to work before, where it keeps this budget with these costs."""
        earlier = _works(self.task, quick(self.planner), self.effort.use_cache).keeping(budget)
        return earlier.items if earlier is not None and self.task.peak_bytes(earlier.items) <= budget else None

    def _smallest_order(self, search_s: float) -> tuple[Order, int, str]:
        """An order with a peak as small as was found, now or before, that peak, and what found it."""
        task, highest, effort = self.task, self.task.keep_all.peak_bytes, self.effort
        if self.planner.smallest is None:
            until = time.monotonic() + max(GREEDY_S, search_s)
            order, peak, name = known_to_work(task, self.planner, until=until, use_cache=effort.use_cache)
            return order, peak, f"the {name} planner"
        earlier = self._smallest.keeping(highest)
        if earlier is None and search_s <= AT_ONCE_S:
            earlier = self._searched.keeping(highest)
        if earlier is not None:
            return earlier.items, earlier.peak_bytes, "a search"
        order, peak, name = known_to_work(
            task, self.planner, until=time.monotonic() + GREEDY_S, use_cache=effort.use_cache
        )
        until = time.monotonic() + search_s
        schedule = self.planner.smallest(Request(task, highest, until, self.aim, (), effort.solver_bytes))
        if schedule.order is not None:
            smallest = task.plan(min((order, schedule.order), key=task.peak_bytes), planner=self.planner.name)
            to_the_end = time.monotonic() < until
            whole = to_the_end or search_s >= KEPT_PART * effort.time_limit_s
            (self._smallest if whole else self._searched).keep(highest, smallest)
            if smallest.peak_bytes < peak:
                return smallest.items, smallest.peak_bytes, "a search"
        return order, peak, f"the {name} planner"


def _why_not_paged(task: Problem, selected: Plan) -> str:
    store = task.costs.store
    if selected.paged or store is None:
        return ""
    again_s = selected.time_s - task.keep_all_time_s if selected.time_s else 0.0
    again = sum(task.size[s] for op in selected.recomputed for s in task.makes[op])
    return (
        f"nothing is paged: the store moves {show_bytes(store.out_bytes_s)} out and {show_bytes(store.in_bytes_s)} in "
        f"a second, and {show_bytes(again)} are recomputed in {again_s:.3g} s"
    )
