"""Clipping by the global norm, captured as part of the step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import UserError


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("most", [1e-3, 0.1, 1e3])
def test_a_clipped_step_is_clip_grad_norm(most: float) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(5, 6, dtype=torch.float64) * 4, torch.tensor([0, 1, 2, 1, 0])
    ours, plain = net(), net()
    optimizer, plain_optimizer = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (ours, plain))
    step = et.prepare(ours, loss, optimizer, (x, y), clip_norm=most)
    for _ in range(4):
        found = step(x, y)
        plain_optimizer.zero_grad()
        right = loss(plain, x, y)
        right.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), most)
        assert (norm > most) == (most < 1)  # it is clipped in the first two cases, and in the last it is not
        plain_optimizer.step()
        assert torch.allclose(found, right, rtol=1e-12)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


def test_gradients_live_until_the_norm_is_known() -> None:
    model = net()
    graph = et.capture(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(5, 6).double(), torch.tensor([0] * 5)),
        clip_norm=1.0,
    )  # fmt: skip
    ops = [graph.ops[number] for number in et.keep_all(graph, updates="early").order]
    norms = [n for n, op in enumerate(ops) if op.kind.startswith("aten.linalg_vector_norm")]
    assert len(norms) == 5  # of each gradient, and of all
    assert max(norms) < min(n for n, op in enumerate(ops) if op.phase == "update")


class Mixed(nn.Module):
    """Parameters of two types, one of which gets a gradient that is one number shown many times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.wide, self.bias = nn.Linear(4, 3), nn.Linear(3, 2).double(), nn.Parameter(torch.ones(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wide(self.linear(x).double()).square().sum(1).float()
        return y + self.bias.sum()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_types_of_gradients_may_differ(micro_batches: int) -> None:
    """The norm has the wider of them, and each scaled gradient its own."""
    torch.manual_seed(2)
    ours, x = Mixed(), torch.randn(4, 4)
    plain = copy.deepcopy(ours)
    optimizer, plain_optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain))

    def mean(model: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = model(x).mean()
        return value

    step = et.prepare(ours, mean, optimizer, (x,), clip_norm=0.5, micro_batches=micro_batches)
    for _ in range(3):
        found = step(x)
        plain_optimizer.zero_grad()
        right = mean(plain, x)
        right.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        plain_optimizer.step()
        assert torch.allclose(found, right, rtol=1e-5)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_norm_that_makes_no_sense_is_refused(wrong: float) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match="cannot be clipped"):
        et.capture(model, loss, optimizer, (torch.randn(5, 6).double(), torch.tensor([0] * 5)), clip_norm=wrong)
