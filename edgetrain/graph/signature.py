"""Two captures of the same step, compared call by call.

In:  a `Recording`. Out: its `Signature`: a few words for each kernel call, small enough to be kept beside the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from edgetrain.graph.record import RawRef, Recording

Call = tuple[str, str, str, int]  # kernel, module, phase, hash of its arguments and results


@dataclass(frozen=True)
class Signature:
    """results: the numbers of the loss and of the gradients."""

    calls: tuple[Call, ...]
    results: tuple[int | None, ...]

    def to_plain(self) -> list[Any]:
        """Lists, texts and numbers; the inverse of `from_plain`."""
        return [self.calls, self.results]

    @classmethod
    def from_plain(cls, data: list[Any]) -> Signature:
        calls, results = data
        return cls(tuple((kernel, module, phase, what) for kernel, module, phase, what in calls), tuple(results))


def signature_of(recording: Recording, results: tuple[int | None, ...]) -> Signature:
    given = {raw: id(real) for raw, real in recording.externals.items()}
    given |= {raw: hash((_layout(v), _bytes(v))) for raw, v in recording.lifted.items()}
    calls = []
    for call in recording.calls:
        read = [given.pop(raw, None) for raw in _numbers((call.args, call.kwargs))]
        made = [None if raw is None else (raw, _layout(recording.fakes[raw])) for raw in call.outputs]
        what = hash(repr((call.args, call.kwargs, read, made, call.writes)))
        calls.append((str(call.func), call.module, call.phase, what))
    return Signature(tuple(calls), results)


def first_difference(then: Signature, now: Signature) -> str | None:
    """The first op that is not the same in both, in words; None where all are."""
    for number, (was, is_now) in enumerate(zip(then.calls, now.calls, strict=False)):
        if was[:3] != is_now[:3]:
            return f"op {number} was {_words(was)} and is {_words(is_now)}"
        if was != is_now:
            return f"op {number}, {_words(is_now)}: its arguments or the shape of its result"
    shorter, longer = sorted((then.calls, now.calls), key=len)
    if len(shorter) < len(longer):
        return f"op {len(shorter)}, {_words(longer[len(shorter)])}, is {'new' if longer is now.calls else 'gone'}"
    return None if then.results == now.results else "the loss or a gradient is the result of another op"


def _words(call: Call) -> str:
    kernel, module, phase, _ = call
    return f"{kernel} in {module or 'the loss'} ({phase})"


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, RawRef):
        yield value.tensor
    elif isinstance(value, dict):
        yield from _numbers(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.stride() if tensor.layout is torch.strided else None


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
