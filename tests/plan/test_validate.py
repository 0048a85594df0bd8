"""The validator refuses every kind of broken plan, and believes nothing that a plan says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import InternalError, UserError
from edgetrain.graph.ir import Graph
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.plan import Compute, Free, Plan, Updates
from edgetrain.plan.validate import validate


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
