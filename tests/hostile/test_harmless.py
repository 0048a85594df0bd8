"""What models do beside computing, out of habit: logs, statistics, caches. It trains with plain PyTorch's numbers.

Each is a `forward` as one finds it in the wild; a refusal would be as wrong as other numbers.
"""

from __future__ import annotations

import collections
import functools
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import UserError

X = torch.linspace(-1, 2, 64).reshape(2, 4, 8)
LOG = logging.Logger("of a test")
HEARD = io.StringIO()
LOG.addHandler(logging.StreamHandler(HEARD))
FILE = Path(tempfile.mkdtemp()) / "log"
LOG.addHandler(logging.FileHandler(FILE))
TABLES: dict[int, Tensor] = {}
TOLD: set[str] = set()


class Habit(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.act = act
        self.calls, self.seconds, self.average, self.warned = 0, 0.0, 0.0, False
        self.stats: dict[str, float] = {"calls": 0, "scale": 2.0}
        self.counts, self.shapes = collections.defaultdict[str, int](int), collections.Counter[Any]()
        self.longest, self.tables = 0, dict[int, Tensor]()
        self.one, self.names, self.shown = [0], list[str](), list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        more = self.act(self, x)
        y: Tensor = self.linear(x)
        return y if more is None else y * more


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y.square().mean()


def counts(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    m.stats["calls"] += 1
    m.counts["tokens"] += x.shape[0] * x.shape[1]
    m.shapes.update([tuple(x.shape)])
    m.one[0] += 1
    m.average = m.average + (x.shape[1] - m.average) / m.calls
    return x.new_full((), m.stats["scale"])


def logs(m: Any, x: Tensor) -> None:
    m.calls += 1
    LOG.warning("call %d of shape %s", m.calls, tuple(x.shape))
    print(f"call {m.calls}", file=sys.stderr)


def warns(m: Any, x: Tensor) -> None:
    warnings.warn("an old form", stacklevel=1)
    if not m.warned:
        m.warned = True
    if "old" not in TOLD:
        TOLD.add("old")


@functools.cache
def told_once(text: str) -> None:
    LOG.warning(text)


@functools.lru_cache(maxsize=64)
def pattern(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def caches_texts(m: Any, x: Tensor) -> Tensor:
    told_once("an old form")
    return torch.ones(len(pattern("b t c")))[0]


@functools.lru_cache(maxsize=64)
def mask(length: int) -> Tensor:
    return torch.arange(length)[:, None] / 10 + 1


def scopes(m: Any, x: Tensor) -> None:
    m.names.append("outer")
    m.last_shape = x.shape
    m.shown.append((tuple(x.shape), len(m.names)))
    m.names.pop()


def profiled(m: Any, x: Tensor) -> Tensor:
    with torch.profiler.record_function("of a test"):
        return F.relu(x) + 1


def rotates(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    if length > m.longest:
        m.longest, angles = length, torch.outer(torch.arange(length), 0.1 ** torch.arange(8))
        m.table = angles.cos(), angles.sin()
    cos, sin = m.table
    both: Tensor = cos[:length] + sin[:length]
    return both


def numbers_positions(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "positions"):
        positions = torch.zeros(16, 8)
        positions[:, 0::2] = torch.arange(16)[:, None].sin()
        positions[:, 1::2] = torch.arange(16)[:, None].cos()
        m.register_buffer("positions", positions, persistent=False)
    rows: Tensor = m.positions[: x.shape[1]]
    return rows


def by_length(m: Any, x: Tensor) -> Tensor:
    for tables in (m.tables, TABLES):
        if x.shape[1] not in tables:
            tables[x.shape[1]] = torch.linspace(1, 2, x.shape[1])[:, None]
    first: Tensor = m.tables[x.shape[1]]
    return first * TABLES[x.shape[1]]


HABITS: dict[str, Callable[[Any, Tensor], Tensor | None]] = {
    f.__name__.replace("_", " "): f
    for f in (
        counts,
        logs,
        warns,
        caches_texts,
        scopes,
        profiled,
        rotates,
        numbers_positions,
        by_length,
    )
}
HABITS["a mask kept by lru_cache"] = lambda m, x: mask(x.shape[1])
HABITS["reads the environment"] = lambda m, x: x.new_full((), float(os.environ.get("SCALE_OF_A_TEST", "2")))


@pytest.mark.filterwarnings("ignore:an old form")
@pytest.mark.parametrize("warmed", [False, True])
@pytest.mark.parametrize("name", HABITS)
def test_a_habit_that_harms_nobody(name: str, warmed: bool) -> None:
    losses = []
    for ours in (False, True):
        torch.manual_seed(0)
        mask.cache_clear()
        TABLES.clear()
        model = Habit(HABITS[name])
        if warmed:
            model(X)
        there = {key: repr(value) for key, value in vars(model).items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if ours:
            step = et.prepare(model, mean_square, optimizer, (X,), memory_format="preserve")
            assert {key: repr(value) for key, value in vars(model).items()} == there
            losses.append([float(step(X)) for _ in range(5)])
        else:
            losses.append([])
            for _ in range(5):
                optimizer.zero_grad()
                value = mean_square(model, X)
                value.backward()
                optimizer.step()
                losses[0].append(float(value))
    assert losses[0] == losses[1]


class Trainer:
    """As one writes it: it keeps the step, and hooks' handles, and its method is the loss."""

    def __init__(self, *, keeps: bool) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(8, 8))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        step = et.prepare(self.model, self.loss, self.optimizer, (X,))
        if keeps:
            self.step, self.plan, self.steps = step, step.plan, [step]
        self.run = {0: step} if keeps else step.__call__

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return mean_square(model, x)


def walked(step: et.Step) -> int:
    assert step._captured is not None
    return len(step._captured.watch._alive)


def test_a_trainer_that_keeps_its_step() -> None:
    numbers = []
    for keeps in (False, True):
        trainer: Any = Trainer(keeps=keeps)
        step = trainer.step if keeps else trainer.run.__self__
        losses = [float(step(X)) for _ in range(10)]
        numbers.append((losses, walked(step)))
        assert step._captures <= 2
        assert "_forward_hooks" in vars(trainer.model)
    assert numbers[0][0] == numbers[1][0]
    assert abs(numbers[0][1] - numbers[1][1]) < 30


HANDLES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda m: m.linear.register_forward_hook(lambda *a: None),
    "forward pre": lambda m: m.linear.register_forward_pre_hook(lambda *a: None),
    "backward": lambda m: m.linear.register_full_backward_hook(lambda *a: None),
    "parameter": lambda m: m.linear.weight.register_hook(lambda g: None),
    "state dict": lambda m: m.linear.register_state_dict_pre_hook(lambda *a: None),
    "all modules": lambda m: nn.modules.module.register_module_forward_hook(lambda *a: None),
}


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", HANDLES)
def test_a_model_that_keeps_the_handle_of_a_hook(name: str) -> None:
    model: Any = Habit(lambda m, x: None)
    model.handle = HANDLES[name](model)
    model.handles = [model.linear.register_forward_hook(lambda *a: None)]
    try:
        step = et.prepare(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
        step(X)
        model.handles.append(model.linear.register_forward_hook(lambda *a: None))
        step(X)
    finally:
        model.handle.remove()


def hooks_for_the_time(m: Any, x: Tensor) -> None:
    with_hook = m.linear.register_forward_hook(lambda *a: None)
    m.handle = with_hook
    m.linear(x)
    with_hook.remove()


def test_a_hook_that_is_registered_each_time() -> None:
    model = Habit(hooks_for_the_time)
    step = et.prepare(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
    step(X)


def counts_lazily(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "steps"):
        m.steps = torch.zeros(3)
    else:
        m.steps[0].add_(1)
    first: Tensor = 1 + m.steps[0]
    return first


def averages_lazily(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "mean"):
        m.mean = torch.zeros(8)
    mean: Tensor = m.mean.lerp_(x.mean((0, 1)), 0.1)
    return mean


def replaces(m: Any, x: Tensor) -> Tensor:
    steps: Tensor = m.steps + 1 if hasattr(m, "steps") else torch.zeros(())
    m.steps = steps
    return 1 + steps


def draws_once(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "drawn"):
        m.drawn = torch.randn(8)
    drawn: Tensor = m.drawn
    return drawn


@pytest.mark.parametrize("act", [counts_lazily, averages_lazily, replaces, draws_once])
def test_a_tensor_that_is_made_once_and_changed_later_is_no_constant(act: Callable[[Any, Tensor], Tensor]) -> None:
    model = Habit(act)
    there = set(vars(model))
    with pytest.raises(UserError, match="tensor"):
        et.prepare(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
    assert set(vars(model)) == there
