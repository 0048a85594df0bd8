"""MNIST and data sets in its format (Fashion-MNIST, KMNIST): four idx files, plain or .gz.

In: a folder with the four standard names, or the path of one of them.
Out: `Data` with the train-* files to train and the t10k-* files to test; classes are "0", "1", …
Normalisation: pixel / 255, then mean 0.1307, std 0.3081: those of MNIST's training part, for every set in
this format, because nothing in the files says which set they hold.
Promised: a header is checked against the limit and the file before anything of its size is allocated.

An idx file, all numbers big-endian:

    00 00 08 D │ D sizes, 4 bytes each │ sizes[0]·sizes[1]·… bytes
               D = 3: images, rows, columns     D = 1: labels
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import torch

from edgetrain.errors import UserError
from edgetrain.zoo.datasets.base import Data
from edgetrain.zoo.datasets.pixels import Normalisation, PixelSplit, output_of
from edgetrain.zoo.datasets.streams import head, whole

NORMALISATION = Normalisation(mean=(0.1307,), std=(0.3081,))
TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
# The largest public set in this format (EMNIST by class) has 640 MB of pixels.
MAX_BYTES = 1 << 30


def recognises(path: Path) -> bool:
    """Whether `path` is an idx file by its name, or a folder with one of the four standard names."""
    if path.is_dir():
        return any(_find(path, stem) for stem in TRAIN + TEST)
    return path.name.lower().removesuffix(".gz").endswith(("idx3-ubyte", "idx1-ubyte"))


def load(path: Path, *, input_size: int | None, channels: int | None) -> Data:
    """The four files at `path`; for one of the files, those beside it too."""
    folder = path if path.is_dir() else path.parent
    train_pixels, train_labels = _part(folder, TRAIN)
    test_pixels, test_labels = _part(folder, TEST)
    height, width = train_pixels.shape[-2:]
    if test_pixels.shape[-2:] != (height, width):
        raise UserError(
            f"the images of the two parts in {folder} differ in size",
            expected=f"{height}×{width}, as in {TRAIN[0]}",
            received=f"{test_pixels.shape[-2]}×{test_pixels.shape[-1]} in {TEST[0]}",
        )
    output = output_of((1, height, width), NORMALISATION, input_size=input_size, channels=channels)
    train, test = PixelSplit(train_pixels, train_labels, output), PixelSplit(test_pixels, test_labels, output)
    class_count = int(max(train_labels.max(), test_labels.max())) + 1
    return Data(folder.resolve().name, "images", train, test, tuple(map(str, range(class_count))), output.shape)


def _find(folder: Path, stem: str) -> Path | None:
    """The file of that standard name, plain before packed; some mirrors write a dot before "idx"."""
    names = (f"{name}{suffix}" for name in (stem, stem.replace("-idx", ".idx")) for suffix in ("", ".gz"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _part(folder: Path, stems: tuple[str, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """(pixels uint8 [N,1,H,W], labels uint8 [N]) of one part."""
    paths = [_find(folder, stem) for stem in stems]
    images_path, labels_path = paths
    if images_path is None or labels_path is None:
        raise UserError(
            f"{folder} lacks {stems[0] if images_path is None else stems[1]} (plain or .gz)",
            expected=", ".join(TRAIN + TEST),
            next_step="fetch the four files of the set into one folder and give that folder",
        )
    pixels, labels = _read(images_path, dims=3), _read(labels_path, dims=1)
    if len(pixels) != len(labels):
        raise UserError(
            f"{images_path} and {labels_path} do not belong together",
            expected="as many labels as images",
            received=f"{len(pixels):,} images and {len(labels):,} labels",
        )
    return pixels[:, None], labels


def _read(path: Path, *, dims: int) -> torch.Tensor:
    """The uint8 tensor in the file, in the shape that its header gives."""
    shape = _shape(path, dims)
    start = 4 + 4 * dims
    size = start + math.prod(shape)
    content = whole(path, size, limit_is="the size that its header gives")
    if len(content) < size:
        raise UserError(
            f"{path} is cut off",
            expected=f"{size:,} bytes (the size that its header gives)",
            received=f"{len(content):,} bytes",
            next_step="fetch the file again",
        )
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(shape)


def _shape(path: Path, dims: int) -> tuple[int, ...]:
    """The sizes in the file's header, all positive, their product within MAX_BYTES."""
    header = head(path, 4 + 4 * dims)
    if len(header) < 4 + 4 * dims or header[:4] != bytes((0, 0, 8, dims)):
        raise UserError(
            f"{path} does not start like an idx file of {'images' if dims == 3 else 'labels'}",
            expected=f"the bytes 00 00 08 {dims:02x} and {dims} sizes",
            received=header.hex(" ") or "an empty file",
        )
    shape = struct.unpack(f">{dims}I", header[4:])
    if not 0 < math.prod(shape) <= MAX_BYTES:
        raise UserError(
            f"{path} has a header that cannot be right",
            expected=f"between 1 and {MAX_BYTES:,} bytes of data",
            received=f"sizes {' × '.join(f'{n:,}' for n in shape)}",
        )
    return shape
