"""CIFAR-10 in its binary version: .bin, .bin.gz or .bin.xz.

In: a folder with data_batch_*.bin and test_batch.bin, or the path of one such file.
Out: `Data`: the data batches to train, the test batch to test. Where there is no test batch (or a single file
was given) the last sixth of the training records is the test part, and a log message says so.
Normalisation: pixel / 255, then mean (0.4914, 0.4822, 0.4465), std (0.2470, 0.2435, 0.2616): red, green and
blue of the 50,000 training images.
Promised: records stay as they are in memory, once; no pickle is ever read.

A file is records of 3,073 bytes:  label (0 to 9) │ 1,024 red │ 1,024 green │ 1,024 blue, row by row of 32×32
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch

from edgetrain.errors import UserError
from edgetrain.zoo.datasets.base import Data
from edgetrain.zoo.datasets.pixels import Normalisation, Output, PixelSplit, output_of
from edgetrain.zoo.datasets.streams import whole

NORMALISATION = Normalisation(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORD_BYTES = 3073
# All of CIFAR-10; what unpacks to more is something else.
MAX_RECORDS = 60_000

_BATCH_NAME = re.compile(r"(data_batch_\d+|test_batch)\.bin(\.gz|\.xz)?", re.IGNORECASE)
_log = logging.getLogger(__name__)


def recognises(path: Path) -> bool:
    """Whether `path` is a .bin file by its name, or a folder with one of the standard names."""
    if path.is_dir():
        return bool(_batches(path))
    return re.search(r"\.bin(\.gz|\.xz)?$", path.name, re.IGNORECASE) is not None


def load(path: Path, *, input_size: int | None, channels: int | None) -> Data:
    """The batches in the folder `path`, or the records of the one file."""
    batches = _batches(path) if path.is_dir() else {"data_batch_1": path}
    test_path = batches.pop("test_batch", None)
    if not batches:
        raise UserError(f"{path} has a test batch but nothing to train on", expected="data_batch_1.bin or more")
    train = _records(list(batches.values()))
    if test_path is not None:
        test = _records([test_path])
    else:
        train, test = _last_sixth(path, train)
    output = output_of((3, 32, 32), NORMALISATION, input_size=input_size, channels=channels)
    name = path.resolve().name.split(".")[0]
    return Data(name, "images", _split(train, output), _split(test, output), CLASSES, output.shape)


def _batches(folder: Path) -> dict[str, Path]:
    """The files with standard names by name without suffix; the plain one where it lies there packed too."""
    batches: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if (match := _BATCH_NAME.fullmatch(path.name)) and not path.is_dir():
            batches.setdefault(match[1].lower(), path)
    return batches


def _records(paths: list[Path]) -> torch.Tensor:
    """uint8 [N, 3073] of all the files, one after the other, each checked."""
    # One buffer that grows, instead of a list to concatenate: on a small device the set would not fit twice.
    content = bytearray()
    for path in paths:
        left = MAX_RECORDS * RECORD_BYTES - len(content)
        batch = whole(path, left, limit_is=f"CIFAR-10 has {MAX_RECORDS:,} records of {RECORD_BYTES:,} bytes in all")
        _check(path, batch)
        content += batch
    return torch.frombuffer(content, dtype=torch.uint8).view(-1, RECORD_BYTES)


def _check(path: Path, batch: bytearray) -> None:
    """Refuses a file that is not whole records with labels 0 to 9."""
    if not batch or len(batch) % RECORD_BYTES:
        raise UserError(
            f"{path} is no CIFAR-10 binary file, or is cut off",
            expected=f"a multiple of {RECORD_BYTES:,} bytes",
            received=f"{len(batch):,} bytes",
        )
    labels = batch[::RECORD_BYTES]
    if max(labels) >= len(CLASSES):
        record = next(i for i, label in enumerate(labels) if label >= len(CLASSES))
        raise UserError(
            f"{path} has a wrong label in record {record:,}",
            expected="labels from 0 to 9",
            received=str(labels[record]),
            next_step="the file may be damaged, or another set: give CIFAR-10's binary version",
        )


def _last_sixth(path: Path, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(train, test) views of the records where there is no test batch."""
    test_count = max(1, len(records) // 6)
    if len(records) < 2:
        raise UserError(f"{path} has a single record", expected="at least one to train and one to test")
    _log.warning("%s: no test_batch.bin; the last %s training records are the test part", path, f"{test_count:,}")
    return records[:-test_count], records[-test_count:]


def _split(records: torch.Tensor, output: Output) -> PixelSplit:
    return PixelSplit(records[:, 1:].view(-1, 3, 32, 32), records[:, 0], output)
