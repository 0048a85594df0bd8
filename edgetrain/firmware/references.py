"""PyTorch's own runs of a training step in float32, and float64 beside each of them.

In:  model, loss, optimizer; then one batch after another, with the gradients that the firmware made of it.
Out: after each step the gradients and tensors of the firmware's float64 run, and of each pair

    float32, float64      several times: other kernels, another layout in memory, the samples in reverse

A ReLU passes a gradient on or does not, by the sign of a number. Of a million of them some lie so near to zero that
rounding decides, and then a program as exact as another has another gradient: not by an error of rounding, but by all
of that activation; and from then on, other weights. So a float64 run takes the sides of the run that it stands beside:

    float64 of its own   ───────────●──┼────────────
    float32              ──────────────┼─●──────────      the float64 run counts it as right of the bend, too

Of PyTorch's runs all activations are known, and with them the sides. Of the firmware gradients are: where they are too
far off, the activations that are undecided (nearer to a bend than FACTOR × float32's own error there) are tried on
their other side, nearest first, and each stays there if that explains what the firmware found. A wrong kernel is not
explained so. A max pool has bends too, where the second largest of a window is near to the largest.
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

FACTOR = 4.0
MOST_TRIED = 64
Batch = Sequence[torch.Tensor]
Tensors = Mapping[str, torch.Tensor]
Loss = Callable[..., torch.Tensor]
_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class Way:
    """How a float32 run is made unlike the others: kernels, layout in memory, order of the samples; and with a number
    for `jitter`, roundings of every module's results that fell otherwise, by chance."""

    onednn: bool = True
    channels_last: bool = False
    reverse: bool = False
    jitter: int = 0


WAYS = (Way(), Way(onednn=False), Way(channels_last=True), Way(reverse=True), Way(onednn=False, reverse=True))
# In a net of few numbers these have the same roundings, and all of them may be lucky.
WAYS_OF_SMALL_NETS = (*WAYS, *(Way(jitter=seed) for seed in (1, 2, 3)))


@dataclass(frozen=True, slots=True)
class Side:
    """An activation that rounding may put on the other side: call: of the functions with bends, counted in a pass.
    bend: 0 the lower, 1 the upper one. place: in the result, counted flat."""

    call: int
    bend: int
    place: int


class References:
    """All runs side by side, step by step. turned: activations that the firmware evidently has on their other side."""

    def __init__(
        self, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, *, ways: Sequence[Way] = WAYS
    ) -> None:
        self._loss = loss
        self._exact = _Twin(model, optimizer, torch.float64)
        both = [(way, Way(reverse=way.reverse)) for way in ways]
        self._pairs = [
            (_Twin(model, optimizer, torch.float32, way), _Twin(model, optimizer, torch.float64, same))
            for way, same in both
        ]
        self.turned = 0

    def step(self, batch: Batch, found: Tensors | None = None) -> None:
        """found: the firmware's gradients of this step."""
        off: list[float] = []
        for single, double in self._pairs:
            seen = _Seen()
            with seen:
                single.backward(self._loss, batch)
            sided = _Sided(like=seen.values)
            with sided:
                double.backward(self._loss, batch)
            now = [_furthest(a, b) for a, b in zip(seen.values, sided.values, strict=True)]
            off = [max(pair) for pair in zip(off or now, now, strict=True)]
        self._follow(batch, found, off)
        for twin in (self._exact, *(twin for pair in self._pairs for twin in pair)):
            twin.optimizer.step()

    def gradients(self) -> tuple[Tensors, list[tuple[Tensors, Tensors]]]:
        """Of the last step: float64 for the firmware; float32 and float64 of each pair."""
        return self._exact.gradients, [(a.gradients, b.gradients) for a, b in self._pairs]

    def tensors(self) -> tuple[Tensors, list[tuple[Tensors, Tensors]]]:
        """After the last step."""
        return self._exact.tensors(), [(a.tensors(), b.tensors()) for a, b in self._pairs]

    def _follow(self, batch: Batch, found: Tensors | None, off: Sequence[float]) -> None:
        """The float64 run for the firmware, with the sides that explain its gradients."""
        buffers = {name: value.clone() for name, value in self._exact.model.named_buffers()}

        def tried(turned: frozenset[Side]) -> list[frozenset[Side]]:
            self._exact.model.load_state_dict(buffers, strict=False)  # a pass changes running statistics
            sided = _Sided(off=[FACTOR * value for value in off], turned=turned)
            with sided:
                self._exact.backward(self._loss, batch)
            return sided.undecided()

        undecided, turned = tried(frozenset()), frozenset[Side]()
        if found is None:
            return
        own = self._own()
        best, last = _distances(found, self._exact.gradients, own), turned
        for sides in undecided[:MOST_TRIED]:
            if max((float(d.max()) for d in best if d.numel()), default=0.0) <= FACTOR:
                break
            last = turned | sides
            tried(last)
            now = _distances(found, self._exact.gradients, own)
            if sum(float((d * d).sum()) for d in now) < sum(float((d * d).sum()) for d in best):
                best, turned = now, last
        if last != turned:
            tried(turned)
        self.turned += len(turned)

    def _own(self) -> dict[str, float]:
        """Float32's own error in each gradient of this step, and no less than a rounding of its largest number."""
        own: dict[str, float] = {}
        for single, double in self._pairs:
            for name, right in double.gradients.items():
                spacing = _EPS / 2 * float(right.abs().max()) if right.numel() else 0.0
                own[name] = max(own.get(name, 0.0), _furthest(single.gradients[name], right), spacing)
        return own


def _furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def _distances(found: Tensors, exact: Tensors, own: Mapping[str, float]) -> list[torch.Tensor]:
    """How far each number of each gradient is off, in errors that float32 has itself. Of each number: one that is far
    off must not hide that others have been explained."""
    return [(value.double() - exact[name]).abs() / (own[name] or 1.0) for name, value in found.items() if name in own]


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
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and key != "step":
                    state[key] = value.to(dtype)
        self.dtype = dtype
        self.gradients: dict[str, torch.Tensor] = {}

    def backward(self, loss: Loss, batch: Batch) -> None:
        self.optimizer.zero_grad()
        with _kernels(self.way), _jitter(self.model, self.way.jitter):
            loss(self.model, *(self._given(t) for t in batch)).backward()
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def _given(self, value: torch.Tensor) -> torch.Tensor:
        value = value.to(self.dtype) if value.is_floating_point() else value
        value = value.flip(0) if self.way.reverse else value
        if not value.is_floating_point():
            return value
        images = self.way.channels_last and value.dim() == 4
        value = value.contiguous(memory_format=torch.channels_last) if images else value
        # PyTorch's group norm crashes in channels-last where its weights have a gradient and its input has none.
        return value.detach().requires_grad_()

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


@contextlib.contextmanager
def _jitter(model: nn.Module, seed: int) -> Iterator[None]:
    """Some results become the float next to them, and so do their gradients on the way back."""
    chance = torch.Generator().manual_seed(seed)
    factors = torch.tensor([1.0 - _EPS / 2, 1.0, 1.0 + _EPS])

    def other(_: nn.Module, __: Any, result: torch.Tensor) -> torch.Tensor:
        return result * factors[torch.randint(3, result.shape, generator=chance)]

    layers = [m for m in model.modules() if seed and not isinstance(m, nn.Sequential)]
    handles = [layer.register_forward_hook(other) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---- sides


_RELU = {F.relu, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_}
_CLAMP = {F.relu6, F.hardtanh, F.hardtanh_}
_MAX_POOL = {F.max_pool2d, torch.max_pool2d}
Pair = int | tuple[int, ...]


class _Seen(TorchFunctionMode):
    """values: what goes into each function that has bends, in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _RELU or func in _CLAMP or func in _MAX_POOL:
            self.values.append(args[0].detach().clone())
        return func(*args, **(kwargs or {}))


class _Sided(_Seen):
    """The sides of activations are those of another run (`like`); or their own, but for those that are `turned`.

    off: for each call, how near to a bend an activation is undecided. What is exactly at a bend is there by design.
    """

    def __init__(
        self,
        *,
        like: Sequence[torch.Tensor] | None = None,
        off: Sequence[float] | None = None,
        turned: frozenset[Side] = frozenset(),
    ) -> None:
        super().__init__()
        self._like, self._off, self._turned = like, off, turned
        self._near: dict[tuple[float, int, int, bool], set[Side]] = {}

    def undecided(self) -> list[frozenset[Side]]:
        """Nearest first, in parts of what is near. The same number at many places, as where a convolution met padding
        alone, is on one side at all of them."""
        return [frozenset(self._near[at]) for at in sorted(self._near)]

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _RELU and func not in _CLAMP and func not in _MAX_POOL:
            return func(*args, **kwargs)
        self.values.append(args[0].detach())
        by = args[0].detach() if self._like is None else self._like[len(self.values) - 1]
        if func in _MAX_POOL:
            return self._pool(_windows(*args, **kwargs), _windows(by, *args[1:], **kwargs))
        return self._bend(args[0], by, *_bounds(func, args, kwargs))

    def _bend(self, x: torch.Tensor, by: torch.Tensor, low: float, high: float) -> torch.Tensor:
        above = self._side(0, by > low, (by - low).abs())
        below = self._side(1, by < high, (by - high).abs())
        return torch.where(above, torch.where(below, x, high), low)

    def _pool(self, windows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        values, places = by.topk(min(2, by.shape[2]), dim=2)
        first = torch.ones_like(places[:, :, 0], dtype=torch.bool)
        first = self._side(0, first, (values[:, :, 0] - values[:, :, -1]) / 2)  # each of the two may be off
        return windows.gather(2, torch.where(first, places[:, :, 0], places[:, :, -1])[:, :, None])[:, :, 0]

    def _side(self, bend: int, side: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        if self._off is None:
            return side
        call = len(self.values) - 1
        off, flat = self._off[call], distance.flatten()
        near = ((flat > 0) & (flat <= off)).nonzero()[:, 0].tolist()
        for place in near:
            at = (float(flat[place]) / off, call, bend, bool(side.flatten()[place]))
            self._near.setdefault(at, set()).add(Side(call, bend, place))
        places = [turned.place for turned in self._turned if (turned.call, turned.bend) == (call, bend)]
        other = side.flatten().clone()
        other[places] = ~other[places]
        return other.reshape(side.shape)


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
