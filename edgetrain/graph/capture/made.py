"""Tensors that a model makes once and keeps: masks, tables of positions, rotary embeddings.

In:  a recording, and the objects where the code has put fake tensors.
Out: the real tensors in their place, where they follow from numbers alone: from no batch, parameter or random number.
     The step is then recorded again, as it runs from the second time on, and holds them as constants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from edgetrain.errors import UserError
from edgetrain.graph.capture.objects import holds_many_plain, is_a
from edgetrain.graph.capture.reach import Reach
from edgetrain.graph.capture.record import Recorder
from edgetrain.graph.capture.recording import RawCall, RawRef, Recording, refs_in
from edgetrain.graph.capture.restore import Before

Realise = Callable[[torch.Tensor], torch.Tensor]


class KeptTensors:
    """The tensors that the code of a model has kept, once it was recorded.

    Those that become constants of the step are the recorder's `constants`, which all recordings of a step share.
    """

    def __init__(self, recorder: Recorder, reach: Reach, names: Mapping[int, str]) -> None:
        """names: of the modules, by id."""
        self._recorder, self._reach, self._names = recorder, reach, names
        self._real: dict[int, torch.Tensor] = {}  # by the id of the fake tensor that stands in its place

    def __bool__(self) -> bool:
        """The model has made tensors that it keeps and would not make again, and that nothing else depends on."""
        return bool(self._real)

    def realise(self, before: Sequence[Before]) -> None:
        """Put real tensors in the place of those, for the recordings that follow."""
        self._recorder.constants.update((id(real), real) for real in self._real.values())
        put_in_place(before, lambda fake: self._real.get(id(fake), fake))

    def _is_kept(self, fake: FakeTensor) -> bool:
        """A real tensor can stand in its place; not so a second time, for it is made anew each time."""
        if self._recorder.constants:
            return False
        number = self._recorder.number_of(fake)
        real = None if number is None else self._of_numbers.get(number)
        if real is not None:
            self._real[id(fake)] = real
        return real is not None

    @cached_property
    def _of_numbers(self) -> dict[int, torch.Tensor]:
        return made_of_numbers(self._recorder.recording)

    def refused(self) -> UserError | None:
        """What is wrong with a tensor that was kept, if anything."""
        recording = self._recorder.recording
        kept = {recording.storage(raw) for raw in self._recorder.kept}
        if kept and any(recording.storage(raw) in kept for call in recording.calls for raw in call.writes):
            return _keeping()
        for module in self._reach.modules.values():
            by_hooks = computed_by_hooks(module)
            for key, value in vars(module).items():
                if key in ("_parameters", "_buffers") or key in by_hooks:
                    continue
                if any(isinstance(t, FakeTensor) and not self._is_kept(t) for t in tensors_in(value)):
                    return self.storing(module, key, "is no buffer")
            for key, value in module._buffers.items():
                if isinstance(value, FakeTensor) and not self._is_kept(value):
                    return self.storing(module, key, "is replaced by a new tensor")
        computed = {id(vars(m).get(key)) for m in self._reach.modules.values() for key in computed_by_hooks(m)}
        held = (t for t in self._reach.held() if is_a(t, FakeTensor) and id(t) not in computed)
        return _keeping() if any(not self._is_kept(t) for t in held) else None

    def storing(self, module: nn.Module, key: str, what: str) -> UserError:
        owner = self._names.get(id(module)) or type(module).__name__
        return UserError(
            f"module {owner} stores a tensor in self.{key} during forward, and {what}: a captured step could not "
            "carry it from one step to the next",
            next_step=f"register it (self.register_buffer({key!r}, …)) and change it in place (self.{key}.copy_(…)), "
            "leave the assignment out, or, where it is made once and kept, call the model once before et.prepare",
        )


def made_of_numbers(recording: Recording) -> dict[int, torch.Tensor]:
    """What was computed in the forward pass from numbers alone, by its number; computed now."""
    real = {raw: value.clone() for raw, value in recording.lifted.items()}
    other: set[int] = set()  # memory that something else was written into
    for call in (call for call in recording.calls if call.phase == "forward"):
        read = [*refs_in((call.args, call.kwargs))]
        if (
            all(raw in real and recording.storage(raw) not in other for raw in read)
            and torch.Tag.nondeterministic_seeded not in call.func.tags
        ):
            real.update(_computed(call, real))
        else:
            other.update(recording.storage(raw) for raw in call.writes)
    return {raw: value for raw, value in real.items() if recording.storage(raw) not in other}


def _computed(call: RawCall, real: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    def given(value: Any) -> Any:
        if isinstance(value, RawRef):
            return real[value.tensor]
        if isinstance(value, list | tuple):
            return [given(item) for item in value]
        return value

    with torch.no_grad():
        result = call.func(*map(given, call.args), **{name: given(value) for name, value in call.kwargs.items()})
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    return {raw: value for raw, value in zip(call.outputs, results, strict=True) if raw is not None}


def put_in_place(before: Iterable[Before], realise: Realise) -> None:
    """Wherever the code has put a fake tensor."""
    for state in before:
        for place in list(state.places()):
            if (new := _with_real(place.now, realise)) is not place.now:
                place.put(new)


def _with_real(value: Any, realise: Realise) -> Any:
    if is_a(value, torch.Tensor):
        return realise(value)
    if type(value) is tuple:
        items = tuple(_with_real(item, realise) for item in value)
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if type(value) in (list, dict):
        for key, item in list(value.items() if type(value) is dict else enumerate(value)):
            if isinstance(item, torch.Tensor | tuple | list | dict) and item is not value:
                value[key] = _with_real(item, realise)
    return value


def _keeping() -> UserError:
    return UserError(
        "the model or the loss keeps a tensor in a list, dict or object of its own, which a captured step could not do",
        next_step="return what is to be seen, or compute it in plain PyTorch beside the step",
    )


def computed_by_hooks(module: nn.Module) -> set[str]:
    """The attributes that pruning, weight and spectral normalisation compute before each forward pass."""
    hooks = module._forward_pre_hooks.values()
    kinds = (prune.BasePruningMethod, WeightNorm, SpectralNorm)
    return {getattr(h, "name", "") or getattr(h, "_tensor_name", "") for h in hooks if isinstance(h, kinds)}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers (and in the outputs of Hugging Face models, which are mappings), in order."""
    pending, met = [value], set()
    while pending:
        value = pending.pop()
        if is_a(value, torch.Tensor):
            yield value
        elif is_a(value, Mapping | list | tuple | set | deque) and id(value) not in met and not holds_many_plain(value):
            met.add(id(value))  # a list may hold itself
            pending += reversed(list(value.values() if is_a(value, Mapping) else value))
