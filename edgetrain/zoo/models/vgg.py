"""VGG16 (Simonyan and Zisserman 2015, configuration D), without batch norm.

In: images [B, 3, S, S]. Out: class scores [B, classes].

Thirteen 3×3 convolutions with a pooling that halves the side after the second, fourth, seventh, tenth and last;
then three dense layers, half of the first two dropped out. Two networks have the same convolutions:

                                    vgg16                        vgg16_cifar
    convolutions at S = 224 or 32   512 × 7×7 or 512 × 1×1       512 × 7×7 or 512 × 1×1
    average pooling to 7×7          512 × 7×7                    none
    first dense layer               25,088 → 4096                25,088 → 4096 or 512 → 4096

`vgg16` is torchvision's: its weights load as they are, at any size. Where less than 7×7 is left, the pooling
repeats pixels: at 32×32 each of the 512 numbers comes 49 times, and 103 million weights are trained on what two
million could see. `vgg16_cifar` has no such pooling: its first dense layer is as large as the input needs, the
network that POET plans for CIFAR-10. Parameter names and initial weights are torchvision's in both.
"""

from __future__ import annotations

import torch
from torch import nn

from edgetrain.zoo.models.arguments import check_classes, check_size, check_width, scaled

# Filters of the convolutions between two poolings.
BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
REDUCTION = 2 ** len(BLOCKS)  # of the side, by the poolings
SMALLEST = REDUCTION  # below it the last pooling has nothing left to pool
HIDDEN = 4096
POOLED = 7


class VGG(nn.Module):
    """`features` (convolutions), `avgpool` to 7×7 or none, `classifier` (dense layers with dropout).

    input_size: the side of the images that the dense layers are made for; None pools what comes to 7×7.
    """

    def __init__(self, *, classes: int, width: float, input_size: int | None) -> None:
        super().__init__()
        side = POOLED if input_size is None else input_size // REDUCTION
        self.features = _features(width)
        self.avgpool = nn.AdaptiveAvgPool2d(POOLED) if input_size is None else nn.Identity()
        self.classifier = _classifier(scaled(BLOCKS[-1][-1], width) * side * side, scaled(HIDDEN, width), classes)
        self.apply(_initialise)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.avgpool(self.features(x))
        scores: torch.Tensor = self.classifier(torch.flatten(pooled, 1))
        return scores


def _features(width: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for block in BLOCKS:
        for base in block:
            outputs = scaled(base, width)
            layers += [nn.Conv2d(channels, outputs, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
            channels = outputs
        layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
    return nn.Sequential(*layers)


def _classifier(inputs: int, hidden: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(hidden, classes),
    )


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.01)
    if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def vgg16(*, classes: int = 1000, input_size: int = 224, width: float = 1.0) -> nn.Module:
    """VGG16 for colour images of 32×32 pixels or more; `width` scales channels and hidden layers."""
    check_classes("vgg16", classes)
    check_size("vgg16", input_size, smallest=SMALLEST)
    check_width("vgg16", width)
    return VGG(classes=classes, width=width, input_size=None)


def vgg16_cifar(*, classes: int = 10, input_size: int = 32, width: float = 1.0) -> nn.Module:
    """VGG16 without the pooling to 7×7, for images of `input_size` (32 or more); `width` as in `vgg16`."""
    check_classes("vgg16_cifar", classes)
    check_size("vgg16_cifar", input_size, smallest=SMALLEST)
    check_width("vgg16_cifar", width)
    return VGG(classes=classes, width=width, input_size=input_size)
