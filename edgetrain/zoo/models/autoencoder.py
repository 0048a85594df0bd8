"""A dense autoencoder: the input through a narrow layer and back.

In: [B, …] with `features` numbers a sample, e.g. images [B, 1, S, S] or flat [B, S × S]. Out: the same shape.

    784 ─ 128 ─ 32 ─ 128 ─ 784

The output is linear, so that data on any scale can be rebuilt; the loss is the mean squared error. The sizes
are this project's own. TinyOL's, for 40 sensor readings, is Autoencoder(features=40, hidden=…, latent=4).
"""

from __future__ import annotations

import torch
from torch import nn

from edgetrain.zoo.models.arguments import check_size, check_width, refuse_classes, scaled

HIDDEN = 128
LATENT = 32


class Autoencoder(nn.Module):
    """`encoder` and `decoder`, two dense layers each."""

    def __init__(self, *, features: int, hidden: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(features, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, latent),
            nn.ReLU(inplace=True),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, features),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rebuilt: torch.Tensor = self.decoder(self.encoder(torch.flatten(x, 1)))
        return rebuilt.reshape(x.shape)


def autoencoder(*, classes: int | None = None, input_size: int = 28, width: float = 1.0) -> nn.Module:
    """A dense autoencoder for grey images of `input_size` squared; `width` scales the hidden layers.

    It has no classes: asking for some is refused.
    """
    refuse_classes("autoencoder", classes)
    check_size("autoencoder", input_size, smallest=1)
    check_width("autoencoder", width)
    hidden, latent = scaled(HIDDEN, width), scaled(LATENT, width)
    return Autoencoder(features=input_size * input_size, hidden=hidden, latent=latent)
