"""Nets for steps under a budget, and what every such step must do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import Infeasible
from edgetrain.graph.ir import Graph
from edgetrain.plan.plan import Plan, Updates
from edgetrain.plan.problem import Problem, problem
from edgetrain.run.compiled import CompiledStep
from tests.helpers.nets import Recurrent
from tests.helpers.plain import OptimizerMaker, Snapshot, Training, bits, differing, sgd, training

PLAN_TIME_S = 0.25


# ---- nets -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Convolution, batch norm and ReLU, twice, with the input added before the last ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm_a, self.norm_b = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))))


def residual() -> nn.Module:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)]
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU6(), *(Block(6) for _ in range(3)), *head)


def dropout() -> nn.Module:
    layers = [m for _ in range(4) for m in (nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.4))]
    return nn.Sequential(nn.Linear(8, 12), *layers, nn.Linear(12, 5))


class Tied(nn.Module):
    """The embedding is the output layer too, and one layer is used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.output = nn.Linear(8, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for _ in range(5):
            h = torch.tanh(self.hidden(h)) + h
        out: Tensor = self.output(h).mean(1)
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x).mean(1))
        return out


class Writes(nn.Module):
    """In-place ops and views of every sort between layers, and a buffer that forward changes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(5))
        self.head = nn.Linear(10, 5)
        self.register_buffer("seen", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x[:, number] += 2 * x[:, 9 - number]
            x = x.t().contiguous().t().mul_(1.5).tanh_()
            y = x.view(-1, 5, 2)[:, :, 1].exp()
            x = torch.cat([y, x[:, ::2] * y], 1)
            with torch.no_grad():
                self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
            x = x - self.seen.clone()
        out: Tensor = self.head(x)
        return out


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = Recurrent(nn.LSTM(8, 6, num_layers=2, dropout=0.3, batch_first=True))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.recurrent(x)[:, -1])
        return out


def floats(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, generator: torch.randn(n, *shape, generator=generator)


def tokens(n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(11, (n, 6), generator=generator)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Tensor]]] = {
    "residual": (residual, floats(3, 10, 10)),
    "dropout": (dropout, floats(8)),
    "tied": (Tied, tokens),
    "transformer": (Transformer, floats(5, 16)),
    "writes": (Writes, floats(10)),
    "LSTM": (Lstm, floats(5, 8)),
}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def work_of(net: str, optimizer: OptimizerMaker = sgd) -> Training:
    torch.manual_seed(2)
    return training(NETS[net][0](), cross_entropy, optimizer)


def batches_of(net: str, count: int = 3, n: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(NETS[net][1](n, generator), torch.randint(5, (n,), generator=generator)) for _ in range(count)]


# ---- what every step under a budget must do -------------------------------------------------------------------


@dataclass(frozen=True)
class Run3:
    """What three steps left behind."""

    plan: Plan
    graph: Graph
    losses: Tensor
    snapshot: Snapshot


def assert_account(step: CompiledStep, *, first: bool = False) -> None:
    """The step asked the arena for exactly the bytes of its plan."""
    found = step.arena
    assert found is not None
    if first:  # an update that sets its state has no use for the few bytes of a factor
        assert -16 <= found.most_bytes + step.plan.persistent_bytes - step.plan.peak_bytes <= 0
        return
    assert found.most_bytes + step.plan.persistent_bytes == step.plan.peak_bytes


def three_steps(net: str, optimizer: OptimizerMaker = sgd, **options: Any) -> Run3:
    work, batches = work_of(net, optimizer), batches_of(net)
    step = et.prepare(work.model, work.loss, work.optimizer, batches[0], plan_time_s=PLAN_TIME_S, **options)
    compiled = step.compiled(*batches[0])
    losses = []
    torch.manual_seed(4)
    for batch in batches:
        losses.append(step(*batch))
        assert step.compiled(*batch) is compiled
        assert_account(compiled, first=len(losses) == 1)
    last = compiled.arena
    assert last is None or (last.improvised, last.unused) == (0, 0)  # what the third step asks for is known
    return Run3(step.plan, step.graph, torch.stack(losses), work.snapshot())


def assert_same(found: Run3, right: Run3) -> None:
    """Losses, parameters, buffers, optimizer state and random state, bit for bit."""
    assert found.graph.key == right.graph.key
    assert torch.equal(bits(found.losses), bits(right.losses))
    assert differing(found.snapshot, right.snapshot) == []


def infeasible(net: str, memory: int, optimizer: OptimizerMaker = sgd, **options: Any) -> Infeasible:
    work = work_of(net, optimizer)
    before = work.snapshot()
    with pytest.raises(Infeasible) as caught:
        et.prepare(
            work.model, work.loss, work.optimizer, batches_of(net)[0],
            memory=memory, plan_time_s=PLAN_TIME_S, **options,
        )  # fmt: skip
    assert differing(work.snapshot(), before) == []
    return caught.value


def by_hand(net: str, updates: Updates) -> tuple[Training, Graph, Problem]:
    work = work_of(net)
    graph = et.capture(work.model, work.loss, work.optimizer, batches_of(net)[0])
    return work, graph, problem(graph, et.measure_costs(graph, rounds=1), updates)
