"""Training under a byte budget: the same numbers as keeping everything, bit for bit, in the bytes that were planned."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

import edgetrain as et
from edgetrain import child
from edgetrain.costs.table import Costs, OpCost, Run
from edgetrain.errors import Infeasible, UserError
from edgetrain.graph.capture.training import capture_with_externals
from edgetrain.graph.ir import Graph
from edgetrain.ops import norm
from edgetrain.plan import registry
from edgetrain.plan.plan import Plan, Updates
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.refusal import lower_bound_bytes
from edgetrain.run.compiled import CompiledStep
from tests.helpers.marks import PLANNED_STEPS
from tests.helpers.nets import CASES, Case
from tests.helpers.plain import OptimizerMaker, Snapshot, bits, differing, relative_error, run, sgd, training
from tests.run.budget_nets import (
    PLAN_TIME_S,
    adam,
    assert_account,
    assert_same,
    batches_of,
    by_hand,
    infeasible,
    three_steps,
    work_of,
)

pytestmark = PLANNED_STEPS
SWEPT = [
    ("residual", sgd, "preserve"),
    ("residual", sgd, "auto"),
    ("residual", adam, "auto"),
    ("residual", sgd, "channels_last"),
    ("dropout", sgd, "auto"),
    ("tied", adam, "preserve"),
    ("transformer", sgd, "auto"),
    ("writes", adam, "auto"),
    ("LSTM", sgd, "auto"),
]


@pytest.mark.parametrize(("net", "optimizer", "memory_format"), SWEPT)
def test_every_budget_down_to_the_smallest_gives_the_numbers_of_keeping_all(
    net: str, optimizer: OptimizerMaker, memory_format: str
) -> None:
    options = {"memory_format": memory_format}
    right = three_steps(net, optimizer, memory="1GB", **options)
    assert right.plan.recomputed == ()
    most = right.plan.peak_bytes
    answer = infeasible(net, right.plan.persistent_bytes + 1, optimizer, **options)
    assert right.plan.persistent_bytes < answer.bound_bytes <= answer.smallest_bytes < most
    assert answer.op in {op.name for op in right.graph.ops}
    assert answer.alive
    assert set(answer.alive) <= {tensor.name for tensor in right.graph.tensors}
    assert str(answer.smallest_bytes) in str(answer)
    budgets = [most - 1, (2 * most + answer.smallest_bytes) // 3, (most + 3 * answer.smallest_bytes) // 4]
    peaks = [most]
    for budget, planner in zip([*budgets, answer.smallest_bytes], ["auto", "fast", "auto", "auto"], strict=True):
        try:
            found = three_steps(net, optimizer, memory=budget, planner=planner, **options)
        except Infeasible:
            assert planner == "fast"  # does not find everything that there is
            continue
        assert found.plan.peak_bytes <= budget
        assert found.plan.recomputed
        assert_same(found, right)
        peaks.append(found.plan.peak_bytes)
    assert peaks[-1] <= answer.smallest_bytes < peaks[0]
    assert infeasible(net, answer.bound_bytes - 1, optimizer, **options).smallest_bytes == answer.smallest_bytes


# ---- by hand --------------------------------------------------------------------------------------------------


def again_and_again(task: Problem) -> list[int]:
    """Before each op of the backward pass, everything that it reads is made anew, and what that is made from, as far as
    it can be."""
    order: list[int] = []

    def makers(number: int, at: int) -> set[int]:
        found: set[int] = set()
        waiting = [number]
        while waiting:
            new = {task.maker[s] for s in task.reads[waiting.pop()]}
            new = {op for op in new - found if task.deadline[op] > at}
            found |= new
            waiting += new
        return found

    for at, number in enumerate(task.order):
        if task.graph.ops[number].phase != "forward":
            order += sorted(makers(number, at), key=task.position.__getitem__)
        order.append(number)
    return order


def unmeasured(graph: Graph) -> Costs:
    return Costs(graph.key, "modelled", tuple(OpCost({"first": Run(1e-3)}) for _ in graph.ops))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
def test_a_net_of_every_kind_with_everything_recomputed_trains_as_plain_pytorch(case: Case) -> None:
    plain = training(case.model(), case.loss)
    work = plain.twin()
    batches = [case.batch(seed) for seed in range(2)]
    losses = run(plain.plain_step, batches)
    right = plain.snapshot()
    found = capture_with_externals(work.model, work.loss, work.optimizer, batches[0])
    updates: Updates = et.keep_all(found.graph).updates
    task = problem(found.graph, unmeasured(found.graph), updates)
    plan = task.plan(again_and_again(task), planner="again and again")
    step = CompiledStep(found.graph, plan, work.model, work.optimizer, found.externals)
    assert torch.equal(bits(run(step, batches)), bits(losses))
    assert differing(work.snapshot(), right) == []


@pytest.mark.parametrize("updates", ["early", "guarded", "together"])
@pytest.mark.parametrize("net", ["residual", "dropout", "writes"])
def test_by_hand_with_every_way_to_update(net: str, updates: Updates) -> None:
    work, graph, task = by_hand(net, updates)
    budget = (task.keep_all.peak_bytes + 3 * task.keep_all.persistent_bytes) // 4
    runs: list[tuple[Tensor, Snapshot]] = []
    plans = [task.keep_all, task.plan(again_and_again(task), planner="test")]
    try:
        planned = et.plan(graph, task.costs, et.Budget(budget), updates=updates, time_limit_s=PLAN_TIME_S)
    except Infeasible as answer:
        budget = answer.smallest_bytes
        planned = et.plan(graph, task.costs, et.Budget(budget), updates=updates, time_limit_s=PLAN_TIME_S)
    assert planned.peak_bytes <= budget
    assert planned.updates == updates
    for plan in [*plans, planned]:
        twin = work.twin()
        step = CompiledStep(graph, plan, twin.model, twin.optimizer, {}, costs=task.costs)
        torch.manual_seed(5)
        before = twin.snapshot()
        step.trace_memory(*batches_of(net)[0])  # holds every byte against the plan
        assert differing(twin.snapshot(), before) == []
        runs.append((run(step, batches_of(net), seed=5), twin.snapshot()))
        if updates == "early":
            assert_account(step)
    for losses, snapshot in runs[1:]:
        assert torch.equal(bits(losses), bits(runs[0][0]))
        assert differing(snapshot, runs[0][1]) == []


def test_dropout_is_drawn_again_from_where_it_was_drawn() -> None:
    work, graph, task = by_hand("dropout", "early")
    plan = task.plan(again_and_again(task), planner="test")
    assert any(graph.ops[number].random for number in plan.recomputed)
    plain = work.twin()
    step = et.compile(graph, plan, work.model, work.optimizer)
    assert torch.equal(run(step, batches_of("dropout")), run(plain.plain_step, batches_of("dropout")))
    assert differing(work.snapshot(), plain.snapshot()) == []


@pytest.mark.parametrize("memory_format", ["preserve", "auto"])
def test_batch_norm_statistics_are_updated_once(memory_format: str) -> None:
    """However often the layer is recomputed; and as plain PyTorch updates them."""
    if memory_format == "auto" and not norm.available():
        pytest.skip(str(norm.missing()))
    budget = infeasible("residual", 10_000, memory_format=memory_format).smallest_bytes
    found = three_steps("residual", memory=budget, memory_format=memory_format)
    kinds = {found.graph.ops[number].kind for number in found.plan.recomputed}
    assert kinds & {"aten.native_batch_norm.default", "edgetrain.norm.apply"}
    plain = work_of("residual")
    run(plain.plain_step, batches_of("residual"), seed=4)
    right = plain.snapshot()
    assert {int(v) for name, v in found.snapshot.items() if name.endswith("num_batches_tracked")} == {3}
    if memory_format == "preserve":
        assert differing(found.snapshot, right) == []
    assert relative_error(found.snapshot, right, noise=1e-6) < 1e-4


# ---- other batches, files, graphs -----------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["residual", "transformer"])
def test_another_batch_size_under_the_same_memory(net: str) -> None:
    """The last batch of an epoch is smaller; it gets a plan of its own, within the same budget."""
    keep_all = three_steps(net, memory="1GB").plan
    memory = (keep_all.peak_bytes + 3 * keep_all.persistent_bytes) // 4
    memory = max(memory, infeasible(net, keep_all.persistent_bytes + 1).smallest_bytes)
    batches = [*batches_of(net, 2), *batches_of(net, 1, n=3), *batches_of(net, 1)]
    runs = []
    for amount in (10**9, memory):
        work = work_of(net)
        step = et.prepare(work.model, work.loss, work.optimizer, batches[0], memory=amount, plan_time_s=PLAN_TIME_S)
        losses = []
        torch.manual_seed(4)
        for batch in batches:
            losses.append(step(*batch))
            assert step.plan.peak_bytes <= amount
            assert_account(step.compiled(*batch))
        runs.append((torch.stack(losses), work.snapshot()))
    assert torch.equal(bits(runs[0][0]), bits(runs[1][0]))
    assert differing(runs[0][1], runs[1][1]) == []


def test_a_plan_is_saved_loaded_equal_and_refused_for_another_graph(tmp_path: Path) -> None:
    work, graph, task = by_hand("residual", "early")
    answer = infeasible("residual", 10_000, memory_format="preserve")
    budget = (task.keep_all.peak_bytes + answer.smallest_bytes) // 2
    plan = et.plan(graph, task.costs, et.Budget(budget), time_limit_s=PLAN_TIME_S)
    assert plan.recomputed
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    twin = work.twin()
    losses = run(et.compile(graph, plan, work.model, work.optimizer), batches_of("residual"))
    assert torch.equal(run(et.compile(graph, loaded, twin.model, twin.optimizer), batches_of("residual")), losses)
    assert differing(work.snapshot(), twin.snapshot()) == []
    other, other_graph, _ = by_hand("dropout", "early")
    with pytest.raises(UserError, match="another graph"):
        et.compile(other_graph, loaded, other.model, other.optimizer)
    smaller = et.capture(twin.model, twin.loss, twin.optimizer, batches_of("residual", n=3)[0])
    with pytest.raises(UserError, match="another graph"):
        et.compile(smaller, loaded, twin.model, twin.optimizer)
    with pytest.raises(UserError, match="another graph"):
        et.plan(other_graph, task.costs, et.Budget(budget))


def test_a_budget_just_below_the_smallest_is_refused_and_the_bound_is_proven() -> None:
    _, graph, task = by_hand("dropout", "early")
    answer = infeasible("dropout", task.keep_all.persistent_bytes + 1)
    assert answer.bound_bytes == lower_bound_bytes(task)
    for order in (task.order, again_and_again(task)):
        assert task.peak_bytes(order) >= answer.bound_bytes
    with pytest.raises(Infeasible):
        et.plan(graph, task.costs, et.Budget(answer.bound_bytes - 1), time_limit_s=PLAN_TIME_S)


@pytest.mark.parametrize("planner", [p for p in registry.names() if p not in ("poet", "page-only")])  # these need more
def test_what_an_infeasible_names_works_for_the_planner_that_was_asked(planner: str) -> None:
    """For every planner, not for the best of them alone."""
    _, graph, task = by_hand("residual", "early")
    low = et.Budget(task.keep_all.persistent_bytes + 1)
    with pytest.raises(Infeasible) as caught:
        et.plan(graph, task.costs, low, planner=planner, time_limit_s=PLAN_TIME_S)
    budget = et.Budget(caught.value.smallest_bytes)
    made = et.plan(graph, task.costs, budget, planner=planner, time_limit_s=PLAN_TIME_S)
    assert made.peak_bytes <= caught.value.smallest_bytes


def test_what_was_found_once_is_not_searched_for_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = three_steps("dropout", memory="1GB")
    monkeypatch.setenv("EDGETRAIN_CACHE", str(tmp_path))
    kept = right.plan.persistent_bytes + right.plan.undo_bytes
    memory = (right.plan.peak_bytes * 2 + kept) // 3
    found = three_steps("dropout", memory=memory)
    assert found.plan.recomputed
    assert_same(found, right)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["costs", "plans"]
    monkeypatch.setattr(child, "forked", None)
    monkeypatch.setattr("edgetrain.costs.measured.measure", None)
    again = three_steps("dropout", memory=memory)
    assert again.plan == found.plan
    assert_same(again, right)
    # A file that holds something else is as good as none.
    monkeypatch.undo()
    monkeypatch.setenv("EDGETRAIN_CACHE", str(tmp_path))
    files = list((tmp_path / "plans").glob("*/*.json"))
    assert files
    for file in files:
        file.write_text("{}")
    assert_same(three_steps("dropout", memory=memory), right)


def test_a_solver_that_is_killed_leaves_the_plan_that_was_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where there is too little memory for the solver: the greedy plan, or an answer."""
    right = three_steps("dropout", memory="1GB")
    monkeypatch.setenv("EDGETRAIN_CACHE", str(tmp_path))
    forked = child.forked
    with monkeypatch.context() as patch:
        patch.setattr(child, "forked", lambda work, **_: forked(lambda: os.kill(os.getpid(), signal.SIGKILL)))
        found = three_steps("dropout", memory=right.plan.peak_bytes - 1)
    assert found.plan.planner == "fast"
    assert found.plan.recomputed
    assert_same(found, right)
    assert (
        three_steps("dropout", memory=right.plan.peak_bytes - 1).plan.planner == "optimal"
    )  # the next time it is well
    monkeypatch.setattr(child, "forked", lambda work, **_: forked(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    answer = infeasible("dropout", right.plan.persistent_bytes + 1)
    assert three_steps("dropout", memory=answer.smallest_bytes).plan.peak_bytes <= answer.smallest_bytes
