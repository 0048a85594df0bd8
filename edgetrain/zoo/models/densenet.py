"""DenseNet-121 (Huang et al. 2017): each layer sees the outputs of all layers before it.

In: images [B, 3, S, S]. Out: class scores [B, classes].

A layer adds `growth` channels to those it was given, which the next one is given too:

    x  [B, c, …]  ──────────────────────┬── cat ──  [B, c + 32, …]  ───────┬── cat ──  [B, c + 64, …]  …
         └ norm ReLU 1×1 norm ReLU 3×3 ─┘               └ … ───────────────┘

A transition between two blocks halves channels and side. Each concatenation is a tensor of its own that the
backward of the batch norm after it needs: what grows with the square of the depth is the memory, not the weights.
There is no dropout: the paper has it only for data sets without augmentation, torchvision sets it to zero.

Parameter names and initial weights are torchvision's. The files it publishes have older names (norm.1 for norm1);
`load_weights` knows them.

At 32×32 and below the last block sees a single pixel, which batch norm cannot train on with a batch of one image.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from edgetrain.zoo.models.arguments import check_classes, check_size, check_width, scaled

SMALLEST = 29  # below it the last transition has nothing left to pool
DEPTHS = (6, 12, 24, 16)
GROWTH = 32
STEM_CHANNELS = 64
BOTTLENECK = 4  # the 1×1 convolution of a layer has so many times its growth


class DenseLayer(nn.Module):
    """Its input, and `growth` channels that it makes of it: 1×1, then 3×3, norm and ReLU before each."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        hidden = BOTTLENECK * growth
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, hidden, kernel_size=1, bias=False)
        self.norm2 = nn.BatchNorm2d(hidden)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(hidden, growth, kernel_size=3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = self.conv1(self.relu1(self.norm1(x)))
        new = self.conv2(self.relu2(self.norm2(new)))
        return torch.cat([x, new], 1)


class DenseNet(nn.Module):
    """`features` (stem, four dense blocks, three transitions, a batch norm) and `classifier`."""

    def __init__(self, *, classes: int, width: float) -> None:
        super().__init__()
        self.features, channels = _features(scaled(STEM_CHANNELS, width), scaled(GROWTH, width))
        self.classifier = nn.Linear(channels, classes)
        self.apply(_initialise)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.features(x), inplace=True)
        scores: torch.Tensor = self.classifier(torch.flatten(F.adaptive_avg_pool2d(features, 1), 1))
        return scores


def _features(channels: int, growth: int) -> tuple[nn.Sequential, int]:
    """The layers, and how many channels the last one has."""
    features = nn.Sequential()
    features.add_module("conv0", nn.Conv2d(3, channels, kernel_size=7, stride=2, padding=3, bias=False))
    features.add_module("norm0", nn.BatchNorm2d(channels))
    features.add_module("relu0", nn.ReLU(inplace=True))
    features.add_module("pool0", nn.MaxPool2d(kernel_size=3, stride=2, padding=1))
    for number, depth in enumerate(DEPTHS, start=1):
        features.add_module(f"denseblock{number}", _block(channels, growth, depth))
        channels += depth * growth
        if number < len(DEPTHS):
            features.add_module(f"transition{number}", _transition(channels, channels // 2))
            channels //= 2
    features.add_module("norm5", nn.BatchNorm2d(channels))
    return features, channels


def _block(inputs: int, growth: int, depth: int) -> nn.Sequential:
    block = nn.Sequential()
    for index in range(depth):
        block.add_module(f"denselayer{index + 1}", DenseLayer(inputs + index * growth, growth))
    return block


def _transition(inputs: int, outputs: int) -> nn.Sequential:
    transition = nn.Sequential()
    transition.add_module("norm", nn.BatchNorm2d(inputs))
    transition.add_module("relu", nn.ReLU(inplace=True))
    transition.add_module("conv", nn.Conv2d(inputs, outputs, kernel_size=1, bias=False))
    transition.add_module("pool", nn.AvgPool2d(kernel_size=2, stride=2))
    return transition


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
    elif isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def densenet121(*, classes: int = 1000, input_size: int = 224, width: float = 1.0) -> nn.Module:
    """DenseNet-121 for colour images of 29×29 pixels or more; `width` scales the stem and the growth."""
    check_classes("densenet121", classes)
    check_size("densenet121", input_size, smallest=SMALLEST)
    check_width("densenet121", width)
    return DenseNet(classes=classes, width=width)
