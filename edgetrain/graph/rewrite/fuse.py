"""Batch norm and the activation after it as three ops of our own, over channels-last images.

In:  a graph. Out: a graph of the same step, in which

    y_bn, mean, invstd = native_batch_norm(x, …)           mean, invstd = norm.statistics(x, …)
    y = relu6(y_bn)                                   →    y = norm.apply(x, mean, invstd, weight, bias, 0, 6)
    …                                                      …
    g = relu6_backward(dy, y)                              dx, … = norm.backward(dy, x, mean, invstd, …, 0, 6)
    dx, … = native_batch_norm_backward(g, x, …)

The result y is then computed again from x in one pass, the backward pass needs neither y nor y_bn, and dx can take the
place of dy. The numbers differ from PyTorch's by rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edgetrain.graph.ir import Atom, Graph, Op, Ref, Tensor, Value
from edgetrain.graph.rewrite.builder import Builder

NORM, NORM_BACKWARD = "aten.native_batch_norm.default", "aten.native_batch_norm_backward.default"
_CLAMPS = {
    "aten.relu.default": "aten.threshold_backward.default",
    "aten.hardtanh.default": "aten.hardtanh_backward.default",
}


@dataclass(frozen=True)
class _Pattern:
    """The ops of one layer, by number."""

    norm: int
    norm_backward: int
    clamp: int | None = None
    clamp_backward: int | None = None
    low: float = -math.inf
    high: float = math.inf


def fuse_batch_norm(graph: Graph) -> Graph:
    """The graph with every batch norm that trains over channels-last float32 images replaced."""
    patterns = _patterns(graph)
    if not patterns:
        return graph
    builder = Builder(graph)
    replaced: dict[int, list[Op]] = {}
    for pattern in patterns:
        replaced |= _replacement(builder, graph, pattern)
    builder.replace_ops(replaced)
    return builder.build(compact=True)


def trains_unfused(graph: Graph) -> bool:
    """A batch norm over channels-last images is left that trains."""
    return any(
        op.kind == NORM and op.args[5] is True and _channels_last(graph.tensors[op.reads[0]]) for op in graph.ops
    )


def _patterns(graph: Graph) -> list[_Pattern]:
    readers: dict[int, list[int]] = {}
    for number, op in enumerate(graph.ops):
        for t in op.reads:
            readers.setdefault(t, []).append(number)
    patterns = []
    for number, op in enumerate(graph.ops):
        if op.kind == NORM and op.args[5] is True and len(op.writes) in (0, 2):
            pattern = _pattern(graph, number, readers)
            if pattern is not None:
                patterns.append(pattern)
    return patterns


def _pattern(graph: Graph, number: int, readers: dict[int, list[int]]) -> _Pattern | None:
    op = graph.ops[number]
    x = graph.tensors[op.reads[0]]
    y_bn, mean, invstd = op.outputs
    if not _channels_last(x) or x.dtype != "float32" or y_bn is None or mean is None or invstd is None:
        return None
    backward = [n for n in readers.get(mean, []) if graph.ops[n].kind == NORM_BACKWARD]
    if len(backward) != 1 or readers.get(mean) != backward or readers.get(invstd) != backward:
        return None
    dy = graph.ops[backward[0]].args[0]
    if not isinstance(dy, Ref):
        return None
    plain = _Pattern(number, backward[0])
    after = readers.get(y_bn, [])
    if y_bn in graph.outputs or len(after) != 1 or graph.ops[after[0]].kind not in _CLAMPS:
        return plain
    clamp = graph.ops[after[0]]
    maker = graph.made_by.get(dy.tensor)
    if maker is None or graph.ops[maker].kind != _CLAMPS[clamp.kind] or readers[dy.tensor] != backward:
        return plain
    back = graph.ops[maker]
    (y,) = clamp.outputs
    flows = isinstance(back.args[1], Ref) and back.args[1].tensor == y and isinstance(back.args[0], Ref)
    if y is None or not flows:
        return plain
    low, high = _limits(clamp)
    return _Pattern(number, backward[0], after[0], maker, low, high)


def _limits(clamp: Op) -> tuple[float, float]:
    if clamp.kind == "aten.relu.default":
        return 0.0, math.inf
    low = clamp.args[1] if len(clamp.args) > 1 else -1.0
    high = clamp.args[2] if len(clamp.args) > 2 else 1.0
    assert isinstance(low, int | float)
    assert isinstance(high, int | float)
    return float(low), float(high)


def _replacement(builder: Builder, graph: Graph, pattern: _Pattern) -> dict[int, list[Op]]:
    """The ops that take the place of others, by number."""
    norm, backward = graph.ops[pattern.norm], graph.ops[pattern.norm_backward]
    x, weight, bias, running_mean, running_var, _, momentum, eps = norm.args
    y_bn, mean, invstd = norm.outputs
    assert mean is not None
    assert invstd is not None
    clamp = None if pattern.clamp is None else graph.ops[pattern.clamp]
    shape: tuple[Value, ...] = (Ref(mean), Ref(invstd), weight, bias, pattern.low, pattern.high)
    statistics = replace(
        norm, name=f"{norm.name}_statistics", kind="edgetrain.norm.statistics",
        args=(x, running_mean, running_var, momentum, eps), outputs=(mean, invstd),
    )  # fmt: skip
    apply = replace(
        norm, name=f"{norm.name}_apply", kind="edgetrain.norm.apply", args=(x, *shape),
        outputs=(y_bn,) if clamp is None else clamp.outputs, writes=(),
    )  # fmt: skip
    dy = backward.args[0] if pattern.clamp_backward is None else graph.ops[pattern.clamp_backward].args[0]
    assert isinstance(dy, Ref)
    assert isinstance(x, Ref)
    laid_out = []
    if not _channels_last(graph.tensors[dy.tensor]):
        laid_out = [_laid_out(builder, dy.tensor, x.tensor, backward)]
        dy = Ref(laid_out[0].creates[0])
    flows = replace(backward, kind="edgetrain.norm.backward", args=(dy, x, *shape))
    replaced = {pattern.norm: [statistics, apply], pattern.norm_backward: [*laid_out, flows]}
    if pattern.clamp is not None and pattern.clamp_backward is not None:
        replaced[pattern.norm] = [statistics]
        replaced[pattern.clamp] = [apply]
        replaced[pattern.clamp_backward] = []
    return replaced


def _laid_out(builder: Builder, dy: int, x: int, backward: Op) -> Op:
    """A copy of the gradient in the layout of the images."""
    copy = builder.add_like(x, f"{builder.tensors[dy].name}_channels_last", "gradient")
    return replace(
        backward, name=f"{backward.name}_clone", kind="aten.clone.default", args=(Ref(dy),),
        kwargs=(("memory_format", Atom("memory_format", "channels_last")),), outputs=(copy,),
    )  # fmt: skip


def _channels_last(tensor: Tensor) -> bool:
    """A dense image batch with its channels innermost."""
    if len(tensor.shape) != 4 or tensor.offset:
        return False
    _, C, H, W = tensor.shape
    expected = (H * W * C, 1, W * C, C)
    return all(n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride, expected, strict=True))
