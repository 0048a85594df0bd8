"""From a batch to the steps that train on batches of its shape: captured, planned, compiled.

In:  a model, a loss, an optimizer, what was asked for (`Options`), and a batch.
Out: a `Variant`: one step; or, where the budget moves, one for each of the plans that are made ahead, and the ladder
     that says which of them a budget calls for. `Step` keeps the variants and calls them.

    batch ─ capture ─ plan ─ compile ─▶ Variant        whole, in micro-batches, or for a range of budgets
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from edgetrain import child
from edgetrain.costs.measured import measure_costs
from edgetrain.costs.table import Costs
from edgetrain.errors import Infeasible, InternalError, UserError
from edgetrain.graph.by_value import rounds_otherwise
from edgetrain.graph.capture import Captured, MemoryFormat, capture_with_externals
from edgetrain.graph.fuse import fuse_batch_norm, trains_unfused
from edgetrain.graph.ir import Graph
from edgetrain.graph.mean_loss import sample_items
from edgetrain.ops import norm
from edgetrain.plan.budget import Budget
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.micro_batches import Number, TooSmall, counts, kept_bytes, with_line, within
from edgetrain.plan.plan import Exact, Plan, Updates
from edgetrain.plan.planning import least_bytes
from edgetrain.plan.planning import plan as make_plan
from edgetrain.plan.problem import problem
from edgetrain.plan.process import in_process, left_for_tensors
from edgetrain.run.adaptive import BudgetWatch, Ladder, automatic, given, rungs, smallest_bytes
from edgetrain.run.compiled import CompiledStep, Known
from edgetrain.run.micro_batches import MicroBatches, MicroStep, Part, Work
from edgetrain.run.options import Options

T = TypeVar("T")
_ONEDNN = (torch.float32, torch.bfloat16, torch.float16)


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


def captured_apart(capture: Callable[[], T]) -> T:
    """Capture in a process of its own first, so that what tracing leaves behind goes with it; here the graph is then
    found in the cache. What goes wrong goes wrong again here, and is told then."""

    def work() -> None:
        torch.set_num_threads(1)  # the threads of this process are not there in its copy
        capture()

    with contextlib.suppress(InternalError):
        child.forked(work)
    return capture()


class StepMaker:
    """
    channels_last: images may run so, until a kernel shows that it does not keep that layout.
    page_to:       the folder to page to, until a transfer fails.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        options: Options,
    ) -> None:
        self.model, self.loss, self.optimizer, self.options = model, loss, optimizer, options
        self.channels_last = True
        self.page_to = options.page_to
        self._quickly = False  # do not search for what a bound rules out
        apart = options.process_memory_bytes is not None
        self.micro = MicroBatches(
            Work(
                model, loss, optimizer, lambda batch: self._capture(batch, clips=False), self._plan, self._compiled,
                self._keep_all_bytes, allow_inexact=options.allow_inexact, clip_norm=options.clip_norm, apart=apart,
            )
        )  # fmt: skip

    def new(self, batch: tuple[Any, ...]) -> Variant:
        """What trains on batches like this one, within what was asked for."""
        count, of_tensors = self.options.count(batch), self.options.process_memory_bytes is None
        self._quickly = False
        if self.options.follow is not None:
            return self._following(batch, self.options.follow)
        if count == 1 and of_tensors:
            try:
                return self._whole(batch)
            except Infeasible as answer:
                raise with_line(answer, f"micro-batches: {self.micro.would_do(batch, answer)}") from None
        if count == 1 or (count == "auto" and self.options.keeps_all):
            return self._whole(batch)
        samples, _ = sample_items(batch)
        if isinstance(count, int):
            return self._in_parts(batch, min(count, samples))

        def attempt(number: int, quickly: bool) -> Variant:
            return self._in_parts(batch, number, quickly=quickly)

        if of_tensors:
            return within(samples, attempt, count, functools.partial(self.micro.why_refused, batch))
        return within(samples, attempt, count)

    def _keep_all_bytes(self, graph: Graph, updates: Updates | None) -> int:
        updates = updates or keep_all(graph, early=not self.options.check_finite).updates
        costs = measure_costs(graph, use_cache=self.options.use_cache)
        return problem(graph, costs, updates).keep_all.peak_bytes

    def _in_parts(self, batch: tuple[Any, ...], count: int, *, quickly: bool = False) -> Variant:
        self._quickly = quickly
        if count <= 1:
            return self._whole(batch)
        step, captured = self.micro.step(batch, count)
        return Variant([step], captured)

    def _whole(self, batch: tuple[Any, ...]) -> Variant:
        part = self._capture(batch)
        plan, costs = self._plan(part.graph, part.exact)
        return Variant([self._compiled(part.graph, plan, part.captured.externals, costs)], part.captured)

    def _capture(self, batch: tuple[Any, ...], *, clips: bool = True) -> Part:
        """clips: the gradients of this batch alone, if that is asked for at all."""
        memory_format = self._memory_format(batch)

        def capture() -> Captured:
            return capture_with_externals(
                self.model,
                self.loss,
                self.optimizer,
                batch,
                unused=self.options.unused,
                memory_format=memory_format,
                clip_norm=self.options.clip_norm if clips else None,
                use_cache=self.options.use_cache,
            )

        captured = capture() if self.options.process_memory_bytes is None else captured_apart(capture)
        graph = captured.graph
        if memory_format == "channels_last" and self.options.memory_format == "auto" and norm.available():
            graph = fuse_batch_norm(graph)
            if trains_unfused(graph):
                self.channels_last = False
                return self._capture(batch, clips=clips)
        return Part(graph, captured, "rounding" if rounds_otherwise(graph) else self._exact(memory_format))

    def _compiled(
        self,
        graph: Graph,
        plan: Plan,
        externals: Mapping[str, torch.Tensor],
        costs: Costs | None,
        watch: BudgetWatch | None = None,
        known: dict[str, Known] | None = None,
    ) -> CompiledStep:
        """known: what the steps of one graph share, where there are several; by the graph's key."""
        shared = None if known is None else known.get(graph.key)
        made = CompiledStep(
            graph, plan, self.model, self.optimizer, externals, check_finite=self.options.check_finite, costs=costs,
            page_to=self.page_to, watch=watch, known=shared,
        )  # fmt: skip
        if known is not None:
            known[graph.key] = made.known
        return made

    def _following(self, batch: tuple[Any, ...], follow: Callable[[], object] | Literal["auto"]) -> Variant:
        """Plans over the range of budgets, made ahead."""
        count = self.options.count(batch)
        samples = 1 if count == 1 else sample_items(batch)[0]
        smallest, largest = self._range(batch, count, samples)
        watch = BudgetWatch(lambda: largest)
        known: dict[str, Known] = {}
        made = []
        for budget in rungs(smallest, largest):
            rung = _Rung(self, budget, watch, known)
            if isinstance(count, int):
                made.append(rung.attempt(batch, min(count, samples), quickly=False))
            else:
                made.append(within(samples, partial(rung.attempt, batch), count))
        by_peak = {one.plan.peak_bytes: one for one in made}
        ladder = Ladder([one.plan for one in made])
        steps = [by_peak[plan.peak_bytes].step for plan in ladder.plans]
        for step in steps:
            step.get_ready()
        watch.budget = automatic(ladder.plans[0].persistent_bytes) if follow == "auto" else given(follow)
        return Variant(steps, made[0].captured, ladder, watch)

    def _range(self, batch: tuple[Any, ...], count: Number, samples: int) -> tuple[int, int]:
        """From the least that is kept in any number of micro-batches that may be used to keeping all in the fewest."""
        tried = [min(count, samples)] if isinstance(count, int) else counts(samples)
        found: list[tuple[int, int]] = []
        for number in tried:
            try:
                found.append(self._range_in(batch, number))
            except UserError:
                if not found:
                    raise
                break  # micro-batches are refused; those that were found do without
        return min(least for least, _ in found), found[0][1]

    def _range_in(self, batch: tuple[Any, ...], count: int) -> tuple[int, int]:
        if count == 1:
            return self._range_of([(self._capture(batch).graph, None)], 0)
        self.micro.exact_or_why(batch)
        made, _, _ = self.micro.graphs(batch, count)
        first = next(iter(made.accumulating.values()))
        early: Updates = "early"
        return self._range_of(
            [(made.ending, None), *((graph, early) for graph in made.accumulating.values())], kept_bytes(first)
        )

    def _range_of(self, graphs: Sequence[tuple[Graph, Updates | None]], kept: int) -> tuple[int, int]:
        options = self.options
        least, most = [], []
        for graph, updates in graphs:
            costs = measure_costs(graph, use_cache=options.use_cache, page_to=self.page_to)
            where = updates or keep_all(graph, early=not options.check_finite).updates
            task = problem(graph, costs, where)
            least.append(smallest_bytes(task, self._planner))
            most.append(task.keep_all.peak_bytes)
        return max(least) + kept, max(most) + kept

    @property
    def _planner(self) -> str:
        """Where the budget moves there are many plans to be made."""
        moves = self.options.follow is not None and self.options.planner == "auto"
        return "fast" if moves else self.options.planner

    def _plan(
        self,
        graph: Graph,
        exact: Exact,
        updates: Updates | None = None,
        beside_bytes: int = 0,
        *,
        memory_bytes: int | None = None,
    ) -> tuple[Plan, Costs | None]:
        """updates: where they must stand. beside_bytes: what is held beside the graph's tensors, of the same budget.
        memory_bytes: the budget, where it is another than that of the options."""
        options = self.options
        if updates is None:
            plain = keep_all(graph, early=not options.check_finite, exact=exact)
        else:
            plain = keep_all(graph, updates=updates, exact=exact)
        if options.keeps_all:
            return plain, None
        memory_bytes, most_bytes = memory_bytes or options.memory_bytes, None
        if memory_bytes is not None:
            memory_bytes = max(1, memory_bytes - beside_bytes)
        if options.process_memory_bytes is not None:
            there = bool(self.optimizer.state)
            left = left_for_tensors(graph, options.process_memory_bytes, state_is_there=there) - beside_bytes
            memory_bytes = left if memory_bytes is None else min(left, memory_bytes)
            most_bytes = left - plain.persistent_bytes
        costs = measure_costs(graph, use_cache=options.use_cache, most_bytes=most_bytes, page_to=self.page_to)
        if self._quickly and memory_bytes is not None:
            bound = least_bytes(problem(graph, costs, plain.updates))
            if bound > memory_bytes:
                raise TooSmall("a bound rules it out", smallest_bytes=bound, bound_bytes=bound)
        try:
            made = make_plan(
                graph, costs, Budget(memory_bytes),
                planner=self._planner, time_limit_s=options.plan_time_s, updates=plain.updates, exact=exact,
                use_cache=options.use_cache, solver_bytes=most_bytes,
            )  # fmt: skip
        except Infeasible as answer:
            if options.process_memory_bytes is None or memory_bytes != left:
                raise
            raise in_process(answer, left, options.process_memory_bytes) from None
        return made, costs

    def _memory_format(self, batch: tuple[Any, ...]) -> MemoryFormat:
        if self.options.memory_format != "auto":
            return self.options.memory_format
        # oneDNN runs convolutions of these types, and channels-last without reordering every activation.
        fast = any(
            isinstance(t, torch.Tensor)
            and t.dim() == 4
            and t.shape[1] > 1
            and t.dtype in _ONEDNN
            and t.device.type == "cpu"
            for t in batch
        )
        modules = list(self.model.modules())
        convolves = any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in modules)
        # PyTorch's channels-last kernel of batch norm sums in float32, the other in float64: errors a hundred times as
        # large. Ours does not.
        normalises = any(isinstance(m, nn.BatchNorm2d) for m in modules) and not norm.available()
        return "channels_last" if fast and convolves and not normalises and self.channels_last else "preserve"

    def _exact(self, memory_format: MemoryFormat) -> Exact:
        # A captured LSTM runs gate by gate; plain PyTorch has a fused kernel for these types that rounds otherwise.
        fused = any(isinstance(m, nn.LSTM) and next(m.parameters()).dtype in _ONEDNN for m in self.model.modules())
        fused |= any(group.get("fused") for group in self.optimizer.param_groups)
        return "rounding" if fused or memory_format == "channels_last" else "bitwise"


@dataclass(frozen=True)
class _Made:
    step: CompiledStep | MicroStep
    captured: Captured

    @property
    def plan(self) -> Plan:
        return self.step.plan


@dataclass(frozen=True)
class _Rung:
    """Makes steps for one of the budgets over which plans are made ahead."""

    of: StepMaker
    budget_bytes: int
    watch: BudgetWatch
    known: dict[str, Known]

    def attempt(self, batch: tuple[Any, ...], count: int, quickly: bool) -> _Made:
        self.of._quickly = quickly
        plan = partial(self.of._plan, memory_bytes=self.budget_bytes)
        compiled = partial(self.of._compiled, watch=self.watch, known=self.known)
        if count > 1:
            micro = self.of.micro
            return _Made(*replace(micro, work=replace(micro.work, plan=plan, compiled=compiled)).step(batch, count))
        part = self.of._capture(batch)
        made, costs = plan(part.graph, part.exact)
        return _Made(compiled(part.graph, made, part.captured.externals, costs), part.captured)
