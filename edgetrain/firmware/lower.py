"""From a captured training step to the ops that firmware has kernels for.

In:  a graph of PyTorch's ops, from `capture`. Out: a graph of the same step in ops of ours, one for each kernel in
     `kernels/`, that every planner takes and that `emit` prints as C.

    aten.convolution                      edgetrain.conv2d.forward
    aten.convolution_backward        →    edgetrain.conv2d.backward_weight, .backward_input, edgetrain.bias.backward
    aten.t, aten.mm, aten.t               edgetrain.dense.backward_weight
    aten._log_softmax, nll_loss_forward   edgetrain.softmax_cross_entropy.forward

What is promised of the result:
- images are dense [B, H, W, C] and filters [K, R, S, C] in memory (shapes stay PyTorch's, strides say it), everything
  else is dense in the order of its shape; a copy is an op (`edgetrain.permute.*`), so it is planned and counted;
- a kernel needs no memory but what the op reads and creates: its workspace is a result that no op reads;
- sizes of storages are whole words of 4 bytes, so an arena holds exactly what a plan says;
- nothing draws from a random stream: a mask is a function of the step's number, and can be recomputed.

An op without a kernel is a `UserError` that names it and its module. What PyTorch's strides say is not looked at: each
op means the same whatever they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from edgetrain.arguments import checked
from edgetrain.firmware import lower_norms, lower_pools, lower_products
from edgetrain.firmware.lowering import (
    ABOUT,
    Dense,
    LogSoftmax,
    LossGradient,
    Lowering,
    Mask,
    Nothing,
    One,
    Rule,
    Rules,
    Slice,
    as_float,
    identifier,
    nhwc,
    same_in_memory,
)
from edgetrain.graph.ir import Graph, Op, Ref, Tensor, Value
from edgetrain.graph.rewrite.builder import contiguous
from edgetrain.graph.rewrite.fuse import fuse_batch_norm
from edgetrain.names import short_name, take_free_name
from edgetrain.ops.entry import entry_of

RULES = Rules()


def is_lowered(graph: Graph) -> bool:
    return ABOUT in graph.about


@checked()
def lower_for_firmware(graph: Graph, model: nn.Module | None = None) -> Graph:
    """The same step in ops that firmware has kernels for. model: whose step it is; errors then name its layers."""
    if is_lowered(graph):
        return graph
    named = () if model is None else model.named_modules()
    # A composite module says nothing of an op of its own.
    layers = {path: type(module).__name__ for path, module in named if not any(module.children())}
    fused = fuse_batch_norm(_channels_last(graph))
    return Lowering(fused, _all_rules(fused), layers).run()


def _channels_last(graph: Graph) -> Graph:
    """Every image as it will lie in memory, so that `fuse_batch_norm` takes it for one that it knows."""
    tensors = (
        replace(t, stride=nhwc(t.shape), offset=0) if len(t.shape) == 4 and 0 not in t.stride else t
        for t in graph.tensors
    )
    return replace(graph, tensors=tuple(tensors))


def _all_rules(graph: Graph) -> Mapping[str, Rule]:
    """An op that has no rule and a C kernel, as one from outside may have, stays as it is."""
    own = {op.kind: _as_it_is for op in graph.ops if entry_of(op.kind).c is not None}
    return {**own, **RULES, **lower_products.RULES, **lower_pools.RULES, **lower_norms.RULES}


def _as_it_is(w: Lowering, op: Op) -> None:
    """Its tensors are those of firmware. What it draws at random is a function of the step's number."""

    def lowered(value: Value) -> Value:
        if isinstance(value, Ref):
            return Ref(w.dense(value.tensor))
        return tuple(map(lowered, value)) if isinstance(value, tuple) else value

    args, kwargs = tuple(map(lowered, op.args)), tuple((key, lowered(value)) for key, value in op.kwargs)
    writes = []
    for t in op.reads:
        if w.graph.tensors[t].storage in op.writes:
            if w.value[t] != Dense(w.dense(t)):
                raise w.refuse("a tensor that is changed in place, and laid out otherwise, has no kernel")
            writes.append(w.tensors[w.dense(t)].storage)
    results = [None if t is None else _result(w, op, w.graph.tensors[t]) for t in op.outputs]
    w.call(op.kind, args, results, writes=writes, kwargs=kwargs)
    for position, result in enumerate(results):
        if result is not None:
            w.gives(position, result)


def _result(w: Lowering, op: Op, like: Tensor) -> int:
    if like.dtype not in ("float32", "int32", "int64", "uint8"):
        raise w.refuse(f"a result of type {like.dtype} has no kernel")
    return w.result(identifier(short_name(op.kind)), like.shape, like.dtype)


# ---- element by element


@RULES.of("aten.relu.default", "aten.hardtanh.default", "aten.sigmoid.default", "aten.tanh.default")
def _activation(w: Lowering, op: Op) -> None:
    kind = op.kind.split(".")[1]
    limits: tuple[Value, ...] = ()
    if kind == "hardtanh":
        kind, limits = "clamp", (*op.args[1:3], *(-1, 1)[len(op.args) - 1 :])
    x = w.arg(0)
    y = w.forward_result(kind, w.shape(x))
    w.call(f"edgetrain.{kind}.forward", (Ref(x), *map(as_float, limits)), (y,))
    w.before[y] = x
    w.gives(0, y)


_BACKWARD = {
    "aten.threshold_backward.default": "relu", "aten.hardtanh_backward.default": "clamp",
    "aten.sigmoid_backward.default": "sigmoid", "aten.tanh_backward.default": "tanh",
}  # fmt: skip


@RULES.of(*_BACKWARD)
def _activation_backward(w: Lowering, op: Op) -> None:
    kind = _BACKWARD[op.kind]
    if kind == "relu" and op.args[2] != 0:
        raise w.refuse("a threshold other than 0 has no kernel")
    dy, y = w.arg(0), w.arg(1)
    dx = w.gradient_of(w.before_or(y))
    limits = map(as_float, op.args[2:4]) if kind == "clamp" else ()
    w.call(f"edgetrain.{kind}.backward", (Ref(dy), Ref(y), *limits), (dx,))
    w.gives(0, dx)


@RULES.of("aten.add.Tensor")
def _add(w: Lowering, op: Op) -> None:
    if op.kwargs or not isinstance(op.args[1], Ref):
        raise w.refuse("a sum with a number, or with a factor, has no kernel")
    a, b = w.arg(0), w.arg(1)
    if w.shape(a) != w.shape(b):
        raise w.refuse("a sum of tensors of different shapes has no kernel")
    y = w.forward_result("add", w.shape(a)) if op.phase == "forward" else w.result("d_sum", w.shape(a))
    w.call("edgetrain.add.forward", (Ref(a), Ref(b)), (y,))
    w.gives(0, y)


@RULES.of("aten.add_.Tensor")
def _count(w: Lowering, op: Op) -> None:
    target = w.arg(0)
    number = op.args[1]
    if w.tensors[target].dtype != "int64" or w.shape(target) != () or not isinstance(number, int):
        raise w.refuse("a tensor that is changed in place has no kernel")
    w.call("edgetrain.counter.add", (Ref(target), number), (), writes=(w.tensors[target].storage,))


# ---- layouts


@RULES.of("aten.clone.default", "aten.contiguous.default", "aten.detach.default", "aten.alias.default")
def _same(w: Lowering, op: Op) -> None:
    """A copy of the same numbers is not needed: nothing here is changed in place."""
    assert op.outputs[0] is not None
    w.value[op.outputs[0]] = w.held(0)


@RULES.of(
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
    name = take_free_name(f"{identifier(tensor.name)}_view", w.names)
    view = w.add_tensor(replace(tensor, name=name, shape=shape, stride=stride))
    w.call("aten.view.default", (Ref(x), shape), (view,), view=True)
    w.before[view] = x
    w.gives(0, view)


@RULES.of("aten.slice.Tensor")
def _slice(w: Lowering, op: Op) -> None:
    assert op.outputs[0] is not None
    x, dim, start, end = w.arg(0), *op.args[1:4]
    assert isinstance(dim, int)
    assert isinstance(start, int)
    assert isinstance(end, int)
    if dim % len(w.shape(x)) != 1 or len(op.args) > 4:
        raise w.refuse("a part of a tensor other than some of its channels has no kernel")
    w.value[op.outputs[0]] = Slice(x, start, min(end, w.shape(x)[1]))


@RULES.of("aten.cat.default")
def _concat(w: Lowering, op: Op) -> None:
    assert op.outputs[0] is not None
    shape = w.graph.tensors[op.outputs[0]].shape
    dim = op.args[1] if len(op.args) > 1 else 0
    if not isinstance(dim, int) or dim % len(shape) != 1 or not isinstance(op.args[0], tuple):
        raise w.refuse("tensors that are joined along something else than channels have no kernel")
    parts = [w.dense(ref.tensor) for ref in op.args[0] if isinstance(ref, Ref)]
    y = w.forward_result("concat", shape)
    w.call("edgetrain.concat.forward", tuple(Ref(part) for part in parts), (y,))
    w.gives(0, y)


# ---- dropout


@RULES.of("aten.empty_like.default")
def _empty(w: Lowering, op: Op) -> None:
    assert op.outputs[0] is not None
    w.value[op.outputs[0]] = Nothing()


@RULES.of("aten.bernoulli.p")
def _bernoulli(w: Lowering, op: Op) -> None:
    assert op.outputs[0] is not None
    shape, keep = w.graph.tensors[op.outputs[0]].shape, op.args[1]
    w.counts["masks"] = number = w.counts.get("masks", 0) + 1
    mask = w.result(f"mask_{number}", shape, "uint8")
    w.call("edgetrain.dropout.mask", (as_float(keep), number), (mask,))
    w.value[op.outputs[0]] = Mask(mask, as_float(keep), divided=as_float(keep) == 1.0)


@RULES.of("aten.mul.Tensor")
def _multiply(w: Lowering, op: Op) -> None:
    x, mask = w.held(0), w.held(1)
    if not isinstance(mask, Mask):
        raise w.refuse("a product of tensors has no kernel")
    if not mask.divided or isinstance(x, Mask):
        raise w.refuse("a mask that is no dropout's has no kernel")
    t = w.arg(0)
    y = w.forward_result("dropout", w.shape(t)) if op.phase == "forward" else w.result("d_dropout", w.shape(t))
    w.call("edgetrain.dropout.apply", (Ref(t), Ref(mask.tensor), mask.keep), (y,))
    w.before[y] = t
    w.gives(0, y)


# ---- losses


@RULES.of("aten._log_softmax.default")
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


@RULES.of("aten.nll_loss_forward.default")
def _nll_loss(w: Lowering, op: Op) -> None:
    value, labels = w.held(0), w.arg(1)
    if op.args[2] is not None or not isinstance(value, LogSoftmax):
        raise w.refuse("a loss of class labels other than cross-entropy without weights has no kernel")
    mean = _mean_or_sum(w, op.args[3])
    loss = w.result("loss", ())
    logs = w.result("log_probabilities", w.shape(value.logits))
    w.call("edgetrain.softmax_cross_entropy.forward", (Ref(value.logits), Ref(labels), mean), (loss, logs))
    ref = op.args[0]
    assert isinstance(ref, Ref)
    w.value[ref.tensor] = replace(value, log_probabilities=logs)
    w.gives(0, loss)


@RULES.of("aten.nll_loss_backward.default")
def _nll_loss_backward(w: Lowering, op: Op) -> None:
    if not isinstance(w.held(0), One):
        raise w.refuse("a loss that is computed with further has no kernel")
    assert op.outputs[0] is not None
    w.value[op.outputs[0]] = LossGradient(w.arg(2), _mean_or_sum(w, op.args[4]))


@RULES.of("aten._log_softmax_backward_data.default")
def _log_softmax_backward(w: Lowering, op: Op) -> None:
    flows, value = w.held(0), w.held(1)
    if not isinstance(flows, LossGradient) or not isinstance(value, LogSoftmax) or value.log_probabilities is None:
        raise w.refuse("the logarithm of a softmax outside of a cross-entropy has no kernel")
    dx = w.gradient_of(value.logits)
    args = (Ref(value.log_probabilities), Ref(flows.labels), flows.mean)
    w.call("edgetrain.softmax_cross_entropy.backward", args, (dx,))
    w.gives(0, dx)


@RULES.of("aten.ones_like.default")
def _ones(w: Lowering, op: Op) -> None:
    assert op.outputs[0] is not None
    if w.graph.tensors[op.outputs[0]].shape != ():
        raise w.refuse("a tensor of ones has no kernel")
    w.value[op.outputs[0]] = One()


@RULES.of("aten.mse_loss.default")
def _mse(w: Lowering, op: Op) -> None:
    x, target = w.arg(0), w.arg(1)
    mean = _mean_or_sum(w, op.args[2] if len(op.args) > 2 else 1)
    if w.shape(x) != w.shape(target):
        raise w.refuse("a mean squared error of tensors of different shapes has no kernel")
    loss = w.result("loss", ())
    w.call("edgetrain.mse.forward", (Ref(x), Ref(target), mean), (loss,))
    w.gives(0, loss)


@RULES.of("aten.mse_loss_backward.default")
def _mse_backward(w: Lowering, op: Op) -> None:
    if not isinstance(w.held(0), One):
        raise w.refuse("a loss that is computed with further has no kernel")
    x, target = w.arg(1), w.arg(2)
    dx = w.gradient_of(x)
    w.call("edgetrain.mse.backward", (Ref(x), Ref(target), _mean_or_sum(w, op.args[3])), (dx,))
    w.gives(0, dx)


# ---- updates


@RULES.of("edgetrain.sgd.update", "edgetrain.adam.update", "edgetrain.adamw.update")
def _update(w: Lowering, op: Op) -> None:
    tensors = [w.arg(position) for position in range(len(op.args))]
    lasting = [w.tensors[t].storage for n, t in enumerate(tensors) if n != 1]
    w.call(op.kind, tuple(Ref(t) for t in tensors), (), writes=lasting, kwargs=op.kwargs)
