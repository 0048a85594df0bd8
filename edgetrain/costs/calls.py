"""An op on its own, ready to be run over and over: the kernel with arguments of the right shapes.

In:  an op of a graph and the way to run it. Out: a function without arguments, and a key by which the same call is
found again in another graph.

Values do not matter to the time, so tensors are cut from one pool of numbers between ¼ and ¾, which are probabilities
too (0 for whole numbers, which may be indices; true for truth values). Parameters and buffers that are there already
are read where they lie (`Live`): a copy of the largest weight may be more than the step itself takes. A kernel that
refuses what it is given, perhaps because another one has written into the pool, is given the numbers of the start, and
then identity matrices and 1 for whole numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from edgetrain.costs.table import Way
from edgetrain.graph.ir import ITEM_BYTES, Atom, Graph, Op, Ref, Value
from edgetrain.native.signals import raised_by_handler
from edgetrain.ops import call, update
from edgetrain.ops.entry import entry_of
from edgetrain.ops.replay import replay

_ALIGNED_BYTES = 64
HALF = 0.5
SLACK = 1.5  # the pool may be so much larger than a call needs
LEAST_BYTES = 1_000_000


Live = Mapping[int, torch.Tensor]  # storage → the tensor that lies at its begin


@dataclass(frozen=True)
class Call:
    """One op run in one way; `over` is the tensor that it overwrites, `scratch` that an update may use its gradient.
    kernel: by its name; "" for the first one of the op's entry."""

    op: Op
    over: int | None = None
    scratch: bool = False
    kernel: str = ""


def calls(graph: Graph, number: int, scratch: Set[int] = frozenset()) -> dict[Way, Call]:
    """The ways in which the op can be run, where they are different calls.

    scratch: `update.overwrites_gradient(graph)`.
    """
    op = graph.ops[number]
    ways: dict[Way, Call] = {"first": Call(op, scratch=number in scratch)}
    again = replay(op)
    if again is not None and again != op:
        ways["again"] = Call(again)
    targets = call.overwritable(graph, op)
    if targets:
        ways["over"] = Call(op, targets[0])
    return ways


def by_all_kernels(graph: Graph, number: int, scratch: Set[int] = frozenset()) -> list[tuple[Way, Call]]:
    """The same by the first kernel of the op's entry, and by each other one that takes the op's tensors."""
    plain, op = calls(graph, number, scratch), graph.ops[number]
    rows = list(plain.items())
    for kernel in entry_of(op.kind).kernels[1:]:
        if kernel.takes(tuple(graph.tensors[t] for t in op.reads)):
            rows += [(way, replace(c, kernel=kernel.name)) for way, c in plain.items() if way != "over" or kernel.over]
    return rows


def key(graph: Graph, what: Call) -> str:
    """The same for calls that cost the same: kind, shapes, strides, types and plain arguments."""
    places: dict[int, int] = {}

    def text(value: Value) -> Any:
        if isinstance(value, Ref):
            tensor = graph.tensors[value.tensor]
            place = places.setdefault(tensor.storage, len(places))
            device = graph.storages[tensor.storage].device
            return ["t", place, tensor.shape, tensor.stride, tensor.dtype, tensor.offset, device]
        if isinstance(value, Atom):
            return [value.sort, value.name]
        return [text(item) for item in value] if isinstance(value, tuple) else repr(value)

    kwargs = {name: text(value) for name, value in what.op.kwargs if name not in ("group", "index")}
    over = None if what.over is None else list(what.op.reads).index(what.over)
    results = [t is not None for t in what.op.outputs]
    flags = [bool(what.op.writes), what.scratch]
    parts = [what.op.kind, [text(a) for a in what.op.args], kwargs, flags, over, results]
    kernels = entry_of(what.op.kind).kernels
    if len(kernels) > 1:  # another set of kernels is measured anew
        parts.append([what.kernel, *(kernel.name for kernel in kernels)])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def made_bytes(graph: Graph, op: Op, *, without: int | None = None) -> tuple[int, ...]:
    """The bytes of each storage that the op makes, but for that of one tensor."""
    read = {graph.tensors[t].storage for t in op.reads}
    made = dict.fromkeys(graph.tensors[t].storage for t in op.creates if t != without)
    return tuple(graph.storages[s].n_bytes for s in made if s not in read)


class Pool:
    """Numbers from which the arguments of one call after the other are cut. It is as large as the call at hand needs,
    or somewhat larger: calls with the largest arguments should come first."""

    def __init__(self, graph: Graph, live: Live | None = None) -> None:
        self._graph, self.live = graph, live or {}
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def tensors(self, what: Call, most_bytes: int | None = None) -> dict[int, torch.Tensor]:
        """The tensors that the call reads; what it writes is fresh. most_bytes: of the whole pool."""
        graph, own = self._graph, _changed(self._graph, what)
        starts, need = _places(graph, what, self.live, overlap=_overlaps(graph, what, self.live, most_bytes))
        self._fit(need, most_bytes)
        found = {}
        for t in what.op.reads:
            tensor = graph.tensors[t].carrier
            if tensor.storage not in starts:
                there = self.live[tensor.storage]
                found[t] = there.as_strided(tensor.shape, tensor.stride, there.storage_offset() + tensor.offset)
                continue
            offset = starts[tensor.storage] // ITEM_BYTES[tensor.dtype] + tensor.offset
            found[t] = torch.as_strided(self._buffers[_kind(graph, t)], tensor.shape, tensor.stride, offset)
            if tensor.storage in own:
                _half(found[t])
        return found

    def _fit(self, need: Mapping[tuple[str, str], int], most_bytes: int | None) -> None:
        held, needed = sum(buffer.nbytes for buffer in self._buffers.values()), sum(need.values())
        limit = max(needed * SLACK, LEAST_BYTES)
        short = any(kind not in self._buffers or self._buffers[kind].nbytes < n_bytes for kind, n_bytes in need.items())
        if short or held > limit or (most_bytes is not None and held > max(most_bytes, needed)):
            self._buffers.clear()
            self._buffers = {kind: _numbers(kind, n_bytes) for kind, n_bytes in need.items()}


def read_bytes(graph: Graph, what: Call, live: Live, most_bytes: int | None = None) -> int:
    """The bytes of what the call reads, as they lie in a pool of at most so many."""
    return sum(_places(graph, what, live, overlap=_overlaps(graph, what, live, most_bytes))[1].values())


def _overlaps(graph: Graph, what: Call, live: Live, most_bytes: int | None) -> bool:
    """Whether the arguments of an update lie one over the other: where there is no room for copies of them all."""
    needed = sum(_places(graph, what, live, overlap=False)[1].values())
    return what.op.phase == "update" and most_bytes is not None and needed > most_bytes


def _changed(graph: Graph, what: Call) -> set[int]:
    """The storages that the call writes."""
    over = (what.over, what.op.reads[1] if what.scratch else None)
    return {*what.op.writes, *(graph.tensors[t].storage for t in over if t is not None)}


def _kind(graph: Graph, t: int) -> tuple[str, str]:
    tensor = graph.tensors[t].carrier
    return tensor.dtype, graph.storages[tensor.storage].device


def _places(
    graph: Graph, what: Call, live: Live, *, overlap: bool
) -> tuple[dict[int, int], dict[tuple[str, str], int]]:
    """Where each storage that the call reads begins in its pool, and the bytes that each pool needs. What is live and
    only read has no place there."""
    starts: dict[int, int] = {}
    used: dict[tuple[str, str], int] = {}
    there = live.keys() - _changed(graph, what)
    for t in what.op.reads:
        storage = graph.tensors[t].storage
        if storage not in starts and storage not in there:
            kind = _kind(graph, t)
            starts[storage] = 0 if overlap else used.get(kind, 0)
            n_bytes = -(-max(graph.storages[storage].n_bytes, 1) // _ALIGNED_BYTES) * _ALIGNED_BYTES
            used[kind] = max(used.get(kind, 0), starts[storage] + n_bytes)
    return starts, used


def _numbers(kind: tuple[str, str], n_bytes: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, kind[0])
    n = -(-n_bytes // ITEM_BYTES[kind[0]])
    if dtype == torch.float32:
        return torch.linspace(0.25, 0.75, n, dtype=dtype, device=kind[1])
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((n,), HALF, dtype=dtype, device=kind[1])
    return (torch.ones if dtype == torch.bool else torch.zeros)(n, dtype=dtype, device=kind[1])


def function(
    graph: Graph, what: Call, tensors: Mapping[int, torch.Tensor], live: Live | None = None
) -> Callable[[], object]:
    """The call over these tensors. Where a kernel refuses their numbers it is given others, but for those of `live`."""
    op = what.op
    if op.phase == "update":
        return _update(graph, op, tensors, scratch=what.scratch)
    kernel, op = call.kernel_and_op(op, what.over, what.kernel)
    given = [call.argument(a, tensors) for a in op.args]
    named = {name: call.argument(value, tensors) for name, value in op.kwargs}
    there = (live or {}).keys() - _changed(graph, what)
    own = [tensor for t, tensor in tensors.items() if graph.tensors[t].storage not in there]

    def work() -> object:
        try:
            return kernel(*given, **named)
        except Exception as error:
            if raised_by_handler(error):
                raise
            for fill in (_half, _unit):
                with contextlib.suppress(Exception):
                    for tensor in own:
                        fill(tensor)
                    return kernel(*given, **named)
            raise error

    return work


def _half(tensor: torch.Tensor) -> None:
    if 0 not in tensor.stride() and tensor.dtype != torch.bool:
        tensor.fill_(HALF if tensor.is_floating_point() or tensor.is_complex() else 0)


def _unit(tensor: torch.Tensor) -> None:
    if 0 in tensor.stride() or tensor.dtype == torch.bool:
        return
    if not tensor.is_floating_point() and not tensor.is_complex():
        tensor.fill_(1)
    elif tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2]:
        tensor.copy_(torch.eye(tensor.shape[-1], dtype=tensor.dtype, device=tensor.device).expand_as(tensor))


def _update(graph: Graph, op: Op, tensors: Mapping[int, torch.Tensor], *, scratch: bool) -> Callable[[], object]:
    p, g, *states = op.reads
    if op.kind == update.ACCUMULATE:
        return lambda: update.accumulate(tensors[p], tensors[g], {"weight": HALF}, None, False, scratch, None)
    how = entry_of(op.kind).update
    keys = [graph.sources[t].path.rpartition(".")[2] for t in states]
    state = {key: tensors[t] for key, t in zip(keys, states, strict=True)}
    if "step" in state:
        state["step"] = state["step"].reshape(()).to("cpu")
    given = update.Settings(
        lr=1e-3, weight_decay=1e-4, maximize=False, momentum=0.9 if states else 0.0, beta1=0.9, beta2=0.999, eps=1e-8,
        amsgrad="max_exp_avg_sq" in state, decoupled=how is not None and how.optimizer == "adamw",
    )  # fmt: skip
    kernel = call.resolve(op.kind)
    return lambda: kernel(tensors[p], tensors[g], state, given, False, scratch, None)
