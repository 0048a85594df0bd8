"""What an op does, whatever runs it: floating-point operations and bytes.

In:  an op of a graph. Out: `Work`: its kind, its operations, the bytes that it reads and writes, and what a convolution
     would lay out as a matrix if it were computed as one. Each entry (`entry.py`) has the rule for its kind of op.

Multiplications and additions count one each, so a convolution has twice its multiply-adds. Convolutions and matrix
products are counted exactly, as `torch.utils.flop_counter` does. For all other ops the operations are a rough number an
element: memory decides their time, not arithmetic. Bytes are those of each tensor once: a cache that is too small for
the op, or a kernel that goes over its data twice, moves more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from edgetrain.graph.ir import Graph, Op, Ref, Tensor, bytes_of

Kind = Literal["conv", "depthwise", "dense", "elementwise", "move", "nothing"]
KINDS: tuple[Kind, ...] = ("conv", "depthwise", "dense", "elementwise", "move", "nothing")
PRODUCTS: tuple[Kind, ...] = ("conv", "depthwise", "dense")


@dataclass(frozen=True, slots=True)
class Work:
    """
    flops:         operations on numbers of the tensors' type.
    columns_bytes: what a convolution lays out when it runs as a matrix product; 0 for one that needs no layout
                   (1×1 with stride 1), for depthwise ones, which have kernels of their own, and for all other ops.
    group_columns_bytes: the same of one sample and one group, for depthwise ones too: those kernels do not run all.
    groups:        of a convolution.
    """

    kind: Kind
    flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    columns_bytes: int = 0
    group_columns_bytes: int = 0
    groups: int = 1

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


Rule = Callable[[Graph, Op], Work]


def done(kind: Kind, flops: int, graph: Graph, op: Op, columns_bytes: int = 0) -> Work:
    """So many operations, and the bytes of the tensors."""
    return Work(kind, flops, _read_bytes(graph, op), _written_bytes(graph, op), columns_bytes)


@functools.cache
def each(flops: int) -> Rule:
    """So many operations an element of the largest tensor that the op touches."""

    def rule(graph: Graph, op: Op) -> Work:
        return done("elementwise", flops * _largest(graph, op), graph, op)

    return rule


def moves(graph: Graph, op: Op) -> Work:
    """Data is put elsewhere and nothing computed."""
    return done("move", 0, graph, op)


def nothing(graph: Graph, op: Op) -> Work:
    return Work("nothing")


def product(a: int, b: int) -> Rule:
    """2·m·n·k for each matrix of a batch, of the matrices at these places among the arguments."""

    def rule(graph: Graph, op: Op) -> Work:
        left, right = tensor(graph, op, a), tensor(graph, op, b)
        columns = right.shape[-1] if len(right.shape) > 1 else 1
        return done("dense", 2 * left.n_elements * columns, graph, op)

    return rule


def tensor(graph: Graph, op: Op, position: int) -> Tensor:
    """The tensor at that place among the arguments."""
    ref = op.args[position]
    assert isinstance(ref, Ref)
    return graph.tensors[ref.tensor]


def _largest(graph: Graph, op: Op) -> int:
    return max((graph.tensors[t].n_elements for t in (*op.reads, *op.creates)), default=0)


def _read_bytes(graph: Graph, op: Op) -> int:
    return sum(_own_bytes(graph, t) for t in op.reads)


def _written_bytes(graph: Graph, op: Op) -> int:
    """What it makes, and what it changes in place: as many bytes as it knows of that storage."""
    seen = {graph.tensors[t].storage: _own_bytes(graph, t) for t in op.reads}
    created = {graph.tensors[t].storage for t in op.creates}
    changed = sum(seen.get(s, graph.storages[s].n_bytes) for s in op.writes if s not in created)
    return sum(_own_bytes(graph, t) for t in op.creates) + changed


def _own_bytes(graph: Graph, t: int) -> int:
    """Bytes in memory that the tensor shows: one that was expanded shows the same ones again and again."""
    shown = graph.tensors[t]
    real = math.prod(n for n, stride in zip(shown.shape, shown.stride, strict=True) if stride or not n)
    return bytes_of(real, shown.dtype)
