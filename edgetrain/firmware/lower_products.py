"""Rules for convolutions and matrix products: which kernel each of them is for.

In:  PyTorch's convolutions and products of matrices. Out: ops of firmware.

    1×1, stride 1                   edgetrain.pointwise.*      a dense layer over all places of all images
    3×3, one filter a channel       edgetrain.depthwise3x3.*   strides 1 and 2
    wider, dilated, several of them edgetrain.depthwise.*      filters that see one channel, at these strides
    all others                      edgetrain.conv2d.*         any stride, padding, dilation, groups
    x · wᵀ, dyᵀ · x, dy · w         edgetrain.dense.*
"""

from __future__ import annotations

from collections.abc import Sequence

from edgetrain.firmware.lowering import Dense, Lowering, Rules, Transposed, bias_name, identifier, pair
from edgetrain.graph.ir import Op, Ref, Value

RULES = Rules()


@RULES.of("aten.convolution.default")
def _convolution(w: Lowering, op: Op) -> None:
    x, weight, bias = w.arg(0), w.arg(1), w.optional(2)
    rest = _window(w, op.args[3:9], x)
    assert op.outputs[0] is not None
    y = w.forward_result("conv2d", w.graph.tensors[op.outputs[0]].shape)
    w.call(
        f"edgetrain.{_family(w.shape(weight), rest)}.forward",
        (Ref(x), Ref(weight), None if bias is None else Ref(bias), *rest),
        (y,),
    )
    w.before[y] = x
    w.gives(0, y)


def _window(w: Lowering, args: Sequence[Value], x: int) -> tuple[int, ...]:
    """stride, padding, dilation and groups as six numbers and one."""
    stride, padding, dilation, transposed, _, groups = args
    assert isinstance(groups, int)
    if transposed or len(w.shape(x)) != 4:
        raise w.refuse(f"a {'transposed' if transposed else 'one- or three-dimensional'} convolution has no kernel")
    return (*pair(stride), *pair(padding), *pair(dilation), groups)


def _family(filters: tuple[int, ...], window: tuple[int, ...]) -> str:
    """The kernels that this convolution is for."""
    stride, padding, dilation, groups = window[:2], window[2:4], window[4:6], window[6]
    if filters[2:] == (1, 1) and stride == (1, 1) and padding == (0, 0) and groups == 1:
        return "pointwise"
    small_steps = stride in ((1, 1), (2, 2)) and max(padding) <= 3 - stride[0]
    if groups == filters[0] and filters[1] == 1 and small_steps and filters[2:] == (3, 3) and dilation == (1, 1):
        return "depthwise3x3"
    steps = stride[1] == 1 or (stride[1] == 2 and dilation[1] == 1)
    if groups > 1 and filters[1] == 1 and steps and (filters[3] == 3 or filters[3] >= 5):
        return "depthwise"
    return "conv2d"


@RULES.of("aten.convolution_backward.default")
def _convolution_backward(w: Lowering, op: Op) -> None:
    dy, x, weight = w.arg(0), w.arg(1), w.arg(2)
    rest = _window(w, op.args[4:10], x)
    family = _family(w.shape(weight), rest)
    if op.outputs[1] is not None:
        dw = w.gradient_of(weight)
        w.call(f"edgetrain.{family}.backward_weight", (Ref(dy), Ref(x), *rest), (dw,))
        w.gives(1, dw)
    if op.outputs[2] is not None:
        db = w.result(bias_name(w, weight), (w.shape(weight)[0],))
        w.call("edgetrain.bias.backward", (Ref(dy),), (db,))
        w.gives(2, db)
    if op.outputs[0] is not None:
        dx = w.gradient_of(x)
        w.call(f"edgetrain.{family}.backward_input", (Ref(dy), Ref(weight), *rest), (dx,))
        w.gives(0, dx)


@RULES.of("aten.t.default", "aten.transpose.int")
def _transpose(w: Lowering, op: Op) -> None:
    value = w.held(0)
    assert op.outputs[0] is not None
    if len(w.graph.tensors[op.outputs[0]].shape) != 2 or not isinstance(value, Dense | Transposed):
        raise w.refuse("a transposed tensor of this shape has no kernel")
    turned = Transposed if isinstance(value, Dense) else Dense
    w.value[op.outputs[0]] = turned(value.tensor)


@RULES.of("aten.addmm.default", "aten.mm.default")
def _product(w: Lowering, op: Op) -> None:
    first = 1 if op.kind.startswith("aten.addmm") else 0
    if first and (op.kwargs or len(op.args) > 3 or len(w.shape(w.arg(0))) != 1):
        raise w.refuse("addmm with factors or with a matrix to be added has no kernel")
    a, b = w.held(first), w.held(first + 1)
    turned = False
    if first == 0 and isinstance(a, Transposed) and isinstance(b, Transposed):
        turned = True
        a, b = Dense(b.tensor), Dense(a.tensor)  # (Wᵀ)(dyᵀ) = (dy·W)ᵀ: so PyTorch has it where x is a single number
    if isinstance(a, Dense) and isinstance(b, Transposed):
        x, weight = a.tensor, b.tensor
        y = w.forward_result("dense", (w.shape(x)[0], w.shape(weight)[0]))
        w.call("edgetrain.dense.forward", (Ref(x), Ref(weight), Ref(w.arg(0)) if first else None), (y,))
        w.before[y] = x
    elif first == 0 and isinstance(a, Transposed) and isinstance(b, Dense):
        dy, x = a.tensor, b.tensor
        y = w.result(_weight_gradient(w, dy, x), (w.shape(dy)[1], w.shape(x)[1]))
        w.call("edgetrain.dense.backward_weight", (Ref(dy), Ref(x)), (y,))
    elif first == 0 and isinstance(a, Dense) and isinstance(b, Dense):
        dy, weight = a.tensor, b.tensor
        y = w.result(_input_gradient(w, weight), (w.shape(dy)[0], w.shape(weight)[1]))
        w.call("edgetrain.dense.backward_input", (Ref(dy), Ref(weight)), (y,))
    else:
        raise w.refuse(f"{op.kind} of these transposed matrices has no kernel")
    w.gives(0, y)
    if turned and op.outputs[0] is not None:
        w.value[op.outputs[0]] = Transposed(y)


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


@RULES.of("aten.sum.dim_IntList")
def _sum(w: Lowering, op: Op) -> None:
    x = w.arg(0)
    shape, dims = w.shape(x), op.args[1]
    others = {at for at in range(len(shape)) if at != 1}
    if not isinstance(dims, tuple) or {d % len(shape) for d in dims if isinstance(d, int)} != others or len(shape) == 1:
        raise w.refuse("a sum that leaves something else than channels has no kernel")
    kept = tuple(1 if at in others else n for at, n in enumerate(shape)) if len(op.args) > 2 and op.args[2] else None
    db = w.result("d_bias", kept or (shape[1],))
    w.call("edgetrain.bias.backward", (Ref(x),), (db,))
    w.gives(0, db)
