"""A budget that moves, for a step in micro-batches: followed between them and inside them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import Infeasible
from edgetrain.plan.micro_batches import MicroPlan
from edgetrain.run.step import Step
from tests.helpers.marks import PLANNED_STEPS
from tests.helpers.moving_budget import PLENTY, Moving, ask_before_every_op, peaks, quarter_up, same
from tests.helpers.plain import bits

pytestmark = PLANNED_STEPS


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_before_every_op(monkeypatch)


def net() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 12, 3, padding=1)]
    for _ in range(4):
        layers += [nn.GroupNorm(3, 12), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5))


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


BATCH = (torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(7)), torch.arange(4))


class Trained:
    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.step: Step = et.prepare(self.model, loss, self.optimizer, BATCH, **options)

    def __call__(self) -> Tensor:
        return self.step(*BATCH)

    def state(self) -> list[Tensor]:
        kept = [self.optimizer.state[p]["momentum_buffer"] for p in self.model.parameters()]
        return [*self.model.state_dict().values(), *kept]


def test_changes_between_and_inside_micro_batches_lose_no_step_and_no_bit() -> None:
    budget = Moving()
    ours, constant = Trained(memory=budget, micro_batches=3), Trained(micro_batches=3)
    low, high = quarter_up(ours.step)
    chance = random.Random(3)
    budget.rule = lambda asked: chance.randint(low, high) if chance.random() < 0.02 else None
    for _ in range(20):
        assert torch.equal(bits(ours()), bits(constant()))
        began = [switch for switch in ours.step.switches if not switch.in_step][-1]
        assert began.peak_bytes <= began.budget_bytes
    assert same(ours.state(), constant.state())
    inside = [switch for switch in ours.step.switches if switch.in_step]
    turned = [switch for switch in inside if switch.peak_bytes in peaks(ours.step)]
    assert len(inside) > len(turned) > 3  # falls inside a micro-batch, and other plans between them
    assert all(switch.over_bytes == 0 for switch in turned)


def test_a_fall_inside_a_micro_batch_counts_what_the_step_holds_beside() -> None:
    """Batch norm's statistics are copied before the first micro-batch, and kept to the last."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(4, 16, 12, 12), torch.arange(4)
    budget = Moving()
    step = et.prepare(model, loss, optimizer, batch, memory=budget, micro_batches=2, allow_inexact=True)
    assert isinstance(step.plan, MicroPlan)
    assert step.plan.ending is not None
    beside = step.plan.peak_bytes - max(part.peak_bytes for part in step.plan.parts)
    assert beside == sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    step(*batch)
    asked = budget.asked
    low, high = quarter_up(step)
    budget.rule = lambda n: low if n > asked + 2 else PLENTY
    step(*batch)
    fall = next(switch for switch in step.switches if switch.in_step)
    assert beside < fall.peak_bytes < high
    assert fall.over_bytes == max(0, fall.peak_bytes - low)


def test_auto_takes_more_micro_batches_where_there_is_less() -> None:
    budget = Moving()
    ours = Trained(memory=budget, micro_batches="auto")
    found = peaks(ours.step)
    counts: list[int] = []
    for peak in found:
        budget.rule = lambda _, peak=peak: peak  # type: ignore[misc]
        assert torch.isfinite(ours())
        plan = ours.step.plan
        assert plan.peak_bytes == peak
        counts.append(plan.micro_batches if isinstance(plan, MicroPlan) else 1)
    assert counts[0] == 1
    assert counts[-1] > 1
    # Below all of them nothing happens, and it says how much is needed.
    budget.rule = lambda _: 1000
    with pytest.raises(Infeasible, match="nothing of this step has happened") as caught:
        ours()
    assert caught.value.smallest_bytes == found[-1]
    assert found[-1] < min(peaks(Trained(memory=Moving()).step))
    # Numbers are those of the whole batch but for rounding.
    budget.rule = lambda _: found[-1]
    small, whole = Trained(memory=budget, micro_batches="auto"), Trained()
    small(), whole()
    for a, b in zip(small.state(), whole.state(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_step_that_fails_after_a_turn_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Moving()
    ours, constant = Trained(memory=budget, micro_batches=4), Trained(micro_batches=4)
    low, _ = quarter_up(ours.step)
    ours(), constant()
    before = [tensor.clone() for tensor in ours.state()]
    asked, turned = budget.asked, Step._turned
    calls = 0

    def fails(step: Step, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        found = turned(step, *args)
        if calls == 3:
            raise MemoryError
        return found

    budget.rule = lambda n: low if n > asked + 5 else PLENTY
    with monkeypatch.context() as patch:
        patch.setattr(Step, "_turned", fails)
        with pytest.raises(MemoryError):
            ours()
    assert same(ours.state(), before)
    assert torch.equal(ours(), constant())
    assert same(ours.state(), constant.state())
