"""Rules for pools: the largest, the mean of a window, the mean of an image.

In:  PyTorch's pools, and the division of an expanded tensor that the gradient of a mean is. Out: ops of firmware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgetrain.firmware.lowering import Expanded, Lowering, Mask, Rules, pair
from edgetrain.graph.ir import Op, Ref, Value

RULES = Rules()
_MOST_WINDOW = 256  # places in a window of a max pool: which one it was is kept in a byte


@RULES.of("aten.max_pool2d_with_indices.default")
def _max_pool(w: Lowering, op: Op) -> None:
    x, pool = w.arg(0), _pool(w, op.args)
    assert op.outputs[0] is not None
    shape = w.graph.tensors[op.outputs[0]].shape
    y = w.forward_result("max_pool2d", shape)
    where = w.result(f"{w.tensors[y].name}_where", shape, "uint8")
    w.call("edgetrain.max_pool2d.forward", (Ref(x), *pool), (y, where))
    w.before[y] = x
    w.gives(0, y)
    w.gives(1, where)


def _pool(w: Lowering, args: Sequence[Value]) -> tuple[int, ...]:
    """The sides of the window, the strides and the paddings of x, kernel, stride, padding, dilation."""
    kernel = pair(args[1])
    stride = pair(args[2], 0) if len(args) > 2 else (0, 0)
    padding = pair(args[3]) if len(args) > 3 else (0, 0)
    if len(args) > 4 and pair(args[4]) != (1, 1):
        raise w.refuse("a max pool with dilation has no kernel")
    if kernel[0] * kernel[1] > _MOST_WINDOW:
        raise w.refuse(f"a max pool over more than {_MOST_WINDOW} places has no kernel")
    return (*kernel, *(kernel if stride == (0, 0) else stride), *padding)


@RULES.of("aten.max_pool2d_with_indices_backward.default")
def _max_pool_backward(w: Lowering, op: Op) -> None:
    dy, x, where = w.arg(0), w.arg(1), w.arg(7)
    dx = w.gradient_of(x)
    w.call("edgetrain.max_pool2d.backward", (Ref(dy), Ref(where), *_pool(w, op.args[1:6])), (dx,))
    w.gives(0, dx)


@RULES.of("aten.avg_pool2d.default")
def _avg_pool(w: Lowering, op: Op) -> None:
    x = w.arg(0)
    assert op.outputs[0] is not None
    y = w.forward_result("avg_pool2d", w.graph.tensors[op.outputs[0]].shape)
    w.call("edgetrain.avg_pool2d.forward", (Ref(x), *_averaged(w, op.args)), (y,))
    w.before[y] = x
    w.gives(0, y)


def _averaged(w: Lowering, args: Sequence[Value]) -> tuple[Value, ...]:
    """x, kernel, stride, padding, ceil_mode, count_include_pad, divisor → the window, and what padding counts."""
    if len(args) > 6 and args[6] is not None:
        raise w.refuse("an average pool with a divisor of its own has no kernel")
    counts = bool(args[5]) if len(args) > 5 else True
    return (*_pool(w, args[:4]), counts)


@RULES.of("aten.avg_pool2d_backward.default")
def _avg_pool_backward(w: Lowering, op: Op) -> None:
    dy, x = w.arg(0), w.arg(1)
    dx = w.gradient_of(x)
    w.call("edgetrain.avg_pool2d.backward", (Ref(dy), *_averaged(w, op.args[1:])), (dx,))
    w.gives(0, dx)


@RULES.of("aten.mean.dim")
def _mean(w: Lowering, op: Op) -> None:
    x = w.arg(0)
    dims = op.args[1]
    places = {d % 4 for d in dims if isinstance(d, int)} if isinstance(dims, tuple) else set()
    if len(w.shape(x)) != 4 or places != {2, 3}:
        raise w.refuse("a mean over something else than the places of an image has no kernel")
    assert op.outputs[0] is not None
    y = w.forward_result("global_avg_pool", w.graph.tensors[op.outputs[0]].shape)
    w.call("edgetrain.global_avg_pool.forward", (Ref(x),), (y,))
    w.before[y] = x
    w.gives(0, y)


@RULES.of("aten.expand.default")
def _expand(w: Lowering, op: Op) -> None:
    x = w.arg(0)
    assert op.outputs[0] is not None
    shape = w.graph.tensors[op.outputs[0]].shape
    if len(shape) != 4 or w.shape(x) != (*shape[:2], 1, 1):
        raise w.refuse("a tensor that is expanded has no kernel")
    w.value[op.outputs[0]] = Expanded(x, shape)


@RULES.of("aten.div.Scalar")
def _divide(w: Lowering, op: Op) -> None:
    value, by = w.held(0), op.args[1]
    assert op.outputs[0] is not None
    if isinstance(value, Mask) and not value.divided and by == value.keep:
        w.value[op.outputs[0]] = replace(value, divided=True)
        return
    if isinstance(value, Expanded) and by == value.shape[2] * value.shape[3]:
        dx = w.result("d_places", value.shape)
        w.call("edgetrain.global_avg_pool.backward", (Ref(value.tensor),), (dx,))
        w.gives(0, dx)
        return
    raise w.refuse("a division has no kernel")
