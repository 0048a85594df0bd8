"""What a kernel would give, predicted without running it: torch's fake kernels, corrected where the real ones differ.

In:  a kernel and its arguments as fake tensors.
Out: fake results of the shape, type and strides that the CPU's kernel gives.

A wrong prediction makes a wrong graph, because the calls that follow depend on it. A `contiguous` is left out where
there seems to be nothing to do, and a kernel that relies on it (the backward of a group norm) silently gives wrong
numbers. So the entry of an op states each known difference (`Entry.predicts`), a compiled step checks every result the
first time that it runs, and the layouts that it observes are learned: the next capture is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from edgetrain.dtypes import dtype_name, dtype_of
from edgetrain.graph import ir
from edgetrain.ops.entry import entry_of_function

Layout = tuple[tuple[int, ...], tuple[int, ...], str, int]  # shape, strides, type, bytes of the storage
# Call (`key_of`) → output → the layout that its kernel was observed to give.
_learned: dict[str, dict[int, Layout]] = {}
MAX_LEARNED = 4096  # calls; the oldest is dropped first


class MixedTypes(RuntimeError):
    """What the kernel itself would raise."""

    def __init__(self, func: Any, types: set[torch.dtype]) -> None:
        self.types = types
        names = " and ".join(sorted(map(str, types)))
        super().__init__(f"{func} takes tensors of one dtype, and gets {names}")


def result_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _known(func, args, kwargs)
    if _learned and (seen := _learned.get(key_of(str(func), args, kwargs))):
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        for position, layout in seen.items():
            results[position] = _laid_out(results[position], layout)
        return results[0] if isinstance(result, torch.Tensor) else tuple(results)
    return result


def key_of(kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The same for calls to which a kernel gives the same layouts: shapes, strides and types of the tensors, and all
    other arguments. The arguments are those of a recording or, with `Tensor` in place of `Ref`, those of a graph."""
    return repr((kind, _text(args), sorted((name, _text(value)) for name, value in kwargs.items())))


def layout_of(real: torch.Tensor) -> Layout:
    """How a tensor that a kernel gave lies in memory."""
    name = dtype_name(real.dtype)
    return tuple(real.shape), real.stride(), name, real.untyped_storage().nbytes()


def learn(key: str, outputs: Mapping[int, Layout]) -> bool:
    """Note what a kernel gave. False if that does not help: it was known, or an equal call gave something else."""
    known = _learned.setdefault(key, {})
    new = {position: layout for position, layout in outputs.items() if position not in known}
    known.update(new)
    while len(_learned) > MAX_LEARNED:
        _learned.pop(next(iter(_learned)))
    return bool(new) and all(known[position] == layout for position, layout in outputs.items())


def learned() -> str:
    """All layouts that were learned, as one text: a graph depends on them."""
    return repr(sorted((key, sorted(layouts.items())) for key, layouts in _learned.items()))


def _text(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), dtype_name(value.dtype)
    if isinstance(value, ir.Tensor):
        return value.shape, value.stride, value.dtype
    if isinstance(value, ir.Atom):
        return value.name
    if isinstance(value, list | tuple):
        # A list of truth values says which results are requested; the layout of each is independent of the others.
        return () if value and all(isinstance(item, bool) for item in value) else tuple(_text(item) for item in value)
    return value if isinstance(value, bool | int | str | None) else str(value).removeprefix("torch.")


def _laid_out(like: torch.Tensor, layout: Layout) -> torch.Tensor:
    shape, stride, name, n_bytes = layout
    dtype = dtype_of(name)
    room = torch.empty(-(-n_bytes // dtype.itemsize), dtype=dtype, device=like.device)
    return room.as_strided(shape, stride)


def _known(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    entry = entry_of_function(func)
    if entry.one_type and args[0].device.type == "cpu":
        types = {t.dtype for t in args if isinstance(t, torch.Tensor)}
        if len(types) > 1:
            raise MixedTypes(func, types)
    return func(*args, **kwargs) if entry.predicts is None else entry.predicts(func, args, kwargs)


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Laid out channels-last, and not contiguous at the same time."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
