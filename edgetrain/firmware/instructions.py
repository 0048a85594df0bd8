"""Instructions of each op on a microcontroller, and from these the time of a step.

In:  a lowered graph, a target. Out: `Costs` whose origin is "modelled": instructions ÷ the clock of the device.

    instructions of an op  =  Σ over features of its shapes:  coefficient × feature        one row of coefficients
    time of an op          =  instructions ÷ frequency, one instruction a cycle            for each core and kind of op

The coefficients stand in instructions.json, which `benchmarks/firmware_instructions.py` writes: nets with random shapes
run in the emulator, its plugin counts the instructions of each call, and non-negative coefficients are fitted to these
counts. The counts are exact; shapes that were not counted are modelled, within the error that the file states for each
core. One instruction a cycle is an assumption: loads that wait for memory take longer, dual issue takes less.

Programs for Linux are vectorised and use all cores, and no emulator counts them: their times follow from the device's
rates (`costs/model.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from edgetrain.costs.model import model_costs
from edgetrain.costs.table import Costs, OpCost, Run
from edgetrain.errors import InternalError
from edgetrain.firmware.target import Target
from edgetrain.graph.ir import Graph, Op

FILE = Path(__file__).with_name("instructions.json")
SCHEMA = 1
# A Cortex-M takes between 0.7 and 1.6 cycles an instruction of such code; only the board can tell.
CYCLES_PLUS_MINUS = 0.4
_K_BLOCK, _TILE = 20, 4  # of kernels/microkernel.h


@dataclass(frozen=True)
class Core:
    """coefficients: of each kind of op. plus_minus: the error for steps that were not in the fit."""

    name: str
    coefficients: Mapping[str, tuple[float, ...]]
    plus_minus: float


@cache
def cores() -> Mapping[str, Core]:
    """By the compiler's name: cortex-m4, cortex-m7, …"""
    data: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    if data["edgetrain instruction model"] != SCHEMA:
        raise InternalError(f"{FILE} has schema {data['edgetrain instruction model']!r}")
    return {
        name: Core(name, {kind: tuple(row) for kind, row in core["kinds"].items()}, core["plus_minus"])
        for name, core in data["cores"].items()
    }


def core_of(target: Target) -> Core | None:
    """The core that the target's programs are built for; None if its instructions were never counted."""
    name = next((flag.removeprefix("-mcpu=") for flag in target.firmware.flags if flag.startswith("-mcpu=")), "")
    return cores().get(name.partition("+")[0]) if target.is_board else None


def instructions_of(graph: Graph, op: Op, core: Core) -> float:
    """Of one run of the op."""
    row = core.coefficients.get(op.kind.removeprefix("edgetrain."))
    if op.view:
        return 0.0
    if row is None:
        raise InternalError(f"{op.kind} has no instruction counts for {core.name}")
    return sum(a * b for a, b in zip(row, features(graph, op), strict=True))


def firmware_costs(graph: Graph, target: Target) -> Costs:
    """Costs of a lowered graph on the target."""
    roofline = model_costs(graph, target.device)
    core, processor = core_of(target), target.device.processor
    if core is None or processor.frequency_hz is None:
        about = {**roofline.about, "library": "its firmware, at the device's own rates"}
        return replace(roofline, about=about, store=None)
    clock_hz = processor.frequency_hz.value
    power_w = None if processor.power_w is None else processor.power_w.value
    ops = []
    for op, cost in zip(graph.ops, roofline.ops, strict=True):
        time_s = instructions_of(graph, op, core) / clock_hz
        energy_j = None if power_w is None else power_w * time_s
        ops.append(OpCost({way: Run(time_s, run.events, energy_j) for way, run in cost.ways.items()}))
    about = {**roofline.about, "library": f"instructions of its kernels, one a cycle of {clock_hz / 1e6:g} MHz"}
    uncertainty = math.hypot(core.plus_minus, CYCLES_PLUS_MINUS)
    return replace(roofline, ops=tuple(ops), about=about, store=None, uncertainty=uncertainty)


# ---- features of an op's shapes


def features(graph: Graph, op: Op) -> tuple[float, ...]:
    """What the instructions of this kind of op are proportional to. The first one is the call itself."""
    kind = op.kind.removeprefix("edgetrain.")
    family, _, what = kind.partition(".")
    find = _FAMILIES.get(family)
    return (1.0, *(_elements(graph, op) if find is None else find(graph, op, what)))


def _elements(graph: Graph, op: Op) -> Sequence[float]:
    """Element by element, or row by row."""
    created = [graph.tensors[t] for t in op.creates]
    read = [graph.tensors[t] for t in op.reads]
    rows = max((t.n_elements // t.shape[1] for t in (*created, *read) if len(t.shape) > 1), default=1)
    channels = max((t.shape[1] for t in (*created, *read) if len(t.shape) > 1), default=1)
    largest = max((t.n_elements for t in (*created, *read)), default=1)
    return (largest, sum(t.n_elements for t in read), rows, channels)


@dataclass(frozen=True)
class _Gemm:
    """calls × a product of M × N results, each a sum of K products (kernels/gemm.h)."""

    calls: float
    M: float
    N: float
    K: float

    @property
    def features(self) -> Sequence[float]:
        tiles_m, tiles_n = math.ceil(self.M / _TILE), math.ceil(self.N / _TILE)
        tiles = tiles_m * tiles_n
        each = (
            self.M * self.N * self.K, (self.M * tiles_n + self.N * tiles_m) * self.K, tiles * self.K,
            tiles * math.ceil(self.K / _K_BLOCK), self.M * self.N, 1.0,
        )  # fmt: skip
        return tuple(self.calls * part for part in each)


def _dense(graph: Graph, op: Op, what: str) -> Sequence[float]:
    first, second = (graph.tensors[t].shape for t in op.reads[:2])
    if what == "forward":
        return _Gemm(1, first[0], second[0], second[1]).features
    if what == "backward_weight":
        return _Gemm(1, first[1], second[1], first[0]).features
    return _Gemm(1, first[0], second[1], second[0]).features


@dataclass(frozen=True)
class _Window:
    """A convolution. filled: the share of its taps on the image, not on padding."""

    x: tuple[int, ...]
    y: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, int]
    groups: int
    together: int  # contiguous taps of a row
    filled: float


def _window(graph: Graph, op: Op, what: str) -> _Window:
    result = graph.tensors[op.creates[0]].shape
    first, second = (graph.tensors[t].shape for t in op.reads[:2])
    x, y, weight = {
        "forward": (first, result, second), "backward_weight": (second, first, result),
        "backward_input": (result, first, second),
    }[what]  # fmt: skip
    numbers = [n for n in op.args[3 if what == "forward" else 2 :] if isinstance(n, int)]
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups = numbers
    filled = _filled(x[2], y[2], weight[2], stride_h, pad_h, dilation_h)
    filled *= _filled(x[3], y[3], weight[3], stride_w, pad_w, dilation_w)
    together = weight[3] if groups == 1 and dilation_w == 1 else 1
    return _Window(x, y, weight, (stride_h, stride_w), groups, together, filled)


def _filled(side: int, places: int, taps: int, stride: int, pad: int, dilation: int) -> float:
    inside = sum(0 <= p * stride - pad + r * dilation < side for p in range(places) for r in range(taps))
    return inside / (places * taps)


def _conv2d(graph: Graph, op: Op, what: str) -> Sequence[float]:
    s = _window(graph, op, what)
    (B, C, H, _), (_, K, P, Q), (_, _, R, S) = s.x, s.y, s.weight
    C, K = C // s.groups, K // s.groups
    if what == "forward":
        gemm = _Gemm(B * min(P, Q) * s.groups, max(P, Q), K, R * S * C * s.filled)
        edges = B * (P + Q) * s.groups
    elif what == "backward_weight":
        gemm = _Gemm(R * S / s.together * s.groups, K, s.together * C, B * P * Q * s.filled)
        edges = R * S * s.groups
    else:
        together = s.together if s.x[1] < _TILE else 1
        rows = R / min(R, s.stride[0])
        gemm = _Gemm(B * H * S / together * s.groups, Q, together * C, rows * K * s.filled)
        edges = B * H * R * s.groups
    return (*gemm.features, edges, math.prod(graph.tensors[op.creates[0]].shape))


def _pointwise(graph: Graph, op: Op, what: str) -> Sequence[float]:
    s = _window(graph, op, what)
    places, C, K = s.y[0] * s.y[2] * s.y[3], s.x[1], s.y[1]
    shape = {"forward": (places, K, C), "backward_weight": (K, C, places), "backward_input": (places, C, K)}[what]
    return _Gemm(1, *shape).features


def _depthwise(graph: Graph, op: Op, what: str) -> Sequence[float]:
    s = _window(graph, op, what)
    results, taps = math.prod(s.y), s.weight[2] * s.weight[3]
    lines, planes = s.y[0] * s.y[1] * s.y[2], s.y[0] * s.y[1]
    return (
        results * taps * s.filled, results * taps, results, math.prod(s.x), lines * s.weight[2], lines, planes,
        planes * taps,
    )  # fmt: skip


def _pool(graph: Graph, op: Op, what: str) -> Sequence[float]:
    small, large = sorted((graph.tensors[t] for t in (op.creates[0], op.reads[0])), key=lambda t: t.n_elements)
    window = [n for n in op.args if isinstance(n, int | tuple)]
    flat = [n for part in window for n in (part if isinstance(part, tuple) else (part,)) if isinstance(n, int)]
    taps = flat[0] * flat[1] if len(flat) > 1 else 1
    places = small.n_elements / small.shape[1]
    return (small.n_elements * taps, small.n_elements, large.n_elements, places * taps, places)


def _update(graph: Graph, op: Op, what: str) -> Sequence[float]:
    """A momentum, or the maximum of squares so far, is one more tensor to read."""
    n = graph.tensors[op.reads[0]].n_elements
    return (n, n * len(op.reads))


_FAMILIES: Mapping[str, Callable[[Graph, Op, str], Sequence[float]]] = {
    "dense": _dense, "conv2d": _conv2d, "pointwise": _pointwise, "depthwise": _depthwise, "depthwise3x3": _depthwise,
    "max_pool2d": _pool, "avg_pool2d": _pool, "sgd": _update, "adam": _update, "adamw": _update,
}  # fmt: skip
