"""MobileNetV2 (Sandler et al. 2018): inverted residual blocks with linear bottlenecks.

In: images [B, 3, S, S]. Out: class scores [B, classes].

A block widens its input `expand` times (1×1), filters each channel by itself (3×3, where the stride is) and
narrows it again (1×1, no activation); where input and output have the same shape, the input is added.
Parameter names and initial weights are torchvision's: its weights load as they are.

At 32×32 and below the last layers see a single pixel, which batch norm cannot train on with a batch of one
image.
"""

from __future__ import annotations

import torch
from torch import nn

from edgetrain.zoo.models.arguments import check_classes, check_size, check_width

# Table 2 of the paper: expansion, output channels, blocks, stride of the first block.
BLOCKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
STEM_CHANNELS = 32
LAST_CHANNELS = 1280


def round_to_eights(channels: float) -> int:
    """The nearest multiple of 8, at least 8, and never less than nine tenths of `channels`."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _conv(inputs: int, outputs: int, *, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, batch norm and ReLU6, padded so that stride 1 keeps the side."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    """Widen, filter, narrow; plus the input, where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        self.residual = stride == 1 and inputs == outputs
        # A block that does not widen has no first convolution; torchvision's names count on that.
        widen = [_conv(inputs, hidden, kernel=1)] if expand != 1 else []
        self.conv = nn.Sequential(
            *widen,
            _conv(hidden, hidden, kernel=3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, outputs, kernel_size=1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv(x)
        return x + out if self.residual else out


class MobileNetV2(nn.Module):
    """`features` (the stem, 17 blocks, the last convolution) and `classifier`."""

    def __init__(self, *, classes: int, width: float) -> None:
        super().__init__()
        # The last layer keeps its 1280 channels in narrow networks, as in the paper.
        last = round_to_eights(LAST_CHANNELS * max(1.0, width))
        self.features = _features(width, last)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))
        self.apply(_initialise)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(self.features(x), 1)
        scores: torch.Tensor = self.classifier(torch.flatten(pooled, 1))
        return scores


def _features(width: float, last: int) -> nn.Sequential:
    channels = round_to_eights(STEM_CHANNELS * width)
    layers: list[nn.Module] = [_conv(3, channels, kernel=3, stride=2)]
    for expand, base, blocks, first_stride in BLOCKS:
        outputs = round_to_eights(base * width)
        for index in range(blocks):
            stride = first_stride if index == 0 else 1
            layers.append(InvertedResidual(channels, outputs, stride=stride, expand=expand))
            channels = outputs
    layers.append(_conv(channels, last, kernel=1))
    return nn.Sequential(*layers)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.01)
        nn.init.zeros_(module.bias)


def mobilenet_v2(*, classes: int = 1000, input_size: int = 224, width: float = 1.0) -> nn.Module:
    """MobileNetV2 for colour images of any size; `width` is the paper's multiplier (1.0, 0.75, 0.5, 0.35)."""
    check_classes("mobilenet_v2", classes)
    check_size("mobilenet_v2", input_size, smallest=1)
    check_width("mobilenet_v2", width)
    return MobileNetV2(classes=classes, width=width)
