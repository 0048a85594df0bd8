"""Nets that a microcontroller can train, with the shape of what they see: for firmware's tests and benchmarks.

In: a name from `SMALL`. Out: `Net`: fresh weights, random batches, the loss. None of them drops anything out: firmware
draws other masks than PyTorch, and these nets are there to be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

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
)
from edgetrain.zoo.models.mobilenet_v2 import mobilenet_v2
from edgetrain.zoo.tasks import classify_loss, reconstruct_loss

Batch = tuple[torch.Tensor, ...]
Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Net:
    """shape: of one sample. classes: None for a net that rebuilds its input. samples: of a batch."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int | None = None
    samples: int = 4

    @property
    def loss(self) -> Loss:
        return reconstruct_loss if self.classes is None else classify_loss

    def batch(self) -> Batch:
        """Random numbers and labels; the latter only where there are classes."""
        x, y = torch.randn(self.samples, *self.shape), torch.randint(0, self.classes or 1, (self.samples,))
        return (x,) if self.classes is None else (x, y)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def narrow_mobilenet() -> nn.Module:
    """MobileNetV2 at width 0.35 for images of 64×64."""
    model = mobilenet_v2(width=0.35, classes=10, input_size=64)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


SMALL: Mapping[str, Net] = {
    "mlp": Net(mlp, (32,), 10),
    "minilearn_har": Net(minilearn_har, HAR_SHAPE, 6),
    "autoencoder": Net(autoencoder, (1, 28, 28)),
    "lenet": Net(lenet, (1, 28, 28), 10),
    "minilearn_kws": Net(minilearn_kws, KWS_SHAPE, 12),
    "minilearn_cifar": Net(minilearn_cifar, CIFAR_SHAPE, 10),
    "ds_cnn": Net(ds_cnn, (1, 49, 10), 12),
    "mobilenet_v2": Net(narrow_mobilenet, (3, 64, 64), 10),
}
