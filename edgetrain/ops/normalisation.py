"""Norms: PyTorch's, batch norm by kernels of our own, and those of firmware."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from edgetrain.graph.ir import Op, Value
from edgetrain.ops import norm
from edgetrain.ops.c import CKernel, CSource, Scene, called, function, identifier, number
from edgetrain.ops.entry import OUT, AlongBatch, Entry, Kernel, Predict, State, of_torch, own
from edgetrain.ops.work import each

# ---- what PyTorch's fake kernels get wrong


def _statistics_of(parameters: slice) -> Predict:
    """Norms keep their statistics in the type of their parameters where that is not the type of the input (autocast);
    where those parameters stand among the arguments."""

    def predict(kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, *statistics = kernel(*args, **kwargs)
        kept = next((p.dtype for p in args[parameters] if p is not None), args[0].dtype)
        return result, *(torch.empty_like(t, dtype=kept) for t in statistics)

    return predict


def _as_input(kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of the input is laid out as the input is, whatever the gradient that comes in."""
    result = kernel(*args, **kwargs)
    return torch.empty_like(args[1], memory_format=suggest_memory_format(args[1])), *result[1:]


# ---- PyTorch

_NORM = Entry(category="normalisation")
_TRAINS = State((3, 4), training=5)
_BATCH_NORM = replace(_NORM, state=_TRAINS, along=AlongBatch(normalises=True))
_FORWARD, _BACKWARD = replace(_NORM, raises="never", work=each(8)), replace(_NORM, raises="never", work=each(14))
of_torch(replace(_BATCH_NORM, raises="never", work=each(8), predicts=_statistics_of(slice(1, 5))), "native_batch_norm")
of_torch(_BATCH_NORM, "cudnn_batch_norm miopen_batch_norm")
of_torch(
    replace(_NORM, along=AlongBatch(normalises=True)), "_batch_norm_with_update _batch_norm_with_update_functional"
)
of_torch(replace(_BACKWARD, work=each(12), predicts=_as_input), "native_batch_norm_backward")
of_torch(replace(_FORWARD, predicts=_statistics_of(slice(2, 4))), "native_layer_norm")
of_torch(_BACKWARD, "native_layer_norm_backward")
of_torch(replace(_FORWARD, predicts=_statistics_of(slice(1, 3))), "native_group_norm")
of_torch(replace(_BACKWARD, predicts=_as_input), "native_group_norm_backward")
of_torch(replace(_NORM, raises="never"), "linalg_vector_norm norm")

# ---- our own, and firmware's under the same names


def _statistics(s: Scene, op: Op) -> list[str]:
    names = [*map(s.name, op.creates), *s.pointers(*op.args[:3])]
    return called(function(op), [*names, *s.rows(op.reads[0]), number(op.args[3]), number(op.args[4])])


def _invstd(s: Scene, op: Op) -> list[str]:
    var, invstd = op.reads[0], op.creates[0]
    return called(function(op), [s.name(invstd), s.name(var), s.shape(var)[0], number(op.args[1])])


def _channels(s: Scene, args: tuple[Value, ...]) -> str:
    fields = [*s.pointers(*args[:4]), number(args[4]), number(args[5])]
    return f"(norm_channels){{{', '.join(fields)}}}"


def _apply(s: Scene, op: Op) -> list[str]:
    x = op.reads[0]
    return called(function(op), [s.name(op.creates[0]), s.name(x), _channels(s, op.args[1:]), *s.rows(x)])


def _backward(s: Scene, op: Op) -> list[str]:
    names = [*map(s.name, op.creates), *s.pointers(*op.args[:2])]
    return called(function(op), [*names, _channels(s, op.args[2:]), *s.rows(op.reads[0])])


def _clamped(op: Op) -> tuple[Value, Value]:
    return op.args[-2], op.args[-1]


_SOURCE = CSource("norm", (), ("columns",))
_OWN = replace(_NORM, raises="never", work=each(4))
own(
    replace(
        _OWN, kernels=(Kernel("native", norm.statistics, single=False),), state=State((1, 2)),
        along=AlongBatch(normalises=True), c=CKernel(_SOURCE, _statistics),
    ),
    "norm.statistics",
)  # fmt: skip
own(
    replace(
        _OWN, kernels=(Kernel("native", norm.apply, over=True),), overwrites=OUT,
        c=CKernel(_SOURCE, _apply, bends=_clamped),
    ),
    "norm.apply",
)  # fmt: skip
own(
    replace(
        _OWN, kernels=(Kernel("native", norm.backward, over=True, single=False),), overwrites=OUT, work=each(12),
        c=CKernel(_SOURCE, _backward),
    ),
    "norm.backward",
)  # fmt: skip
own(replace(_OWN, kernels=(), overwrites=OUT, work=each(10), c=CKernel(_SOURCE, _backward)), "norm.backward_frozen")
own(replace(_OWN, kernels=(), work=each(1), c=CKernel(_SOURCE, _invstd)), "norm.invstd")

# ---- firmware


def _group_norm(s: Scene, op: Op, x: int, groups: Value) -> str:
    B, C, *places = s.shape(x)
    assert isinstance(groups, int)
    fields: dict[str, int | str] = {"B": s.batched(B), "places": math.prod(places), "C": C, "groups": groups}
    return "&" + s.declare("group_norm_shape", f"{identifier(op.module or 'group_norm')}_shape", fields)


def _group_norm_forward(s: Scene, op: Op) -> list[str]:
    names = [*map(s.name, op.creates), *s.pointers(*op.args[:3])]
    return called(function(op), [*names, _group_norm(s, op, op.reads[0], op.args[3]), number(op.args[4])])


def _group_norm_backward(s: Scene, op: Op) -> list[str]:
    names = [*map(s.name, op.creates), *s.pointers(*op.args[:5])]
    return called(function(op), [*names, _group_norm(s, op, op.reads[1], op.args[5])])


_GROUP_NORM = CSource("group_norm")
_FIRMWARE = replace(_NORM, kernels=(), raises="never")
own(replace(_FIRMWARE, work=each(12), c=CKernel(_GROUP_NORM, _group_norm_forward)), "group_norm.forward")
own(
    replace(_FIRMWARE, work=each(16), overwrites=OUT, c=CKernel(_GROUP_NORM, _group_norm_backward)),
    "group_norm.backward",
)
