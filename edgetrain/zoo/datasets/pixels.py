"""From stored pixels to what a model takes.

In: uint8 images [B,C,H,W]. Out: float32 images [B,C',H',W'], in the size and channels that were asked for.
Promised: pixels stay uint8 in memory; only the batch in hand becomes float32.

The order of the work:  pixel / white → resize → grey or colour → (x - mean) / std
Grey from colour weighs the channels by luma (ITU-R BT.601), and mean and std with the same weights.
Colour from grey repeats the one channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from edgetrain.zoo.datasets.base import check_indices

LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Normalisation:
    """x = (pixel / white - mean) / std, with one mean and one std for each stored channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    white: int = 255


@dataclass(frozen=True)
class Output:
    """What a model's images are to be: their channels (1 or 3), height, width and normalisation."""

    channels: int
    height: int
    width: int
    normalisation: Normalisation

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.channels, self.height, self.width)


def output_of(
    native: tuple[int, int, int],
    normalisation: Normalisation,
    *,
    input_size: int | None,
    channels: int | None,
) -> Output:
    """The output for images stored as `native` (C,H,W): square if `input_size` is given, else as they are."""
    native_channels, height, width = native
    return Output(channels or native_channels, input_size or height, input_size or width, normalisation)


def to_input(pixels: torch.Tensor, output: Output) -> torch.Tensor:
    """uint8 [B,C,H,W] to normalised float32 [B, *output.shape]; `pixels` is not changed."""
    x = pixels.to(torch.float32).div_(output.normalisation.white)
    if x.shape[-2:] != (output.height, output.width) and len(x):
        # Antialiasing changes nothing when enlarging; without it, shrinking would skip thin strokes.
        x = F.interpolate(x, (output.height, output.width), mode="bilinear", align_corners=False, antialias=True)
    mean, std = torch.tensor(output.normalisation.mean), torch.tensor(output.normalisation.std)
    if output.channels == 1 and x.shape[1] == 3:
        luma = torch.tensor(LUMA)
        x, mean, std = torch.einsum("bchw,c->bhw", x, luma)[:, None], (mean @ luma)[None], (std @ luma)[None]
    x = (x - mean[:, None, None]) / std[:, None, None]
    return x.expand(-1, output.channels, *x.shape[-2:]).reshape(len(pixels), *output.shape)


@dataclass(frozen=True, eq=False)
class PixelSplit:
    """A part whose images lie in memory: `pixels` uint8 [N,C,H,W] and `labels` [N], of any integer type."""

    pixels: torch.Tensor
    labels: torch.Tensor
    output: Output

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(x float32 [B,C,H,W], y int64 [B])."""
        check_indices(indices, len(self))
        return to_input(self.pixels[indices], self.output), self.labels[indices].to(torch.int64)
