"""The study behind `make demo`: MobileNetV2 under a budget of bytes, and plain PyTorch beside it.

In:  settings. Out: a run folder with record.json and charts.json, and `DemoResult`.

Each way to train is a process of its own with the same weights, and they take turns on the same batches, so that noise
of the machine meets all alike and none sees another's allocator. Memory is how far the resident memory of the process
grew at most over what it was with model and batch in place.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgetrain import zoo
from edgetrain.errors import InternalError
from edgetrain.measure.record import RunFolder, Value, new_record, write_atomic
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.lifetimes import timeline
from edgetrain.run.step import Step, prepare
from edgetrain.zoo import datasets

MODEL, PLAIN, CHANNELS_LAST = "mobilenet_v2", "plain PyTorch", "plain channels-last"


@dataclass(frozen=True)
class Settings:
    memory: str = "300MB"
    side: int = 224
    width: float = 1.0
    batch: int = 16
    steps: int = 12

    @property
    def ours(self) -> str:
        return f"edgetrain, {self.memory}"


@dataclass(frozen=True)
class Side:
    """What one way took."""

    losses: tuple[float, ...]
    time_s: float  # median of a step
    growth_bytes: int


@dataclass(frozen=True)
class DemoResult:
    sides: dict[str, Side]
    settings: Settings
    plan: str
    recomputed: int
    folder: Path

    @property
    def ours(self) -> Side:
        return self.sides[self.settings.ours]

    @property
    def faster_plain(self) -> str:
        return min((PLAIN, CHANNELS_LAST), key=lambda name: self.sides[name].time_s)


def demo(out: Path, settings: Settings, on_turn: Callable[[str, int, int], None]) -> DemoResult:
    """Train all; `on_turn(what, done, total)` is called before each turn."""
    folder = RunFolder.create(out)
    names = (PLAIN, CHANNELS_LAST, settings.ours)
    total = (settings.steps + 1) * len(names)
    done = 0
    workers: dict[str, _Worker] = {}
    losses: dict[str, list[float]] = {name: [] for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    try:
        for name in names:
            on_turn(f"preparing {name}", done, total)
            workers[name] = _Worker(name, settings)
            done += 1
        for number in range(settings.steps):
            for name in names:
                on_turn(name, done, total)
                loss, time_s = workers[name].ask(number)
                losses[name].append(loss)
                times[name].append(time_s)
                done += 1
        on_turn("done", total, total)
        ends: dict[str, dict[str, Any]] = {name: workers[name].ask(None) for name in names}
    finally:
        for worker in workers.values():
            worker.end()
    # The first steps of each also load code and ask for memory.
    warm = min(2, settings.steps - 1)
    sides = {
        name: Side(tuple(losses[name]), statistics.median(times[name][warm:]), ends[name]["growth_bytes"])
        for name in names
    }
    about = ends[settings.ours]
    result = DemoResult(sides, settings, about["plan"], about["recomputed"], folder.path)
    _keep(folder, result, about)
    return result


class _Worker:
    """One way to train, in a process of its own."""

    def __init__(self, name: str, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_work, args=(other, name, settings), daemon=True)
        self._process.start()
        other.close()
        self._receive()

    def ask(self, number: int | None) -> Any:
        """Make the step with this number: its loss and its time. None: what it took."""
        self._pipe.send(number)
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            raise InternalError(f"a process of the demo ended with code {self._process.exitcode}") from None

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _work(pipe: Connection, name: str, settings: Settings) -> None:
    """In the process of one way."""
    entry = zoo.get(MODEL)
    data = datasets.load("digits", input_size=settings.side, channels=3)
    torch.manual_seed(0)
    model = zoo.build(MODEL, classes=10, input_size=settings.side, width=settings.width)
    if name == CHANNELS_LAST:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))

    def batch(number: int) -> tuple[torch.Tensor, ...]:
        start = number * settings.batch % (len(order) - settings.batch)
        x, *rest = data.train.batch(order[start : start + settings.batch])
        return (x.contiguous(memory_format=torch.channels_last) if name == CHANNELS_LAST else x, *rest)

    first = batch(0)
    before = _status("VmRSS")
    step: Step | None = None
    if name == settings.ours:
        step = prepare(model, entry.task.loss, optimizer, first, memory=settings.memory)
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        items = batch(number)
        torch.manual_seed(number)  # the same dropout masks for all
        began = time.perf_counter()
        loss = float(step(*items) if step is not None else _plain(model, entry.task.loss, optimizer, items))
        pipe.send((loss, time.perf_counter() - began))
    about: dict[str, Any] = {"growth_bytes": _status("VmHWM") - before}
    pipe.send(about if step is None else about | _about(step))
    pipe.recv()


def _plain(
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    optimizer.zero_grad()
    value = loss(model, *batch)
    value.backward()
    optimizer.step()
    return value.detach()


def _about(step: Step) -> dict[str, Any]:
    workspace = step.plan.workspace_bytes
    whole = keep_all(step.graph, updates=step.plan.updates, workspace=workspace)
    curves = {
        name: [m.during_bytes / 1e6 for m in timeline(step.graph, plan.schedule, copies=False, workspace=workspace)]
        for name, plan in (("keeping all", whole), ("planned", step.plan))
    }
    return {
        "plan": str(step.plan),
        "recomputed": len(step.plan.recomputed),
        "peak_bytes": step.plan.peak_bytes,
        "curves": curves,
    }


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise InternalError(f"/proc/self/status has no {field}")


def _keep(folder: RunFolder, result: DemoResult, about: dict[str, Any]) -> None:
    record = new_record(sys.argv, charts="charts.json")
    summary: dict[str, Value] = {}
    for name, side in result.sides.items():
        summary[f"{name}: loss of the last step"] = Value(side.losses[-1], "", "measured")
        summary[f"{name}: time of a step"] = Value(side.time_s, "s", "measured")
        summary[f"{name}: growth of the process"] = Value(side.growth_bytes, "bytes", "measured")
    summary["planned peak of tensors"] = Value(about["peak_bytes"], "bytes", "derived")
    charts = [
        {
            "title": "Training loss",
            "note": "The same weights, batches and dropout masks; the lines differ by rounding.",
            "x": "step",
            "y": "loss",
            "lines": [{"name": name, "values": list(side.losses)} for name, side in result.sides.items()],
        },
        {
            "title": "Bytes of tensors during one step",
            "note": f"Keeping all activations, and as planned for {result.settings.memory}: "
            f"{result.recomputed} ops run a second time.",
            "x": "op",
            "y": "MB",
            "lines": [{"name": name, "values": values} for name, values in about["curves"].items()],
            "marks": [{"name": "growth of plain PyTorch's process", "value": _least_plain(result) / 1e6}],
        },
    ]
    write_atomic(folder.path / "charts.json", json.dumps(charts).encode())
    folder.save(replace(record, status="finished", summary=summary))


def _least_plain(result: DemoResult) -> int:
    return min(result.sides[name].growth_bytes for name in (PLAIN, CHANNELS_LAST))
