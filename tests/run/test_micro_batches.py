"""A batch in micro-batches trains as the whole batch does, in less memory; or is refused, with the reason."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.costs.table import Costs
from edgetrain.errors import Infeasible, UserError
from edgetrain.native import arena
from edgetrain.ops import update
from edgetrain.plan import registry
from edgetrain.plan.micro_batches import MicroPlan, counts, sizes_of
from edgetrain.plan.plan import Plan
from edgetrain.plan.validate import validate
from edgetrain.run.micro_batches import Subject
from tests.helpers.marks import needs_arena
from tests.helpers.nets import CASES
from tests.helpers.plain import OptimizerMaker, Training, differing, relative_error, sgd, training
from tests.run.faulty_kernels import Fault, Faults
from tests.run.micro_nets import (
    NETS,
    ROUNDING,
    accumulated_step,
    adam,
    batch_of,
    cross_entropy,
    deep_batch,
    deep_work,
    micro,
    plan_of,
    prepared,
    work_of,
)

pytestmark = pytest.mark.usefixtures("one_cache", "one_round")

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


@needs_arena
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("planner", [p for p in registry.names() if p not in ("auto", "page-only", "poet")])
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

    class OnRpi4:
        def refuse(self, subject: Subject, *, at_once: bool = False) -> None:
            pass

        def plan(self, subject: Subject, *, at_once: bool = False) -> tuple[Plan, Costs | None]:
            costs = et.model_costs(subject.graph, "rpi4")
            limit = et.Budget(None if budget is None else budget - subject.beside_bytes)
            plan = et.plan(
                subject.graph, costs, limit, planner="auto" if budget is None else planner, time_limit_s=0.5,
                updates=subject.updates, exact=subject.exact,
            )  # fmt: skip
            return plan, costs

        def keep_all_bytes(self, subject: Subject) -> int:
            return self.plan(replace(subject, beside_bytes=0))[0].peak_bytes

    parts = prepared(work, batch, 1).in_micro_batches(OnRpi4(), allow_inexact=False)
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
    step = prepared(work, batch, 2, memory=budget, planner="page-only", page_to=tmp_path, plan_time_s=5.0)
    assert any(part.paged for part in plan_of(step).parts)
    for seed in range(2):
        found = step(*deep_batch(2048, seed))
        assert float(found) == pytest.approx(float(twin.plain_step(*deep_batch(2048, seed))), rel=1e-5)
    assert relative_error(work.snapshot(), twin.snapshot(), noise=1e-5) < 1e-4


# ---- all or nothing -------------------------------------------------------------------------------------------


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
    parts = {*found._accumulating.values(), found._last}
    for one in parts:
        one._checked = True  # the rehearsal has kernels of its own
    if later:
        step(*batch)
    faults = Faults(*(one._program for one in parts))
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
