"""What a legal graph is. `verify` states it rule by rule and refuses any other.

Nothing here calls torch: a graph is plain data, and so are its rules. A graph that breaks one was made by a defect of
edgetrain, or by a file that somebody changed, so the error is an `InternalError` that names the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from edgetrain.arguments import checked
from edgetrain.errors import InternalError
from edgetrain.graph.ir import BITS, DTYPES, INTEGERS, PERSISTENT, PHASES, ROLES, Graph, Op, Quantization, Tensor
from edgetrain.ops.entry import TRUSTED, entry_of, registered_entry
from edgetrain.ops.update import ACCUMULATE

Rule = Callable[[Graph], Iterator[str]]


@checked()
def verify(graph: Graph) -> None:
    """Raises InternalError with every rule that is broken (the first ten)."""
    broken = broken_rules(graph)
    if broken:
        shown = "\n".join(f"  - {text}" for text in broken[:10])
        raise InternalError(f"not a legal graph:\n{shown}")


def unknown_kinds(graph: Graph) -> list[str]:
    """What a graph from a file may not hold: ops of libraries other than PyTorch, and than ours, without an entry."""
    kinds = dict.fromkeys(op.kind for op in graph.ops)
    unknown = [kind for kind in kinds if kind.partition(".")[0] not in TRUSTED and registered_entry(kind) is None]
    return [f"an op is of kind {kind}, for which no entry is registered" for kind in unknown]


def broken_rules(graph: Graph) -> list[str]:
    """What is wrong with the graph; nothing if it is legal."""
    rules: tuple[Rule, ...] = (_numbers, _units, _storages, _order, _writes, _ends)
    for rule in rules:
        broken = list(rule(graph))
        if broken:
            return broken  # later rules rely on earlier ones
    return []


def _numbers(graph: Graph) -> Iterator[str]:
    """Every number refers to something, names are unique, words are from their lists."""
    tensors, storages = len(graph.tensors), len(graph.storages)
    for number, storage in enumerate(graph.storages):
        if storage.role not in ROLES or storage.n_bytes < 0:
            yield f"storage {number} has role {storage.role!r} and {storage.n_bytes} bytes"
    for number, tensor in enumerate(graph.tensors):
        if not 0 <= tensor.storage < storages:
            yield f"tensor {number} ({tensor.name}) lies in storage {tensor.storage}, which does not exist"
        if tensor.dtype not in DTYPES or len(tensor.shape) != len(tensor.stride):
            yield f"tensor {number} ({tensor.name}) has type {tensor.dtype!r}, {tensor.shape}, {tensor.stride}"
        if min((*tensor.shape, *tensor.stride, tensor.offset)) < 0:
            yield f"tensor {number} ({tensor.name}) has a number below zero in its shape, strides or offset"
    names = set()
    for op in graph.ops:
        if op.name in names:
            yield f"two ops are called {op.name}"
        names.add(op.name)
        if op.phase not in PHASES:
            yield f"{op.name} has phase {op.phase!r}"
        if not all(0 <= t < tensors for t in (*op.reads, *op.creates)) or not all(0 <= s < storages for s in op.writes):
            yield f"{op.name} refers to a tensor or storage that does not exist"
    ends = (*graph.sources, *graph.outputs, *graph.gradients, *graph.gradients.values(), *graph.constants)
    if not all(0 <= t < tensors for t in ends):
        yield "sources, outputs, gradients or constants refer to a tensor that does not exist"


def _units(graph: Graph) -> Iterator[str]:
    """Integers alone carry scales, one for the tensor or one for each index of an axis. Packed bits have no gaps."""
    for tensor in graph.tensors:
        if tensor.quantization is not None:
            yield from (f"{tensor.name} ({tensor.dtype}) {text}" for text in _scales(tensor, tensor.quantization))
        if tensor.dtype == BITS and (tensor.offset % 8 or not tensor.dense):
            yield f"{tensor.name} has packed bits with gaps, or they begin inside a byte"


def _scales(tensor: Tensor, units: Quantization) -> Iterator[str]:
    if tensor.dtype not in INTEGERS:
        yield "carries scales, which only integers of 8 to 32 bits may"
        return
    low, high = INTEGERS[tensor.dtype]
    if not all(0 < scale < math.inf for scale in units.scales):
        yield "has a scale that is not positive and finite"
    if not all(low <= zero <= high for zero in units.zero_points):
        yield f"has a zero point outside of {low} to {high}"
    if units.axis is not None and not 0 <= units.axis < len(tensor.shape):
        yield f"has scales along axis {units.axis} of {len(tensor.shape)}"
        return
    expected = 1 if units.axis is None else tensor.shape[units.axis]
    if (len(units.scales), len(units.zero_points)) != (expected, expected):
        yield f"has {len(units.scales)} scales and {len(units.zero_points)} zero points, expected {expected} of each"


def _storages(graph: Graph) -> Iterator[str]:
    """A tensor lies inside its storage. What persists has a source, and only that."""
    for tensor in graph.tensors:
        if tensor.end_bytes > (n_bytes := graph.storages[tensor.storage].n_bytes):
            yield f"{tensor.name} ends at byte {tensor.end_bytes} of a storage of {n_bytes}"
    sourced = {graph.tensors[t].storage for t in graph.sources}
    for number, storage in enumerate(graph.storages):
        if (storage.role in PERSISTENT) != (number in sourced):
            yield f"storage {number} has role {storage.role} and {'a' if number in sourced else 'no'} source"
    places = [(s.sort, s.path) for s in graph.sources.values()]
    if len(set(places)) != len(places):
        yield "two tensors have the same source"
    for t, source in graph.sources.items():
        if (source.sort == "constant") != (t in graph.constants):
            yield f"{graph.tensors[t].name} is a constant without a value, or carries a value without being one"
    for t, value in graph.constants.items():
        if len(value) != graph.tensors[t].n_bytes:
            yield f"{graph.tensors[t].name} takes {graph.tensors[t].n_bytes} bytes, its value has {len(value)}"


def _order(graph: Graph) -> Iterator[str]:
    """Each tensor is made once, before it is read. Forward, then backward, then update; random ops only forward."""
    created = set(graph.sources)
    filled = {graph.tensors[t].storage for t in created}
    phase = 0
    for op in graph.ops:
        if PHASES.index(op.phase) < phase:
            yield f"{op.name} ({op.phase}) stands after an op of phase {PHASES[phase]}"
        phase = max(phase, PHASES.index(op.phase))
        if op.random and op.phase != "forward":
            yield f"{op.name} draws random numbers in the {op.phase} phase"
        for t in op.reads:
            if t not in created:
                yield f"{op.name} reads {graph.tensors[t].name}, which no op before it creates"
        yield from _outputs(graph, op, created, filled)
        created |= set(op.creates)
        filled |= {graph.tensors[t].storage for t in op.creates}


def _outputs(graph: Graph, op: Op, created: set[int], filled: set[int]) -> Iterator[str]:
    read = {graph.tensors[t].storage for t in op.reads}
    for t in op.creates:
        storage = graph.tensors[t].storage
        if t in created:
            yield f"{graph.tensors[t].name} is created a second time, by {op.name}"
        if op.view and storage not in read:
            yield f"{op.name} is a view, but {graph.tensors[t].name} does not share a storage that it reads"
        if not op.view and storage in filled and storage not in op.writes:
            yield f"{op.name} is no view, but {graph.tensors[t].name} lies in a storage that exists already"


def _writes(graph: Graph) -> Iterator[str]:
    """An op changes only what it reads; only updates change optimizer state."""
    for op in graph.ops:
        read = {graph.tensors[t].storage for t in op.reads}
        for storage in op.writes:
            role = graph.storages[storage].role
            if storage not in read:
                yield f"{op.name} changes storage {storage}, which it does not read"
            if role == "state" and op.phase != "update":
                yield f"{op.name} ({op.phase}) changes optimizer state"
        places = dict(op.kwargs)
        if op.phase == "update" and not all(type(places.get(k)) is int for k in ("group", "index")):
            yield f"{op.name} does not say which parameter of the optimizer it updates"
        if op.view and op.writes:
            yield f"{op.name} is a view and changes something"
        if (op.phase == "update") != (entry_of(op.kind).update is not None):
            yield f"{op.name} of kind {op.kind} stands in phase {op.phase}"


def _ends(graph: Graph) -> Iterator[str]:
    """Outputs and gradients are made; a gradient has the shape of its parameter, and a type that fits; each trained
    parameter is updated once, or each gradient is added to an accumulator; or both."""
    created = {*graph.sources, *(t for op in graph.ops for t in op.creates)}
    for t in (*graph.outputs, *graph.gradients.values()):
        if t not in created:
            yield f"{graph.tensors[t].name} is an output or a gradient, but no op creates it"
    for p, g in graph.gradients.items():
        parameter, gradient = graph.tensors[p], graph.tensors[g]
        if parameter.shape != gradient.shape or not _types_fit(parameter, gradient):
            yield f"the gradient of {parameter.name} is {gradient}, the parameter {parameter}"
    summed = [op.reads[1] for op in graph.ops if op.kind == ACCUMULATE]
    updated = [op.reads[0] for op in graph.ops if op.phase == "update" and op.kind != ACCUMULATE]
    if summed and sorted(summed) != sorted(graph.gradients.values()):
        yield "what is accumulated is not the gradients"
    if (updated or not summed) and sorted(updated) != sorted(graph.gradients):
        yield "the updated parameters are not those that have a gradient"


def _types_fit(parameter: Tensor, gradient: Tensor) -> bool:
    """Both have one type; or one carries scales, and the other carries scales too or is a float."""
    if parameter.quantization is None and gradient.quantization is None:
        return parameter.dtype == gradient.dtype
    return all(tensor.quantization is not None or "float" in tensor.dtype for tensor in (parameter, gradient))
