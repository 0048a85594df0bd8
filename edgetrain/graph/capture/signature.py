"""Two captures of the same step, compared call by call.

In:  a `Recording`. Out: its `Signature`: a few words for each kernel call, small enough to be kept beside the step.

A later recording of the same step need not compute what its calls give: while it makes the same calls, their results
are those of the signature (`Signature.ahead`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from edgetrain.graph.capture.recording import Layout, Recording, Results, refs_in


class Call(NamedTuple):
    """asked, given: hashes of its arguments, and of all that it reads, writes and gives.

    results: where they are all in memory of their own.
    """

    kernel: str
    module: str
    phase: str
    asked: int
    given: int
    results: Results | None


@dataclass(frozen=True)
class Signature:
    """results: the numbers of the loss and of the gradients."""

    calls: tuple[Call, ...]
    results: tuple[int | None, ...]

    def ahead(self, number: int, kernel: str, args: Any, kwargs: Any) -> Results | Literal[False] | None:
        """The results of call `number`, None where they are not known; False if it is another call."""
        if number >= len(self.calls):
            return False
        call = self.calls[number]
        return call.results if call.kernel == kernel and call.asked == _asked(args, kwargs) else False

    def to_plain(self) -> list[Any]:
        """Lists, texts and numbers; the inverse of `from_plain`."""
        return [[(*call[:5], call.results and _results_to_plain(call.results)) for call in self.calls], self.results]

    @classmethod
    def from_plain(cls, data: list[Any]) -> Signature:
        calls, results = data
        return cls(tuple(_call_from_plain(*call) for call in calls), tuple(results))


def _call_from_plain(kernel: str, module: str, phase: str, asked: int, given: int, results: list[Any] | None) -> Call:
    return Call(kernel, module, phase, asked, given, None if results is None else _results_from_plain(results))


def _results_to_plain(results: Results) -> list[Any]:
    single, layouts = results
    return [single, [_layout_to_plain(at) if isinstance(at, tuple) else at for at in layouts]]


def _results_from_plain(data: list[Any]) -> Results:
    single, layouts = data
    return single, tuple(_layout_from_plain(*at) if isinstance(at, list) else at for at in layouts)


def _layout_to_plain(layout: Layout) -> list[Any]:
    shape, stride, dtype, device, base, offset = layout
    return [shape, stride, str(dtype).removeprefix("torch."), str(device), base, offset]


def _layout_from_plain(
    shape: list[int], stride: list[int], dtype: str, device: str, base: int | None, offset: int
) -> Layout:
    return tuple(shape), tuple(stride), getattr(torch, dtype), torch.device(device), base, offset


def signature_of(recording: Recording, results: tuple[int | None, ...]) -> Signature:
    outside = {raw: id(real) for raw, real in recording.externals.items()}
    outside |= {raw: hash((tuple(v.shape), v.stride(), v.dtype, _bytes(v))) for raw, v in recording.lifted.items()}
    layouts: dict[Layout, Layout] = {}  # each once
    calls = []
    for call in recording.calls:
        asked = list(refs_in((call.args, call.kwargs)))
        read = [outside.pop(raw, None) for raw in asked]
        bases = {recording.storage(raw): raw for raw in reversed(asked)}
        made = [None if raw is None else _layout(recording, raw, bases) for raw in call.outputs]
        given = hash(repr((read, call.outputs, made, call.writes)))
        known = None
        if made and all(raw is None or _can_be_remade(recording, raw, bases) for raw in call.outputs):
            shared = [at and layouts.setdefault(at, at) for at in made]
            written = zip(shared, call.outputs, strict=True)
            known = call.single, tuple(raw if raw in call.writes else at for at, raw in written)
        calls.append(Call(str(call.func), call.module, call.phase, _asked(call.args, call.kwargs), given, known))
    return Signature(tuple(calls), results)


def _layout(recording: Recording, raw: int, bases: Mapping[int, int]) -> Layout:
    tensor = recording.fakes[raw]
    base = bases.get(recording.storage(raw))
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, base, int(tensor.storage_offset())


def _can_be_remade(recording: Recording, raw: int, bases: Mapping[int, int]) -> bool:
    """From its layout alone: it is no view of another type, as of the real part of complex numbers, and nothing is
    negated, conjugate or zero without memory that says so."""
    fake, base = recording.fakes[raw], bases.get(recording.storage(raw))
    return not _is_lazy(fake) and (
        base is None or (recording.fakes[base].dtype == fake.dtype and not _is_lazy(recording.fakes[base]))
    )


def _is_lazy(fake: torch.Tensor) -> bool:
    return fake.is_neg() or fake.is_conj() or fake._is_zerotensor()


def _asked(args: Any, kwargs: Any) -> int:
    return hash(repr((args, kwargs)))


def first_difference(then: Signature, now: Signature) -> str | None:
    """The first op that is not the same in both, in words; None where all are."""
    for number, (was, is_now) in enumerate(zip(then.calls, now.calls, strict=False)):
        if was[:3] != is_now[:3]:
            return f"op {number} was {_words(was)} and is {_words(is_now)}"
        if was[:5] != is_now[:5]:
            return f"op {number}, {_words(is_now)}: its arguments or the shape of its result"
    shorter, longer = sorted((then.calls, now.calls), key=len)
    if len(shorter) < len(longer):
        return f"op {len(shorter)}, {_words(longer[len(shorter)])}, is {'new' if longer is now.calls else 'gone'}"
    return None if then.results == now.results else "the loss or a gradient is the result of another op"


def _words(call: Call) -> str:
    return f"{call.kernel} in {call.module or 'the loss'} ({call.phase})"


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
