"""DS-CNN for keywords (Zhang et al. 2017, "Hello Edge"): depthwise separable convolutions over MFCCs.

In: [B, 1, frames, coefficients], 49×10 in the paper. Out: class scores [B, classes].

    49×10 ─conv 10×4, stride 2─ 64×25×5 ─ 4 × (depthwise 3×3, pointwise 1×1) ─ mean ─ 64 ─ classes

This is the small one of its three, with 64 channels and four blocks; batch norm and ReLU after each convolution. The
paper pads as TensorFlow does, which for 49×10 is 4 and 5 rows, 1 and 1 column; here padding is on all sides alike, 5
and 1. Its dropout is left out: firmware is compared with PyTorch number by number.
"""

from __future__ import annotations

import torch
from torch import nn

from edgetrain.zoo.models.arguments import check_classes, check_size, check_width, scaled

CHANNELS = 64
BLOCKS = 4


class DsCnn(nn.Module):
    """`stem`, `blocks` and `classifier`."""

    def __init__(self, *, classes: int, width: float) -> None:
        super().__init__()
        channels = scaled(CHANNELS, width)
        self.stem = _normed(nn.Conv2d(1, channels, (10, 4), stride=2, padding=(5, 1), bias=False))
        self.blocks = nn.Sequential(*(_block(channels) for _ in range(BLOCKS)))
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1)
        scores: torch.Tensor = self.classifier(torch.flatten(pooled, 1))
        return scores


def _block(channels: int) -> nn.Sequential:
    depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
    return nn.Sequential(*_normed(depthwise), *_normed(nn.Conv2d(channels, channels, 1, bias=False)))


def _normed(convolution: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU(inplace=True))


def ds_cnn(*, classes: int = 12, input_size: int = 49, width: float = 1.0) -> nn.Module:
    """DS-CNN for `input_size` frames of MFCCs, as many coefficients each as there are; `width` scales its channels."""
    check_classes("ds_cnn", classes)
    check_size("ds_cnn", input_size, smallest=1)
    check_width("ds_cnn", width)
    return DsCnn(classes=classes, width=width)
