"""A batch in micro-batches trains as the whole batch does, in less memory; or is refused, with the reason."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from nets import CASES
from plain import OptimizerMaker, Training, differing, relative_error, sgd, training
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.costs.table import Costs
from edgetrain.errors import Infeasible, UserError
from edgetrain.graph.ir import Graph
from edgetrain.native import arena
from edgetrain.ops import update
from edgetrain.plan.micro_batches import MicroPlan, counts, sizes_of
from edgetrain.plan.plan import Exact, Plan, Updates
from edgetrain.plan.planning import PLANNERS
from edgetrain.plan.validate import validate
from edgetrain.run.micro_batches import MicroStep
from edgetrain.run.step import Step

ROUNDING = 1e-11
pytestmark = pytest.mark.usefixtures("one_cache", "one_round")
needs_arena = pytest.mark.skipif(not arena.available(), reason=str(arena.missing()))


# ---- nets, none of which lets a sample see another -------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 5))


def convolutions() -> nn.Module:
    body = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.GELU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))


def group_norm() -> nn.Module:
    body = [nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4)]
    return nn.Sequential(*body, nn.SiLU(), nn.Flatten(), nn.Linear(4 * 16, 5))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.embedding(x)).mean(1))
        return out


def frozen_norm() -> nn.Module:
    """Batch norm in eval mode: each sample alone."""
    net = nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))
    net[1].eval()
    return net


def floats(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, generator: torch.randn(n, *shape, generator=generator, dtype=torch.float64)


def tokens(n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(11, (n, 6), generator=generator)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Tensor]]] = {
    "mlp": (mlp, floats(7)),
    "convolutions": (convolutions, floats(3, 6, 6)),
    "group norm": (group_norm, floats(3, 6, 6)),
    "transformer": (Transformer, tokens),
    "frozen norm": (frozen_norm, floats(7)),
}


def adam(parameters: Any) -> torch.optim.Optimizer:
    # A large eps: where a gradient is zero but for rounding, Adam would make whole steps of the rounding.
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01, amsgrad=True, eps=1e-3)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def work_of(net: str, optimizer: OptimizerMaker = sgd, loss: Callable[..., Tensor] = cross_entropy) -> Training:
    torch.manual_seed(2)
    model = NETS[net][0]().double()
    return training(model, loss, optimizer)


def batch_of(net: str, n: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return NETS[net][1](n, generator), torch.randint(5, (n,), generator=generator)


def prepared(work: Training, batch: Sequence[Any], count: int | Literal["auto"], **options: Any) -> Step:
    return et.prepare(work.model, work.loss, work.optimizer, tuple(batch), micro_batches=count, **options)


def accumulated_step(work: Training, batch: tuple[Tensor, ...], sizes: Sequence[int]) -> Tensor:
    """Gradient accumulation as everybody writes it."""
    total, start, n = torch.zeros(()), 0, sum(sizes)
    for size in sizes:
        part = work.loss(work.model, *(t[start : start + size] for t in batch)) * (size / n)
        part.backward()
        total, start = total + part.detach(), start + size
    work.optimizer.step()
    work.optimizer.zero_grad()
    return total


def micro(step: Step, *batch: Any) -> MicroStep:
    found = step.of_shape(*batch)
    assert isinstance(found, MicroStep)
    return found


def plan_of(step: Step) -> MicroPlan:
    assert isinstance(step.plan, MicroPlan)
    return step.plan


# ---- the same numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("net", "optimizer", "count"),
    [
        *((net, optimizer, count) for net in NETS for optimizer, count in ((sgd, 2), (adam, 4), (sgd, 5))),
        *(("mlp", optimizer, count) for optimizer, count in ((sgd, 1), (adam, 1), (adam, 2), (sgd, 8))),
    ],
)
def test_trains_as_the_whole_batch_and_as_plain_accumulation(net: str, optimizer: OptimizerMaker, count: int) -> None:
    ours = work_of(net, optimizer)
    whole, plain = ours.twin(), ours.twin()
    step = prepared(ours, batch_of(net, 8), count)
    assert step.plan.exact == ("bitwise" if count == 1 else "rounding")
    for seed in range(3):
        batch = batch_of(net, 8, seed)
        loss = step(*batch)
        assert float(loss) == pytest.approx(float(whole.plain_step(*batch)), rel=ROUNDING)
        assert float(loss) == pytest.approx(float(accumulated_step(plain, batch, sizes_of(8, count))), rel=ROUNDING)
    assert relative_error(ours.snapshot(), whole.snapshot(), noise=1e-9) < 1e-9
    assert relative_error(ours.snapshot(), plain.snapshot(), noise=1e-9) < 1e-9


TAKEN = (
    "conv2d depthwise", "layer norm", "attention causal", "multi-head attention", "LSTM cell", "residual",
    "dense connections", "tied weights", "embedding with padding", "custom function", "checkpoint without dropout",
    "write through a transpose",
)  # fmt: skip


@pytest.mark.parametrize("case", [case for case in CASES if case.name in TAKEN], ids=lambda case: case.name)
def test_gradients_are_those_of_the_whole_batch(case: Any) -> None:
    def loss(model: nn.Module, *batch: Any) -> Tensor:
        return torch.tanh(model(*batch)).square().mean()

    model, batch = case.model(), case.batch()
    work = training(model, loss)
    expected = prepared(work, batch, 1).gradients(*batch)
    before = work.snapshot()
    found = prepared(work, batch, 2).gradients(*batch)
    assert len(TAKEN) == len({case.name for case in CASES} & set(TAKEN))
    assert relative_error(found, expected, noise=1e-12) < 1e-9
    assert not differing(before, work.snapshot())


@pytest.mark.parametrize("most", [0.05, 100.0])
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("net", ["mlp", "convolutions"])
def test_the_norm_is_that_of_the_gradients_added_up(net: str, optimizer: OptimizerMaker, most: float) -> None:
    ours = work_of(net, optimizer)
    whole = ours.twin()
    batch = batch_of(net, 9)
    step = prepared(ours, batch, 4, clip_norm=most)
    clipped = prepared(whole, batch, 1, clip_norm=most)
    assert relative_error(step.gradients(*batch), clipped.gradients(*batch)) < 1e-9
    for seed in range(3):
        batch = batch_of(net, 9, seed)
        found = step(*batch)
        loss = whole.loss(whole.model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(whole.model.parameters(), most)
        whole.optimizer.step()
        whole.optimizer.zero_grad()
        assert float(found) == pytest.approx(float(loss.detach()), rel=ROUNDING)
    assert relative_error(ours.snapshot(), whole.snapshot()) < 1e-9


def test_a_smaller_last_batch_is_the_mean_over_its_samples() -> None:
    ours = work_of("mlp")
    whole = ours.twin()
    step = prepared(ours, batch_of("mlp", 12), 4)
    for n in (12, 7, 3, 1, 12):
        batch = batch_of("mlp", n, seed=n)
        assert float(step(*batch)) == pytest.approx(float(whole.plain_step(*batch)), rel=ROUNDING)
        sizes = step.plan.sizes if isinstance(step.plan, MicroPlan) else (n,)
        assert sizes == sizes_of(n, 4)
    assert relative_error(ours.snapshot(), whole.snapshot()) < 1e-9


def test_sizes_differ_by_one_sample_at_most() -> None:
    assert sizes_of(12, 4) == (3, 3, 3, 3)
    assert sizes_of(10, 4) == (3, 3, 2, 2)
    assert sizes_of(3, 8) == (1, 1, 1)
    assert counts(12) == [1, 2, 4, 8, 12]
    assert counts(1) == [1]


def test_learning_rate_schedulers_and_checkpointed_state_are_seen() -> None:
    ours = work_of("mlp", adam)
    whole = ours.twin()
    step = prepared(ours, batch_of("mlp", 8), 2)
    for seed, lr in enumerate((0.1, 0.01, 0.3)):
        for work in (ours, whole):
            work.optimizer.param_groups[0]["lr"] = lr
        step(*batch_of("mlp", 8, seed))
        whole.plain_step(*batch_of("mlp", 8, seed))
    assert relative_error(ours.snapshot(), whole.snapshot()) < 1e-9


# ---- memory ---------------------------------------------------------------------------------------------------


def deep(width: int = 24, depth: int = 8) -> nn.Module:
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(7, width), *layers, nn.Linear(width, 5))


def deep_work(optimizer: OptimizerMaker = sgd, depth: int = 8) -> Training:
    torch.manual_seed(4)
    return training(deep(depth=depth), cross_entropy, optimizer)


def deep_batch(n: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    x, y = batch_of("mlp", n, seed)
    return x.float(), y


@needs_arena
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("planner", [p for p in PLANNERS if p not in ("auto", "page-only", "poet")])
def test_every_planner_keeps_its_account_to_the_byte(planner: str, optimizer: OptimizerMaker) -> None:
    work, batch = deep_work(optimizer), deep_batch(64)
    kept = work.twin()
    whole = prepared(kept, batch, 1, memory="1GB")
    free = prepared(work.twin(), batch, 4, memory="1GB").plan
    part = 1.0 if planner in ("keep-all",) else 0.75
    budget = free.persistent_bytes + round(part * (free.peak_bytes - free.persistent_bytes))
    step = prepared(work, batch, 4, memory=budget, planner=planner, plan_time_s=0.25)
    plan = plan_of(step)
    assert plan.sizes == (16, 16, 16, 16)
    assert plan.peak_bytes <= budget < whole.plan.peak_bytes
    for seed in range(3):
        step(*deep_batch(64, seed))
        whole(*deep_batch(64, seed))
        found = micro(step, *batch)
        assert found.most_bytes is not None
        assert found.most_bytes + plan.persistent_bytes == plan.peak_bytes
    assert relative_error(work.snapshot(), kept.snapshot(), noise=1e-5) < 1e-4  # float32
    for one in {id(one): one for one in plan.parts}.values():
        assert one.peak_bytes <= budget
    assert plan.keep_all_time_s is not None
    if planner not in ("keep-all",):
        assert plan.recomputed or any(one.recomputed for one in plan.parts)


@pytest.mark.parametrize("planner", ["auto", "page-only", "poet"])
def test_planners_by_modelled_costs_plan_micro_batches_too(planner: str) -> None:
    work, batch = deep_work(depth=4), deep_batch(256)
    budget: int | None = None

    def plan_one(graph: Graph, exact: Exact, updates: Updates | None, beside: int) -> tuple[Plan, Costs | None]:
        costs = et.model_costs(graph, "rpi4")
        chosen = "auto" if budget is None else planner
        limit = et.Budget(None if budget is None else budget - beside)
        return et.plan(graph, costs, limit, planner=chosen, time_limit_s=0.5, updates=updates, exact=exact), costs

    def keep_all_bytes(graph: Graph, updates: Updates | None) -> int:
        return et.plan(graph, et.model_costs(graph, "rpi4"), et.Budget(), updates=updates).peak_bytes

    parts = prepared(work, batch, 1).in_micro_batches(plan_one, keep_all_bytes, allow_inexact=False)
    free = parts.planned(batch, 4).plan
    budget = free.persistent_bytes + round(0.75 * (free.peak_bytes - free.persistent_bytes))
    made = parts.planned(batch, 4)
    assert made.plan.peak_bytes <= budget
    assert made.plan.time_s is not None
    assert free.time_s is not None
    assert made.plan.time_s > free.time_s
    assert made.plan.energy_j is not None
    for size, one in made.plan.accumulating:
        validate(made.graphs.accumulating[size], one)


@needs_arena
@pytest.mark.parametrize("memory_format", ["auto", "preserve"])
def test_running_statistics_are_counted_once_more(memory_format: str) -> None:
    layers = [m for _ in range(2) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6())]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    torch.manual_seed(0)
    work = training(nn.Sequential(nn.Conv2d(3, 8, 3), *layers, *head), cross_entropy)
    generator = torch.Generator().manual_seed(3)
    batch = torch.randn(8, 3, 12, 12, generator=generator), torch.randint(5, (8,), generator=generator)
    twin = work.twin()
    step = prepared(work, batch, 4, memory="1GB", allow_inexact=True, memory_format=memory_format)
    for _ in range(3):
        found = step(*batch)
        assert float(found) == pytest.approx(float(accumulated_step(twin, batch, (2, 2, 2, 2))), rel=1e-3)
    statistics = sum(b.numel() * b.element_size() for b in work.model.buffers())
    plan, taken = plan_of(step), micro(step, *batch).most_bytes
    assert taken is not None
    assert plan.exact == "no"
    assert plan.peak_bytes == taken + plan.persistent_bytes + statistics
    for name, value in work.snapshot().items():
        if "running" in name or "tracked" in name:
            assert torch.allclose(value.double(), twin.snapshot()[name].double(), rtol=1e-3)


def test_a_loss_that_changes_is_verified_again() -> None:
    reduction = {"how": "mean"}

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction=reduction["how"])

    work, batch = work_of("mlp", loss=loss), batch_of("mlp", 8)
    step = prepared(work, batch, 2)
    step(*batch)
    reduction["how"] = "sum"
    before = work.snapshot()
    with pytest.raises(UserError, match="not a mean over samples"):
        step(*batch)
    assert not differing(before, work.snapshot())


@needs_arena
def test_clipping_is_in_the_account(tmp_path: Path) -> None:
    work, batch = deep_work(), deep_batch(64)
    step = prepared(work, batch, 4, memory="1GB", clip_norm=1.0)
    plan = plan_of(step)
    assert plan.sizes == (16, 16, 16, 16, 0)
    assert "4 micro-batches of 16 samples" in str(plan)
    for _ in range(2):
        step(*batch)
        taken = micro(step, *batch).most_bytes
        assert taken is not None
        assert plan.peak_bytes == taken + plan.persistent_bytes
    plan.save(tmp_path / "plan.json")
    assert MicroPlan.load(tmp_path / "plan.json") == plan
    assert step.trace_memory(*batch).peak_bytes <= plan.peak_bytes


@needs_arena
def test_micro_batches_take_far_less_than_the_whole_batch() -> None:
    work, batch = deep_work(), deep_batch(256)
    whole = prepared(work, batch, 1, memory="1GB").plan
    plan = plan_of(prepared(work, batch, 16, memory="1GB"))

    def activations(made: Any) -> int:
        return int(made.peak_bytes - made.persistent_bytes)

    assert activations(plan) < activations(whole) / 10
    # What lasts is the same and one accumulator for each parameter.
    sums = sum(p.numel() * 4 for p in work.model.parameters())
    assert plan.persistent_bytes == whole.persistent_bytes + sums
    assert work.snapshot().keys()  # nothing ran


def test_the_parts_of_a_plan_are_valid_and_count_what_lasts(tmp_path: Path) -> None:
    work, batch = deep_work(adam), deep_batch(10)
    step = prepared(work, batch, 4)
    plan, found = plan_of(step), micro(step, *batch)
    graphs = {3: found._accumulating[3].graph, 2: found._accumulating[2].graph}
    for size, one in plan.accumulating:
        validate(graphs[size], one)
        assert one.persistent_bytes == plan.persistent_bytes
    assert plan.ending is not None
    validate(found.graph, plan.ending)
    plan.save(tmp_path / "plan.json")
    assert MicroPlan.load(tmp_path / "plan.json") == plan
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UserError, match="not a plan file in micro-batches"):
        MicroPlan.load(tmp_path / "other.json")


@needs_arena
def test_traced_memory_is_that_of_the_plan() -> None:
    work, batch = deep_work(), deep_batch(16)
    step = prepared(work, batch, 4)
    before = work.snapshot()
    assert step.trace_memory(*batch).peak_bytes == plan_of(step).peak_bytes
    assert not differing(before, work.snapshot())


@needs_arena
def test_auto_takes_as_few_micro_batches_as_do() -> None:
    work, batch = deep_work(depth=3), deep_batch(256)
    whole = prepared(work.twin(), batch, "auto", memory="1GB", planner="fast").plan
    assert not isinstance(whole, MicroPlan)
    with pytest.raises(Infeasible) as alone:
        prepared(work.twin(), batch, 1, memory=whole.persistent_bytes, planner="fast")
    told = re.search(r'micro-batches: (\d+) bytes .* would do with micro_batches="auto"', str(alone.value))
    assert told is not None
    assert prepared(work.twin(), batch, "auto", memory=int(told[1]), planner="fast").plan.peak_bytes <= int(told[1])
    tight = round(0.8 * alone.value.smallest_bytes)  # recomputing alone does not bring it down to that
    step = prepared(work, batch, "auto", memory=tight, planner="fast")
    plan = plan_of(step)
    assert 2 <= len(plan.sizes) <= 64
    assert plan.peak_bytes <= tight
    twin = work.twin()
    assert float(step(*batch)) == pytest.approx(float(twin.plain_step(*batch)), rel=1e-5)
    with pytest.raises(Infeasible) as answer:
        prepared(work, batch, "auto", memory=plan.persistent_bytes, planner="fast")
    assert "micro-batches" in str(answer.value)
    smallest = answer.value.smallest_bytes
    assert prepared(work, batch, "auto", memory=smallest, planner="fast").plan.peak_bytes <= smallest


@needs_arena
def test_micro_batches_page_where_recomputing_is_not_allowed(tmp_path: Path) -> None:
    work, batch = deep_work(), deep_batch(2048)
    twin = work.twin()
    free = prepared(work, batch, 2, memory="1GB").plan
    budget = free.persistent_bytes + round(0.7 * (free.peak_bytes - free.persistent_bytes))
    step = prepared(work, batch, 2, memory=budget, planner="page-only", page_to=tmp_path, plan_time_s=0.5)
    assert any(part.paged for part in plan_of(step).parts)
    for seed in range(2):
        found = step(*deep_batch(2048, seed))
        assert float(found) == pytest.approx(float(twin.plain_step(*deep_batch(2048, seed))), rel=1e-5)
    assert relative_error(work.snapshot(), twin.snapshot(), noise=1e-5) < 1e-4


# ---- what is refused ------------------------------------------------------------------------------------------


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


# ---- all or nothing -------------------------------------------------------------------------------------------


class Fault(Exception):
    """What the tests raise inside a step."""


class Faults:
    """Stands around every kernel of all micro-batches; raises at the k-th call of a step, before it or after it."""

    def __init__(self, step: MicroStep) -> None:
        self.calls, self.at, self.after = 0, -1, False
        self.is_update: list[bool] = []
        for one in {*step._accumulating.values(), step._last}:
            table = one._program.run.__globals__
            for name in [name for name in table if re.fullmatch(r"f\d+", name)]:
                table[name] = self._around(table[name])

    def _around(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            number = self.calls
            self.calls += 1
            self.is_update.append(kernel in (update.sgd, update.adam))
            if number == self.at and not self.after:
                raise Fault
            result = kernel(*args, **kwargs)
            if number == self.at:
                raise Fault
            return result

        return guarded

    def arm(self, at: int, *, after: bool = False) -> None:
        self.calls, self.at, self.after = 0, at, after
        self.is_update.clear()


def mixed() -> nn.Module:
    """All that a forward pass can change: running statistics and random numbers."""
    return nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 5)).double()


@pytest.mark.parametrize("later", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("checks", [False, True], ids=["early", "guarded"])
def test_a_fault_in_any_micro_batch_takes_all_back(checks: bool, later: bool) -> None:
    torch.manual_seed(1)
    work, batch = training(mixed(), cross_entropy, adam), batch_of("mlp", 7)
    step = prepared(work, batch, 3, allow_inexact=True, check_finite=checks)
    found = micro(step, *batch)
    for one in {*found._accumulating.values(), found._last}:
        one._checked = True  # the rehearsal has kernels of its own
    if later:
        step(*batch)
    faults = Faults(found)
    before = work.snapshot()
    step(*batch)
    after, n_calls, updates = work.snapshot(), faults.calls, list(faults.is_update)
    work.model.load_state_dict({n.removeprefix("model."): t for n, t in before.items() if n.startswith("model.")})
    if later:
        _set(work, before)
    else:
        work.optimizer.state.clear()
    torch.set_rng_state(before["random"])
    assert not differing(before, work.snapshot())
    last = n_calls if found.plan.updates == "guarded" else updates.index(True)
    for at in {*range(0, last, 5), last - 1}:
        faults.arm(at, after=at % 2 == 0 and at != last - 1)
        with pytest.raises(Fault):
            step(*batch)
        assert not differing(before, work.snapshot()), f"fault at call {at} of {n_calls}"
    faults.arm(-1)
    step(*batch)
    assert not differing(after, work.snapshot())


def _set(work: Training, before: dict[str, Tensor]) -> None:
    """The optimizer's state as it was."""
    for index, p in enumerate(work.model.parameters()):
        for key, value in work.optimizer.state[p].items():
            value.copy_(before[f"optimizer.{index}.{key}"])


def test_a_gradient_that_is_not_finite_is_refused_in_any_micro_batch() -> None:
    work, batch = work_of("mlp"), batch_of("mlp", 8)
    step = prepared(work, batch, 4, check_finite=True)
    step(*batch)
    before = work.snapshot()
    for sample in (0, 7):
        x = batch[0].clone()
        x[sample, 0] = float("nan")
        with pytest.raises(UserError, match="not finite"):
            step(x, batch[1])
        assert not differing(before, work.snapshot())
    step(*batch)


def test_an_interrupt_between_or_in_micro_batches_takes_all_back() -> None:
    torch.manual_seed(1)
    work, batch = training(mixed(), cross_entropy), batch_of("mlp", 8)
    step = prepared(work, batch, 4, allow_inexact=True)
    step(*batch)
    found = micro(step, *batch)
    before = work.snapshot()
    calls = 0
    run = found._accumulating[2]._program.run

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return run(*args)

    program = replace(found._accumulating[2]._program, run=interrupted)
    found._accumulating[2]._program = program
    with pytest.raises(KeyboardInterrupt):
        step(*batch)
    assert calls == 2
    assert not differing(before, work.snapshot())
    step(*batch)
    assert differing(before, work.snapshot())


def test_an_interrupt_during_the_updates_leaves_the_whole_step_done() -> None:
    if not arena.available():
        pytest.skip(str(arena.missing()))
    work, batch = work_of("mlp"), batch_of("mlp", 8)
    twin = work.twin()
    step = prepared(work, batch, 2)
    step(*batch)
    twin.plain_step(*batch)
    found = micro(step, *batch)
    table = found._last._program.run.__globals__
    name = next(name for name, value in table.items() if value is update.sgd)

    def interrupted(*args: Any) -> None:
        table[name] = update.sgd
        os.kill(os.getpid(), signal.SIGINT)
        update.sgd(*args)

    table[name] = interrupted
    with pytest.raises(KeyboardInterrupt):
        step(*batch)
    twin.plain_step(*batch)
    assert relative_error(work.snapshot(), twin.snapshot()) < 1e-9
