"""Small nets for the tests of firmware, and how they become projects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import edgetrain as et
from edgetrain.firmware.export import Project
from edgetrain.graph.ir import Graph
from edgetrain.plan.plan import Plan
from edgetrain.zoo.models.autoencoder import autoencoder
from edgetrain.zoo.models.ds_cnn import ds_cnn
from edgetrain.zoo.models.lenet import lenet
from edgetrain.zoo.models.minilearn import (
    CIFAR_SHAPE,
    HAR_SHAPE,
    KWS_SHAPE,
    minilearn_cifar,
    minilearn_har,
    minilearn_kws,
)  # fmt: skip
from edgetrain.zoo.models.mobilenet_v2 import mobilenet_v2

Batch = tuple[torch.Tensor, ...]
Loss = Callable[..., torch.Tensor]
Optimizers = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def reconstruction(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), x)


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


def narrow_mobilenet() -> nn.Module:
    model = mobilenet_v2(width=0.35, classes=10, input_size=64)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@dataclass(frozen=True)
class Net:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int | None = None  # None: it reconstructs its input
    samples: int = 4

    @property
    def loss(self) -> Loss:
        return reconstruction if self.classes is None else cross_entropy

    def batch(self) -> Batch:
        x = torch.randn(self.samples, *self.shape)
        return (x,) if self.classes is None else (x, torch.randint(0, self.classes, (self.samples,)))


NETS = {
    "lenet": Net(lenet, (1, 28, 28), 10),
    "autoencoder": Net(lambda: autoencoder(width=0.25), (1, 28, 28)),
    "mlp": Net(lambda: nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3)), (12,), 3),
    "tiny_cnn": Net(tiny_cnn, (1, 10, 10), 3, samples=2),
    "ds_cnn": Net(ds_cnn, (1, 49, 10), 12),
    "minilearn_kws": Net(minilearn_kws, KWS_SHAPE, 12),
    "minilearn_cifar": Net(minilearn_cifar, CIFAR_SHAPE, 10),
    "minilearn_har": Net(minilearn_har, HAR_SHAPE, 6),
    "everything": Net(Everything, (3, 17, 16), 5),
    "wide_depthwise": Net(wide_depthwise, (3, 11, 13), 3),
    "frozen": Net(frozen, (3, 16, 16), 5),
    "mobilenet_v2": Net(narrow_mobilenet, (3, 64, 64), 10, samples=4),
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
class Made:
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
) -> Made:
    torch.manual_seed(seed)
    model = net.build()
    trained = [p for p in model.parameters() if p.requires_grad]
    updates = optimizer(trained)
    graph = et.lower_for_firmware(et.capture(model, net.loss, updates, net.batch(), use_cache=False))
    plan = planned(graph)
    project = et.export(graph, plan, model, updates, target=target, out=out, keep_every=keep_every)
    return Made(net, model, updates, graph, plan, project)
