"""A program before it is printed as C: its functions, and its persistent tensors.

In:  lowered graphs with their plans. Out: `Program`, which `emit.py` prints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgetrain.firmware.arena import Arena, arena_of
from edgetrain.firmware.kernels import kernel_of
from edgetrain.graph.ir import Graph, Op, Value
from edgetrain.names import take_free_name
from edgetrain.ops.c import CSource, identifier
from edgetrain.ops.entry import entry_of
from edgetrain.ops.update import Settings, kind_of
from edgetrain.plan.plan import Plan

C_TYPES = {"float32": "float", "int32": "int32_t", "int64": "int64_t", "uint8": "uint8_t", "uint1": "uint8_t"}


@dataclass(frozen=True)
class Function:
    """A graph, its plan, and its arena."""

    graph: Graph
    plan: Plan
    arena: Arena


def function_of(graph: Graph, plan: Plan) -> Function:
    return Function(graph, plan, arena_of(graph, plan))


@dataclass(frozen=True)
class Persistent:
    """A tensor that persists from step to step. changes: the step writes it, so it lies in RAM.

    offset: of its initial value in weights.bin; None if it starts as zeros.
    """

    tensor: int
    name: str
    c_name: str
    c_type: str
    n_elements: int
    n_bytes: int
    role: str
    changes: bool
    offset: int | None = None


@dataclass(frozen=True)
class Program:
    """kind: of the optimizer, sgd, adam or adamw; groups: its settings. fresh: the optimizer has no state yet.
    keep_every: steps between two checkpoints in flash; 0: none."""

    step: Function
    predict: Function | None
    persistent: Sequence[Persistent]
    groups: Sequence[Settings]
    kind: str
    fresh: bool
    keep_every: int = 0

    @property
    def update(self) -> CSource:
        """The kernel of its updates."""
        kernel = entry_of(kind_of(self.kind)).c
        assert kernel is not None
        return kernel.source

    @property
    def batch(self) -> int:
        graph = self.step.graph
        shape = graph.tensors[graph.inputs[0]].shape
        return shape[0] if shape else 1

    @property
    def inputs(self) -> list[Persistent]:
        return [item for item in self.persistent if item.role == "input"]

    @property
    def trained(self) -> list[Persistent]:
        """All that a step changes: parameters, buffers, optimizer state."""
        return [item for item in self.persistent if item.changes and item.role != "input"]


def persistent_tensors(graph: Graph) -> list[Persistent]:
    """In the order of the graph, each with a C name of its own."""
    written = {s for op in graph.ops for s in op.writes}
    read = {graph.tensors[t].storage for op in graph.ops for t in op.reads}
    taken: set[str] = set()
    tensors = []
    for t in sorted(graph.sources):
        tensor = graph.tensors[t]
        role = graph.role(t)
        if role != "input" and tensor.storage not in read:
            continue
        tensors.append(
            Persistent(
                t, tensor.name, take_free_name(identifier(tensor.name), taken), C_TYPES[tensor.dtype],
                max(tensor.carrier.n_elements, 1), tensor.n_bytes, role, role == "input" or tensor.storage in written,
            )
        )  # fmt: skip
    return tensors


def labels_of(graph: Graph) -> Iterator[tuple[int, int, int]]:
    """(tensor, samples, classes) of the labels that the step reads: each lies in [0, classes)."""
    for op in graph.ops:
        kernel = entry_of(op.kind).c
        if kernel is not None and kernel.labels is not None:
            yield kernel.labels(graph, op)


def has_bends(op: Op) -> bool:
    """Whether its gradient jumps; a debug build then reports on which side each element lies."""
    kernel = entry_of(op.kind).c
    return kernel is not None and (kernel.chooses or bounds_of(op) != (-math.inf, math.inf))


def bounds_of(op: Op) -> tuple[Value, ...]:
    """The bounds within which the op is the identity."""
    bends = kernel_of(op).bends
    return (-math.inf, math.inf) if bends is None else bends(op)
