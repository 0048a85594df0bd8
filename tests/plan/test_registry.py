"""A planner that this file defines, from outside the package: found by name, validated, run."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import edgetrain as et
from edgetrain.cli import app
from edgetrain.plan import registry
from edgetrain.plan.planner import Planner, Request, Schedule, greedy
from edgetrain.plan.problem import Problem
from edgetrain.plan.walk import NoRoom, Walk
from tests.plan.problems import budget, small

NAME = "largest-first"


class LargestFirst(Walk):
    def choose(self, options: list[tuple[int, int]]) -> tuple[int | None, bool]:
        candidates = self.evictable.nonzero()[0].tolist()
        if candidates:
            return max(candidates, key=self.tables.size.__getitem__), False
        return (options[0][0], True) if options else (None, False)


def largest_first(problem: Problem, budget_bytes: int, *, until: float) -> tuple[int, ...] | None:
    try:
        return tuple(problem.order[at] for at in LargestFirst(problem.tables, budget_bytes, until=until).run())
    except NoRoom:
        return None


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Planner:
    monkeypatch.setattr(registry, "_PLANNERS", dict(registry._PLANNERS))
    added = Planner(NAME, "evict the largest tensor first", greedy(largest_first))
    registry.register(added)
    return added


def training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(256, 16)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(x)
    return y.square().mean()


@pytest.mark.usefixtures("planner")
def test_a_planner_from_outside_trains_as_plain_pytorch_does() -> None:
    model, optimizer, x = training(0)
    whole = et.prepare(model, loss, optimizer, (x,)).plan
    memory = (2 * whole.peak_bytes + whole.persistent_bytes) // 3
    step = et.prepare(model, loss, optimizer, (x,), memory=memory, planner=NAME, use_cache=False)
    assert step.plan.planner == NAME
    assert step.plan.recomputed
    assert step.plan.peak_bytes <= memory
    twin, twin_optimizer, _ = training(0)
    for _ in range(3):
        value = step(x)
        expected = plain_step(twin, twin_optimizer, x)
        assert torch.equal(value, expected)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert step.trace_memory(x).peak_bytes <= memory


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    value = loss(model, x)
    value.backward()
    optimizer.step()
    return value.detach()


def test_what_users_read_of_planners_comes_from_the_registry(planner: Planner) -> None:
    assert NAME in registry.names()
    assert f"{NAME}: {planner.help}" in registry.help_text()
    with pytest.raises(et.UserError, match=f"did you mean {NAME}"):
        registry.named("largest-frist")
    with pytest.raises(et.UserError, match="already"):
        registry.register(planner)


@pytest.mark.parametrize("command", ["plan", "profile", "train"])
def test_the_help_of_each_command_names_every_planner(command: str) -> None:
    said = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    unwrapped = re.sub(r"[\s│]", "", said)
    assert all(f"{name}:" in unwrapped for name in registry.names())


def test_an_illegal_schedule_is_refused_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last op before the first: it reads what is not there."""
    monkeypatch.setattr(registry, "_PLANNERS", dict(registry._PLANNERS))

    def wrong(request: Request) -> Schedule:
        return Schedule(tuple(reversed(request.problem.order)))

    registry.register(Planner("backwards", "run the step backwards", wrong))
    task = small("chain")
    with pytest.raises(et.InternalError):
        et.plan(task.graph, task.costs, et.Budget(budget(task, 0.8)), planner="backwards", use_cache=False)
