"""Which samples come when: for each epoch an order of its own, drawn from the seed, the same after a resume."""

from __future__ import annotations

import functools
import hashlib
import random

import numpy as np
import torch
from torch import Tensor


def sample_numbers(seed: int, length: int, start: int, count: int) -> Tensor:
    """The numbers of `count` samples from position `start` on: for each epoch an order of its own."""
    pieces = []
    while count > 0:
        epoch, offset = divmod(start, length)
        piece = _order(seed, epoch, length)[offset : offset + count]
        pieces.append(piece)
        start, count = start + len(piece), count - len(piece)
    return torch.cat(pieces)


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, length: int) -> Tensor:
    # A hash, since seeds that lie close together (seed + epoch) would give two runs the same orders, shifted.
    mixed = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed[:7], "little"))
    return torch.randperm(length, generator=generator)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
