"""From a batch to the steps that train on batches of its shape: captured, planned, compiled.

In:  a model, a loss, an optimizer, what was asked for (`Options`), and a batch.
Out: a `Variant`: one step; or, where the budget moves, one for each of the plans that are made ahead, and the ladder
     that says which of them a budget calls for. `Step` keeps the variants and calls them.

    batch ─ capture ─ plan ─ compile ─▶ Variant        whole, in micro-batches, or for a range of budgets
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from edgetrain import child
from edgetrain.costs.measured import measure_costs, measure_kernels
from edgetrain.costs.table import Costs
from edgetrain.errors import Infeasible, InternalError, UserError
from edgetrain.graph.by_value import rounds_otherwise
from edgetrain.graph.capture.modes import Surroundings
from edgetrain.graph.capture.training import ONE_AT_A_TIME, Captured, MemoryFormat, capture_with_externals
from edgetrain.graph.ir import Graph
from edgetrain.graph.mean_loss import sample_items
from edgetrain.graph.rewrite.fuse import fuse_batch_norm, trains_unfused
from edgetrain.native import arena
from edgetrain.native.surely import surely
from edgetrain.ops import norm
from edgetrain.plan.budget import Budget, show_bytes
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.lifetimes import hungriest_bytes
from edgetrain.plan.micro_batches import Number, TooSmall, counts, infeasible, kept_bytes, with_line, within
from edgetrain.plan.plan import Exact, Plan, Updates
from edgetrain.plan.planning import least_bytes
from edgetrain.plan.planning import plan as make_plan
from edgetrain.plan.problem import problem
from edgetrain.plan.process import COPIED_BYTES, PREPARING_BYTES, in_process, left_for_tensors, resident_bytes
from edgetrain.plan.refusal import lasting, with_bound
from edgetrain.plan.time_left import TimeLeft
from edgetrain.plan.unmeasured import (
    here_bytes,
    is_heavy,
    refuse_impossible,
    refuse_too_large,
    unmeasured,
    with_workspaces,
)
from edgetrain.run.activity import doing
from edgetrain.run.adaptive import RUNGS, BudgetWatch, Ladder, automatic, given, rungs, smallest_bytes
from edgetrain.run.binding import live_storages
from edgetrain.run.compiled import CompiledStep, Known
from edgetrain.run.exact import ONEDNN, exactness_of
from edgetrain.run.micro_batches import MicroBatches, MicroStep, Part, Work
from edgetrain.run.options import Options

ADVICE_S = 1.0  # for what micro-batches would do, where that takes long
AT_ONCE_S = 1.3  # after capture, in which an impossible budget is refused, with that
SLOW_S = 0.4  # of CPU time: a model that takes longer to capture is not looked at in other ways at once


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
        self._known: Sequence[Variant] = ()
        self._resident_before = 0  # of this process, when it began to prepare a step
        self._quickly = False  # do not search for what a bound rules out
        self._time = TimeLeft(options.plan_time_s)
        self._advising = False
        self._captured_at = 0.0
        self._slow = False  # whether looking at another graph of this model may take seconds
        apart = options.process_memory_bytes is not None
        self.micro = MicroBatches(
            Work(
                model, loss, optimizer, lambda batch: self._capture(batch, clips=False), self._plan, self._compiled,
                self._keep_all_bytes, self._refuse_part, allow_inexact=options.allow_inexact,
                clip_norm=options.clip_norm, apart=apart,
            )
        )  # fmt: skip

    def new(self, batch: tuple[Any, ...], known: Sequence[Variant] = ()) -> Variant:
        """What trains on batches like this one, within what was asked for.

        known: made for batches of this shape before something changed; if the graph is still the same, so is the plan.
        """
        with ONE_AT_A_TIME:
            self._known = known
            self._resident_before = resident_bytes() - arena.resident_bytes()
            surroundings = Surroundings(self.model)

            def end() -> None:
                surroundings.put_back()
                self.micro.forget_parts(self.options.max_shapes)
                self._known = ()

            return surely(lambda: self._new(batch), end)

    def _new(self, batch: tuple[Any, ...]) -> Variant:
        count, of_tensors = self.options.count(batch), self.options.process_memory_bytes is None
        self._quickly = False
        # In micro-batches there are several plans, and nobody knows how many: each takes half of what is left.
        self._time = TimeLeft(self.options.plan_time_s, 1.0 if count == 1 else 0.5)
        if self.options.follow is not None:
            return self._following(batch, self.options.follow)
        if count == 1 and of_tensors:
            try:
                return self._whole(batch)
            except Infeasible as answer:
                line = self._advice(functools.partial(self.micro.would_do, batch, answer), answer)
                raise with_line(answer, f"micro-batches: {line}") from None
        if count == 1 or (count == "auto" and self.options.keeps_all):
            return self._whole(batch)
        samples, _ = sample_items(batch)
        if isinstance(count, int):
            return self._in_parts(batch, min(count, samples))

        def attempt(number: int, quickly: bool) -> Variant:
            return self._in_parts(batch, number, quickly=quickly)

        if of_tensors:
            return within(samples, attempt, count, functools.partial(self._why_refused, batch))
        return within(samples, attempt, count)

    def _why_refused(self, batch: tuple[Any, ...], refused: UserError, answer: Infeasible) -> str:
        return self._advice(functools.partial(self.micro.why_refused, batch, refused, answer), answer)

    def _advice(self, work: Callable[[], str], answer: Infeasible) -> str:
        """What `work` says of micro-batches; where that may take long, within `ADVICE_S`, in a process of its own."""
        doing("looking at micro-batches")
        if not self._slow:
            return work()

        def alone() -> str:
            torch.set_num_threads(1)  # the threads of this process are not there in its copy
            self._advising = True
            return work()

        impossible = (self.options.memory_bytes or 0) < answer.bound_bytes  # what is proven is said at once
        limit_s = max(0.0, AT_ONCE_S - (time.monotonic() - self._captured_at)) if impossible else ADVICE_S
        try:
            found: str = child.forked(alone, most_bytes=self._left_bytes(), time_limit_s=limit_s)
            return found
        except InternalError:
            return 'not looked at, for want of time or memory; micro_batches="auto" does'

    def _keep_all_bytes(self, graph: Graph, updates: Updates | None) -> int:
        """An upper bound where measuring takes long."""
        updates = self._where(graph, updates)
        by_bytes = self._advising or is_heavy(graph)
        costs = unmeasured(graph) if by_bytes else self._costs(graph)
        return problem(graph, costs, updates).keep_all.peak_bytes

    def _in_parts(self, batch: tuple[Any, ...], count: int, *, quickly: bool = False) -> Variant:
        self._quickly = quickly
        if count <= 1:
            return self._whole(batch)
        step, captured = self.micro.step(batch, count)
        return Variant([step], captured)

    def _whole(self, batch: tuple[Any, ...]) -> Variant:
        part = self._capture(batch)
        same = [one for one in self._known if one.captured.signature == part.captured.signature]
        if not same:
            plan, costs = self._plan(part.graph, part.exact)
            return Variant([self._compiled(part.graph, plan, part.captured.externals, costs)], part.captured)
        before = same[-1].steps[0]
        assert isinstance(before, CompiledStep)  # as it was for the same batch
        step = self._compiled(before.graph, before.plan, part.captured.externals, before.costs)
        captured = replace(part.captured, watch=part.captured.watch.after(same[-1].captured.watch))
        return Variant([step], captured)

    def _capture(self, batch: tuple[Any, ...], *, clips: bool = True) -> Part:
        """clips: the gradients of this batch alone, if that is asked for at all."""
        doing("capturing the step")
        begin = time.process_time()
        memory_format = self._memory_format(batch)
        captured = capture_with_externals(
            self.model, self.loss, self.optimizer, batch,
            unused=self.options.unused, memory_format=memory_format,
            clip_norm=self.options.clip_norm if clips else None,
            apart=self.options.apart or self.options.process_memory_bytes is not None,
        )  # fmt: skip
        graph = captured.graph
        self._captured_at = time.monotonic()
        self._slow = is_heavy(graph) or time.process_time() - begin > SLOW_S
        if memory_format == "channels_last" and self.options.memory_format == "auto" and norm.available():
            graph = fuse_batch_norm(graph)
            if trains_unfused(graph):
                self.channels_last = False
                return self._capture(batch, clips=clips)
        exact = exactness_of(self.model, self.loss, self.optimizer, memory_format)
        return Part(graph, captured, "rounding" if rounds_otherwise(graph) else exact)

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
        graphs = self._graphs_of(batch, count, samples)
        budget = automatic(graphs[0].persistent_bytes) if follow == "auto" else given(follow)
        self._refuse_all(graphs, budget())
        graphs = self._tested(batch, graphs)
        smallest, largest, bound = self._range(graphs)
        there, graph = bool(self.optimizer.state), graphs[0].parts[0][0]
        refuse_too_large(graph, keep_all(graph), smallest, planner=self._planner, state_is_there=there)
        here = here_bytes(graph, state_is_there=there)
        largest = largest if here is None else max(smallest, min(largest, here))  # no more is ever there
        watch = BudgetWatch(lambda: largest)
        known: dict[str, Known] = {}
        made = []
        part = self._time.part
        for number, memory_bytes in enumerate(rungs(smallest, largest)):
            self._time.part = part / (RUNGS - number)
            rung = _Rung(self, memory_bytes, watch, known)
            if isinstance(count, int):
                made.append(rung.attempt(batch, min(count, samples), quickly=False))
            else:
                made.append(within(samples, partial(rung.attempt, batch), count))
        by_peak = {one.plan.peak_bytes: one for one in made}
        ladder = Ladder([one.plan for one in made], bound, lasting(graphs[0].parts[0][0]))
        steps = [by_peak[plan.peak_bytes].step for plan in ladder.plans]
        for step in steps:
            step.get_ready()
        watch.budget = budget
        return Variant(steps, made[0].captured, ladder, watch)

    def _graphs_of(self, batch: tuple[Any, ...], count: Number, samples: int) -> list[_Graphs]:
        """For each number of micro-batches that may be used."""
        tried = [min(count, samples)] if isinstance(count, int) else counts(samples)
        found: list[_Graphs] = []
        for number in tried:
            try:
                found.append(self._graphs_in(batch, number))
            except UserError:
                if not found:
                    raise
                break  # micro-batches are refused; those that were found do without
        return found

    def _graphs_in(self, batch: tuple[Any, ...], count: int) -> _Graphs:
        if count == 1:
            return _Graphs((), ((self._capture(batch).graph, None),), 0)
        self.micro.structure(batch)
        made, _, _ = self.micro.graphs(batch, count)
        first = next(iter(made.accumulating.values()))
        early: Updates = "early"
        accumulating = tuple((graph, early) for graph in made.accumulating.values())
        return _Graphs(made.sizes, ((made.ending, None), *accumulating), kept_bytes(first))

    def _tested(self, batch: tuple[Any, ...], tried: list[_Graphs]) -> list[_Graphs]:
        """Without those in micro-batches, where a test shows that the loss is no mean over samples."""
        if not any(graphs.sizes for graphs in tried):
            return tried
        try:
            self.micro.exact_or_why(batch)
        except UserError:
            tried = [graphs for graphs in tried if not graphs.sizes]
            if not tried:
                raise
        return tried

    def _refuse_all(self, tried: Sequence[_Graphs], memory_bytes: int) -> None:
        """Infeasible where the budget of this moment is impossible whatever the number of micro-batches."""
        answers = []
        for graphs in tried:
            answer = self._refusal(graphs, memory_bytes)
            if answer is None:
                return
            answers.append(answer)
        best = min(answers, key=lambda answer: answer.smallest_bytes)
        raise with_bound(best, min(answer.bound_bytes for answer in answers))

    def _refusal(self, graphs: _Graphs, memory_bytes: int) -> Infeasible | None:
        worst: Infeasible | None = None
        for graph, updates in graphs.parts:
            try:
                self._refuse_impossible(graph, max(1, memory_bytes - graphs.kept), self._where(graph, updates))
            except Infeasible as answer:
                worst = answer if worst is None or answer.smallest_bytes > worst.smallest_bytes else worst
        return infeasible(worst, graphs.sizes, graphs.kept) if worst is not None and graphs.sizes else worst

    def _range(self, tried: Sequence[_Graphs]) -> tuple[int, int, int]:
        """From the least that is kept in any number of micro-batches that may be used to keeping all in the fewest; and
        a bound on every plan."""
        ranges = [self._range_of(graphs) for graphs in tried]
        return min(least for least, _, _ in ranges), ranges[0][1], min(bound for _, _, bound in ranges)

    def _range_of(self, graphs: _Graphs) -> tuple[int, int, int]:
        least, most, bounds = [], [], []
        for graph, updates in graphs.parts:
            task = problem(graph, self._costs(graph), self._where(graph, updates))
            doing("looking for the smallest budget")
            with self._time.planning() as left_s:
                least.append(smallest_bytes(task, self._planner, left_s))
            most.append(task.keep_all.peak_bytes)
            bounds.append(least_bytes(task))
        return max(least) + graphs.kept, max(most) + graphs.kept, max(bounds) + graphs.kept

    def _where(self, graph: Graph, updates: Updates | None) -> Updates:
        return updates or keep_all(graph, early=not self.options.check_finite).updates

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
        there = bool(self.optimizer.state)
        memory_bytes, most_bytes = memory_bytes or options.memory_bytes, None
        if memory_bytes is not None:
            memory_bytes = max(1, memory_bytes - beside_bytes)
        if options.process_memory_bytes is not None:
            left = left_for_tensors(graph, options.process_memory_bytes, state_is_there=there) - beside_bytes
            memory_bytes = left if memory_bytes is None else min(left, memory_bytes)
            most_bytes = left - plain.persistent_bytes
        if options.runs and options.follow is None:  # one that moves was looked at as a whole
            doing("planning")
            given_bytes = [n for n in (options.memory_bytes, options.process_memory_bytes) if n is not None]
            refuse_too_large(
                graph, plain, min(given_bytes, default=None), planner=self._planner, state_is_there=there,
                beside_bytes=beside_bytes,
            )  # fmt: skip
        if options.keeps_all:
            doing("looking at what kernels take")
            kernels = measure_kernels(graph, exact, use_cache=options.use_cache)
            return with_workspaces(graph, replace(plain, kernels=kernels))
        if memory_bytes is not None:
            room = self._room_bytes(graph, min(memory_bytes, plain.peak_bytes) - plain.persistent_bytes)
            most_bytes = room if most_bytes is None else min(most_bytes, room)
        try:
            self._refuse_impossible(graph, memory_bytes, plain.updates, most_bytes)
            costs = self._costs(graph, most_bytes)
            if self._quickly and memory_bytes is not None:
                bound = least_bytes(problem(graph, costs, plain.updates))
                if bound > memory_bytes:
                    raise TooSmall("a bound rules it out", smallest_bytes=bound, bound_bytes=bound)
            doing("planning" if memory_bytes is None else f"planning within {show_bytes(memory_bytes)}")
            with self._time.planning() as left_s:
                made = make_plan(
                    graph, costs, Budget(memory_bytes and max(1, memory_bytes)),
                    planner=self._planner, time_limit_s=options.plan_time_s, updates=plain.updates, exact=exact,
                    use_cache=options.use_cache, solver_bytes=most_bytes, left_s=left_s,
                )  # fmt: skip
        except Infeasible as answer:
            if options.process_memory_bytes is None or memory_bytes != left:
                raise
            raise in_process(answer, left, options.process_memory_bytes) from None
        return made, costs

    def _refuse_impossible(
        self, graph: Graph, memory_bytes: int | None, updates: Updates, most_bytes: int | None = None
    ) -> None:
        """Before anything is measured, where that takes long."""
        if memory_bytes is None:
            return
        doing(f"planning within {show_bytes(memory_bytes)}")
        with self._time.planning():
            refuse_impossible(
                graph, memory_bytes, planner=self._planner, updates=updates, page=self.page_to is not None,
                use_cache=self.options.use_cache, at_once=self._quickly,
                may_run=lambda n_bytes: most_bytes is None or n_bytes <= most_bytes,
            )  # fmt: skip

    def _refuse_part(
        self, graph: Graph, updates: Updates | None, beside: int, *, memory_bytes: int | None = None
    ) -> None:
        """Of a step in micro-batches, before the loss is tested."""
        memory_bytes = memory_bytes or self.options.memory_bytes
        if memory_bytes is not None:
            self._refuse_impossible(graph, max(1, memory_bytes - beside), self._where(graph, updates))

    def _room_bytes(self, graph: Graph, above_bytes: int = 0) -> int:
        """What preparing may still take, for a plan that takes so much above what lasts, or as little as any can."""
        return max(above_bytes, hungriest_bytes(graph)) + self._left_bytes()

    def _left_bytes(self) -> int:
        """Of what preparing may take beside the step."""
        grown = max(0, resident_bytes() - arena.resident_bytes() - self._resident_before)
        return max(0, PREPARING_BYTES - COPIED_BYTES - grown)

    def _costs(self, graph: Graph, most_bytes: int | None = None) -> Costs:
        doing("measuring what the ops cost")
        return measure_costs(
            graph, use_cache=self.options.use_cache, most_bytes=most_bytes or self._room_bytes(graph),
            page_to=self.page_to, live=live_storages(graph, self.model, self.optimizer, {}),
            progress=lambda done, total: doing(f"measuring what the ops cost, {done} of {total}"),
        )  # fmt: skip

    def _memory_format(self, batch: tuple[Any, ...]) -> MemoryFormat:
        if self.options.memory_format != "auto":
            return self.options.memory_format
        # oneDNN runs convolutions of these types, and channels-last without reordering every activation.
        fast = any(
            isinstance(t, torch.Tensor)
            and t.dim() == 4
            and t.shape[1] > 1
            and t.dtype in ONEDNN
            and t.device.type == "cpu"
            for t in batch
        )
        modules = list(self.model.modules())
        convolves = any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in modules)
        # PyTorch's channels-last kernel of batch norm sums in float32, the other in float64: errors a hundred times as
        # large. Ours does not.
        normalises = any(isinstance(m, nn.BatchNorm2d) for m in modules) and not norm.available()
        return "channels_last" if fast and convolves and not normalises and self.channels_last else "preserve"


@dataclass(frozen=True)
class _Graphs:
    """The graphs of a batch cut into micro-batches of these sizes, or whole. parts: each graph, and where its updates
    must stand. kept: bytes that are held beside all of them."""

    sizes: tuple[int, ...]
    parts: tuple[tuple[Graph, Updates | None], ...]
    kept: int

    @property
    def persistent_bytes(self) -> int:
        return keep_all(self.parts[0][0]).persistent_bytes


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
        refuse = partial(self.of._refuse_part, memory_bytes=self.budget_bytes)
        compiled = partial(self.of._compiled, watch=self.watch, known=self.known)
        if count > 1:
            micro = self.of.micro
            return _Made(
                *replace(micro, work=replace(micro.work, plan=plan, refuse=refuse, compiled=compiled)).step(
                    batch, count
                )
            )
        part = self.of._capture(batch)
        made, costs = plan(part.graph, part.exact)
        return _Made(compiled(part.graph, made, part.captured.externals, costs), part.captured)
