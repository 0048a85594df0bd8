"""Small nets for the tests of firmware, and how they become projects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import edgetrain as et
from benchmarks.small_nets import SMALL, Batch
from benchmarks.small_nets import Net as Net
from edgetrain.firmware.export import Project
from edgetrain.graph.ir import Graph
from edgetrain.plan.plan import Plan
from edgetrain.zoo.models.autoencoder import autoencoder
from edgetrain.zoo.tasks import classify_loss

cross_entropy = classify_loss
Optimizers = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Everything(nn.Module):
    """One of each: strides, padding, groups, dilation, depthwise, every norm, every pool, a sum, a concat.

    No bias stands before a batch norm: its gradient is zero but for rounding, which no two programs share.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.groups = nn.GroupNorm(2, 8)
        self.grouped = nn.Conv2d(8, 8, (3, 2), groups=2, dilation=2, padding=(2, 1), bias=False)
        self.clamped = nn.BatchNorm2d(8)
        self.most, self.mean = nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1)
        self.hidden, self.last_norm, self.last = nn.Linear(16, 12, bias=False), nn.BatchNorm1d(12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.relu6(self.norm(self.first(x)))
        a = a + torch.tanh(self.groups(self.depthwise(a)))
        a = a + F.relu(self.clamped(self.grouped(a)))
        a = torch.cat([self.most(a), self.mean(a)], 1)
        a = torch.sigmoid(F.adaptive_avg_pool2d(a, 1).flatten(1))
        result: torch.Tensor = self.last(self.last_norm(self.hidden(a)))
        return result


def tiny_cnn() -> nn.Module:
    """Trains in 32 KB, with the state of Adam."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


def wide_depthwise() -> nn.Module:
    """Filters that see one channel, and are not 3×3 with one of them a channel: wide, dilated, strided, several."""
    return nn.Sequential(
        nn.Conv2d(3, 5, 1), nn.Tanh(), nn.Conv2d(5, 5, 5, padding=2, groups=5), nn.Tanh(),
        nn.Conv2d(5, 10, 3, padding=2, dilation=2, groups=5, bias=False), nn.Tanh(),
        nn.Conv2d(10, 10, (3, 7), stride=2, padding=(1, 3), groups=10), nn.Tanh(),
        nn.Conv2d(10, 20, 5, stride=2, padding=2, groups=10), nn.Tanh(), nn.Flatten(), nn.Linear(20 * 3 * 4, 3),
    )  # fmt: skip


def frozen() -> nn.Module:
    """The first layers as they are, their batch norms by running statistics."""
    model = Everything()
    for layer in (model.first, model.norm, model.depthwise):
        layer.requires_grad_(False)
    model.norm.eval()
    model.last_norm.eval()  # trained, with fixed statistics
    return model


NETS = {
    **SMALL,
    "autoencoder": Net(lambda: autoencoder(width=0.25), (1, 28, 28)),
    "mlp": Net(lambda: nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3)), (12,), 3),
    "tiny_cnn": Net(tiny_cnn, (1, 10, 10), 3, samples=2),
    "everything": Net(Everything, (3, 17, 16), 5),
    "wide_depthwise": Net(wide_depthwise, (3, 11, 13), 3),
    "frozen": Net(frozen, (3, 16, 16), 5),
}


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


def slow_sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """For MobileNetV2 with fresh weights, whose gradients are up to a hundred times as large as its weights."""
    return torch.optim.SGD(parameters, lr=1e-5)


def plain_sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02)


def nesterov(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)


def adam(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=1e-3)


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True)


@dataclass(frozen=True)
class Exported:
    """A project and what it was made from."""

    net: Net
    model: nn.Module
    optimizer: torch.optim.Optimizer
    graph: Graph
    plan: Plan
    project: Project

    def batches(self, steps: int) -> list[Batch]:
        return [self.net.batch() for _ in range(steps)]


def make(
    net: Net,
    out: Path,
    *,
    optimizer: Optimizers = sgd,
    target: str = "linux-x86_64",
    keep_every: int | None = None,
    planned: Callable[[Graph], Plan] = lambda graph: et.keep_all(graph, updates="final"),
    seed: int = 0,
) -> Exported:
    torch.manual_seed(seed)
    model = net.build()
    trained = [p for p in model.parameters() if p.requires_grad]
    updates = optimizer(trained)
    graph = et.lower_for_firmware(et.capture(model, net.loss, updates, net.batch(), use_cache=False))
    plan = planned(graph)
    project = et.export(graph, plan, model, updates, target=target, out=out, keep_every=keep_every)
    return Exported(net, model, updates, graph, plan, project)
