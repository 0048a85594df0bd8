"""Training flags, put back: whatever is done to a model meanwhile, each of its modules has its own flag again.

with evaluating(model): …      in evaluation mode
with flags_kept(model): …      in any mode
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def flags_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards each module has the training flag that it had; they need not be all the same."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside."""
    with flags_kept(model):
        model.eval()
        yield
