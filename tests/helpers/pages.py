"""A page file, filled and read in one line, and its calls to the system replaced."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgetrain.pagefile import CHUNK_BYTES, PREFIX, Calls, PageFile

SIZES = (0, 1, 4095, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17)
Bytes = NDArray[np.uint8]
Call = Callable[[int, memoryview, int], int]
REAL = Calls()


def data(n_bytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)


def address(values: Bytes) -> int:
    return int(values.ctypes.data)


def put(pages: PageFile, slot: int, values: Bytes) -> None:
    pages.write(slot, address(values))
    pages.wait(slot)


def got(pages: PageFile, slot: int, n_bytes: int) -> Bytes:
    values = np.full(n_bytes, 0xAA, dtype=np.uint8)
    pages.read(slot, address(values))
    pages.wait(slot)
    return values


def around(write: Call = REAL.write, read: Call = REAL.read) -> Calls:
    return Calls(write, read)


@contextmanager
def descriptor(folder: Path) -> Iterator[Path]:
    """The open file that has no name any more, by its number among those of this process."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:  # the one that lists them
            continue
        if target.startswith(f"{folder}/{PREFIX}") and target.endswith("(deleted)"):
            yield link
            return
    raise AssertionError("the page file is not open")


def open_files(folder: Path) -> int:
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(os.readlink(link))
        except OSError:
            continue
    return sum(target.startswith(f"{folder}/") for target in targets)
