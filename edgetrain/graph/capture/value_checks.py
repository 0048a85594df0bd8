"""Checks of values that PyTorch makes in C++, and leaves out over fake tensors: recorded as part of the step.

In:  a block in which a step is recorded.
Out: within it functions of torch that consist of other kernels (so that no kernel call of their own is recorded) record
     what they refuse too:

    one_hot                 the kernels that it runs over real tensors; the last of them checks its indices
    quantile, nanquantile   an assertion that every quantile is from 0 to 1
    istft                   an assertion that the windows leave no gap

They stand in the dispatcher, so that TorchScript and C++ come by them as Python does, and they answer the thread that
records alone. `torch.distributions` decides by values in Python whether to raise; `checks_a_distribution` has it record
an assertion instead.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributions import distribution
from torch.nn.functional import pad

from edgetrain.ops.entry import entry_of_function

aten = torch.ops.aten

_KEYS = ("AutogradCPU", "AutogradCUDA")
OF_DISTRIBUTIONS = "distribution: "  # begins what their assertions say; they raise a ValueError
_SMALLEST_WINDOW = 1e-11  # as in istft


@contextmanager
def values_checked() -> Iterator[None]:
    """Record the checks within the block."""
    thread, library = threading.get_ident(), torch.library.Library("aten", "IMPL")
    try:
        for func, checked in _CHECKED.items():
            for key in _KEYS:
                library.impl(func, partial(_called, thread, func, checked), key)
        yield
    finally:
        library._destroy()


def checks_a_distribution(func: Any, caller: types.FrameType) -> bool:
    """A distribution checks its parameters, or a value that it is asked about."""
    return func is torch._is_all_true and caller.f_globals is vars(distribution)


def assert_of_distribution(valid: torch.Tensor, caller: types.FrameType) -> bool:
    """Records the check, and tells the distribution that all is well."""
    here = caller.f_locals
    what = f"parameter {here['param']}" if "param" in here else "a value"
    constraint = here.get("constraint", here.get("support"))
    with torch.no_grad():
        _require(
            torch._is_all_true(valid),
            f"{OF_DISTRIBUTIONS}{what} of {type(here['self']).__name__} is not {constraint!r}",
        )
    return True


def refuses_values(func: Any) -> bool:
    """A forward pass calls it for what it refuses, even where nothing reads what it gives."""
    return is_check(func) or entry_of_function(func).raises == "for values"


def is_check(func: Any) -> bool:
    """The kernel gives nothing and changes nothing: it is there for what it refuses."""
    return not func._schema.returns and not any(
        a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments
    )


def _called(thread: int, func: Any, checked: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    plain = func.decompose
    return plain(*args, **kwargs) if threading.get_ident() != thread else checked(plain, *args, **kwargs)


def _one_hot(plain: Callable[..., Any], tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if tensor.dtype is not torch.int64 or num_classes < 1 or not tensor.numel():
        found: torch.Tensor = plain(tensor, num_classes)
        return found
    return tensor.new_zeros((*tensor.shape, num_classes)).scatter_(-1, tensor.unsqueeze(-1), 1)


def _quantile(plain: Callable[..., Any], tensor: torch.Tensor, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if q.device.type == "cpu":  # elsewhere PyTorch does not look
        with torch.no_grad():
            _require(((q >= 0) & (q <= 1)).all(), "quantile() q values must be in the range [0, 1]")
    return plain(tensor, q, *args, **kwargs)


def _istft(
    plain: Callable[..., Any],
    tensor: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Any:
    result = plain(tensor, n_fft, hop_length, win_length, window, center, normalized, onesided, length, return_complex)
    hop, width, frames = hop_length or n_fft // 4, win_length or n_fft, tensor.shape[-1]
    n_samples, begin = n_fft + hop * (frames - 1), n_fft // 2 if center else 0
    end = begin + length if length is not None else n_samples - begin
    with torch.no_grad():
        values = tensor.new_ones(width, dtype=result.dtype) if window is None else window.detach()
        left = (n_fft - width) // 2
        squares = pad(values, (left, n_fft - width - left)).pow(2).expand(1, frames, n_fft)
        sums = aten.unfold_backward(squares, (1, n_samples), 1, n_fft, hop)[:, begin:end]
        _require((sums.abs().min() < _SMALLEST_WINDOW).logical_not(), "istft: window overlap add min: 1")
    return result


def _require(true: torch.Tensor, message: str) -> None:
    aten._assert_async.msg(true, message)


_CHECKED: dict[Any, Callable[..., Any]] = {
    aten.one_hot.default: _one_hot,
    aten.quantile.default: _quantile,
    aten.nanquantile.default: _quantile,
    aten.quantile.out: _quantile,
    aten.nanquantile.out: _quantile,
    aten.istft.default: _istft,
}
