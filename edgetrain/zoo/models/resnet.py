"""ResNet-18 and ResNet-50 (He et al. 2016).

In: images [B, 3, S, S]. Out: class scores [B, classes].

A block adds its input to what two 3×3 convolutions (ResNet-18) or 1×1, 3×3 and 1×1 convolutions (ResNet-50)
make of it; where the shape changes, the input passes a strided 1×1 convolution first. The stride of a
ResNet-50 block is on its 3×3 convolution, as in torchvision (the paper has it on the first 1×1, at 3.8 G
multiply-adds instead of 4.1 G). Parameter names and initial weights are torchvision's: its weights load as
they are.

At 32×32 and below the last stage sees a single pixel, which batch norm cannot train on with a batch of one
image. `resnet18_cifar` is ResNet-18 for images that small, as it is commonly trained on CIFAR-10:

                     224×224: resnet18            32×32: resnet18_cifar
    conv1            7×7, stride 2     112        3×3, stride 1      32
    maxpool          3×3, stride 2      56        none               32
    layer1 … 4                  56, 28, 14, 7               32, 16, 8, 4

All but the weights of conv1 and the dense layer have torchvision's shapes too. POET's paper trains ResNet-18 on
CIFAR-10. The code its authors released plans another network of that name: 16, 32 and 64 channels, three
stages, and a 3×3 convolution beside each block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from edgetrain.zoo.models.arguments import check_classes, check_size, check_width, scaled

STAGES = (64, 128, 256, 512)


def _conv7x7(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=7, stride=2, padding=3, bias=False)


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)


def _conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """What brings a block's input to the shape of its output; None where it has it already."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv1x1(inputs, outputs, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(inputs, channels, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3(channels, channels)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = _shortcut(inputs, channels, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out: torch.Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        result: torch.Tensor = self.relu(out)
        return result


class Bottleneck(nn.Module):
    """Narrow by 1×1, filter by 3×3, widen four times by 1×1."""

    expansion = 4

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = channels * self.expansion
        self.conv1 = _conv1x1(inputs, channels)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv3x3(channels, channels, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = _conv1x1(channels, outputs)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out: torch.Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += shortcut
        result: torch.Tensor = self.relu(out)
        return result


Block = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """A stem, four stages of blocks (all but the first halve the side), pooling, one dense layer.

    The stem quarters the side, by a 7×7 convolution and pooling; for small images it is one 3×3 convolution that
    keeps it.
    """

    def __init__(
        self, block: Block, depths: Sequence[int], *, classes: int, width: float, small_images: bool = False
    ) -> None:
        super().__init__()
        channels = [scaled(base, width) for base in STAGES]
        stem, outputs = channels[0], [block.expansion * c for c in channels]
        self.conv1 = _conv3x3(3, stem) if small_images else _conv7x7(3, stem)
        self.bn1 = nn.BatchNorm2d(stem)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = _stage(block, stem, channels[0], depths[0], stride=1)
        self.layer2 = _stage(block, outputs[0], channels[1], depths[1], stride=2)
        self.layer3 = _stage(block, outputs[1], channels[2], depths[2], stride=2)
        self.layer4 = _stage(block, outputs[2], channels[3], depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(outputs[3], classes)
        self.apply(_initialise)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: torch.Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return scores


def _stage(block: Block, inputs: int, channels: int, depth: int, *, stride: int) -> nn.Sequential:
    rest = [block(channels * block.expansion, channels, 1) for _ in range(depth - 1)]
    return nn.Sequential(block(inputs, channels, stride), *rest)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet18(*, classes: int = 1000, input_size: int = 224, width: float = 1.0) -> nn.Module:
    """ResNet-18 for colour images of any size; `width` scales the channels."""
    check_classes("resnet18", classes)
    check_size("resnet18", input_size, smallest=1)
    check_width("resnet18", width)
    return ResNet(BasicBlock, (2, 2, 2, 2), classes=classes, width=width)


def resnet18_cifar(*, classes: int = 10, input_size: int = 32, width: float = 1.0) -> nn.Module:
    """ResNet-18 with a stem for small colour images, of any size; `width` scales the channels."""
    check_classes("resnet18_cifar", classes)
    check_size("resnet18_cifar", input_size, smallest=1)
    check_width("resnet18_cifar", width)
    return ResNet(BasicBlock, (2, 2, 2, 2), classes=classes, width=width, small_images=True)


def resnet50(*, classes: int = 1000, input_size: int = 224, width: float = 1.0) -> nn.Module:
    """ResNet-50 for colour images of any size; `width` scales the channels."""
    check_classes("resnet50", classes)
    check_size("resnet50", input_size, smallest=1)
    check_width("resnet50", width)
    return ResNet(Bottleneck, (3, 4, 6, 3), classes=classes, width=width)
