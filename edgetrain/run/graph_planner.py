"""Costs and plans of the graphs of one step: what `et.prepare` does between capture and compilation.

In:  the options, what each graph is and where its updates stand (`Subject`).
Out: a plan, validated, and the costs that it was made with; `Infeasible` at once where that is known without a run.

    keep all ─┬─ without a budget: what its kernels take besides ───────────────────────▶ plan
              └─ refuse what is impossible ─ costs ─ problem ─ search within the budget ─▶ plan
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from edgetrain.costs.kernels import fastest
from edgetrain.costs.measured import measure_costs, measure_kernels
from edgetrain.costs.table import Costs
from edgetrain.errors import Infeasible
from edgetrain.graph.ir import Graph
from edgetrain.native import arena
from edgetrain.plan.budget import Budget, show_bytes
from edgetrain.plan.keep_all import exactness, keep_all
from edgetrain.plan.lifetimes import hungriest_bytes
from edgetrain.plan.plan import Exact, Plan, Updates
from edgetrain.plan.planning import Series
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.process import COPIED_BYTES, PREPARING_BYTES, in_process, left_for_tensors, resident_bytes
from edgetrain.plan.time_left import TimeLeft
from edgetrain.plan.unmeasured import is_heavy, refuse_impossible, refuse_too_large, unmeasured, with_workspaces
from edgetrain.plan.validate import validate
from edgetrain.run.activity import doing
from edgetrain.run.binding import live_storages
from edgetrain.run.micro_batches import Subject
from edgetrain.run.options import Options

Key = tuple[str, Updates | None]  # of a graph, and where its updates stand


@dataclass(frozen=True)
class _Room:
    """budget_bytes: for the graph's tensors. process_bytes: what a bound on the process leaves for them.
    preparing_bytes: what measuring and searching may take."""

    budget_bytes: int | None
    process_bytes: int | None
    preparing_bytes: int | None


@dataclass(frozen=True)
class GraphPlanner:
    """For one call of `et.prepare`, or one new shape of batches.

    resident_before: of this process, when that began. memory_bytes: the budget, where it is another than that of the
    options. by_bytes: nothing is measured.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    options: Options
    series: Series
    resident_before: int
    memory_bytes: int | None
    by_bytes: bool = False
    plans: dict[Key, Plan] = field(default_factory=dict)  # that keep all, before any op was measured
    tasks: dict[tuple[str, Updates, Exact], Problem] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options, *, part_of_time: float
    ) -> GraphPlanner:
        """part_of_time: of what is left, for each plan."""
        time_left = TimeLeft(options.plan_time_s, part_of_time)
        series = Series(options.planning, options.plan_time_s, time_left, options.use_cache)
        resident_before = resident_bytes() - arena.resident_bytes()
        return cls(model, optimizer, options, series, resident_before, options.memory_bytes)

    def within(self, memory_bytes: int) -> GraphPlanner:
        """The same for another budget."""
        return replace(self, memory_bytes=memory_bytes)

    def unmeasured(self) -> GraphPlanner:
        return replace(self, by_bytes=True)

    @property
    def state_is_there(self) -> bool:
        return bool(self.optimizer.state)

    def keep_all(self, subject: Subject) -> Plan:
        """Before any op was measured."""
        key = subject.graph.key, subject.updates
        if key not in self.plans:
            early = not self.options.check_finite
            self.plans[key] = keep_all(subject.graph, updates=subject.updates, early=early)
        return replace(self.plans[key], exact=exactness(subject.graph, subject.exact))

    def updates_of(self, subject: Subject) -> Updates:
        return subject.updates or self.keep_all(subject).updates

    def task(self, subject: Subject, preparing_bytes: int | None = None) -> Problem:
        """With the costs of this machine."""
        graph, updates = subject.graph, self.updates_of(subject)
        key = graph.key, updates, subject.exact
        if key not in self.tasks:
            costs = fastest(graph, self._costs(graph, preparing_bytes), subject.exact)
            self.tasks[key] = problem(graph, costs, updates)
        return self.tasks[key]

    def keep_all_bytes(self, subject: Subject) -> int:
        """An upper bound where measuring takes long."""
        graph = subject.graph
        if self.by_bytes or is_heavy(graph):
            return problem(graph, unmeasured(graph), self.updates_of(subject)).keep_all.peak_bytes
        return self.task(subject).keep_all.peak_bytes

    def plan(self, subject: Subject, *, at_once: bool = False) -> tuple[Plan, Costs | None]:
        options, graph, plain = self.options, subject.graph, self.keep_all(subject)
        room = self._room(subject, plain)
        if options.runs and options.follow is None:  # one that moves was looked at as a whole
            self._refuse_too_large(subject, plain)
        if options.keeps_all:
            doing("looking at what kernels take")
            kernels = measure_kernels(graph, plain.exact, use_cache=options.use_cache)
            plan, costs = with_workspaces(graph, replace(plain, kernels=kernels))
            validate(graph, plan)
            return plan, costs
        try:
            self._refuse_impossible(subject, room.budget_bytes, at_once=at_once, may_take=room.preparing_bytes)
            task = self.task(subject, room.preparing_bytes)
            budget = None if room.budget_bytes is None else max(1, room.budget_bytes)
            doing("planning" if budget is None else f"planning within {show_bytes(budget)}")
            plan = self.series.plan(
                task, Budget(budget), exact=subject.exact, at_once=at_once, solver_bytes=room.preparing_bytes
            )
        except Infeasible as answer:
            if options.process_memory_bytes is None or room.process_bytes is None:
                raise
            if room.budget_bytes != room.process_bytes:
                raise
            raise in_process(answer, room.process_bytes, options.process_memory_bytes) from None
        return plan, task.costs

    def refuse(self, subject: Subject, *, at_once: bool = False) -> None:
        if self.memory_bytes is not None:
            self._refuse_impossible(subject, max(1, self.memory_bytes - subject.beside_bytes), at_once=at_once)

    def left_bytes(self) -> int:
        """Of what preparing may take beside the step."""
        grown = max(0, resident_bytes() - arena.resident_bytes() - self.resident_before)
        return max(0, PREPARING_BYTES - COPIED_BYTES - grown)

    def _room(self, subject: Subject, plain: Plan) -> _Room:
        budget_bytes, process_bytes, preparing_bytes = self.memory_bytes, None, None
        if budget_bytes is not None:
            budget_bytes = max(1, budget_bytes - subject.beside_bytes)
        if self.options.process_memory_bytes is not None:
            process_bytes = left_for_tensors(
                subject.graph, self.options.process_memory_bytes, state_is_there=self.state_is_there
            )
            process_bytes -= subject.beside_bytes
            budget_bytes = process_bytes if budget_bytes is None else min(process_bytes, budget_bytes)
            preparing_bytes = process_bytes - plain.persistent_bytes
        if budget_bytes is not None:
            n_bytes = self._room_bytes(subject.graph, min(budget_bytes, plain.peak_bytes) - plain.persistent_bytes)
            preparing_bytes = n_bytes if preparing_bytes is None else min(preparing_bytes, n_bytes)
        return _Room(budget_bytes, process_bytes, preparing_bytes)

    def _refuse_too_large(self, subject: Subject, plain: Plan) -> None:
        doing("planning")
        limits = (self.options.memory_bytes, self.options.process_memory_bytes)
        refuse_too_large(
            subject.graph, plain, min((n for n in limits if n is not None), default=None), planner=self.series.planner,
            state_is_there=self.state_is_there, beside_bytes=subject.beside_bytes,
        )  # fmt: skip

    def _refuse_impossible(
        self, subject: Subject, memory_bytes: int | None, *, at_once: bool, may_take: int | None = None
    ) -> None:
        """Before anything is measured, where that takes long."""
        if memory_bytes is None:
            return
        doing(f"planning within {show_bytes(memory_bytes)}")
        with self.series.time_left.planning():
            refuse_impossible(
                subject.graph, memory_bytes, planner=self.series.planner, updates=self.updates_of(subject),
                page=self.options.page_to is not None, use_cache=self.options.use_cache, at_once=at_once,
                may_run=lambda n_bytes: may_take is None or n_bytes <= may_take,
            )  # fmt: skip

    def _room_bytes(self, graph: Graph, above_bytes: int = 0) -> int:
        """What preparing may still take, for a plan that takes so much above what lasts, or as little as any can."""
        return max(above_bytes, hungriest_bytes(graph)) + self.left_bytes()

    def _costs(self, graph: Graph, preparing_bytes: int | None) -> Costs:
        doing("measuring what the ops cost")
        return measure_costs(
            graph, use_cache=self.options.use_cache, most_bytes=preparing_bytes or self._room_bytes(graph),
            page_to=self.options.page_folder, live=live_storages(graph, self.model, self.optimizer, {}),
            progress=lambda done, total: doing(f"measuring what the ops cost, {done} of {total}"),
        )  # fmt: skip
