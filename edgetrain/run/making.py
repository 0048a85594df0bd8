"""From a batch to the steps that train on batches of its shape.

In:  a model, a loss, an optimizer, the options, and a batch.
Out: a `Variant`: one step, whole or in micro-batches; or, where the budget moves, one for each plan that is made ahead
     (`moving.py`). Where no plan keeps the budget, the answer says what micro-batches would do. `Step` keeps the
     variants and calls them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from edgetrain import child
from edgetrain.errors import Infeasible, InternalError, UserError
from edgetrain.graph.capture.modes import Surroundings
from edgetrain.graph.capture.training import ONE_AT_A_TIME
from edgetrain.graph.mean_loss import sample_items
from edgetrain.native.surely import surely
from edgetrain.plan.micro_batches import with_line, within
from edgetrain.run.activity import doing
from edgetrain.run.capturing import Batch, Capturing
from edgetrain.run.graph_planner import GraphPlanner
from edgetrain.run.micro_batches import Accumulators, MicroBatches, PlansGraphs
from edgetrain.run.moving import following
from edgetrain.run.options import Options
from edgetrain.run.pipeline import Pipeline, Variant
from edgetrain.run.require_mean import MeanLoss

ADVICE_S = 1.0  # for what micro-batches would do, where that takes long
AT_ONCE_S = 1.3  # after capture, in which an impossible budget is refused, with that


class StepMaker:
    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        options: Options,
    ) -> None:
        self.model, self.loss, self.optimizer, self.options = model, loss, optimizer, options
        self._capturing = Capturing(model, loss, optimizer, options)
        apart = options.process_memory_bytes is not None
        self._mean = MeanLoss(self._capturing, options.allow_inexact, apart)
        self._sums = Accumulators(optimizer)

    def new(self, batch: Batch, earlier: Sequence[Variant] = ()) -> Variant:
        """What trains on batches like this one, within what was asked for. earlier: see `Pipeline`."""
        with ONE_AT_A_TIME:
            surroundings = Surroundings(self.model)

            def end() -> None:
                surroundings.put_back()
                self._capturing.slices.clear()
                self._mean.forget_oldest(self.options.max_shapes)

            return surely(lambda: self._making(batch, earlier).variant(), end)

    def _making(self, batch: Batch, earlier: Sequence[Variant]) -> _Making:
        # In micro-batches there are several plans, and nobody knows how many: each takes half of what is left.
        part = 1.0 if self.options.count(batch) == 1 else 0.5
        planner = GraphPlanner.of(self.model, self.optimizer, self.options, part_of_time=part)
        return _Making(Pipeline(self._capturing, self._mean, planner, self._sums, earlier), batch)

    def forget(self) -> None:
        """What was captured: the step is about to capture again."""
        self._capturing.slices.clear()
        self._mean.reasons.clear()

    def leave_channels_last(self) -> bool:
        """From now on images run as they come, where that is left to us; whether that is a change."""
        changes = self.options.memory_format == "auto" and self._capturing.channels_last
        self._capturing.channels_last = False if changes else self._capturing.channels_last
        return changes

    def stop_paging(self) -> None:
        """Nothing is paged any more: a transfer has failed."""
        self.options = replace(self.options, page_to=None)

    def in_micro_batches(self, planner: PlansGraphs, *, allow_inexact: bool) -> MicroBatches:
        """The same model, loss and optimizer in micro-batches that are planned otherwise: for another device, say."""
        return MicroBatches(self._capturing, MeanLoss(self._capturing, allow_inexact), planner)


@dataclass(frozen=True)
class _Making:
    """One call of `StepMaker.new`."""

    pipeline: Pipeline
    batch: Batch

    def variant(self) -> Variant:
        pipeline, batch, options = self.pipeline, self.batch, self.pipeline.planner.options
        count, of_tensors = options.count(batch), options.process_memory_bytes is None
        if options.follow is not None:
            return following(pipeline, batch, count)
        if count == 1 and of_tensors:
            try:
                return pipeline.variant(batch, 1)
            except Infeasible as answer:
                line = self._advice(partial(MicroBatches.would_do, batch=batch, answer=answer), answer)
                raise with_line(answer, f"micro-batches: {line}") from None
        if count == 1 or (count == "auto" and options.keeps_all):
            return pipeline.variant(batch, 1)
        samples, _ = sample_items(batch)
        if isinstance(count, int):
            return pipeline.variant(batch, min(count, samples))
        attempt = partial(pipeline.variant, batch)
        return within(samples, attempt, count, self._why_refused) if of_tensors else within(samples, attempt, count)

    def _why_refused(self, refused: UserError, answer: Infeasible) -> str:
        return self._advice(partial(MicroBatches.why_refused, batch=self.batch, refused=refused, answer=answer), answer)

    def _advice(self, work: Callable[[MicroBatches], str], answer: Infeasible) -> str:
        """What `work` says of micro-batches; where that may take long, within `ADVICE_S`, in a process of its own."""
        doing("looking at micro-batches")
        pipeline, planner = self.pipeline, self.pipeline.planner
        if not pipeline.capturing.slow:
            return work(pipeline.micro)

        def alone() -> str:
            torch.set_num_threads(1)  # the threads of this process are not there in its copy
            return work(replace(pipeline, planner=planner.unmeasured()).micro)

        impossible = (planner.options.memory_bytes or 0) < answer.bound_bytes  # what is proven is said at once
        limit_s = max(0.0, AT_ONCE_S - (time.monotonic() - pipeline.capturing.ended_at)) if impossible else ADVICE_S
        try:
            line: str = child.forked(alone, most_bytes=planner.left_bytes(), time_limit_s=limit_s)
            return line
        except InternalError:
            return 'not looked at, for want of time or memory; micro_batches="auto" does'
