"""LeNet-5 (LeCun et al. 1998) in the form it has today: full connections, ReLU, max pooling, a linear output.

In: images [B, 1, S, S]. Out: class scores [B, classes].

    28×28 ─conv 5×5─ 6×28×28 ─pool─ 6×14×14 ─conv 5×5─ 16×10×10 ─pool─ 16×5×5 ─ 400 ─ 120 ─ 84 ─ classes

The first convolution is padded so that 28×28 images need no border, as the 32×32 frames of the paper had.
"""

from __future__ import annotations

import torch
from torch import nn

from edgetrain.zoo.models.arguments import check_classes, check_size, check_width, scaled

SMALLEST = 4  # two poolings by 2
# Below this side the second convolution is padded too: a 5×5 kernel would leave 8×8 digits with nothing.
PADDED_BELOW = 20


class LeNet(nn.Module):
    """Two convolutions and three dense layers; the first dense layer follows the input size."""

    def __init__(self, *, classes: int, input_size: int, width: float) -> None:
        super().__init__()
        padding = 2 if input_size < PADDED_BELOW else 0
        side = (input_size // 2 - 4 + 2 * padding) // 2
        first, second = scaled(6, width), scaled(16, width)
        third, fourth = scaled(120, width), scaled(84, width)
        self.features = nn.Sequential(
            nn.Conv2d(1, first, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2),
            nn.Conv2d(first, second, kernel_size=5, padding=padding),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(second * side * side, third),
            nn.ReLU(inplace=True),
            nn.Linear(third, fourth),
            nn.ReLU(inplace=True),
            nn.Linear(fourth, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(torch.flatten(self.features(x), 1))
        return scores


def lenet(*, classes: int = 10, input_size: int = 28, width: float = 1.0) -> nn.Module:
    """LeNet-5 for grey images of 4×4 pixels or more; `width` scales the channels and the hidden layers."""
    check_classes("lenet", classes)
    check_size("lenet", input_size, smallest=SMALLEST)
    check_width("lenet", width)
    return LeNet(classes=classes, input_size=input_size, width=width)
