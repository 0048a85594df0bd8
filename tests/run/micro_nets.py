"""Nets whose samples do not see each other, and steps of them in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.plan.micro_batches import MicroPlan
from edgetrain.run.micro_step import MicroStep
from edgetrain.run.step import Step
from tests.helpers.plain import OptimizerMaker, Training, sgd, training

ROUNDING = 1e-11


# ---- nets, none of which lets a sample see another -------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 5))


def convolutions() -> nn.Module:
    body = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.GELU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))


def group_norm() -> nn.Module:
    body = [nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4)]
    return nn.Sequential(*body, nn.SiLU(), nn.Flatten(), nn.Linear(4 * 16, 5))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.embedding(x)).mean(1))
        return out


def frozen_norm() -> nn.Module:
    """Batch norm in eval mode: each sample alone."""
    net = nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))
    net[1].eval()
    return net


def floats(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, generator: torch.randn(n, *shape, generator=generator, dtype=torch.float64)


def tokens(n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(11, (n, 6), generator=generator)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Tensor]]] = {
    "mlp": (mlp, floats(7)),
    "convolutions": (convolutions, floats(3, 6, 6)),
    "group norm": (group_norm, floats(3, 6, 6)),
    "transformer": (Transformer, tokens),
    "frozen norm": (frozen_norm, floats(7)),
}


def adam(parameters: Any) -> torch.optim.Optimizer:
    # A large eps: where a gradient is zero but for rounding, Adam would make whole steps of the rounding.
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01, amsgrad=True, eps=1e-3)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def work_of(net: str, optimizer: OptimizerMaker = sgd, loss: Callable[..., Tensor] = cross_entropy) -> Training:
    torch.manual_seed(2)
    model = NETS[net][0]().double()
    return training(model, loss, optimizer)


def batch_of(net: str, n: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return NETS[net][1](n, generator), torch.randint(5, (n,), generator=generator)


def prepared(work: Training, batch: Sequence[Any], count: int | Literal["auto"], **options: Any) -> Step:
    return et.prepare(work.model, work.loss, work.optimizer, tuple(batch), micro_batches=count, **options)


def accumulated_step(work: Training, batch: tuple[Tensor, ...], sizes: Sequence[int]) -> Tensor:
    """Gradient accumulation as everybody writes it."""
    total, start, n = torch.zeros(()), 0, sum(sizes)
    for size in sizes:
        part = work.loss(work.model, *(t[start : start + size] for t in batch)) * (size / n)
        part.backward()
        total, start = total + part.detach(), start + size
    work.optimizer.step()
    work.optimizer.zero_grad()
    return total


def micro(step: Step, *batch: Any) -> MicroStep:
    found = step.of_shape(*batch)
    assert isinstance(found, MicroStep)
    return found


def plan_of(step: Step) -> MicroPlan:
    assert isinstance(step.plan, MicroPlan)
    return step.plan


def deep(width: int = 24, depth: int = 8) -> nn.Module:
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(7, width), *layers, nn.Linear(width, 5))


def deep_work(optimizer: OptimizerMaker = sgd, depth: int = 8) -> Training:
    torch.manual_seed(4)
    return training(deep(depth=depth), cross_entropy, optimizer)


def deep_batch(n: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    x, y = batch_of("mlp", n, seed)
    return x.float(), y
