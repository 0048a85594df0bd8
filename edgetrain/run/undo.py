"""All or nothing: what a step changed, so that a step that fails can be taken back.

A step changes running statistics in the forward pass and parameters during the backward pass, long before it is over.
Before each change the old value is noted here; if anything raises, `take_back` puts all of it back, bit for bit.
Where a plan makes its updates early, or together at the end, nothing is copied for them: they cannot fail for lack of
memory, and signals are held back until they are through.
"""

from __future__ import annotations

import signal
import threading
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
        """May be called again where something interrupted it."""
        for tensor, copy in reversed(self._copies):
            tensor.detach().copy_(copy)
        if self._random is not None:
            torch.set_rng_state(self._random)
            self._random = None  # a block of the arena
        if self._random_cuda:
            torch.cuda.set_rng_state_all(self._random_cuda)
        self._copies.clear()


class HeldSignals:
    """Holds the signals that Python code handles, Ctrl-C among them, from `start` to `release`: a handler may raise.

    While `open`, and until `hold`, they come through at once: then the step can be taken back. Those that were held
    come with `release`. All of it may be called again where something interrupted it.

    Python runs handlers in the main thread only, so elsewhere there is nothing to hold.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._came: list[int] = []
        self.open = False
        self.holding = False

    def start(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) and number not in self._before:
                self._before[number] = handler
                signal.signal(number, self._note)

    def hold(self) -> None:
        """From here on nothing comes through."""
        self.holding = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.open and not self.holding and callable(self._before.get(number)):
            self.open = False  # one is enough: what comes while the step is taken back waits
            try:
                self._before[number](number, frame)
            finally:
                self._take_again(number)
            self.open = True
        else:
            self._came.append(number)

    def _take_again(self, number: int) -> None:
        """A handler may have put another in its place, for the time after."""
        now = signal.getsignal(number)
        if now != self._note:
            self._before[number] = now
            signal.signal(number, self._note)

    def release(self) -> None:
        self.open = self.holding = False
        for number, handler in list(self._before.items()):
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
            self._before.pop(number, None)
        while self._came:
            number = self._came.pop(0)
            try:
                signal.raise_signal(number)
            finally:
                self.release()  # the others, where this one raised
