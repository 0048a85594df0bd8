"""Random programs under random budgets: every plan is legal, within its budget, and gives the numbers of keeping all.

The programs are those of `test_random_programs.py`; costs are made up, so that planners meet every proportion of times
and sizes. `EDGETRAIN_EXAMPLES` asks for more of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import edgetrain as et
from edgetrain.costs.table import WAYS, Costs, OpCost, Run
from edgetrain.graph.ir import Graph
from edgetrain.plan.mip.program import Formulation
from edgetrain.plan.mip.search import DEPTH, optimal, smallest
from edgetrain.plan.plan import Item, Plan, Updates
from edgetrain.plan.planners.chen import chen
from edgetrain.plan.planners.dtr import dtr
from edgetrain.plan.planners.fast import fast
from edgetrain.plan.planners.melon import melon
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.refusal import lower_bound_bytes
from edgetrain.plan.validate import validate
from edgetrain.run.layouts import LayoutMismatch
from tests.helpers.plain import Snapshot, Training, bits, differing, run, sgd
from tests.plan.test_random_programs import BATCH, WIDTH, Instruction, Program, instructions, loss

EXAMPLES = int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 2
SEARCH_S = 0.2


def made_up(graph: Graph, seed: int) -> Costs:
    """Times over three orders of magnitude; a workspace for some ops, another one when they run again."""
    draw = random.Random(seed)

    def cost(view: bool) -> OpCost:
        if view:
            return OpCost({"first": Run(0.0)})
        return OpCost({way: Run(10 ** draw.uniform(-6, -3), (draw.choice((0, 0, 40, 200)), -1)) for way in WAYS})

    return Costs(graph.key, "modelled", tuple(cost(op.view) for op in graph.ops))


def fresh(code: list[Instruction]) -> tuple[Training, list[tuple[torch.Tensor]]]:
    torch.manual_seed(0)
    model = Program(code).double()
    x = [(torch.randn(BATCH, WIDTH, dtype=torch.float64),) for _ in range(2)]
    return Training(model, sgd(model.parameters()), loss), x


def captured(code: list[Instruction]) -> Graph:
    work, batches = fresh(code)
    return et.capture(work.model, loss, work.optimizer, batches[0], use_cache=False, unused="freeze")


def trained(graph: Graph, plan: Plan, code: list[Instruction]) -> tuple[torch.Tensor, Snapshot]:
    work, batches = fresh(code)
    step = et.compile(graph, plan, work.model, work.optimizer)
    return run(step, batches), work.snapshot()


def learnt(code: list[Instruction], updates: Updates) -> tuple[Graph, tuple[torch.Tensor, Snapshot]]:
    """The graph, captured again where a layout was learnt, as `prepare` does; and what keeping all gives."""
    while True:
        graph = captured(code)
        try:
            return graph, trained(graph, et.keep_all(graph, updates=updates), code)
        except LayoutMismatch as mismatch:
            if not mismatch.learnt:
                raise


def check(task: Problem, order: Sequence[Item], limit: int) -> Plan:
    plan = task.plan(order, planner="test")
    validate(task.graph, plan)
    assert plan.peak_bytes == task.peak_bytes(order) <= limit
    assert plan.peak_bytes >= lower_bound_bytes(task)
    assert plan.time_s is not None
    assert plan.time_s >= task.keep_all_time_s
    return plan


def is_a_solution(task: Problem, order: Sequence[Item]) -> bool:
    """The order is one of those that `optimal` searches."""
    form = Formulation(task, depth=DEPTH)
    values = form.values(order)
    if values is None or [n for n in form.order(values) if n in form.at] != [n for n in order if n in form.at]:
        return False
    return all(sum(a * values[v] for v, a in row.items()) <= most + 1e-9 for row, most in form.logic())


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
@given(
    code=st.lists(instructions, min_size=1, max_size=12),
    updates=st.sampled_from(["early", "guarded", "together"]),
    part=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**16),
)
@example([Instruction("relu", 0, 0), Instruction("tied", 0, 0)], "early", 0.0, 0)  # a view between recompute and reader
def test_plans_of_random_programs_run_as_keeping_all(
    code: list[Instruction], updates: Updates, part: float, seed: int
) -> None:
    graph, (losses, right) = learnt(code, updates)
    task = problem(graph, made_up(graph, seed), updates)
    most = task.keep_all.peak_bytes
    low = smallest(task, time_limit_s=SEARCH_S)
    plans = [check(task, low, most)]
    limit = int(plans[0].peak_bytes + part * (most - plans[0].peak_bytes))
    greedy = fast(task, limit)
    # The tensors of these programs have 96 bytes: rounded up to 128 each, none of Melon's pools would keep a budget.
    for order in (greedy, chen(task, limit), dtr(task, limit), melon(task, limit, alignment=8)):
        if order is not None:
            plans.append(check(task, order, limit))
    found = optimal(task, limit, start=greedy, time_limit_s=SEARCH_S)
    assert not found.infeasible or found.order in (None, greedy)
    if found.order is not None:
        plans.append(check(task, found.order, limit))
        took = task.timing(found.order).time_s - task.keep_all_time_s
        assert abs(took - found.extra) < 1e-9
    tried: tuple[Sequence[Item] | None, ...] = (low, greedy, found.order)
    for one in tried:
        if one is not None and task.peak_bytes(one) <= limit and is_a_solution(task, one):
            assert task.timing(one).time_s - task.keep_all_time_s >= found.extra_bound - 1e-9
    if greedy is not None:
        assert found.order is not None
        assert task.timing(found.order).time_s <= task.timing(greedy).time_s + 1e-12
    for plan in {plan.schedule: plan for plan in plans}.values():
        again, snapshot = trained(graph, plan, code)
        assert torch.equal(bits(again), bits(losses))
        assert differing(snapshot, right) == []
