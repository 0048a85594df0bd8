"""The instruction model of firmware: what each kernel takes on each core, fitted to what the emulator counted.

In:  nets with random shapes that between them call every kernel, one training step of each in QEMU for each core.
Out: edgetrain/firmware/instructions.json: coefficients for each core and kind of op (firmware/instructions.py there),
     and how far off whole steps were that the fit had not seen.

    python -m benchmarks.firmware_instructions [--nets 90] [--out FILE]                           about 20 minutes

A core that no emulated board with enough memory has is counted on a larger one that runs the same instructions:
programs for a Cortex-M0+ on a Cortex-M4. Every seventh net is left out of the fit and says how far off it is.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

import edgetrain as et
from edgetrain.devices.device import Quantity, Region
from edgetrain.errors import Infeasible
from edgetrain.firmware.emulate import run_firmware
from edgetrain.firmware.instructions import FILE, SCHEMA, features
from edgetrain.firmware.target import Target, load_target
from edgetrain.graph.ir import Graph

Floats = NDArray[np.float64]

LEFT_OUT = 7  # every so many nets are not fitted to; no number by which nets are drawn shares a factor with it
# Core → the target whose flags it is built with, and the machine that runs it.
CORES = {
    "cortex-m4": ("nrf52840", "mps2-an386"), "cortex-m7": ("stm32f746", "mps2-an500"),
    "cortex-m0plus": ("mkr1000", "mps2-an386"), "cortex-m55": ("cortex-m55", "mps3-an547"),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """An op of a net: its features, and the instructions that were counted."""

    net: int
    kind: str
    features: tuple[float, ...]
    instructions: int


def roomy(core: str) -> Target:
    """The target with the memory that the emulated board has."""
    name, machine = CORES[core]
    target = load_target(name)
    large = 4 * 2**20 if machine.startswith("mps2") else 2**19
    source = f"QEMU documentation: {machine}"
    memory = replace(
        target.device.memory, ram=(Region("RAM", Quantity(large, source), 0x20000000),),
        flash=(Region("flash", Quantity(large, source), 0x00000000),),
    )  # fmt: skip
    emulator = ("qemu-system-arm", "-machine", machine)
    firmware = replace(target.firmware, emulator=emulator, emulated={}, stack_bytes=8192, flash_driver=None)
    return Target(replace(target.device, memory=memory), firmware)


# ---- nets with random shapes


class Beside(nn.Module):
    """The input beside, or added to, what a layer makes of it."""

    def __init__(self, inner: nn.Module, *, concat: bool) -> None:
        super().__init__()
        self.inner, self.concat = inner, concat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return torch.cat([x, y], 1) if self.concat else x + y


@dataclass(frozen=True)
class Drawn:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[torch.Tensor, ...]
    classes: int | None

    def loss(self, model: nn.Module, x: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), labels[0]) if labels else F.mse_loss(model(x).flatten(1), x.flatten(1))


def draw(number: int) -> Drawn:
    rng = random.Random(number)
    torch.manual_seed(number)
    B, C, side = rng.randint(1, 8), rng.choice([1, 3, rng.randint(2, 12)]), rng.choice([8, 12, 16, 20, 28])
    shape: tuple[int, ...] = (C, side, rng.choice([side, side, rng.randint(6, 20)]))
    layers: list[nn.Module] = []
    dense_only = number % 5 == 4
    if dense_only:
        shape = (rng.choice([32, 100, 200, 400]),)
    else:
        layers = list(_images(rng, shape, B, number))
    with torch.no_grad():
        features_ = nn.Sequential(*layers).eval()(torch.zeros(1, *shape)).shape[1]
    classes = None if number % 3 == 2 and np.prod(shape) <= 800 else rng.randint(2, 24)
    layers += _head(rng, B, features_, int(np.prod(shape)) if classes is None else classes)
    model = nn.Sequential(*layers).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and rng.random() < 0.25:
            module.eval()
    x = torch.randn(B, *shape)
    batch = (x,) if classes is None else (x, torch.randint(0, classes, (B,)))
    return Drawn(model, _optimizer(rng, number, model), batch, classes)


def _images(rng: random.Random, shape: Sequence[int], B: int, number: int) -> Iterator[nn.Module]:
    C, side = shape[0], min(shape[1:])
    for depth in range(rng.randint(2, 4)):
        kind = (number + depth) % 4
        if kind == 0:
            K, size = rng.choice([4, 6, 8, 13, 16, 24]), rng.choice([3, 5])
            stride, padding = rng.choice([1, 1, 2]), rng.randint(0, size // 2)
            layer = nn.Conv2d(C, K, size, stride, padding, bias=rng.random() < 0.5)
        elif kind == 1:
            K, layer = C, nn.Conv2d(C, C, 3, rng.choice([1, 1, 2]), 1, groups=C, bias=rng.random() < 0.5)
        elif kind == 2:
            K = rng.choice([4, 8, 12, 16, 24, 32])
            layer = nn.Conv2d(C, K, 1, bias=rng.random() < 0.5)
        else:
            groups = rng.choice([g for g in (C, 2, 3, 4) if C % g == 0])
            K = groups * rng.choice([1, 2, 4]) if groups < C else C * rng.choice([1, 2])
            size = rng.choice([3, 5])
            layer = nn.Conv2d(C, K, size, rng.choice([1, 2]), size // 2, dilation=1, groups=groups)
        if side // layer.stride[0] < 5 or (side - layer.kernel_size[0] + 2 * int(layer.padding[0])) < 4:
            break
        yield layer
        side, C = (side - layer.kernel_size[0] + 2 * int(layer.padding[0])) // layer.stride[0] + 1, K
        if rng.random() < 0.6:
            yield rng.choice([nn.BatchNorm2d(C), nn.BatchNorm2d(C), nn.GroupNorm(2 if C % 2 == 0 else 1, C)])
        yield rng.choice([nn.ReLU(), nn.ReLU(), nn.ReLU6(), nn.Sigmoid(), nn.Tanh(), nn.Identity()])
        if rng.random() < 0.4:
            concat = rng.random() < 0.5 and C <= 16
            yield Beside(nn.Sequential(nn.Conv2d(C, C, 1), nn.ReLU()), concat=concat)
            C *= 2 if concat else 1
        if side >= 8 and rng.random() < 0.5:
            size = rng.choice([2, 3])
            yield rng.choice([nn.MaxPool2d(size, 2), nn.AvgPool2d(size, 2)])
            side = (side - size) // 2 + 1
        if rng.random() < 0.2:
            yield nn.Dropout(0.25)
    if rng.random() < 0.5:
        yield nn.AdaptiveAvgPool2d(1)
    yield nn.Flatten()


def _head(rng: random.Random, B: int, features_: int, results: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for _ in range(rng.randint(0, 2)):
        hidden = rng.choice([8, 20, 33, 48, 64])
        layers += [nn.Linear(features_, hidden, bias=rng.random() < 0.8)]
        layers += [nn.BatchNorm1d(hidden)] if B > 1 and rng.random() < 0.3 else []
        layers += [rng.choice([nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.ReLU6()])]
        layers += [nn.Dropout(0.5)] if rng.random() < 0.2 else []
        features_ = hidden
    return [*layers, nn.Linear(features_, results)]


def _optimizer(rng: random.Random, number: int, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    decay = rng.choice([0.0, 0.0, 1e-4])
    kind = number % 6
    if kind == 3:
        return torch.optim.Adam(parameters, amsgrad=rng.random() < 0.3, weight_decay=decay)
    if kind == 5:
        return torch.optim.AdamW(parameters, amsgrad=rng.random() < 0.3)
    momentum = rng.choice([0.0, 0.0, 0.9])
    return torch.optim.SGD(parameters, lr=0.01, momentum=momentum, nesterov=momentum > 0 and rng.random() < 0.5,
                           weight_decay=decay)  # fmt: skip


# ---- counting and fitting


def lowered(drawn: Drawn) -> Graph:
    return et.lower_for_firmware(et.capture(drawn.model, drawn.loss, drawn.optimizer, drawn.batch, use_cache=False))


def count(number: int, core: str) -> list[Row]:
    """The ops of one net on one core; nothing where it does not fit."""
    drawn = draw(number)
    graph = lowered(drawn)
    plan = et.keep_all(graph, updates="final")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "fw"
        try:
            et.export(graph, plan, drawn.model, drawn.optimizer, target=roomy(core), out=folder, predict=False)
        except Infeasible:
            return []
        run = run_firmware(folder, [drawn.batch])
    counted: dict[str, int] = defaultdict(int)
    for call in run.calls:  # a concat has a call for each of its parts
        counted[call.op] += call.instructions
    kind = "edgetrain."
    return [
        Row(number, op.kind.removeprefix(kind), features(graph, op), counted[op.name])
        for op in graph.ops
        if op.name in counted
    ]


def fit(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Coefficients by kind, none of them below 0: the least sum of squares of parts by which a count is missed."""
    found = {}
    for kind in sorted({row.kind for row in rows}):
        own = [row for row in rows if row.kind == kind]
        y = np.array([row.instructions for row in own], dtype=float)
        table = np.array([row.features for row in own], dtype=float)
        scale = np.maximum(table.max(axis=0), 1e-30)
        weight = y**-0.75  # between equal parts and equal counts: large ops decide the time of a step
        solved = _not_negative(table / scale * weight[:, None], y * weight) / scale
        found[kind] = [float(f"{value:.5g}") for value in solved]
    return found


def _not_negative(table: Floats, y: Floats) -> Floats:
    """Least squares without coefficients below 0 (Lawson and Hanson): one joins where the fit would gain most, and one
    that would fall below 0 leaves."""
    n = table.shape[1]
    level, free = np.zeros(n), np.zeros(n, dtype=bool)
    for _ in range(30 * n):
        gain = np.where(free, -np.inf, table.T @ (y - table @ level))
        best = int(np.argmax(gain))
        if gain[best] <= 1e-10 * float(np.linalg.norm(table[:, best]) * np.linalg.norm(y)):
            break
        free[best] = True
        while True:
            wanted = np.zeros(n)
            wanted[free] = np.linalg.lstsq(table[:, free], y, rcond=None)[0]
            below = free & (wanted <= 0)
            if not below.any():
                level = wanted
                break
            part = float(np.min(level[below] / (level[below] - wanted[below] + 1e-300)))
            level = level + part * (wanted - level)
            free &= level > 1e-15 * level.max(initial=1.0)
            level[~free] = 0.0
    return level


def misses(rows: Sequence[Row], kinds: dict[str, list[float]]) -> list[float]:
    """By which part the model misses the instructions of each net's step."""
    predicted: dict[int, float] = defaultdict(float)
    counted: dict[int, int] = defaultdict(int)
    for row in rows:
        if row.kind in kinds:
            predicted[row.net] += float(np.dot(kinds[row.kind], row.features))
            counted[row.net] += row.instructions
    return [predicted[net] / counted[net] - 1 for net in counted]


def counts(core: str, nets: int) -> Iterator[Row]:
    for number in range(nets):
        own = count(number, core)
        print(f"{core}: net {number}, {len(own)} ops, {sum(row.instructions for row in own)} instructions", flush=True)
        yield from own


def fitted(core: str, rows: Sequence[Row]) -> dict[str, Any]:
    seen = [row for row in rows if row.net % LEFT_OUT]
    off = misses([row for row in rows if row.net % LEFT_OUT == 0], fit(seen))
    print(f"{core}: steps that were not seen are off by {[round(100 * part, 1) for part in off]} %", flush=True)
    return {
        "plus_minus": round(float(np.quantile(np.abs(off), 2 / 3)), 3),  # two times of three, as everywhere
        "most_off": round(float(np.abs(off).max()), 3),
        "nets": len({row.net for row in rows}),
        "machine": CORES[core][1],
        "kinds": fit(rows),
    }


def as_text(made: dict[str, Any]) -> str:
    """As JSON, each row of coefficients on one line."""
    text = json.dumps(made, indent=1) + "\n"
    return re.sub(r"\[\s+([^\]]+?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", type=int, default=90)
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--cores", nargs="*", default=list(CORES), choices=list(CORES))
    given = parser.parse_args()
    compiler = load_target("nrf52840").firmware.compiler
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    made = {
        "edgetrain instruction model": SCHEMA,
        "source": "instructions of each call, counted by QEMU's plugin (firmware/boards/count.c) in one training step "
        "of nets with random shapes, fitted by benchmarks/firmware_instructions.py",
        "compiler": version.splitlines()[0],
        "cores": {core: fitted(core, list(counts(core, given.nets))) for core in given.cores},
    }
    given.out.write_text(as_text(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
