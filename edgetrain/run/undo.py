"""All or nothing: what a step changed, so that a step that fails can be taken back.

A step changes running statistics in the forward pass and parameters during the backward pass, long before it is over.
Before each change the old value is noted here; if anything raises, `take_back` puts all of it back, bit for bit.
Where a plan makes its updates together at the end, nothing is copied for them: they cannot fail for lack of memory,
and Ctrl-C is held back until they are through.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch


class Undo:
    def __init__(self, *, random: bool) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._random = torch.get_rng_state() if random else None
        self._random_cuda = torch.cuda.get_rng_state_all() if random and torch.cuda.is_initialized() else []

    def note(self, tensor: torch.Tensor) -> None:
        """Called before `tensor` changes."""
        self._copies.append((tensor, tensor.detach().clone()))

    @property
    def n_bytes(self) -> int:
        return sum(copy.untyped_storage().nbytes() for _, copy in self._copies)

    def take_back(self) -> None:
        with torch.no_grad():
            for tensor, copy in reversed(self._copies):
                tensor.detach().copy_(copy)
        if self._random is not None:
            torch.set_rng_state(self._random)
        if self._random_cuda:
            torch.cuda.set_rng_state_all(self._random_cuda)
        self._copies.clear()


class HeldInterrupt:
    """Holds Ctrl-C back from `hold()` on; `release()` lets one through that came meanwhile.

    Python delivers signals to the main thread only, so elsewhere there is nothing to hold.
    """

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], Any] | int | None = None
        self._came = False
        self._holding = False

    @property
    def holding(self) -> bool:
        return self._holding

    def hold(self) -> None:
        if not self._holding and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
            self._holding = True

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True

    def release(self) -> None:
        if not self._holding:
            return
        self._holding = False
        signal.signal(signal.SIGINT, self._before if self._before is not None else signal.default_int_handler)
        if self._came:
            signal.raise_signal(signal.SIGINT)
