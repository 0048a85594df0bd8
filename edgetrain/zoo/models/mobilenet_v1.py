"""MobileNetV1 (Howard et al. 2017): depthwise separable convolutions.

In: images [B, 3, S, S]. Out: class scores [B, classes].

A block filters each channel by itself (3×3, where the stride is), then mixes the channels (1×1); batch norm and
ReLU6 after each. The paper writes ReLU; ReLU6 is what its authors released, and what Keras and timm have. Their
code pads strided convolutions at the bottom and the right only and drops a thousandth out before the last layer;
here padding is on all sides and there is no dropout, as in timm. Torchvision has no MobileNetV1. Parameter names
are those of timm's mobilenetv1_100: its weights load as they are.

At 32×32 and below the last layers see a single pixel, which batch norm cannot train on with a batch of one
image.
"""

from __future__ import annotations

import torch
from torch import nn

from edgetrain.zoo.models.arguments import check_classes, check_size, check_width
from edgetrain.zoo.models.mobilenet_v2 import round_to_eights

# Table 1 of the paper: output channels, blocks, stride of the first block.
STAGES = ((64, 1, 1), (128, 2, 2), (256, 2, 2), (512, 6, 2), (1024, 2, 2))
STEM_CHANNELS = 32


class DepthwiseSeparable(nn.Module):
    """Filter each channel, then mix them."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False)
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv_pw = nn.Conv2d(inputs, outputs, kernel_size=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU6(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn1(self.conv_dw(x)))
        out: torch.Tensor = self.relu(self.bn2(self.conv_pw(x)))
        return out


class MobileNetV1(nn.Module):
    """A strided 3×3 convolution, 13 blocks in five stages, average pooling, one dense layer."""

    def __init__(self, *, classes: int, width: float) -> None:
        super().__init__()
        stem, last = (round_to_eights(base * width) for base in (STEM_CHANNELS, STAGES[-1][0]))
        self.conv_stem = nn.Conv2d(3, stem, kernel_size=3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        self.relu = nn.ReLU6(inplace=True)
        self.blocks = _stages(stem, width)
        self.classifier = nn.Linear(last, classes)
        self.apply(_initialise)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.relu(self.bn1(self.conv_stem(x))))
        pooled = nn.functional.adaptive_avg_pool2d(x, 1)
        scores: torch.Tensor = self.classifier(torch.flatten(pooled, 1))
        return scores


def _stages(channels: int, width: float) -> nn.Sequential:
    stages = nn.Sequential()
    for base, blocks, stride in STAGES:
        outputs = round_to_eights(base * width)
        rest = [DepthwiseSeparable(outputs, outputs, stride=1) for _ in range(blocks - 1)]
        stages.append(nn.Sequential(DepthwiseSeparable(channels, outputs, stride=stride), *rest))
        channels = outputs
    return stages


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        # By inputs: an output of a depthwise convolution has nine, however many channels there are.
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.01)
        nn.init.zeros_(module.bias)


def mobilenet_v1(*, classes: int = 1000, input_size: int = 224, width: float = 1.0) -> nn.Module:
    """MobileNetV1 for colour images of any size; `width` is the paper's multiplier (1.0, 0.75, 0.5, 0.25)."""
    check_classes("mobilenet_v1", classes)
    check_size("mobilenet_v1", input_size, smallest=1)
    check_width("mobilenet_v1", width)
    return MobileNetV1(classes=classes, width=width)
