"""All or nothing: what a step changed, so that a step that fails can be taken back.

A step changes running statistics in the forward pass and parameters during the backward pass, long before it is over.
Before each change the old value is noted here; if anything raises, `take_back` puts all of it back, bit for bit.
Where a plan makes its updates together at the end, nothing is copied for them: they cannot fail for lack of memory,
and signals are held back until they are through.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


class Undo:
    def __init__(self, *, random: bool = False) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._random: torch.Tensor | None = None
        self._random_cuda: list[torch.Tensor] = []
        if random:
            self.note_random()

    def note_random(self) -> None:
        """Called before random numbers are drawn."""
        self._random = torch.get_rng_state()
        self._random_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

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


class HeldSignals:
    """Holds the signals that Python code handles back from `hold()` on, Ctrl-C among them: a handler may raise.
    `release()` lets those through that came meanwhile.

    Python runs handlers in the main thread only, so elsewhere there is nothing to hold.
    """

    def __init__(self) -> None:
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: list[int] = []
        self.holding = False

    def hold(self) -> None:
        if self.holding:
            return
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler) and number not in self._before:
                    self._before[number] = handler
                    signal.signal(number, self._note)
        # Not before: one that comes until here goes through.
        self.holding = True

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._came.append(number)

    def release(self) -> None:
        if not self.holding and not self._before:
            return
        self.holding = False
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for number in self._came:
            signal.raise_signal(number)
