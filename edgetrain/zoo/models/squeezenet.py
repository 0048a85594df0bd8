"""SqueezeNet 1.1 (Iandola et al. 2016, and its authors' own revision of it).

In: images [B, 3, S, S]. Out: class scores [B, classes].

A Fire module squeezes its input through few 1×1 filters and expands it through 1×1 and 3×3 filters side by
side. Version 1.1 is what is commonly meant and what torchvision calls squeezenet1_1: it starts with a 3×3
convolution where 1.0 (the paper's) has 7×7, and pools earlier, for 2.4 times less work. The Fire modules are
the same. Parameter names and initial weights are torchvision's: its weights load as they are.

There is a ReLU after the last convolution and no batch norm. Too large a learning rate drives every score to
zero, where no gradient comes back: the loss then stays at log(classes). Seen on digits with Adam at 3e-3, not
at 3e-4.
"""

from __future__ import annotations

import torch
from torch import nn

from edgetrain.zoo.models.arguments import check_classes, check_size, check_width, scaled

SMALLEST = 17  # below it the third pooling has nothing left to pool


class Fire(nn.Module):
    """1×1 squeeze, then 1×1 and 3×3 expand, `expand` channels each, joined along the channels."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, kernel_size=1)
        self.squeeze_activation = nn.ReLU(inplace=True)
        self.expand1x1 = nn.Conv2d(squeeze, expand, kernel_size=1)
        self.expand1x1_activation = nn.ReLU(inplace=True)
        self.expand3x3 = nn.Conv2d(squeeze, expand, kernel_size=3, padding=1)
        self.expand3x3_activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.squeeze_activation(self.squeeze(x))
        one = self.expand1x1_activation(self.expand1x1(x))
        three = self.expand3x3_activation(self.expand3x3(x))
        return torch.cat([one, three], 1)


class SqueezeNet(nn.Module):
    """`features` (a convolution and eight Fire modules) and `classifier` (a 1×1 convolution, averaged)."""

    def __init__(self, *, classes: int, width: float) -> None:
        super().__init__()
        self.features = _features(width)
        head = nn.Conv2d(2 * scaled(256, width), classes, kernel_size=1)
        self.classifier = nn.Sequential(nn.Dropout(0.5), head, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1))
        self.apply(_initialise)
        # The head starts small, so that the ReLU after it lets about half of the scores through.
        nn.init.normal_(head.weight, 0.0, 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.flatten(self.classifier(self.features(x)), 1)


def _features(width: float) -> nn.Sequential:
    stem = scaled(64, width)
    s16, s32, s48, s64 = (scaled(channels, width) for channels in (16, 32, 48, 64))
    e64, e128, e192, e256 = (scaled(channels, width) for channels in (64, 128, 192, 256))
    return nn.Sequential(
        nn.Conv2d(3, stem, kernel_size=3, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=True),
        Fire(stem, s16, e64),
        Fire(2 * e64, s16, e64),
        nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=True),
        Fire(2 * e64, s32, e128),
        Fire(2 * e128, s32, e128),
        nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=True),
        Fire(2 * e128, s48, e192),
        Fire(2 * e192, s48, e192),
        Fire(2 * e192, s64, e256),
        Fire(2 * e256, s64, e256),
    )


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def squeezenet(*, classes: int = 1000, input_size: int = 224, width: float = 1.0) -> nn.Module:
    """SqueezeNet 1.1 for colour images of 17×17 pixels or more; `width` scales the channels."""
    check_classes("squeezenet", classes)
    check_size("squeezenet", input_size, smallest=SMALLEST)
    check_width("squeezenet", width)
    return SqueezeNet(classes=classes, width=width)
