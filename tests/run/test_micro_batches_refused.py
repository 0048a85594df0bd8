"""Which losses and nets micro-batches are for: what is no mean over samples is refused, and what mixes samples."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgetrain.errors import Infeasible, UserError
from edgetrain.plan.micro_batches import MicroPlan
from tests.helpers.plain import differing, relative_error, training
from tests.run.micro_nets import (
    ROUNDING,
    accumulated_step,
    batch_of,
    cross_entropy,
    deep,
    prepared,
    tokens,
    work_of,
)

pytestmark = pytest.mark.usefixtures("one_cache", "one_round")


def refused(loss: Callable[..., Tensor], net: str = "mlp", n: int = 8, **options: Any) -> str:
    work = work_of(net, loss=loss)
    before = work.snapshot()
    with pytest.raises(UserError) as error:
        prepared(work, batch_of(net, n), 2, **options)
    assert not differing(before, work.snapshot())
    return str(error.value)


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)


def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


def weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=WEIGHTS)


def weighted_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weight = WEIGHTS[y]
    return (F.cross_entropy(model(x), y, reduction="none") * weight).sum() / weight.sum()


def contrastive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(model(x), dim=1)
    return F.cross_entropy(z @ z.t() / 0.1, torch.arange(len(x)))


def root(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y).sqrt()


def fixed_divisor(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum") / 8


def centred(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = model(x)
    return F.cross_entropy(out - out.mean(0), y)


def over_samples(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.softmax(0).square().mean()


def neighbours(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = model(x)
    return (out - out.roll(1, 0)).square().mean()


def first_only(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out[0].square().mean()


def largest(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none").max()


class Amplified(torch.autograd.Function):
    """A mean as it should be, with a gradient that grows with the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.n = len(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        found: Tensor = grads[0] * ctx.n
        return found


def amplified(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(Amplified.apply(model(x)), y)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "loss",
    [
        summed, weighted, weighted_by_hand, contrastive, root, fixed_divisor, centred, over_samples, neighbours,
        first_only, largest, amplified,
    ],
)  # fmt: skip
def test_a_loss_that_is_no_mean_over_samples_is_refused(loss: Callable[..., Tensor]) -> None:
    assert "not a mean over samples" in refused(loss)
    assert "not a mean over samples" in refused(loss, allow_inexact=True)


@pytest.mark.parametrize("labels", [0, 2])
@pytest.mark.parametrize("loss", [weighted, weighted_by_hand])
def test_class_weights_are_found_though_the_labels_of_the_example_are_all_the_same(
    loss: Callable[..., Tensor], labels: int
) -> None:
    work = work_of("mlp", loss=loss)
    x, _ = batch_of("mlp", 8)
    with pytest.raises(UserError, match="not a mean over samples"):
        prepared(work, (x, torch.full((8,), labels)), 2)


def regularised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) + 0.01 * sum(p.square().sum() for p in model.parameters())


def smoothed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, label_smoothing=0.1)


def squared(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), F.one_hot(y, 5).double()) + 0.5 * F.smooth_l1_loss(model(x), x[:, :5])


def binary(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    target = (x[:, :5] > 0).double()
    return F.binary_cross_entropy_with_logits(out, target) + F.binary_cross_entropy(out.sigmoid(), target)


def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(model(x), y, reduction="none") * WEIGHTS[y]
    return each.sum() / len(x) - 0.1 * each.mean()


def huber(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.huber_loss(model(x), x[:, :5]) / 3 + F.kl_div(
        model(x).log_softmax(1), x[:, :5].softmax(1), reduction="batchmean"
    )


@pytest.mark.parametrize("loss", [regularised, smoothed, squared, binary, by_hand, huber])
def test_losses_that_are_means_are_taken(loss: Callable[..., Tensor]) -> None:
    ours = work_of("mlp", loss=loss)
    whole, batch = ours.twin(), batch_of("mlp", 9)
    step = prepared(ours, batch, 4)
    for _ in range(2):
        assert float(step(*batch)) == pytest.approx(float(whole.plain_step(*batch)), rel=ROUNDING)
    assert relative_error(ours.snapshot(), whole.snapshot()) < 1e-9


@pytest.mark.parametrize("loss", [cross_entropy, smoothed])
def test_ignored_labels_are_refused_when_they_come(loss: Callable[..., Tensor]) -> None:
    work = work_of("mlp", loss=loss)
    x, y = batch_of("mlp", 8)
    step = prepared(work, (x, y), 2)
    step(x, y)
    before = work.snapshot()
    y[-1] = -100  # in the last micro-batch, which updates
    with pytest.raises(UserError, match="ignored"):
        step(x, y)
    with pytest.raises(UserError, match="ignored"):
        step.gradients(x, y)
    assert not differing(before, work.snapshot())
    y[-1] = 0
    step(x, y)
    assert differing(before, work.snapshot())


def test_ignored_labels_behind_a_view_are_found() -> None:
    def next_token(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    torch.manual_seed(0)
    work = training(nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)), next_token)
    x = tokens(6, torch.Generator().manual_seed(1))
    step = prepared(work, (x, x), 3)
    step(x, x)
    y = x.clone()
    y[3, 2] = -100
    with pytest.raises(UserError, match="1 of 12"):
        step(x, y)


def test_a_mask_is_taken_while_it_masks_nothing() -> None:
    def masked(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum()

    work = work_of("mlp", loss=masked)
    x, y = batch_of("mlp", 8)
    mask = torch.ones(8, dtype=torch.float64)
    step = prepared(work, (x, y, mask), 2)
    step(x, y, mask)
    before = work.snapshot()
    mask[5] = 0
    with pytest.raises(UserError, match="masked"):
        step(x, y, mask)
    assert not differing(before, work.snapshot())


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 5))


def test_a_net_with_batch_norm_stays_whole_where_that_fits() -> None:
    work = training(nn.Sequential(nn.BatchNorm1d(7), deep(depth=4)), cross_entropy)
    x, y = batch_of("mlp", 64)
    free = prepared(work, (x.float(), y), 1, memory="1GB").plan
    step = prepared(work, (x.float(), y), "auto", memory=free.peak_bytes - 5000, planner="fast")
    assert not isinstance(step.plan, MicroPlan)
    with pytest.raises(Infeasible, match="micro-batches: refused"):
        prepared(work, (x.float(), y), "auto", memory=free.persistent_bytes, planner="fast")


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))


def normalised_without_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU(), nn.Linear(8, 5))


@pytest.mark.parametrize(
    ("build", "word"), [(noisy, "random numbers in 1"), (normalised, "batch norm in training mode in 1")]
)
def test_what_mixes_samples_is_refused_or_said_to_be_inexact(build: Callable[[], nn.Module], word: str) -> None:
    torch.manual_seed(0)
    work = training(build().double(), cross_entropy)
    batch = batch_of("mlp", 8)
    with pytest.raises(UserError, match=re.escape(word)) as error:
        prepared(work, batch, 2)
    assert "allow_inexact=True" in str(error.value)
    step = prepared(work, batch, 2, allow_inexact=True)
    assert step.plan.exact == "no"
    plain = work.twin()
    torch.manual_seed(5)
    found = step(*batch)
    torch.manual_seed(5)
    # What they are: the numbers of accumulating in plain PyTorch, batch norm by micro-batch.
    assert float(found) == pytest.approx(float(accumulated_step(plain, batch, (4, 4))), rel=ROUNDING)
    assert relative_error(work.snapshot(), plain.snapshot(), noise=1e-9) < 1e-9


def test_batch_norm_that_takes_statistics_of_the_batch_in_eval_mode_too_is_refused() -> None:
    work = training(normalised_without_statistics().double(), cross_entropy)
    with pytest.raises(UserError, match="batch norm in training mode in 1"):
        prepared(work, batch_of("mlp", 8), 2)
    with pytest.raises(UserError, match="cannot be told"):
        prepared(work, batch_of("mlp", 8), 2, allow_inexact=True)


def test_a_sum_is_refused_with_batch_norm_too() -> None:
    work = training(normalised().double(), summed)
    with pytest.raises(UserError, match="not a mean over samples"):
        prepared(work, batch_of("mlp", 8), 2, allow_inexact=True)


def test_settings_that_cannot_be() -> None:
    work, batch = work_of("mlp"), batch_of("mlp", 8)
    for wrong in (0, -1, 2.0, "many", True):
        with pytest.raises(UserError, match="micro_batches"):
            prepared(work, batch, wrong)  # type: ignore[arg-type]
