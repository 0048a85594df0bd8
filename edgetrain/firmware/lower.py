"""From a captured training step to the ops that firmware has kernels for.

In:  a graph of PyTorch's ops, as `capture` makes it. Out: a graph of the same step in ops of ours, one for each kernel
     in `kernels/`, that every planner takes and that `emit` prints as C.

    aten.convolution                      edgetrain.conv2d.forward
    aten.convolution_backward        →    edgetrain.conv2d.backward_weight, .backward_input, edgetrain.bias.backward
    aten.t, aten.mm, aten.t               edgetrain.dense.backward_weight
    aten._log_softmax, nll_loss_forward   edgetrain.softmax_cross_entropy.forward

What is promised of the result:
- images are dense [B, H, W, C] and filters [K, R, S, C] in memory (shapes stay PyTorch's, strides say it), everything
  else is dense in the order of its shape; a copy is an op (`edgetrain.permute.*`), so it is planned and counted;
- a kernel needs no memory but what the op reads and makes: what would be its workspace is a result that nobody reads;
- sizes of storages are whole words of 4 bytes, so an arena holds exactly what a plan says;
- nothing draws from a random stream: a mask is a function of the step's number, and can be made again.

An op without a kernel is a `UserError` that names it and its module. What PyTorch's strides say is not looked at: each
op means the same whatever they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from edgetrain.errors import InternalError
from edgetrain.firmware.lowering import (
    ABOUT,
    Dense,
    Expanded,
    LogSoftmax,
    LossGradient,
    Lowering,
    Mask,
    Nothing,
    One,
    Rule,
    Slice,
    Transposed,
    contiguous,
    identifier,
    nhwc,
    same_in_memory,
)
from edgetrain.graph.fuse import fuse_batch_norm
from edgetrain.graph.ir import Graph, Op, Ref, Value
from edgetrain.graph.verify import verify

_MOST_WINDOW = 256  # places in a window of a max pool: which one it was is kept in a byte


def is_lowered(graph: Graph) -> bool:
    return ABOUT in graph.about


def lower_for_firmware(graph: Graph) -> Graph:
    """The same step in ops that firmware has kernels for."""
    if is_lowered(graph):
        return graph
    lowered = Lowering(fuse_batch_norm(_channels_last(graph)), _RULES).run()
    verify(lowered)
    return lowered


def _channels_last(graph: Graph) -> Graph:
    """Every image as it will lie in memory, so that `fuse_batch_norm` takes it for one that it knows."""
    tensors = (
        replace(t, stride=nhwc(t.shape), offset=0) if len(t.shape) == 4 and 0 not in t.stride else t
        for t in graph.tensors
    )
    return replace(graph, tensors=tuple(tensors))


_RULES: dict[str, Rule] = {}


def _rule(*kinds: str) -> Callable[[Rule], Rule]:
    def keep(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(kinds, rule))
        return rule

    return keep


def _pair(value: Value, default: int | None = None) -> tuple[int, int]:
    """A pair of numbers from one, from two, or from none, where a default is known."""
    numbers = (value,) if isinstance(value, int) else value
    if not isinstance(numbers, tuple) or not all(isinstance(n, int) for n in numbers) or len(numbers) > 2:
        raise InternalError(f"expected one or two numbers, received {value!r}")
    if not numbers and default is not None:
        return default, default
    first, last = numbers[0], numbers[-1]
    assert isinstance(first, int)
    assert isinstance(last, int)
    return first, last


# ---- convolutions and matrix products


@_rule("aten.convolution.default")
def _convolution(w: Lowering, op: Op) -> None:
    x, weight, bias = w.arg(0), w.arg(1), w.optional(2)
    rest = _window(w, op.args[3:9], x)
    assert op.outputs[0] is not None
    y = w.forward_result("conv2d", w.graph.tensors[op.outputs[0]].shape)
    w.add("edgetrain.conv2d.forward", (Ref(x), Ref(weight), None if bias is None else Ref(bias), *rest), (y,))
    w.before[y] = x
    w.gives(0, y)


def _window(w: Lowering, args: Sequence[Value], x: int) -> tuple[Value, ...]:
    """stride, padding, dilation and groups as six numbers and one."""
    stride, padding, dilation, transposed, _, groups = args
    if transposed or len(w.shape(x)) != 4:
        raise w.refuse(f"a {'transposed' if transposed else 'one- or three-dimensional'} convolution has no kernel")
    return (*_pair(stride), *_pair(padding), *_pair(dilation), groups)


@_rule("aten.convolution_backward.default")
def _convolution_backward(w: Lowering, op: Op) -> None:
    dy, x, weight = w.arg(0), w.arg(1), w.arg(2)
    rest = _window(w, op.args[4:10], x)
    if op.outputs[1] is not None:
        dw = w.gradient_of(weight)
        w.add("edgetrain.conv2d.backward_weight", (Ref(dy), Ref(x), *rest), (dw,))
        w.gives(1, dw)
    if op.outputs[2] is not None:
        db = w.result(_bias_name(w, weight), (w.shape(weight)[0],))
        w.add("edgetrain.bias.backward", (Ref(dy),), (db,))
        w.gives(2, db)
    if op.outputs[0] is not None:
        dx = w.gradient_of(x)
        w.add("edgetrain.conv2d.backward_input", (Ref(dy), Ref(weight), *rest), (dx,))
        w.gives(0, dx)


def _bias_name(w: Lowering, weight: int) -> str:
    return f"d_{identifier(w.tensors[weight].name.removesuffix('weight') + 'bias')}"


@_rule("aten.t.default", "aten.transpose.int")
def _transpose(w: Lowering, op: Op) -> None:
    value = w.held(0)
    assert op.outputs[0] is not None
    if len(w.graph.tensors[op.outputs[0]].shape) != 2 or not isinstance(value, Dense | Transposed):
        raise w.refuse("a transposed tensor of this shape has no kernel")
    turned = Transposed if isinstance(value, Dense) else Dense
    w.value[op.outputs[0]] = turned(value.tensor)


@_rule("aten.addmm.default", "aten.mm.default")
def _product(w: Lowering, op: Op) -> None:
    first = 1 if op.kind.startswith("aten.addmm") else 0
    if first and (op.kwargs or len(op.args) > 3 or len(w.shape(w.arg(0))) != 1):
        raise w.refuse("addmm with factors or with a matrix to be added has no kernel")
    a, b = w.held(first), w.held(first + 1)
    if isinstance(a, Dense) and isinstance(b, Transposed):
        x, weight = a.tensor, b.tensor
        y = w.forward_result("dense", (w.shape(x)[0], w.shape(weight)[0]))
        w.add("edgetrain.dense.forward", (Ref(x), Ref(weight), Ref(w.arg(0)) if first else None), (y,))
        w.before[y] = x
    elif first == 0 and isinstance(a, Transposed) and isinstance(b, Dense):
        dy, x = a.tensor, b.tensor
        y = w.result(_weight_gradient(w, dy, x), (w.shape(dy)[1], w.shape(x)[1]))
        w.add("edgetrain.dense.backward_weight", (Ref(dy), Ref(x)), (y,))
    elif first == 0 and isinstance(a, Dense) and isinstance(b, Dense):
        dy, weight = a.tensor, b.tensor
        y = w.result(_input_gradient(w, weight), (w.shape(dy)[0], w.shape(weight)[1]))
        w.add("edgetrain.dense.backward_input", (Ref(dy), Ref(weight)), (y,))
    else:
        raise w.refuse(f"{op.kind} of these transposed matrices has no kernel")
    w.gives(0, y)


def _layer(w: Lowering, position: int, t: int) -> Op | None:
    """The dense layer that has this tensor at that place of its arguments."""
    layers = (o for o in w.ops if o.kind == "edgetrain.dense.forward" and o.args[position] == Ref(t))
    return next(layers, None)


def _weight_gradient(w: Lowering, dy: int, x: int) -> str:
    shape = (w.shape(dy)[1], w.shape(x)[1])
    layers = (o for o in w.ops if o.kind == "edgetrain.dense.forward" and o.args[0] == Ref(x))
    names = [identifier(w.tensors[o.reads[1]].name) for o in layers if w.shape(o.reads[1]) == shape]
    return f"d_{names[0]}" if len(names) == 1 else "d_weight"


def _input_gradient(w: Lowering, weight: int) -> str:
    layer = _layer(w, 1, weight)
    return "d_input" if layer is None else f"d_{identifier(w.tensors[layer.reads[0]].name)}"


@_rule("aten.sum.dim_IntList")
def _sum(w: Lowering, op: Op) -> None:
    x = w.arg(0)
    shape, dims = w.shape(x), op.args[1]
    others = {at for at in range(len(shape)) if at != 1}
    if not isinstance(dims, tuple) or {d % len(shape) for d in dims if isinstance(d, int)} != others or len(shape) == 1:
        raise w.refuse("a sum that leaves something else than channels has no kernel")
    kept = tuple(1 if at in others else n for at, n in enumerate(shape)) if len(op.args) > 2 and op.args[2] else None
    db = w.result("d_bias", kept or (shape[1],))
    w.add("edgetrain.bias.backward", (Ref(x),), (db,))
    w.gives(0, db)


# ---- element by element


@_rule("aten.relu.default", "aten.hardtanh.default", "aten.sigmoid.default", "aten.tanh.default")
def _activation(w: Lowering, op: Op) -> None:
    kind = op.kind.split(".")[1]
    limits: tuple[Value, ...] = ()
    if kind == "hardtanh":
        kind, limits = "clamp", (*op.args[1:3], *(-1, 1)[len(op.args) - 1 :])
    x = w.arg(0)
    y = w.forward_result(kind, w.shape(x))
    w.add(f"edgetrain.{kind}.forward", (Ref(x), *map(_float, limits)), (y,))
    w.before[y] = x
    w.gives(0, y)


def _float(value: Value) -> float:
    assert isinstance(value, int | float)
    return float(value)


_BACKWARD = {
    "aten.threshold_backward.default": "relu", "aten.hardtanh_backward.default": "clamp",
    "aten.sigmoid_backward.default": "sigmoid", "aten.tanh_backward.default": "tanh",
}  # fmt: skip


@_rule(*_BACKWARD)
def _activation_backward(w: Lowering, op: Op) -> None:
    kind = _BACKWARD[op.kind]
    if kind == "relu" and op.args[2] != 0:
        raise w.refuse("a threshold other than 0 has no kernel")
    dy, y = w.arg(0), w.arg(1)
    dx = w.gradient_of(w.before_or(y))
    limits = map(_float, op.args[2:4]) if kind == "clamp" else ()
    w.add(f"edgetrain.{kind}.backward", (Ref(dy), Ref(y), *limits), (dx,))
    w.gives(0, dx)


@_rule("aten.add.Tensor")
def _add(w: Lowering, op: Op) -> None:
    if op.kwargs or not isinstance(op.args[1], Ref):
        raise w.refuse("a sum with a number, or with a factor, has no kernel")
    a, b = w.arg(0), w.arg(1)
    if w.shape(a) != w.shape(b):
        raise w.refuse("a sum of tensors of different shapes has no kernel")
    y = w.forward_result("add", w.shape(a)) if op.phase == "forward" else w.result("d_sum", w.shape(a))
    w.add("edgetrain.add.forward", (Ref(a), Ref(b)), (y,))
    w.gives(0, y)


@_rule("aten.add_.Tensor")
def _count(w: Lowering, op: Op) -> None:
    target = w.arg(0)
    number = op.args[1]
    if w.tensors[target].dtype != "int64" or w.shape(target) != () or not isinstance(number, int):
        raise w.refuse("a tensor that is changed in place has no kernel")
    w.add("edgetrain.counter.add", (Ref(target), number), (), writes=(w.tensors[target].storage,))


# ---- layouts


@_rule("aten.clone.default", "aten.contiguous.default", "aten.detach.default", "aten.alias.default")
def _same(w: Lowering, op: Op) -> None:
    """A copy of the same numbers is not needed: nothing here is changed in place."""
    assert op.outputs[0] is not None
    w.value[op.outputs[0]] = w.held(0)


@_rule(
    "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.squeeze.dim", "aten.squeeze.dims",
    "aten.unsqueeze.default", "aten.squeeze.default",
)  # fmt: skip
def _view(w: Lowering, op: Op) -> None:
    assert op.outputs[0] is not None
    shape = w.graph.tensors[op.outputs[0]].shape
    old = op.args[0]
    assert isinstance(old, Ref)
    value = w.value[old.tensor]
    if isinstance(value, Dense) and w.shape(value.tensor) == shape:
        w.value[op.outputs[0]] = value
        return
    x = w.in_order(value.tensor if isinstance(value, Dense) else w.dense(old.tensor))
    tensor = w.tensors[x]
    stride = nhwc(shape) if len(shape) == 4 and same_in_memory(shape) else contiguous(shape)
    w.tensors.append(replace(tensor, name=w.unique(f"{identifier(tensor.name)}_view"), shape=shape, stride=stride))
    made = len(w.tensors) - 1
    w.add("aten.view.default", (Ref(x), shape), (made,), view=True)
    w.before[made] = x
    w.gives(0, made)


@_rule("aten.slice.Tensor")
def _slice(w: Lowering, op: Op) -> None:
    assert op.outputs[0] is not None
    x, dim, start, end = w.arg(0), *op.args[1:4]
    assert isinstance(dim, int)
    assert isinstance(start, int)
    assert isinstance(end, int)
    if dim % len(w.shape(x)) != 1 or len(op.args) > 4:
        raise w.refuse("a part of a tensor other than some of its channels has no kernel")
    w.value[op.outputs[0]] = Slice(x, start, min(end, w.shape(x)[1]))


@_rule("aten.cat.default")
def _concat(w: Lowering, op: Op) -> None:
    assert op.outputs[0] is not None
    shape = w.graph.tensors[op.outputs[0]].shape
    dim = op.args[1] if len(op.args) > 1 else 0
    if not isinstance(dim, int) or dim % len(shape) != 1 or not isinstance(op.args[0], tuple):
        raise w.refuse("tensors that are joined along something else than channels have no kernel")
    parts = [w.dense(ref.tensor) for ref in op.args[0] if isinstance(ref, Ref)]
    y = w.forward_result("concat", shape)
    w.add("edgetrain.concat.forward", tuple(Ref(part) for part in parts), (y,))
    w.gives(0, y)


# ---- pools


@_rule("aten.max_pool2d_with_indices.default")
def _max_pool(w: Lowering, op: Op) -> None:
    x, pool = w.arg(0), _pool(w, op.args)
    assert op.outputs[0] is not None
    shape = w.graph.tensors[op.outputs[0]].shape
    y = w.forward_result("max_pool2d", shape)
    where = w.result(f"{w.tensors[y].name}_where", shape, "uint8")
    w.add("edgetrain.max_pool2d.forward", (Ref(x), *pool), (y, where))
    w.before[y] = x
    w.gives(0, y)
    w.gives(1, where)


def _pool(w: Lowering, args: Sequence[Value]) -> tuple[int, ...]:
    """The sides of the window, the strides and the paddings of x, kernel, stride, padding, dilation."""
    kernel = _pair(args[1])
    stride = _pair(args[2], 0) if len(args) > 2 else (0, 0)
    padding = _pair(args[3]) if len(args) > 3 else (0, 0)
    if len(args) > 4 and _pair(args[4]) != (1, 1):
        raise w.refuse("a max pool with dilation has no kernel")
    if kernel[0] * kernel[1] > _MOST_WINDOW:
        raise w.refuse(f"a max pool over more than {_MOST_WINDOW} places has no kernel")
    return (*kernel, *(kernel if stride == (0, 0) else stride), *padding)


@_rule("aten.max_pool2d_with_indices_backward.default")
def _max_pool_backward(w: Lowering, op: Op) -> None:
    dy, x, where = w.arg(0), w.arg(1), w.arg(7)
    dx = w.gradient_of(x)
    w.add("edgetrain.max_pool2d.backward", (Ref(dy), Ref(where), *_pool(w, op.args[1:6])), (dx,))
    w.gives(0, dx)


@_rule("aten.avg_pool2d.default")
def _avg_pool(w: Lowering, op: Op) -> None:
    x = w.arg(0)
    assert op.outputs[0] is not None
    y = w.forward_result("avg_pool2d", w.graph.tensors[op.outputs[0]].shape)
    w.add("edgetrain.avg_pool2d.forward", (Ref(x), *_averaged(w, op.args)), (y,))
    w.before[y] = x
    w.gives(0, y)


def _averaged(w: Lowering, args: Sequence[Value]) -> tuple[Value, ...]:
    """x, kernel, stride, padding, ceil_mode, count_include_pad, divisor → the window, and what padding counts."""
    if len(args) > 6 and args[6] is not None:
        raise w.refuse("an average pool with a divisor of its own has no kernel")
    counts = bool(args[5]) if len(args) > 5 else True
    return (*_pool(w, args[:4]), counts)


@_rule("aten.avg_pool2d_backward.default")
def _avg_pool_backward(w: Lowering, op: Op) -> None:
    dy, x = w.arg(0), w.arg(1)
    dx = w.gradient_of(x)
    w.add("edgetrain.avg_pool2d.backward", (Ref(dy), *_averaged(w, op.args[1:])), (dx,))
    w.gives(0, dx)


@_rule("aten.mean.dim")
def _mean(w: Lowering, op: Op) -> None:
    x = w.arg(0)
    dims = op.args[1]
    places = {d % 4 for d in dims if isinstance(d, int)} if isinstance(dims, tuple) else set()
    if len(w.shape(x)) != 4 or places != {2, 3}:
        raise w.refuse("a mean over something else than the places of an image has no kernel")
    assert op.outputs[0] is not None
    y = w.forward_result("global_avg_pool", w.graph.tensors[op.outputs[0]].shape)
    w.add("edgetrain.global_avg_pool.forward", (Ref(x),), (y,))
    w.before[y] = x
    w.gives(0, y)


@_rule("aten.expand.default")
def _expand(w: Lowering, op: Op) -> None:
    x = w.arg(0)
    assert op.outputs[0] is not None
    shape = w.graph.tensors[op.outputs[0]].shape
    if len(shape) != 4 or w.shape(x) != (*shape[:2], 1, 1):
        raise w.refuse("a tensor that is expanded has no kernel")
    w.value[op.outputs[0]] = Expanded(x, shape)


@_rule("aten.div.Scalar")
def _divide(w: Lowering, op: Op) -> None:
    value, by = w.held(0), op.args[1]
    assert op.outputs[0] is not None
    if isinstance(value, Mask) and not value.divided and by == value.keep:
        w.value[op.outputs[0]] = replace(value, divided=True)
        return
    if isinstance(value, Expanded) and by == value.shape[2] * value.shape[3]:
        dx = w.result("d_places", value.shape)
        w.add("edgetrain.global_avg_pool.backward", (Ref(value.tensor),), (dx,))
        w.gives(0, dx)
        return
    raise w.refuse("a division has no kernel")


# ---- dropout


@_rule("aten.empty_like.default")
def _empty(w: Lowering, op: Op) -> None:
    assert op.outputs[0] is not None
    w.value[op.outputs[0]] = Nothing()


@_rule("aten.bernoulli.p")
def _bernoulli(w: Lowering, op: Op) -> None:
    assert op.outputs[0] is not None
    shape, keep = w.graph.tensors[op.outputs[0]].shape, op.args[1]
    w.counts["masks"] = number = w.counts.get("masks", 0) + 1
    mask = w.result(f"mask_{number}", shape, "uint8")
    w.add("edgetrain.dropout.mask", (_float(keep), number), (mask,))
    w.value[op.outputs[0]] = Mask(mask, _float(keep), divided=_float(keep) == 1.0)


@_rule("aten.mul.Tensor")
def _multiply(w: Lowering, op: Op) -> None:
    x, mask = w.held(0), w.held(1)
    if not isinstance(mask, Mask):
        raise w.refuse("a product of tensors has no kernel")
    if not mask.divided or isinstance(x, Mask):
        raise w.refuse("a mask that is no dropout's has no kernel")
    t = w.arg(0)
    y = w.forward_result("dropout", w.shape(t)) if op.phase == "forward" else w.result("d_dropout", w.shape(t))
    w.add("edgetrain.dropout.apply", (Ref(t), Ref(mask.tensor), mask.keep), (y,))
    w.before[y] = t
    w.gives(0, y)


# ---- batch norm and group norm


@_rule("edgetrain.norm.statistics")
def _statistics(w: Lowering, op: Op) -> None:
    _add_statistics(w, w.arg(0), w.optional(1), w.optional(2), op.args[3:5], (0, 1))


def _add_statistics(
    w: Lowering, x: int, mean: int | None, var: int | None, rest: Sequence[Value], places: tuple[int, int]
) -> tuple[int, int]:
    C = (w.shape(x)[1],)
    found = w.forward_result("mean", C), w.forward_result("invstd", C)
    running = [None if t is None else Ref(t) for t in (mean, var)]
    changed = [w.tensors[t].storage for t in (mean, var) if t is not None]
    w.add("edgetrain.norm.statistics", (Ref(x), *running, *map(_float, rest)), found, writes=changed)
    for position, t in zip(places, found, strict=True):
        w.gives(position, t)
    return found


@_rule("edgetrain.norm.apply")
def _apply(w: Lowering, op: Op) -> None:
    w.gives(0, _add_apply(w, w.arg(0), w.arg(1), w.arg(2), w.optional(3), w.optional(4), op.args[5:7]))


def _add_apply(
    w: Lowering, x: int, mean: int, invstd: int, weight: int | None, bias: int | None, limits: Sequence[Value]
) -> int:
    y = w.forward_result("norm", w.shape(x))
    affine = [None if t is None else Ref(t) for t in (weight, bias)]
    w.add("edgetrain.norm.apply", (Ref(x), Ref(mean), Ref(invstd), *affine, *map(_float, limits)), (y,))
    w.before[y] = x
    return y


@_rule("edgetrain.norm.backward")
def _norm_backward(w: Lowering, op: Op) -> None:
    tensors = (w.arg(0), w.arg(1), w.arg(2), w.arg(3), w.optional(4), w.optional(5))
    _add_norm_backward(w, "edgetrain.norm.backward", tensors, op.args[6:8])


def _add_norm_backward(w: Lowering, kind: str, tensors: Sequence[int | None], limits: Sequence[Value]) -> None:
    """dy, x, mean, invstd, weight, bias. The sums over a channel are the gradients of weight and bias, wanted or not;
    the kernel has no other place for them."""
    x, weight, bias = tensors[1], tensors[4], tensors[5]
    assert x is not None
    dx = w.gradient_of(x)
    C = (w.shape(x)[1],)
    dw = w.gradient_of(weight) if weight is not None else w.result("sum_1", C)
    db = w.gradient_of(bias) if bias is not None else w.result("sum_2", C)
    refs = [None if t is None else Ref(t) for t in tensors]
    w.add(kind, (*refs, *map(_float, limits)), (dx, dw, db))
    for position, t in enumerate((dx, dw, db)):
        w.gives(position, t)


_UNLIMITED = (-math.inf, math.inf)


@_rule("aten.native_batch_norm.default")
def _batch_norm(w: Lowering, op: Op) -> None:
    x, weight, bias, mean, var = w.arg(0), w.optional(1), w.optional(2), w.optional(3), w.optional(4)
    trains, momentum, eps = op.args[5:8]
    if trains:
        used = _add_statistics(w, x, mean, var, (momentum, eps), (1, 2))
    else:
        assert mean is not None
        assert var is not None
        used = mean, _inverse(w, var, _float(eps))
    w.gives(0, _add_apply(w, x, *used, weight, bias, _UNLIMITED))


def _inverse(w: Lowering, var: int, eps: float) -> int:
    """1 / sqrt(running variance + eps), made once."""
    if (var, eps) not in w.inverse:
        made = w.forward_result("invstd", w.shape(var))
        w.add("edgetrain.norm.invstd", (Ref(var), eps), (made,))
        w.inverse[var, eps] = made
    return w.inverse[var, eps]


@_rule("aten.native_batch_norm_backward.default")
def _batch_norm_backward(w: Lowering, op: Op) -> None:
    dy, x, weight, running_mean, running_var = w.arg(0), w.arg(1), w.optional(2), w.optional(3), w.optional(4)
    trains, eps = op.args[7:9]
    bias = _bias_beside(w, weight)
    if trains:
        used = (w.arg(5), w.arg(6))
        kind = "edgetrain.norm.backward"
    else:
        assert running_mean is not None
        assert running_var is not None
        used = (running_mean, _inverse(w, running_var, _float(eps)))
        kind = "edgetrain.norm.backward_frozen"
    _add_norm_backward(w, kind, (dy, x, *used, weight, bias), _UNLIMITED)


def _bias_beside(w: Lowering, weight: int | None) -> int | None:
    """The bias of the batch norm that has this weight."""
    for op in w.ops:
        if op.kind == "edgetrain.norm.apply" and weight is not None and op.args[3] == Ref(weight):
            bias = op.args[4]
            return bias.tensor if isinstance(bias, Ref) else None
    return None


@_rule("aten.native_group_norm.default")
def _group_norm(w: Lowering, op: Op) -> None:
    x, weight, bias = w.arg(0), w.optional(1), w.optional(2)
    groups, eps = op.args[6], op.args[7]
    assert isinstance(groups, int)
    if len(w.shape(x)) not in (2, 4):
        raise w.refuse("a group norm of this shape has no kernel")
    y = w.forward_result("group_norm", w.shape(x))
    sums = w.forward_result("mean", (w.shape(x)[0], groups)), w.forward_result("invstd", (w.shape(x)[0], groups))
    affine = [None if t is None else Ref(t) for t in (weight, bias)]
    w.add("edgetrain.group_norm.forward", (Ref(x), *affine, groups, _float(eps)), (y, *sums))
    w.before[y] = x
    for position, t in enumerate((y, *sums)):
        w.gives(position, t)


@_rule("aten.native_group_norm_backward.default")
def _group_norm_backward(w: Lowering, op: Op) -> None:
    dy, x, mean, invstd, weight, groups = w.arg(0), w.arg(1), w.arg(2), w.arg(3), w.optional(4), op.args[8]
    dx, C = w.gradient_of(x), (w.shape(x)[1],)
    dw = w.gradient_of(weight) if weight is not None else w.result("sum_1", C)
    db = w.result("sum_2" if weight is None else _bias_name(w, weight), C)
    refs = (Ref(dy), Ref(x), Ref(mean), Ref(invstd), None if weight is None else Ref(weight))
    w.add("edgetrain.group_norm.backward", (*refs, groups), (dx, dw, db))
    for position, t in enumerate((dx, dw, db)):
        w.gives(position, t)


# ---- losses


@_rule("aten._log_softmax.default")
def _log_softmax(w: Lowering, op: Op) -> None:
    x = w.arg(0)
    if len(w.shape(x)) != 2 or op.args[1] not in (1, -1):
        raise w.refuse("a softmax over something else than the classes of [samples, classes] has no kernel")
    assert op.outputs[0] is not None
    w.value[op.outputs[0]] = LogSoftmax(x)


def _mean_or_sum(w: Lowering, reduction: Value) -> bool:
    if reduction not in (1, 2):
        raise w.refuse("a loss that is not reduced to one number has no kernel")
    return reduction == 1


@_rule("aten.nll_loss_forward.default")
def _nll_loss(w: Lowering, op: Op) -> None:
    value, labels = w.held(0), w.arg(1)
    if op.args[2] is not None or not isinstance(value, LogSoftmax):
        raise w.refuse("a loss of class labels other than cross-entropy without weights has no kernel")
    mean = _mean_or_sum(w, op.args[3])
    loss = w.result("loss", ())
    logs = w.result("log_probabilities", w.shape(value.logits))
    w.add("edgetrain.softmax_cross_entropy.forward", (Ref(value.logits), Ref(labels), mean), (loss, logs))
    ref = op.args[0]
    assert isinstance(ref, Ref)
    w.value[ref.tensor] = replace(value, made=logs)
    w.gives(0, loss)


@_rule("aten.nll_loss_backward.default")
def _nll_loss_backward(w: Lowering, op: Op) -> None:
    if not isinstance(w.held(0), One):
        raise w.refuse("a loss that is computed with further has no kernel")
    assert op.outputs[0] is not None
    w.value[op.outputs[0]] = LossGradient(w.arg(2), _mean_or_sum(w, op.args[4]))


@_rule("aten._log_softmax_backward_data.default")
def _log_softmax_backward(w: Lowering, op: Op) -> None:
    flows, value = w.held(0), w.held(1)
    if not isinstance(flows, LossGradient) or not isinstance(value, LogSoftmax) or value.made is None:
        raise w.refuse("the logarithm of a softmax outside of a cross-entropy has no kernel")
    dx = w.gradient_of(value.logits)
    args = (Ref(value.made), Ref(flows.labels), flows.mean)
    w.add("edgetrain.softmax_cross_entropy.backward", args, (dx,))
    w.gives(0, dx)


@_rule("aten.ones_like.default")
def _ones(w: Lowering, op: Op) -> None:
    assert op.outputs[0] is not None
    if w.graph.tensors[op.outputs[0]].shape != ():
        raise w.refuse("a tensor of ones has no kernel")
    w.value[op.outputs[0]] = One()


@_rule("aten.mse_loss.default")
def _mse(w: Lowering, op: Op) -> None:
    x, target = w.arg(0), w.arg(1)
    mean = _mean_or_sum(w, op.args[2] if len(op.args) > 2 else 1)
    if w.shape(x) != w.shape(target):
        raise w.refuse("a mean squared error of tensors of different shapes has no kernel")
    loss = w.result("loss", ())
    w.add("edgetrain.mse.forward", (Ref(x), Ref(target), mean), (loss,))
    w.gives(0, loss)


@_rule("aten.mse_loss_backward.default")
def _mse_backward(w: Lowering, op: Op) -> None:
    if not isinstance(w.held(0), One):
        raise w.refuse("a loss that is computed with further has no kernel")
    x, target = w.arg(1), w.arg(2)
    dx = w.gradient_of(x)
    w.add("edgetrain.mse.backward", (Ref(x), Ref(target), _mean_or_sum(w, op.args[3])), (dx,))
    w.gives(0, dx)


# ---- updates


@_rule("edgetrain.sgd.update", "edgetrain.adam.update", "edgetrain.adamw.update")
def _update(w: Lowering, op: Op) -> None:
    tensors = [w.arg(position) for position in range(len(op.args))]
    lasting = [w.tensors[t].storage for n, t in enumerate(tensors) if n != 1]
    w.add(op.kind, tuple(Ref(t) for t in tensors), (), writes=lasting, kwargs=op.kwargs)
