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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from edgetrain.costs.model import model_costs
from edgetrain.costs.table import Costs, OpCost, Run
from edgetrain.errors import InternalError
from edgetrain.firmware.target import Target
from edgetrain.graph.ir import Graph, Op
from edgetrain.ops import c_features
from edgetrain.ops.entry import entry_of

FILE = Path(__file__).with_name("instructions.json")
SCHEMA = 1
# A Cortex-M takes between 0.7 and 1.6 cycles an instruction of such code; only the board can tell.
CYCLES_PLUS_MINUS = 0.4


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


def instructions_of(graph: Graph, op: Op, core: Core) -> float | None:
    """Of one run of the op; None where its kernel was never counted, as one from outside is not."""
    if op.view:
        return 0.0
    row = core.coefficients.get(op.kind.removeprefix("edgetrain."))
    if row is None:
        return None
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
        instructions = instructions_of(graph, op, core)
        time_s = cost.time_s if instructions is None else instructions / clock_hz
        energy_j = None if power_w is None else power_w * time_s
        ops.append(OpCost({way: Run(time_s, run.events, energy_j) for way, run in cost.ways.items()}))
    about = {**roofline.about, "library": f"instructions of its kernels, one a cycle of {clock_hz / 1e6:g} MHz"}
    uncertainty = math.hypot(core.plus_minus, CYCLES_PLUS_MINUS)
    return replace(roofline, ops=tuple(ops), about=about, store=None, uncertainty=uncertainty)


def features(graph: Graph, op: Op) -> tuple[float, ...]:
    """What the instructions of this kind of op grow with. The first one is the call itself."""
    kernel = entry_of(op.kind).c
    rule = c_features.elements if kernel is None or kernel.features is None else kernel.features
    return (1.0, *rule(graph, op))
