"""On which side of a bend an activation lies: recorded in one run of PyTorch, imposed on another.

In:  a forward pass of a model within `Seen` or `Sided`.
Out: for each function with bends, in the order of the calls, its input and the way of each element.

A way is one byte, as firmware's debug build writes it:

    ReLU, ReLU6 …     0 ──low── 1 ──high── 2        a value exactly at a bend is outside
    max pool          the argmax in its window, row by row

A program with another rounding may differ only near a bend: by at most `reach`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from edgetrain.errors import InternalError

_RELU = {F.relu, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_}
_CLAMP = {F.relu6, F.hardtanh, F.hardtanh_}
_MAX_POOL = {F.max_pool2d, torch.max_pool2d, F.max_pool2d_with_indices}
_IN_PLACE = {torch.relu_, torch.Tensor.relu_, F.hardtanh_}
Pair = int | tuple[int, ...]
Ways = Sequence[torch.Tensor]


class Seen(TorchFunctionMode):
    """values: the inputs of functions with bends, in the order of the calls. ways: on which side they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[torch.Tensor] = []
        self.ways: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = _input_first(args, kwargs or {})
        if func in _MAX_POOL:
            self._keep(args[0], _windows(args[0].detach(), *args[1:], **kwargs).argmax(2))
        elif func in _RELU or func in _CLAMP:
            self._keep(args[0], _way(args[0].detach(), *_bounds(func, args, kwargs)))
        return func(*args, **kwargs)

    def _keep(self, value: torch.Tensor, way: torch.Tensor) -> None:
        self.values.append(value.detach().clone())  # the function may overwrite it
        self.ways.append(way.to(torch.uint8))


class Sided(Seen):
    """Imposes ways; with `reach`, for each call, only those within it.

    With reach, differing: how many of them are not the ways of this run by itself; refused: how many are out of reach.
    """

    def __init__(self, given: Ways, reach: Sequence[float] | None = None) -> None:
        super().__init__()
        self.given, self._reach = given, reach
        self.differing = self.refused = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = _input_first(args, kwargs or {})
        if func in _MAX_POOL:
            pooled = self._pool(args[0], _windows(*args, **kwargs))
            return (pooled, func(*args, **kwargs)[1]) if func is F.max_pool2d_with_indices else pooled
        if func in _RELU or func in _CLAMP:
            bent = self._bend(args[0], *_bounds(func, args, kwargs))
            return args[0].copy_(bent) if func in _IN_PLACE or kwargs.get("inplace") else bent
        return func(*args, **kwargs)

    def _bend(self, x: torch.Tensor, low: float, high: float) -> torch.Tensor:
        way = self._next(x.shape)
        if self._reach is not None:
            value = x.detach()
            beyond = torch.where(way == 1, torch.maximum(low - value, value - high), value - low)
            beyond = torch.where(way == 2, high - value, beyond)
            way = self._within(way, _way(value, low, high), beyond)
        self._keep(x, way)
        return torch.where(way == 1, x, torch.where(way == 2, high, low))

    def _pool(self, x: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        maximum, own = windows.detach().max(2)
        way = self._next(own.shape).long()
        if self._reach is not None:
            inside = way.clamp(max=windows.shape[2] - 1)  # a wrong program may report anything
            chosen = windows.detach().gather(2, inside[:, :, None])[:, :, 0]
            beyond = torch.where(
                way == inside, (maximum - chosen) / 2, float("inf")
            )  # each of the two may have an error
            way = self._within(way, own, beyond)
        self._keep(x, way)
        return windows.gather(2, way[:, :, None])[:, :, 0]

    def _next(self, shape: torch.Size) -> torch.Tensor:
        call = len(self.values)
        if call >= len(self.given) or self.given[call].shape != shape:
            raise InternalError(f"call {call} of a function with bends is not the one whose sides are known")
        return self.given[call]

    def _within(self, given: torch.Tensor, own: torch.Tensor, beyond: torch.Tensor) -> torch.Tensor:
        assert self._reach is not None
        other = given != own
        far = other & ~(beyond <= self._reach[len(self.values)])  # NaN is far
        self.differing += int(other.sum()) - int(far.sum())
        self.refused += int(far.sum())
        return torch.where(far, own, given)


def _input_first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """A call with its input as positional argument."""
    if args or "input" not in kwargs:
        return args, kwargs
    return (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}


def _way(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (x > low).to(torch.uint8) + (x >= high).to(torch.uint8)


def _bounds(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, float]:
    """Below and above which an activation has no gradient."""
    if func in _RELU:
        return 0.0, float("inf")
    if func is F.relu6:
        return 0.0, 6.0
    bounds = dict(zip(("input", "min_val", "max_val"), args, strict=False)) | dict(kwargs)
    return float(bounds.get("min_val", -1.0)), float(bounds.get("max_val", 1.0))


def _windows(
    x: torch.Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The windows of a max pool: [B, C, R × S, P, Q]."""
    pooled = F.max_pool2d(x.detach(), kernel_size, stride, padding, dilation, ceil_mode)
    kernel, pad, far = _pair(kernel_size), _pair(padding), _pair(dilation)
    steps = _pair(stride or kernel_size)
    need = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(pooled.shape[2:], steps, far, kernel, strict=True)]
    after = [max(n - size - p, 0) for n, size, p in zip(need, x.shape[2:], pad, strict=True)]
    wide = F.pad(x, (pad[1], after[1], pad[0], after[0]), value=-float("inf"))[:, :, : need[0], : need[1]]
    unfolded = F.unfold(wide, kernel, far, 0, steps)
    return unfolded.reshape(*x.shape[:2], kernel[0] * kernel[1], *pooled.shape[2:])


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
