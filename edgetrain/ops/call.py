"""Executing one op: from its name in a graph to the kernel that runs it.

Names come from graph files, which are not trusted: only torch's own compute kernels are found, none that reads a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from edgetrain.errors import InternalError, UserError
from edgetrain.graph.ir import Atom, Graph, Op, Ref, Value
from edgetrain.ops import norm

OWN: dict[str, Callable[..., Any]] = {
    "edgetrain.norm.statistics": norm.statistics,
    "edgetrain.norm.apply": norm.apply,
    "edgetrain.norm.backward": norm.backward,
}
# Kernels of ours that may overwrite this argument, given to them as `out`, with their first result.
_OWN_OVER = {
    "edgetrain.norm.apply": 0,
    "edgetrain.norm.backward": 0,
    # The kernels of firmware (firmware/kernels): the result over the first argument, element by element.
    **dict.fromkeys(
        (
            "edgetrain.relu.forward", "edgetrain.relu.backward", "edgetrain.clamp.forward", "edgetrain.clamp.backward",
            "edgetrain.sigmoid.forward", "edgetrain.sigmoid.backward", "edgetrain.tanh.forward",
            "edgetrain.tanh.backward", "edgetrain.add.forward", "edgetrain.dropout.apply",
            "edgetrain.norm.backward_frozen", "edgetrain.group_norm.backward",
            "edgetrain.softmax_cross_entropy.backward",
        ),
        0,
    ),
}  # fmt: skip

aten = torch.ops.aten

_REFUSED = {"from_file", "_resize_output_", "set_", "resize_", "resize_as_"}

# Kernels that work element by element and may overwrite the named argument: the result is bitwise the same.
_UNARY = (
    "relu", "hardtanh", "sigmoid", "tanh", "silu", "gelu", "elu", "leaky_relu", "hardswish", "hardsigmoid", "exp",
    "log", "neg", "sqrt", "rsqrt", "abs", "square", "clamp", "clamp_min", "clamp_max", "reciprocal", "sin", "cos",
    "erf", "pow",
)  # fmt: skip
_BINARY = ("add", "sub", "mul", "div", "masked_fill")
_PLACED = ("scatter",)  # which begin with a copy of it
_BACKWARD = (
    "threshold_backward", "hardtanh_backward", "sigmoid_backward", "tanh_backward", "gelu_backward", "silu_backward",
    "leaky_relu_backward",
)  # fmt: skip


def resolve(kind: str) -> Callable[..., Any]:
    """The kernel of an op kind such as `aten.convolution.default`."""
    if kind in OWN:
        return OWN[kind]
    namespace, name, overload = kind.split(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if name not in _REFUSED else None
    found = getattr(packet, overload, None)
    # TorchScript's own functions, one of which writes files, are in the same place; no kernel is registered for them.
    if not isinstance(found, torch._ops.OpOverload) or not torch._C._dispatch_has_kernel(found.name()):
        raise UserError(
            f"this PyTorch has no op {kind}", received=f"torch {torch.__version__}",
            next_step="capture the graph again with the PyTorch that runs it",
        )  # fmt: skip
    return found


def argument(value: Value, tensors: Mapping[int, torch.Tensor]) -> Any:
    """An argument of an op as its kernel takes it."""
    if isinstance(value, Ref):
        return tensors[value.tensor]
    if isinstance(value, tuple):
        return [argument(item, tensors) for item in value]
    return constant(value)


def constant(value: Value) -> Any:
    """The same of one without tensors. Its name comes from a graph file, and stands for nothing but torch's own."""
    if not isinstance(value, Atom):
        return value
    found = torch.device(value.name) if value.sort == "device" else getattr(torch, value.name, None)
    kinds = {
        "dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout, "device": torch.device,
    }  # fmt: skip
    if not isinstance(found, kinds[value.sort]):
        raise InternalError(f"{value} is nothing that torch knows")
    return found


def overwritable(graph: Graph, op: Op) -> tuple[int, ...]:
    """The tensors (first choice first) that the op could overwrite with its result, if nothing else needed them."""
    if op.view or op.writes or op.random or not op.outputs or op.outputs[0] is None:
        return ()
    if op.kind in _OWN_OVER:
        target = op.args[_OWN_OVER[op.kind]]
        return (target.tensor,) if isinstance(target, Ref) and _same_bytes(graph, target.tensor, op.outputs[0]) else ()
    if len(op.outputs) != 1:
        return ()
    _, name, overload = op.kind.split(".")
    found = [op.args[0]] if name in _BACKWARD or (name in (*_UNARY, *_BINARY, *_PLACED) and _has_in_place(op)) else []
    if name in ("add", "mul") and overload == "Tensor" and not op.kwargs and len(op.args) == 2:
        found.append(op.args[1])
    read = [graph.tensors[t].storage for t in op.reads]
    return tuple(
        ref.tensor
        for ref in found
        if isinstance(ref, Ref)
        and _same_bytes(graph, ref.tensor, op.outputs[0])
        and read.count(graph.tensors[ref.tensor].storage) == 1  # no other argument is a view of it
    )


def _same_bytes(graph: Graph, target: int, result: int) -> bool:
    """The target fills its storage, laid out just as the result is. (A complex one may be a conjugate that is still to
    be computed; its result would be one too.)"""
    a, b = graph.tensors[target], graph.tensors[result]
    if a.dtype.startswith("complex"):
        return False
    same = (a.shape, a.stride, a.dtype, a.offset) == (b.shape, b.stride, b.dtype, b.offset)
    return same and graph.storages[a.storage].n_bytes == graph.storages[b.storage].n_bytes == a.n_bytes


def _has_in_place(op: Op) -> bool:
    _, name, overload = op.kind.split(".")
    return hasattr(getattr(aten, f"{name}_", None), overload)


def in_place(op: Op, target: int) -> tuple[str, bool]:
    """How to run the op over one of its `overwritable` tensors: the kind to call, and whether arguments 0 and 1 swap.

    `keyword_of` names the argument that takes the target, for kinds that have one.
    """
    if op.kind in _OWN_OVER:
        return op.kind, False
    _, name, overload = op.kind.split(".")
    if name in _BACKWARD:
        return f"aten.{name}.grad_input", False
    swap = isinstance(op.args[0], Ref) and op.args[0].tensor != target
    return f"aten.{name}_.{overload}", swap


def keyword_of(kind: str) -> str | None:
    """The keyword by which a kind that `in_place` gave takes its target; None where that is its first argument."""
    return "out" if kind in _OWN_OVER else "grad_input" if kind.endswith(".grad_input") else None


def returns_one(kind: str) -> bool:
    """The kernel returns a tensor, and not a sequence of them."""
    if kind in OWN:
        return kind == "edgetrain.norm.apply"
    schema = resolve(kind)._schema  # type: ignore[attr-defined]
    return len(schema.returns) == 1 and "List" not in str(schema.returns[0].type)


# Kernels that raise for no value that their tensors can hold. (Those that look up an index, factor a matrix or check a
# range may; an op that is not listed is taken to.)
_TOTAL = {
    "convolution", "convolution_backward", "native_batch_norm", "native_batch_norm_backward", "native_layer_norm",
    "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward", "mm", "bmm", "addmm", "baddbmm",
    "add", "add_", "sub", "mul", "mul_", "div", "neg", "sum", "mean", "expand", "view", "_unsafe_view", "reshape", "t",
    "transpose", "permute", "clone", "copy", "copy_", "fill", "fill_", "zeros", "zeros_like", "ones_like", "empty",
    "empty_like", "new_zeros", "full", "full_like", "scalar_tensor", "where", "exp", "tanh", "sigmoid", "sqrt", "rsqrt",
    "pow", "abs", "sign", "gt", "lt", "ge", "le", "eq", "ne", "logical_and", "logical_not", "masked_fill", "select",
    "slice", "select_backward", "slice_backward", "squeeze", "unsqueeze", "cat", "split", "as_strided", "_to_copy",
    "constant_pad_nd", "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "relu",
    "hardtanh", "threshold_backward", "hardtanh_backward", "gelu_backward", "silu_backward", "elu_backward",
    "leaky_relu_backward", "sigmoid_backward", "tanh_backward", "hardswish_backward", "hardsigmoid_backward",
    "softplus_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward", "max_pool2d_with_indices_backward",
    "native_dropout_backward", "nll_loss_backward", "nll_loss2d_backward", "mse_loss_backward",
    "embedding_dense_backward", "linalg_vector_norm", "stack", "clamp", "reciprocal", "sgd", "adam", "adamw", "norm",
    "accumulate",
}  # fmt: skip


def cannot_fail(op: Op) -> bool:
    """The op raises for no values, once it has run with these shapes. (Indices of a backward pass were checked by the
    forward pass.)"""
    return op.view or op.kind.split(".")[1] in _TOTAL


def autocast_devices() -> list[str]:
    """Where kernels cast. The casts are part of a graph: a step that did not turn this off would cast again, in regions
    without it too."""
    return [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]


def set_autocast(devices: Sequence[str], enabled: bool) -> None:
    for device in devices:
        torch.set_autocast_enabled(device, enabled)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Called under autocast, kernels cast as the graph says."""
    devices = autocast_devices()
    set_autocast(devices, False)
    try:
        yield
    finally:
        set_autocast(devices, True)
