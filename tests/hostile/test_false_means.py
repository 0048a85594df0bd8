"""Attacks on the test that a loss is a mean over samples: models too large for a copy in float64, and losses that are
no mean, or one but for little. The structure of the loss is not asked here, and refuses some of them too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import UserError
from edgetrain.run import mean_test
from edgetrain.run.mean_test import why_no_mean

N, CLASSES = 2300, 5


def mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def mean_and_decay(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mean(model, x, y) + 1e-3 * sum(p.square().sum() for p in model.parameters())


def mean_with_labels_smoothed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, label_smoothing=0.1) + 0.1 * F.smooth_l1_loss(model(x), x[:, :CLASSES])


def largest(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none").max()


def middle(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(model(x), y, reduction="none")
    return (each.max() + each.min()) / 2  # of two samples it is the mean


def median(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none").median()


def batch_normalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = model(x)
    return F.cross_entropy(out - out.mean(0), y)


def scaled_by_the_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = model(x)
    return F.cross_entropy(out / (1 + out.square().mean()), y)


def pairwise(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = model(x)
    return (out[:, None] - out[None]).square().mean()


def next_to_each_other(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = model(x)
    return mean(model, x, y) + 0.1 * (out - out.roll(1, 0)).square().mean()


def square_of_the_mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).mean(0).square().sum()  # type: ignore[no-any-return]


def by_label_counts(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weight = 1 / (1 + F.one_hot(y, CLASSES).sum(0).float())
    return (F.cross_entropy(model(x), y, reduction="none") * weight[y]).mean()


def by_class_weights(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=torch.arange(1.0, CLASSES + 1))


def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


def of_one_parameter(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The same loss, with another gradient of one bias."""
    bias: Tensor = model[-1].bias  # type: ignore[index]
    return mean(model, x, y) + 0.1 * (bias.sum() - bias.detach().sum()) * len(x)


MEANS = (mean, mean_and_decay, mean_with_labels_smoothed)
NO_MEANS = (
    largest, middle, median, batch_normalised, scaled_by_the_batch, pairwise, next_to_each_other, square_of_the_mean,
    by_label_counts, by_class_weights, summed, of_one_parameter,
)  # fmt: skip


def wide() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(64, N), nn.Tanh(), nn.Linear(N, N), nn.LayerNorm(N), nn.ReLU(), nn.Linear(N, CLASSES)]
    return nn.Sequential(*layers)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(12, 64, generator=generator), torch.tensor([0, 1, 2, 1, 0, 4, 3, 3, 0, 1, 1, 0])


@pytest.mark.parametrize("sample_bytes", [0, mean_test.SAMPLES_BYTES // 3], ids=["four", "three"])
@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        *((loss, torch.float32) for loss in (*MEANS, *NO_MEANS)),
        *((loss, torch.bfloat16) for loss in (*MEANS, largest, pairwise, summed)),
    ],
)
def test_a_large_model_does_not_pass_with_a_loss_that_is_no_mean(
    loss: Callable[..., Tensor], dtype: torch.dtype, sample_bytes: int
) -> None:
    (x, y), model = batch(), wide().to(dtype)
    held = [(p, p.grad, p._backward_hooks) for p in model.parameters()]
    found = why_no_mean(model, lambda m, x, y: loss(m, x, y), (x.to(dtype), y), (0, 1), sample_bytes=sample_bytes)
    assert (found is None) == (loss in MEANS), found
    assert all(p.grad is grad and p._backward_hooks is hooks for p, grad, hooks in held)


@pytest.mark.parametrize("loss", [*MEANS, *NO_MEANS])
def test_a_step_in_micro_batches_is_prepared_for_means_alone(loss: Callable[..., Tensor]) -> None:
    model = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if loss in MEANS:
        step = et.prepare(model, loss, optimizer, batch(), micro_batches=3)
        before = float(loss(model, *batch()).detach())
        assert float(step(*batch())) == pytest.approx(before, rel=1e-5)
        return
    with pytest.raises(UserError, match="not a mean over samples"):
        et.prepare(model, loss, optimizer, batch(), micro_batches=3)


@pytest.mark.parametrize("width", [8, N])
def test_the_hooks_of_a_user_take_part_and_stay(width: int) -> None:
    """A hook that cuts off each gradient: then it is no mean."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, CLASSES))
    weight = model[2].weight
    assert isinstance(weight, Tensor)
    assert why_no_mean(model, mean, batch(), (0, 1)) is None
    weight.register_hook(lambda g: g.clamp(-1e-6, 1e-6))
    hooks = dict(weight._backward_hooks or {})
    assert why_no_mean(model, mean, batch(), (0, 1)) is not None
    assert dict(weight._backward_hooks or {}) == hooks
