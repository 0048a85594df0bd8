"""Pools: PyTorch's, and those of firmware."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from edgetrain.graph.ir import Graph, Op, Value
from edgetrain.ops import c_features
from edgetrain.ops.c import CKernel, CSource, Scene, called, function, identifier, ints
from edgetrain.ops.entry import Entry, of_torch, own
from edgetrain.ops.work import Work, done, each

# ---- PyTorch


def _pooled(graph: Graph, op: Op) -> Work:
    kernel = op.args[1]
    sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    area = math.prod(n for n in sides if isinstance(n, int))
    return done("elementwise", graph.tensors[op.creates[0]].n_elements * area, graph, op)


_POOL = Entry(category="pooling and reduction")
of_torch(replace(_POOL, work=_pooled), "max_pool2d_with_indices avg_pool2d max_pool2d")
of_torch(
    replace(_POOL, raises="never"),
    "max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward",
)
of_torch(replace(_POOL, raises="for values"), "max_unpool2d max_unpool3d")

# ---- firmware


def _shape(s: Scene, op: Op, x: int, y: int, window: Sequence[Value]) -> str:
    B, C, H, W = s.shape(x)
    _, _, P, Q = s.shape(y)
    R, S, stride_h, stride_w, pad_h, pad_w = ints(window)
    fields: dict[str, int | str] = {
        "B": s.batched(B), "H": H, "W": W, "C": C, "P": P, "Q": Q, "R": R, "S": S,
        "stride_h": stride_h, "stride_w": stride_w, "pad_h": pad_h, "pad_w": pad_w,
    }  # fmt: skip
    return "&" + s.declare("pool2d_shape", f"{identifier(op.module or 'pool2d')}_shape", fields)


def _max_forward(s: Scene, op: Op) -> list[str]:
    (x,), (y, where) = op.reads, op.creates
    return called(function(op), [s.name(y), s.name(where), s.name(x), _shape(s, op, x, y, op.args[1:])])


def _max_backward(s: Scene, op: Op) -> list[str]:
    (dy, where), dx = op.reads, op.creates[0]
    return called(function(op), [s.name(dx), s.name(dy), s.name(where), _shape(s, op, dx, dy, op.args[2:])])


def _average(s: Scene, op: Op) -> list[str]:
    read, result = op.reads[0], op.creates[0]
    x, y = (read, result) if op.kind.endswith(".forward") else (result, read)
    counts_padding = int(bool(op.args[7]))
    return called(function(op), [s.name(result), s.name(read), _shape(s, op, x, y, op.args[1:7]), counts_padding])


def _global_average(s: Scene, op: Op) -> list[str]:
    read, result = op.reads[0], op.creates[0]
    B, C, H, W = s.shape(read if op.kind.endswith(".forward") else result)
    return called(function(op), [s.name(result), s.name(read), s.batched(B), H * W, C])


_FIRMWARE = Entry(kernels=(), category="pooling and reduction", raises="never")
_MAX, _AVERAGE = CSource("max_pool2d", ("pool2d",)), CSource("avg_pool2d", ("pool2d",))
own(replace(_FIRMWARE, c=CKernel(_MAX, _max_forward, c_features.pool, chooses=True)), "max_pool2d.forward")
own(replace(_FIRMWARE, c=CKernel(_MAX, _max_backward, c_features.pool)), "max_pool2d.backward")
own(replace(_FIRMWARE, c=CKernel(_AVERAGE, _average, c_features.pool)), "avg_pool2d.forward avg_pool2d.backward")
_GLOBAL = replace(_FIRMWARE, c=CKernel(CSource("global_avg_pool"), _global_average))
own(replace(_GLOBAL, work=each(4)), "global_avg_pool.forward")
own(_GLOBAL, "global_avg_pool.backward")
