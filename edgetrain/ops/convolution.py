"""Convolutions: PyTorch's, and those of firmware."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgetrain.graph.ir import Graph, Op, Value, bytes_of
from edgetrain.ops import c_features
from edgetrain.ops.c import CKernel, CSource, Scene, called, function, identifier, ints
from edgetrain.ops.entry import Entry, of_torch, own
from edgetrain.ops.matmul import CONVOLVE, DENSE, PRODUCTS
from edgetrain.ops.work import Kind, Rule, Work, done, tensor

# ---- work


def _counted(backward: bool) -> Rule:
    """Each of forward, gradient of the input and gradient of the weight has the same operations; those of a bias are
    left out, as everywhere.

    convolution as a matrix product                    columns: N·Hout·Wout × Cin/g·kh·kw, for each of g groups

    x [N, Cin, H, W] ──im2col──▶ columns ──× weight──▶ y [N, Cout, Hout, Wout]
                                          dx ◀──col2im── columns ◀── dy × weight       dW = dyᵀ × columns
    """

    def rule(graph: Graph, op: Op) -> Work:
        if backward:
            y, x, weight = (tensor(graph, op, n) for n in (0, 1, 2))
            stride, transposed, groups = op.args[4], op.args[7], op.args[9]
            times = sum(t is not None for t in op.outputs[:2])
        else:
            x, weight = tensor(graph, op, 0), tensor(graph, op, 1)
            y = graph.tensors[op.creates[0]]
            stride, transposed, groups = op.args[3], op.args[6], op.args[8]
            times = 1
        assert isinstance(groups, int)
        large = x if transposed else y  # the side on which each place is one product with a whole filter
        batch, places, taps = large.shape[0], math.prod(large.shape[2:]), math.prod(weight.shape[2:])
        flops = times * 2 * batch * places * taps * weight.shape[0] * weight.shape[1]
        channels = y.shape[1] if transposed else x.shape[1]
        kind: Kind = "depthwise" if groups > 1 and groups == x.shape[1] else "conv"
        plain = taps == 1 and isinstance(stride, tuple) and all(s == 1 for s in stride)
        laid_out = kind == "conv" and not plain
        columns = bytes_of(times * batch * places * taps * channels, x.dtype) if laid_out else 0
        return done(kind, flops, graph, op, columns)

    return rule


def _firmware(graph: Graph, op: Op) -> Work:
    """As firmware/lower_products.py makes them: the groups are the last argument."""
    result = graph.tensors[op.creates[0]]
    first, second = (graph.tensors[t] for t in op.reads[:2])
    weight = result if op.kind.endswith(".backward_weight") else second
    y = result if op.kind.endswith(".forward") else first
    groups = op.args[-1]
    assert isinstance(groups, int)
    kind: Kind = "depthwise" if groups > 1 and weight.shape[1] == 1 else "conv"
    return done(kind, 2 * y.n_elements * math.prod(weight.shape[1:]), graph, op)


# ---- calls of C


@dataclass(frozen=True)
class _Convolution:
    """The tensors of a convolution, and where in the arguments of its op the numbers of its window begin."""

    x: int
    y: int
    weight: int
    window: tuple[Value, ...]
    names: tuple[str, ...]  # as the C function takes them


def _convolution(s: Scene, op: Op) -> _Convolution:
    result = op.creates[0]
    if op.kind.endswith(".forward"):
        x, weight = op.reads[:2]
        return _Convolution(x, result, weight, op.args[3:], (s.name(result), *s.pointers(*op.args[:3])))
    names = (s.name(result), *map(s.name, op.reads))
    if op.kind.endswith(".backward_weight"):
        dy, x = op.reads
        return _Convolution(x, dy, result, op.args[2:], names)
    dy, weight = op.reads
    return _Convolution(result, dy, weight, op.args[2:], names)


def _declared(s: Scene, op: Op, struct: str, fields: dict[str, int | str]) -> str:
    name = struct.removesuffix("_shape").removesuffix("3x3")
    return "&" + s.declare(struct, f"{identifier(op.module or name)}_shape", fields)


def _conv2d(s: Scene, op: Op) -> list[str]:
    conv = _convolution(s, op)
    (B, C, H, W), (K, _, R, S), (_, _, P, Q) = s.shape(conv.x), s.shape(conv.weight), s.shape(conv.y)
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups = ints(conv.window)
    fields: dict[str, int | str] = {
        "B": s.batched(B), "H": H, "W": W, "C": C, "P": P, "Q": Q, "K": K, "R": R, "S": S, "groups": groups,
        "stride_h": stride_h, "stride_w": stride_w, "pad_h": pad_h, "pad_w": pad_w,
        "dilation_h": dilation_h, "dilation_w": dilation_w,
    }  # fmt: skip
    return called(function(op), [*conv.names, _declared(s, op, "conv2d_shape", fields)])


def _depthwise3x3(s: Scene, op: Op) -> list[str]:
    conv = _convolution(s, op)
    (B, C, H, W), (_, _, P, Q) = s.shape(conv.x), s.shape(conv.y)
    stride, _, pad_h, pad_w, *_ = ints(conv.window)
    fields: dict[str, int | str] = {
        "B": s.batched(B), "H": H, "W": W, "C": C, "P": P, "Q": Q, "stride": stride, "pad_h": pad_h, "pad_w": pad_w,
    }  # fmt: skip
    return called(function(op), [*conv.names, _declared(s, op, "depthwise3x3_shape", fields)])


def _pointwise(s: Scene, op: Op) -> list[str]:
    """A dense layer, of which each place of each image is a sample."""
    conv = _convolution(s, op)
    (B, C, H, W), K = s.shape(conv.x), s.shape(conv.weight)[0]
    arguments: Sequence[str | int] = [*conv.names, s.count(B * H * W), C, K]
    return called(function(op, "dense"), arguments)


# ---- entries

of_torch(Entry(category="convolution", raises="never", one_type=True, work=_counted(backward=False)), "convolution")
of_torch(
    Entry(category="convolution", raises="never", columns=True, work=_counted(backward=True)), "convolution_backward"
)

_CONV2D = CSource("conv2d", PRODUCTS, (*CONVOLVE, "convolve_depthwise"))
_DEPTHWISE = CSource("depthwise", ("conv2d", *PRODUCTS), ("conv2d", *CONVOLVE, "convolve_depthwise"))
_DEPTHWISE3X3 = CSource("depthwise3x3", (), ("convolve_depthwise",))
for _family, _kernel in (
    ("conv2d", CKernel(_CONV2D, _conv2d, c_features.conv2d)),
    ("depthwise", CKernel(_DEPTHWISE, _conv2d, c_features.depthwise)),
    ("depthwise3x3", CKernel(_DEPTHWISE3X3, _depthwise3x3, c_features.depthwise)),
    ("pointwise", CKernel(DENSE, _pointwise, c_features.pointwise)),
):
    own(
        Entry(kernels=(), category="convolution", raises="never", work=_firmware, c=_kernel),
        f"{_family}.forward {_family}.backward_weight {_family}.backward_input",
    )
