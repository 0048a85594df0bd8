"""POET's program: equal to an exhaustive search by its own rules, never better than what is possible at all; each
switch does what it says; the check refuses what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import edgetrain as et
from edgetrain.costs.table import Costs, OpCost, Run, Store
from edgetrain.errors import InternalError, UserError
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.validate import validate
from tests.oracles.checkmate import checkmate
from tests.oracles.poet_as_published import (
    MOST_NODES,
    Instance,
    Matrix,
    Node,
    Paging,
    Schedule,
    Solution,
    Switches,
    instance,
    solve,
)
from tests.oracles.poet_check import check
from tests.oracles.poet_search import Rules, held, published, unbound
from tests.plan.problems import budget, small

NEARLY = 1e-6


def value(solution: Solution, switches: Switches) -> float | None:
    """What was to be least."""
    if solution.schedule is None:
        assert solution.status == "infeasible"
        return None
    assert solution.status == "optimal"
    return solution.energy_j if switches.objective == "energy" else solution.time_s


def no_worse(a: float | None, b: float | None) -> bool:
    return b is None or (a is not None and a <= b + NEARLY)


# ---- random instances


def drawn_node(random: Random, scale: int) -> Node:
    page = Paging(*(float(random.randint(0, 4)) for _ in range(4)))
    return Node(
        time_s=float(random.randint(0, 9)),
        n_bytes=scale * random.choice((0, 1, 2, 4, 4, 5, 6)) + (random.randint(0, 3) if scale > 1 else 0),
        energy_j=float(random.randint(0, 9)),
        paging=page if random.random() < 0.8 else None,
        sort=random.choice(("input", "forward", "forward", "backward")),
        again_until=random.randint(0, 5) if random.random() < 0.2 else None,
    )


def drawn(seed: int, most: int) -> Instance:
    """Half of the instances are as a training step is: late nodes read what early ones made. The budget is around what
    a node needs when it runs, so that the results that it does not need must go."""
    random = Random(seed)
    scale = random.choice((1, 1, 600_000))  # with sizes that differ by single bytes
    n = random.choice((3, 4, most, most, most))
    made = tuple(drawn_node(random, scale) for _ in range(n))
    reads = [{u for u in range(v) if random.random() < 0.25} for v in range(n)]
    if random.random() < 0.5:
        reads = [{v - 1} if v > 0 and random.random() < 0.4 else set() for v in range(n)]
        for v in range(n // 2 + 1, n):
            reads[v].add(n - 1 - v)
    needed = max(node.n_bytes + sum(made[u].n_bytes for u in read) for node, read in zip(made, reads, strict=True))
    parameters = random.randint(0, 3)
    memory = parameters + max(0, needed + random.choice((-1, 0, 0, 0, scale, 2 * scale, 4 * scale)))
    time_s = sum(node.time_s for node in made) + random.randint(0, 15) if random.random() < 0.4 else None
    edges = tuple((u, v) for v, read in enumerate(reads) for u in sorted(read))
    return Instance(made, edges, parameters, memory, time_s)


def instances(most: int = 5) -> st.SearchStrategy[Instance]:
    """From seeds: drawn one by one, too few of the numbers would make anything go and come back."""
    return st.integers(0, 2**32).map(lambda seed: drawn(seed, most))


switches_of_all_kinds = st.builds(
    Switches,
    parameters_count=st.booleans(),
    paging_time_counts=st.booleans(),
    free_inputs=st.booleans(),
    backward_again=st.booleans(),
    recompute=st.sampled_from([True, True, False]),
    page=st.sampled_from([True, True, False]),
    objective=st.sampled_from(["energy", "time"]),
)


def counted(solution: Solution, given: Instance, switches: Switches) -> float | None:
    """`value`, without the transfers where their time does not count."""
    found = value(solution, switches)
    if found is None or switches.objective == "energy" or switches.paging_time_counts:
        return found
    assert solution.schedule is not None
    for i, node in enumerate(given.nodes):
        if node.paging is not None:
            found -= node.paging.in_s * sum(row[i] for row in solution.schedule.M_in)
            found -= node.paging.out_s * sum(row[i] for row in solution.schedule.M_out)
    return found


def masks(matrix: Matrix) -> list[int]:
    return [sum(1 << i for i, there in enumerate(row) if there) for row in matrix]


def published_peak(given: Instance, schedule: Schedule) -> int:
    """The most of the published account, by the code of the search."""
    rules = Rules(given, Switches())
    ram, runs = masks(schedule.S_ram), masks(schedule.R)
    stages = zip(ram, runs, [*ram[1:], 0], strict=True)
    return given.parameter_bytes + max(held(rules, *stage) for stage in stages)


@settings(max_examples=300, deadline=None)
@given(instances(), switches_of_all_kinds)
def test_it_equals_an_exhaustive_search_by_the_same_rules(given: Instance, switches: Switches) -> None:
    found = solve(given, switches)
    least = published(given, switches)
    if least is None:
        assert found == Solution("infeasible", math.inf)
        return
    assert counted(found, given, switches) == pytest.approx(least, abs=NEARLY)
    assert found.bound == pytest.approx(least, abs=NEARLY)
    assert found.schedule is not None
    assert check(given, found, switches) <= published_peak(given, found.schedule) == found.peak_bytes


@settings(max_examples=100, deadline=None)
@given(instances(6), switches_of_all_kinds)
def test_it_is_never_better_than_what_is_possible_at_all(given: Instance, switches: Switches) -> None:
    found = solve(given, switches)
    assert no_worse(unbound(given, switches), counted(found, given, switches))


@settings(max_examples=60, deadline=None)
@given(instances(6), st.sampled_from(["energy", "time"]))
def test_both_together_are_no_worse_than_either_alone(given: Instance, objective: Any) -> None:
    kinds = [
        Switches(objective=objective, recompute=again, page=page)
        for again, page in ((True, True), (True, False), (False, True), (False, False))
    ]
    joint, *alone, neither = (value(solve(given, switches), switches) for switches in kinds)
    assert all(no_worse(joint, other) and no_worse(other, neither) for other in alone)


@settings(max_examples=60, deadline=None)
@given(instances(6), st.integers(0, 4), st.integers(0, 8))
def test_more_memory_or_time_is_never_worse(given: Instance, more_bytes: int, more_s: int) -> None:
    larger = replace(given, memory_bytes=given.memory_bytes + more_bytes)
    longer = replace(given, time_s=None if given.time_s is None else given.time_s + more_s)
    here, *there = (value(solve(task), Switches()) for task in (given, larger, longer))
    assert all(no_worse(other, here) for other in there)


# ---- one squeeze, and what each switch makes of it
#
#    0 ──► 1     2          Result 0 takes 4 bytes, and result 2 takes 4: it must go and come back in 4 bytes.
#    └───────────────► 3    Paging it takes 1 + 1 J and 20 + 10 s, computing it again 5 J and 3 s.

SQUEEZE = Instance(
    nodes=(
        Node(3.0, 4, 5.0, Paging(20.0, 10.0, 1.0, 1.0)), Node(1.0, 0, 1.0), Node(1.0, 4, 1.0), Node(1.0, 0, 1.0),
    ),
    edges=((0, 1), (0, 3)),
    parameter_bytes=0,
    memory_bytes=4,
)  # fmt: skip
ONCE_J, ONCE_S = 8.0, 6.0


def with_node(given: Instance, number: int, **changes: Any) -> Instance:
    changed = replace(given.nodes[number], **changes)
    return replace(given, nodes=(*given.nodes[:number], changed, *given.nodes[number + 1 :]))


def test_it_pages_where_that_takes_less_energy_and_recomputes_where_that_takes_less_time() -> None:
    energy, time = solve(SQUEEZE), solve(SQUEEZE, Switches(objective="time"))
    assert (energy.energy_j, energy.time_s, energy.peak_bytes) == (ONCE_J + 2.0, ONCE_S + 30.0, 4)
    assert (time.energy_j, time.time_s, time.peak_bytes) == (ONCE_J + 5.0, ONCE_S + 3.0, 4)
    assert energy.schedule is not None
    assert time.schedule is not None
    assert masks(energy.schedule.R) == [0b1, 0b10, 0b100, 0b1000]
    assert masks(energy.schedule.M_out) == [0, 0b1, 0, 0]
    assert masks(energy.schedule.S_sd) == [0, 0, 0b1, 0]
    assert masks(energy.schedule.M_in) == [0, 0, 0b1, 0]
    assert masks(energy.schedule.S_ram) == [0, 0b1, 0, 0b1]
    assert masks(time.schedule.R) == [0b1, 0b10, 0b100, 0b1001]


def test_recompute_and_page_fix_their_variables_to_0() -> None:
    assert solve(SQUEEZE, Switches(page=False)).energy_j == ONCE_J + 5.0
    assert solve(SQUEEZE, Switches(recompute=False, objective="time")).time_s == ONCE_S + 30.0
    assert solve(SQUEEZE, Switches(recompute=False, page=False)).status == "infeasible"
    roomy = replace(SQUEEZE, memory_bytes=8)
    assert solve(roomy, Switches(recompute=False, page=False)).energy_j == ONCE_J


def test_parameters_count_or_are_left_out_as_the_released_planner_does() -> None:
    task = replace(SQUEEZE, parameter_bytes=100)
    assert solve(task).status == "infeasible"
    assert solve(replace(task, memory_bytes=104)).peak_bytes == 104
    wrong = solve(task, Switches(parameters_count=False))
    assert wrong.peak_bytes == 104 > task.memory_bytes


def test_paging_time_counts_or_is_left_out_as_the_released_planner_does() -> None:
    task = replace(SQUEEZE, time_s=ONCE_S)
    assert solve(task).status == "infeasible"
    wrong = solve(task, Switches(paging_time_counts=False))
    assert wrong.time_s == ONCE_S + 30.0 > ONCE_S
    assert solve(replace(task, time_s=ONCE_S + 30.0)).energy_j == ONCE_J + 2.0
    assert solve(replace(task, time_s=ONCE_S + 3.0)).energy_j == ONCE_J + 5.0


def test_an_input_is_had_once_or_for_nothing_as_the_released_planner_does() -> None:
    task = with_node(SQUEEZE, 0, sort="input")
    assert solve(task).energy_j == ONCE_J + 2.0
    assert solve(task, Switches(page=False)).status == "infeasible"
    assert solve(task, Switches(page=False, free_inputs=True)).energy_j == ONCE_J


def test_gradients_run_again_as_published_or_not() -> None:
    task = with_node(SQUEEZE, 0, sort="backward", paging=None)
    assert solve(task).energy_j == ONCE_J + 5.0
    assert solve(task, Switches(backward_again=False)).status == "infeasible"


def test_a_node_runs_again_before_its_stage_only() -> None:
    assert solve(with_node(SQUEEZE, 0, again_until=4, paging=None)).energy_j == ONCE_J + 5.0
    assert solve(with_node(SQUEEZE, 0, again_until=3, paging=None)).status == "infeasible"


# ---- where the published account is not exact


def test_it_writes_only_what_was_there_when_the_stage_began() -> None:
    """Without a reader in stage 1, result 0 stays beside result 1 while it is written."""
    page = Paging(1.0, 1.0, 1.0, 1.0)
    task = Instance((Node(1.0, 4, 1.0, page, "input"), Node(1.0, 4, 1.0), Node(1.0, 0, 1.0)), ((0, 2),), 0, 4)
    assert unbound(task, Switches()) == 5.0
    assert solve(task).status == "infeasible"


def test_what_is_read_back_is_there_from_the_first_run_of_the_stage() -> None:
    """Stage 5 makes 3 again by way of 2, and only then needs result 0; the published account holds 0 all the while."""
    page = Paging(1.0, 1.0, 1.0, 1.0)
    sizes = (4, 0, 4, 2, 6, 0)
    made = [Node(1.0, n_bytes, 1.0) for n_bytes in sizes]
    made[0] = Node(1.0, 4, 1.0, page, "input")
    task = Instance(tuple(made), ((0, 1), (0, 5), (2, 3), (3, 5)), 0, 6)
    assert unbound(task, Switches()) == 10.0
    assert solve(task).status == "infeasible"


def test_no_node_runs_twice_in_a_stage() -> None:
    """To make 4 again, 0 must run before 1 and again before 4, with 2 between them."""
    sizes = (4, 1, 5, 1, 1, 8, 0)
    edges = ((0, 1), (1, 2), (2, 3), (0, 4), (3, 4), (4, 6))
    task = Instance(tuple(Node(1.0, n_bytes, 1.0) for n_bytes in sizes), edges, 0, 8)
    assert unbound(task, Switches()) is not None
    assert solve(task).status == "infeasible"
    assert solve(replace(task, memory_bytes=10)).status == "optimal"


def test_sizes_that_rounding_decides_on_are_told() -> None:
    """A result of 4 GB and a byte goes where there is a byte to spare; where one is missing, that is not proven."""
    large = with_node(with_node(SQUEEZE, 2, n_bytes=4 * 10**9), 0, n_bytes=4 * 10**9 + 1)
    enough = solve(replace(large, memory_bytes=4 * 10**9 + 1))
    assert (enough.status, enough.energy_j, enough.peak_bytes) == ("optimal", ONCE_J + 2.0, 4 * 10**9 + 1)
    scarce = solve(replace(large, memory_bytes=4 * 10**9))
    assert (scarce.status, scarce.schedule) == ("sizes too uneven", None)
    assert solve(replace(large, memory_bytes=3 * 10**9)).status == "infeasible"


# ---- the check


def changed(solution: Solution, name: str, t: int, i: int) -> Solution:
    assert solution.schedule is not None
    matrix: Matrix = getattr(solution.schedule, name)
    rows = [list(row) for row in matrix]
    rows[t][i] = not rows[t][i]
    other = replace(solution.schedule, **{name: tuple(tuple(row) for row in rows)})
    return replace(solution, schedule=other)


@pytest.mark.parametrize(
    ("name", "t", "i", "what"),
    [
        ("R", 0, 0, "does not end with node 0"),
        ("R", 1, 3, "does not end with node 1"),
        ("R", 3, 0, "it says"),
        ("S_ram", 1, 0, "is written, but is not in RAM"),
        ("S_ram", 2, 0, "8 bytes are held"),
        ("S_ram", 3, 0, "node 3 reads"),
        ("S_ram", 3, 2, "8 bytes are held"),
        ("S_sd", 1, 0, "were never written"),
        ("S_sd", 2, 0, "was not in storage"),
        ("M_out", 1, 0, "were never written"),
        ("M_out", 2, 0, "is written, but is not in RAM"),
        ("M_in", 2, 0, "which are not there"),
        ("M_in", 2, 1, "may not be paged"),
    ],
)
def test_the_check_refuses_a_wrong_schedule(name: str, t: int, i: int, what: str) -> None:
    right = solve(SQUEEZE)
    assert check(SQUEEZE, right) == 4
    with pytest.raises(InternalError, match=what):
        check(SQUEEZE, changed(right, name, t, i))


@pytest.mark.parametrize(
    ("task", "switches", "what"),
    [
        (replace(SQUEEZE, memory_bytes=3), Switches(), "4 bytes are held, the budget is 3"),
        (replace(SQUEEZE, parameter_bytes=1), Switches(), "5 bytes are held"),
        (replace(SQUEEZE, time_s=35.9), Switches(), "the budget is 35.9"),
        (SQUEEZE, Switches(page=False), "may not be paged"),
        (with_node(SQUEEZE, 1, energy_j=2.0), Switches(), "it is 11.0"),
        (with_node(SQUEEZE, 1, time_s=2.0), Switches(), "it is 37.0"),
        (replace(SQUEEZE, edges=((0, 1), (0, 3), (2, 3))), Switches(), "node 3 reads"),
    ],
)
def test_the_check_refuses_a_schedule_of_another_instance(task: Instance, switches: Switches, what: str) -> None:
    with pytest.raises(InternalError, match=what):
        check(task, solve(SQUEEZE), switches)


@pytest.mark.parametrize(
    ("task", "switches", "what"),
    [
        (SQUEEZE, Switches(recompute=False), "and nothing may"),
        (with_node(SQUEEZE, 0, sort="input"), Switches(), "the input 0 is had again"),
        (with_node(SQUEEZE, 0, sort="backward"), Switches(backward_again=False), "gradient 0 runs again"),
        (with_node(SQUEEZE, 0, again_until=3), Switches(), "too late"),
    ],
)
def test_the_check_refuses_a_run_that_may_not_be(task: Instance, switches: Switches, what: str) -> None:
    with pytest.raises(InternalError, match=what):
        check(task, solve(SQUEEZE, Switches(page=False)), switches)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"energy_j": 9.0}, "9.0 J"), ({"energy_j": None}, "None J"), ({"time_s": 1.0}, "1.0 s"),
        ({"peak_bytes": 3}, "3 bytes"), ({"bound": 11.0}, "bound"), ({"schedule": None}, "no schedule"),
    ],
)  # fmt: skip
def test_the_check_refuses_wrong_statements(said: dict[str, Any], what: str) -> None:
    with pytest.raises(InternalError, match=what):
        check(SQUEEZE, replace(solve(SQUEEZE), **said))


# ---- what is refused


def test_it_refuses_what_is_too_large_or_makes_no_sense() -> None:
    many = MOST_NODES + 1
    with pytest.raises(UserError, match="small graphs"):
        solve(Instance((Node(1.0, 1, 1.0),) * many, (), 0, 10))
    with pytest.raises(UserError, match="to a later one"):
        replace(SQUEEZE, edges=((1, 1),))
    with pytest.raises(UserError, match="twice"):
        replace(SQUEEZE, edges=((0, 1), (0, 1)))
    with pytest.raises(UserError, match="not negative"):
        with_node(SQUEEZE, 2, time_s=-1.0)
    with pytest.raises(UserError, match="not negative"):
        replace(SQUEEZE, time_s=math.nan)
    with pytest.raises(UserError, match="nothing to schedule"):
        Instance((), (), 0, 10)


def test_energy_that_is_not_known_is_missing() -> None:
    task = with_node(SQUEEZE, 2, energy_j=None)
    with pytest.raises(UserError, match="not known"):
        solve(task)
    found = solve(task, Switches(objective="time"))
    assert (found.energy_j, found.time_s) == (None, ONCE_S + 3.0)
    check(task, found, Switches(objective="time"))


def test_time_that_runs_out_is_no_proof() -> None:
    found = solve(chain(20, 0.5), time_limit_s=0.0)
    assert found.status == "time is up"
    assert 0.0 <= found.bound < math.inf


# ---- chains


def chain(n: int, part: float) -> Instance:
    """Forward nodes, then backward nodes that read the gradient before them and the result that their forward node
    read; the budget is this part of the bytes of all forward results."""
    half = n // 2
    made, edges = [], [(i - 1, i) for i in range(1, n)]
    for i in range(n):
        n_bytes, time_s = 1024 * (4 + 7 * i % 13), 1e-3 * (1 + 5 * i % 11)
        page = Paging(0.5e-3 + n_bytes / 4e6, 0.2e-3 + n_bytes / 8e6, n_bytes / 1e7, n_bytes / 2e7)
        made.append(Node(time_s, n_bytes, 0.5 * time_s, page, "forward" if i < half else "backward"))
        if half < i and n - 1 - i < i - 1:
            edges.append((n - 1 - i, i))
    memory_bytes = int(part * sum(node.n_bytes for node in made[:half]))
    return Instance(tuple(made), tuple(edges), 0, memory_bytes)


@pytest.mark.parametrize("part", [1.2, 0.8, 0.6])
def test_a_chain_of_some_length_is_solved_and_right(part: float) -> None:
    task = chain(16, part)
    found = {
        kind: solve(task, Switches(recompute=kind != "page", page=kind != "again")) for kind in ("", "page", "again")
    }
    for kind, solution in found.items():
        if solution.schedule is not None:
            check(task, solution, Switches(recompute=kind != "page", page=kind != "again"))
    joint = found[""]
    assert joint.status == "optimal"
    assert joint.energy_j == pytest.approx(joint.bound, rel=1e-6)
    assert all(no_worse(joint.energy_j, other.energy_j) for other in found.values())


# ---- captured graphs


@cache
def captured(name: str) -> Problem:
    """A small net whose kernels take no workspace, on a device with storage."""
    plain = small(name)
    store = Store(in_bytes_s=1e6, out_bytes_s=5e5, in_latency_s=1e-4, out_latency_s=2e-4, power_w=0.5)
    ops = tuple(OpCost({"first": Run(cost.time_s, (), 3.0 * cost.time_s)}) for cost in plain.costs.ops)
    return problem(plain.graph, Costs(plain.graph.key, "modelled", ops, store=store), plain.updates)


def order_of(task: Problem, schedule: Schedule) -> tuple[int, ...]:
    ops = [op for op in task.order if not task.is_view[op]]
    stages = list(schedule.R)[: len(ops)]  # the last stage of all is the end of the step
    return tuple(ops[i] for row in stages for i, runs in enumerate(row) if runs)


def test_the_nodes_of_a_graph_are_its_ops() -> None:
    task = captured("tiny")
    made = instance(task, memory_bytes=10**6)
    ops = [op for op in task.order if not task.is_view[op]]
    assert len(made.nodes) == len(ops) + 1
    assert made.parameter_bytes == task.keep_all.persistent_bytes
    assert sum(node.n_bytes for node in made.nodes) == sum(
        n_bytes for n_bytes, lasts in zip(task.size, task.lasting, strict=True) if not lasts
    )
    assert sum(node.time_s for node in made.nodes) == pytest.approx(task.keep_all_time_s)
    first = made.nodes[0]
    assert first.paging is not None
    assert first.paging.out_s == pytest.approx(2e-4 + first.n_bytes / 5e5)
    assert first.paging.in_j == pytest.approx(0.5 * (1e-4 + first.n_bytes / 1e6))
    assert all(node.paging is None for node in made.nodes if node.n_bytes == 0)
    for node, op in zip(made.nodes, ops, strict=False):
        assert (node.sort == "forward") == (task.graph.ops[op].phase == "forward")
        assert node.sort == "forward" or node.again_until == 0


def test_a_result_that_is_written_in_place_is_not_paged() -> None:
    model = nn.Linear(4, 4)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = 2 * model(x)
        y[:, 0].mul_(3.0)
        return y.square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = et.capture(model, loss, optimizer, (torch.randn(16, 4),), use_cache=False)
    ops = (OpCost({"first": Run(1.0, (), 1.0)}),) * len(graph.ops)
    task = problem(graph, Costs(graph.key, "modelled", ops, store=Store(1e6, 1e6, power_w=1.0)), "early")
    made = instance(task, memory_bytes=10**6)
    numbers = [op for op in task.order if not task.is_view[op]]
    changed = {s for op in graph.ops for s in op.writes if not task.lasting[s]}
    assert changed
    for node, op in zip(made.nodes, numbers, strict=False):
        assert (node.paging is None) == (node.n_bytes == 0 or not changed.isdisjoint(task.makes[op]))


def test_without_storage_nothing_is_paged() -> None:
    made = instance(small("tiny"), memory_bytes=10**6)
    assert all(node.paging is None for node in made.nodes)
    assert solve(made, Switches(objective="time")).energy_j is None


@pytest.mark.parametrize("part", [1.1, 0.95, 0.9, 0.8])
def test_what_it_recomputes_of_a_graph_is_a_legal_plan(part: float) -> None:
    task = captured("short")
    limit = budget(task, part)
    switches = Switches(page=False, objective="time")
    found = solve(instance(task, memory_bytes=limit), switches)
    best = checkmate(task, limit)
    if found.schedule is None:
        assert found.status == "infeasible"
        return
    check(instance(task, memory_bytes=limit), found, switches)
    plan = task.plan(order_of(task, found.schedule), planner="poet")
    validate(task.graph, plan)
    assert found.peak_bytes is not None
    assert plan.peak_bytes <= found.peak_bytes <= limit
    assert found.time_s == pytest.approx(plan.time_s)
    assert best is not None  # the exact account leaves more room
    assert found.time_s is not None
    assert best.extra_s <= found.time_s - task.keep_all_time_s + NEARLY


def test_paging_takes_a_graph_below_what_recomputing_can() -> None:
    task = captured("short")
    room = [part for part in (0.9, 0.8, 0.75, 0.7, 0.65) if _solved(task, part, page=True)]
    alone = [part for part in room if _solved(task, part, page=False)]
    assert min(room) < min(alone)


def _solved(task: Problem, part: float, *, page: bool) -> bool:
    given = instance(task, memory_bytes=budget(task, part))
    switches = Switches(page=page)
    found = solve(given, switches)
    if found.schedule is not None:
        check(given, found, switches)
    return found.status == "optimal"
