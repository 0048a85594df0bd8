"""Executing one op: from its name in a graph to the kernel that runs it.

Names come from graph files, which are not trusted: only torch's own compute kernels are found, none that reads a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from edgetrain.errors import UserError
from edgetrain.graph.ir import Graph, Op, Ref

aten = torch.ops.aten

_REFUSED = {"from_file", "_resize_output_", "set_", "resize_", "resize_as_"}

# Kernels that work element by element and may overwrite the named argument: the result is bitwise the same.
_UNARY = (
    "relu", "hardtanh", "sigmoid", "tanh", "silu", "gelu", "elu", "leaky_relu", "hardswish", "hardsigmoid", "exp",
    "log", "neg", "sqrt", "rsqrt", "abs", "square", "clamp", "clamp_min", "clamp_max", "reciprocal", "sin", "cos",
    "erf", "pow",
)  # fmt: skip
_BINARY = ("add", "sub", "mul", "div", "masked_fill")
_BACKWARD = (
    "threshold_backward", "hardtanh_backward", "sigmoid_backward", "tanh_backward", "gelu_backward", "silu_backward",
    "leaky_relu_backward",
)  # fmt: skip


def resolve(kind: str) -> Callable[..., Any]:
    """The kernel of an op kind such as `aten.convolution.default`."""
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


def overwritable(graph: Graph, op: Op) -> tuple[int, ...]:
    """The tensors (first choice first) that the op could overwrite with its result, if nothing else needed them."""
    if op.view or op.writes or op.random or len(op.outputs) != 1 or op.outputs[0] is None:
        return ()
    _, name, overload = op.kind.split(".")
    found = [op.args[0]] if name in _BACKWARD or (name in (*_UNARY, *_BINARY) and _has_in_place(op)) else []
    if name in ("add", "mul") and overload == "Tensor" and not op.kwargs and len(op.args) == 2:
        found.append(op.args[1])
    return tuple(ref.tensor for ref in found if isinstance(ref, Ref) and _same_bytes(graph, ref.tensor, op.outputs[0]))


def _same_bytes(graph: Graph, target: int, result: int) -> bool:
    """The target fills its storage, laid out just as the result is."""
    a, b = graph.tensors[target], graph.tensors[result]
    same = (a.shape, a.stride, a.dtype, a.offset) == (b.shape, b.stride, b.dtype, b.offset)
    return same and graph.storages[a.storage].n_bytes == graph.storages[b.storage].n_bytes == a.n_bytes


def _has_in_place(op: Op) -> bool:
    _, name, overload = op.kind.split(".")
    return hasattr(getattr(aten, f"{name}_", None), overload)


def in_place(op: Op, target: int) -> tuple[str, bool]:
    """How to run the op over one of its `overwritable` tensors: the kind to call, and whether arguments 0 and 1 swap.

    A kind that ends in `.grad_input` takes its target as the keyword `grad_input`.
    """
    _, name, overload = op.kind.split(".")
    if name in _BACKWARD:
        return f"aten.{name}.grad_input", False
    swap = isinstance(op.args[0], Ref) and op.args[0].tensor != target
    return f"aten.{name}_.{overload}", swap
