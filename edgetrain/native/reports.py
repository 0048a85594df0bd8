"""What PyTorch itself reports of its allocations on the CPU, through its profiler: slow, but always there."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def allocations() -> Iterator[list[tuple[int, int]]]:
    """Every allocation of PyTorch's CPU allocator in the block, filled in at its end: (nanoseconds, bytes taken)."""
    events: list[tuple[int, int]] = []
    profile = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
    with _quiet():
        profile.__enter__()
    try:
        yield events
    finally:
        with _quiet():
            profile.__exit__(None, None, None)
    reported: Any = profile.kineto_results
    events += sorted((e.start_ns(), e.nbytes()) for e in reported.events() if e.name() == "[memory]")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch's profiler writes a line to the process's standard error each time it starts and stops."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
