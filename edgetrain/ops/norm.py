"""Batch norm of a training step on the CPU, together with the clamp that follows it, for channels-last floats.

In:  x, a dense channels-last tensor of float32 [N, C, H, W]; float32 tensors [C]; `low` and `high`, between which the
     result is clamped: -inf and inf without an activation, 0 and inf for ReLU, 0 and 6 for ReLU6.
Out: tensors of x's layout, and float32 tensors [C].

    statistics   mean, 1 / sqrt(variance + eps); the running statistics are changed in place
    apply        y = clamp((x - mean) * (invstd * weight) + bias, low, high)
    backward     the gradients of x, weight and bias, from that of y; y itself is not needed

Sums are as exact as those of PyTorch's contiguous kernel, and the same call gives the same bits, whatever the number of
threads: a y that was dropped is had again with `apply`. Nothing is taken from PyTorch's allocator but the results.

The library `_norm` is built when the package is installed where PyTorch is (see setup.py); `missing()` says why it
cannot be used.
"""

from __future__ import annotations

import ctypes
import functools
import math
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgetrain.errors import InternalError
from edgetrain.native.library import load
from edgetrain.native.surely import at_once


def available() -> bool:
    return missing() is None


def missing() -> str | None:
    """Why the kernels cannot be used here, or None."""
    library = load("norm")
    return library if isinstance(library, str) else None


_POINTER, _INT, _FLOAT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_double
_ARGUMENTS = {
    "statistics": [_POINTER, _INT, _INT, *4 * [_POINTER], _DOUBLE, _DOUBLE],
    "apply": [_POINTER, _POINTER, _INT, _INT, *4 * [_POINTER], _FLOAT, _FLOAT],
    "backward": [*3 * [_POINTER], _INT, _INT, *4 * [_POINTER], _FLOAT, _FLOAT, _POINTER, _POINTER],
}


@functools.cache
def _kernel(name: str) -> Any:
    library = load("norm")
    if isinstance(library, str):
        raise InternalError(f"the batch norm kernels were asked for, but {library}")
    kernel = getattr(library, f"et_norm_{name}")
    kernel.argtypes = _ARGUMENTS[name]
    kernel.restype = None
    return kernel


def statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(biased variance + eps) of each channel. The running ones, both or neither, follow as those of
    torch.nn.BatchNorm2d do: the variance unbiased."""
    _check(x)
    mean, invstd = _of_channels(x), _of_channels(x)
    changed = _pointers(mean, invstd, running_mean, running_var)
    _kernel("statistics")(x.data_ptr(), *_rows(x), *changed, momentum, eps)
    return mean, invstd


def apply(
    x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None,
    low: float = -math.inf, high: float = math.inf, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`out` may be x."""
    y = _result(x, out)
    channels = _pointers(mean, invstd, weight, bias)
    run = partial(_kernel("apply"), x.data_ptr(), y.data_ptr(), *_rows(x), *channels, low, high)
    at_once((run, *_noted(out)))
    return y


def backward(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None,
    low: float = -math.inf, high: float = math.inf, out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of x, weight and bias; nothing flows where y is at a bound, as in PyTorch. `out` is for that of x,
    and may be dy."""
    _check(dy)
    dx = _result(x, out)
    dweight, dbias = (None if t is None else _of_channels(x) for t in (weight, bias))
    channels = _pointers(mean, invstd, weight, bias)
    images = (dy.data_ptr(), x.data_ptr(), dx.data_ptr())
    run = partial(_kernel("backward"), *images, *_rows(x), *channels, low, high, *_pointers(dweight, dbias))
    at_once((run, *_noted(out)))
    return dx, dweight, dbias


def results(error: BaseException) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Those of the `backward` in which the error came, whose frame still has them."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is backward.__code__ and "run" in frame.f_locals:
            return tuple(frame.f_locals[name] for name in ("dx", "dweight", "dbias"))
    return None


def _noted(out: Tensor | None) -> tuple[Callable[[], object], ...]:
    """PyTorch's count of the changes to a tensor, as its own kernels keep it."""
    return () if out is None else (partial(torch._C._increment_version, (out,)),)


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _rows(x: Tensor) -> tuple[int, int]:
    """How many places all images have together, and their channels."""
    return x.numel() // x.shape[1], x.shape[1]


def _of_channels(x: Tensor) -> Tensor:
    return torch.empty(x.shape[1], dtype=torch.float32)


def _check(x: Tensor) -> None:
    dense = x.dtype is torch.float32 and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    if not dense or x.numel() == 0:
        raise InternalError(
            f"batch norm takes dense channels-last float32 tensors of 4 dimensions, none empty; this one is {x.dtype}, "
            f"{tuple(x.shape)} with strides {x.stride()}"
        )


def _result(x: Tensor, out: Tensor | None) -> Tensor:
    _check(x)
    if out is None:
        return torch.empty_like(x)
    _check(out)
    return out
