"""Rules for batch norm, trained and frozen, and group norm.

In:  PyTorch's norms, and those that `graph/rewrite/fuse.py` has joined with their activation. Out: ops of firmware.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgetrain.firmware.lowering import Lowering, Rules, as_float, bias_name
from edgetrain.graph.ir import Op, Ref, Value

RULES = Rules()


@RULES.of("edgetrain.norm.statistics")
def _statistics(w: Lowering, op: Op) -> None:
    _add_statistics(w, w.arg(0), w.optional(1), w.optional(2), op.args[3:5], (0, 1))


def _add_statistics(
    w: Lowering, x: int, mean: int | None, var: int | None, rest: Sequence[Value], places: tuple[int, int]
) -> tuple[int, int]:
    C = (w.shape(x)[1],)
    results = w.forward_result("mean", C), w.forward_result("invstd", C)
    running = [None if t is None else Ref(t) for t in (mean, var)]
    changed = [w.tensors[t].storage for t in (mean, var) if t is not None]
    w.call("edgetrain.norm.statistics", (Ref(x), *running, *map(as_float, rest)), results, writes=changed)
    for position, t in zip(places, results, strict=True):
        w.gives(position, t)
    return results


@RULES.of("edgetrain.norm.apply")
def _apply(w: Lowering, op: Op) -> None:
    w.gives(0, _add_apply(w, w.arg(0), w.arg(1), w.arg(2), w.optional(3), w.optional(4), op.args[5:7]))


def _add_apply(
    w: Lowering, x: int, mean: int, invstd: int, weight: int | None, bias: int | None, limits: Sequence[Value]
) -> int:
    y = w.forward_result("norm", w.shape(x))
    affine = [None if t is None else Ref(t) for t in (weight, bias)]
    w.call("edgetrain.norm.apply", (Ref(x), Ref(mean), Ref(invstd), *affine, *map(as_float, limits)), (y,))
    w.before[y] = x
    return y


@RULES.of("edgetrain.norm.backward")
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
    w.call(kind, (*refs, *map(as_float, limits)), (dx, dw, db))
    for position, t in enumerate((dx, dw, db)):
        w.gives(position, t)


_UNLIMITED = (-math.inf, math.inf)


@RULES.of("aten.native_batch_norm.default")
def _batch_norm(w: Lowering, op: Op) -> None:
    x, weight, bias, mean, var = w.arg(0), w.optional(1), w.optional(2), w.optional(3), w.optional(4)
    trains, momentum, eps = op.args[5:8]
    if trains:
        used = _add_statistics(w, x, mean, var, (momentum, eps), (1, 2))
    else:
        assert mean is not None
        assert var is not None
        used = mean, _inverse(w, var, as_float(eps))
    w.gives(0, _add_apply(w, x, *used, weight, bias, _UNLIMITED))


def _inverse(w: Lowering, var: int, eps: float) -> int:
    """1 / sqrt(running variance + eps), made once."""
    if (var, eps) not in w.inverse:
        invstd = w.forward_result("invstd", w.shape(var))
        w.call("edgetrain.norm.invstd", (Ref(var), eps), (invstd,))
        w.inverse[var, eps] = invstd
    return w.inverse[var, eps]


@RULES.of("aten.native_batch_norm_backward.default")
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
        used = (running_mean, _inverse(w, running_var, as_float(eps)))
        kind = "edgetrain.norm.backward_frozen"
    _add_norm_backward(w, kind, (dy, x, *used, weight, bias), _UNLIMITED)


def _bias_beside(w: Lowering, weight: int | None) -> int | None:
    """The bias of the batch norm that has this weight."""
    for op in w.ops:
        if op.kind == "edgetrain.norm.apply" and weight is not None and op.args[3] == Ref(weight):
            bias = op.args[4]
            return bias.tensor if isinstance(bias, Ref) else None
    return None


@RULES.of("aten.native_group_norm.default")
def _group_norm(w: Lowering, op: Op) -> None:
    x, weight, bias = w.arg(0), w.optional(1), w.optional(2)
    groups, eps = op.args[6], op.args[7]
    assert isinstance(groups, int)
    if len(w.shape(x)) not in (2, 4):
        raise w.refuse("a group norm of this shape has no kernel")
    y = w.forward_result("group_norm", w.shape(x))
    sums = w.forward_result("mean", (w.shape(x)[0], groups)), w.forward_result("invstd", (w.shape(x)[0], groups))
    affine = [None if t is None else Ref(t) for t in (weight, bias)]
    w.call("edgetrain.group_norm.forward", (Ref(x), *affine, groups, as_float(eps)), (y, *sums))
    w.before[y] = x
    for position, t in enumerate((y, *sums)):
        w.gives(position, t)


@RULES.of("aten.native_group_norm_backward.default")
def _group_norm_backward(w: Lowering, op: Op) -> None:
    dy, x, mean, invstd, weight, groups = w.arg(0), w.arg(1), w.arg(2), w.arg(3), w.optional(4), op.args[8]
    dx, C = w.gradient_of(x), (w.shape(x)[1],)
    dw = w.gradient_of(weight) if weight is not None else w.result("sum_1", C)
    db = w.result("sum_2" if weight is None else bias_name(w, weight), C)
    refs = (Ref(dy), Ref(x), Ref(mean), Ref(invstd), None if weight is None else Ref(weight))
    w.call("edgetrain.group_norm.backward", (*refs, groups), (dx, dw, db))
    for position, t in enumerate((dx, dw, db)):
        w.gives(position, t)
