"""Is the loss a mean over samples? A test with numbers, beside what its structure tells (graph/mean_loss.py).

In:  a model, its loss and a batch.
Out: nothing, or why the loss of the whole is not the mean of the losses of its parts.

Four samples of the batch are cut in several ways and orders. For each way, loss and gradients of the four must be those
of the parts, weighted by their samples:

    loss(a b c d)  =  ¼ loss(a) + ¾ loss(b c d)  =  ½ loss(d b) + ½ loss(a c)  =  …

A copy of the model computes in float64, where the two sides agree to rounding or not at all. Two functions that are
smooth and not the same agree only at exceptional points, and weights and inputs of real training are none. Labels are
whole numbers, so a loss that is a mean for some of them alone could pass; that is what the structure is looked at for.
Where a copy in float64 cannot be made or run, the model itself computes, and the sides must agree to its own rounding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from edgetrain.graph.batches import changed
from edgetrain.graph.modes import Surroundings
from edgetrain.native.signals import raised_by_handler
from edgetrain.native.surely import surely
from edgetrain.run.checkpoint import rng_preserved

Loss = Callable[..., torch.Tensor]
# Ways to cut four samples.
_WAYS = (((0,), (1, 2, 3)), ((3, 1), (0, 2)), ((2, 0, 3), (1,)), ((0,), (1,), (2,), (3,)))
FLOOR = 1e-2
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


def why_no_mean(
    model: nn.Module, loss: Loss, batch: Sequence[Any], cut: Sequence[int], *, evaluate: bool = False
) -> str | None:
    """None if the loss passes; otherwise what was found.

    cut: the positions of the items that have a row for each sample. evaluate: in eval mode, where dropout is off and
    batch norm uses its running statistics.
    """
    four = _four(batch, cut)
    with rng_preserved(), torch.enable_grad():
        try:
            own = copy.deepcopy(model).double()
            wide = changed(
                four, lambda _, t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            )
            return _compared(own, loss, wide, cut, evaluate=evaluate)
        except Exception as error:  # whatever it was, it is seen again below if the copy was not to blame
            if raised_by_handler(error):
                raise
            return surely(lambda: _compared(model, loss, four, cut, evaluate=evaluate), _as_now(model))


def _four(batch: Sequence[Any], cut: Sequence[int]) -> tuple[Any, ...]:
    """Four samples from all over the batch, and labels that are not all the same."""
    n = len(batch[cut[0]])
    picked = torch.tensor([0, n // 3, (2 * n) // 3, n - 1])

    def rows_of(position: int, item: Any) -> Any:
        if position not in cut:
            return item
        rows = item.detach()[picked.to(item.device)]
        if not rows.is_floating_point() and rows.dtype != torch.bool and rows.numel() and (rows == rows.max()).all():
            rows = rows.clone()
            rows[1::2] = rows[1::2] - 1 if rows.max() > 0 else rows[1::2] + 1
        return rows

    return changed(batch, rows_of)


def _compared(model: nn.Module, loss: Loss, four: tuple[Any, ...], cut: Sequence[int], *, evaluate: bool) -> str | None:
    if evaluate:
        model.eval()
    tolerance = max(_TOLERANCE.get(t.dtype, 0.0) for t in (*model.parameters(), loss(model, *four)))
    whole, size = _numbers(model, loss, four, cut, (0, 1, 2, 3))
    for way in _WAYS:
        parts = [(len(rows) / 4, _numbers(model, loss, four, cut, rows)) for rows in way]
        for place, (name, value) in enumerate(whole.items()):
            mixed = math.fsum(weight * numbers[name] for weight, (numbers, _) in parts)
            scale = max(size[name], *(sizes[name] for _, (_, sizes) in parts))
            if not abs(mixed - value) <= tolerance * scale:
                what = "the loss" if place == 0 else f"the gradient of {name}"
                cuts = " and ".join(str(len(rows)) for rows in way)
                compared = f"{value:.6g} over four samples, {mixed:.6g} as the mean over parts of {cuts}"
                return f"{what} is {compared}" if place == 0 else f"{what} over four samples is not the mean of {cuts}"
    return None


def _numbers(
    model: nn.Module, loss: Loss, four: tuple[Any, ...], cut: Sequence[int], rows: Sequence[int]
) -> tuple[dict[str, float], dict[str, float]]:
    """The loss of these samples and one number for the gradient of each parameter; and how large each can be."""
    taken = changed(four, lambda p, item: item[torch.tensor(rows, device=item.device)] if p in cut else item)
    value = loss(model, *taken)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(value, [p for _, p in named], allow_unused=True)
    numbers, sizes = {"": float(value.detach())}, {"": abs(float(value.detach()))}
    for place, ((name, _), g) in enumerate(zip(named, gradients, strict=True)):
        if g is not None:
            along = torch.randn(g.shape, generator=torch.Generator().manual_seed(place), dtype=torch.float64)
            numbers[name] = float((g.double().cpu() * along).sum())
            sizes[name] = float(g.double().norm())
    # A gradient that is zero but for rounding (of a bias before a norm) is measured against the others.
    least = FLOOR * max((size for name, size in sizes.items() if name), default=0.0)
    return numbers, {name: max(size, least) if name else size for name, size in sizes.items()}


def _as_now(model: nn.Module) -> Callable[[], None]:
    """A function that brings training flags and buffers back to what they are now."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    surroundings = Surroundings(model)

    def put_back() -> None:
        for b, before in buffers:
            b.detach().copy_(before)
        surroundings.put_back()

    return put_back
