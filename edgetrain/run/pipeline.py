"""The stages of a step in their one direction: a batch is captured, planned and compiled.

In:  the capturing of a model, who plans its graphs, what compiles them.
Out: a `Variant`: one step, whole or in micro-batches.

    batch ─ capture, rewrite ─ costs, plan ─ compile ─▶ Variant
            capturing.py       graph_planner.py          compiled.py, micro_step.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from edgetrain.costs.table import Costs
from edgetrain.graph.capture.training import Captured
from edgetrain.graph.ir import Graph
from edgetrain.graph.mean_loss import sample_items
from edgetrain.plan.micro_batches import kept_bytes
from edgetrain.plan.plan import Plan
from edgetrain.run.adaptive import BudgetWatch, Ladder
from edgetrain.run.capturing import Batch, Capturing
from edgetrain.run.compiled import CompiledStep
from edgetrain.run.conditions import Conditions, Known
from edgetrain.run.graph_planner import GraphPlanner
from edgetrain.run.micro_batches import LAST, Accumulators, MicroBatches, Subject
from edgetrain.run.micro_step import MicroStep
from edgetrain.run.require_mean import MeanLoss


@dataclass
class Variant:
    """steps: one for each plan of the ladder, where the budget moves; otherwise one."""

    steps: Sequence[CompiledStep | MicroStep]
    captured: Captured
    ladder: Ladder | None = None
    watch: BudgetWatch | None = None
    used: int = 0

    @property
    def plan(self) -> Plan:
        return self.steps[0].plan


@dataclass(frozen=True)
class Pipeline:
    """
    earlier: made for batches of this shape before something changed; where the graph is still the same, so is the plan.
    watch:   of a budget that moves.
    shared:  what the steps of one graph share, where there are several; by the graph's key.
    """

    capturing: Capturing
    mean: MeanLoss
    planner: GraphPlanner
    sums: Accumulators
    earlier: Sequence[Variant] = ()
    watch: BudgetWatch | None = None
    shared: dict[str, Known] | None = None

    def within(self, memory_bytes: int, watch: BudgetWatch, shared: dict[str, Known]) -> Pipeline:
        """The same for one of the budgets over which plans are made ahead."""
        return replace(self, planner=self.planner.within(memory_bytes), watch=watch, shared=shared)

    @property
    def micro(self) -> MicroBatches:
        bounded = self.planner.options.process_memory_bytes is not None and self.planner.state_is_there
        return MicroBatches(self.capturing, self.mean, self.planner, self.sums if bounded else None)

    def variant(self, batch: Batch, count: int, at_once: bool = False) -> Variant:
        """The batch in so many micro-batches; one: whole. at_once: a `TooSmall` where a bound rules the budget out."""
        return self._in_micro_batches(batch, count, at_once) if count > 1 else self._whole(batch, at_once)

    def _whole(self, batch: Batch, at_once: bool) -> Variant:
        part = self.capturing.capture(batch)
        same = [variant for variant in self.earlier if variant.captured.signature == part.captured.signature]
        if not same:
            plan, costs = self.planner.plan(Subject(part.graph, part.exact), at_once=at_once)
            return Variant([self._compiled(part.graph, plan, part.captured.externals, costs)], part.captured)
        before = same[-1].steps[0]
        assert isinstance(before, CompiledStep)  # as it was for the same batch
        step = self._compiled(before.graph, before.plan, part.captured.externals, before.costs)
        captured = replace(part.captured, watch=part.captured.watch.after(same[-1].captured.watch))
        return Variant([step], captured)

    def _in_micro_batches(self, batch: Batch, count: int, at_once: bool) -> Variant:
        planned = self.micro.planned(batch, count, at_once=at_once)
        graphs, plan, costs = planned.graphs, planned.plan, planned.costs
        externals = {**planned.part.captured.externals, **self.sums.of(graphs.ending)}
        steps = {
            size: self._compiled(graphs.accumulating[size], part, externals, costs[size])
            for size, part in plan.accumulating
        }
        assert plan.ending is not None
        last = self._compiled(graphs.ending, plan.ending, externals, costs[LAST])
        kept = kept_bytes(graphs.ending) if graphs.sizes[-1] else kept_bytes(next(iter(graphs.accumulating.values())))
        for step in (*steps.values(), last):
            step.beside_bytes = kept
        return Variant([MicroStep(plan, steps, last, sample_items(batch)[1])], planned.part.captured)

    def _compiled(
        self, graph: Graph, plan: Plan, externals: Mapping[str, torch.Tensor], costs: Costs | None
    ) -> CompiledStep:
        options, planner = self.planner.options, self.planner
        step = CompiledStep(
            graph, plan, planner.model, planner.optimizer, externals, costs=costs,
            conditions=Conditions(options.check_finite, options.page_folder, self.watch),
            known=None if self.shared is None else self.shared.get(graph.key),
        )  # fmt: skip
        if self.shared is not None:
            self.shared[graph.key] = step.known
        return step
