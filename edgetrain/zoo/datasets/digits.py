"""The UCI hand-written digits, shipped with edgetrain: 1,797 grey images of 8×8, ten classes.

In: digits.csv.gz beside this file: a line of 64 pixels (0 to 16) and the digit for each image.
Out: `Data` with 1,500 images to train and 297 to test, the same share of every digit in both.
Normalisation: pixel / 16, then mean 0.3053, std 0.3760 (of all 1,797 images).

The split is by hash of the line number and the seed. Images of one writer may lie in both parts: the test
part shows how well these writers' digits are learned, not how well those of others will be read.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository
(1998), https://doi.org/10.24432/C50P49, licence CC BY 4.0; its test part, unchanged, as in scikit-learn.
"""

from __future__ import annotations

import gzip
from importlib.resources import files

import numpy as np
import torch

from edgetrain.zoo.datasets.base import Data, held_out
from edgetrain.zoo.datasets.pixels import Normalisation, PixelSplit, output_of

NORMALISATION = Normalisation(mean=(0.3053,), std=(0.3760,), white=16)
TEST_SHARE = 297 / 1797


def load(*, input_size: int | None, channels: int | None, seed: int) -> Data:
    """The digits; `seed` chooses which of them are the test part."""
    table = _table()
    pixels, labels = table[:, :-1].view(-1, 1, 8, 8), table[:, -1]
    output = output_of((1, 8, 8), NORMALISATION, input_size=input_size, channels=channels)
    is_test = _is_test(labels.tolist(), seed)
    train, test = (PixelSplit(pixels[part], labels[part], output) for part in (~is_test, is_test))
    return Data("digits", "images", train, test, tuple("0123456789"), output.shape)


def _table() -> torch.Tensor:
    """uint8 [1797, 65]: 64 pixels and the label a row."""
    packed = files(__package__).joinpath("digits.csv.gz").read_bytes()
    return torch.from_numpy(np.loadtxt(gzip.decompress(packed).decode().splitlines(), dtype=np.uint8, delimiter=","))


def _is_test(labels: list[int], seed: int) -> torch.Tensor:
    """A bool for each sample: whether it is held out; the same share in every class."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        rows = [row for row, label in enumerate(labels) if label == digit]
        chosen[[rows[i] for i in held_out([str(row) for row in rows], share=TEST_SHARE, seed=seed)]] = True
    return chosen
