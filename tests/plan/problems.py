"""Small problems for tests of planners: steps captured from small nets, with made-up costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

import edgetrain as et
from edgetrain.costs.table import WAYS, Costs, OpCost, Run, Way
from edgetrain.plan.lifetimes import random_state_bytes
from edgetrain.plan.plan import Item, Updates
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.validate import validate


class Residual(nn.Module):
    """A convolution, batch norm and ReLU, with its input added."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + torch.relu(self.norm(self.conv(x)))
        return y


def chain(layers: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(4, 4), nn.Tanh())))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "chain": (lambda: chain(6), (64, 4)),
    "tiny": (lambda: chain(1), (16, 4)),
    "short": (lambda: chain(2), (16, 4)),
    "residual": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), *(Residual() for _ in range(4))), (2, 3, 8, 8)),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.3), nn.ReLU()),
        (32, 4),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (4, 6, 8)),
}


@cache
def small(name: str, updates: Updates = "early") -> Problem:
    torch.manual_seed(0)
    build, shape = NETS[name]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    graph = et.capture(model, lambda m, x: m(x).square().mean(), optimizer, (torch.randn(shape),), use_cache=False)
    costs = tuple(OpCost({"first": Run(0.0)} if op.view else _ways(number)) for number, op in enumerate(graph.ops))
    return problem(graph, Costs(graph.key, "modelled", costs), updates)


def _ways(number: int) -> dict[Way, Run]:
    """Times between 1 and 13 ms; for some ops a workspace, which differs when they run again or over an input."""
    time_s = (1 + 7 * number % 13) * 1e-3
    asked = {"first": 64 * (number % 5 == 0), "again": 128 * (number % 10 == 0), "over": 32 * (number % 3 == 0)}
    return {way: Run(time_s, (asked[way], -1)) for way in WAYS}


def budget(given: Problem, part: float) -> int:
    """This part of what keeping all holds above the persistent tensors and the state of the generator."""
    plan = given.keep_all
    kept = plan.persistent_bytes + random_state_bytes(given.graph, given.updates)
    return kept + int(part * (plan.peak_bytes - kept))


def extra_s(given: Problem, order: Sequence[Item]) -> float:
    return given.timing(order).time_s - given.keep_all_time_s


def check(given: Problem, order: Sequence[Item], budget_bytes: int | None) -> None:
    """The order is within the budget and gives a legal plan."""
    plan = given.plan(order, planner="test")
    validate(given.graph, plan)
    assert budget_bytes is None or plan.peak_bytes <= budget_bytes
    assert plan.peak_bytes == given.peak_bytes(order)


def check_order(given: Problem, part: float, plan: Callable[[Problem, int], Sequence[Item] | None]) -> None:
    """What a planner finds for that part of the memory, if anything, is within the budget and legal."""
    limit = budget(given, part)
    order = plan(given, limit)
    if order is not None:
        check(given, order, limit)


# Which problem, for tests over many of them.
STEPS: dict[str, Any] = {
    "name": st.sampled_from(sorted(NETS)),
    "updates": st.sampled_from(["early", "guarded", "together"]),
}
