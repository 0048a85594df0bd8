"""What PyTorch itself reports of its allocations on the CPU, through its profiler: slow, but always there."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch

from edgetrain.native.surely import surely


@contextlib.contextmanager
def allocations() -> Iterator[list[tuple[int, int]]]:
    """Every allocation of PyTorch's CPU allocator in the block, filled in at its end: (nanoseconds, bytes taken)."""
    events: list[tuple[int, int]] = []
    profile = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)

    def stop() -> None:
        if torch._C._autograd._profiler_enabled():
            _quietly(lambda: profile.__exit__(None, None, None))

    try:
        try:
            _quietly(profile.__enter__)
            yield events
        finally:
            stop()
    except BaseException:
        stop()  # what came may have come in the line above
        raise
    reported: Any = profile.kineto_results
    events += sorted((e.start_ns(), e.nbytes()) for e in reported.events() if e.name() == "[memory]")


def _quietly(work: Callable[[], object]) -> None:
    """PyTorch's profiler writes a line to the process's standard error each time it starts and stops."""
    sys.stderr.flush()
    with os.fdopen(os.dup(2), "wb") as saved, open(os.devnull, "wb") as nowhere:

        def quiet() -> None:
            os.dup2(nowhere.fileno(), 2)
            work()

        surely(quiet, lambda: _point(2, saved))


def _point(number: int, file: IO[bytes]) -> None:
    os.dup2(file.fileno(), number)
