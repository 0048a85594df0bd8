"""One recording of a model and a loss, and the graph that is made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from edgetrain.errors import EdgetrainError, UserError
from edgetrain.graph.capture import batches, kinds, optimizers
from edgetrain.graph.capture.computed import Computed
from edgetrain.graph.capture.lower import Lowering, lower
from edgetrain.graph.capture.made import KeptTensors, tensors_in
from edgetrain.graph.capture.modes import empty_autocast_cache, without_fused_recurrence
from edgetrain.graph.capture.objects import is_a
from edgetrain.graph.capture.observe import Observed, observed
from edgetrain.graph.capture.reach import Reach
from edgetrain.graph.capture.record import Recorder, trace_backward
from edgetrain.graph.capture.recording import Like, Places
from edgetrain.graph.capture.recording_signals import RecordingSignals
from edgetrain.graph.capture.refusals import (
    LABELS,
    ExampleRefused,
    check_loss,
    explain,
    no_reentrance,
    random_backward,
    reentrant,
    unreached,
)
from edgetrain.graph.capture.scripts import watched_for_ever
from edgetrain.graph.capture.signature import Signature, signature_of
from edgetrain.graph.capture.steady import refuse_calls
from edgetrain.graph.ir import Graph, Role, Source
from edgetrain.graph.rewrite.clip import clip
from edgetrain.native.signals import raised_by_handler
from edgetrain.ops.entry import entry_of_function


class RecordedStep:
    """externals: the real tensors that the graph refers to and that neither the model nor the optimizer holds."""

    def __init__(
        self,
        model: nn.Module,
        reach: Reach,
        example: Sequence[Any],
        channels_last: bool,
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
        self.channels_last = channels_last
        self.names: dict[int, tuple[str, Role]] = {}
        self.sources: dict[int, Source] = {}  # by raw tensor
        self.constant_bytes: dict[int, bytes] = {}
        self.kept = KeptTensors(self.recorder, reach, self.modules)
        self.seen = Observed()
        self._seen_before: Observed | None = None
        self.outputs: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor | None] = []
        self.computed: list[Computed] = []  # what hooks compute, and the step writes
        self.frozen: set[int] = set()  # parameters that the loss has told to need no gradient

    def record_training(self, loss: Callable[..., torch.Tensor], trained: list[optimizers.Trained]) -> None:
        with self._recording(), torch.enable_grad():
            batch = self.batch
            if self.channels_last:
                batch = batches.changed(
                    batch, lambda _, t: self.recorder.channels_last(t) if isinstance(t, torch.Tensor) else t
                )
            value = check_loss(loss(self.model, *batch), self.seen)
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
                    raise self.kept.storing(module, key, "is not of its parameter's shape and type")
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
        self.outputs = [result] if isinstance(result, torch.Tensor) else list(tensors_in(result))
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
        *,
        freeze_unused: bool,
        clip_norm: float | None,
    ) -> Graph:
        """The graph of what was recorded, and of the updates. freeze_unused: leave parameters as they are that the loss
        does not reach."""
        pairs = list(zip(trained, self.gradients, strict=True))
        reached = [(t, g) for t, g in pairs if g is not None]
        missed = [self._name(t.parameter, t.path) for t, g in pairs if g is None]
        if missed and reentrant(self.seen):
            raise no_reentrance()
        if not reached:
            raise batches.no_parameter_of(self.model)
        if missed and not freeze_unused:
            frozen = [self._name(t.parameter, t.path) for t in trained if id(t.parameter) in self.frozen]
            raise unreached(missed, frozen)
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
            fused = without_fused_recurrence(self.model)
            known = self._seen_before
            observing = observed() if known is None else nullcontext(known)
            scripts = watched_for_ever(self.reach.alive)
            with fused, scripts, empty_autocast_cache(), self.recorder.active(), observing as self.seen:
                yield
        except EdgetrainError:
            raise
        except Exception as error:
            if raised_by_handler(error):
                raise
            refuse_calls(self.seen)
            raise explain(error, self.recorder.module, self.model, self.batch) from error
        finally:
            self.recorder.forget_history()
        if refused := self.kept.refused():
            raise refused

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
                    raise ExampleRefused("the loss", received=f"class labels of type {dtype}", next_step=LABELS)

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
