"""What the instructions of a C kernel grow with, by the shapes of an op.

In:  an op of a lowered graph. Out: numbers; instructions are a sum of them, each with a coefficient that was fitted to
     counts of the emulator (firmware/instructions.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgetrain.graph.ir import Graph, Op

_RUN, _TILE = 20, 4  # of the matrix kernels


def elements(graph: Graph, op: Op) -> Sequence[float]:
    """Element by element, or row by row."""
    created = [graph.tensors[t] for t in op.creates]
    read = [graph.tensors[t] for t in op.reads]
    rows = max((t.n_elements // t.shape[1] for t in (*created, *read) if len(t.shape) > 1), default=1)
    channels = max((t.shape[1] for t in (*created, *read) if len(t.shape) > 1), default=1)
    largest = max((t.n_elements for t in (*created, *read)), default=1)
    return (largest, sum(t.n_elements for t in read), rows, channels)


@dataclass(frozen=True)
class _Products:
    """calls × a product of M × N results, each a sum of I."""

    calls: float
    M: float
    N: float
    I: float  # noqa: E741 the name that the kernel has for it

    @property
    def features(self) -> Sequence[float]:
        tiles_m, tiles_n = math.ceil(self.M / _TILE), math.ceil(self.N / _TILE)
        tiles = tiles_m * tiles_n
        each = (
            self.M * self.N * self.I, (self.M * tiles_n + self.N * tiles_m) * self.I, tiles * self.I,
            tiles * math.ceil(self.I / _RUN), self.M * self.N, 1.0,
        )  # fmt: skip
        return tuple(self.calls * part for part in each)


def _what(op: Op) -> str:
    """forward, backward_weight or backward_input."""
    return op.kind.rpartition(".")[2]


def dense(graph: Graph, op: Op) -> Sequence[float]:
    first, second = (graph.tensors[t].shape for t in op.reads[:2])
    if _what(op) == "forward":
        return _Products(1, first[0], second[0], second[1]).features
    if _what(op) == "backward_weight":
        return _Products(1, first[1], second[1], first[0]).features
    return _Products(1, first[0], second[1], second[0]).features


@dataclass(frozen=True)
class _Window:
    """A convolution. filled: the part of its taps that lies on the image and not on padding."""

    x: tuple[int, ...]
    y: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, int]
    groups: int
    together: int  # taps of a row that are one run of numbers
    filled: float


def _window(graph: Graph, op: Op) -> _Window:
    result = graph.tensors[op.creates[0]].shape
    first, second = (graph.tensors[t].shape for t in op.reads[:2])
    x, y, weight = {
        "forward": (first, result, second), "backward_weight": (second, first, result),
        "backward_input": (result, first, second),
    }[_what(op)]  # fmt: skip
    numbers = [n for n in op.args[3 if _what(op) == "forward" else 2 :] if isinstance(n, int)]
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups = numbers
    filled = _filled(x[2], y[2], weight[2], stride_h, pad_h, dilation_h)
    filled *= _filled(x[3], y[3], weight[3], stride_w, pad_w, dilation_w)
    together = weight[3] if groups == 1 and dilation_w == 1 else 1
    return _Window(x, y, weight, (stride_h, stride_w), groups, together, filled)


def _filled(side: int, places: int, taps: int, stride: int, pad: int, dilation: int) -> float:
    inside = sum(0 <= p * stride - pad + r * dilation < side for p in range(places) for r in range(taps))
    return inside / (places * taps)


def conv2d(graph: Graph, op: Op) -> Sequence[float]:
    s = _window(graph, op)
    (B, C, H, _), (_, K, P, Q), (_, _, R, S) = s.x, s.y, s.weight
    C, K = C // s.groups, K // s.groups
    if _what(op) == "forward":
        products = _Products(B * min(P, Q) * s.groups, max(P, Q), K, R * S * C * s.filled)
        edges = B * (P + Q) * s.groups
    elif _what(op) == "backward_weight":
        products = _Products(R * S / s.together * s.groups, K, s.together * C, B * P * Q * s.filled)
        edges = R * S * s.groups
    else:
        together = s.together if s.x[1] < _TILE else 1
        rows = R / min(R, s.stride[0])
        products = _Products(B * H * S / together * s.groups, Q, together * C, rows * K * s.filled)
        edges = B * H * R * s.groups
    return (*products.features, edges, math.prod(graph.tensors[op.creates[0]].shape))


def pointwise(graph: Graph, op: Op) -> Sequence[float]:
    s = _window(graph, op)
    places, C, K = s.y[0] * s.y[2] * s.y[3], s.x[1], s.y[1]
    shape = {"forward": (places, K, C), "backward_weight": (K, C, places), "backward_input": (places, C, K)}[_what(op)]
    return _Products(1, *shape).features


def depthwise(graph: Graph, op: Op) -> Sequence[float]:
    s = _window(graph, op)
    results, taps = math.prod(s.y), s.weight[2] * s.weight[3]
    lines, planes = s.y[0] * s.y[1] * s.y[2], s.y[0] * s.y[1]
    return (
        results * taps * s.filled, results * taps, results, math.prod(s.x), lines * s.weight[2], lines, planes,
        planes * taps,
    )  # fmt: skip


def pool(graph: Graph, op: Op) -> Sequence[float]:
    small, large = sorted((graph.tensors[t] for t in (op.creates[0], op.reads[0])), key=lambda t: t.n_elements)
    window = [n for n in op.args if isinstance(n, int | tuple)]
    flat = [n for part in window for n in (part if isinstance(part, tuple) else (part,)) if isinstance(n, int)]
    taps = flat[0] * flat[1] if len(flat) > 1 else 1
    places = small.n_elements / small.shape[1]
    return (small.n_elements * taps, small.n_elements, large.n_elements, places * taps, places)


def update(graph: Graph, op: Op) -> Sequence[float]:
    """A momentum, or the largest square so far, is one more tensor that is read."""
    n = graph.tensors[op.reads[0]].n_elements
    return (n, n * len(op.reads))
