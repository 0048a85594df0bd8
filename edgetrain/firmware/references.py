"""PyTorch's own runs of a training step: the exact one, and those that are as right as float32 can be.

In:  model, loss, optimizer, and one batch after another. Out: after each step, gradients and tensors of

    exact     float64
    plain     float32, several times: the same sums in another order
    bent      float64, with the activations that float32 cannot decide on the other side of their bend

A ReLU passes a gradient on or does not, by the sign of a number. Of a million of them some lie so near to zero that
rounding decides, and then a program as exact as PyTorch has another gradient: not by an error of rounding, but by all of
that activation. Which they are is known: those whose float64 value is nearer to the bend than float32 was off there.

    float64   ───────────●──┼────────────      ● undecided: within the error of the bend
    float32's own error  ├──┼──┤               bent: as if it were on the right

A max pool has bends too, where the second largest of a window is as near to the largest.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

Batch = Sequence[torch.Tensor]
Tensors = Mapping[str, torch.Tensor]
Loss = Callable[..., torch.Tensor]
_COIN_SEED = 0


@dataclass(frozen=True, slots=True)
class Way:
    """How a float32 run is made unlike the others: kernels, layout in memory, order of the samples."""

    onednn: bool = True
    channels_last: bool = False
    reverse: bool = False


WAYS = (Way(), Way(onednn=False), Way(channels_last=True), Way(reverse=True), Way(onednn=False, reverse=True))


class References:
    """All runs side by side, step by step."""

    def __init__(self, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer) -> None:
        self._loss = loss
        self._exact = _Twin(model, optimizer, torch.float64)
        self._plain = [_Twin(model, optimizer, torch.float32, way) for way in WAYS]
        self._bent = [_Twin(model, optimizer, torch.float64) for _ in range(2)]
        self._coins = torch.Generator().manual_seed(_COIN_SEED)

    def step(self, batch: Batch) -> None:
        seen = _Seen()
        with seen:
            self._exact.step(self._loss, batch)
        off = [0.0] * len(seen.values)
        for twin in self._plain:
            here = _Seen(reverse=twin.way.reverse)
            with here:
                twin.step(self._loss, batch)
            off = [max(known, _off(a, b)) for known, a, b in zip(off, here.values, seen.values, strict=True)]
        for twin, coins in zip(self._bent, (None, self._coins), strict=True):
            with _Bent(off, coins):
                twin.step(self._loss, batch)

    def gradients(self) -> tuple[Tensors, list[Tensors], list[Tensors]]:
        """Of the last step: exact, plain, bent."""
        return self._exact.gradients, [t.gradients for t in self._plain], [t.gradients for t in self._bent]

    def tensors(self) -> tuple[Tensors, list[Tensors], list[Tensors]]:
        """After the last step: exact, plain, bent."""
        return self._exact.tensors(), [t.tensors() for t in self._plain], [t.tensors() for t in self._bent]


def _off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).abs().max()) if a.numel() else 0.0


class _Twin:
    """A copy of model and optimizer in some precision, with all state of the optimizer."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, way: Way | None = None
    ) -> None:
        both: tuple[nn.Module, torch.optim.Optimizer] = copy.deepcopy((model, optimizer))
        self.model, self.optimizer = both
        self.way = way or Way()
        self.model.to(dtype)
        if self.way.channels_last:
            self.model.to(memory_format=torch.channels_last)
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and key != "step":
                    state[key] = value.to(dtype)
        self.dtype = dtype
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self, loss: Loss, batch: Batch) -> None:
        self.optimizer.zero_grad()
        with _kernels(self.way):
            loss(self.model, *(self._given(t) for t in batch)).backward()
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()

    def _given(self, value: torch.Tensor) -> torch.Tensor:
        value = value.to(self.dtype) if value.is_floating_point() else value
        value = value.flip(0) if self.way.reverse else value
        images = self.way.channels_last and value.dim() == 4
        return value.contiguous(memory_format=torch.channels_last) if images else value

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and the optimizer's state, by the names that a graph gives them."""
        found: dict[str, Any] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        names: dict[torch.Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        for p, state in self.optimizer.state.items():
            found.update({f"{names[p]}.{key}": torch.as_tensor(value) for key, value in state.items() if p in names})
        return {name: value.detach() for name, value in found.items() if value is not None}


@contextlib.contextmanager
def _kernels(way: Way) -> Iterator[None]:
    before, *_ = torch.backends.mkldnn.set_flags(_enabled=way.onednn, _fp32_precision=None)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before, _fp32_precision=None)


# ---- bends


_RELU = {F.relu, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_}
_CLAMP = {F.relu6, F.hardtanh, F.hardtanh_}
_MAX_POOL = {F.max_pool2d, torch.max_pool2d}
Pair = int | Sequence[int]


class _Seen(TorchFunctionMode):
    """Keeps what goes into each function that has bends, in the order of their calls."""

    def __init__(self, *, reverse: bool = False) -> None:
        super().__init__()
        self.values: list[torch.Tensor] = []
        self._reverse = reverse

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _RELU or func in _CLAMP or func in _MAX_POOL:
            value = args[0].detach()
            self.values.append(value.flip(0) if self._reverse else value.clone())
        return func(*args, **(kwargs or {}))


class _Bent(TorchFunctionMode):
    """Activations within `off` of a bend, one number a call, lie on its other side; with coins, where the coin says so.

    What is exactly at the bend is there by design, not by rounding, and stays.
    """

    def __init__(self, off: Sequence[float], coins: torch.Generator | None) -> None:
        super().__init__()
        self._off, self._coins = iter(off), coins

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RELU or func in _CLAMP:
            return self._bend(args[0], next(self._off), *_bounds(func, args, kwargs))
        if func in _MAX_POOL:
            return self._pool(_windows(*args, **kwargs), next(self._off))
        return func(*args, **kwargs)

    def _bend(self, x: torch.Tensor, off: float, low: float, high: float) -> torch.Tensor:
        above = (x > low) ^ self._turned((x - low).abs(), off)
        below = (x < high) ^ self._turned((x - high).abs(), off)
        return torch.where(above, torch.where(below, x, high), low)

    def _pool(self, windows: torch.Tensor, off: float) -> torch.Tensor:
        values, places = windows.topk(min(2, windows.shape[2]), dim=2)
        other = self._turned(values[:, :, 0] - values[:, :, -1], 2 * off)  # each of the two may be off
        place = torch.where(other, places[:, :, -1], places[:, :, 0])
        return windows.gather(2, place[:, :, None])[:, :, 0]

    def _turned(self, distance: torch.Tensor, off: float) -> torch.Tensor:
        near = (distance > 0) & (distance <= off)
        if self._coins is None:
            return near
        return near & (torch.rand(near.shape, generator=self._coins) < 0.5)


def _bounds(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, float]:
    """Below and above which an activation passes nothing on."""
    if func in _RELU:
        return 0.0, float("inf")
    if func is F.relu6:
        return 0.0, 6.0
    given = dict(zip(("input", "min_val", "max_val"), args, strict=False)) | dict(kwargs)
    return float(given.get("min_val", -1.0)), float(given.get("max_val", 1.0))


def _windows(
    x: torch.Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> torch.Tensor:  # fmt: skip
    """What a max pool chooses from: [B, C, places of a window, P, Q]."""
    pooled = F.max_pool2d(x.detach(), kernel_size, stride, padding, dilation, ceil_mode)
    kernel, pad, far = _pair(kernel_size), _pair(padding), _pair(dilation)
    steps = _pair(stride or kernel_size)
    need = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(pooled.shape[2:], steps, far, kernel, strict=True)]
    after = [max(n - size - p, 0) for n, size, p in zip(need, x.shape[2:], pad, strict=True)]
    wide = F.pad(x, (pad[1], after[1], pad[0], after[0]), value=-float("inf"))[:, :, : need[0], : need[1]]
    found = F.unfold(wide, kernel, far, 0, steps)
    return found.reshape(*x.shape[:2], kernel[0] * kernel[1], *pooled.shape[2:])


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
