"""What an op does, whatever runs it: floating-point operations and bytes.

In:  an op of a graph. Out: `Work`: its kind, its operations, the bytes that it reads and writes, and what a convolution
     would lay out as a matrix if it were computed as one.

Multiplications and additions count one each, so a convolution has twice its multiply-adds. Convolutions and matrix
products are counted exactly, as `torch.utils.flop_counter` does. For all other ops the operations are a rough number an
element: memory decides their time, not arithmetic. Bytes are those of each tensor once: a cache that is too small for
the op, or a kernel that goes over its data twice, moves more.

    convolution as a matrix product                    columns: N·Hout·Wout × Cin/g·kh·kw, for each of g groups

    x [N, Cin, H, W] ──im2col──▶ columns ──× weight──▶ y [N, Cout, Hout, Wout]
                                          dx ◀──col2im── columns ◀── dy × weight       dW = dyᵀ × columns
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from edgetrain.graph.ir import ITEM_BYTES, Graph, Op, Ref, Tensor

Kind = Literal["conv", "depthwise", "dense", "elementwise", "move", "nothing"]
KINDS: tuple[Kind, ...] = ("conv", "depthwise", "dense", "elementwise", "move", "nothing")

# Operations an element of the largest tensor that the op touches. What is in no table here counts one.
_EACH: Mapping[str, int] = {
    "native_batch_norm": 8, "native_batch_norm_backward": 12, "native_layer_norm": 8, "native_layer_norm_backward": 14,
    "native_group_norm": 8, "native_group_norm_backward": 14, "norm.statistics": 4, "norm.apply": 4,
    "norm.backward": 12, "_softmax": 12, "_log_softmax": 12, "_safe_softmax": 12, "_softmax_backward_data": 4,
    "_log_softmax_backward_data": 12, "exp": 10, "log": 10, "tanh": 12, "sigmoid": 12,
    "gelu": 20, "gelu_backward": 30, "silu": 14, "silu_backward": 18,
    "sigmoid_backward": 3, "tanh_backward": 3, "bernoulli": 10, "sgd.update": 6, "adam.update": 14, "adamw.update": 14,
    "accumulate.update": 2,
    # Of firmware, where a sum over many numbers carries along what rounding loses.
    "norm.backward_frozen": 10, "group_norm.forward": 12, "group_norm.backward": 16, "bias.backward": 4,
    "softmax_cross_entropy.forward": 30, "softmax_cross_entropy.backward": 20, "mse.forward": 6, "mse.backward": 2,
    "sigmoid.forward": 20, "tanh.forward": 20, "sigmoid.backward": 3, "tanh.backward": 3, "dropout.mask": 10,
    "global_avg_pool.forward": 4,
}  # fmt: skip
# Ops that put data elsewhere and compute nothing.
_MOVES = {
    "clone", "copy", "copy_", "cat", "stack", "_to_copy", "slice_backward", "select_backward", "embedding", "index",
    "gather", "constant_pad_nd", "index_select", "repeat", "flip", "roll", "zeros", "zeros_like", "ones", "ones_like",
    "full", "full_like", "fill", "fill_", "new_zeros", "new_ones", "new_full", "scalar_tensor", "arange", "zero_",
    "index_put", "index_put_", "scatter", "unfold_backward", "upsample_nearest2d", "upsample_nearest2d_backward",
    "permute.to_nchw", "permute.to_nhwc", "concat.forward", "concat.backward",
}  # fmt: skip
_NOTHING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_POOLS = {
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward", "max_pool2d",
}  # fmt: skip
_FIRMWARE_CONVOLUTIONS = ("conv2d.", "depthwise.", "depthwise3x3.", "pointwise.")


@dataclass(frozen=True, slots=True)
class Work:
    """
    flops:         operations on numbers of the tensors' type.
    columns_bytes: what a convolution lays out when it runs as a matrix product; 0 for one that needs no layout
                   (1×1 with stride 1), for depthwise ones, which have kernels of their own, and for all other ops.
    group_columns_bytes: the same of one sample and one group, for depthwise ones too: those kernels do not run all.
    """

    kind: Kind
    flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    columns_bytes: int = 0
    group_columns_bytes: int = 0

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


def work(graph: Graph, op: Op) -> Work:
    """What the op does when it runs for the first time."""
    name = short_name(op.kind)
    if op.view or name in _NOTHING:
        return Work("nothing")
    read, written = _read_bytes(graph, op), _written_bytes(graph, op)
    if name in ("convolution", "convolution_backward"):
        return _convolution(graph, op, backward=name != "convolution", read=read, written=written)
    if name.startswith(_FIRMWARE_CONVOLUTIONS):
        return _firmware_convolution(graph, op, name, read, written)
    if name in _PRODUCTS:
        return Work("dense", _PRODUCTS[name](graph, op), read, written)
    if name in _MOVES:
        return Work("move", 0, read, written)
    return Work("elementwise", _elementwise(graph, op, name), read, written)


def short_name(kind: str) -> str:
    """aten.convolution.default → convolution; edgetrain.norm.apply → norm.apply."""
    space, _, name = kind.partition(".")
    return name if space == "edgetrain" else name.partition(".")[0]


def _read_bytes(graph: Graph, op: Op) -> int:
    return sum(_own_bytes(graph, t) for t in op.reads)


def _written_bytes(graph: Graph, op: Op) -> int:
    """What it makes, and what it changes in place: as many bytes as it knows of that storage."""
    seen = {graph.tensors[t].storage: _own_bytes(graph, t) for t in op.reads}
    made = {graph.tensors[t].storage for t in op.creates}
    changed = sum(seen.get(s, graph.storages[s].n_bytes) for s in op.writes if s not in made)
    return sum(_own_bytes(graph, t) for t in op.creates) + changed


def _own_bytes(graph: Graph, t: int) -> int:
    """Bytes in memory that the tensor shows: one that was expanded shows the same ones again and again."""
    tensor = graph.tensors[t]
    real = math.prod(n for n, stride in zip(tensor.shape, tensor.stride, strict=True) if stride or not n)
    return real * ITEM_BYTES[tensor.dtype]


# ---- convolutions


def _convolution(graph: Graph, op: Op, *, backward: bool, read: int, written: int) -> Work:
    """Each of forward, gradient of the input and gradient of the weight has the same operations; those of a bias are
    left out, as everywhere."""
    if backward:
        y, x, weight = (_tensor(graph, op, n) for n in (0, 1, 2))
        stride, transposed, groups = op.args[4], op.args[7], op.args[9]
        times = sum(t is not None for t in op.outputs[:2])
    else:
        x, weight = _tensor(graph, op, 0), _tensor(graph, op, 1)
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
    of_sample = 0 if plain else places * taps * channels * ITEM_BYTES[x.dtype]
    columns = times * batch * of_sample if kind == "conv" else 0
    return Work(kind, flops, read, written, columns, of_sample // groups)


def _firmware_convolution(graph: Graph, op: Op, name: str, read: int, written: int) -> Work:
    """As firmware/lower_products.py makes them: the groups are the last argument."""
    made = graph.tensors[op.creates[0]]
    first, second = (graph.tensors[t] for t in op.reads[:2])
    weight = made if name.endswith(".backward_weight") else second
    y = made if name.endswith(".forward") else first
    groups = op.args[-1]
    assert isinstance(groups, int)
    kind: Kind = "depthwise" if groups > 1 and weight.shape[1] == 1 else "conv"
    return Work(kind, 2 * y.n_elements * math.prod(weight.shape[1:]), read, written)


def _tensor(graph: Graph, op: Op, position: int) -> Tensor:
    ref = op.args[position]
    assert isinstance(ref, Ref)
    return graph.tensors[ref.tensor]


# ---- matrix products


def _product(graph: Graph, op: Op, a: int, b: int) -> int:
    """2·m·n·k for each matrix of a batch."""
    left, right = _tensor(graph, op, a), _tensor(graph, op, b)
    columns = right.shape[-1] if len(right.shape) > 1 else 1
    return 2 * left.n_elements * columns


def _attention(graph: Graph, op: Op) -> int:
    """Scores and their product with the values: two products of a query with every key."""
    query, key, value = (_tensor(graph, op, n) for n in (0, 1, 2))
    rows = math.prod(query.shape[:-1])
    return 2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(graph: Graph, op: Op) -> int:
    """Scores again, then the gradients of scores, values, queries and keys."""
    query, key, value = (_tensor(graph, op, n) for n in (1, 2, 3))
    rows = math.prod(query.shape[:-1])
    return 2 * rows * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_PRODUCTS: Mapping[str, Callable[[Graph, Op], int]] = {
    "mm": lambda graph, op: _product(graph, op, 0, 1),
    "bmm": lambda graph, op: _product(graph, op, 0, 1),
    "mv": lambda graph, op: _product(graph, op, 0, 1),
    "dot": lambda graph, op: _product(graph, op, 0, 1),
    "addmm": lambda graph, op: _product(graph, op, 1, 2),
    "baddbmm": lambda graph, op: _product(graph, op, 1, 2),
    "addmv": lambda graph, op: _product(graph, op, 1, 2),
    "dense.forward": lambda graph, op: 2 * _tensor(graph, op, 0).n_elements * _tensor(graph, op, 1).shape[0],
    "dense.backward_weight": lambda graph, op: 2 * _tensor(graph, op, 0).n_elements * _tensor(graph, op, 1).shape[1],
    "dense.backward_input": lambda graph, op: 2 * _tensor(graph, op, 0).n_elements * _tensor(graph, op, 1).shape[1],
    _FLASH: _attention,
    f"{_FLASH}_backward": _attention_backward,
}


# ---- everything else


def _elementwise(graph: Graph, op: Op, name: str) -> int:
    touched = [graph.tensors[t].n_elements for t in (*op.reads, *op.creates)]
    most = max(touched, default=0)
    if name in _POOLS:
        return most if name.endswith("backward") else _pooled(graph, op)
    return most * _EACH.get(name.removesuffix("_"), 1)


def _pooled(graph: Graph, op: Op) -> int:
    kernel = op.args[1]
    sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    area = math.prod(n for n in sides if isinstance(n, int))
    return graph.tensors[op.creates[0]].n_elements * area
