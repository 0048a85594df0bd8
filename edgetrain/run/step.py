"""A training step that one calls: `loss = step(x, y)` trains the model in place.

In:  a model, a loss, an optimizer: ordinary PyTorch objects, and they stay so.
Out: the loss as a detached 0-d tensor. After a call, parameters, buffers and optimizer state hold what plain PyTorch
     would hold. A call that raises has changed nothing; one that is interrupted (Ctrl-C) has changed nothing or all,
     and `Step.count` tells which.

What a capture read is compared before each call (graph/capture/watch.py): the layout of the batch, attributes and
classes of the modules, variables of the loss, the parameters of the optimizer. When something has changed the step is
captured again; the last, smaller batch of an epoch is such a case. What no look at Python's objects can see is
met by a net: after 2, 4, 8, … steps the step is captured again over fake tensors, and must be the same.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from edgetrain.arguments import checked
from edgetrain.errors import UserError
from edgetrain.graph.capture import optimizers
from edgetrain.graph.capture.batches import check_model, sames
from edgetrain.graph.capture.modes import Surroundings, evaluating
from edgetrain.graph.capture.settings import settings
from edgetrain.graph.capture.training import Captured, Unused, check_example
from edgetrain.graph.ir import Graph
from edgetrain.native.malloc import keep_freed_memory
from edgetrain.native.onednn import limit_kernels
from edgetrain.native.surely import surely
from edgetrain.plan.budget import show_bytes
from edgetrain.plan.plan import Plan
from edgetrain.run.adaptive import BudgetWatch, Switch
from edgetrain.run.compiled import CompiledStep
from edgetrain.run.habits import stepped
from edgetrain.run.layouts import LayoutMismatch
from edgetrain.run.making import StepMaker
from edgetrain.run.memory import MemoryTrace
from edgetrain.run.micro_batches import MicroBatches, PlansGraphs
from edgetrain.run.micro_step import MicroStep
from edgetrain.run.options import MAX_SHAPES, MAX_SHAPES_BYTES, Amount, Options, StepFormat
from edgetrain.run.pipeline import Variant
from edgetrain.run.recapture import Recapture
from edgetrain.run.shapes import Shapes

T = TypeVar("T")
MAX_STATES = 4  # of a model, such as training and evaluation mode, for each of these shapes
MAX_CAPTURES = 200  # of one step, each with a layout more that was learnt


class PagingWarning(UserWarning):
    """A transfer to storage or back failed. The step is right all the same."""


class BudgetWarning(UserWarning):
    """The budget fell in the middle of a step, and could not be followed. The step is right all the same."""


@checked("model", "loss", "optimizer", "example", "process_memory")
def prepare(
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    example: Sequence[Any],
    *,
    memory: Amount | Callable[[], Amount] | None = None,
    process_memory: Amount | None = None,
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
    max_shapes: int = MAX_SHAPES,
    max_shapes_bytes: Amount = MAX_SHAPES_BYTES,
) -> Step:
    """Capture, plan and compile a training step for batches like `example`.

    memory: bounds every byte that the step's tensors take: parameters, buffers, optimizer state, inputs, activations,
    gradients, and the workspace of kernels. A number of bytes, or "300MB". What the model holds beside, untouched by
    the step, is not counted. A budget may move: a function that gives the budget of the moment, or "auto", which
    follows the memory that is available. Plans are then made ahead for several budgets; a change is followed at the
    next step, and a fall in the middle of one by planning the rest of it anew. `step.switches` tells of each.
    process_memory: bounds the resident memory of the process, from now on.
    planner: a name; `edgetrain plan --help` lists them, with a line of help for each. An impossible budget is refused
    before ops or loss are run. plan_time_s: for all plans of this call together, without capturing and measuring.
    memory_format: "auto" runs image batches channels-last where that is faster and as exact (convolutions on a CPU);
    the numbers then differ from plain PyTorch's by rounding. "preserve" takes batches as they come and is bitwise.
    check_finite: raise a UserError, and leave the model as it was, when the loss or a gradient is not finite.
    clip_norm: scale the gradients down so that their norm, all of them together, is at most this.
    unused: "freeze" accepts parameters of the optimizer that the loss does not reach.
    page_to: a folder on storage of this device. Tensors may go there and come back where that takes less time than to
    recompute them; where the storage is too slow for it nothing is paged, and the plan says so. A transfer that fails
    costs no step: what is lost is recomputed, a `PagingWarning` says why, and later steps do without.
    keep_memory: let the process keep what a step frees for the next one, which saves up to a third of the time where
    malloc is glibc's (see native/malloc.py); False leaves malloc as it is.
    micro_batches: take each batch in so many parts, add their gradients up and update once; "auto": as many as take the
    least time within the budget. By default the whole batch, but the planner "sage" takes the largest micro-batches
    that fit where evicting is not enough. The loss must be a mean over samples, which is verified. The numbers are then
    those of the whole batch but for rounding; where batch norm or dropout make them others, that is refused, unless
    allow_inexact=True.
    max_shapes: how many shapes of batches to keep what was captured, planned and compiled for; each other one is
    captured anew when it comes again. max_shapes_bytes: what all of that may take together, beside the tensors of a
    step; a number of bytes, or "64MB". The shape that was not used for longest is dropped first, the last one never.
    """
    check_model(model, loss)
    options = Options(
        memory, process_memory, planner, unused, memory_format, check_finite, clip_norm, keep_memory, use_cache,
        plan_time_s, page_to, micro_batches, allow_inexact, max_shapes, max_shapes_bytes,
    )  # fmt: skip
    limit_kernels()
    step = Step(StepMaker(model, loss, optimizer, options))
    step.of_shape(*check_example(example))
    return step


class Step:
    """What `et.prepare` returns. Call it with a batch; see the module's docstring."""

    def __init__(self, maker: StepMaker) -> None:
        self._model, self._loss, self._optimizer = maker.model, maker.loss, maker.optimizer
        self._maker, self._options = maker, maker.options
        # By what is known of a batch before anything is captured, and by the number of the capture.
        self._variants = Shapes(maker.options.max_shapes, maker.options.kept_shapes_bytes)
        self._captures = 0
        self._recapture = Recapture()
        self._captured: Captured | None = None  # of the batch last trained
        self._last: CompiledStep | MicroStep | None = None
        self._began: tuple[int, CompiledStep | MicroStep, int] | None = None  # see `count`
        self.switches: list[Switch] = []  # of a budget that moves
        self._watch: BudgetWatch | None = None

    def __call__(self, *batch: Any) -> torch.Tensor:
        return self._step(batch, lambda step: step(*batch))

    def timed(self, mark: Callable[[int], None], *batch: Any) -> torch.Tensor:
        """The same step; it tells `mark` when each op begins and ends (measure/timeline.py reads it)."""
        return self._step(batch, lambda step: step.timed(mark, *batch))

    def _step(self, batch: tuple[Any, ...], run: Callable[[CompiledStep | MicroStep], torch.Tensor]) -> torch.Tensor:
        def counted(step: CompiledStep | MicroStep) -> torch.Tensor:
            assert self._captured is not None
            count = self.count
            self._recapture.require_same(self._captured, count)
            self._began = count, step, step.completed
            result = run(step)
            for module, key, tensor in self._captured.computed:
                vars(module)[key] = tensor
            return result

        result = self._try(batch, counted)
        self._note_falls()
        stepped(self._optimizer)
        if self._options.keep_memory and not self.used.takes_beside:
            keep_freed_memory()
        return result

    @property
    def count(self) -> int:
        """How many steps have happened. After one that was interrupted it tells whether that one has."""
        if self._began is None:
            return 0
        before, step, completed = self._began
        return before + step.completed - completed

    def evaluate(self, *batch: Any) -> torch.Tensor:
        """The loss in evaluation mode, as plain PyTorch computes it; nothing is changed."""

        def work() -> torch.Tensor:
            with evaluating(self._model), torch.no_grad():
                return self._loss(self._model, *batch)

        return surely(work, Surroundings(self._model, random=False).put_back)

    def gradients(self, *batch: Any) -> dict[str, torch.Tensor]:
        """The gradient of each trained parameter, by name; nothing is changed."""
        return self._try(batch, lambda step: step.gradients(*batch))

    def trace_memory(self, *batch: Any) -> MemoryTrace:
        """Run one step under observation and take it back: the bytes held at each op, what is alive at the peak."""
        return max(self.trace_micro_batches(*batch), key=lambda trace: trace.peak_with_workspace_bytes)

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

    def in_micro_batches(self, planner: PlansGraphs, *, allow_inexact: bool) -> MicroBatches:
        """The same model, loss and optimizer in micro-batches that are planned otherwise: for another device, say."""
        return self._maker.in_micro_batches(planner, allow_inexact=allow_inexact)

    @property
    def recapturing_s(self) -> float:
        """What capturing the step again now and then, to compare it, has taken of the time so far."""
        return self._recapture.spent_s

    @contextmanager
    def not_captured_again(self) -> Iterator[None]:
        """Within the block steps are not captured again now and then, which takes as long as several small ones: for
        what measures a step."""
        before, self._recapture.paused = self._recapture.paused, True
        try:
            yield
        finally:
            self._recapture.paused = before

    @property
    def grad_norm(self) -> float | None:
        """The norm of the gradients of the last step, all of them together: before they were clipped, with
        `clip_norm`; with `check_finite` too, but in micro-batches. None where no step has computed it."""
        return self.used.grad_norm if self.count else None

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
        step = self.of_shape(*batch)
        if not isinstance(step, CompiledStep):
            raise UserError("this step takes its batches in micro-batches", next_step="call of_shape")
        return step

    def of_shape(self, *batch: Any) -> CompiledStep | MicroStep:
        """The step for batches of this shape; captured, planned and compiled now if it is new."""
        key = self._key(check_example(batch))
        last = self._variants.last
        if last is not None and last[0][0] == key and last[1].captured.watch.holds():
            variant = last[1]
        else:
            variant = self._seen_before_or_new(key, batch)
        self._last, self._captured = self._chosen(variant), variant.captured
        return self._last

    def _seen_before_or_new(self, key: tuple[Any, ...], batch: tuple[Any, ...]) -> Variant:
        """The one whose objects are what they are now; or the batch captured, planned and compiled."""
        known = {at: variant for at, variant in self._variants.items() if at[0] == key}
        at = next((at for at, variant in reversed(known.items()) if variant.captured.watch.holds()), None)
        if at is None:
            variant = self._maker.new(batch, list(known.values()))
            same = [at for at, earlier in known.items() if earlier.captured.signature == variant.captured.signature]
            for old in same or list(known)[: 1 - MAX_STATES]:
                self._variants.forget(old)
            at = (key, self._captures)
            self._captures += 1
        else:
            variant = known[at]
        known.clear()  # what is dropped now is freed
        self._variants.keep(at, variant)
        return variant

    def _chosen(self, variant: Variant) -> CompiledStep | MicroStep:
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

    def _turned(self, variant: Variant, now: MicroStep) -> MicroStep:
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

    def _switch(self, variant: Variant, chosen: int, budget: int, begin: float, *, in_step: bool) -> None:
        step, before = variant.steps[chosen], variant.steps[variant.used]
        step.take_over(before)
        middle = time.perf_counter()
        step.shrink()
        variant.used = chosen
        peak_bytes, end = step.plan.peak_bytes, time.perf_counter()
        self.switches.append(
            Switch(self.count, budget, peak_bytes, in_step, middle - begin, max(0, peak_bytes - budget), end - middle)
        )

    def _note_falls(self) -> None:
        for fall in [] if self._last is None else self._last.falls:
            self.switches.append(fall.switch(self.count - 1))
            if fall.failed is not None:
                warnings.warn(
                    f"the budget fell to {show_bytes(fall.budget_bytes)} in the middle of a step, and the rest of it "
                    f"could not be planned anew ({fall.failed}): it went on with {show_bytes(fall.needs_bytes)}. The "
                    "step is right; the next one follows the budget.",
                    BudgetWarning, stacklevel=3,
                )  # fmt: skip

    def _try(self, batch: tuple[Any, ...], work: Callable[[CompiledStep | MicroStep], T]) -> T:
        """Where kernels lay results out otherwise than predicted, capture again with what was learnt from it."""
        captures = 0
        while True:
            captures += 1
            try:
                step = self.of_shape(*batch)
                result = work(step)
                if step.page_fault is not None:
                    self._page_no_more(step.page_fault)
                return result
            except LayoutMismatch as mismatch:
                lost = not mismatch.learnt or captures == MAX_CAPTURES
                if lost and not self._maker.leave_channels_last():  # plain layouts are predicted better
                    raise
            self._variants.clear()
            self._maker.forget()

    def _page_no_more(self, why: str) -> None:
        warnings.warn(
            f"a tensor that was paged to {self._maker.options.page_to} did not come back as it was: {why}. "
            "What was lost was recomputed, so the step is right; the next ones do without paging.",
            PagingWarning, stacklevel=4,
        )  # fmt: skip
        self._maker.stop_paging()
        self._variants.clear()

    def _key(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        return (
            tuple(
                (type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
                if isinstance(t, torch.Tensor)
                else (type(t), repr(t))
                for t in batch
            ),
            sames(batch),
            optimizers.structure(self._optimizer),
            settings(),
        )
