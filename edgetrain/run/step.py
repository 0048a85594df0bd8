"""A training step that one calls: `loss = step(x, y)` trains the model in place.

In:  a model, a loss, an optimizer: ordinary PyTorch objects, and they stay so.
Out: the loss as a detached 0-d tensor. After a call, parameters, buffers and optimizer state hold what plain PyTorch
     would hold. A call that raises has changed nothing.

What a graph depends on is looked at before each call: shapes of the batch, training flags, plain attributes of the
modules and variables of the loss, the structure of the optimizer. When one of them has changed the step captures
again; the last, smaller batch of an epoch is such a case.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import warnings
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
from edgetrain.graph import optimizers
from edgetrain.graph.capture import Captured, MemoryFormat, Unused, capture_with_externals, check_example
from edgetrain.graph.fingerprint import settings
from edgetrain.graph.fuse import fuse_batch_norm, trains_unfused
from edgetrain.graph.ir import Graph
from edgetrain.graph.mean_loss import sample_items
from edgetrain.native.malloc import keep_freed_memory
from edgetrain.ops import norm
from edgetrain.plan.budget import Budget, parse_bytes, show_bytes
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.micro_batches import Number, TooSmall, counts, kept_bytes, with_line, within
from edgetrain.plan.plan import Exact, Plan, Updates
from edgetrain.plan.planning import least_bytes
from edgetrain.plan.planning import plan as make_plan
from edgetrain.plan.problem import problem
from edgetrain.plan.process import in_process, left_for_tensors
from edgetrain.run.adaptive import BudgetWatch, Ladder, Switch, automatic, given, rungs, smallest_bytes
from edgetrain.run.compiled import CompiledStep, Known, LayoutMismatch
from edgetrain.run.memory import MemoryTrace
from edgetrain.run.micro_batches import MicroBatches, MicroStep, Part, Work
from edgetrain.run.options import Options, StepFormat

T = TypeVar("T")
_ONEDNN = (torch.float32, torch.bfloat16, torch.float16)
MOST_VARIANTS = 8  # compiled steps that are kept for other shapes; the one unused longest goes first


class PagingWarning(UserWarning):
    """A transfer to storage or back failed. The step is right all the same."""


class BudgetWarning(UserWarning):
    """The budget fell in the middle of a step, and could not be followed. The step is right all the same."""


@dataclass
class _Variant:
    """steps: one for each plan of the ladder, where the budget moves; otherwise one."""

    steps: Sequence[CompiledStep | MicroStep]
    captured: Captured
    ladder: Ladder | None = None
    watch: BudgetWatch | None = None
    used: int = 0

    @property
    def plan(self) -> Plan:
        return self.steps[0].plan


def prepare(
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    example: Sequence[Any],
    *,
    memory: int | float | str | Callable[[], int | float | str] | None = None,
    process_memory: int | float | str | None = None,
    planner: str = "auto",
    unused: Unused = "error",
    memory_format: StepFormat = "auto",
    check_finite: bool = False,
    clip_norm: float | None = None,
    keep_memory: bool = True,
    use_cache: bool = True,
    plan_time_s: float = 10.0,
    page_to: str | os.PathLike[str] | None = None,
    micro_batches: int | Literal["auto"] | None = None,
    allow_inexact: bool = False,
) -> Step:
    """Capture, plan and compile a training step for batches like `example`.

    memory: bounds every byte that the step's tensors take: parameters, buffers, optimizer state, inputs, activations,
    gradients, and the workspace of kernels. A number of bytes, or "300MB". What the model holds beside, untouched by
    the step, is not counted. A budget may move: a function that gives the budget of the moment, or "auto", which
    follows the memory that is available. Plans are then made ahead for several budgets; a change is followed at the
    next step, and a fall in the middle of one by planning the rest of it anew. `step.switches` tells of each.
    process_memory: bounds the resident memory of the process, from now on.
    planner: "auto", "keep-all", "optimal", "fast", "chen", "dtr", "melon" or "sage". plan_time_s: for the search of
    "optimal". "sage" evicts as SAGE does, and where that is not enough takes the largest micro-batches that fit.
    memory_format: "auto" runs image batches channels-last where that is faster and as exact (convolutions on a CPU);
    the numbers then differ from plain PyTorch's by rounding. "preserve" takes batches as they come and is bitwise.
    check_finite: raise a UserError, and leave the model as it was, when the loss or a gradient is not finite.
    clip_norm: scale the gradients down so that their norm, all of them together, is at most this.
    unused: "freeze" accepts parameters of the optimizer that the loss does not reach.
    page_to: a folder on storage of this device. Tensors may go there and come back where that takes less time than to
    make them again; where the storage is too slow for it nothing is paged, and the plan says so. A transfer that fails
    costs no step: what is lost is made again, a `PagingWarning` says why, and later steps do without.
    keep_memory: let the process keep what a step frees for the next one, which saves up to a third of the time where
    malloc is glibc's (see native/malloc.py); False leaves malloc as it is.
    micro_batches: take each batch in so many parts, add their gradients up and update once; "auto": as many as take the
    least time within the budget. By default the whole batch, but see "sage". The loss must be a mean over samples,
    which is verified. The numbers are then those of the whole batch but for rounding; where batch norm or dropout make
    them others, that is refused, unless allow_inexact=True.
    """
    follow: Any = memory if callable(memory) or memory == "auto" else None
    options = Options(
        unused, memory_format, check_finite, clip_norm, keep_memory, use_cache,
        None if memory is None or follow is not None else parse_bytes(memory),  # type: ignore[arg-type]
        None if process_memory is None else parse_bytes(process_memory),
        planner, plan_time_s, None if page_to is None else os.fspath(page_to), follow, micro_batches, allow_inexact,
    )  # fmt: skip
    step = Step(model, loss, optimizer, options)
    step.of_shape(*check_example(example))
    return step


def captured_apart(capture: Callable[[], T]) -> T:
    """Capture in a process of its own first, so that what tracing leaves behind goes with it; here the graph is then
    found in the cache. What goes wrong goes wrong again here, and is told then."""

    def work() -> None:
        torch.set_num_threads(1)  # the threads of this process are not there in its copy
        capture()

    with contextlib.suppress(InternalError):
        child.forked(work)
    return capture()


class Step:
    """What `et.prepare` returns. Call it with a batch; see the module's docstring."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        options: Options,
    ) -> None:
        self._model, self._loss, self._optimizer, self._options = model, loss, optimizer, options
        self._variants: dict[Any, _Variant] = {}
        self._last: CompiledStep | MicroStep | None = None
        self._channels_last = True  # until a kernel shows that it does not keep that layout
        self._page_to = options.page_to  # until a transfer fails
        self._steps = 0
        self.switches: list[Switch] = []  # of a budget that moves
        self._watch: BudgetWatch | None = None
        self._quickly = False  # do not search for what a bound rules out
        apart = options.process_memory_bytes is not None
        self._micro = MicroBatches(
            Work(
                model, loss, optimizer, lambda batch: self._capture(batch, clips=False), self._plan, self._compiled,
                self._keep_all_bytes, allow_inexact=options.allow_inexact, clip_norm=options.clip_norm, apart=apart,
            )
        )  # fmt: skip

    def __call__(self, *batch: Any) -> torch.Tensor:
        return self._step(batch, lambda step: step(*batch))

    def timed(self, mark: Callable[[int], None], *batch: Any) -> torch.Tensor:
        """The same step; it tells `mark` when each op begins and ends (measure/timeline.py reads it)."""
        return self._step(batch, lambda step: step.timed(mark, *batch))

    def _step(self, batch: tuple[Any, ...], run: Callable[[CompiledStep | MicroStep], torch.Tensor]) -> torch.Tensor:
        result = self._try(batch, run)
        self._note_falls()
        self._steps += 1
        if self._options.keep_memory:
            keep_freed_memory()
        return result

    def evaluate(self, *batch: Any) -> torch.Tensor:
        """The loss in evaluation mode, as plain PyTorch computes it; nothing is changed."""
        training = {module: module.training for module in self._model.modules()}
        try:
            self._model.eval()
            with torch.no_grad():
                return self._loss(self._model, *batch)
        finally:
            for module, was in training.items():
                module.training = was

    def gradients(self, *batch: Any) -> dict[str, torch.Tensor]:
        """The gradient of each trained parameter, by name; nothing is changed."""
        return self._try(batch, lambda step: step.gradients(*batch))

    def trace_memory(self, *batch: Any) -> MemoryTrace:
        """Run one step under observation and take it back: the bytes held at each op, what is alive at the peak."""
        return max(self.trace_micro_batches(*batch), key=lambda trace: trace.peak_bytes)

    def trace_micro_batches(self, *batch: Any) -> tuple[MemoryTrace, ...]:
        """The same of each micro-batch in turn; of one where the batch is taken whole."""

        def trace(step: CompiledStep | MicroStep) -> tuple[MemoryTrace, ...]:
            return step.trace_parts(*batch) if isinstance(step, MicroStep) else (step.trace_memory(*batch),)

        return self._try(batch, trace)

    def __repr__(self) -> str:
        return f"<edgetrain step of {type(self._model).__name__}: {self.plan}>"

    @property
    def plan(self) -> Plan:
        """The plan of the batch last trained; a last batch that is smaller has its own."""
        return self.used.plan

    def in_micro_batches(
        self,
        plan: Callable[[Graph, Exact, Updates | None, int], tuple[Plan, Costs | None]],
        keep_all_bytes: Callable[[Graph, Updates | None], int],
        *,
        allow_inexact: bool,
    ) -> MicroBatches:
        """The same model, loss and optimizer in micro-batches that are planned otherwise: for another device, say.
        For what comes in see `Work`."""
        return MicroBatches(
            replace(self._micro.work, plan=plan, keep_all_bytes=keep_all_bytes, allow_inexact=allow_inexact)
        )

    @property
    def room_bytes(self) -> int | None:
        """What other work between steps may take: as much as a step does above what lasts. None without a budget."""
        return None if self._options.keeps_all else self.plan.peak_bytes - self.plan.persistent_bytes

    @property
    def budget_bytes(self) -> int | None:
        """The budget as it was last asked for, where it moves; None where it does not."""
        return None if self._watch is None else self._watch.last_bytes

    @property
    def graph(self) -> Graph:
        """The graph last used."""
        return self.used.graph

    @property
    def source(self) -> str:
        """The step last used, as Python text."""
        return self.used.source

    @property
    def used(self) -> CompiledStep | MicroStep:
        """The step of the batch last trained."""
        assert self._last is not None  # prepare compiles the example before it hands a step out
        return self._last

    def compiled(self, *batch: Any) -> CompiledStep:
        """The compiled step for batches of this shape, where they are not taken in micro-batches."""
        found = self.of_shape(*batch)
        if not isinstance(found, CompiledStep):
            raise UserError("this step takes its batches in micro-batches", next_step="call of_shape")
        return found

    def of_shape(self, *batch: Any) -> CompiledStep | MicroStep:
        """The step for batches of this shape; captured, planned and compiled now if it is new."""
        key = self._key(check_example(batch))
        variant = self._variants.pop(key, None)
        if variant is None or variant.captured.walk.changed():
            variant = self._new(batch)
        self._variants[key] = variant  # at the end: used last
        while len(self._variants) > MOST_VARIANTS:
            self._variants.pop(next(iter(self._variants)))
        self._last = self._chosen(variant)
        return self._last

    def _chosen(self, variant: _Variant) -> CompiledStep | MicroStep:
        """The step for the budget of the moment."""
        if variant.ladder is None or variant.watch is None:
            return variant.steps[0]
        begin = time.perf_counter()
        self._watch = variant.watch
        budget = variant.watch.now()
        chosen = variant.ladder.within(budget)
        if chosen != variant.used or self._last is not variant.steps[chosen]:
            self._switch(variant, chosen, budget, begin, in_step=False)
        step = variant.steps[chosen]
        if isinstance(step, MicroStep):
            step.turn = partial(self._turned, variant)
        return step

    def _turned(self, variant: _Variant, now: MicroStep) -> MicroStep:
        """Between two micro-batches: another plan of the same micro-batches, where the budget has changed."""
        begin = time.perf_counter()
        assert variant.watch is not None
        budget = variant.watch.meanwhile()
        if budget is None:
            return now
        # From the largest plan to the smallest.
        fit = [n for n, step in enumerate(variant.steps) if isinstance(step, MicroStep) and step.like(now)]
        chosen = next((n for n in fit if variant.steps[n].plan.peak_bytes <= budget), fit[-1])
        step = variant.steps[chosen]
        assert isinstance(step, MicroStep)
        if step is not now:
            self._switch(variant, chosen, budget, begin, in_step=True)
        return step

    def _switch(self, variant: _Variant, chosen: int, budget: int, begin: float, *, in_step: bool) -> None:
        step, before = variant.steps[chosen], variant.steps[variant.used]
        step.take_over(before)
        middle = time.perf_counter()
        step.shrink()
        variant.used = chosen
        peak_bytes, end = step.plan.peak_bytes, time.perf_counter()
        self.switches.append(
            Switch(self._steps, budget, peak_bytes, in_step, middle - begin, max(0, peak_bytes - budget), end - middle)
        )

    def _note_falls(self) -> None:
        for fall in [] if self._last is None else self._last.falls:
            self.switches.append(fall.switch(self._steps))
            if fall.failed is not None:
                warnings.warn(
                    f"the budget fell to {show_bytes(fall.budget_bytes)} in the middle of a step, and the rest of it "
                    f"could not be planned anew ({fall.failed}): it went on with {show_bytes(fall.needs_bytes)}. The "
                    "step is right; the next one follows the budget.",
                    BudgetWarning, stacklevel=3,
                )  # fmt: skip

    def _try(self, batch: tuple[Any, ...], work: Callable[[CompiledStep | MicroStep], T]) -> T:
        """Where kernels lay results out otherwise than capture foretold, capture again with what was learnt from it."""
        while True:
            try:
                step = self.of_shape(*batch)
                found = work(step)
                if step.page_fault is not None:
                    self._page_no_more(step.page_fault)
                return found
            except LayoutMismatch as mismatch:
                if not mismatch.learnt:
                    if self._options.memory_format != "auto" or not self._channels_last:
                        raise
                    self._channels_last = False  # plain layouts are foretold better
            self._variants.clear()
            self._micro.forget()

    def _page_no_more(self, why: str) -> None:
        warnings.warn(
            f"a tensor that was paged to {self._page_to} did not come back as it was: {why}. What was lost was made "
            "again, so the step is right; the next ones do without paging.",
            PagingWarning, stacklevel=4,
        )  # fmt: skip
        self._page_to = None
        self._variants.clear()

    def _key(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        return (
            tuple(
                (t.shape, t.stride(), t.dtype, t.device) if isinstance(t, torch.Tensor) else (type(t), t) for t in batch
            ),
            tuple((id(module), module.training) for module in self._model.modules()),
            tuple((p.shape, p.dtype, p.stride()) for p in self._model.parameters()),
            tuple(
                None if b is None else (b.shape, b.dtype, b.stride())
                for module in self._model.modules()
                for b in module._buffers.values()
            ),
            optimizers.structure(self._optimizer),
            settings(),
        )

    def _new(self, batch: tuple[Any, ...]) -> _Variant:
        count, of_tensors = self._options.count(batch), self._options.process_memory_bytes is None
        self._quickly = False
        if self._options.follow is not None:
            return self._following(batch, self._options.follow)
        if count == 1 and of_tensors:
            try:
                return self._whole(batch)
            except Infeasible as answer:
                raise with_line(answer, f"micro-batches: {self._micro.would_do(batch, answer)}") from None
        if count == 1 or (count == "auto" and self._options.keeps_all):
            return self._whole(batch)
        samples, _ = sample_items(batch)
        if isinstance(count, int):
            return self._in_parts(batch, min(count, samples))

        def attempt(number: int, quickly: bool) -> _Variant:
            return self._in_parts(batch, number, quickly=quickly)

        if of_tensors:
            return within(samples, attempt, count, functools.partial(self._micro.why_refused, batch))
        return within(samples, attempt, count)

    def _keep_all_bytes(self, graph: Graph, updates: Updates | None) -> int:
        updates = updates or keep_all(graph, early=not self._options.check_finite).updates
        costs = measure_costs(graph, use_cache=self._options.use_cache)
        return problem(graph, costs, updates).keep_all.peak_bytes

    def _in_parts(self, batch: tuple[Any, ...], count: int, *, quickly: bool = False) -> _Variant:
        self._quickly = quickly
        if count <= 1:
            return self._whole(batch)
        step, captured = self._micro.step(batch, count)
        return _Variant([step], captured)

    def _whole(self, batch: tuple[Any, ...]) -> _Variant:
        part = self._capture(batch)
        plan, costs = self._plan(part.graph, part.exact)
        return _Variant([self._compiled(part.graph, plan, part.captured.externals, costs)], part.captured)

    def _capture(self, batch: tuple[Any, ...], *, clips: bool = True) -> Part:
        """clips: the gradients of this batch alone, if that is asked for at all."""
        memory_format = self._memory_format(batch)

        def capture() -> Captured:
            return capture_with_externals(
                self._model,
                self._loss,
                self._optimizer,
                batch,
                unused=self._options.unused,
                memory_format=memory_format,
                clip_norm=self._options.clip_norm if clips else None,
                use_cache=self._options.use_cache,
            )

        captured = capture() if self._options.process_memory_bytes is None else captured_apart(capture)
        graph = captured.graph
        if memory_format == "channels_last" and self._options.memory_format == "auto" and norm.available():
            graph = fuse_batch_norm(graph)
            if trains_unfused(graph):
                self._channels_last = False
                return self._capture(batch, clips=clips)
        return Part(graph, captured, self._exact(memory_format))

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
            graph, plan, self._model, self._optimizer, externals, check_finite=self._options.check_finite, costs=costs,
            page_to=self._page_to, watch=watch, known=shared,
        )  # fmt: skip
        if known is not None:
            known[graph.key] = made.known
        return made

    def _following(self, batch: tuple[Any, ...], follow: Callable[[], object] | Literal["auto"]) -> _Variant:
        """Plans over the range of budgets, made ahead."""
        count = self._options.count(batch)
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
        return _Variant(steps, made[0].captured, ladder, watch)

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
        self._micro.exact_or_why(batch)
        made, _, _ = self._micro.graphs(batch, count)
        first = next(iter(made.accumulating.values()))
        early: Updates = "early"
        return self._range_of(
            [(made.ending, None), *((graph, early) for graph in made.accumulating.values())], kept_bytes(first)
        )

    def _range_of(self, graphs: Sequence[tuple[Graph, Updates | None]], kept: int) -> tuple[int, int]:
        options = self._options
        least, most = [], []
        for graph, updates in graphs:
            costs = measure_costs(graph, use_cache=options.use_cache, page_to=self._page_to)
            where = updates or keep_all(graph, early=not options.check_finite).updates
            task = problem(graph, costs, where)
            least.append(smallest_bytes(task, self._planner))
            most.append(task.keep_all.peak_bytes)
        return max(least) + kept, max(most) + kept

    @property
    def _planner(self) -> str:
        """Where the budget moves there are many plans to be made."""
        moves = self._options.follow is not None and self._options.planner == "auto"
        return "fast" if moves else self._options.planner

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
        options = self._options
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
            there = bool(self._optimizer.state)
            left = left_for_tensors(graph, options.process_memory_bytes, state_is_there=there) - beside_bytes
            memory_bytes = left if memory_bytes is None else min(left, memory_bytes)
            most_bytes = left - plain.persistent_bytes
        costs = measure_costs(graph, use_cache=options.use_cache, most_bytes=most_bytes, page_to=self._page_to)
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
        if self._options.memory_format != "auto":
            return self._options.memory_format
        # oneDNN runs convolutions of these types, and channels-last without reordering every activation.
        fast = any(
            isinstance(t, torch.Tensor)
            and t.dim() == 4
            and t.shape[1] > 1
            and t.dtype in _ONEDNN
            and t.device.type == "cpu"
            for t in batch
        )
        modules = list(self._model.modules())
        convolves = any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in modules)
        # PyTorch's channels-last kernel of batch norm sums in float32, the other in float64: errors a hundred times as
        # large. Ours does not.
        normalises = any(isinstance(m, nn.BatchNorm2d) for m in modules) and not norm.available()
        return "channels_last" if fast and convolves and not normalises and self._channels_last else "preserve"

    def _exact(self, memory_format: MemoryFormat) -> Exact:
        # A captured LSTM runs gate by gate; plain PyTorch has a fused kernel for these types that rounds otherwise.
        fused = any(isinstance(m, nn.LSTM) and next(m.parameters()).dtype in _ONEDNN for m in self._model.modules())
        fused |= any(group.get("fused") for group in self._optimizer.param_groups)
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

    of: Step
    budget_bytes: int
    watch: BudgetWatch
    known: dict[str, Known]

    def attempt(self, batch: tuple[Any, ...], count: int, quickly: bool) -> _Made:
        self.of._quickly = quickly
        plan = partial(self.of._plan, memory_bytes=self.budget_bytes)
        compiled = partial(self.of._compiled, watch=self.watch, known=self.known)
        if count > 1:
            micro = self.of._micro
            return _Made(*replace(micro, work=replace(micro.work, plan=plan, compiled=compiled)).step(batch, count))
        part = self.of._capture(batch)
        made, costs = plan(part.graph, part.exact)
        return _Made(compiled(part.graph, made, part.captured.externals, costs), part.captured)
