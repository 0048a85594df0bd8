"""What fake tensors do beside computing shapes, kept away from a recording.

They log what refuses its inputs, keep each call for ever, and let code ask where memory is that is not there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from edgetrain.graph.capture.value_checks import assert_of_distribution, checks_a_distribution


@contextmanager
def without_their_log() -> Iterator[None]:
    """An op that refuses its inputs is an error that we tell; fake tensors print its traceback as well."""
    log = logging.getLogger(FakeTensorMode.__module__)

    def graver(record: logging.LogRecord) -> bool:
        return record.levelno > logging.ERROR

    log.addFilter(graver)
    try:
        yield
    finally:
        log.removeFilter(graver)


@contextmanager
def without_their_cache() -> Iterator[None]:
    """Fake tensors keep each call with its shapes for as long as the process lives: keep them for one recording."""
    before = set(FakeTensorMode.cache)
    try:
        yield
    finally:
        for key in FakeTensorMode.cache.keys() - before:
            FakeTensorMode.cache.pop(key, None)


class ValuesRefused(TorchFunctionMode):
    """Refuses what reads a tensor's memory, or asks where it is, without a kernel call, and so without the recorder's
    knowledge. What writes it so is computed by kernels."""

    _READERS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._READERS or (func is torch.Tensor.data_ptr and isinstance(args[0], FakeTensor)):
            name: Any = f"Tensor.{func.__name__}"
            raise DataDependentOutputException(name)
        if checks_a_distribution(func, caller := sys._getframe(1)):
            return assert_of_distribution(args[0], caller)
        if func is nn.functional.ctc_loss and not isinstance(args[3], torch.Tensor):
            return _ctc_loss(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, steps: Any, lengths: Any, **options: Any) -> torch.Tensor:
    """The mean as kernels: PyTorch writes the lengths into a new tensor in C++. The rest is its arithmetic."""
    if options.get("reduction") != "mean":
        return nn.functional.ctc_loss(log_probs, targets, steps, lengths, **options)
    losses = nn.functional.ctc_loss(log_probs, targets, steps, lengths, **{**options, "reduction": "none"})
    divisors = torch.tensor(lengths, dtype=losses.dtype, device=losses.device).clamp_min(1)
    return (losses / divisors).mean()
