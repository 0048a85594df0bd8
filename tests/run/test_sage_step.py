"""planner="sage": evicts, and where that is not enough takes the batch in the largest micro-batches that fit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import Infeasible
from edgetrain.plan.micro_batches import MicroPlan
from edgetrain.run.micro_step import MicroStep
from edgetrain.run.step import Step
from tests.helpers.marks import needs_arena
from tests.helpers.plain import Training, relative_error, sgd, training

pytestmark = pytest.mark.usefixtures("one_cache", "one_round")
N = 120


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def work(*first: nn.Module, loss: Any = cross_entropy) -> Training:
    torch.manual_seed(4)
    layers = [m for _ in range(5) for m in (nn.Linear(24, 24), nn.Tanh())]
    return training(nn.Sequential(nn.Linear(7, 24), *first, *layers, nn.Linear(24, 5)), loss, sgd)


def batch(seed: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, 7, generator=generator), torch.randint(5, (N,), generator=generator)


def prepared(of: Training, memory: int | str, **options: Any) -> Step:
    return et.prepare(of.model, of.loss, of.optimizer, batch(), memory=memory, planner="sage", **options)


def smallest_whole(of: Training) -> tuple[int, str]:
    """The smallest budget that evicting alone is known to keep, and what is said below it."""
    kept = prepared(of, "1GB").plan
    with pytest.raises(Infeasible) as answer:
        prepared(of, kept.persistent_bytes, micro_batches=1)
    return answer.value.smallest_bytes, str(answer.value)


@needs_arena
def test_eviction_comes_first_and_then_the_largest_micro_batch_that_fits() -> None:
    ours = work()
    whole = ours.twin()
    smallest, _ = smallest_whole(ours)
    evicted = prepared(ours, smallest).plan
    assert not isinstance(evicted, MicroPlan)
    assert evicted.recomputed
    assert (evicted.exact, evicted.planner) == ("bitwise", "sage")

    budget = round(0.85 * smallest)
    step = prepared(ours, budget)
    plan = step.plan
    assert isinstance(plan, MicroPlan)
    assert plan.exact == "rounding"
    assert plan.peak_bytes <= budget
    count = plan.micro_batches
    assert count >= 2
    with pytest.raises(Infeasible):
        prepared(ours, budget, micro_batches=count - 1)
    assert f"{count} micro-batches of" in str(plan)
    assert f"{count} micro-batches of" in repr(step)
    for seed in range(3):
        assert float(step(*batch(seed))) == pytest.approx(float(whole.plain_step(*batch(seed))), rel=1e-5)
        found = step.of_shape(*batch())
        assert isinstance(found, MicroStep)
        assert found.most_bytes is not None
        assert found.most_bytes + plan.persistent_bytes == plan.peak_bytes
    assert relative_error(ours.snapshot(), whole.snapshot(), noise=1e-5) < 1e-4
    # A smaller last batch may need fewer, or none.
    x, y = batch()
    step(x[:4], y[:4])
    assert not isinstance(step.plan, MicroPlan)


@needs_arena
def test_where_nothing_fits_the_answer_is_a_budget_that_works() -> None:
    ours = work()
    with pytest.raises(Infeasible, match="micro-batches of 1 samples") as answer:
        prepared(ours, prepared(ours, "1GB").plan.persistent_bytes)
    assert prepared(ours, answer.value.smallest_bytes).plan.peak_bytes <= answer.value.smallest_bytes


def test_one_micro_batch_that_was_asked_for_stays_one() -> None:
    ours = work()
    _, said = smallest_whole(ours)
    assert 'would do with micro_batches="auto"' in said


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_batch_norm_is_left_whole_and_the_answer_says_what_allowing_it_would_take(clip_norm: float | None) -> None:
    ours = work(nn.BatchNorm1d(24), nn.Dropout(0.1))
    kept = prepared(ours, "1GB", clip_norm=clip_norm).plan
    with pytest.raises(Infeasible, match="micro-batches: refused; micro-batches would give other numbers") as answer:
        prepared(ours, kept.persistent_bytes, clip_norm=clip_norm)
    # A single sample has no statistics, so one for each sample cannot be: nothing is promised.
    assert "would do" not in str(answer.value)
    noisy = work(nn.Dropout(0.1))
    with pytest.raises(Infeasible, match="random numbers in 1") as answer:
        prepared(noisy, kept.persistent_bytes, clip_norm=clip_norm)
    told = re.search(r"; (\d+) bytes \(.*\) would do with allow_inexact=True", str(answer.value))
    assert told is not None
    assert int(told[1]) < answer.value.smallest_bytes
    plan = prepared(noisy, int(told[1]), clip_norm=clip_norm, allow_inexact=True).plan
    assert isinstance(plan, MicroPlan)
    assert plan.exact == "no"
    assert plan.peak_bytes <= int(told[1])


def test_a_sum_is_refused_whatever_is_allowed() -> None:
    def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="sum")

    ours = work(loss=summed)
    kept = prepared(ours, "1GB").plan
    for allow in (False, True):
        with pytest.raises(Infeasible, match="micro-batches: refused; the loss is not a mean over samples") as answer:
            prepared(ours, kept.persistent_bytes, allow_inexact=allow)
        assert "would do" not in str(answer.value)


def test_a_batch_without_samples_stays_whole() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = et.prepare(
        model, lambda m, x: m(x.reshape(1)).square().mean(), optimizer, (torch.tensor(2.0),), memory="1MB",
        planner="sage",
    )  # fmt: skip
    assert not isinstance(step.plan, MicroPlan)


def test_a_budget_that_moves_is_met_in_micro_batches_too() -> None:
    ours = work()
    with pytest.raises(Infeasible) as answer:
        prepared(ours, 1, micro_batches=1)
    budget = [10**9]
    moving = et.prepare(ours.model, ours.loss, ours.optimizer, batch(), memory=lambda: budget[0], planner="sage")
    assert not isinstance(moving.plan, MicroPlan)
    budget[0] = answer.value.smallest_bytes - 1
    assert torch.isfinite(moving(*batch()))
    assert isinstance(moving.plan, MicroPlan)
    assert moving.plan.peak_bytes <= budget[0]
