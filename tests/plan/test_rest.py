"""The rest of a step, planned anew anywhere in it: legal, within its budget, and it runs from there to the same bits,
even when what was lost is filled with garbage."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from edgetrain.plan.lifetimes import results, timeline
from edgetrain.plan.plan import Compute, PageIn, Plan, Updates
from edgetrain.plan.planners.fast import fast
from edgetrain.plan.planners.sage import sage
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.rest import least_rest, rest, state
from edgetrain.plan.validate import validate
from edgetrain.run.compile import build
from edgetrain.run.compiled import CompiledStep
from edgetrain.run.program import How, Program, taken
from tests.helpers.paged import paged_plan, random_gaps, with_store
from tests.helpers.plain import Snapshot, Training, bits, differing
from tests.plan.problems import NETS, budget, small
from tests.plan.test_plans_on_random_programs import fresh as fresh_program
from tests.plan.test_plans_on_random_programs import learnt, made_up
from tests.plan.test_random_programs import Instruction, instructions

EXAMPLES = int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 6
UPDATES: tuple[Updates, ...] = ("early", "guarded", "together")


def loss(model: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = model(x).square().mean()
    return value


def fresh(net: str) -> tuple[Training, Tensor]:
    torch.manual_seed(0)
    build_net, shape = NETS[net]
    model = build_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Training(model, optimizer, loss), torch.randn(shape)


class Stop(Exception):
    pass


class CutStep(CompiledStep):
    """Follows its plan for some actions, and then the plan for the rest. What was lost meanwhile holds garbage."""

    def cut(self, at: int, following: Plan, lost: frozenset[int]) -> None:
        self._at, self._following, self._lost = at, following, lost
        self._program = build(self.graph, self.plan, How(look=True), resumable=True)
        self._checked = True

    def _run(self, program: Program, given: tuple[Any, ...]) -> Any:
        ops = [n for n, action in enumerate(self.plan.schedule) if isinstance(action, Compute)]
        begun = -1

        def look(op: int, *made: Any) -> None:
            nonlocal begun
            begun += not made  # it is called before each op, and after it with what there is
            if not made and ops[begun] == self._at:
                raise Stop

        try:
            program.run(*given[:-1], look, None, None, {})
            raise AssertionError("it did not stop")
        except Stop as stop:
            second = build(self.graph, self._following, start=self._at, resumable=True)
            rest = taken(stop, program, second.taken_up)
        for name, tensor in rest.items():
            if name.startswith("t") and self.graph.tensors[int(name[1:])].storage in self._lost:
                tensor.untyped_storage().fill_(0x7F)
        return second.run(*given, None, None, rest)


def trained(
    ours: Training, batch: Tensor, task: Problem, plan: Plan, cut: tuple[int, Plan, frozenset[int]] | None = None
) -> tuple[Tensor, Snapshot]:
    """One step, as planned or cut."""
    step: CompiledStep
    if cut is None:
        step = CompiledStep(task.graph, plan, ours.model, ours.optimizer, {})
    else:
        step = CutStep(task.graph, plan, ours.model, ours.optimizer, {})
        step.cut(*cut)
    torch.manual_seed(7)
    return step(batch), ours.snapshot()


def can_be_lost(task: Problem, plan: Plan, at: int) -> list[int]:
    """The storages that are alive there, and could be made again at their next use; results, at once."""
    until, now = task.tables.until, state(task, plan.schedule[:at])
    next_use: dict[int, int] = {}
    for position in range(len(task.order) - 1, now.position - 1, -1):
        next_use.update(dict.fromkeys(task.reads[task.order[position]], position))
    next_use.update(dict.fromkeys(results(task.graph), now.position))
    return [s for s in sorted(now.alive) if s not in next_use or next_use[s] <= until[s]]


def check(task: Problem, plan: Plan, at: int, joined: Plan, budget_bytes: int) -> None:
    validate(task.graph, joined)
    assert joined.schedule[:at] == plan.schedule[:at]
    assert joined.updates == plan.updates
    done = sum(isinstance(action, Compute) for action in plan.schedule[:at])
    moments = timeline(task.graph, joined.schedule, updates=plan.updates, workspace=plan.workspace_bytes)
    assert max((moment.most_bytes for moment in moments[done:]), default=0) <= budget_bytes


def cuts(plan: Plan) -> list[int]:
    return [n for n, action in enumerate(plan.schedule) if isinstance(action, Compute)]


def planned_anew(task: Problem, plan: Plan, at: int, draw: random.Random) -> tuple[Plan | None, frozenset[int]]:
    """The rest under a random budget, when some things were lost; it is there if the budget is large enough."""
    lost = frozenset(s for s in can_be_lost(task, plan, at) if draw.random() < draw.choice((0.0, 0.2, 0.7)))
    low, high = task.keep_all.persistent_bytes, int(1.2 * task.keep_all.peak_bytes)
    limit = draw.randint((low + high) // 2, high)
    joined = rest(task, plan, at, limit, lost=lost, use_store=False)
    if joined is None:
        free = rest(task, plan, at, sys.maxsize, lost=lost, use_store=False)
        assert free is not None
        check(task, plan, at, free, sys.maxsize)
        least = least_rest(task, plan, at, limit, lost=lost, use_store=False)
        assert least is not None
        validate(task.graph, least)
        assert least.peak_bytes <= free.peak_bytes
        return least, lost
    check(task, plan, at, joined, limit)
    return joined, lost


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize(("net", "every"), [("short", 2), ("dropout", 3), ("residual", 17), ("attention", 37)])
def test_a_step_cut_anywhere_runs_on_to_the_same_bits(net: str, every: int, updates: Updates) -> None:
    task = small(net, updates)
    draw = random.Random(every)
    expected = trained(*fresh(net), task, task.keep_all)
    tight = fast(task, budget(task, 0.8))
    plans = [task.keep_all, *([task.plan(tight, planner="fast")] if tight is not None else [])]
    for plan in plans:
        places = cuts(plan)
        for at in places[draw.randrange(every) :: every]:
            joined, lost = planned_anew(task, plan, at, draw)
            assert joined is not None
            value, snapshot = trained(*fresh(net), task, plan, (at, joined, lost))
            assert torch.equal(bits(value), bits(expected[0])), at
            assert differing(snapshot, expected[1]) == []


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("net", ["residual", "attention"])
def test_every_cut_of_a_plan_that_pages_is_legal(net: str, updates: Updates) -> None:
    """At any action, with the store and without it."""
    base = small(net, updates)
    task = problem(base.graph, with_store(base.costs), updates)
    draw = random.Random(0)
    plan = paged_plan(task, random_gaps(task, draw, 0.3))
    used = 0
    for at in draw.sample(range(len(plan.schedule)), 25):
        lost = frozenset(s for s in can_be_lost(task, plan, at) if draw.random() < 0.2)
        limit = plan.peak_bytes
        with_it = rest(task, plan, at, limit, lost=lost, use_store=True)
        if with_it is not None:
            validate(task.graph, with_it)
            used += any(isinstance(action, PageIn) for action in with_it.schedule[at:])
        without = rest(task, plan, at, sys.maxsize, lost=lost, use_store=False)
        if without is not None:  # None where a gradient is in the store
            check(task, plan, at, without, sys.maxsize)
            assert not any(isinstance(action, PageIn) for action in without.schedule[at:])
        assert without is not None or updates != "early"
    assert used


def test_a_step_that_is_over_needs_no_rest() -> None:
    task = small("short")
    plan = task.keep_all
    joined = rest(task, plan, len(plan.schedule), task.keep_all.peak_bytes)
    assert joined is not None
    assert joined.schedule == plan.schedule
    assert rest(task, plan, 0, 1) is None


def test_from_the_first_action_on_it_is_at_least_as_good_as_what_sage_plans() -> None:
    task = small("residual")
    for part in (0.6, 0.8, 1.0):
        limit = budget(task, part)
        whole = rest(task, task.keep_all, 0, limit)
        order = sage(task, limit)
        if order is not None:
            assert whole is not None
            assert whole.peak_bytes <= limit
            assert task.costs.time_s(whole.order) <= task.costs.time_s(order) + 1e-12


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
@given(
    code=st.lists(instructions, min_size=1, max_size=10),
    updates=st.sampled_from(UPDATES),
    seed=st.integers(0, 2**16),
)
def test_random_programs_cut_anywhere(code: list[Instruction], updates: Updates, seed: int) -> None:
    graph, _ = learnt(code, updates)
    task = problem(graph, made_up(graph, seed), updates)
    draw = random.Random(seed)

    def anew() -> tuple[Training, Tensor]:
        ours, batches = fresh_program(code)
        return ours, batches[0][0]

    value, snapshot = trained(*anew(), task, task.keep_all)
    plan = task.keep_all
    for at in draw.sample(cuts(plan), min(2, len(cuts(plan)))):
        joined, lost = planned_anew(task, plan, at, draw)
        assert joined is not None
        again, found = trained(*anew(), task, plan, (at, joined, lost))
        assert torch.equal(bits(again), bits(value))
        assert differing(found, snapshot) == []
