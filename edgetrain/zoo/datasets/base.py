"""What a data set is to the rest of edgetrain, and how samples are held out for testing.

Out: `Split`, what every loader's two parts can do, and `Data`, the two parts and their description.
Promised: the same indices of the same data always give the same batch, on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from edgetrain.errors import UserError


class Split(Protocol):
    """One part of a data set. Reads no more than a batch needs."""

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(x, y) of the samples at `indices` (1-d, int64, each in [0, len)), in that order; deterministic."""
        ...


@dataclass(frozen=True)
class Data:
    """A data set, ready for training.

    name:    how reports call it: its own name, or that of its folder or file
    kind:    "images" (x float32 [B,C,H,W], y int64 [B]) or "characters" (x and y int64 [B,T])
    classes: class names, or the characters of the vocabulary; y holds positions in it
    shape:   of one x: (C, H, W) or (T,)
    """

    name: str
    kind: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    shape: tuple[int, ...]


def check_indices(indices: torch.Tensor, length: int) -> None:
    """Refuses what `Split.batch` does not accept; PyTorch would let negative numbers count from the end."""
    if indices.dim() != 1 or indices.dtype != torch.int64:
        raise UserError(
            "a batch is chosen by a list of sample numbers",
            expected="a 1-d int64 tensor",
            received=f"a {indices.dim()}-d {indices.dtype} tensor",
        )
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= length):
        raise UserError(
            "a sample number lies outside the data",
            expected=f"numbers from 0 to {length - 1}",
            received=f"numbers from {int(indices.min())} to {int(indices.max())}",
        )


def held_out(keys: Sequence[str], *, share: float, seed: int) -> frozenset[int]:
    """The positions in `keys` of the samples kept for testing: `share` of them, rounded, and at least one.

    Chosen by hash of seed and key, so the choice depends neither on their order nor on the machine.
    """
    order = sorted(range(len(keys)), key=lambda i: hashlib.sha256(f"{seed}:{keys[i]}".encode()).digest())
    return frozenset(order[: max(1, round(share * len(keys)))])
