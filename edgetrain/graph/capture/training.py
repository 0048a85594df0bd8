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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.checkpoint import CheckpointFunction

from edgetrain import child, ranges
from edgetrain.arguments import checked
from edgetrain.errors import EdgetrainError, InternalError, UserError
from edgetrain.graph.capture import batches, foretold, kinds, optimizers
from edgetrain.graph.capture.counters import unwatch_values
from edgetrain.graph.capture.lower import Lowering, lower
from edgetrain.graph.capture.made import made_of_numbers, put_in_place
from edgetrain.graph.capture.modes import Surroundings, evaluating
from edgetrain.graph.capture.observe import Observed, code_of, observed, stop_observing
from edgetrain.graph.capture.reach import BUFFER_NAMES, SHELVES, Reach, holds_many_plain, is_a
from edgetrain.graph.capture.record import Like, Places, Recorder, random_backward, trace_backward, without_their_cache
from edgetrain.graph.capture.recording_signals import RecordingSignals
from edgetrain.graph.capture.restore import Before
from edgetrain.graph.capture.scripts import watched_for_ever
from edgetrain.graph.capture.settings import function_modes, require_trainable
from edgetrain.graph.capture.signature import Signature, first_difference, signature_of
from edgetrain.graph.capture.steady import record_twice, refuse_calls
from edgetrain.graph.capture.watch import Watch
from edgetrain.graph.ir import Graph, Role, Source, from_json, to_json
from edgetrain.graph.rewrite.clip import clip
from edgetrain.native.signals import raised_by_handler
from edgetrain.native.surely import surely
from edgetrain.ops.entry import entry_of_function

Loss = Callable[..., torch.Tensor]
MemoryFormat = Literal["preserve", "channels_last"]
Unused = Literal["error", "freeze"]

_LABELS = "class labels (and other indices) must be int64: pass y.long()"
T = TypeVar("T")
ONE_AT_A_TIME = threading.RLock()  # the hooks of all modules, and the generators, are those of the process
_NO_VALUES = "its data is not allocated yet"


Computed = tuple[nn.Module, str, torch.Tensor]
_computed_of: WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]] = WeakKeyDictionary()


class ExampleRefused(UserError):
    """Model and loss cannot be run on the example. `where`: what failed, in words."""

    def __init__(self, where: str, *, received: str, next_step: str) -> None:
        self.where = where
        super().__init__(
            f"{where} cannot be run on the example",
            expected="an example batch that model and loss accept, in the order in which the loss takes it",
            received=received,
            next_step=next_step,
        )


@dataclass(frozen=True)
class Captured:
    """A graph, and what tells whether it still is the graph of its model.

    externals: the live tensors that it refers to and that neither the model nor the optimizer holds.
    watch:     what was read on the way.
    computed:  what hooks compute before a forward pass, and the step writes: module, attribute, and the tensor that it
               is to be after a step.
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
        reach = _reach((model, "model"))
        before = Before(reach)

        def work(signals: RecordingSignals) -> Graph:
            def make() -> _Capture:
                return _Capture(model, reach, example, "preserve", before.memory, signals)

            return _recorded(model, make, _Capture.record_inference, [before], ((model, "model"),)).inference()

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
    leaves_computed: the step writes what hooks compute before a forward pass where `Captured.computed` says.
    """
    require_trainable()
    batches.check_model(model, loss)
    example = check_example(example)
    trained = optimizers.trained(optimizer)
    if clip_norm is not None and clip_norm not in ranges.NORM:
        raise UserError(
            "gradients cannot be clipped to that norm", expected=str(ranges.NORM), received=ranges.shown(clip_norm)
        )
    roots = ((model, "model"), (loss, "loss"))
    likes = batches.changed(example, lambda _, item: Like.of(item) if isinstance(item, torch.Tensor) else item)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    computed: dict[str, Computed] = {}

    def record(signals: RecordingSignals, times: int, like: _Result | None = None) -> _Capture:
        with ONE_AT_A_TIME:
            return recorded(signals, times, like)

    def recorded(signals: RecordingSignals, times: int, like: _Result | None) -> _Capture:
        modes = [(mode, f"mode.{number}") for number, mode in enumerate(function_modes())]
        reach, by_hooks = _reach_with_computed(*roots, *modes)
        computed.update(by_hooks)
        everything = (*roots, *modes, (optimizer.param_groups, "param_groups"), (optimizer.state, "state"))
        before = [Before(reach), Before(_reach((optimizer.param_groups, "param_groups"), (optimizer.state, "state")))]

        def make() -> _Capture:
            work = _Capture(model, reach, likes, memory_format, before[0].memory, signals)
            work.computed = list(by_hooks.values()) if leaves_computed else []
            if like is not None:
                work.expect(like.signature, like.seen)
            return work

        def record_one(work: _Capture) -> None:
            work.record_training(loss, trained)
            work.refuse_thawed(held, trained)

        return _recorded(model, make, record_one, before, everything, times)

    def here() -> _Result:
        def whole(signals: RecordingSignals) -> _Result:
            work = record(signals, 2)
            graph = work.training(optimizer, trained, unused, clip_norm)
            return _Result(graph, work.seen, work.signature, work.externals)

        return _with_signals_held(whole)

    begin_s = time.perf_counter()
    if apart:
        reach, by_hooks = _reach_with_computed(*roots)
        computed.update(by_hooks)
        result = _result_apart(here, reach)
    else:
        result = here()
    took_s = time.perf_counter() - begin_s

    def difference() -> str | None:
        again = _with_signals_held(lambda signals: record(signals, 1, result).signature)
        return first_difference(result.signature, again)

    def difference_apart() -> str | None:
        found: str | None = _in_a_process(difference)
        return found

    written = {id(tensor) for tensor in result.externals.values()}
    left = {path: one for path, one in computed.items() if id(one[2]) in written}
    watch = Watch(roots, result.seen, optimizer, ignored=frozenset(left))
    look = difference_apart if apart else difference
    return Captured(
        result.graph, result.externals, watch, result.signature, look, foretold.learnt(), took_s,
        tuple(left.values()),
    )  # fmt: skip


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
    make: Callable[[], _Capture],
    record: Callable[[_Capture], None],
    before: list[Before],
    roots: Sequence[tuple[Any, str]],
    times: int = 2,
) -> _Capture:
    """Record more than once, and restore what code of the user's and ours has changed, whatever ends the recording."""
    works: list[_Capture] = []
    constants: dict[int, torch.Tensor] = {}

    def made() -> _Capture:
        works.append(make())
        works[-1].constants = works[-1].recorder.constants = constants
        return works[-1]

    surroundings = Surroundings(model)

    def end() -> None:
        stop_observing()
        surroundings.put_back()
        for work in works:
            work.recorder.forget_history()
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


@dataclass(frozen=True)
class _Result:
    """What comes out of capturing, in this process or another."""

    graph: Graph
    seen: Observed
    signature: Signature
    externals: Mapping[str, torch.Tensor]


def _reach(*roots: tuple[Any, str]) -> Reach:
    reach = Reach()
    for value, path in roots:
        reach.add(value, path)
    return reach


def _reach_with_computed(*roots: tuple[Any, str]) -> tuple[Reach, dict[str, Computed]]:
    """And what hooks compute, by its path: each in a tensor of its own, which is the same in all captures."""
    reach, computed = _reach(*roots), {}
    for path, module in reach.modules.items():
        for key in _computed_by_hooks(module):
            value: Any = vars(module).get(key)
            if is_a(value, torch.Tensor):
                computed[f"{path}.{key}"] = module, key, _own_tensor(module, key, value)
    own = [(tensor, path) for path, (_, _, tensor) in computed.items()]
    return (_reach(*own, *roots) if own else reach), computed


def _own_tensor(module: nn.Module, key: str, like: torch.Tensor) -> torch.Tensor:
    """Of the type that it is computed in: the parameters may have been moved to another since."""
    dtype = next((p.dtype for p in module.parameters(recurse=False)), like.dtype)
    tensors = _computed_of.setdefault(module, {})
    own = tensors.get(key)
    if own is None or (own.shape, own.stride(), own.dtype) != (like.shape, like.stride(), dtype):
        own = tensors[key] = like.detach().to(dtype, copy=True)
    return own


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


def _result_apart(here: Callable[[], _Result], reach: Reach) -> _Result:
    """The result from a copy of this process, with the tensors of this one. What goes wrong there goes wrong again
    here, with the traceback of the user's code."""

    def plain() -> list[Any]:
        result = here()
        return [to_json(result.graph), result.seen.to_plain(), result.signature.to_plain(), list(result.externals)]

    live = {reach.tensors[id(value)]: value for value in reach.alive if is_a(value, torch.Tensor)}
    try:
        graph, seen, signature, names = _in_a_process(plain)
    except InternalError:
        return here()
    if not live.keys() >= set(names):  # a tensor that has no path
        return here()
    externals = {name: live[name] for name in names}
    return _Result(from_json(graph), Observed.from_plain(seen), Signature.from_plain(signature), externals)


@contextmanager
def _without_fused_recurrence(model: nn.Module) -> Iterator[None]:
    """The recurrent layers of oneDNN and cuDNN hide a workspace whose size only a run can tell; their parts do not.

    NNPACK, which the choice of a convolution falls to from a batch of 16 on, must not be what takes its place: it
    makes contiguous results only, where oneDNN and the plain kernels keep images channels-last.
    """
    enabled, enabled_cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        torch._C._set_cudnn_enabled(False)
    try:
        with torch.backends.nnpack.flags(enabled=False):
            yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)
        torch._C._set_cudnn_enabled(enabled_cudnn)


class _Capture:
    """The work of one capture; `externals` is filled on the way."""

    def __init__(
        self,
        model: nn.Module,
        reach: Reach,
        example: Sequence[Any],
        memory_format: MemoryFormat,
        places: Places,
        signals: RecordingSignals,
    ) -> None:
        self.model = model
        self.reach = reach
        self.modules = {id(module): name for name, module in model.named_modules()}
        self.recorder = Recorder(self.modules, type(model).__name__, places, signals)
        self.externals: dict[str, torch.Tensor] = {}
        self.batch = batches.changed(
            example,
            lambda _, item: self.recorder.fake_input(item) if isinstance(item, torch.Tensor | Like) else item,
        )
        self.channels_last = memory_format == "channels_last"
        self.names: dict[int, tuple[str, Role]] = {}
        self.sources: dict[int, Source] = {}  # by raw tensor
        self.constant_bytes: dict[int, bytes] = {}
        self.constants: dict[int, torch.Tensor] = {}  # by id: what the model makes once, shared by all recordings
        self.kept: dict[int, torch.Tensor] = {}  # the same, by the id of the fake tensor that stands in its place
        self.seen = Observed()
        self._seen_before: Observed | None = None
        self.outputs: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor | None] = []
        self.computed: list[Computed] = []
        self.frozen: set[int] = set()  # parameters that the loss has told to need no gradient

    def record_training(self, loss: Loss, trained: list[optimizers.Trained]) -> None:
        with self._recording(), torch.enable_grad():
            batch = self.batch
            if self.channels_last:
                batch = batches.changed(
                    batch, lambda _, t: self.recorder.channels_last(t) if isinstance(t, torch.Tensor) else t
                )
            value = _check_loss(loss(self.model, *batch), self.seen)
            self.frozen = {id(t.parameter) for t in trained if not t.parameter.requires_grad}
            gradients = trace_backward(self.recorder, value, [t.parameter for t in trained])
            outlive = self.recorder.outlive_step(gradients)
            gradients = [
                g.clone() if g is not None and outlives else g for g, outlives in zip(gradients, outlive, strict=True)
            ]
            self._write_computed()
        self.outputs = [value]
        self.gradients = gradients

    def _write_computed(self) -> None:
        """What hooks compute before a forward pass: plain PyTorch leaves it behind, and pruning once more reads it."""
        with torch.no_grad():
            for module, key, own in self.computed:
                value: Any = vars(module).get(key)
                if not is_a(value, FakeTensor):
                    continue  # the module did not run
                if (value.shape, value.dtype) != (own.shape, own.dtype):
                    raise self._storing(module, key, "is not of its parameter's shape and type")
                own.copy_(value.detach())

    def refuse_thawed(self, held: Sequence[nn.Parameter], trained: Sequence[optimizers.Trained]) -> None:
        """A parameter of the optimizer that needed no gradient before the loss ran, and needs one since."""
        known = {id(t.parameter) for t in trained}
        for p in held:
            if p.requires_grad and id(p) not in known:
                raise UserError(
                    f"the loss sets requires_grad of {self._name(p, 'parameter')}, which the optimizer holds, to True",
                    expected="parameters that need a gradient, or do not, when the step is prepared or called",
                    next_step="set requires_grad before the step",
                )

    def record_inference(self) -> None:
        with self._recording(), torch.no_grad():
            result = self.model(*self.batch)
        self.outputs = [result] if isinstance(result, torch.Tensor) else list(_tensors(result))
        if not self.outputs:
            raise UserError(f"{type(self.model).__name__} returns no tensor", received=type(result).__name__)

    def expect(self, like: Signature, seen: Observed | None = None) -> None:
        """Before it is recorded: while its calls are those of `like`, so are their results. seen: of that recording,
        where this one need not be observed too."""
        self.recorder.ahead = like.ahead
        self._seen_before = seen

    @cached_property
    def signature(self) -> Signature:
        number = self.recorder.number
        results = (*map(number, self.outputs), *(None if g is None else number(g) for g in self.gradients))
        return signature_of(self.recorder.recording, results)

    def training(
        self,
        optimizer: torch.optim.Optimizer,
        trained: list[optimizers.Trained],
        unused: Unused,
        clip_norm: float | None,
    ) -> Graph:
        """The graph of what was recorded, and of the updates."""
        pairs = list(zip(trained, self.gradients, strict=True))
        reached = [(t, g) for t, g in pairs if g is not None]
        missed = [self._name(t.parameter, t.path) for t, g in pairs if g is None]
        if missed and _reentrant(self.seen):
            raise _no_reentrance()
        if not reached:
            raise batches.no_parameter_of(self.model)
        if missed and unused == "error":
            frozen = [self._name(t.parameter, t.path) for t in trained if id(t.parameter) in self.frozen]
            raise _unreached(missed, frozen)
        self._refuse_random_backward()
        self._refuse_labels()
        self._name_persistent(trained)
        number = self.recorder.number
        builder = self._lowered([number(t) for t in self.outputs], [number(g) for _, g in reached])
        gradients = [builder.tensor_of[number(g)] for _, g in reached]
        if clip_norm is not None:
            gradients, norm = clip(builder, gradients, clip_norm)
            builder.outputs.append(norm)
        kind = optimizers.kind_of(optimizer)
        for (t, _), gradient in zip(reached, gradients, strict=True):
            optimizers.add_update(builder, kind, t, builder.tensor_of[number(t.parameter)], gradient)
        builder.unused = tuple(missed)
        builder.about["optimizer"] = type(optimizer).__name__
        return builder.build()

    def inference(self) -> Graph:
        """The graph of what was recorded."""
        numbers = [self.recorder.number(t) for t in self.outputs]  # first: nothing may read a buffer that is given out
        self._name_persistent([])
        return self._lowered(numbers).build()

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Record; turn whatever goes wrong into an error that names the module."""
        try:
            fused = _without_fused_recurrence(self.model)
            known = self._seen_before
            observing = observed() if known is None else nullcontext(known)
            scripts = watched_for_ever(self.reach.alive)
            with fused, scripts, _empty_autocast_cache(), self.recorder.active(), observing as self.seen:
                yield
        except EdgetrainError:
            raise
        except Exception as error:
            if raised_by_handler(error):
                raise
            refuse_calls(self.seen)
            raise _explain(error, self.recorder.module, self.model, self.batch) from error
        finally:
            self.recorder.forget_history()
        if stored := self._stored_tensors():
            raise stored

    def keeps_constants(self) -> bool:
        """The model has made tensors that it keeps and would not make again, and that nothing else depends on."""
        return bool(self.kept)

    def realise(self, before: Sequence[Before]) -> None:
        """Put real tensors in the place of those, for the recordings that follow."""
        self.constants.update((id(real), real) for real in self.kept.values())
        put_in_place(before, lambda fake: self.kept.get(id(fake), fake))

    def _is_kept(self, fake: FakeTensor) -> bool:
        """A real tensor can stand in its place; not so a second time, for it is made anew each time."""
        if self.constants:
            return False
        number = self.recorder.number_of(fake)
        real = None if number is None else self._of_numbers.get(number)
        if real is not None:
            self.kept[id(fake)] = real
        return real is not None

    @cached_property
    def _of_numbers(self) -> dict[int, torch.Tensor]:
        return made_of_numbers(self.recorder.recording)

    def _stored_tensors(self) -> UserError | None:
        recording = self.recorder.recording
        kept = {recording.storage(raw) for raw in self.recorder.kept}
        if kept and any(recording.storage(raw) in kept for call in recording.calls for raw in call.writes):
            return _keeping()
        for module in self.reach.modules.values():
            by_hooks = _computed_by_hooks(module)
            for key, value in vars(module).items():
                if key in ("_parameters", "_buffers") or key in by_hooks:
                    continue
                if any(isinstance(t, FakeTensor) and not self._is_kept(t) for t in _tensors(value)):
                    return self._storing(module, key, "is no buffer")
            for key, value in module._buffers.items():
                if isinstance(value, FakeTensor) and not self._is_kept(value):
                    return self._storing(module, key, "is replaced by a new tensor")
        computed = {id(vars(m).get(key)) for m in self.reach.modules.values() for key in _computed_by_hooks(m)}
        held = (t for t in self.reach.held() if is_a(t, FakeTensor) and id(t) not in computed)
        return _keeping() if any(not self._is_kept(t) for t in held) else None

    def _storing(self, module: nn.Module, key: str, what: str) -> UserError:
        owner = self.modules.get(id(module)) or type(module).__name__
        return UserError(
            f"module {owner} stores a tensor in self.{key} during forward, and {what}: a captured step could not "
            "carry it from one step to the next",
            next_step=f"register it (self.register_buffer({key!r}, …)) and change it in place (self.{key}.copy_(…)), "
            "leave the assignment out, or, where it is made once and kept, call the model once before et.prepare",
        )

    def _refuse_random_backward(self) -> None:
        for call in self.recorder.recording.calls:
            where = batches.place_of(call.module, type(self.model).__name__)
            if (
                call.phase == "backward"
                and torch.Tag.nondeterministic_seeded in call.func.tags
                and kinds.NO_DRAWS not in str(call.func)
            ):
                raise random_backward(where, str(call.func))

    def _refuse_labels(self) -> None:
        """Tracing lets int32 labels pass, which the kernels then refuse in the middle of a step."""
        for call in self.recorder.recording.calls:
            labels = entry_of_function(call.func).along.labels
            if labels is not None:
                dtype = self.recorder.recording.fakes[call.args[labels[0]].tensor].dtype
                if dtype not in (torch.int64, torch.uint8):
                    raise ExampleRefused("the loss", received=f"class labels of type {dtype}", next_step=_LABELS)

    def _name(self, tensor: torch.Tensor, fallback: str) -> str:
        path = self.reach.tensors.get(id(tensor))
        return path.removeprefix("model.") if path else f"optimizer.{fallback}"

    def _name_persistent(self, trained: list[optimizers.Trained]) -> None:
        """Give name, role and source to every raw tensor that is there when the step starts."""
        number = self.recorder.number
        for position, item in enumerate(self.batch):
            if isinstance(item, torch.Tensor) and number(item) not in self.names:
                self._persistent(number(item), f"input.{position}", "input", Source("input", str(position)))
        for t in trained:
            raw, name = number(t.parameter), self._name(t.parameter, t.path)
            self._persistent(raw, name, "parameter", Source("optimizer", t.path))
        parameters = {id(p): name for name, p in self.model.named_parameters()}
        buffers = {id(b): name for name, b in self.model.named_buffers()}
        for raw, real in self.recorder.recording.externals.items():
            if raw in self.names:
                continue
            if id(real) in parameters:
                name = parameters[id(real)]
                self._persistent(raw, name, "parameter", Source("parameter", name))
            elif id(real) in buffers:
                name = buffers[id(real)]
                self._persistent(raw, name, "buffer", Source("buffer", name))
            else:
                self._external(raw, real)
        for raw, value in self.recorder.recording.lifted.items():
            self._persistent(raw, f"constant.{raw}", "constant", Source("constant", str(raw)))
            self.constant_bytes[raw] = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()

    def _external(self, raw: int, real: torch.Tensor) -> None:
        name = self.reach.tensors.get(id(real)) or f"external.{len(self.externals)}"
        self.externals[name] = real
        role: Role = "parameter" if isinstance(real, nn.Parameter) else "buffer"
        self._persistent(raw, name, role, Source("external", name))

    def _persistent(self, raw: int, name: str, role: Role, source: Source) -> None:
        self.names[raw] = (name, role)
        self.sources[raw] = source

    def _lowered(self, outputs: list[int], gradients: Sequence[int] = ()) -> Lowering:
        builder = lower(self.recorder, [*outputs, *gradients], self.names)
        first = {raw: position for position, raw in enumerate(self.names)}  # named tensors come first, in this order
        builder.sources = {first[raw]: source for raw, source in self.sources.items()}
        builder.outputs = [builder.tensor_of[raw] for raw in outputs]
        builder.constants = {first[raw]: value for raw, value in self.constant_bytes.items()}
        builder.about = {"model": type(self.model).__name__, "torch": torch.__version__}
        return builder


def _keeping() -> UserError:
    return UserError(
        "the model or the loss keeps a tensor in a list, dict or object of its own, which a captured step could not do",
        next_step="return what is to be seen, or compute it in plain PyTorch beside the step",
    )


def _computed_by_hooks(module: nn.Module) -> set[str]:
    """The attributes that pruning, weight and spectral normalisation compute before each forward pass."""
    hooks = module._forward_pre_hooks.values()
    kinds = (prune.BasePruningMethod, WeightNorm, SpectralNorm)
    return {getattr(h, "name", "") or getattr(h, "_tensor_name", "") for h in hooks if isinstance(h, kinds)}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers (and in the outputs of Hugging Face models, which are mappings), in order."""
    pending, met = [value], set()
    while pending:
        value = pending.pop()
        if is_a(value, torch.Tensor):
            yield value
        elif is_a(value, Mapping | list | tuple | set | deque) and id(value) not in met and not holds_many_plain(value):
            met.add(id(value))  # a list may hold itself
            pending += reversed(list(value.values() if is_a(value, Mapping) else value))


@contextmanager
def _empty_autocast_cache() -> Iterator[None]:
    """Inside an autocast block of the caller's, neither we may meet weights that it cast before nor it those we did."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _reentrant(seen: Observed) -> bool:
    return code_of(CheckpointFunction.forward.__code__) in seen.codes


def _no_reentrance() -> UserError:
    return UserError(
        "torch.utils.checkpoint with use_reentrant=True runs a backward pass of its own, which a captured step cannot "
        "follow",
        next_step="pass use_reentrant=False, or leave torch.utils.checkpoint out; edgetrain plans recomputation",
    )


def _check_loss(value: Any, seen: Observed) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
        received, next_step = batches.no_scalar(value)
        raise UserError(
            "the loss is not a scalar", expected="one floating-point number, a 0-d tensor", received=received,
            next_step=next_step,
        )  # fmt: skip
    if not value.requires_grad and _reentrant(seen):
        raise _no_reentrance()
    if not value.requires_grad:
        raise UserError(
            "the loss depends on no parameter that needs a gradient",
            next_step="check for .detach(), torch.no_grad() or requires_grad=False between the parameters and the loss",
        )
    return value if value.dim() == 0 else value.reshape(())


def _unreached(names: list[str], frozen: list[str]) -> UserError:
    why = ""
    if frozen:
        why = f" (the loss sets requires_grad=False for {', '.join(frozen[:5])}{', …' if len(frozen) > 5 else ''})"
    modules = ", ".join(sorted({name.rpartition(".")[0] or name for name in names})[:5])
    return UserError(
        f"the loss does not reach {len(names)} parameter(s) that the optimizer holds, in {modules}: "
        + ", ".join(names[:5]) + (", …" if len(names) > 5 else "") + why,
        expected="every parameter of the optimizer gets a gradient",
        next_step='leave them out of the optimizer, use them in the loss, or pass unused="freeze" to accept it',
    )  # fmt: skip


def _explain(error: Exception, module: str, model: nn.Module, batch: Sequence[Any]) -> UserError:
    where = batches.place_of(module, type(model).__name__)
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    values = _NO_VALUES in first  # read in C++
    if values or isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        op = getattr(error, "func", "its memory is read")
        return UserError(
            f"{where} decides by the values of a tensor ({op}), which a step captured once cannot follow",
            expected="control flow and shapes that depend on shapes and settings alone",
            next_step="replace `if tensor:`, .item(), .tolist() or masked indexing by torch.where or a mask; give "
            "torch's own layers what they would look for (is_causal=, validate_args=False)",
        )
    if "_will_engine_execute_node" in first:
        return UserError(
            "a hook waits for the gradients of several parameters together (register_multi_grad_hook), and a captured "
            "step could not call it",
            next_step="remove it, and use register_hook on each parameter or step.gradients(...)",
        )
    if "use_reentrant=True" in first:
        return _no_reentrance()
    if isinstance(error, UnsupportedOperatorException):
        return UserError(f"{where} calls {error.func}, which cannot be traced without running it", received=str(error))
    labels, mixed = "Expected dtype int32/int64 for index" in first, getattr(error, "types", ())
    return ExampleRefused(
        where,
        received=first if mixed else f"{type(error).__name__}: {first}",
        next_step=_LABELS
        if labels
        else batches.other_type(model, batch, mixed)
        or "run loss(model, *example) by itself to see the whole traceback",
    )
