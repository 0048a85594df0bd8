"""Any text, for models that predict the next character.

In: a UTF-8 file, .txt or .txt.gz.
Out: `Data` of kind "characters": classes are the characters that occur, in order of their code points; the
last 10 % of the text is the test part (never less than a window of it).
Normalisation: none; x and y are int64 positions in `classes`. A byte order mark is dropped, line ends stay.

With T characters a window, windows do not overlap, and y is x one character later:

    text   T o   b e ,   o r   n o t        T = 4
    x 0   [T o   b]                         y 0   [o   b e]
    x 1           [e ,   o]                 y 1   [,   o r]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from edgetrain.errors import UserError
from edgetrain.zoo.datasets.base import Data, check_indices
from edgetrain.zoo.datasets.streams import whole

MAX_BYTES = 256 << 20
_CODE_POINTS = 0x110000


@dataclass(frozen=True, eq=False)
class TextSplit:
    """A part of a text: `ids` [characters], uint8 or int32, read in windows of `sequence`."""

    ids: torch.Tensor
    sequence: int

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.sequence

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(x int64 [B,T], y int64 [B,T]), y being x one character later."""
        check_indices(indices, len(self))
        positions = indices[:, None] * self.sequence + torch.arange(self.sequence + 1)
        window = self.ids[positions].to(torch.int64)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def recognises(path: Path) -> bool:
    """Whether `path` is a text file by its name."""
    return path.is_file() and path.name.lower().endswith((".txt", ".txt.gz"))


def load(path: Path, *, sequence: int) -> Data:
    """The text at `path` in windows of `sequence` characters."""
    ids, classes = _encode(_text(path))
    window = sequence + 1
    if len(ids) < 2 * window:
        raise UserError(
            f"{path} is shorter than two windows, one to train and one to test",
            expected=f"at least {2 * window:,} characters, for windows of {sequence:,} and one more",
            received=f"{len(ids):,} characters",
            next_step="give a longer text, or a shorter sequence",
        )
    cut = len(ids) - max(len(ids) // 10, window)
    train, test = TextSplit(ids[:cut], sequence), TextSplit(ids[cut:], sequence)
    return Data(path.name.split(".")[0], "characters", train, test, classes, (sequence,))


def _text(path: Path) -> str:
    content = whole(path, MAX_BYTES, limit_is="the longest text that is read into memory")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text",
            expected="UTF-8",
            received=f"the byte {content[error.start]:#04x} at position {error.start:,}",
            next_step="convert it, e.g. with: iconv -f LATIN1 -t UTF-8",
        ) from error


def _encode(text: str) -> tuple[torch.Tensor, tuple[str, ...]]:
    """(positions in the vocabulary, the vocabulary), positions in the smallest type that holds them."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    occurs = np.zeros(_CODE_POINTS, dtype=np.bool_)
    occurs[codes] = True
    vocabulary = np.flatnonzero(occurs)
    position_of: npt.NDArray[np.generic] = np.zeros(
        _CODE_POINTS, dtype=np.uint8 if len(vocabulary) <= 256 else np.int32
    )
    position_of[vocabulary] = np.arange(len(vocabulary))
    return torch.from_numpy(position_of[codes]), tuple(map(chr, vocabulary.tolist()))
