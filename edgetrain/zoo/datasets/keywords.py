"""Spoken keywords as MFCCs: the 1,000 samples that MLPerf Tiny tests keyword spotting with.

In: kws01_mfcc_int8_1000.tar.xz, or a folder that holds it: int8 files of 49 frames × 10 coefficients, named
NUMBER_KEYWORD_CLASS.bin, at most MAX_SAMPLES of them.
Out: `Data` with a quarter of each class held out to test; x [B, 1, 49, 10].
Normalisation: each coefficient by MEAN and STD, those of all 1,000 samples. As they come nine of the ten vary by less
than a tenth of the first.
Promised: nothing is unpacked to disk; a file of another size or name is a UserError.

Source: github.com/eembc/energyrunner (datasets/kws01), from Speech Commands (Warden 2018), licence CC BY 4.0.
"""

from __future__ import annotations

import io
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from edgetrain.errors import UserError
from edgetrain.zoo.datasets.base import Data, check_indices, held_out
from edgetrain.zoo.datasets.streams import whole

FRAMES, COEFFICIENTS = 49, 10
SHAPE = (1, FRAMES, COEFFICIENTS)
MEAN = (57.44, 85.18, 82.86, 81.96, 82.13, 82.20, 82.18, 82.21, 82.03, 82.04)
STD = (41.63, 6.66, 4.37, 3.44, 2.89, 2.23, 2.03, 1.79, 1.73, 1.59)
TEST_SHARE = 0.25
MAX_SAMPLES, MAX_BYTES = 10_000, 64 << 20
_SUFFIX = "_mfcc_int8_1000.tar.xz"
_NAME = re.compile(r"[^/]*_([A-Za-z]+)_(\d{1,2})\.bin")


@dataclass(frozen=True, eq=False)
class KeywordSplit:
    """`mfccs` int8 [N, 1, 49, 10], `labels` int64 [N]."""

    mfccs: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(x float32 [B,1,49,10], y int64 [B])."""
        check_indices(indices, len(self))
        x = (self.mfccs[indices].float() - torch.tensor(MEAN)) / torch.tensor(STD)
        return x, self.labels[indices]


def recognises(path: Path) -> bool:
    """Whether `path` is that archive by its name, or a folder with it."""
    return _archive(path) is not None


def load(path: Path, *, input_size: int | None, channels: int | None, seed: int) -> Data:
    """The keywords; `seed` chooses which of them are the test part."""
    archive = _archive(path)
    assert archive is not None
    if input_size not in (None, FRAMES) or channels not in (None, 1):
        raise UserError(
            f"{archive.name} holds MFCCs, which cannot be resized like images",
            expected=f"{FRAMES} frames, one channel", received=f"input_size={input_size}, channels={channels}",
            next_step="choose a model for them, such as ds_cnn, and leave the input size out",
        )  # fmt: skip
    names, mfccs, labels, classes = _read(archive)
    is_test = torch.zeros(len(names), dtype=torch.bool)
    for label in range(len(classes)):
        rows = [row for row, known in enumerate(labels) if known == label]
        chosen = held_out([names[row] for row in rows], share=TEST_SHARE, seed=seed)
        is_test[[rows[i] for i in chosen]] = True
    values, numbers = torch.from_numpy(mfccs), torch.tensor(labels)
    train, test = (KeywordSplit(values[part], numbers[part]) for part in (~is_test, is_test))
    return Data("keywords", "images", train, test, classes, SHAPE)


def _archive(path: Path) -> Path | None:
    if path.is_file():
        return path if path.name.endswith(_SUFFIX) else None
    archives = sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else []
    return archives[0] if archives else None


def _read(archive: Path) -> tuple[list[str], np.ndarray, list[int], tuple[str, ...]]:
    """(names, int8 [N, 1, 49, 10], labels, keywords by label), sorted by name."""
    content = io.BytesIO(whole(archive, MAX_BYTES, limit_is="the largest archive of this kind"))
    samples: dict[str, tuple[bytes, int]] = {}
    keywords: dict[int, str] = {}
    try:
        with tarfile.open(fileobj=content) as tar:
            for member in tar:
                named = _NAME.fullmatch(member.name.rpartition("/")[2])
                if named is None or not member.isfile():
                    continue
                data = _sample(archive, tar, member)
                samples[member.name] = (data, int(named[2]))
                keywords[int(named[2])] = named[1]
    except tarfile.TarError as error:
        raise UserError(f"{archive} is no whole tar archive: {error}", next_step="fetch it again") from error
    _check(archive, samples, keywords)
    names = sorted(samples)
    mfccs = np.frombuffer(b"".join(samples[name][0] for name in names), dtype=np.int8).copy()
    classes = tuple(keywords[label] for label in range(len(keywords)))
    return names, mfccs.reshape(-1, *SHAPE), [samples[name][1] for name in names], classes


def _sample(archive: Path, tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member) if member.size == FRAMES * COEFFICIENTS else None
    data = b"" if file is None else file.read()
    if len(data) != FRAMES * COEFFICIENTS:
        raise UserError(
            f"{member.name} in {archive} is no sample", expected=f"{FRAMES * COEFFICIENTS} bytes",
            received=f"{member.size} bytes",
        )  # fmt: skip
    return data


def _check(archive: Path, samples: dict[str, tuple[bytes, int]], keywords: dict[int, str]) -> None:
    if not 0 < len(samples) <= MAX_SAMPLES or sorted(keywords) != list(range(len(keywords))):
        raise UserError(
            f"{archive} does not hold keywords",
            expected=f"1 to {MAX_SAMPLES:,} files NUMBER_KEYWORD_CLASS.bin, classes numbered from 0 without a gap",
            received=f"{len(samples):,} of them, of classes {sorted(keywords)}",
        )
