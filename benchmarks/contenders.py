"""Ways to train one model against each other: each a process of its own, all taking turns.

In:  a case (model, batch, optimizer) and ways to train it.
Out: seconds of every step, by way and round; what memory each took; medians with intervals.

Each contender is a process of its own, so that none sees another's allocator. They take turns, in a new random order
each round, so that noise of the machine meets all of them (`edgetrain/bench/contender.py`). It is asked:

    step      for the seconds of one step
    memory    for what it took in all since the start, and the plan that it runs

Memory is how far the resident memory of the process grew at most over what it was with model and batch in place, and
what PyTorch's allocator served at most in one step.
"""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import edgetrain as et
from edgetrain import zoo
from edgetrain.bench.contender import Answers, Contender, Growth, python_contender
from edgetrain.machine import process_bytes
from edgetrain.measure.intervals import ratio_interval
from edgetrain.measure.record import new_record
from edgetrain.run.memory import allocated_peak
from edgetrain.zoo.models.bert import Layer
from edgetrain.zoo.models.mobilenet_v2 import InvertedResidual
from edgetrain.zoo.models.resnet import BasicBlock, Bottleneck

RESULTS = Path(__file__).parent / "results"
BLOCKS = (InvertedResidual, BasicBlock, Bottleneck, Layer)
SEGMENTS = 4  # about the square root of the 19 layers of MobileNetV2's features
WARM_UP = 2

Kind = Literal["eager", "compile", "checkpoint", "checkpoint_sequential", "edgetrain"]
Times = dict[str, list[float]]
Memory = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """What is trained. What is not given is as in the zoo."""

    model: str
    batch: int
    optimizer: Literal["sgd", "plain_sgd", "adamw"]
    classes: int | None = None
    input_size: int | None = None
    width: float | None = None

    @property
    def images(self) -> bool:
        return zoo.get(self.model).channels > 0


@dataclass(frozen=True)
class Way:
    """How it is trained. The last three are for the kind "edgetrain", which keeps all where they are not given."""

    name: str
    kind: Kind
    channels_last: bool = False
    activation_budget: float | None = None  # torch.compile's: 0 recomputes all, 1 keeps all
    memory_bytes: int | None = None
    process_memory_bytes: int | None = None
    plan_time_s: float = 10.0


EAGER = Way("eager", "eager")
EAGER_CHANNELS_LAST = Way("eager channels-last", "eager", channels_last=True)
EDGETRAIN = Way("edgetrain", "edgetrain")


def plain(case: Case) -> list[Way]:
    """PyTorch as most people run it, and in the format that is faster for some images."""
    return [EAGER, EAGER_CHANNELS_LAST] if case.images else [EAGER]


def faster(times: Times) -> str:
    """The plain way of least median time."""
    names = {EAGER.name, EAGER_CHANNELS_LAST.name} & set(times)
    return min(names, key=lambda name: statistics.median(times[name]))


# ---- in the process of a contender


@dataclass(frozen=True)
class Built:
    model: nn.Module
    loss: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer
    batch: tuple[torch.Tensor, ...]


def build(case: Case, *, channels_last: bool = False) -> Built:
    """The same weights and the same batch each time."""
    entry = zoo.get(case.model)
    torch.manual_seed(0)
    model = zoo.build(case.model, classes=case.classes, input_size=case.input_size, width=case.width)
    batch = entry.example(case.batch, classes=case.classes, input_size=case.input_size)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch = (batch[0].contiguous(memory_format=torch.channels_last), *batch[1:])
    optimizer: torch.optim.Optimizer
    if case.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    elif case.optimizer == "plain_sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Built(model, entry.task.loss, optimizer, batch)


def prepare(built: Built, way: Way) -> et.Step:
    return et.prepare(
        built.model, built.loss, built.optimizer, built.batch,
        memory=way.memory_bytes, process_memory=way.process_memory_bytes, plan_time_s=way.plan_time_s,
    )  # fmt: skip


def eager(built: Built, way: Way) -> Callable[[], object]:
    """A step that PyTorch makes by itself."""
    model = built.model
    forward: Callable[..., Any] = model
    if way.kind == "compile":
        if way.activation_budget is not None:
            functorch_config.activation_memory_budget = way.activation_budget
        forward = torch.compile(model)
    elif way.kind == "checkpoint":
        for block in model.modules():
            if isinstance(block, BLOCKS):
                block.forward = functools.partial(  # type: ignore[method-assign]
                    checkpoint, block.forward, use_reentrant=False
                )
    elif way.kind == "checkpoint_sequential":
        features = model.get_submodule("features")
        features.forward = lambda x: checkpoint_sequential(features, SEGMENTS, x, use_reentrant=False)

    def step() -> None:
        built.optimizer.zero_grad()
        built.loss(forward, *built.batch).backward()
        built.optimizer.step()

    return step


def contender(arguments: dict[str, Any]) -> Answers:
    """In the process of a contender: what answers "step" and "memory"; see the module's docstring."""
    case, way = Case(**arguments["case"]), Way(**arguments["way"])
    built = build(case, channels_last=way.channels_last)
    start_bytes = process_bytes("VmHWM") or 0
    growth = Growth()
    prepared = prepare(built, way) if way.kind == "edgetrain" else None
    step = eager(built, way) if prepared is None else functools.partial(prepared, *built.batch)

    def answer(word: str) -> Any:
        if word == "step":
            began = time.perf_counter()
            step()
            return time.perf_counter() - began
        peak_bytes = max(process_bytes("VmHWM") or 0, start_bytes)
        taken: dict[str, Any] = {"grown_bytes": growth.n_bytes, "allocated_bytes": allocated_peak(step)}
        plan = {} if prepared is None else {"plan": about_plan(prepared.plan)}
        return {**taken, "peak_bytes": peak_bytes, **plan}

    return answer


def about_plan(plan: et.Plan) -> dict[str, Any]:
    return {
        "planner": plan.planner,
        "planned_bytes": plan.peak_bytes,
        "persistent_bytes": plan.persistent_bytes,
        "predicted_s": plan.time_s,
        "recomputed_ops": len(plan.recomputed),
        "gap": plan.gap,
        "exact": plan.exact,
    }


# ---- in the process that compares them


def start(case: Case, way: Way) -> Contender:
    return python_contender(way.name, "benchmarks.contenders:contender", {"case": asdict(case), "way": asdict(way)})


def take_turns(case: Case, ways: Iterable[Way], rounds: int) -> tuple[Times, Memory]:
    """The seconds of each step, by way and round, and what memory each way took."""
    return compete([(case, way) for way in ways], rounds)


def compete(contenders: Iterable[tuple[Case, Way]], rounds: int) -> tuple[Times, Memory]:
    """The same where not all train the same case; each way has a name of its own."""
    with contextlib.ExitStack() as stack:
        running = {way.name: stack.enter_context(start(case, way)) for case, way in contenders}
        for one in running.values():
            for _ in range(WARM_UP):
                one.ask("step")
        times: Times = {name: [] for name in running}
        shuffle = random.Random(0)
        for _ in range(rounds):
            order = list(running)
            shuffle.shuffle(order)
            for name in order:
                times[name].append(running[name].ask("step"))
        return times, {name: one.ask("memory") for name, one in running.items()}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Of times, taken within each round."""
    found = ratio_interval(ours, theirs)
    return {"median": found.value, "low": found.low, "high": found.high}


def about() -> dict[str, Any]:
    """The machine, the commit and the versions that a result belongs to."""
    record = new_record([Path(sys.argv[0]).name, *sys.argv[1:]])
    found = {"machine": record.machine.cpu, "cores": record.machine.usable_cores, "commit": record.commit}
    return found | {"dirty": record.dirty, "torch": record.versions.torch, "created": record.created}
