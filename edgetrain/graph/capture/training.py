"""From an ordinary nn.Module to the graph of one training step.

In:  a model, `loss(model, *batch)`, an optimizer and one example batch.
Out: a `Graph`: forward, backward and update, in the order in which PyTorch would run them. The model, the optimizer and
     the batch are left as they are; no kernel runs, so capture takes no activation memory.

What is trained is what the optimizer holds and what needs a gradient. Everything else that the loss reads is constant
to the step: read anew each time it runs, never changed (buffers that the model itself changes, such as the running
statistics of a batch norm, excepted).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from edgetrain import child, ranges
from edgetrain.arguments import checked
from edgetrain.errors import InternalError, UserError
from edgetrain.graph.capture import batches, optimizers, predicted_layouts
from edgetrain.graph.capture.computed import Computed, reach_with_computed
from edgetrain.graph.capture.counters import unwatch_values
from edgetrain.graph.capture.fake_tensors import without_their_cache
from edgetrain.graph.capture.modes import Surroundings, evaluating
from edgetrain.graph.capture.objects import is_a
from edgetrain.graph.capture.observe import Observed, stop_observing
from edgetrain.graph.capture.reach import BUFFER_NAMES, SHELVES, Reach, reach_of
from edgetrain.graph.capture.recorded_step import RecordedStep
from edgetrain.graph.capture.recording import Like
from edgetrain.graph.capture.recording_signals import RecordingSignals
from edgetrain.graph.capture.restore import Before
from edgetrain.graph.capture.settings import function_modes, require_trainable
from edgetrain.graph.capture.signature import Signature, first_difference
from edgetrain.graph.capture.steady import record_twice
from edgetrain.graph.capture.watch import Watch
from edgetrain.graph.ir import Graph, from_json, to_json
from edgetrain.native.surely import surely

Loss = Callable[..., torch.Tensor]
MemoryFormat = Literal["preserve", "channels_last"]
Unused = Literal["error", "freeze"]

T = TypeVar("T")
ONE_AT_A_TIME = threading.RLock()  # the hooks of all modules, and the generators, are those of the process


@dataclass(frozen=True)
class Captured:
    """A graph, and what tells whether it still is the graph of its model.

    externals: the live tensors that it refers to and that neither the model nor the optimizer holds.
    watch:     what was read on the way.
    computed:  what hooks compute before a forward pass, and the step writes.
    difference: captures the same step once more; the first op that differs, or None.
    layouts:   those of results that differ from what fake tensors say, as far as they were known.
    took_s:    how long both recordings took.
    """

    graph: Graph
    externals: Mapping[str, torch.Tensor]
    watch: Watch
    signature: Signature
    difference: Callable[[], str | None]
    layouts: object
    took_s: float
    computed: tuple[Computed, ...] = ()


@checked("model", "loss", "optimizer", "example")
def capture(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    example: Sequence[Any],
    *,
    unused: Unused = "error",
    memory_format: MemoryFormat = "preserve",
    clip_norm: float | None = None,
    use_cache: bool = True,
) -> Graph:
    """The graph of one training step: forward, backward, update.

    unused: what to do with a parameter of the optimizer that the loss does not reach: "error", or "freeze" to leave
    it as it is (they are listed in `graph.unused`).
    memory_format: "channels_last" takes image batches in that
    layout; the numbers then differ from those of the default layout by rounding.
    clip_norm: scale the gradients down so that their norm, all of them taken together, is at most this, as
    torch.nn.utils.clip_grad_norm_ does; all gradients live until the norm is known.
    use_cache: without effect: graphs are not kept on disk any more, for no hash covers all that a capture reads.
    """
    return capture_with_externals(
        model, loss, optimizer, example, unused=unused, memory_format=memory_format, clip_norm=clip_norm,
        leaves_computed=False,
    ).graph  # fmt: skip


@checked("example")
def capture_inference(model: nn.Module, example: Sequence[Any], *, use_cache: bool = True) -> Graph:
    """The graph of a prediction, in eval mode. The model's training flags are put back. use_cache: as in `capture`."""
    batches.check_parameters(model)
    example = check_example(example)
    return surely(lambda: _captured_inference(model, example), Surroundings(model).put_back)


def _captured_inference(model: nn.Module, example: tuple[Any, ...]) -> Graph:
    with ONE_AT_A_TIME, evaluating(model):
        reach = reach_of((model, "model"))
        before = Before(reach)

        def work(signals: RecordingSignals) -> Graph:
            def make() -> RecordedStep:
                return RecordedStep(model, reach, example, False, before.memory, signals)

            step = _recorded(model, make, RecordedStep.record_inference, [before], ((model, "model"),))
            with _released(step):
                return step.inference()

        return _with_signals_held(work)


def capture_with_externals(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    example: Sequence[Any],
    *,
    unused: Unused = "error",
    memory_format: MemoryFormat = "preserve",
    clip_norm: float | None = None,
    apart: bool = False,
    leaves_computed: bool = True,
) -> Captured:
    """`capture`, and beside the graph what `compile` needs to bind tensors that only the loss knows.

    apart: in a process of its own, so that what tracing leaves in memory goes with it.
    leaves_computed: the step writes what hooks compute before a forward pass (`Captured.computed`).
    """
    require_trainable()
    batches.check_model(model, loss)
    likes = batches.changed(
        check_example(example), lambda _, item: Like.of(item) if isinstance(item, torch.Tensor) else item
    )
    trained = optimizers.trained(optimizer)
    if clip_norm is not None and clip_norm not in ranges.NORM:
        raise UserError(
            "gradients cannot be clipped to that norm", expected=str(ranges.NORM), received=ranges.shown(clip_norm)
        )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    channels_last, freeze_unused = memory_format == "channels_last", unused == "freeze"
    task = _Task(model, loss, optimizer, likes, held, trained, channels_last, freeze_unused, clip_norm, leaves_computed)
    begin_s = time.perf_counter()
    result = _result_apart(task) if apart else task.result()
    took_s = time.perf_counter() - begin_s

    def difference() -> str | None:
        return first_difference(result.signature, task.signature_after(result))

    def difference_apart() -> str | None:
        first: str | None = _in_a_process(difference)
        return first

    written = {id(tensor) for tensor in result.externals.values()}
    left = {path: computed for path, computed in task.computed.items() if id(computed[2]) in written}
    watch = Watch(task.roots, result.seen, optimizer, ignored=frozenset(left))
    look = difference_apart if apart else difference
    return Captured(
        result.graph,
        result.externals,
        watch,
        result.signature,
        look,
        predicted_layouts.learned(),
        took_s,
        tuple(left.values()),
    )


@dataclass(frozen=True)
class _Result:
    """What comes out of capturing, in this process or another."""

    graph: Graph
    seen: Observed
    signature: Signature
    externals: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Task:
    """A training step to be captured, and captured again. It does not hold the batch, only what the batch is like."""

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    example: tuple[Any, ...]
    held: list[nn.Parameter]  # by the optimizer
    trained: list[optimizers.Trained]  # of those
    channels_last: bool
    freeze_unused: bool
    clip_norm: float | None
    leaves_computed: bool
    computed: dict[str, Computed] = field(default_factory=dict)  # of all captures, by path

    @property
    def roots(self) -> tuple[tuple[Any, str], ...]:
        return (self.model, "model"), (self.loss, "loss")

    def result(self) -> _Result:
        def work(signals: RecordingSignals) -> _Result:
            with _released(self._record(signals, 2)) as step:
                graph = step.training(
                    self.optimizer, self.trained, freeze_unused=self.freeze_unused, clip_norm=self.clip_norm
                )
                return _Result(graph, step.seen, step.signature, step.externals)

        return _with_signals_held(work)

    def signature_after(self, result: _Result) -> Signature:
        """That of one more recording."""

        def work(signals: RecordingSignals) -> Signature:
            with _released(self._record(signals, 1, result)) as step:
                return step.signature

        return _with_signals_held(work)

    def _record(self, signals: RecordingSignals, times: int, like: _Result | None = None) -> RecordedStep:
        with ONE_AT_A_TIME:
            modes = [(mode, f"mode.{number}") for number, mode in enumerate(function_modes())]
            of_optimizer = (self.optimizer.param_groups, "param_groups"), (self.optimizer.state, "state")
            reach, computed = reach_with_computed(*self.roots, *modes)
            self.computed.update(computed)
            before = [Before(reach), Before(reach_of(*of_optimizer))]

            def make() -> RecordedStep:
                step = RecordedStep(self.model, reach, self.example, self.channels_last, before[0].memory, signals)
                step.computed = list(computed.values()) if self.leaves_computed else []
                if like is not None:
                    step.expect(like.signature, like.seen)
                return step

            def record_one(step: RecordedStep) -> None:
                step.record_training(self.loss, self.trained)
                step.refuse_thawed(self.held, self.trained)

            return _recorded(self.model, make, record_one, before, (*self.roots, *modes, *of_optimizer), times)


@contextmanager
def _released(step: RecordedStep) -> Iterator[RecordedStep]:
    """Holds no weak reference to a live tensor any more once the block ends."""
    try:
        yield step
    finally:
        step.recorder.release_tensors()


def check_example(example: object) -> tuple[Any, ...]:
    """The batch as a tuple of tensors and plain constants."""
    if isinstance(example, torch.Tensor) or not isinstance(example, tuple | list):
        raise UserError(
            "an example must be one batch as a tuple",
            expected="a tuple of tensors, as in example=(x, y)",
            received=type(example).__name__,
            next_step="put the tensors of one batch in a tuple, in the order in which the loss takes them",
        )
    for position, item in enumerate(example):
        batches.check_item(position, item)
    return tuple(example)


def _recorded(
    model: nn.Module,
    make: Callable[[], RecordedStep],
    record: Callable[[RecordedStep], None],
    before: list[Before],
    roots: Sequence[tuple[Any, str]],
    times: int = 2,
) -> RecordedStep:
    """Record more than once, and restore what code of the user's and ours has changed, whatever ends the recording."""
    works: list[RecordedStep] = []
    constants: dict[int, torch.Tensor] = {}

    def made() -> RecordedStep:
        works.append(make())
        works[-1].recorder.constants = constants
        return works[-1]

    surroundings = Surroundings(model)

    def end() -> None:
        stop_observing()
        surroundings.put_back()
        for work in works:
            work.recorder.forget_history()
        for work in works[:-1]:
            work.recorder.release_tensors()
        for state in before:
            unwatch_values(state.places())
        seen = Observed()
        for work in works:
            seen.merge(work.seen)
        reach = Reach(seen, narrow=True)
        for value, path in roots:
            reach.add(value, path)
        reach.add_scopes()
        shelves = (vars(m).get(name) for m in reach.modules.values() for name in (*SHELVES, BUFFER_NAMES))
        touched = {id(container) for container, _ in reach.containers} | {*map(id, shelves)}
        for state in before:
            state.restore(seen, touched)

    with without_their_cache():
        # What is put into context variables stays in a context of its own.
        return surely(lambda: copy_context().run(record_twice, made, record, before, times), end)


def _with_signals_held(work: Callable[[RecordingSignals], T]) -> T:
    """What `work` returns; what came meanwhile and could not be handled there is handled after it."""
    signals = RecordingSignals()

    def begin() -> T:
        signals.start()
        return work(signals)

    return surely(begin, signals.release)


def _in_a_process(work: Callable[[], Any]) -> Any:
    """Plain data that `work` returns, from a copy of this process."""

    def copied() -> Any:
        torch.set_num_threads(1)  # the threads of this process are not there in its copy
        return work()

    return child.forked(copied)


def _result_apart(task: _Task) -> _Result:
    """The result from a copy of this process, with the tensors of this one. What goes wrong there goes wrong again
    here, with the traceback of the user's code."""

    def plain() -> list[Any]:
        result = task.result()
        return [to_json(result.graph), result.seen.to_plain(), result.signature.to_plain(), list(result.externals)]

    reach, computed = reach_with_computed(*task.roots)
    task.computed.update(computed)
    live = {reach.tensors[id(value)]: value for value in reach.alive if is_a(value, torch.Tensor)}
    try:
        graph, seen, signature, names = _in_a_process(plain)
    except InternalError:
        return task.result()
    if not live.keys() >= set(names):  # a tensor that has no path
        return task.result()
    externals = {name: live[name] for name in names}
    return _Result(from_json(graph), Observed.from_plain(seen), Signature.from_plain(signature), externals)
