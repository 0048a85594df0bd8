"""Bytes that an account could forget: copies, checks, gradients that last; and steps under a budget that fail."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import edgetrain as et
from edgetrain.plan.keep_all import keep_all
from edgetrain.run.compiled import CompiledStep
from tests.helpers.marks import PLANNED_STEPS
from tests.helpers.plain import OptimizerMaker, bits, differing, sgd, training
from tests.run.budget_nets import (
    PLAN_TIME_S,
    adam,
    assert_account,
    assert_same,
    by_hand,
    cross_entropy,
    infeasible,
    three_steps,
)

pytestmark = PLANNED_STEPS


# ---- where bytes hide -----------------------------------------------------------------------------------------


class TwoBiases(nn.Module):
    """Two parameters have the very same gradient; a third has one that is a number spread over it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 400, bias=False)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(400)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + (self.a + self.b) + self.c.sum()
        return out


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_gradients_that_updates_may_not_overwrite_are_in_the_account(optimizer: OptimizerMaker) -> None:
    torch.manual_seed(0)
    work = training(TwoBiases(), squares, optimizer)
    plain = work.twin()
    x = torch.randn(2, 8)
    step = et.prepare(work.model, work.loss, work.optimizer, (x,), memory="1GB")
    for _ in range(3):
        assert torch.equal(step(x), plain.plain_step(x))
        assert_account(step.compiled(x))
    assert differing(work.snapshot(), plain.snapshot()) == []


@pytest.mark.parametrize("net", ["residual", "dropout"])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_checking_and_copying_are_in_the_account(
    net: str, optimizer: OptimizerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert three_steps(net, optimizer, memory="1GB", check_finite=True).plan.updates != "early"
    for updates in ("guarded", "together"):
        chosen = functools.partial(keep_all, updates=updates)
        monkeypatch.setattr("edgetrain.run.graph_planner.keep_all", lambda graph, chosen=chosen, **_: chosen(graph))
        assert three_steps(net, optimizer, memory="1GB").plan.updates == updates


def test_gradients_take_no_more_than_a_step_and_themselves() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())))
    work = training(net, squares)
    x = torch.randn(512, 16)
    whole = et.prepare(work.model, work.loss, work.optimizer, (x,), memory="1GB")
    right, kept = whole.gradients(x), whole.plan.peak_bytes
    step = et.prepare(work.model, work.loss, work.optimizer, (x,), memory=kept * 2 // 3, plan_time_s=PLAN_TIME_S)
    found = step.gradients(x)
    assert step.plan.recomputed
    assert all(torch.equal(bits(found[name]), bits(right[name])) for name in right)
    compiled = step.compiled(x)
    assert compiled._arenas is not None
    taken = compiled._arenas[0].last.most_bytes + step.plan.persistent_bytes
    assert taken <= step.plan.peak_bytes + sum(g.nbytes for g in right.values())
    assert taken < kept


def doubled(model: nn.Module, x: Tensor) -> Tensor:
    x.mul_(2)
    return squares(model, x)


@pytest.mark.parametrize("options", [{}, {"memory": "1GB"}, {"check_finite": True}], ids=str)
def test_a_batch_that_the_loss_changes_is_changed_once(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    work = training(nn.Linear(8, 4), doubled)
    plain = work.twin()
    ours, theirs = torch.ones(3, 8), torch.ones(3, 8)
    step = et.prepare(work.model, work.loss, work.optimizer, (ours,), **options)
    step.gradients(ours)
    step.trace_memory(ours)
    assert torch.equal(ours, torch.ones(3, 8))
    for _ in range(3):
        assert torch.equal(step(ours), plain.plain_step(theirs))
        assert torch.equal(ours, theirs)
        assert_account(step.compiled(ours)) if "memory" in options else None


def test_two_models_train_in_two_threads() -> None:
    def trained(alone: bool) -> list[Tensor]:
        torch.manual_seed(0)
        works = [training(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)), squares) for _ in range(2)]
        x = torch.randn(64, 16)
        steps = [et.prepare(work.model, work.loss, work.optimizer, (x,), memory="1GB") for work in works]
        threads = [Thread(target=lambda step=step: [step(x) for _ in range(30)]) for step in steps]
        for thread in threads:
            thread.start()
            if alone:
                thread.join()
        for thread in threads:
            thread.join()
        return [parameter.detach() for work in works for parameter in work.model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


def variants() -> Sequence[tuple[str, OptimizerMaker]]:
    found: list[tuple[str, OptimizerMaker]] = [
        ("SGD", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("nesterov", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
        ("maximize", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, maximize=True)),
        ("amsgrad", lambda p: torch.optim.Adam(p, amsgrad=True)),
        ("AdamW", torch.optim.AdamW),
    ]
    return found


@pytest.mark.parametrize(("name", "optimizer"), variants(), ids=lambda v: v if isinstance(v, str) else "")
def test_every_optimizer_keeps_the_account(name: str, optimizer: OptimizerMaker) -> None:
    right = three_steps("dropout", optimizer, memory="1GB")
    memory = infeasible("dropout", right.plan.persistent_bytes + 1, optimizer).smallest_bytes
    assert_same(three_steps("dropout", optimizer, memory=memory), right)


def test_a_step_that_fails_under_a_budget_changes_nothing() -> None:
    """An index that is out of range, after dropout was drawn and statistics were updated."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.5), nn.Linear(12, 5))
    work = training(net, cross_entropy)
    x, y = torch.randn(16, 8), torch.randint(5, (16,))
    peak = et.prepare(work.model, work.loss, work.optimizer, (x, y), memory="1GB").plan.peak_bytes
    step = et.prepare(work.model, work.loss, work.optimizer, (x, y), memory=peak - 1, plan_time_s=PLAN_TIME_S)
    step(x, y)
    twin = work.twin()
    state = torch.get_rng_state()
    before = work.snapshot()
    with pytest.raises(IndexError):
        step(x, torch.full_like(y, 99))
    assert differing(work.snapshot(), before) == []
    value = step(x, y)
    torch.set_rng_state(state)
    other = et.prepare(twin.model, twin.loss, twin.optimizer, (x, y), memory="1GB")
    torch.set_rng_state(state)
    assert torch.equal(other(x, y), value)
    assert differing(twin.snapshot(), work.snapshot()) == []


def test_plan_of_another_exactness_is_not_taken_from_the_disk() -> None:
    """`exact` is what the caller knows of the graph; a plan kept by one caller does not speak for another."""
    _, graph, task = by_hand("residual", "early")
    answer = infeasible("residual", 10_000, memory_format="preserve")
    budget = et.Budget((task.keep_all.peak_bytes + answer.smallest_bytes) // 2)
    for exact in ("rounding", "bitwise"):
        made = et.plan(graph, task.costs, budget, time_limit_s=PLAN_TIME_S, exact=exact)
        assert made.exact == exact


def test_time_is_the_time_of_the_order_and_never_below_the_bound() -> None:
    _, graph, task = by_hand("residual", "early")
    answer = infeasible("residual", 10_000, memory_format="preserve")
    for budget in (task.keep_all.peak_bytes - 1, (task.keep_all.peak_bytes + answer.smallest_bytes) // 2):
        made = et.plan(graph, task.costs, et.Budget(budget), time_limit_s=PLAN_TIME_S)
        assert made.time_s == pytest.approx(task.costs.time_s(made.order))
        assert made.keep_all_time_s == pytest.approx(task.keep_all_time_s)
        assert made.bound is not None
        assert made.bound.time_s is not None
        assert made.time_s is not None
        assert task.keep_all_time_s <= made.bound.time_s <= made.time_s * (1 + 1e-9)
        assert replace(made, bound=None, exact="bitwise") == task.plan(made.order, planner="optimal")


class Shared(nn.Module):
    """Two parameters with one gradient, and one whose gradient is a single number spread out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(1000)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a + self.b) * x + self.c.sum()


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_an_update_that_may_not_overwrite_its_gradient_is_planned_with_its_copy(optimizer: OptimizerMaker) -> None:
    work = training(Shared(), lambda model, x: model(x).square().mean(), optimizer)
    plain, x = work.twin(), torch.randn(1000)
    graph = et.capture(work.model, work.loss, work.optimizer, (x,))
    costs = et.measure_costs(graph, rounds=1)
    plan = et.plan(graph, costs, et.Budget(), updates="early")
    step = CompiledStep(graph, plan, work.model, work.optimizer, {}, costs=costs)
    for _ in range(3):
        assert torch.equal(step(x), plain.plain_step(x))
        assert differing(work.snapshot(), plain.snapshot()) == []
    assert step.arena is not None
    assert step.arena.most_bytes == plan.peak_bytes - plan.persistent_bytes
