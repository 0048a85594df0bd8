"""Paging beside recomputing: its rows ask for no more than a schedule holds, its schedules are legal, keep the budget
and every limit, and joint planning is never worse than either alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import edgetrain as et
from edgetrain.costs.table import Costs, OpCost, Run, Store
from edgetrain.errors import Infeasible, UserError
from edgetrain.plan.mip.page_instead import page_instead
from edgetrain.plan.mip.paging import PagingFormulation
from edgetrain.plan.mip.search import optimal, smallest
from edgetrain.plan.plan import Item, PageIn, PageOut
from edgetrain.plan.planner import Aim
from edgetrain.plan.problem import Problem, problem
from tests.oracles.poet_as_published import Switches, instance, solve
from tests.plan.problems import budget, check, small

NETS = ("chain", "residual", "dropout", "attention")
IDLE_W, STORE_W, CPU_W = 0.5, 0.3, 2.0
SECONDS = 3.0


def with_store(task: Problem, bytes_s: float, *, latency_s: float = 0.0) -> Problem:
    """The same problem where a store moves so many bytes a second, and everything has its energy."""
    ops = tuple(
        OpCost({way: Run(run.time_s, run.events, CPU_W * run.time_s) for way, run in op.ways.items()})
        for op in task.costs.ops
    )
    store = Store(bytes_s, bytes_s, latency_s, latency_s, STORE_W)
    costs = Costs(task.graph.key, "modelled", ops, {}, store, IDLE_W, 0.1)
    return problem(task.graph, costs, task.updates)


def speed(task: Problem, part: float) -> float:
    """The store that moves all activations in this part of the time of a step."""
    plan = task.keep_all
    return (plan.peak_bytes - plan.persistent_bytes) / (part * task.keep_all_time_s)


def pages(order: Sequence[Item]) -> int:
    return sum(isinstance(item, PageOut) for item in order)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("overlap", [True, False])
def test_joint_is_never_worse_than_either_alone(name: str, overlap: bool) -> None:
    task = with_store(small(name), speed(small(name), 0.5))
    limit = budget(task, 0.6)
    found = {}
    for what, aim in (
        ("joint", Aim(overlap=overlap)),
        ("recompute", Aim(page=False, overlap=overlap)),
        ("page", Aim(recompute=False, overlap=overlap)),
    ):
        # As much time for each of the two within the joint search as alone.
        answer = optimal(task, limit, aim=aim, time_limit_s=4 * SECONDS if what == "joint" else SECONDS)
        if answer.order is None:
            continue
        check(task, answer.order, limit)
        timing = task.timing(answer.order, overlap=overlap)
        assert answer.extra == pytest.approx(timing.time_s - task.keep_all_time_s, abs=1e-9)
        assert answer.extra_bound <= answer.extra + 1e-9
        found[what] = answer.extra
    assert found["joint"] <= min(found.values()) + 1e-9
    assert pages(optimal(task, limit, aim=Aim(recompute=False), time_limit_s=SECONDS).order or ()) > 0


@pytest.mark.parametrize("name", NETS)
def test_no_row_counts_more_than_a_paged_schedule_holds(name: str) -> None:
    task = with_store(small(name), speed(small(name), 0.5))
    form = PagingFormulation(task, depth=6)
    orders = [
        answer.order
        for part in (0.8, 0.6, 0.5)
        for aim in (Aim(), Aim(recompute=False))
        if (answer := optimal(task, budget(task, part), aim=aim, time_limit_s=1.0)).order is not None
    ]
    seen = 0
    for order in orders:
        assert order is not None
        values = form.values(order)
        if values is None or not pages(order) or list(form.order(values)) != list(order):
            continue
        seen += 1
        held = task.peak_bytes(order)
        rows = [*form.while_running(), *(row for rows in form.while_recomputing() for row in rows)]
        assert [row for row in rows if row.breaks(values, held)] == []
        for row, most in (*form.logic(), *form.limits()):
            assert sum(a * values[v] for v, a in row.items()) <= most + 1e-6
    assert seen


@pytest.mark.parametrize("name", ["residual", "attention"])
def test_a_fast_store_costs_nothing_and_a_slow_one_is_not_used(name: str) -> None:
    fast = with_store(small(name), speed(small(name), 1e-4))
    limit = budget(fast, 0.7)
    quick = optimal(fast, limit, time_limit_s=SECONDS)
    assert quick.order is not None
    assert pages(quick.order) > 0
    assert quick.extra <= 0.01 * fast.keep_all_time_s
    slow = with_store(small(name), speed(small(name), 1e4))
    found = optimal(slow, limit, time_limit_s=SECONDS)
    alone = optimal(slow, limit, aim=Aim(page=False), time_limit_s=SECONDS)
    assert found.order is not None
    assert pages(found.order) == 0
    assert found.extra == pytest.approx(alone.extra)


def test_less_energy_and_limits_on_time() -> None:
    task = with_store(small("residual"), speed(small("residual"), 2.0))
    limit = budget(task, 0.6)
    cheap = optimal(task, limit, aim=Aim("energy"), time_limit_s=SECONDS)
    quick = optimal(task, limit, aim=Aim("time"), time_limit_s=SECONDS)
    assert cheap.order is not None
    assert quick.order is not None
    joules, seconds = task.timing(cheap.order).energy_j, task.timing(quick.order).time_s
    other = task.timing(quick.order).energy_j
    assert joules is not None
    assert other is not None
    assert joules <= other + 1e-9
    assert seconds <= task.timing(cheap.order).time_s + 1e-9
    # Between the two: the energy cannot be less than without the limit, nor the time more than it.
    middle = (seconds + task.timing(cheap.order).time_s) / 2
    bounded = optimal(task, limit, aim=Aim("energy", {"time": middle}), time_limit_s=4 * SECONDS)
    assert bounded.order is not None
    timing = task.timing(bounded.order)
    assert timing.time_s <= middle + 1e-9
    assert timing.energy_j is not None
    assert timing.energy_j >= joules - 1e-9


def test_limits_through_et_plan(tmp_path: Path) -> None:
    task = with_store(small("residual"), speed(small("residual"), 0.5))
    graph, costs, memory = task.graph, task.costs, budget(task, 0.6)

    def made(given: et.Budget, planner: str = "auto") -> et.Plan:
        return et.plan(graph, costs, given, planner=planner, updates=task.updates, time_limit_s=SECONDS)

    quick = made(et.Budget(memory))
    assert quick.time_s is not None
    assert quick.energy_j is not None
    assert quick.origin == "modelled"
    with pytest.raises(Infeasible) as caught:
        made(et.Budget(memory, time_s=0.9 * task.keep_all_time_s))
    assert caught.value.least_time_s is not None
    assert caught.value.least_time_s >= task.keep_all_time_s
    with pytest.raises(Infeasible) as caught:
        made(et.Budget(time_s=0.9 * task.keep_all_time_s))
    assert caught.value.least_time_s == pytest.approx(task.keep_all_time_s)
    assert made(et.Budget(memory, time_s=1.01 * quick.time_s)).time_s <= 1.01 * quick.time_s  # type: ignore[operator]
    poet = made(et.Budget(memory), "poet")
    alone = [made(et.Budget(memory, objective="energy"), name) for name in ("recompute-only", "page-only")]
    assert poet.energy_j is not None
    assert all(poet.energy_j <= other.energy_j + 1e-9 for other in alone if other.energy_j is not None)
    assert poet.bound is not None
    assert poet.bound.energy_j is not None
    assert poet.bound.energy_j <= poet.energy_j + 1e-9
    poet.save(tmp_path / "plan.json")
    assert et.Plan.load(tmp_path / "plan.json") == poet


def test_what_needs_energy_or_a_store_says_so() -> None:
    task = small("residual")
    memory = budget(task, 0.6)
    for given, planner, match in (
        (et.Budget(memory), "poet", "joules"),
        (et.Budget(memory, objective="energy"), "optimal", "joules"),
        (et.Budget(memory, energy_j=1.0), "optimal", "joules"),
        (et.Budget(memory), "page-only", "store"),
    ):
        with pytest.raises(UserError, match=match):
            et.plan(task.graph, task.costs, given, planner=planner, updates=task.updates)
    rich = with_store(task, 1e6)
    with pytest.raises(UserError, match="least time"):
        et.plan(rich.graph, rich.costs, et.Budget(memory, objective="energy"), planner="fast", updates=task.updates)


def test_the_plan_says_why_nothing_is_paged() -> None:
    task = with_store(small("residual"), speed(small("residual"), 1e4))
    made = et.plan(task.graph, task.costs, et.Budget(budget(task, 0.6)), updates=task.updates, time_limit_s=SECONDS)
    assert not made.paged
    assert "nothing is paged" in made.note
    assert made.note in str(made)


@pytest.mark.parametrize("name", NETS)
def test_paging_instead_keeps_the_budget_and_never_costs_more(name: str) -> None:
    task = with_store(small(name), speed(small(name), 0.5))
    limit = budget(task, 0.6)
    start = optimal(task, limit, aim=Aim(page=False), time_limit_s=4 * SECONDS).order
    if start is None:
        pytest.fail("recomputing alone keeps this budget")
    order = page_instead(task, start, limit, lambda timing: timing.time_s, until=float("inf"))
    check(task, order, limit)
    assert task.timing(order).time_s <= task.timing(start).time_s + 1e-12


def test_paging_reaches_budgets_that_recomputing_does_not() -> None:
    """Something that cannot be recomputed can still be paged, where the updates allow it."""
    task = with_store(small("residual", "together"), speed(small("residual"), 0.5))
    both, alone = smallest(task), smallest(task, aim=Aim(page=False))
    assert task.peak_bytes(both) <= task.peak_bytes(alone)
    check(task, both, None)


@pytest.mark.parametrize("part", [0.9, 0.7, 0.5])
def test_against_the_published_program(part: float) -> None:
    """POET's own program, where nothing overlaps and every op costs the first time what it costs again: ours is as good
    where its schedules are of our class, and its bound is never above what POET reaches."""
    task = without_workspace(with_store(small("short"), speed(small("short"), 0.5)))
    limit = budget(task, part)
    proven = solve(instance(task, memory_bytes=limit), Switches(objective="time"), time_limit_s=30)
    found = optimal(task, limit, aim=Aim(overlap=False), time_limit_s=10, gap=0.0)
    if proven.status != "optimal":
        assert proven.status == "infeasible"
        return
    assert found.order is not None
    assert proven.time_s is not None
    assert task.timing(found.order, overlap=False).time_s <= proven.time_s + 1e-6


def without_workspace(task: Problem) -> Problem:
    ops = tuple(OpCost({"first": Run(op.time_s, (), op.ways["first"].energy_j)}) for op in task.costs.ops)
    return problem(task.graph, replace(task.costs, ops=ops), task.updates)


def test_page_ins_come_back_in_time() -> None:
    task = with_store(small("chain"), speed(small("chain"), 0.2))
    found = optimal(task, budget(task, 0.6), aim=Aim(recompute=False), time_limit_s=SECONDS)
    assert found.order is not None
    brought = [item for item in found.order if isinstance(item, PageIn)]
    assert brought
    assert {item.storage for item in brought} == {item.storage for item in found.order if isinstance(item, PageOut)}
