"""The study behind `make demo`: a small net on digits, plain PyTorch and the captured step side by side.

In:  settings. Out: a run folder with record.json and charts.json, and `DemoResult`.

Both start from the same weights and see the same batches, turn by turn, so that noise of the machine meets both
alike. Memory is what PyTorch's allocator served at most during one step, counted the same way for both.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from edgetrain import zoo
from edgetrain.measure.record import RunFolder, Value, new_record, write_atomic
from edgetrain.run.memory import MemoryTrace, allocated_peak
from edgetrain.run.step import Step, prepare
from edgetrain.zoo import datasets

MODEL, WIDTH, SIDE, BATCH = "mobilenet_v2", 0.35, 32, 64


@dataclass(frozen=True)
class Side:
    """What one of the two ways took."""

    loss: float
    accuracy: float
    time_s: float  # median of a step
    peak_bytes: int


@dataclass(frozen=True)
class DemoResult:
    eager: Side
    step: Side
    largest_loss_difference: float
    steps: int
    folder: Path


def demo(out: Path, *, epochs: int = 3, on_step: Callable[[int, int], None] = lambda done, total: None) -> DemoResult:
    """Train both; `on_step(done, total)` is called after each pair of steps."""
    folder = RunFolder.create(out)
    data = datasets.load("digits", input_size=SIDE, channels=3)
    entry = zoo.get(MODEL)
    torch.manual_seed(0)
    plain = zoo.build(MODEL, classes=10, input_size=SIDE, width=WIDTH)
    ours = copy.deepcopy(plain)
    plain_optimizer, optimizer = _optimizer(plain), _optimizer(ours)
    first = data.train.batch(torch.arange(BATCH))
    step = prepare(ours, entry.task.loss, optimizer, first, memory_format="preserve")

    def eager(*batch: torch.Tensor) -> torch.Tensor:
        plain_optimizer.zero_grad()
        loss = entry.task.loss(plain, *batch)
        loss.backward()
        plain_optimizer.step()
        return loss.detach()

    per_epoch = len(data.train) // BATCH
    total = epochs * per_epoch
    losses: dict[str, list[float]] = {"eager": [], "step": []}
    times: dict[str, list[float]] = {"eager": [], "step": []}
    for number in range(total):
        generator = torch.Generator().manual_seed(number // per_epoch)
        order = torch.randperm(len(data.train), generator=generator)
        batch = data.train.batch(order[number % per_epoch * BATCH :][:BATCH])
        for name, run in (("eager", eager), ("step", step)):
            torch.manual_seed(number)  # the same dropout masks for both
            began = time.perf_counter()
            losses[name].append(float(run(*batch)))
            times[name].append(time.perf_counter() - began)
        on_step(number + 1, total)
    traced = step.trace_memory(*first)
    sides = {
        "eager": Side(
            losses["eager"][-1],
            _accuracy(plain, data),
            statistics.median(times["eager"][1:]),
            _eager_peak(lambda: eager(*first), plain_optimizer) + traced.persistent_bytes,
        ),
        "step": Side(
            losses["step"][-1],
            _accuracy(ours, data),
            statistics.median(times["step"][1:]),
            allocated_peak(lambda: step(*first)) + traced.persistent_bytes,
        ),
    }
    difference = max(abs(a - b) for a, b in zip(losses["eager"], losses["step"], strict=True))
    result = DemoResult(sides["eager"], sides["step"], difference, total, folder.path)
    _keep(folder, result, losses, traced, step)
    return result


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def _eager_peak(work: Callable[[], object], optimizer: torch.optim.Optimizer) -> int:
    optimizer.zero_grad()  # gradients of the step before are not part of this one
    return allocated_peak(work)


def _accuracy(net: nn.Module, data: datasets.Data) -> float:
    net.eval()
    with torch.no_grad():
        x, y = data.test.batch(torch.arange(len(data.test)))
        right = float((net(x).argmax(1) == y).float().mean())
    net.train()
    return right


def _keep(
    folder: RunFolder, result: DemoResult, losses: dict[str, list[float]], traced: MemoryTrace, step: Step
) -> None:
    record = new_record(sys.argv, charts="charts.json")
    summary: dict[str, Value] = {}
    for name, side in (("plain PyTorch", result.eager), ("edgetrain", result.step)):
        summary[f"{name}: training loss"] = Value(side.loss, "", "measured")
        summary[f"{name}: test accuracy"] = Value(side.accuracy, "", "measured")
        summary[f"{name}: time of a step"] = Value(side.time_s, "s", "measured")
        summary[f"{name}: peak memory of a step"] = Value(side.peak_bytes, "bytes", "measured")
    summary["planned peak of tensors"] = Value(step.plan.peak_bytes, "bytes", "derived")
    charts = [
        {
            "title": "Training loss",
            "note": "The two lines lie on each other when the captured step computes what plain PyTorch computes.",
            "x": "step",
            "y": "loss",
            "lines": [
                {"name": "plain PyTorch", "values": losses["eager"]},
                {"name": "edgetrain", "values": losses["step"]},
            ],
        },
        {
            "title": "Memory of one captured step",
            "note": "Bytes of the step's tensors during each op, checked against the storages that were really there.",
            "x": "op",
            "y": "MB",
            "lines": [{"name": "edgetrain", "values": [op.during_bytes / 1e6 for op in traced.ops]}],
            "marks": [{"name": "peak of plain PyTorch", "value": result.eager.peak_bytes / 1e6}],
        },
    ]
    write_atomic(folder.path / "charts.json", json.dumps(charts).encode())
    folder.save(replace(record, status="finished", summary=summary))
