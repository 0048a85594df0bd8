"""Reference runs of a training step: PyTorch in float32, and in float64 for each of them.

In:  model, loss, optimizer; then one batch after another, with the sides of bends that the firmware took.
Out: after each step the gradients and tensors of the firmware's float64 run, and of each pair

    float32, float64      several times: the same sums, each time in another order (`Way`)

A ReLU passes a gradient by the sign of its input. Among a million inputs some are so near to zero that rounding
decides: an equally exact program then has another gradient, by the whole of that activation, and from then on other
weights. So a float64 run takes the sides of the run that it belongs to:

    float64 by itself    ───────────●──┼────────────
    float32              ──────────────┼─●──────────      its float64 run treats it as right of the bend, too

PyTorch's sides are recorded; the firmware's debug build reports its own (`sides.py`). These are accepted only where the
activation of its float64 run is nearer to the bend than FACTOR × float32's own error there; anything else is an error
of the firmware, and counts as one. Runs share one float64 run as long as they have its sides.
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

from edgetrain.errors import InternalError
from edgetrain.firmware.sides import Pair, Seen, Sided, Ways

FACTOR = 4.0
SMALL_IMAGE = 64  # pixels, up to which a depthwise convolution is faster tap by tap
Batch = Sequence[torch.Tensor]
Tensors = Mapping[str, torch.Tensor]
Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Way:
    """How a float32 run differs from the others, besides kernels and layout in memory.

    shuffle: a seed for the order of samples, units and channels within each layer, and for whether its images are
             transposed; None: no shuffle.
    jitter:  a seed for random changes of every module's results by one rounding; None: no jitter.
    """

    onednn: bool = True
    channels_last: bool = False
    shuffle: int | None = None
    jitter: int | None = None


# Each is another sample of float32's rounding, also in a net of dense layers, where kernels and layout change nothing.
WAYS = (
    Way(), Way(shuffle=1), Way(channels_last=True, shuffle=2), Way(shuffle=4), Way(channels_last=True, shuffle=6),
    Way(onednn=False, shuffle=3), Way(onednn=False, shuffle=8), Way(shuffle=5),
)  # fmt: skip
# In small nets another order changes little: all of these may round alike.
WAYS_OF_SMALL_NETS = (*WAYS, *(Way(jitter=seed) for seed in (1, 2, 3)))


@dataclass(frozen=True, slots=True)
class Found:
    """exact: float64 for each program of the firmware. pairs: each of PyTorch's float32 runs with its float64 run."""

    exact: list[Tensors]
    pairs: list[tuple[Tensors, Tensors]]


class References:
    """All runs, step by step. programs: how many of the firmware are compared with them, such as the scalar and the
    vectorised one. Of each, turned: activations on another side of a bend than in float64, over all steps; refused:
    those of them that rounding does not explain."""

    def __init__(
        self, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, *, programs: int = 1,
        ways: Sequence[Way] = WAYS,
    ) -> None:  # fmt: skip
        self._loss = loss
        self._plain = _Twin(model, optimizer, torch.float64)
        self._singles = [_Twin(model, optimizer, torch.float32, way) for way in ways]
        self._doubles: list[_Twin | None] = [None] * (len(ways) + programs)  # None: as `_plain`
        self.turned, self.refused = [0] * programs, [0] * programs

    def step(self, batch: Batch, taken: Sequence[Ways | None]) -> None:
        """taken: by each program, the ways of this step; None if unknown: float64's own."""
        before = {name: value.clone() for name, value in self._plain.model.named_buffers()}
        plain = self._plain.backward(self._loss, batch, Seen())
        off = [0.0] * len(plain.values)
        for n, single in enumerate(self._singles):
            seen = single.backward(self._loss, batch, Seen())
            double = self._double_run(n, batch, plain, before, Sided(seen.ways))
            off = [max(o, furthest(a, b)) for o, a, b in zip(off, seen.values, double.values, strict=True)]
        for program, ways in enumerate(taken):
            own = plain.ways if ways is None else ways
            if len(own) != len(off):
                raise InternalError(f"the firmware has {len(own)} functions with bends, the model {len(off)}")
            sided = Sided(own, [FACTOR * o for o in off])
            self._double_run(len(self._singles) + program, batch, plain, before, sided)
            self.turned[program] += sided.differing
            self.refused[program] += sided.refused
        for twin in (self._plain, *self._singles, *self._doubles):
            if twin is not None:
                twin.optimizer.step()

    def _double_run(self, n: int, batch: Batch, plain: Seen, before: Tensors, sided: Sided) -> Seen:
        """The float64 run of run n, with its sides; separate from `plain` from the first step that needs it."""
        double = self._doubles[n]
        if double is None:
            if all(map(torch.equal, plain.ways, sided.given)):
                return plain
            double = self._doubles[n] = copy.deepcopy(self._plain)
            for name, value in double.model.named_buffers():
                value.copy_(before[name])  # the pass of this step has changed statistics
        return double.backward(self._loss, batch, sided)

    def gradients(self) -> Found:
        """Of the last step."""
        return self._collect(lambda twin: twin.gradients)

    def tensors(self) -> Found:
        """After the last step."""
        return self._collect(_Twin.tensors)

    def _collect(self, of: Callable[[_Twin], Tensors]) -> Found:
        plain = of(self._plain)
        doubles = [plain if double is None else of(double) for double in self._doubles]
        singles = [of(single) for single in self._singles]
        return Found(doubles[len(singles) :], list(zip(singles, doubles, strict=False)))


def furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


class _Twin:
    """A copy of model and optimizer in another precision, with the optimizer's state."""

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

    def backward(self, loss: Loss, batch: Batch, seen: Seen) -> Seen:
        self.optimizer.zero_grad()
        inputs = [self._converted(t) for t in batch]
        order = _ByTaps() if self.dtype == torch.float64 else _order(self.way)
        with _kernels(self.way), _jitter(self.model, self.way.jitter), order, seen:
            value = loss(self.model, *inputs)
        with _kernels(self.way):
            value.backward()
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        return seen

    def _converted(self, value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        value = value.to(self.dtype)
        images = self.way.channels_last and value.dim() == 4
        value = value.contiguous(memory_format=torch.channels_last) if images else value
        # PyTorch's group norm crashes in channels-last where its weights have a gradient and its input has none.
        return value.detach().requires_grad_()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and the optimizer's state, by the names that a graph gives them."""
        tensors: dict[str, Any] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        names: dict[torch.Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        for p, state in self.optimizer.state.items():
            tensors.update({f"{names[p]}.{key}": torch.as_tensor(value) for key, value in state.items() if p in names})
        return {name: value.detach() for name, value in tensors.items() if value is not None}


@contextlib.contextmanager
def _kernels(way: Way) -> Iterator[None]:
    before, *_ = torch.backends.mkldnn.set_flags(_enabled=way.onednn, _fp32_precision=None)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before, _fp32_precision=None)


@contextlib.contextmanager
def _jitter(model: nn.Module, seed: int | None) -> Iterator[None]:
    """Moves some results to the next float, and so their gradients."""
    if seed is None:
        yield
        return
    chance = torch.Generator().manual_seed(seed)
    eps = torch.finfo(torch.float32).eps
    factors = torch.tensor([1.0 - eps / 2, 1.0, 1.0 + eps])

    def other(_: nn.Module, __: Any, result: torch.Tensor) -> torch.Tensor:
        return result * factors[torch.randint(3, result.shape, generator=chance)]

    handles = [m.register_forward_hook(other) for m in model.modules() if not isinstance(m, nn.Sequential)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---- other orders of the same sums


def _order(way: Way) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if way.shuffle is None else _Shuffled(way.shuffle)


class _ByTaps(TorchFunctionMode):
    """Depthwise convolutions of small images, all channels at once: PyTorch's float64 kernel is slow."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.conv2d and len(args) == 7 and not kwargs and not isinstance(args[4], str):
            x, w, bias, stride, padding, dilation, groups = args
            if x.dim() == 4 and groups == x.shape[1] == w.shape[0] and x.shape[2] * x.shape[3] <= SMALL_IMAGE:
                taps = F.unfold(x, w.shape[2:], dilation, padding, stride).unflatten(1, (groups, -1))
                shape = F.conv2d(x.to("meta"), w.to("meta"), None, *args[3:]).shape
                y = (taps * w.reshape(groups, -1, 1)).sum(2).reshape(shape)
                return y if bias is None else y + bias[:, None, None]
        return func(*args, **(kwargs or {}))


class _Shuffled(TorchFunctionMode):
    """Permutes the operands of dense layers, convolutions and norms, and their results back.

    A net with permuted units is the same function; its sums, forward and backward, are rounded in another order.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator, self._transpose = torch.Generator().manual_seed(seed), seed % 2 == 1

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args:  # by keyword: not shuffled
            return func(**kwargs)
        if func is F.linear and args[0].dim() > 1:
            return self._linear(*args, **kwargs)
        if func is F.conv2d and args[0].dim() == 4:
            return self._conv2d(*args, **kwargs)
        if func in (F.batch_norm, F.group_norm):
            samples = self._permutation(args[0].shape[0])
            y = func(self._transposed(args[0].index_select(0, samples)), *args[1:], **kwargs)
            return self._transposed(y).index_select(0, samples.argsort())
        return func(*args, **kwargs)

    def _linear(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        samples, inputs, outputs = map(self._permutation, (x.shape[0], w.shape[1], w.shape[0]))
        x, w = x.index_select(0, samples).index_select(-1, inputs), w.index_select(0, outputs).index_select(1, inputs)
        y = F.linear(x, w, None if bias is None else bias.index_select(0, outputs))
        return y.index_select(-1, outputs.argsort()).index_select(0, samples.argsort())

    def _conv2d(
        self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, stride: Pair = 1,
        padding: Pair | str = 0, dilation: Pair = 1, groups: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        samples = self._permutation(x.shape[0])
        inputs, outputs = (self._permutation(n) if groups == 1 else torch.arange(n) for n in (w.shape[1], w.shape[0]))
        x, w = x.index_select(0, samples), w.index_select(0, outputs).index_select(1, inputs)
        x = x.index_select(1, inputs) if groups == 1 else x
        bias = None if bias is None else bias.index_select(0, outputs)
        steps: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
        steps = {name: self._pair(value) for name, value in steps.items()}
        y = self._transposed(F.conv2d(self._transposed(x), self._transposed(w), bias, groups=groups, **steps))
        return y.index_select(1, outputs.argsort()).index_select(0, samples.argsort())

    def _permutation(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self._generator)

    def _transposed(self, x: torch.Tensor) -> torch.Tensor:
        """Rows and columns swapped."""
        return x.transpose(2, 3).contiguous() if self._transpose and x.dim() == 4 else x

    def _pair(self, value: Pair | str) -> Pair | str:
        return tuple(reversed(value)) if self._transpose and isinstance(value, tuple | list) else value
