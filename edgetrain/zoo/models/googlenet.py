"""GoogLeNet, also called Inception v1 (Szegedy et al. 2015), in torchvision's layout.

In: images [B, 3, S, S]. Out: class scores [B, classes].

Nine inception modules, each four branches side by side. Torchvision's layout differs from the paper's in two
ways: a batch norm after each convolution instead of a bias, and 3×3 kernels in the branch that the paper
gives 5×5 ones. Parameter names and initial weights are torchvision's, so its weights load. They were trained
on pixels scaled to [-1, 1]; torchvision converts inputs normalised by ImageNet's mean and deviation, and this
module does not.

The paper's two auxiliary classifiers are off by default, so that a training step has one output and one loss:
6,624,904 parameters. With `auxiliary=True` there are 13,004,888, and in training mode the output is three
scores (last, second, first); `auxiliary_loss` adds them as the paper does. Torchvision's published file holds
the auxiliary weights: load it with auxiliary=True, or with strict=False.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from edgetrain.zoo.models.arguments import check_classes, check_size, check_width, scaled

SMALLEST = 15  # below it the third pooling has nothing left to pool
AUXILIARY_WEIGHT = 0.3

# Table 1 of the paper: channels of 1×1; 3×3 reduce, 3×3; 5×5 reduce, 5×5; pool projection.
MODULES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


class Convolution(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Inception(nn.Module):
    """Four branches over one input, joined along the channels; `outputs` is how many they make together."""

    def __init__(self, inputs: int, name: str, width: float) -> None:
        super().__init__()
        one, reduce3, three, reduce5, five, pool = (scaled(c, width) for c in MODULES[name])
        self.branch1 = Convolution(inputs, one, kernel=1)
        self.branch2 = nn.Sequential(
            Convolution(inputs, reduce3, kernel=1),
            Convolution(reduce3, three, kernel=3),
        )
        # The paper's 5×5 branch; torchvision's weights have 3×3 kernels here.
        self.branch3 = nn.Sequential(
            Convolution(inputs, reduce5, kernel=1),
            Convolution(reduce5, five, kernel=3),
        )
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True),
            Convolution(inputs, pool, kernel=1),
        )
        self.outputs = one + three + five + pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class Auxiliary(nn.Module):
    """A classifier on an inner layer: pool to 4×4, 1×1 convolution, two dense layers."""

    def __init__(self, inputs: int, classes: int, width: float) -> None:
        super().__init__()
        channels, hidden = scaled(128, width), scaled(1024, width)
        self.conv = Convolution(inputs, channels, kernel=1)
        self.fc1 = nn.Linear(channels * 4 * 4, hidden)
        self.fc2 = nn.Linear(hidden, classes)
        self.dropout = nn.Dropout(0.7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.flatten(self.conv(F.adaptive_avg_pool2d(x, 4)), 1)
        scores: torch.Tensor = self.fc2(self.dropout(F.relu(self.fc1(x), inplace=True)))
        return scores


class GoogLeNet(nn.Module):
    """A stem of three convolutions, inception modules 3a to 5b, average pooling, one dense layer."""

    def __init__(self, *, classes: int, width: float, auxiliary: bool) -> None:
        super().__init__()
        stem, second = scaled(64, width), scaled(192, width)
        self.conv1 = Convolution(3, stem, kernel=7, stride=2)
        self.maxpool1 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.conv2 = Convolution(stem, stem, kernel=1)
        self.conv3 = Convolution(stem, second, kernel=3)
        self.maxpool2 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.inception3a = Inception(second, "3a", width)
        self.inception3b = Inception(self.inception3a.outputs, "3b", width)
        self.maxpool3 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.inception4a = Inception(self.inception3b.outputs, "4a", width)
        self.inception4b = Inception(self.inception4a.outputs, "4b", width)
        self.inception4c = Inception(self.inception4b.outputs, "4c", width)
        self.inception4d = Inception(self.inception4c.outputs, "4d", width)
        self.inception4e = Inception(self.inception4d.outputs, "4e", width)
        self.maxpool4 = nn.MaxPool2d(2, stride=2, ceil_mode=True)
        self.inception5a = Inception(self.inception4e.outputs, "5a", width)
        self.inception5b = Inception(self.inception5a.outputs, "5b", width)
        self.aux1 = Auxiliary(self.inception4a.outputs, classes, width) if auxiliary else None
        self.aux2 = Auxiliary(self.inception4d.outputs, classes, width) if auxiliary else None
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(self.inception5b.outputs, classes)
        self.apply(_initialise)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.maxpool2(self.conv3(self.conv2(self.maxpool1(self.conv1(x)))))
        x = self.maxpool3(self.inception3b(self.inception3a(x)))
        first = self.inception4a(x)
        second = self.inception4d(self.inception4c(self.inception4b(first)))
        x = self.maxpool4(self.inception4e(second))
        x = self.avgpool(self.inception5b(self.inception5a(x)))
        scores: torch.Tensor = self.fc(self.dropout(torch.flatten(x, 1)))
        if self.aux1 is None or self.aux2 is None or not self.training:
            return scores
        return scores, self.aux2(second), self.aux1(first)


def auxiliary_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of a GoogLeNet with auxiliary classifiers in training mode: theirs count three tenths."""
    last, second, first = model(x)
    inner = F.cross_entropy(second, y) + F.cross_entropy(first, y)
    return F.cross_entropy(last, y) + AUXILIARY_WEIGHT * inner


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.trunc_normal_(module.weight, mean=0.0, std=0.01, a=-2.0, b=2.0)


def googlenet(
    *,
    classes: int = 1000,
    input_size: int = 224,
    width: float = 1.0,
    auxiliary: bool = False,
) -> nn.Module:
    """GoogLeNet for colour images of 15×15 pixels or more; `width` scales the channels.

    With `auxiliary`, train it with `auxiliary_loss`; in evaluation mode the output is the last scores alone.
    """
    check_classes("googlenet", classes)
    check_size("googlenet", input_size, smallest=SMALLEST)
    check_width("googlenet", width)
    return GoogLeNet(classes=classes, width=width, auxiliary=auxiliary)
