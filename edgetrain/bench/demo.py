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

import contextlib
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgetrain.bench.contender import Answers, Contender, Growth, python_contender
from edgetrain.files import write_text
from edgetrain.graph.capture.training import capture
from edgetrain.measure.profile import profile
from edgetrain.measure.protocol import Protocol
from edgetrain.measure.record import RunFolder, Value, new_record
from edgetrain.measure.sensors.room import require_room
from edgetrain.plan.budget import parse_bytes, show_bytes
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.lifetimes import timeline
from edgetrain.run.step import Step, prepare
from edgetrain.zoo import build, datasets, get
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
    ends, steps_of = _train(names, settings, settings.steps, turns, profiled)
    # Last and alone: it is not timed, and its planning should not meet the others.
    _, check = _train((CHECK,), settings, checked, turns)
    turns.next("done")
    # The first steps of each also load code and ask for memory.
    warm = min(2, settings.steps - 1)
    sides = {
        name: Side(
            tuple(step.loss for step in steps_of[name]),
            tuple(step.digest for step in steps_of[name]),
            statistics.median(step.time_s for step in steps_of[name][warm:]),
            ends[name]["growth_bytes"],
        )
        for name in names
    }
    exact = all(a.loss == b.loss and a.digest == b.digest for a, b in zip(check[CHECK], steps_of[PLAIN], strict=False))
    about = ends[settings.ours]
    result = DemoResult(
        sides, settings, about["plan"], about["peak_bytes"], about["recomputed"], exact, folder.path, profiled
    )
    _keep(folder, result, about)
    return result


def _require_room(settings: Settings) -> None:
    """Refuse what the two ways of plain PyTorch, which are there at the same time, have no room for."""
    entry = get(MODEL)
    model = build(MODEL, classes=10, input_size=settings.side, width=settings.width)
    batch = entry.example(settings.batch, classes=10, input_size=settings.side)
    graph = capture(model, entry.task.loss, torch.optim.Adam(model.parameters()), batch)
    peak_bytes = keep_all(graph).peak_bytes
    require_room("plain PyTorch, twice,", 2 * peak_bytes, next_step="give a smaller batch, or a smaller input size")


@dataclass(frozen=True)
class _StepDone:
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
) -> tuple[dict[str, dict[str, Any]], dict[str, list[_StepDone]]]:
    """What each took, and its steps, in turns. profiled: measure edgetrain's step afterwards, into this folder."""
    contenders: dict[str, Contender] = {}
    done: dict[str, list[_StepDone]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        for name in names:
            turns.next(f"preparing {name}")
            arguments = {"name": name, "settings": asdict(settings)}
            contenders[name] = stack.enter_context(python_contender(name, f"{__name__}:contender", arguments))
        for number in range(steps):
            for name in names:
                turns.next(name)
                done[name].append(_StepDone(**contenders[name].ask(f"step {number}")))
        taken = {name: contenders[name].ask("memory") for name in names}
        if profiled is not None:
            turns.next("profiling edgetrain's step")
            contenders[settings.ours].ask(f"profile {profiled.absolute()}")
        return taken, done


def contender(arguments: dict[str, Any]) -> Answers:
    """In the process of one way: what answers "step N", "memory" and "profile FOLDER"."""
    name, settings = arguments["name"], Settings(**arguments["settings"])
    training = _Training(name, settings)
    growth = Growth()
    step = training.prepared(settings, check=name == CHECK) if name in (settings.ours, CHECK) else None

    def answer(asked: str) -> Any:
        what, _, rest = asked.partition(" ")
        if what == "step":
            return asdict(training.step(int(rest), step))
        if what == "memory":
            return {"growth_bytes": growth.n_bytes, **({} if step is None else _about(step))}
        assert step is not None
        profile(step, training.batch, steps=PROFILED_STEPS, protocol=PROFILE, out=rest)
        return None

    return answer


class _Training:
    """Model, optimizer and batch of one way: the same weights and the same digits in each."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.loss = get(MODEL).task.loss
        data = datasets.load("digits", input_size=settings.side, channels=3)
        torch.manual_seed(0)
        model = build(MODEL, classes=10, input_size=settings.side, width=settings.width)
        _begin_as_identities(model)
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
        x, y = data.train.batch(order[: settings.batch])
        x = x + 0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        if name == CHANNELS_LAST:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            x = x.contiguous(memory_format=torch.channels_last)
        self.model, self.batch = model, (x, y)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)

    def prepared(self, settings: Settings, *, check: bool) -> Step:
        options: dict[str, Any] = (
            {"memory": settings.check_bytes, "memory_format": "preserve", "planner": "fast"}
            if check
            else {"memory": settings.memory}
        )
        return prepare(self.model, self.loss, self.optimizer, self.batch, **options)

    def step(self, number: int, step: Step | None) -> _StepDone:
        torch.manual_seed(number)  # the same dropout masks for all
        began = time.perf_counter()
        loss = float(step(*self.batch) if step is not None else self._plain())
        time_s = time.perf_counter() - began
        return _StepDone(loss, _digest(self.model), time_s)

    def _plain(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        value = self.loss(self.model, *self.batch)
        value.backward()
        self.optimizer.step()
        return value.detach()


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
    verdict = "were bitwise" if result.exact else "were NOT bitwise"
    return (
        f'With memory_format="preserve" edgetrain runs PyTorch\'s own kernels. Checked in '
        f"{show_bytes(result.settings.check_bytes)}: the loss, parameters and buffers of the first {steps} steps "
        f"{verdict} those of plain PyTorch."
    )


def about_memory(result: DemoResult) -> str:
    """What the budget bounds, and what the growth of a process counts beside it."""
    return (
        f"{show_bytes(parse_bytes(result.settings.memory))} is the budget for the tensors of a step: parameters, "
        "optimizer state, batch, "
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


def _headlines(result: DemoResult) -> dict[str, Any]:
    """The two figures that matter: memory and time against plain PyTorch."""
    ours, plain, other = result.ours, result.sides[PLAIN], result.sides[CHANNELS_LAST]
    against, against_other = result.ratios(PLAIN), result.ratios(CHANNELS_LAST)
    figures = (
        ("memory", against[0], against_other[0], *(show_bytes(side.growth_bytes) for side in (ours, plain, other))),
        ("time of a step", against[1], against_other[1],
         *(f"{1e3 * side.time_s:,.0f} ms" for side in (ours, plain, other))),
    )  # fmt: skip
    return {
        "title": f"edgetrain within {show_bytes(parse_bytes(result.settings.memory))}, against plain PyTorch",
        "figures": [
            {
                "name": name,
                "value": f"{ratio:.2f} ×",
                "note": f"{own} instead of {theirs}; {ratio_other:.2f} × the {others} of {CHANNELS_LAST}",
            }
            for name, ratio, ratio_other, own, theirs, others in figures
        ],
    }


def _charts(result: DemoResult, curves: dict[str, list[float]]) -> list[dict[str, Any]]:
    sides, settings = result.sides, result.settings
    budget = [
        {"name": f"budget {show_bytes(parse_bytes(settings.memory))}", "value": parse_bytes(settings.memory) / 1e6}
    ]
    return [
        _headlines(result),
        {
            "title": "Growth of the process",
            "note": about_memory(result),
            "y": "MB",
            "bars": [{"name": name, "value": side.growth_bytes / 1e6} for name, side in sides.items()],
            "marks": budget,
        },
        {
            "title": "Time of a step",
            "note": "The median of steps; the ways take turns. Channels-last is the memory format that is faster for "
            "most convolutions: channels lie innermost.",
            "y": "ms",
            "bars": [{"name": name, "value": 1e3 * side.time_s} for name, side in sides.items()],
        },
        {
            "title": "Tensors during one step of edgetrain",
            "note": f"As planned for {show_bytes(parse_bytes(settings.memory))}, where {result.recomputed} ops are "
            "recomputed, and with all activations kept.",
            "x": "op",
            "y": "MB",
            "lines": [{"name": name, "values": values} for name, values in curves.items()],
            "marks": budget,
        },
        {
            "title": "Training loss",
            "note": f"{about_loss(result)} {about_exact(result)}",
            "x": "step",
            "y": "loss",
            "lines": [{"name": name, "values": list(side.losses)} for name, side in sides.items()],
        },
    ]
