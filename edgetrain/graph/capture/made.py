"""Tensors that a model makes once and keeps: masks, tables of positions, rotary embeddings.

In:  a recording, and the objects where the code has put fake tensors.
Out: the real tensors in their place, where they follow from numbers alone: from no batch, parameter or random number.
     The step is then recorded again, as it runs from the second time on, and holds them as constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from edgetrain.graph.capture.reach import is_a
from edgetrain.graph.capture.record import RawCall, RawRef, Recording, refs_in
from edgetrain.graph.capture.restore import Before

Realise = Callable[[torch.Tensor], torch.Tensor]


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
