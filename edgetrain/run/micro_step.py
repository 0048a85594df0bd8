"""A step that takes its batch in micro-batches: gradients are added up, and the last one updates.

In:  a compiled step for each size of slice, and for the last slice.
Out: `MicroStep`, which one calls as a `CompiledStep`: it trains in place, or, if anything raises in any of its
     micro-batches, changes nothing.

    copy what the forward passes will change; look at the labels
    for each slice of the batch:    accumulating(slice)      sums ← its part of the gradients
    the last slice:                 ending(slice)            sums, then updates
    → the loss, its mean over all samples

Where the budget moves, another plan may be followed from one slice to the next (`MicroStep.turn`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from edgetrain.errors import UserError
from edgetrain.graph import mean_loss
from edgetrain.graph.ir import Graph
from edgetrain.graph.rewrite.accumulate import accumulators
from edgetrain.native import arena
from edgetrain.native.signals import HeldSignals
from edgetrain.native.surely import surely
from edgetrain.plan.micro_batches import MicroPlan
from edgetrain.run.adaptive import Fall
from edgetrain.run.compile import PART
from edgetrain.run.compiled import CompiledStep
from edgetrain.run.memory import MemoryTrace
from edgetrain.run.refused import computed
from edgetrain.run.undo import Undo

Batch = tuple[Any, ...]


class MicroStep:
    """One batch shape in micro-batches. What it offers is what `CompiledStep` does."""

    def __init__(
        self, plan: MicroPlan, accumulating: Mapping[int, CompiledStep], last: CompiledStep, cut: tuple[int, ...]
    ) -> None:
        self.plan = plan
        self._accumulating, self._last, self._cut = accumulating, last, cut
        self._checks = {id(step): mean_loss.checks(step.graph) for step in (*accumulating.values(), last)}
        self._first = next(iter(accumulating.values()))
        self._random = any(op.random for op in self._first.graph.ops)
        self.takes_beside = any(step.takes_beside for step in (*accumulating.values(), last))
        self.falls: list[Fall] = []  # of the budget, in the last step
        self.turn: Callable[[MicroStep], MicroStep] | None = None  # who is asked for another plan between micro-batches
        self.most_bytes: int | None = None  # of the arena, over all micro-batches of the last step
        self._ends: tuple[int, CompiledStep, int] = (0, last, last.completed)  # see `completed`

    @property
    def graph(self) -> Graph:
        """That of the last micro-batch."""
        return self._last.graph

    @property
    def source(self) -> str:
        """The micro-batches as Python text: one that accumulates, and the last."""
        return "\n".join(step.source for step in self._steps)

    @property
    def arena(self) -> arena.Recording | None:
        """What the last micro-batch asked of the arena."""
        return self._last.arena

    @property
    def page_fault(self) -> str | None:
        """Why the last transfer failed that did, in any micro-batch."""
        return next((step.page_fault for step in self._steps if step.page_fault is not None), None)

    def __call__(self, *batch: Any) -> torch.Tensor:
        return self._step(batch, lambda step, given: step(*given))

    def timed(self, mark: Callable[[int], None], *batch: Any) -> torch.Tensor:
        """The same step, which tells `mark` of each op, and of PART before each micro-batch."""

        def run(step: CompiledStep, given: Batch) -> torch.Tensor:
            mark(PART)
            return step.timed(mark, *given)

        return self._step(batch, run)

    @property
    def parts(self) -> tuple[CompiledStep, ...]:
        """The step of each micro-batch, in order."""
        return tuple(self._step_of(number) for number in range(len(self.plan.sizes)))

    @property
    def completed(self) -> int:
        """How often the step was run to its end: so often as what ended it was."""
        before, step, step_before = self._ends
        return before + step.completed - step_before

    def _step(self, batch: Batch, run: Callable[[CompiledStep, Batch], torch.Tensor]) -> torch.Tensor:
        parts = self._parts(batch)
        for step, given, _ in parts:
            self._look(step, given)
        before, undo, interrupt = self.completed, Undo(random=self._random), HeldSignals()

        def end() -> None:
            # Unless the step is through, and what came is a signal that waited for it.
            if self.completed == before:
                interrupt.start()  # what comes while it is taken back waits
                undo.take_back()
            interrupt.release()

        return surely(lambda: self._in_turn(parts, run, undo), end)

    def _in_turn(
        self,
        parts: list[tuple[CompiledStep, Batch, float]],
        run: Callable[[CompiledStep, Batch], torch.Tensor],
        undo: Undo,
    ) -> torch.Tensor:
        self._note_changed(undo)
        self.falls = []
        now, total, max_bytes = self, None, 0
        for number, (step, given, weight) in enumerate(parts):
            if number and self.turn is not None:
                now = self.turn(now)
                step = now._step_of(number)
            if number == len(parts) - 1:
                self._ends = self.completed, step, step.completed
            step.weight, step.starts = weight, number == 0
            value = run(step, given)
            self.falls += step.falls
            if weight:
                total = value * weight if total is None else total + value * weight
            max_bytes = max(max_bytes, step.arena.most_bytes if step.arena is not None else 0)
        assert total is not None
        self.most_bytes = max_bytes
        return total

    @property
    def grad_norm(self) -> float | None:
        """Of the gradients of the whole batch, where the step clips them."""
        return self._last.grad_norm if len(self._last.graph.outputs) > 1 else None

    def like(self, other: MicroStep) -> bool:
        """The same micro-batches, whatever the plans."""
        return self.plan.sizes == other.plan.sizes

    def get_ready(self) -> None:
        """For a change in the middle of a step: what can be made ahead is made now."""
        for step in self._steps:
            step.get_ready()

    def take_over(self, other: object) -> None:
        """From the step that was used before: what was rehearsed there, of the same micro-batches, need not be here."""
        if isinstance(other, MicroStep) and self.like(other):
            for step, before in zip(self._steps, other._steps, strict=True):
                step.take_over(before)

    @property
    def height_bytes(self) -> int:
        return max(step.height_bytes for step in self._steps)

    def shrink(self) -> None:
        """Hand memory of the arena back that these plans do not need."""
        max(self._steps, key=lambda step: step.height_bytes).shrink()

    @property
    def _steps(self) -> tuple[CompiledStep, ...]:
        return *self._accumulating.values(), self._last

    def gradients(self, *batch: Any) -> dict[str, torch.Tensor]:
        """The gradient of each trained parameter over the whole batch, by name; nothing is changed."""
        total: dict[str, torch.Tensor] = {}
        for step, given, weight in self._parts(batch):
            self._look(step, given)
            if not weight:  # what clips: it reads the sums
                for name, at in self._sums.items():
                    step.bound()[at].copy_(total[name])
            for name, gradient in step.gradients(*given).items():
                if not weight or name not in total:
                    total[name] = gradient * (weight or 1)
                else:
                    total[name].add_(gradient, alpha=weight)
        return total

    @property
    def _sums(self) -> dict[str, int]:
        """The name of each parameter → its accumulator, in the graph that ends the step."""
        graph = self._last.graph
        at = {source.path: t for t, source in graph.sources.items()}
        names = {graph.sources[p].path: graph.tensors[p].name for p in graph.gradients}
        return {names[f"{g}.{i}"]: at[path] for path, (g, i) in accumulators(graph).items()}

    def trace_memory(self, *batch: Any) -> MemoryTrace:
        """That of the micro-batch that holds most; all is taken back."""
        return max(self.trace_parts(*batch), key=lambda trace: trace.peak_with_workspace_bytes)

    def trace_parts(self, *batch: Any) -> tuple[MemoryTrace, ...]:
        """That of each micro-batch in turn; those that are alike are traced once."""
        parts = self._parts(batch)
        traces = {id(step): (step, given) for step, given, _ in parts}
        traced = {number: step.trace_memory(*given) for number, (step, given) in traces.items()}
        return tuple(traced[id(step)] for step, _, _ in parts)

    def _parts(self, batch: Batch) -> list[tuple[CompiledStep, Batch, float]]:
        """Each micro-batch: its step, its slice, which is a view of the batch, and its part of the samples."""
        parts: list[tuple[CompiledStep, Batch, float]] = []
        sizes, start = self.plan.sizes, 0
        for number, size in enumerate(sizes):
            given = tuple(t[start : start + size] if size and p in self._cut else t for p, t in enumerate(batch))
            parts.append((self._step_of(number), given, size / sum(sizes)))
            start += size
        return parts

    def _step_of(self, number: int) -> CompiledStep:
        sizes = self.plan.sizes
        return self._last if number == len(sizes) - 1 else self._accumulating[sizes[number]]

    def _note_changed(self, undo: Undo) -> None:
        """Copies of what the forward passes change, kept until the last micro-batch is through."""
        graph = self._first.graph
        changed = {s for op in graph.ops if op.phase == "forward" for s in op.writes}
        for t, tensor in self._first.bound().items():
            if graph.tensors[t].storage in changed:
                undo.note(tensor)

    def _look(self, step: CompiledStep, given: Batch) -> None:
        """No label is ignored and no sample is masked: then the loss is a mean over all samples."""
        inputs = {t: given[int(step.graph.sources[t].path)] for t in step.graph.inputs}
        for check in self._checks[id(step)]:
            value = computed(step.graph, check.ops, check.tensor, inputs)
            wrong = value == check.ignored if check.ignored is not None else value != 1
            if bool(wrong.any()):
                what = f"labels that are ignored ({check.ignored})" if check.ignored is not None else "masked samples"
                raise UserError(
                    f"the batch has {what}: the loss is then no mean over all samples, and micro-batches would weigh "
                    "them wrongly; the model is as it was before",
                    received=f"{int(wrong.sum())} of {wrong.numel()} in a micro-batch",
                    next_step="leave such samples out of the batch, or train without micro_batches",
                )
