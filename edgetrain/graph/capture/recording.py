"""What a `Recorder` writes down, as data: kernel calls over numbered tensors, and what is known of one call.

A raw tensor is one as PyTorch made it; the graph may have several tensors for it, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from edgetrain.graph.capture import kinds
from edgetrain.graph.ir import ITEM_BYTES, Atom, AtomSort, Phase, Value, one_nan
from edgetrain.ops.entry import entry_of_function

_ATOMS: tuple[tuple[AtomSort, type], ...] = (
    ("dtype", torch.dtype), ("memory_format", torch.memory_format), ("layout", torch.layout), ("device", torch.device),
)  # fmt: skip


@dataclass(frozen=True)
class Like:
    """Of a tensor of the batch what a fake one is made from."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Like:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


@dataclass(frozen=True, slots=True)
class RawRef:
    tensor: int


@dataclass(slots=True)
class RawCall:
    func: Any  # torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[int | None]
    single: bool  # the call returns one tensor, not a sequence of them
    writes: tuple[int, ...]  # tensors changed in place
    phase: Phase
    module: str


@dataclass
class Recording:
    fakes: list[torch.Tensor] = field(default_factory=list)  # by tensor number; kept, so that identities stay unique
    calls: list[RawCall] = field(default_factory=list)
    externals: dict[int, torch.Tensor] = field(default_factory=dict)  # tensor number → the real tensor
    lifted: dict[int, torch.Tensor] = field(default_factory=dict)  # constants that the function itself made

    def storage(self, tensor: int) -> int:
        return int(self.fakes[tensor].untyped_storage()._cdata)


Place = tuple[Any, ...]  # in memory
Places = Mapping[int, tuple[str, Place]]  # of tensors, by id, each with its path
# Shape, strides, type, device; of a view the tensor that it shows, and from where on.
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device, int | None, int]
# Is it one tensor, not a sequence of them? Each a new tensor, or the number of the one that was changed in place.
Results = tuple[bool, tuple[Layout | int | None, ...]]
# Number of a call, kernel, arguments → its results, None where they are not known, False if it is another call.
Ahead = Callable[[int, str, Any, Any], Results | Literal[False] | None]


def refs_in(value: Any) -> Iterator[int]:
    """The numbers of the tensors among arguments."""
    if isinstance(value, RawRef):
        yield value.tensor
    elif isinstance(value, dict):
        yield from refs_in(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from refs_in(item)


def plain(value: Any) -> Value:
    """An argument as a graph holds it; TypeError for one that it cannot hold."""
    if isinstance(value, float):
        return one_nan(value)
    if value is None or isinstance(value, bool | int | str | complex):
        return value
    for sort, kind in _ATOMS:
        if isinstance(value, kind):
            return Atom(sort, str(value).removeprefix("torch."))
    raise TypeError(type(value).__name__)


def unsupported(tensor: torch.Tensor) -> str | None:
    """What a tensor is that no graph can hold, in words."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout})"
    return None if str(tensor.dtype).removeprefix("torch.") in ITEM_BYTES else f"a tensor of type {tensor.dtype}"


def out_of_place(func: Any) -> Any | None:
    """The kernel that gives what an in-place one does as a new tensor, or as a view: the one of its name without the
    underscore that takes the same arguments. Overloads of the two need not have the same name."""
    name = func._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if func.namespace != "aten" or not name.endswith("_") or name.endswith("__") or packet is None:
        return None
    wanted = _signature(func)
    return next((f for f in (getattr(packet, o) for o in packet.overloads()) if _signature(f) == wanted), None)


def _signature(func: Any) -> list[tuple[str, str, bool]]:
    return [(a.name, str(a.type), a.kwarg_only) for a in func._schema.arguments]


def is_random(call: RawCall) -> bool:
    if torch.Tag.nondeterministic_seeded not in call.func.tags:
        return False
    # Attention kernels carry the tag for their dropout; without dropout they draw nothing.
    names = [a.name for a in call.func._schema.arguments]
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    return not ("dropout_p" in names and given.get("dropout_p", 0.0) == 0.0)


def place_in_memory(tensor: torch.Tensor) -> Place:
    """The storage first, and where in it the tensor lies."""
    lazy = tensor.is_conj(), tensor.is_neg()
    storage = int(tensor.untyped_storage()._cdata)
    return storage, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, *lazy


def is_dense(tensor: torch.Tensor) -> bool:
    return bool(kinds.IS_DENSE(tensor))


def asked_for(func: Any, args: tuple[Any, ...], results: list[Any]) -> list[bool]:
    """Which results the kernel makes. A backward kernel leaves out what its `output_mask` does; a fake one may not."""
    names = [argument.name for argument in func._schema.arguments]
    if "output_mask" in names and names.index("output_mask") < len(args):
        return list(args[names.index("output_mask")])
    return [True] * len(results)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call changes in place."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (v for v in (value if isinstance(value, list | tuple) else (value,)) if v is not None)
    state = entry_of_function(func).state
    if state is not None and state.changes(args):  # which its schema may not say
        yield from state.given(args)
