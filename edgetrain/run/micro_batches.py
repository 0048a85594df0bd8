"""A step that takes its batch in micro-batches: gradients are added up, and the last one updates.

In:  how to capture, plan and compile a slice of the batch (`Work`, from run/step.py), the number of micro-batches.
Out: `MicroStep`, which one calls as a `CompiledStep`: it trains in place, or, if anything raises in any of its
     micro-batches, changes nothing.

    copy what the forward passes will change; look at the labels
    for each slice of the batch:    accumulating(slice)      sums ← its part of the gradients
    the last slice:                 ending(slice)            sums, then updates
    → the loss, its mean over all samples

Where the budget moves, another plan may be followed from one slice to the next (`MicroStep.turn`).

Before that, once for each model and loss: is the loss a mean over samples (`require_exact`)?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from edgetrain import child
from edgetrain.costs.table import Costs
from edgetrain.errors import EdgetrainError, Infeasible, InternalError, UserError
from edgetrain.graph import mean_loss
from edgetrain.graph.capture.batches import changed, sames
from edgetrain.graph.capture.training import Captured
from edgetrain.graph.ir import Graph
from edgetrain.graph.mean_loss import sample_items
from edgetrain.graph.rewrite.accumulate import accumulating, accumulators, clipping, ending
from edgetrain.native import arena
from edgetrain.native.signals import HeldSignals, raised_by_handler
from edgetrain.native.surely import surely
from edgetrain.plan.budget import show_bytes
from edgetrain.plan.micro_batches import MicroGraphs, MicroPlan, exactness, infeasible, kept_bytes, sizes_of, together
from edgetrain.plan.plan import Exact, Plan, Updates
from edgetrain.run.adaptive import Fall
from edgetrain.run.compile import PART
from edgetrain.run.compiled import CompiledStep
from edgetrain.run.mean_test import why_no_mean
from edgetrain.run.memory import MemoryTrace
from edgetrain.run.refused import computed
from edgetrain.run.undo import Undo

Batch = tuple[Any, ...]
LAST = 0


@dataclass(frozen=True)
class Part:
    """A slice of a batch, captured."""

    graph: Graph
    captured: Captured
    exact: Exact


@dataclass(frozen=True)
class Planned:
    """costs: samples → those of such a micro-batch that is not the last; LAST → those of the last."""

    graphs: MicroGraphs
    plan: MicroPlan
    costs: Mapping[int, Costs | None]
    captured: Captured


@dataclass(frozen=True)
class Work:
    """What a step does for each slice.

    capture: a batch → its graph. plan: a graph, how exact it is, where its updates stand (None: as is best) and the
    bytes that the step holds beside → a plan, and the costs that it was made with. compiled: the rest.
    keep_all_bytes: a graph and where its updates stand → what it takes when all is kept.
    refuse: a graph, where its updates stand and the bytes beside → Infeasible, where that is known without a run.
    """

    model: nn.Module
    loss: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer
    capture: Callable[[Batch], Part]
    plan: Callable[[Graph, Exact, Updates | None, int], tuple[Plan, Costs | None]]
    compiled: Callable[[Graph, Plan, Mapping[str, torch.Tensor], Costs | None], CompiledStep]
    keep_all_bytes: Callable[[Graph, Updates | None], int]
    refuse: Callable[[Graph, Updates | None, int], None] = lambda graph, updates, beside: None
    allow_inexact: bool = False
    clip_norm: float | None = None
    apart: bool = False  # the process is short of memory: test the loss in a process of its own


@dataclass
class MicroBatches:
    """Makes the steps of one model, loss and optimizer, for batches of any size. They share accumulators."""

    work: Work
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    reasons: dict[Any, tuple[tuple[str, ...], Captured]] = field(default_factory=dict)  # what was found, and for what
    parts: dict[Any, Part] = field(default_factory=dict)

    def forget(self) -> None:
        """What was captured: the step is about to capture again."""
        self.parts.clear()
        self.reasons.clear()

    def forget_parts(self, max_reasons: int) -> None:
        """What was captured for one shape of batches, whose step is compiled now, and the oldest of the reasons."""
        self.parts.clear()
        while len(self.reasons) > max_reasons:
            self.reasons.pop(next(iter(self.reasons)))

    def graphs(self, batch: Batch, count: int) -> tuple[MicroGraphs, Captured, Exact]:
        """The batch cut into so many micro-batches, each size of them captured once."""
        samples, cut = sample_items(batch)
        sizes = sizes_of(samples, count)
        shapes = {position: tuple(batch[position].shape) for position in cut}
        part_of = {size: self.part(_first(batch, cut, size)) for size in dict.fromkeys(sizes)}
        last = part_of[sizes[-1]]
        if self.work.clip_norm is None:
            end = ending(last.graph, shapes)
        else:
            end, sizes = clipping(last.graph, shapes, self.work.clip_norm), (*sizes, 0)
        made = MicroGraphs(
            sizes, {size: accumulating(part_of[size].graph, shapes) for size in dict.fromkeys(sizes[:-1])}, end
        )
        return made, last.captured, last.exact

    def part(self, batch: Batch) -> Part:
        key = (
            tuple((t.shape, t.stride(), t.dtype) if isinstance(t, torch.Tensor) else t for t in batch), sames(batch)
        )  # fmt: skip
        if key not in self.parts or not self.parts[key].captured.watch.holds():
            self.parts[key] = self.work.capture(batch)
        return self.parts[key]

    def step(self, batch: Batch, count: int) -> tuple[MicroStep, Captured]:
        made = self.planned(batch, count)
        graphs, costs, plan = made.graphs, made.costs, made.plan
        externals = {**made.captured.externals, **self._sums(graphs.ending)}
        steps = {
            size: self.work.compiled(graphs.accumulating[size], one, externals, costs[size])
            for size, one in plan.accumulating
        }
        assert plan.ending is not None
        last = self.work.compiled(graphs.ending, plan.ending, externals, costs[LAST])
        kept = kept_bytes(graphs.ending) if graphs.sizes[-1] else kept_bytes(next(iter(graphs.accumulating.values())))
        for step in (*steps.values(), last):
            step.beside_bytes = kept
        return MicroStep(plan, steps, last, sample_items(batch)[1]), made.captured

    def planned(self, batch: Batch, count: int) -> Planned:
        """The batch in so many micro-batches, verified, captured and planned, and not compiled yet."""
        self.structure(batch)
        graphs, captured, exact = self.graphs(batch, count)
        kept = kept_bytes(next(iter(graphs.accumulating.values())))
        self.refuse(graphs, kept)
        reasons = self.exact_or_why(batch)  # runs the model many times
        found = self._plans(graphs, exactness(exact, reasons), kept)
        accumulates = {size: found[size][0] for size in graphs.accumulating}
        plan = together(graphs.sizes, accumulates, found[LAST][0], kept_bytes=kept)
        return Planned(graphs, plan, {size: costs for size, (_, costs) in found.items()}, captured)

    def refuse(self, graphs: MicroGraphs, kept: int) -> None:
        """Infeasible where the budget is known to be impossible before anything is run."""
        failed: Infeasible | None = None
        for size, graph in ((LAST, graphs.ending), *graphs.accumulating.items()):
            try:
                self.work.refuse(graph, "early" if size != LAST else None, kept)
            except Infeasible as answer:
                failed = answer if failed is None or answer.smallest_bytes > failed.smallest_bytes else failed
        if failed is not None:
            raise infeasible(failed, graphs.sizes, kept) from None

    def _plans(self, graphs: MicroGraphs, exact: Exact, kept: int) -> dict[int, tuple[Plan, Costs | None]]:
        if self.work.apart and self.work.optimizer.state:
            # What the process holds is looked at now, and state that is there is taken to be all of it there.
            for total in self._sums(graphs.ending).values():
                total.zero_()
        found: dict[int, tuple[Plan, Costs | None]] = {}
        failed: Infeasible | None = None
        for size, graph in ((LAST, graphs.ending), *graphs.accumulating.items()):
            updates: Updates | None = "early" if size != LAST else None  # nothing that a caller sees changes in those
            try:
                found[size] = self.work.plan(graph, exact, updates, kept)
            except Infeasible as answer:
                failed = answer if failed is None or answer.smallest_bytes > failed.smallest_bytes else failed
        if failed is not None:
            raise infeasible(failed, graphs.sizes, kept) from None
        return found

    def _sums(self, graph: Graph) -> dict[str, torch.Tensor]:
        """The accumulators, made once."""
        for name, (group, index) in accumulators(graph).items():
            parameter = self.work.optimizer.param_groups[group]["params"][index].detach()
            there = self.sums.get(name)
            if there is None or (there.shape, there.dtype, there.device) != (
                parameter.shape, parameter.dtype, parameter.device,
            ):  # fmt: skip
                self.sums[name] = torch.empty_like(parameter, memory_format=torch.preserve_format)
        return self.sums

    def would_do(self, batch: Batch, answer: Infeasible) -> str:
        """Would micro-batches keep a budget that the whole batch cannot? As a line of that answer."""
        try:
            return self._smallest(batch, answer, 'micro_batches="auto"')
        except UserError as error:
            return f"refused; {error.what}"

    def why_refused(self, batch: Batch, refused: UserError, answer: Infeasible) -> str:
        """Why there are none, and what they would do if they were allowed. As a line of the answer."""
        why = f"refused; {refused.what}"
        try:
            return f"{why}; {self._smallest(batch, answer)}"
        except UserError:
            return why

    def _smallest(self, batch: Batch, answer: Infeasible, *options: str) -> str:
        """What the smallest micro-batches take when they keep all: an upper bound of what they need."""
        samples, _ = sample_items(batch)
        if samples < 2:
            return "the batch has one sample"
        reasons = MicroBatches(replace(self.work, allow_inexact=True)).exact_or_why(batch)
        graphs, _, _ = self.graphs(batch, samples)
        (part,) = graphs.accumulating.values()
        peaks = (self.work.keep_all_bytes(graphs.ending, None), self.work.keep_all_bytes(part, "early"))
        peak = max(peaks) + kept_bytes(part)
        if peak >= answer.smallest_bytes:
            return f"one for each sample, without recomputing, would take {show_bytes(peak)}"
        asked = " and ".join((*options, *(("allow_inexact=True",) if reasons else ())))
        return f"{peak} bytes ({show_bytes(peak)}) would do with {asked}"

    def exact_or_why(self, batch: Batch) -> tuple[str, ...]:
        """What makes the numbers others than those of the whole batch, if that is allowed; a UserError if it is not,
        or if the loss is no mean over samples."""
        _, cut = sample_items(batch)
        rows = tuple(
            (i.shape[1:], i.dtype) if p in cut else i.shape if isinstance(i, torch.Tensor) else i
            for p, i in enumerate(batch)
        )
        key = (rows, sames(batch), tuple(module.training for module in self.work.model.modules()))
        if key not in self.reasons or not self.reasons[key][1].watch.holds():
            two, reasons = self.structure(batch)
            self.reasons[key] = self._require_mean(two.graph, reasons, batch, cut), two
        return self.reasons[key][0]

    def structure(self, batch: Batch) -> tuple[Captured, tuple[str, ...]]:
        """What is known without running anything: the step of two samples, and what makes other numbers in it. A
        UserError if the loss is no mean over samples by its structure, or if other numbers are not allowed."""
        _, cut = sample_items(batch)
        two, three = (self.part(_picked(batch, cut, n)).captured for n in (2, 3))
        mean_loss.require_mean(two.graph, three.graph)
        reasons = mean_loss.inexact(two.graph)
        self._require_allowed(reasons)
        return two, reasons

    def _require_mean(self, two: Graph, reasons: tuple[str, ...], batch: Batch, cut: Sequence[int]) -> tuple[str, ...]:
        norms = mean_loss.batch_norms(two)
        why: str | None = None
        if not reasons:
            try:
                why = self._tested(two, batch, cut, evaluate=False)
            except UserError as error:  # batch norm refuses a single sample
                if not norms:
                    raise
                why = str(error)
        if why is not None and norms:
            reasons = tuple(f"batch norm in training mode in {name}" for name in norms)
        self._require_allowed(reasons)
        if reasons:
            why = self._tested(two, batch, cut, evaluate=True)
        if why is not None:
            raise UserError(
                "the loss is not a mean over samples, so micro-batches would train otherwise than the whole batch",
                expected="loss and gradients of a batch that are the mean of those of its parts, weighted by samples",
                received=why,
                next_step="train without micro_batches, or write the loss as a mean over samples",
            )
        return reasons

    def _require_allowed(self, reasons: tuple[str, ...]) -> None:
        if reasons and not self.work.allow_inexact:
            raise UserError(
                "micro-batches would give other numbers than the whole batch: the step has " + "; ".join(reasons[:3])
                + ("; …" if len(reasons) > 3 else ""),
                expected="a step in which each sample is computed alone",
                next_step="train without micro_batches, put those modules in eval mode, or accept other numbers with "
                "allow_inexact=True",
            )  # fmt: skip

    def _tested(self, two: Graph, batch: Batch, cut: Sequence[int], *, evaluate: bool) -> str | None:
        """two: the step of two samples."""
        forward = [op for op in two.ops if op.phase == "forward"]
        made = {two.tensors[t].storage for op in forward for t in op.creates}
        written = {s for op in forward for s in op.writes}
        buffers = [(t, source.path) for t, source in two.sources.items() if source.sort == "buffer"]
        changed = {path for t, path in buffers if two.tensors[t].storage in written}
        sample_bytes = sum(two.storages[s].n_bytes for s in made) // 2

        def test() -> str | None:
            return why_no_mean(
                self.work.model, self.work.loss, batch, cut, evaluate=evaluate, sample_bytes=sample_bytes,
                changed=changed,
            )  # fmt: skip

        def alone() -> str | None:
            torch.set_num_threads(1)  # the threads of this process are not there in its copy
            return test()

        try:
            if self.work.apart:
                try:
                    found: str | None = child.forked(alone)
                    return found
                except InternalError:
                    pass  # what goes wrong goes wrong again here
            return test()
        except EdgetrainError:
            raise
        except Exception as error:
            if raised_by_handler(error):
                raise
            first = str(error).strip().splitlines()
            raise UserError(
                "the loss cannot be run on single samples of the batch, so it cannot be told whether it is a mean over "
                "them",
                received=f"{type(error).__name__}: {first[0] if first else ''}",
                next_step="train without micro_batches, or let model and loss take batches of any size",
            ) from error


def _first(batch: Batch, cut: Sequence[int], n: int) -> Batch:
    """The first samples of the batch."""
    return changed(batch, lambda p, item: item[:n] if p in cut else item)


def _picked(batch: Batch, cut: Sequence[int], n: int) -> Batch:
    """So many samples from the start of the batch, over again where there are fewer."""
    rows = torch.arange(n) % len(batch[cut[0]])
    return changed(batch, lambda p, item: item[rows.to(item.device)] if p in cut else item)


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
        now, total, most = self, None, 0
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
            most = max(most, step.arena.most_bytes if step.arena is not None else 0)
        assert total is not None
        self.most_bytes = most
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
        found = {number: step.trace_memory(*given) for number, (step, given) in traces.items()}
        return tuple(found[id(step)] for step, _, _ in parts)

    def _parts(self, batch: Batch) -> list[tuple[CompiledStep, Batch, float]]:
        """Each micro-batch: its step, its slice, which is a view of the batch, and its part of the samples."""
        found: list[tuple[CompiledStep, Batch, float]] = []
        sizes, start = self.plan.sizes, 0
        for number, size in enumerate(sizes):
            given = tuple(t[start : start + size] if size and p in self._cut else t for p, t in enumerate(batch))
            found.append((self._step_of(number), given, size / sum(sizes)))
            start += size
        return found

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
