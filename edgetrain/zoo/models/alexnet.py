"""AlexNet in its single-tower form (Krizhevsky 2014, "One weird trick"), the one torchvision ships.

In: images [B, 3, S, S]. Out: class scores [B, classes].

Five convolutions, then average pooling to 6×6, so that inputs of other sizes meet the same three dense
layers. Parameter names are torchvision's: its weights load as they are. It has 64, 192, 384, 256 and 256
filters where the two towers of 2012 had 96, 256, 384, 384 and 256, and no local response normalisation.
"""

from __future__ import annotations

import torch
from torch import nn

from edgetrain.zoo.models.arguments import check_classes, check_size, check_width, scaled

SMALLEST = 63  # below it the last pooling has nothing left to pool
POOLED = 6


class AlexNet(nn.Module):
    """`features` (convolutions), `avgpool`, `classifier` (dense layers with dropout)."""

    def __init__(self, *, classes: int, width: float) -> None:
        super().__init__()
        a, b, c, d = (scaled(channels, width) for channels in (64, 192, 384, 256))
        self.features = nn.Sequential(
            nn.Conv2d(3, a, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(a, b, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(b, c, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(c, d, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(d, d, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(POOLED)
        self.classifier = _classifier(d * POOLED * POOLED, scaled(4096, width), classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.avgpool(self.features(x))
        scores: torch.Tensor = self.classifier(torch.flatten(pooled, 1))
        return scores


def _classifier(inputs: int, hidden: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Dropout(0.5),
        nn.Linear(inputs, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, classes),
    )


def alexnet(*, classes: int = 1000, input_size: int = 224, width: float = 1.0) -> nn.Module:
    """AlexNet for colour images of 63×63 pixels or more; `width` scales channels and hidden layers."""
    check_classes("alexnet", classes)
    check_size("alexnet", input_size, smallest=SMALLEST)
    check_width("alexnet", width)
    return AlexNet(classes=classes, width=width)
