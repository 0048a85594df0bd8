"""Our joint search against POET's program as published, on made-up steps of 8 to 40 ops: the same optimum, with
parameters and paging time in or out.

What must hold, where transfers and ops take turns (as published) and a step's results stay where they are:

    recompute alone         ours = published            the same schedules, and the same account
    paging, or both         ours ≤ published            every schedule of the published program is one of ours, and our
                                                        account of memory is exact
                            ours = published            where our schedule is also one of theirs: they write a result
                                                        only in the stage after it was made, and it takes memory until
                                                        a reader of it has run there
    transfers beside ops    ours ≤ published            time and energy can only become less

Once something is updated, a thing is read back only where it could be made again (docs/design/0007); published,
anything is. So with updates: published without what is not safe ≥ ours ≥ published, the latter where ours is one of
theirs.
Only what is proven is held against each other: a machine under load proves less, and never fails.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import edgetrain as et
from edgetrain.costs.table import Store
from edgetrain.plan.budget import Objective
from edgetrain.plan.lifetimes import results
from edgetrain.plan.mip.search import optimal
from edgetrain.plan.plan import Compute, Free, Item, PageIn, PageOut, Updates
from edgetrain.plan.planner import Aim
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.refusal import lower_bound_bytes
from edgetrain.plan.validate import validate
from tests.oracles.poet_as_published import Instance, Schedule, Solution, Switches, instance, solve
from tests.oracles.poet_check import check
from tests.oracles.poet_search import Rules, held, ones
from tests.plan.made_steps import Shape, made_step

EXAMPLES = int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 5
LIMIT_S = 60.0
NEARLY = 1e-7  # relative
Kind = Literal["both", "recompute", "page"]
KINDS: tuple[Kind, ...] = ("both", "recompute", "page")


@dataclass(frozen=True)
class Question:
    """memory_bytes and time_s are as the switches count them: without parameters, or without transfers, where those are
    left out."""

    task: Problem
    memory_bytes: int
    objective: Objective = "energy"
    kind: Kind = "both"
    time_s: float | None = None
    parameters_count: bool = True
    paging_time_counts: bool = True

    @property
    def switches(self) -> Switches:
        return Switches(
            parameters_count=self.parameters_count, paging_time_counts=self.paging_time_counts,
            recompute=self.kind != "page", page=self.kind != "recompute", objective=self.objective,
        )  # fmt: skip

    def instance(self, *, safe: bool) -> Instance:
        """The published one, in which the step's results stay. safe: nothing is paged that could be lost for good."""
        given = instance(self.task, memory_bytes=self.memory_bytes, time_s=self.time_s)
        nodes = list(given.nodes)
        kept, until = results(self.task.graph), self.task.tables.until
        for i, op in enumerate(run_ops(self.task)):
            made = self.task.makes[op]
            if kept.intersection(made):
                nodes[i] = replace(nodes[i], paging=None, again_until=0)
            if safe and self.task.updates != "guarded" and any(until[s] < len(self.task.order) - 1 for s in made):
                nodes[i] = replace(nodes[i], paging=None)
        return replace(given, nodes=tuple(nodes))

    def published(self, *, safe: bool) -> Solution:
        given = self.instance(safe=safe)
        found = solve(given, self.switches, time_limit_s=LIMIT_S)
        if found.schedule is not None:
            check(given, found, self.switches)
        return found

    @property
    def ours(self) -> Problem:
        """The same problem for our search, which always counts the time of transfers: where that is left out, a store
        that takes as much energy and a billionth of the time."""
        store = self.task.costs.store
        assert store is not None
        assert store.power_w is not None
        if self.paging_time_counts:
            return self.task
        quick = Store(
            1e9 * store.in_bytes_s, 1e9 * store.out_bytes_s, 1e-9 * store.in_latency_s, 1e-9 * store.out_latency_s,
            1e9 * store.power_w,
        )  # fmt: skip
        return problem(self.task.graph, replace(self.task.costs, store=quick), self.task.updates)

    @property
    def limit_bytes(self) -> int:
        """The budget of our search, which always counts parameters."""
        return self.memory_bytes + (0 if self.parameters_count else self.task.keep_all.persistent_bytes)

    def aim(self, *, overlap: bool = False) -> Aim:
        most: dict[Objective, float] = {} if self.time_s is None else {"time": self.time_s}
        return Aim(self.objective, most, self.kind != "page", self.kind != "recompute", overlap)

    def value(self, order: Sequence[Item], *, overlap: bool = False) -> float:
        timing = self.ours.timing(order, overlap=overlap)
        found = timing.time_s if self.objective == "time" else timing.energy_j
        assert found is not None
        return found


def run_ops(task: Problem) -> list[int]:
    return [op for op in task.order if not task.is_view[op]]


@dataclass(frozen=True)
class Answer:
    """value: None where nothing is within the limits, which is proven then."""

    order: tuple[Item, ...] | None
    value: float | None
    proven: bool


def our_answer(question: Question) -> Answer:
    task = question.ours
    found = optimal(task, question.limit_bytes, aim=question.aim(), time_limit_s=LIMIT_S, gap=0.0)
    if found.order is None:
        return Answer(None, None, found.infeasible)
    plan = task.plan(found.order, planner="test")
    validate(task.graph, plan)
    assert plan.peak_bytes <= question.limit_bytes
    value = question.value(found.order)
    assert question.time_s is None or task.timing(found.order, overlap=False).time_s <= question.time_s * (1 + 1e-9)
    base = question.value(task.order)
    assert found.extra == pytest.approx(value - base, abs=NEARLY * base)
    return Answer(found.order, value, found.extra - found.extra_bound <= NEARLY * value)


def their_value(solution: Solution, question: Question) -> float | None:
    """What the program makes least; None where nothing is within the limits."""
    if solution.schedule is None:
        return None
    value = solution.energy_j if question.objective == "energy" else solution.time_s
    assert value is not None
    if question.objective == "time" and not question.paging_time_counts:
        value -= moved_s(solution.schedule, question.instance(safe=False))
    return value


def moved_s(schedule: Schedule, given: Instance) -> float:
    pages = [(i, node.paging) for i, node in enumerate(given.nodes) if node.paging is not None]
    return sum(
        page.in_s * sum(row[i] for row in schedule.M_in) + page.out_s * sum(row[i] for row in schedule.M_out)
        for i, page in pages
    )


# ---- our schedule as one of the published program


def as_published(question: Question, order: Sequence[Item]) -> Schedule | None:
    """The matrices; None where something comes back sooner than the published program can have written it."""
    task, n = question.task, len(question.instance(safe=False).nodes)
    ops = run_ops(task)
    node = {s: i for i, op in enumerate(ops) for s in task.makes[op]}
    runs, ram, stored, ins, outs = ([[False] * n for _ in range(n)] for _ in range(5))
    t, alive, fresh = 0, set[int](), True
    written: dict[int, int] = {}  # node → the first stage that may write it
    for action in task.actions(order):
        if isinstance(action, Free):
            alive.discard(action.storage)
        elif isinstance(action, PageOut):
            written[node[action.storage]] = t
        elif isinstance(action, PageIn):
            alive.add(action.storage)
            ins[t - 1][node[action.storage]] = True
        elif isinstance(action, Compute) and not task.is_view[action.op]:
            if fresh:
                ram[t] = _row(n, {node[s] for s in alive})
            i = ops.index(action.op)
            runs[t][i], fresh = True, i == t
            alive.update(task.makes[action.op])
            t += fresh
    if t < n:  # the last node reads what the step leaves behind
        ram[t], runs[t][t] = _row(n, {node[s] for s in alive}), True
    for i, first in written.items():
        at = next((stage for stage in range(first, n) if ram[stage][i] and not ins[stage - 1][i]), first)
        last = max(stage for stage in range(n) if ins[stage][i])
        if at >= next(stage for stage in range(n) if ins[stage][i]):
            return None
        ram[at][i] = outs[at][i] = True
        for stage in range(at + 1, last + 1):
            stored[stage][i] = True
    return Schedule(*(tuple(tuple(row) for row in matrix) for matrix in (runs, ram, stored, ins, outs)))


def _row(n: int, nodes: set[int]) -> list[bool]:
    return [i in nodes for i in range(n)]


def is_theirs(question: Question, order: Sequence[Item]) -> bool:
    """Whether our schedule is one of the published program, by its own account of memory."""
    schedule, given, switches = as_published(question, order), question.instance(safe=False), question.switches
    if schedule is None:
        return False
    rules = Rules(given, switches)
    masks = [[sum(1 << i for i, there in enumerate(row) if there) for row in m] for m in (schedule.S_ram, schedule.R)]
    peak = max(held(rules, *stage) for stage in zip(*masks, [*masks[0][1:], 0], strict=True))
    if peak > rules.room:
        return False
    assert all(node.paging for i, node in enumerate(given.nodes) if any(row[i] for row in schedule.M_in))
    assert not any(ones(mask)[-1] != t for t, mask in enumerate(masks[1]))
    paid = [(given.nodes[i].time_s, given.nodes[i].energy_j) for mask in masks[1] for i in ones(mask)]
    for i, node in enumerate(given.nodes):
        if node.paging is not None:
            paid += [(node.paging.in_s, node.paging.in_j)] * sum(row[i] for row in schedule.M_in)
            paid += [(node.paging.out_s, node.paging.out_j)] * sum(row[i] for row in schedule.M_out)
    time_s, energy_j = sum(s for s, _ in paid), sum(j or 0.0 for _, j in paid)
    said = Solution("time is up", 0.0, schedule, energy_j, time_s, given.parameter_bytes + peak)
    check(given, said, switches)  # plays it through, and raises if it is not legal
    return True


# ---- what must hold


def require_same_optimum(question: Question) -> str:
    """How the two compare, in words; fails where that may not be."""
    ours = our_answer(question)
    theirs = question.published(safe=False)
    same = question.instance(safe=True) == question.instance(safe=False)
    safe = theirs if same else question.published(safe=True)
    if not ours.proven:
        return "not proven"
    mine, most = ours.value, their_value(safe, question)
    if safe.schedule is not None:  # a schedule of ours, too; proven best or not
        assert mine is not None
        assert most is not None
        assert mine <= most * (1 + NEARLY)
    if mine is None or ours.order is None:
        assert safe.status != "optimal"
        return "neither" if safe.status == "infeasible" else "not proven"
    if not is_theirs(question, ours.order):
        assert question.kind != "recompute"
        return "ours is in no stage of theirs"
    assert theirs.bound <= mine * (1 + NEARLY)
    if theirs.status != "optimal":
        return "not proven"
    least = their_value(theirs, question)
    assert least is not None
    assert least <= mine * (1 + NEARLY)
    if question.task.updates == "guarded" or question.kind == "recompute":
        assert mine == pytest.approx(least, rel=NEARLY)
        return "equal"
    return "equal" if mine == pytest.approx(least, rel=NEARLY) else "theirs is not safe"


def drawn_question(draw: Random, task: Problem) -> Question:
    """A budget between what the hungriest op takes and keeping all; a limit of time that excludes something, often."""
    low, high = lower_bound_bytes(task), task.keep_all.peak_bytes
    parameters_count = draw.random() < 0.6
    memory = low + int(draw.uniform(0.0, 0.8) * (high - low))
    objective: Objective = draw.choice(("energy", "time"))
    limited = objective == "energy" and draw.random() < 0.5
    return Question(
        task,
        memory - (0 if parameters_count else task.keep_all.persistent_bytes),
        objective,
        draw.choice((*KINDS, "both")),
        task.keep_all_time_s * (1 + draw.uniform(0.01, 0.4)) if limited else None,
        parameters_count,
        draw.random() < 0.6,
    )


def drawn_step(draw: Random, most: int) -> Problem:
    shape: Shape = draw.choice(("chain", "branching"))
    weights = draw.random() < 0.3
    # Guarded updates keep copies, which the published program does not know.
    updates: Updates = draw.choice(("early", "together")) if weights else "guarded"
    n_forward = draw.randint(3, most if not weights else max(3, most // 2))
    scale_bytes, scale_s = draw.choice((40, 1000, 10**6)), draw.choice((1e-6, 1e-3, 1.0))
    return made_step(
        draw.getrandbits(32), n_forward, shape, weights=weights, updates=updates, scale_bytes=scale_bytes,
        scale_s=scale_s,
    )  # fmt: skip


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
@given(st.integers(0, 2**32))
def test_random_steps_have_the_same_optimum(seed: int) -> None:
    draw = Random(seed)
    question = drawn_question(draw, drawn_step(draw, 7))
    event(f"{question.kind}: {require_same_optimum(question)}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "n_forward", "part"), [("chain", 10, 0.85), ("branching", 10, 0.7)])
def test_steps_of_20_ops_and_more(kind: Kind, shape: Shape, n_forward: int, part: float) -> None:
    task = made_step(2, n_forward, shape, updates="guarded")
    low, high = lower_bound_bytes(task), task.keep_all.peak_bytes
    question = Question(task, low + int(part * (high - low)), "energy", kind)
    assert len(question.instance(safe=False).nodes) >= 22
    assert require_same_optimum(question) in ("equal", "ours is in no stage of theirs", "not proven")


@pytest.mark.parametrize(("kind", "seed"), [("recompute", 2), ("page", 2), ("both", 1)])
def test_a_chain_of_40_ops(kind: Kind, seed: int) -> None:
    task = made_step(seed, 19, "chain", updates="guarded")
    low, high = lower_bound_bytes(task), task.keep_all.peak_bytes
    question = Question(task, low + int(0.9 * (high - low)), "energy", kind)
    assert len(question.instance(safe=False).nodes) == 40
    assert require_same_optimum(question) in ("equal", "not proven")


@pytest.mark.parametrize("seed", range(5))
def test_beside_the_ops_transfers_are_never_dearer(seed: int) -> None:
    """The planner "poet", whose transfers run beside the ops, against the published optimum."""
    draw = Random(seed)
    task = made_step(seed, draw.randint(3, 5), draw.choice(("chain", "branching")), updates="guarded")
    question = replace(drawn_question(draw, task), kind="both", parameters_count=True, paging_time_counts=True)
    question = replace(question, memory_bytes=max(question.memory_bytes, lower_bound_bytes(task)))
    theirs = question.published(safe=False)
    if theirs.status != "optimal":
        return
    found = optimal(task, question.limit_bytes, aim=question.aim(overlap=True), time_limit_s=LIMIT_S, gap=0.0)
    least = their_value(theirs, question)
    assert least is not None
    assert found.order is not None
    assert question.value(found.order, overlap=True) <= least * (1 + NEARLY)


def test_the_planner_poet_is_as_good_as_poet() -> None:
    task = made_step(9, 5, "branching", updates="guarded")
    low, high = lower_bound_bytes(task), task.keep_all.peak_bytes
    question = Question(task, low + (high - low) // 3)
    theirs = question.published(safe=False)
    made = et.plan(task.graph, task.costs, et.Budget(question.memory_bytes), planner="poet", updates=task.updates)
    assert theirs.status == "optimal"
    assert theirs.energy_j is not None
    assert theirs.energy_j > question.value(task.order)  # this budget costs something
    assert made.energy_j is not None
    assert made.energy_j <= theirs.energy_j * 1.005  # it stops within half a percent of its bound
