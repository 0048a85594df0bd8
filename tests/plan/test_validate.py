"""The validator refuses every kind of broken plan, and believes nothing that a plan says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import InternalError, UserError
from edgetrain.graph.ir import Graph
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.lifetimes import whole_tensors
from edgetrain.plan.plan import Action, Compute, Free, PageIn, PageOut, Plan, Updates
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.validate import validate
from tests.helpers.paged import Gap, items, uses, widest_gaps, with_store
from tests.plan.problems import small


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(inplace=True), nn.Dropout(0.5),
        nn.Conv2d(4, 4, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return et.capture(model, loss, optimizer, (torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)))


def position(plan: Plan, graph: Graph, name: str) -> int:
    return next(i for i, a in enumerate(plan.schedule) if isinstance(a, Compute) and graph.ops[a.op].name == name)


def moved(plan: Plan, start: int, end: int) -> Plan:
    actions = list(plan.schedule)
    actions.insert(end, actions.pop(start))
    return replace(plan, schedule=tuple(actions))


@pytest.mark.parametrize("updates", ["early", "guarded", "together"])
def test_keep_all_is_legal(graph: Graph, updates: Updates) -> None:
    plan = keep_all(graph, updates=updates)
    validate(graph, plan)
    assert plan.updates == updates
    assert sum(isinstance(a, Compute) for a in plan.schedule) == len(graph.ops)


def test_early_updates_run_before_the_backward_pass_is_over(graph: Graph) -> None:
    plan = keep_all(graph, updates="guarded")
    phases = [graph.ops[a.op].phase for a in plan.schedule if isinstance(a, Compute)]
    assert phases.index("update") < len(phases) - 1 - phases[::-1].index("backward")
    assert plan.undo_bytes > keep_all(graph, updates="together").undo_bytes
    early = [graph.ops[a.op].phase for a in keep_all(graph, updates="early").schedule if isinstance(a, Compute)]
    assert early.index("update") <= phases.index("update")  # which waits, for its copies take memory
    assert keep_all(graph, updates="early").undo_bytes == keep_all(graph, updates="together").undo_bytes


def drop_op(graph: Graph, plan: Plan) -> Plan:
    at = position(plan, graph, "sgd_1")
    return replace(plan, schedule=plan.schedule[:at] + plan.schedule[at + 1 :])


def again(graph: Graph, plan: Plan, name: str, after: str) -> Plan:
    """The plan with an op run once more right after another."""
    at = position(plan, graph, after)
    op = plan.schedule[position(plan, graph, name)]
    return replace(plan, schedule=(*plan.schedule[: at + 1], op, *plan.schedule[at + 1 :]))


def run_an_update_twice(graph: Graph, plan: Plan) -> Plan:
    return again(graph, plan, "sgd_1", "sgd_1")


def recompute_what_is_there(graph: Graph, plan: Plan) -> Plan:
    return again(graph, plan, "convolution_1", "convolution_1")


def recompute_after_the_update(graph: Graph, plan: Plan) -> Plan:
    """The weight that the convolution reads has changed by then."""
    op = graph.ops[plan.schedule[position(plan, graph, "convolution_1")].op]  # type: ignore[union-attr]
    weight = op.reads[1]
    update = next(o.name for o in graph.ops if o.phase == "update" and o.reads[0] == weight)
    storage = graph.tensors[op.creates[0]].storage
    late = again(graph, plan, "convolution_1", update)
    at = position(late, graph, update)
    return replace(late, schedule=(*late.schedule[: at + 2], Free(storage), *late.schedule[at + 2 :]))


def free_too_early(graph: Graph, plan: Plan) -> Plan:
    storage = graph.tensors[graph.ops[0].creates[0]].storage
    at = next(i for i, a in enumerate(plan.schedule) if a == Free(storage))
    return moved(plan, at, 1)


def free_twice(graph: Graph, plan: Plan) -> Plan:
    first = next(a for a in plan.schedule if isinstance(a, Free))
    return replace(plan, schedule=(*plan.schedule, first))


def never_free(graph: Graph, plan: Plan) -> Plan:
    at = max(i for i, a in enumerate(plan.schedule) if isinstance(a, Free))
    return replace(plan, schedule=plan.schedule[:at] + plan.schedule[at + 1 :])


def free_a_parameter(graph: Graph, plan: Plan) -> Plan:
    parameter = next(iter(graph.gradients))
    return replace(plan, schedule=(*plan.schedule, Free(graph.tensors[parameter].storage)))


def update_before_a_reader(graph: Graph, plan: Plan) -> Plan:
    """The gradient of the second convolution's input needs the old weight."""
    reader = next(
        op for op in graph.ops
        if op.kind == "aten.convolution_backward.default" and op.outputs[0] is not None
    )  # fmt: skip
    weight = reader.reads[2]
    update = next(op.name for op in graph.ops if op.phase == "update" and op.reads[0] == weight)
    start, end = position(plan, graph, update), position(plan, graph, reader.name)
    return moved(plan, start, end)


def swap_random_ops(graph: Graph, plan: Plan) -> Plan:
    first, second = (position(plan, graph, op.name) for op in graph.ops if op.random)
    return moved(plan, second, first)


def overwrite_an_input(graph: Graph, plan: Plan) -> Plan:
    at = position(plan, graph, "hardtanh_1")
    batch = graph.tensors[graph.inputs[0]].storage
    return replace(
        plan,
        schedule=(*plan.schedule[:at], Compute(plan.schedule[at].op, batch), *plan.schedule[at + 1 :]),  # type: ignore[union-attr]
    )


def no_such_op(graph: Graph, plan: Plan) -> Plan:
    return replace(plan, schedule=(*plan.schedule, Compute(-1)))


def lie(**said: int) -> Callable[[Graph, Plan], Plan]:
    return lambda graph, plan: replace(plan, **said)  # type: ignore[arg-type]


@pytest.mark.parametrize("updates", ["early", "guarded", "together"])
@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (drop_op, "never run"),
        (run_an_update_twice, "runs twice"),
        (recompute_what_is_there, "which is there"),
        (recompute_after_the_update, "was changed since"),
        (free_too_early, "not there"),
        (free_twice, "not there"),
        (never_free, "never freed"),
        (free_a_parameter, "must outlive"),
        (update_before_a_reader, "overtakes|not there"),
        (swap_random_ops, "overtakes|not there"),
        (overwrite_an_input, "overwrites"),
        (no_such_op, "no op -1"),
        (lie(peak_bytes=1), "peak"),
        (lie(undo_bytes=1), "undo"),
        (lie(persistent_bytes=1), "persistent"),
    ],
)
def test_a_broken_plan_is_refused(
    graph: Graph, updates: Updates, break_it: Callable[[Graph, Plan], Plan], told: str
) -> None:
    with pytest.raises(InternalError, match=told):
        validate(graph, break_it(graph, keep_all(graph, updates=updates)))


def test_a_plan_of_another_graph_is_refused(graph: Graph) -> None:
    plan = keep_all(graph)
    with pytest.raises(UserError, match="another graph"):
        validate(replace(graph, about={"model": "another"}), plan)


def test_updates_that_do_not_run_together_are_not_said_to(graph: Graph) -> None:
    plan = keep_all(graph, updates="early")
    validate(graph, plan)
    with pytest.raises(InternalError, match="are to run together"):
        validate(graph, replace(plan, updates="together"))


# ---- paging


@pytest.fixture(scope="module")
def task() -> Problem:
    return paging("residual", "guarded")


def paging(net: str, updates: Updates) -> Problem:
    given = small(net, updates)
    return problem(given.graph, with_store(given.costs), updates)


def away(given: Problem) -> Gap:
    """A storage that the forward pass makes and the backward pass reads, with ops between."""
    return max(
        (gap for gap in widest_gaps(given) if given.graph.ops[given.maker[gap.storage]].phase == "forward"),
        key=lambda gap: gap.back - gap.out,
    )


def actions(given: Problem, *gaps: Gap) -> tuple[Plan, list[Action]]:
    plan = given.plan(items(given, gaps), planner="test")
    return plan, list(plan.schedule)


@pytest.mark.parametrize("updates", ["early", "guarded", "together"])
def test_a_plan_that_pages_is_legal(updates: Updates) -> None:
    given = paging("residual", updates)
    plan, schedule = actions(given, away(given))
    validate(given.graph, plan)
    assert sum(isinstance(a, PageOut) for a in schedule) == sum(isinstance(a, PageIn) for a in schedule) == 1
    assert len(plan.paged) == 1


def refused(given: Problem, plan: Plan, schedule: list[Action], told: str) -> None:
    with pytest.raises(InternalError, match=told):
        validate(given.graph, replace(plan, schedule=tuple(schedule)))


def test_what_is_paged_in_was_paged_out(task: Problem) -> None:
    plan, schedule = actions(task, away(task))
    schedule.remove(PageOut(away(task).storage))
    refused(task, plan, schedule, "paged in: not stored")


def test_what_is_paged_in_is_not_there(task: Problem) -> None:
    plan, schedule = actions(task, away(task))
    schedule.remove(Free(away(task).storage))
    refused(task, plan, schedule, "paged in: not stored, or there")


def test_what_is_paged_out_is_there(task: Problem) -> None:
    s = away(task).storage
    plan, schedule = actions(task, away(task))
    schedule.remove(PageOut(s))
    refused(task, plan, [PageOut(s), *schedule], "paged out, but not there")
    at = schedule.index(Free(s))
    refused(task, plan, [*schedule[: at + 1], PageOut(s), *schedule[at + 1 :]], "paged out, but not there")


def test_what_is_coming_is_not_paged_out(task: Problem) -> None:
    s = away(task).storage
    plan, schedule = actions(task, away(task))
    at = schedule.index(PageIn(s))
    refused(task, plan, [*schedule[: at + 1], PageOut(s), *schedule[at + 1 :]], "paged out, but not there")


def test_what_is_paged_in_is_freed_again(task: Problem) -> None:
    plan, schedule = actions(task, away(task))
    refused(task, plan, [*schedule, PageIn(away(task).storage)], "never freed")


def test_what_is_away_is_not_read(task: Problem) -> None:
    plan, schedule = actions(task, away(task))
    schedule.remove(PageIn(away(task).storage))
    refused(task, plan, schedule, "which is not there")


def test_views_of_what_was_paged_in_are_taken_anew() -> None:
    given = paging("attention", "guarded")
    seen = 0
    for gap in widest_gaps(given):
        plan, schedule = actions(given, gap)
        back = schedule.index(PageIn(gap.storage))
        done = {a.op for a in schedule[:back] if isinstance(a, Compute)}
        for n, a in enumerate(schedule[back:], back):
            if isinstance(a, Compute) and a.op in done and given.is_view[a.op]:
                refused(given, plan, schedule[:n] + schedule[n + 1 :], "which is not there")
                seen += 1
                break
    assert seen


@pytest.mark.parametrize("storage", [-1, 10**6])
def test_only_storages_that_exist_are_paged(task: Problem, storage: int) -> None:
    plan, schedule = actions(task)
    refused(task, plan, [*schedule, PageOut(storage)], "there is no storage")


def test_only_what_one_tensor_fills_is_paged() -> None:
    """Not a parameter, nor an input, nor a storage that several tensors share."""
    tried = set[str]()
    for net in ("residual", "attention", "dropout"):
        given = paging(net, "guarded")
        plan, schedule = actions(given)
        for s, storage in enumerate(given.graph.storages):
            if s not in whole_tensors(given.graph) and storage.role not in tried:
                refused(
                    given, plan, [*schedule[:3], PageOut(s), *schedule[3:]], "is not one tensor on the CPU|no storage"
                )
                tried.add(storage.role)
    assert {"parameter", "input"} <= tried


def test_what_changes_is_not_paged_out_meanwhile() -> None:
    """Dropout draws its mask into memory that was made before."""
    given = paging("attention", "guarded")
    whole = whole_tensors(given.graph)
    at, s = next((n, s) for n, op in enumerate(given.graph.ops) for s in op.writes if s in whole)
    plan, schedule = actions(given)
    write = next(n for n, a in enumerate(schedule) if isinstance(a, Compute) and a.op == at)
    refused(given, plan, [*schedule[:write], PageOut(s), *schedule[write:]], "while it is paged out")


def test_what_was_paged_out_before_it_changed_is_the_old_one() -> None:
    given = paging("attention", "guarded")
    whole = whole_tensors(given.graph)
    at, s = next((n, s) for n, op in enumerate(given.graph.ops) for s in op.writes if s in whole)
    plan, schedule = actions(given)
    write = next(n for n, a in enumerate(schedule) if isinstance(a, Compute) and a.op == at)
    there_and_back: list[Action] = [PageOut(s), Free(s), PageIn(s)]
    late: list[Action] = [Free(s), PageIn(s)]
    schedule = [*schedule[:write], *there_and_back, schedule[write], *late, *schedule[write + 1 :]]
    refused(given, plan, schedule, "which was changed since|which is not there")


@pytest.mark.parametrize("by", [-1, 1])
def test_the_peak_counts_what_is_paged_in(task: Problem, by: int) -> None:
    plan, _ = actions(task, *widest_gaps(task))
    validate(task.graph, plan)
    with pytest.raises(InternalError, match="peak"):
        validate(task.graph, replace(plan, peak_bytes=plan.peak_bytes + by))


def test_a_page_in_can_be_the_peak(task: Problem) -> None:
    """Where everything comes back as soon as it has gone, and right before the last op."""
    gap = replace(away(task), back=away(task).out + 1, free=away(task).out)
    plan, _ = actions(task, gap)
    validate(task.graph, plan)
    assert plan.peak_bytes >= task.keep_all.peak_bytes


def gradient_gap(given: Problem, reader: str) -> Gap | None:
    """A result of the backward pass that is read last by an op of this phase, away right before it."""
    for s, at in uses(given).items():
        phases = [given.graph.ops[given.order[n]].phase for n in at]
        if phases[0] == "backward" and phases[-1] == reader and at[-1] - at[-2] > 1:
            return Gap(at[-2], at[-2], at[-1], s)
    return None


def test_what_cannot_be_made_again_is_paged_only_where_the_step_can_be_taken_back() -> None:
    """A gradient: never where updates stand early; where they stand together, not from the first of them on."""
    expected = {("early", "backward"): False, ("guarded", "backward"): True, ("guarded", "update"): True}
    expected |= {("together", "backward"): True, ("together", "update"): False}
    seen = set()
    for (updates, reader), allowed in expected.items():
        given = paging("residual", cast(Updates, updates))
        gap = gradient_gap(given, reader)
        if gap is None:
            continue
        seen.add((updates, reader))
        plan, _ = actions(given, gap)
        if allowed:
            validate(given.graph, plan)
        else:
            with pytest.raises(InternalError, match="could not be recomputed"):
                validate(given.graph, plan)
    assert {("early", "backward"), ("together", "update"), ("together", "backward")} <= seen
