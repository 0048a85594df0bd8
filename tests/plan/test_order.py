"""The order of a step: legal, never of a higher peak than as captured, and no swap of neighbours would lower it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import edgetrain as et
from edgetrain.errors import InternalError
from edgetrain.plan.lifetimes import Moment, with_views
from edgetrain.plan.order import early_order
from edgetrain.plan.plan import Updates
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.validate import validate
from tests.plan.problems import NETS, small

CHOICES: tuple[Updates, ...] = ("early", "guarded", "together")


def plain(task: Problem) -> tuple[int, ...]:
    """The order without moves of neighbours."""
    order = range(len(task.graph.ops)) if task.updates == "together" else early_order(task.graph)
    return tuple(with_views(task.graph, list(order)))


def around(moments: Sequence[Moment], a: int, b: int) -> tuple[int, int]:
    """The most that is held at two ops that follow each other, and what is held between them."""
    at = {moment.op: moment for moment in moments}
    return max(at[a].during_bytes, at[b].during_bytes), at[a].after_bytes


@pytest.mark.parametrize("updates", CHOICES)
@pytest.mark.parametrize("name", NETS)
def test_it_is_legal_and_of_no_higher_peak(name: str, updates: Updates) -> None:
    task = small(name, updates)
    assert sorted(set(task.order)) == list(range(len(task.graph.ops)))
    validate(task.graph, task.keep_all)
    assert task.keep_all.peak_bytes <= task.peak_bytes(plain(task))


@pytest.mark.parametrize("updates", CHOICES)
@pytest.mark.parametrize("name", NETS)
def test_no_two_neighbours_would_hold_less_the_other_way_round(name: str, updates: Updates) -> None:
    task = small(name, updates)
    graph = task.graph
    order = [number for number in task.order if not graph.ops[number].view]
    moments = task.moments(order)
    tried = 0
    for at in range(len(order) - 1):
        a, b = order[at : at + 2]
        phases = {graph.ops[a].phase, graph.ops[b].phase}
        if len(phases) == 2 and (updates == "together" or "forward" in phases):
            continue
        swapped = with_views(graph, [*order[:at], b, a, *order[at + 2 :]])
        if updates == "together":
            swapped.sort(key=lambda number: graph.ops[number].phase == "update")
        try:
            validate(graph, task.plan(swapped, planner="test"))
        except InternalError:
            continue  # one waits for the other
        tried += 1
        assert around(moments, a, b) <= around(task.moments(swapped), b, a)
    assert tried


def test_a_weight_lets_its_input_go_before_that_gets_a_gradient() -> None:
    net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    graph = et.capture(net, lambda m, x: m(x).square().mean(), optimizer, (torch.randn(256, 16),), use_cache=False)
    costs = et.measure_costs(graph, rounds=1, use_cache=False)
    task = problem(graph, costs, "early")
    before, after = (
        [m.during_bytes for m in task.moments(order) if graph.ops[m.op].phase == "backward"]
        for order in (plain(task), task.order)
    )
    assert sum(after) < sum(before)


@pytest.mark.parametrize("updates", CHOICES)
def test_views_that_nobody_reads_have_their_place(updates: Updates) -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    graph = et.capture(net, lambda m, x: m(x).mean().reshape(1, 1)[0, 0], optimizer, (torch.randn(3, 4),))
    plan = et.keep_all(graph, updates=updates)
    validate(graph, plan)
    assert any(graph.ops[number].view for number in plan.order)
