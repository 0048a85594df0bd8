"""From an ordinary nn.Module to the graph of one training step.

In:  a model, `loss(model, *batch)`, an optimizer and one example batch.
Out: a `Graph`: forward, backward and update, in the order in which PyTorch would run them. The model, the optimizer and
     the batch are left as they are; no kernel runs, so capture takes no activation memory.

What is trained is what the optimizer holds and what needs a gradient. Everything else that the loss reads is constant
to the step: read anew each time it runs, never changed (buffers that the model itself changes, such as the running
statistics of a batch norm, excepted).
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.nn.parameter import is_lazy

from edgetrain.errors import EdgetrainError, UserError
from edgetrain.graph import cache, foretold, optimizers
from edgetrain.graph.fingerprint import Walk, settings, surroundings
from edgetrain.graph.ir import ITEM_BYTES, Graph, Op, Ref, Role, Source, Storage, Tensor
from edgetrain.graph.lower import Lowered, lower
from edgetrain.graph.modes import evaluating
from edgetrain.graph.record import Recorder, trace_backward, unsupported
from edgetrain.graph.verify import verify

Loss = Callable[..., torch.Tensor]
MemoryFormat = Literal["preserve", "channels_last"]
Unused = Literal["error", "freeze"]

_LABELS = "class labels (and other indices) must be int64: pass y.long()"
_NO_VALUES = "its data is not allocated yet"
# What a model's own code may change while it is captured, and what is then put back as it was.
_PUT_BACK = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


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
    """A graph and the live tensors that it refers to and that neither the model nor the optimizer holds."""

    graph: Graph
    walk: Walk
    externals: Mapping[str, torch.Tensor] = field(default_factory=dict)
    cached: bool = False
    not_cached_because: str | None = None


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
    """
    return capture_with_externals(
        model, loss, optimizer, example,
        unused=unused, memory_format=memory_format, clip_norm=clip_norm, use_cache=use_cache,
    ).graph  # fmt: skip


def capture_inference(model: nn.Module, example: Sequence[Any], *, use_cache: bool = True) -> Graph:
    """The graph of a prediction, in eval mode. The model's training flags are put back."""
    check_model(model)
    example = check_example(example)
    with evaluating(model):
        walk = _walk((model, "model"))
        digest = _digest(walk, "inference", example, ())
        found = cache.find(digest) if digest and use_cache else None
        if found is not None:
            return found
        graph = _Capture(model, walk, example, "preserve").inference()
    if digest and use_cache:
        cache.keep(digest, graph)
    return graph


def capture_with_externals(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    example: Sequence[Any],
    *,
    unused: Unused = "error",
    memory_format: MemoryFormat = "preserve",
    clip_norm: float | None = None,
    use_cache: bool = True,
) -> Captured:
    """`capture`, and beside the graph what `compile` needs to bind tensors that only the loss knows."""
    check_model(model)
    example = check_example(example)
    trained = optimizers.trained(optimizer)
    walk = _walk((model, "model"), (loss, "loss"))
    places = tuple((t.path, walk.tensors.get(id(t.parameter), "")) for t in trained)
    if clip_norm is not None and not (math.isfinite(clip_norm) and clip_norm > 0):
        raise UserError(
            "gradients cannot be clipped to that norm", expected="a number above 0", received=str(clip_norm)
        )
    shape = (memory_format, clip_norm, unused, optimizers.structure(optimizer), places)
    digest = _digest(walk, "training", example, shape)
    live = dict(_live_tensors(walk))
    if digest and use_cache:
        found = cache.find(digest)
        if found is not None and _names_of_externals(found) <= set(live):
            return Captured(found, walk, {n: live[n] for n in _names_of_externals(found)}, cached=True)
    work = _Capture(model, walk, example, memory_format)
    graph = work.training(loss, optimizer, trained, unused, clip_norm)
    nameless = sorted(set(work.externals) - set(live))
    reason = walk.reason or (f"{nameless[0]} cannot be found again" if nameless else None)
    if digest and use_cache and not reason:
        cache.keep(digest, graph)
    return Captured(graph, walk, work.externals, not_cached_because=reason)


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
        if not isinstance(item, torch.Tensor | bool | int | float | str | None):
            raise UserError(
                f"item {position} of the example cannot be captured",
                expected="a tensor, a number, a string or None",
                received=type(item).__name__,
                next_step="pass nested batches as separate tensors, and put them together inside the loss",
            )
        kind = unsupported(item) if isinstance(item, torch.Tensor) else None
        if kind is not None:
            raise UserError(
                f"item {position} of the example is {kind}, which a captured step cannot hold",
                expected=f"a dense tensor of {', '.join(ITEM_BYTES)}",
                next_step="pass it dense (x.to_dense()), or its parts as tensors of their own",
            )
    return tuple(example)


def check_model(model: nn.Module) -> None:
    """A model that can be captured: its parameters have shapes, and its code is Python."""
    for name, module in model.named_modules():
        held = (*module._parameters.values(), *module._buffers.values())
        owner = name or type(module).__name__
        if any(is_lazy(t) for t in held):
            raise UserError(
                f"module {owner} ({type(module).__name__}) is lazy: its parameters have no shape before it has run",
                next_step="run the model once, with torch.no_grad(): model(x), and create the optimizer after that",
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UserError(
                f"module {owner} is compiled by TorchScript, and its ops cannot be seen from Python",
                next_step="pass the model as it was before torch.jit.script or torch.jit.trace",
            )


def _walk(*roots: tuple[Any, str]) -> Walk:
    walk = Walk()
    for value, path in roots:
        walk.add(value, path)
    return walk


def _digest(walk: Walk, sort: str, example: tuple[Any, ...], rest: tuple[Any, ...]) -> str | None:
    walk.add((sort, surroundings(), repr(settings()), foretold.learnt(), repr(rest)), "settings")
    for position, item in enumerate(example):
        described = (
            (tuple(item.shape), item.stride(), item.dtype, item.device) if isinstance(item, torch.Tensor) else item
        )
        walk.add(repr(described), f"example.{position}")
    return walk.digest


def _live_tensors(walk: Walk) -> Iterator[tuple[str, torch.Tensor]]:
    for value in walk._alive:
        if isinstance(value, torch.Tensor):
            yield walk.tensors[id(value)], value


def _names_of_externals(graph: Graph) -> set[str]:
    return {source.path for source in graph.sources.values() if source.sort == "external"}


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

    def __init__(self, model: nn.Module, walk: Walk, example: tuple[Any, ...], memory_format: MemoryFormat) -> None:
        self.model = model
        self.walk = walk
        self.modules = {id(module): name for name, module in model.named_modules()}
        self.recorder = Recorder(self.modules)
        self.externals: dict[str, torch.Tensor] = {}
        self.batch = [self.recorder.fake_input(item) if isinstance(item, torch.Tensor) else item for item in example]
        self.channels_last = memory_format == "channels_last"
        self.names: dict[int, tuple[str, Role]] = {}
        self.sources: dict[int, Source] = {}  # by raw tensor
        self.constants: dict[int, bytes] = {}

    def training(
        self,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        trained: list[optimizers.Trained],
        unused: Unused,
        clip_norm: float | None,
    ) -> Graph:
        with self._recording(), torch.enable_grad():
            batch = self.batch
            if self.channels_last:
                batch = [self.recorder.channels_last(t) if isinstance(t, torch.Tensor) else t for t in batch]
            value = _check_loss(loss(self.model, *batch))
            gradients = trace_backward(self.recorder, value, [t.parameter for t in trained])
            gradients = [g.clone() if g is not None and self.recorder.outlives_step(g) else g for g in gradients]
            if clip_norm is not None:
                gradients = _clipped(gradients, clip_norm)
        reached = [(t, g) for t, g in zip(trained, gradients, strict=True) if g is not None]
        missed = [self._name(t.parameter, t.path) for t, g in zip(trained, gradients, strict=True) if g is None]
        if missed and unused == "error":
            raise _unreached(missed)
        self._refuse_random_backward()
        self._refuse_labels()
        self._name_persistent(trained)
        number = self.recorder.number
        kept = [number(value), *(number(g) for _, g in reached)]
        lowered = lower(self.recorder, kept, self.names)
        graph = self._graph(lowered, [number(value)])
        graph = _with_updates(
            graph,
            optimizers.kind_of(optimizer),
            [(t, lowered.tensor_of[number(t.parameter)], lowered.tensor_of[number(g)]) for t, g in reached],
        )
        graph = replace(graph, unused=tuple(missed), about={**graph.about, "optimizer": type(optimizer).__name__})
        verify(graph)
        return graph

    def inference(self) -> Graph:
        with self._recording(), torch.no_grad():
            result = self.model(*self.batch)
        outputs = [result] if isinstance(result, torch.Tensor) else list(_tensors(result))
        if not outputs:
            raise UserError(f"{type(self.model).__name__} returns no tensor", received=type(result).__name__)
        numbers = [self.recorder.number(t) for t in outputs]  # first: a buffer may be given out that nothing reads
        self._name_persistent([])
        graph = self._graph(lower(self.recorder, numbers, self.names), numbers)
        verify(graph)
        return graph

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Record; put the model's attributes back; turn whatever goes wrong into an error that names the module."""
        mutable = [vars(m) for m in self.walk.modules.values()]
        mutable += [held for attributes in mutable for held in attributes.values()] + self.walk.containers
        before = [(held, copy.copy(held)) for held in mutable if type(held) in _PUT_BACK]
        try:
            fused = _without_fused_recurrence(self.model)
            with fused, _no_other_randomness(), _empty_autocast_cache(), self.recorder.active():
                yield
            stored = self._stored_tensors()
        except EdgetrainError:
            raise
        except Exception as error:
            raise _explain(error, self.recorder.module, type(self.model).__name__) from error
        finally:
            self.recorder.forget_history()
            for held, copied in before:
                _put_back(held, copied)
        if stored:
            raise stored

    def _stored_tensors(self) -> UserError | None:
        for module in self.walk.modules.values():
            for key, value in vars(module).items():
                if key not in ("_parameters", "_buffers") and any(isinstance(t, FakeTensor) for t in _tensors(value)):
                    return self._storing(module, key, "is no buffer")
            for key, value in module._buffers.items():
                if isinstance(value, FakeTensor):
                    return self._storing(module, key, "is replaced by a new tensor")
        if any(isinstance(t, FakeTensor) for held in self.walk.containers for t in _tensors(held)):
            return UserError(
                "the model or the loss keeps a tensor in a list, dict or object of its own, which a captured step "
                "could not do",
                next_step="return what is to be seen, or compute it in plain PyTorch beside the step",
            )
        return None

    def _storing(self, module: nn.Module, key: str, what: str) -> UserError:
        owner = self.modules.get(id(module)) or type(module).__name__
        return UserError(
            f"module {owner} stores a tensor in self.{key} during forward, and {what}: a captured step could not "
            "carry it from one step to the next",
            next_step=f"register it (self.register_buffer({key!r}, …)) and change it in place (self.{key}.copy_(…)), "
            "or leave the assignment out",
        )

    def _refuse_random_backward(self) -> None:
        for call in self.recorder.recording.calls:
            if (
                call.phase == "backward"
                and torch.Tag.nondeterministic_seeded in call.func.tags
                and "dropout" not in str(call.func)
            ):
                raise UserError(
                    f"module {call.module} draws random numbers in the backward pass ({call.func}); "
                    "torch.utils.checkpoint over dropout does so, and the masks would not be those of the forward pass",
                    next_step="capture the model without torch.utils.checkpoint; edgetrain plans recomputation",
                )

    def _refuse_labels(self) -> None:
        """Tracing lets int32 labels pass, which the kernels then refuse in the middle of a step."""
        for call in self.recorder.recording.calls:
            if call.func in (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default):
                dtype = self.recorder.recording.fakes[call.args[1].tensor].dtype
                if dtype == torch.int32:
                    raise ExampleRefused("the loss", received=f"class labels of type {dtype}", next_step=_LABELS)

    def _name(self, tensor: torch.Tensor, fallback: str) -> str:
        path = self.walk.tensors.get(id(tensor))
        return path.removeprefix("model.") if path else f"optimizer.{fallback}"

    def _name_persistent(self, trained: list[optimizers.Trained]) -> None:
        """Give name, role and source to every raw tensor that is there when the step starts."""
        number = self.recorder.number
        for position, item in enumerate(self.batch):
            if isinstance(item, torch.Tensor):
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
            self.constants[raw] = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()

    def _external(self, raw: int, real: torch.Tensor) -> None:
        name = self.walk.tensors.get(id(real)) or f"external.{len(self.externals)}"
        self.externals[name] = real
        role: Role = "parameter" if isinstance(real, nn.Parameter) else "buffer"
        self._persistent(raw, name, role, Source("external", name))

    def _persistent(self, raw: int, name: str, role: Role, source: Source) -> None:
        self.names[raw] = (name, role)
        self.sources[raw] = source

    def _graph(self, lowered: Lowered, outputs: list[int]) -> Graph:
        at = lowered.tensor_of
        first = {raw: position for position, raw in enumerate(self.names)}  # named tensors come first, in this order
        return Graph(
            storages=tuple(lowered.storages),
            tensors=tuple(lowered.tensors),
            ops=tuple(lowered.ops),
            sources={first[raw]: source for raw, source in self.sources.items()},
            outputs=tuple(at[raw] for raw in outputs),
            constants={first[raw]: value for raw, value in self.constants.items()},
            about={"model": type(self.model).__name__, "torch": torch.__version__},
        )


def _clipped(gradients: list[torch.Tensor | None], most: float) -> list[torch.Tensor | None]:
    """The gradients scaled so that their norm is at most `most`, by the arithmetic of clip_grad_norm_."""
    with torch.no_grad():
        norms = [torch.linalg.vector_norm(g) for g in gradients if g is not None]
        scale = torch.clamp(most / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6), max=1.0)
        return [None if g is None else g * scale for g in gradients]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers (and in the outputs of Hugging Face models, which are mappings)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple | set | deque):
        for item in value:
            yield from _tensors(item)


def _put_back(held: Any, before: Any) -> None:
    if isinstance(held, list):
        held[:] = before
    elif isinstance(held, deque):
        held.clear()
        held.extend(before)
    else:
        held.clear()
        held.update(before)


@contextmanager
def _no_other_randomness() -> Iterator[None]:
    """Numbers that Python or NumPy draws would be captured once and then be the same in every step."""
    python, arrays = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
        drawn = "random" if random.getstate() != python else ""
        drawn = drawn or ("numpy.random" if not _same_state(np.random.get_state(legacy=False), arrays) else "")
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
    if drawn:
        raise UserError(
            f"the model or the loss draws numbers from {drawn}, which a captured step would not draw again",
            next_step="draw them with torch (torch.rand), without deciding by their values in Python",
        )


@contextmanager
def _empty_autocast_cache() -> Iterator[None]:
    """Inside an autocast block of the caller's, neither we may meet weights that it cast before nor it those we did."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _same_state(a: Any, b: Any) -> bool:
    return bool(a["state"]["pos"] == b["state"]["pos"]) and np.array_equal(a["state"]["key"], b["state"]["key"])


def _check_loss(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
        shape = (
            f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
        )
        raise UserError(
            "the loss is not a scalar", expected="one floating-point number, a 0-d tensor", received=shape,
            next_step="reduce it, for example with .mean()",
        )  # fmt: skip
    if not value.requires_grad:
        raise UserError(
            "the loss depends on no parameter that needs a gradient",
            next_step="check for .detach(), torch.no_grad() or requires_grad=False between the parameters and the loss",
        )
    return value if value.dim() == 0 else value.reshape(())


def _unreached(names: list[str]) -> UserError:
    modules = ", ".join(sorted({name.rpartition(".")[0] or name for name in names})[:5])
    return UserError(
        f"the loss does not reach {len(names)} parameter(s) that the optimizer holds, in {modules}: "
        + ", ".join(names[:5]) + (", …" if len(names) > 5 else ""),
        expected="every parameter of the optimizer gets a gradient",
        next_step='leave them out of the optimizer, use them in the loss, or pass unused="freeze" to accept it',
    )  # fmt: skip


def _explain(error: Exception, module: str, model: str) -> UserError:
    where = f"module {module}" if module else f"the loss or the outermost forward of {model}"
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
    if isinstance(error, UnsupportedOperatorException):
        return UserError(f"{where} calls {error.func}, which cannot be traced without running it", received=str(error))
    labels = "Expected dtype int32/int64 for index" in first
    return ExampleRefused(
        where,
        received=f"{type(error).__name__}: {first}",
        next_step=_LABELS if labels else "run loss(model, *example) by itself to see the whole traceback",
    )


def _with_updates(graph: Graph, kind: str, updates: list[tuple[optimizers.Trained, int, int]]) -> Graph:
    """Append one update op for each trained parameter, with its optimizer state as persistent tensors."""
    storages, tensors, ops = list(graph.storages), list(graph.tensors), list(graph.ops)
    sources, gradients = dict(graph.sources), {}
    for t, parameter, gradient in updates:
        shaped = tensors[parameter]
        gradients[parameter] = gradient
        state = []
        for key in t.state_keys:
            state.append(len(tensors))
            sources[len(tensors)] = Source("state", f"{t.path}.{key}")
            tensors.append(replace(shaped, name=f"{shaped.name}.{key}", storage=len(storages), offset=0))
            storages.append(Storage(shaped.n_bytes, "state", storages[shaped.storage].device))
        if t.counts_steps:
            state.append(len(tensors))
            sources[len(tensors)] = Source("state", f"{t.path}.step")
            tensors.append(Tensor(f"{shaped.name}.step", len(storages), (), (), "float32"))
            storages.append(Storage(4, "state"))
        ops.append(
            Op(
                name=f"{kind}_{len(gradients)}",
                kind=f"edgetrain.{kind}.update",
                args=(Ref(parameter), Ref(gradient), *(Ref(s) for s in state)),
                kwargs=(("group", t.group), ("index", t.index)),
                outputs=(),
                phase="update",
                module=shaped.name.rpartition(".")[0],
                writes=tuple(dict.fromkeys([shaped.storage, *(tensors[s].storage for s in state)])),
            )
        )
    return replace(
        graph, storages=tuple(storages), tensors=tuple(tensors), ops=tuple(ops), sources=sources, gradients=gradients
    )
