"""How results lie in memory, where PyTorch's fake kernels tell it wrongly: rules that several families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def contiguous(kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Contiguous on a CPU, whatever comes in."""
    result = kernel(*args, **kwargs)
    if args[0].device.type != "cpu":
        return result
    if isinstance(result, torch.Tensor):
        return _contiguous(result)
    return tuple(_contiguous(tensor) for tensor in result)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
