"""Types of elements by name: a graph and its files say "float32" where PyTorch says torch.float32."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
