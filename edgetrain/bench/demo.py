"""The study behind `make demo`: MobileNetV2 under a budget of bytes, and plain PyTorch beside it.

In:  settings. Out: a run folder with record.json and charts.json, a profile of edgetrain's step in a folder inside it,
and `DemoResult`.

Each way to train is a process of its own with the same weights, and they take turns on the same batch, so that noise
of the machine meets all alike and none sees another's allocator. Memory is how far the resident memory of the process
grew at most over what it was with model and batch in place.

The task is to learn one batch of noisy digits by heart, with residual blocks that begin as identities. Without these
two, float32 gradients were up to a tenth away from those in float64, in each memory format differently, and losses
apart after one step: the likely cause is rounding at the kinks of ReLU6, since a digit of 8×8 pixels is flat when
enlarged. Whether numbers are bitwise PyTorch's is checked apart, in its own format.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgetrain import zoo
from edgetrain.errors import InternalError
from edgetrain.files import write_text
from edgetrain.graph.capture.training import capture
from edgetrain.interrupts import not_for_children
from edgetrain.measure.profile import profile
from edgetrain.measure.protocol import Protocol
from edgetrain.measure.record import RunFolder, Value, new_record
from edgetrain.measure.sensors.room import require_room
from edgetrain.plan.budget import parse_bytes, show_bytes
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.lifetimes import timeline
from edgetrain.run.step import Step, prepare
from edgetrain.zoo import datasets
from edgetrain.zoo.models.mobilenet_v2 import InvertedResidual

MODEL, PLAIN, CHANNELS_LAST = "mobilenet_v2", "plain PyTorch", "plain channels-last"
CHECK = "memory_format=preserve"  # edgetrain in PyTorch's format: bitwise the same?
CHECKED_STEPS = 2  # the second also sees what the first left in the optimizer
PROFILED_STEPS, PROFILE = 6, Protocol(idle_s=1.0, rounds=2, most_warm_up=3)  # short: a demo has three minutes


@dataclass(frozen=True)
class Settings:
    memory: str = "300MB"
    side: int = 224
    width: float = 1.0
    batch: int = 16
    steps: int = 8

    @property
    def check_bytes(self) -> int:
        """PyTorch's own kernels for batch norm need more at once."""
        return 2 * parse_bytes(self.memory)

    @property
    def ours(self) -> str:
        return f"edgetrain, {self.memory}"


@dataclass(frozen=True)
class Side:
    """What one way took. digests: of parameters and buffers after each step."""

    losses: tuple[float, ...]
    digests: tuple[str, ...]
    time_s: float  # median of a step
    growth_bytes: int


@dataclass(frozen=True)
class DemoResult:
    sides: dict[str, Side]
    settings: Settings
    plan: str
    peak_bytes: int  # of the plan
    recomputed: int
    exact: bool  # the steps of CHECK were bitwise those of PLAIN
    folder: Path
    profile: Path  # run folder of edgetrain's step, op by op

    @property
    def ours(self) -> Side:
        return self.sides[self.settings.ours]

    @property
    def apart(self) -> float:
        """How far the losses of the last step are from each other at most, as a part of them."""
        last = [side.losses[-1] for side in self.sides.values()]
        return (max(last) - min(last)) / max(last)

    def ratios(self, name: str) -> tuple[float, float]:
        """Memory and time of edgetrain as parts of another's."""
        other = self.sides[name]
        return self.ours.growth_bytes / other.growth_bytes, self.ours.time_s / other.time_s


def demo(out: Path, settings: Settings, on_turn: Callable[[str, int, int], None]) -> DemoResult:
    """Train all; `on_turn(what, done, total)` is called before each turn."""
    _require_room(settings)
    folder = RunFolder.create(out)
    names = (PLAIN, CHANNELS_LAST, settings.ours)
    checked = min(CHECKED_STEPS, settings.steps)
    turns = _Turns(on_turn, (settings.steps + 1) * len(names) + checked + 2)
    profiled = folder.path / "profile"
    ends, made = _train(names, settings, settings.steps, turns, profiled)
    # Last and alone: it is not timed, and its planning should not meet the others.
    _, check = _train((CHECK,), settings, checked, turns)
    turns.next("done")
    # The first steps of each also load code and ask for memory.
    warm = min(2, settings.steps - 1)
    sides = {
        name: Side(
            tuple(step.loss for step in made[name]),
            tuple(step.digest for step in made[name]),
            statistics.median(step.time_s for step in made[name][warm:]),
            ends[name]["growth_bytes"],
        )
        for name in names
    }
    exact = all(a.loss == b.loss and a.digest == b.digest for a, b in zip(check[CHECK], made[PLAIN], strict=False))
    about = ends[settings.ours]
    result = DemoResult(
        sides, settings, about["plan"], about["peak_bytes"], about["recomputed"], exact, folder.path, profiled
    )
    _keep(folder, result, about)
    return result


def _require_room(settings: Settings) -> None:
    """Refuse what the two ways of plain PyTorch, which are there at the same time, have no room for."""
    entry = zoo.get(MODEL)
    model = zoo.build(MODEL, classes=10, input_size=settings.side, width=settings.width)
    batch = entry.example(settings.batch, classes=10, input_size=settings.side)
    graph = capture(model, entry.task.loss, torch.optim.Adam(model.parameters()), batch)
    peak_bytes = keep_all(graph).peak_bytes
    require_room(
        "plain PyTorch, twice,", 2 * peak_bytes, next_step="give a smaller batch, or a smaller input size"
    )  # fmt: skip


@dataclass(frozen=True)
class _Made:
    """One step of one way."""

    loss: float
    digest: str
    time_s: float


@dataclass
class _Turns:
    on_turn: Callable[[str, int, int], None]
    total: int
    done: int = 0

    def next(self, what: str) -> None:
        self.on_turn(what, self.done, self.total)
        self.done += 1


def _train(
    names: tuple[str, ...], settings: Settings, steps: int, turns: _Turns, profiled: Path | None = None
) -> tuple[dict[str, dict[str, Any]], dict[str, list[_Made]]]:
    """What each took, and its steps, made in turns. profiled: measure edgetrain's step afterwards, into this folder."""
    workers: dict[str, _Worker] = {}
    made: dict[str, list[_Made]] = {name: [] for name in names}
    try:
        for name in names:
            turns.next(f"preparing {name}")
            workers[name] = _Worker(name, settings)
        for number in range(steps):
            for name in names:
                turns.next(name)
                made[name].append(workers[name].ask(number))
        ends = {name: workers[name].ask(None) for name in names}
        if profiled is not None:
            turns.next("profiling edgetrain's step")
            workers[settings.ours].ask(profiled)
        return ends, made
    finally:
        for worker in workers.values():
            worker.end()


class _Worker:
    """One way to train, in a process of its own."""

    def __init__(self, name: str, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_work, args=(other, name, settings), daemon=True)
        resource_tracker.ensure_running()  # it would let Ctrl-C through again
        with not_for_children():
            self._process.start()
        other.close()
        self._receive()

    def ask(self, what: int | Path | None) -> Any:
        """Make the step with this number. None: what all of them took. A folder: profile the step into it."""
        self._pipe.send(what)
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
    _begin_as_identities(model)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    x, y = data.train.batch(order[: settings.batch])
    batch = (x + 0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)), y)
    if name == CHANNELS_LAST:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch = (batch[0].contiguous(memory_format=torch.channels_last), y)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    before = _status("VmRSS")
    step: Step | None = None
    if name in (settings.ours, CHECK):
        check = name == CHECK
        step = prepare(
            model, entry.task.loss, optimizer, batch, memory=settings.check_bytes if check else settings.memory,
            memory_format="preserve" if check else "auto", planner="fast" if check else "auto",
        )  # fmt: skip
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        torch.manual_seed(number)  # the same dropout masks for all
        began = time.perf_counter()
        loss = float(step(*batch) if step is not None else _plain(model, entry.task.loss, optimizer, batch))
        time_s = time.perf_counter() - began
        pipe.send(_Made(loss, _digest(model), time_s))
    about: dict[str, Any] = {"growth_bytes": _status("VmHWM") - before}
    pipe.send(about if step is None else about | _about(step))
    folder = pipe.recv()
    if step is not None:
        profile(step, batch, steps=PROFILED_STEPS, protocol=PROFILE, out=folder)
    pipe.send("profiled")
    pipe.recv()


def _begin_as_identities(model: nn.Module) -> None:
    """The last batch norm of each residual block begins with weights 0 (Goyal et al. 2017)."""
    for module in model.modules():
        if isinstance(module, InvertedResidual) and module.residual:
            last = module.conv[-1]
            assert isinstance(last, nn.BatchNorm2d)
            nn.init.zeros_(last.weight)


def _digest(model: nn.Module) -> str:
    """Of the bits of all parameters and buffers."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


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
        name: [m.during_bytes / 1e6 for m in timeline(step.graph, plan.schedule, updates="early", workspace=workspace)]
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


# ---- in words and pictures ------------------------------------------------------------------------------------


def about_loss(result: DemoResult) -> str:
    """Why the losses are as near to each other as they are, and no nearer."""
    return (
        f"All start from the same weights and train on the same {result.settings.batch} noisy digits in each step, "
        "with the same Adam and dropout masks. edgetrain runs images channels-last too. Channels-last kernels sum in "
        "another order than plain PyTorch's, so the losses are not bitwise equal: in the last step they are at most "
        f"{100 * result.apart:.1f} % apart."
    )


def about_exact(result: DemoResult) -> str:
    """Whether edgetrain's numbers are plain PyTorch's where the kernels are."""
    steps = min(CHECKED_STEPS, result.settings.steps)
    found = "were bitwise" if result.exact else "were NOT bitwise"
    return (
        f'With memory_format="preserve" edgetrain runs PyTorch\'s own kernels. Checked in '
        f"{show_bytes(result.settings.check_bytes)}: the loss, parameters and buffers of the first {steps} steps "
        f"{found} those of plain PyTorch."
    )


def about_memory(result: DemoResult) -> str:
    """What the budget bounds, and what the growth of a process counts beside it."""
    return (
        f"{result.settings.memory} is the budget for the tensors of a step: parameters, optimizer state, batch, "
        f"activations, gradients, workspace. The plan takes {result.peak_bytes / 1e6:.1f} MB. The growth is measured: "
        "the highest resident memory of the process, less what it was with model and batch in place. It also counts "
        "code that is loaded, capture and planning, and Python's objects. process_memory= bounds the whole process."
    )


def _keep(folder: RunFolder, result: DemoResult, about: dict[str, Any]) -> None:
    record = new_record(sys.argv, charts="charts.json")
    write_text(folder.path / "charts.json", json.dumps(_charts(result, about["curves"])))
    folder.save(replace(record, status="finished", summary=_summary(result)))


def _summary(result: DemoResult) -> dict[str, Value]:
    summary: dict[str, Value] = {}
    for name in (PLAIN, CHANNELS_LAST):
        memory, time = result.ratios(name)
        summary[f"memory of edgetrain, as a part of {name}'s"] = Value(round(memory, 3), "", "derived")
        summary[f"time of edgetrain, as a part of {name}'s"] = Value(round(time, 3), "", "derived")
    for name, side in result.sides.items():
        summary[f"{name}: loss of the last step"] = Value(side.losses[-1], "", "measured")
        summary[f"{name}: time of a step"] = Value(side.time_s, "s", "measured")
        summary[f"{name}: growth of the process"] = Value(side.growth_bytes, "bytes", "measured")
    summary["planned peak of tensors"] = Value(result.peak_bytes, "bytes", "derived")
    return summary


def _charts(result: DemoResult, curves: dict[str, list[float]]) -> list[dict[str, Any]]:
    sides, settings = result.sides, result.settings
    budget = [
        {"name": f"budget {show_bytes(parse_bytes(settings.memory))}", "value": parse_bytes(settings.memory) / 1e6}
    ]
    return [
        {
            "title": "Training loss",
            "note": f"{about_loss(result)} {about_exact(result)}",
            "x": "step",
            "y": "loss",
            "lines": [{"name": name, "values": list(side.losses)} for name, side in sides.items()],
        },
        {
            "title": "Growth of the process",
            "note": about_memory(result),
            "y": "MB",
            "bars": [{"name": name, "value": side.growth_bytes / 1e6} for name, side in sides.items()],
            "marks": budget,
        },
        {
            "title": "Time of a step",
            "note": "The median of steps made in turns.",
            "y": "ms",
            "bars": [{"name": name, "value": 1e3 * side.time_s} for name, side in sides.items()],
        },
        {
            "title": "Tensors during one step of edgetrain",
            "note": f"As planned for {settings.memory}, and what keeping all activations would take: "
            f"{result.recomputed} ops run a second time.",
            "x": "op",
            "y": "MB",
            "lines": [{"name": name, "values": values} for name, values in curves.items()],
            "marks": budget,
        },
    ]
