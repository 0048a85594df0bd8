"""All or nothing: what a step changed, so that a step that fails can be taken back.

A step changes running statistics in the forward pass and parameters during the backward pass, long before it is over.
Before each change the old value is noted here; if anything raises, `take_back` puts all of it back, bit for bit.
Where a plan makes its updates early, or together at the end, nothing is copied for them: they cannot fail for lack of
memory, and signals are held back until they are through.
"""

from __future__ import annotations

from types import FrameType

import torch

from edgetrain.native.signals import HeldSignals


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


class StepSignals(HeldSignals):
    """While `open`, and until `hold`, they come through at once: then the step can be taken back."""

    def __init__(self) -> None:
        super().__init__()
        self.open = False
        self.holding = False

    def hold(self) -> None:
        """From here on nothing comes through."""
        self.holding = True

    def comes_through(self, frame: FrameType | None) -> bool:
        return self.open and not self.holding

    def call(self, number: int, frame: FrameType | None) -> None:
        self.open = False  # one is enough: what comes while the step is taken back waits
        super().call(number, frame)
        self.open = True

    def release(self) -> None:
        self.open = self.holding = False
        super().release()
