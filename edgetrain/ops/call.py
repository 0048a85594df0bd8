"""Executing one op: from its name in a graph to the kernel that runs it.

Names may come from graph files, which are not trusted: only compute kernels of torch are found, none that reads a file.
(Of other libraries a file may name those that have an entry: see `unknown_kinds` in graph/verify.py.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from edgetrain.errors import InternalError, UserError
from edgetrain.graph.ir import Atom, Graph, Op, Ref, Value
from edgetrain.ops.entry import Kernel, entry_of


def resolve(kind: str, kernel: str = "") -> Callable[..., Any]:
    """The kernel of an op kind such as `aten.convolution.default`: the one of this name, or the entry's first."""
    chosen = kernel_of(kind, kernel)
    if chosen is not None and chosen.run is not None:
        return chosen.run
    overload = None if chosen is None else _of_torch(kind)
    if overload is None:
        raise UserError(
            f"this PyTorch has no op {kind}", received=f"torch {torch.__version__}",
            next_step="capture the graph again with the PyTorch that runs it, and with the modules imported that "
            "register its ops",
        )  # fmt: skip
    return overload


def kernel_of(kind: str, name: str = "") -> Kernel | None:
    """The kernel of that name, or the first one. None where there is none, or the op may not run in a step."""
    entry = entry_of(kind)
    return next((kernel for kernel in entry.kernels if entry.legal and name in ("", kernel.name)), None)


@functools.cache
def _of_torch(kind: str) -> Callable[..., Any] | None:
    namespace, name, overload = kind.split(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    kernel = getattr(packet, overload, None)
    # TorchScript's own functions, one of which writes files, are in the same place; no kernel is registered for them.
    if not isinstance(kernel, torch._ops.OpOverload) or not torch._C._dispatch_has_kernel(kernel.name()):
        return None
    return kernel


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
    value_of_torch = torch.device(value.name) if value.sort == "device" else getattr(torch, value.name, None)
    kinds = {
        "dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout, "device": torch.device,
    }  # fmt: skip
    if not isinstance(value_of_torch, kinds[value.sort]):
        raise InternalError(f"{value} is nothing that torch knows")
    return value_of_torch


def overwritable(graph: Graph, op: Op) -> tuple[int, ...]:
    """The tensors (first choice first) that the op could overwrite with its result, if nothing else needed them."""
    how = entry_of(op.kind).overwrites
    if how is None or op.view or op.writes or op.random or not op.outputs or op.outputs[0] is None:
        return ()
    if how.strict and (len(op.outputs) != 1 or not _form_exists(op.kind)):
        return ()
    exchanges = how.exchanges and not op.kwargs and len(op.args) == 2
    read = [graph.tensors[t].storage for t in op.reads]
    return tuple(
        ref.tensor
        for ref in op.args[: 2 if exchanges else 1]
        if isinstance(ref, Ref)
        and _same_bytes(graph, ref.tensor, op.outputs[0])
        and (not how.strict or read.count(graph.tensors[ref.tensor].storage) == 1)  # no other argument is a view of it
    )


def _same_bytes(graph: Graph, target: int, result: int) -> bool:
    """The target fills its storage, laid out just as the result is. (A complex one may be a conjugate that is still to
    be computed; its result would be one too.)"""
    a, b = graph.tensors[target], graph.tensors[result]
    if a.dtype.startswith("complex"):
        return False
    same = (a.shape, a.stride, a.dtype, a.offset) == (b.shape, b.stride, b.dtype, b.offset)
    return same and graph.storages[a.storage].n_bytes == graph.storages[b.storage].n_bytes == a.n_bytes


@functools.cache
def _overwriting(kind: str) -> str:
    """The kind that runs the op over one of its arguments."""
    how = entry_of(kind).overwrites
    assert how is not None
    name, _, overload = kind.rpartition(".")
    return how.form.format(name=name, overload=overload)


@functools.cache
def _form_exists(kind: str) -> bool:
    form = _overwriting(kind)
    return form == kind or _of_torch(form) is not None


def over(op: Op, target: int) -> Op:
    """The op as it runs over one of its `overwritable` tensors."""
    how = entry_of(op.kind).overwrites
    assert how is not None
    args, kwargs = op.args, op.kwargs
    if how.exchanges and args[0] != Ref(target):
        args = (args[1], args[0], *args[2:])
    if how.keyword is not None:
        kwargs = (*kwargs, (how.keyword, Ref(target)))
    return replace(op, kind=_overwriting(op.kind), args=args, kwargs=kwargs)


def kernel_and_op(op: Op, target: int | None = None, kernel: str = "") -> tuple[Callable[..., Any], Op]:
    """What runs the op, over that tensor if one is given, and the op with the arguments that it takes."""
    if kernel and target is not None:
        return resolve(op.kind, kernel), replace(op, kwargs=(*op.kwargs, ("out", Ref(target))))
    op = op if target is None else over(op, target)
    return resolve(op.kind, kernel), op


def returns_one(kind: str) -> bool:
    """The kernel returns a tensor, and not a sequence of them."""
    kernel = kernel_of(kind)
    if kernel is not None and kernel.run is not None:
        return kernel.single
    schema = resolve(kind)._schema  # type: ignore[attr-defined]
    return len(schema.returns) == 1 and "List" not in str(schema.returns[0].type)


def cannot_fail(op: Op) -> bool:
    """The op raises for no values, once it has run with these shapes. (Indices of a backward pass were checked by the
    forward pass.)"""
    return op.view or entry_of(op.kind).raises == "never"


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
