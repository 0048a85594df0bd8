"""Ops that put data elsewhere, make some, or show it otherwise, and compute nothing."""

from __future__ import annotations

from dataclasses import replace

from edgetrain.graph.ir import Op, Ref
from edgetrain.ops.c import CKernel, CSource, Scene, called, function, ints
from edgetrain.ops.entry import AlongBatch, Entry, of_torch, own
from edgetrain.ops.work import moves, nothing

# ---- PyTorch

_ENTRY = Entry(category="copy and layout")
_TOTAL = replace(_ENTRY, raises="never")
_MOVES, _MOVES_TOTAL = replace(_ENTRY, work=moves), replace(_TOTAL, work=moves)
_LINEAR, _SHAPE_ALONE = AlongBatch(linear="all"), AlongBatch(shape_alone=True)

# Views.
of_torch(
    _TOTAL,
    "view _unsafe_view reshape t transpose permute select slice squeeze unsqueeze split as_strided",
)
of_torch(replace(_TOTAL, along=_LINEAR), "expand")
of_torch(replace(_ENTRY, along=_LINEAR), "detach")
# Copies.
of_torch(replace(_MOVES_TOTAL, along=AlongBatch(linear="all", copies=True)), "clone _to_copy")
of_torch(replace(_MOVES_TOTAL, along=_LINEAR), "copy cat stack")
of_torch(_MOVES_TOTAL, "constant_pad_nd select_backward slice_backward")
of_torch(_MOVES, "repeat flip roll unfold_backward")
# New numbers.
of_torch(_MOVES_TOTAL, "zeros fill full scalar_tensor")
of_torch(replace(_MOVES_TOTAL, along=_SHAPE_ALONE), "zeros_like ones_like full_like new_zeros")
of_torch(_MOVES, "ones arange zero")
of_torch(replace(_MOVES, along=_SHAPE_ALONE), "new_ones new_full")
# Memory without content.
of_torch(replace(_TOTAL, work=nothing), "empty")
of_torch(replace(_TOTAL, work=nothing, along=_SHAPE_ALONE), "empty_like")
of_torch(replace(_ENTRY, work=nothing), "empty_strided new_empty_strided")
of_torch(replace(_ENTRY, work=nothing, along=_SHAPE_ALONE), "new_empty")
# What would read a file, or give a tensor other memory.
of_torch(replace(_ENTRY, legal=False), "from_file _resize_output set resize resize_as")

# ---- firmware


def _permute(s: Scene, op: Op) -> list[str]:
    B, C, H, W = s.shape(op.reads[0])
    return called(function(op), [s.name(op.creates[0]), s.name(op.reads[0]), s.batched(B), H, W, C])


def _concat(s: Scene, op: Op) -> list[str]:
    y = op.creates[0]
    rows, C = s.rows(y)
    calls, start = [], 0
    for ref in op.args:
        assert isinstance(ref, Ref)
        width = s.shape(ref.tensor)[1]
        calls += called(function(op), [s.name(y), s.name(ref.tensor), rows, C, start, width])
        start += width
    return calls


def _concat_backward(s: Scene, op: Op) -> list[str]:
    rows, C, start, end = ints(op.args[1:])
    names = [s.name(op.creates[0]), s.name(op.reads[0])]
    return called(function(op), [*names, s.count(rows), C, start, end - start])


_FIRMWARE = replace(_MOVES_TOTAL, kernels=())
own(replace(_FIRMWARE, c=CKernel(CSource("permute"), _permute)), "permute.to_nchw permute.to_nhwc")
own(replace(_FIRMWARE, c=CKernel(CSource("concat"), _concat)), "concat.forward")
own(replace(_FIRMWARE, c=CKernel(CSource("concat"), _concat_backward)), "concat.backward")
