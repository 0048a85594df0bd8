"""Is the loss a mean over samples? A test with numbers, beside what its structure tells (graph/mean_loss.py).

In:  a model, its loss and a batch.
Out: nothing, or why the loss of the whole is not the mean of the losses of its parts.

Four samples of the batch are cut in several ways and orders. For each way, loss and gradients of the four must be those
of the parts, weighted by their samples:

    loss(a b c d)  =  ¼ loss(a) + ¾ loss(b c d)  =  ½ loss(d b) + ½ loss(a c)  =  …

A copy of the model computes in float64, where the two sides agree to rounding or not at all. Two functions that are
smooth and not the same agree only at exceptional points, and weights and inputs of real training are none. Labels are
whole numbers, so a loss that is a mean for some of them alone could pass; that is what the structure is looked at for.

The step that is prepared may fill the memory that there is, so the test takes little of it. Each gradient becomes one
number, along a direction that is drawn at random, and is gone before the next one is made. Where the copy, or what a
forward pass over four samples keeps, would take more than `COPY_BYTES`, and where a copy in float64 cannot be made or
run, the model itself computes, and the sides must agree to its own rounding; where activations are large, over three
samples or two.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from edgetrain.graph.capture import batches
from edgetrain.graph.capture.modes import Surroundings
from edgetrain.native.signals import raised_by_handler
from edgetrain.native.surely import surely
from edgetrain.run.checkpoint import rng_preserved

Loss = Callable[..., torch.Tensor]
Way = tuple[tuple[int, ...], ...]
# Ways to cut so many samples.
_WAYS: dict[int, tuple[Way, ...]] = {
    4: (((0,), (1, 2, 3)), ((3, 1), (0, 2)), ((2, 0, 3), (1,)), ((0,), (1,), (2,), (3,))),
    3: (((0,), (1, 2)), ((2, 0), (1,)), ((0,), (1,), (2,))),
    2: (((0,), (1,)),),
}
_WORDS = {4: "four", 3: "three", 2: "two"}
FLOOR = 1e-2
COPY_BYTES = 40_000_000  # of a copy in float64 and its activations
SAMPLES_BYTES = 60_000_000  # of the activations of the model itself
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_BLOCK = 2**18  # elements of a gradient that are looked at together


def why_no_mean(
    model: nn.Module,
    loss: Loss,
    batch: Sequence[Any],
    cut: Sequence[int],
    *,
    evaluate: bool = False,
    sample_bytes: int = 0,
    changed: Collection[str] | None = None,
) -> str | None:
    """None if the loss passes; otherwise what was found.

    cut: the positions of the items that have a row for each sample. evaluate: in eval mode, where dropout is off and
    batch norm uses its running statistics. sample_bytes: what a forward pass makes of one sample. changed: the buffers
    that a forward pass may change; all of them, if it is not known.
    """
    n_elements = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    picked = _picked(batch, cut, 4)
    with rng_preserved(), torch.enable_grad():
        if 8 * n_elements + 2 * 4 * sample_bytes <= COPY_BYTES:
            try:
                own = copy.deepcopy(model).double()
                for p, of_copy in zip(model.parameters(), own.parameters(), strict=True):
                    of_copy._backward_hooks = p._backward_hooks  # a copy has none
                return _compared(own, loss, batches.changed(picked, _in_float64), cut, evaluate=evaluate)
            except Exception as error:  # whatever it was, it is seen again below if the copy was not to blame
                if raised_by_handler(error):
                    raise
        picked = _picked(batch, cut, next(n for n in _WAYS if n == min(_WAYS) or n * sample_bytes <= SAMPLES_BYTES))
        return surely(lambda: _compared(model, loss, picked, cut, evaluate=evaluate), _as_now(model, changed))


def _in_float64(_: int, item: Any) -> Any:
    return item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item


def _picked(batch: Sequence[Any], cut: Sequence[int], count: int) -> tuple[Any, ...]:
    """So many samples from all over the batch, and labels that are not all the same."""
    n = len(batch[cut[0]])
    at = torch.tensor([min(n - 1, place * n // (count - 1)) for place in range(count)])

    def rows_of(position: int, item: Any) -> Any:
        if position not in cut:
            return item
        rows = item.detach()[at.to(item.device)]
        if not rows.is_floating_point() and rows.dtype != torch.bool and rows.numel() and (rows == rows.max()).all():
            rows = rows.clone()
            rows[1::2] = rows[1::2] - 1 if rows.max() > 0 else rows[1::2] + 1
        return rows

    return batches.changed(batch, rows_of)


def _compared(
    model: nn.Module, loss: Loss, picked: tuple[Any, ...], cut: Sequence[int], *, evaluate: bool
) -> str | None:
    if evaluate:
        model.eval()
    count = len(picked[cut[0]])
    numbers_of = _Numbers(model, loss, picked, cut)
    whole = numbers_of(range(count))
    tolerance = max(_TOLERANCE.get(dtype, 0.0) for dtype in numbers_of.dtypes)
    for way in _WAYS[count]:
        parts = [(len(rows) / count, numbers_of(rows)) for rows in way]
        for name in dict.fromkeys(
            name for gradients in (whole, *(gradients for _, gradients in parts)) for name in gradients
        ):
            value, scale = whole.get(name, (0.0, 0.0))
            mixed = math.fsum(weight * gradients.get(name, (0.0, 0.0))[0] for weight, gradients in parts)
            scale = max(scale, *(gradients.get(name, (0.0, 0.0))[1] for _, gradients in parts))
            if not abs(mixed - value) <= tolerance * scale:
                what = f"the gradient of {name}" if name else "the loss"
                all_of, cuts = _WORDS[count], " and ".join(str(len(rows)) for rows in way)
                compared = f"{value:.6g} over {all_of} samples, {mixed:.6g} as the mean over parts of {cuts}"
                return f"{what} over {all_of} samples is not the mean of {cuts}" if name else f"{what} is {compared}"
    return None


class _Numbers:
    """Of some of the samples: the loss, under "", and one number for the gradient of each parameter, under its name;
    with each, how large it can be."""

    def __init__(self, model: nn.Module, loss: Loss, picked: tuple[Any, ...], cut: Sequence[int]) -> None:
        self._model, self._loss, self._picked, self._cut = model, loss, picked, cut
        self._trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._along = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self._found: dict[str, tuple[float, float]] = {}
        self.dtypes = {p.dtype for p in model.parameters()}

    def __call__(self, rows: Sequence[int]) -> dict[str, tuple[float, float]]:
        self._found = {}
        hooks = [(p, p._backward_hooks) for _, p in self._trained]

        def put_back() -> None:
            for p, before in hooks:
                p._backward_hooks = before

        surely(lambda: self._run(rows), put_back)
        # A gradient that is zero but for rounding (of a bias before a norm) is measured against the others.
        least = FLOOR * max((size for name, (_, size) in self._found.items() if name), default=0.0)
        return {name: (value, max(size, least) if name else size) for name, (value, size) in self._found.items()}

    def _run(self, rows: Sequence[int]) -> None:
        at = torch.tensor(rows)
        taken = batches.changed(self._picked, lambda p, item: item[at.to(item.device)] if p in self._cut else item)
        value = self._loss(self._model, *taken)
        self.dtypes.add(value.dtype)
        self._found[""] = float(value.detach()), abs(float(value.detach()))
        for place, (name, p) in enumerate(self._trained):
            # The dict of hooks is one of its own: that of the user is put back as it is.
            p._backward_hooks = None if p._backward_hooks is None else p._backward_hooks.copy()
            p.register_hook(functools.partial(self._take, name, place))
        torch.autograd.grad(value, [p for _, p in self._trained], allow_unused=True)

    def _take(self, name: str, place: int, gradient: torch.Tensor) -> torch.Tensor:
        """In the place of the gradient, which is gone as soon as this returns, a zero goes on."""
        draw, value, squares = random.Random(place), 0.0, 0.0
        dense = (gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()).unsqueeze(-1)
        for part in dense.split(max(1, _BLOCK * len(dense) // max(1, dense.numel()))):
            for piece in part.reshape(-1).split(_BLOCK):
                wide = piece.cpu().double()
                value += (1 + draw.random()) * float(wide @ self._along[: len(wide)])
                squares += float(wide @ wide)
        self._found[name] = value, math.sqrt(squares)
        return torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)


def _as_now(model: nn.Module, changed: Collection[str] | None) -> Callable[[], None]:
    """A function that brings training flags and buffers back to what they are now."""
    buffers = [(b, b.detach().clone()) for name, b in model.named_buffers() if changed is None or name in changed]
    surroundings = Surroundings(model)

    def put_back() -> None:
        for b, before in buffers:
            b.detach().copy_(before)
        surroundings.put_back()

    return put_back
