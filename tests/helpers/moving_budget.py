"""A training run under a budget that moves, as tests move it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.run import adaptive
from edgetrain.run.step import Step
from tests.helpers.plain import bits

PLENTY = 10**12


def ask_before_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "PERIOD_S", 0.0)
    monkeypatch.setattr(adaptive, "ASKING_PART", math.inf)


def net() -> nn.Module:
    """Batch norm, dropout and a residual: each of them is a trap when something is made again."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 12, 3, padding=1)
            self.norms = nn.ModuleList(nn.BatchNorm2d(12) for _ in range(4))
            self.convs = nn.ModuleList(nn.Conv2d(12, 12, 3, padding=1) for _ in range(4))
            self.last = nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for norm, conv in zip(self.norms, self.convs, strict=True):
                x = x + F.dropout(conv(F.relu(norm(x))), 0.2, training=True)
            out: Tensor = self.last(x.mean((2, 3)))
            return out

    return Net()


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


BATCH = (torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(7)), torch.tensor([0, 1, 2, 4]))


class Trained:
    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.step: Step = et.prepare(self.model, loss, self.optimizer, BATCH, **options)
        torch.manual_seed(1)
        self.random = torch.get_rng_state()

    def __call__(self) -> Tensor:
        """One step, with random numbers of its own."""
        torch.set_rng_state(self.random)
        try:
            return self.step(*BATCH)
        finally:
            self.random = torch.get_rng_state()

    def state(self) -> list[Tensor]:
        states = [self.optimizer.state[parameter] for parameter in self.model.parameters()]
        kept = [state[name] for state in states for name in sorted(state)]
        return [*self.model.state_dict().values(), *kept, self.random]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def copied(state: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in state]


class Moving:
    """A budget that changes by a rule, which is asked for each time the budget is."""

    def __init__(self) -> None:
        self.now: int | str = PLENTY
        self.asked = 0
        self.rule: Callable[[int], int | str | None] = lambda asked: None

    def __call__(self) -> int | str:
        self.asked += 1
        changed = self.rule(self.asked)
        self.now = self.now if changed is None else changed
        return self.now


def peaks(step: Step) -> list[int]:
    (variant,) = step._variants.values()
    assert variant.ladder is not None
    return [plan.peak_bytes for plan in variant.ladder.plans]


def quarter_up(step: Step) -> tuple[int, int]:
    """From a quarter of the way up from the smallest plan to keeping all."""
    most, *_, least = peaks(step)
    return least + (most - least) // 4, most
