"""Melon's pool and its eviction by TPS: the rule, the promise, and that each eviction is the one of the formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgetrain as et
from edgetrain.costs.table import Costs, OpCost, Run
from edgetrain.plan import registry
from edgetrain.plan.layout import Block, Layout
from edgetrain.plan.layout import check as check_layout
from edgetrain.plan.plan import Updates
from edgetrain.plan.planner import Request, Schedule
from edgetrain.plan.planners.melon import Calibrated, Hoist, calibrate, melon, pool
from edgetrain.plan.problem import Problem, problem
from tests.plan.problems import NETS, STEPS, budget, check, small

# ---- the pool

blocks_of_a_pool = st.lists(
    st.builds(lambda n, start, length: Block(n, start, start + length), st.integers(0, 700), st.integers(0, 12),
              st.integers(1, 9)),
    max_size=14,
)  # fmt: skip


def plain_pool(blocks: Sequence[Block]) -> list[int]:
    """The rule, byte ranges tried one by one: every multiple of 64 at which the block could lie."""
    size = [(block.n_bytes + 63) // 64 * 64 for block in blocks]
    rule = sorted(range(len(blocks)), key=lambda n: (blocks[n].start - blocks[n].end, -size[n], blocks[n].start, n))
    offsets: dict[int, int] = {}
    for n in (n for n in rule if size[n]):
        taken = {
            cell
            for m, offset in offsets.items()
            if blocks[m].start < blocks[n].end and blocks[n].start < blocks[m].end
            for cell in range(offset, offset + size[m], 64)
        }
        top = max(taken, default=-64) + 64
        gaps: list[tuple[int, int]] = []  # bytes and place of each run of free cells beneath the top
        for cell in range(0, top, 64):
            if cell not in taken:
                if gaps and sum(gaps[-1]) == cell:
                    gaps[-1] = (gaps[-1][0] + 64, gaps[-1][1])
                else:
                    gaps.append((64, cell))
        offsets[n] = min((gap for gap in gaps if gap[0] >= size[n]), default=(0, top))[1]
    return [offsets.get(n, 0) for n in range(len(blocks))]


@settings(max_examples=200, deadline=None)
@given(blocks_of_a_pool)
def test_the_pool_is_laid_out_by_the_rule(blocks: list[Block]) -> None:
    found = pool(blocks)
    check_layout(blocks, found)
    assert list(found.offsets) == plain_pool(blocks)


def test_long_lives_lie_beneath_short_ones_and_gaps_are_filled() -> None:
    short, long, middle = Block(64, 0, 2), Block(128, 1, 11), Block(100, 1, 5)
    assert pool([short, long, middle]).offsets == (256, 0, 128)
    # When the last one comes, the first and the third are gone: of the gaps of 192 and 128 bytes it takes the smaller.
    standing = [Block(192, 0, 20), Block(64, 10, 29), Block(128, 2, 20), Block(64, 15, 30)]
    assert pool(standing).offsets == (0, 192, 256, 384)
    assert pool([*standing, Block(100, 22, 25)]).offsets == (0, 192, 256, 384, 256)
    assert pool([*standing, Block(129, 22, 25)]).offsets == (0, 192, 256, 384, 0)


def test_equal_lives_and_sizes_go_by_birth_wherever_they_stand_in_the_list() -> None:
    assert pool([Block(64, 3, 6), Block(64, 1, 4), Block(64, 2, 5)]).offsets == (128, 0, 64)
    assert pool([Block(64, 0, 3), Block(65, 1, 4)]).offsets == (128, 0)
    assert pool([]) == Layout((), 0, 0, "Melon's pool")


# ---- orders


def check_pool(given: Problem, found: Calibrated, limit: int, alignment: int = 64) -> None:
    """The pool is legal and within the budget, and holds what the account of lifetimes counts."""
    check_layout(found.blocks, found.layout, alignment=alignment)
    lasting = given.keep_all.persistent_bytes
    assert lasting + found.layout.height_bytes <= limit
    assert given.peak_bytes(found.order) <= lasting + found.layout.live_peak_bytes


@settings(max_examples=50, deadline=None)
@given(
    **STEPS,
    part=st.floats(0.2, 1.1),
    hoist=st.sampled_from(["at once", "at once", "last"]),
    alignment=st.sampled_from([1, 64]),
)
def test_every_order_is_within_the_budget_and_legal(
    name: str, updates: Updates, part: float, hoist: Hoist, alignment: int
) -> None:
    task = small(name, updates)
    limit = budget(task, part)
    found = calibrate(task, limit, hoist=hoist, alignment=alignment)
    if found is not None:
        check(task, found.order, limit)
        check_pool(task, found, limit, alignment)
    alive = calibrate(task, limit, pooled=False, hoist=hoist)
    if alive is not None:
        check(task, alive.order, limit)
        check_layout(alive.blocks, alive.layout)
        assert alive.layout == pool(alive.blocks)


@pytest.mark.parametrize("name", sorted(NETS))
def test_nothing_is_recomputed_where_the_pool_of_all_fits(name: str) -> None:
    task = small(name)
    whole = calibrate(task, 10**9)
    assert whole is not None
    assert (whole.order, whole.evictions) == (task.order, ())
    limit = task.keep_all.persistent_bytes + pool(whole.blocks).height_bytes
    assert melon(task, limit) == task.order
    below = melon(task, task.keep_all.peak_bytes - 1)
    assert below != task.order


@pytest.mark.parametrize("name", ["chain", "residual", "attention"])
def test_it_saves_memory_by_recomputing(name: str) -> None:
    task = small(name)
    order = melon(task, budget(task, 0.75))
    assert order is not None
    assert len(order) > len(task.order)
    assert melon(task, budget(task, 0.75)) == order


def test_an_early_hoist_meets_budgets_that_a_late_one_does_not() -> None:
    task = small("residual")
    parts = [part / 20 for part in range(8, 20)]
    met = [melon(task, budget(task, part)) is not None for part in parts]
    late = [melon(task, budget(task, part), hoist="last") is not None for part in parts]
    assert sum(met) > sum(late)


def test_what_no_pool_can_meet() -> None:
    task = small("chain")
    assert melon(task, task.keep_all.persistent_bytes) is None
    with pytest.raises(et.Infeasible) as refused:
        et.plan(task.graph, task.costs, et.Budget(task.keep_all.persistent_bytes), planner="melon", use_cache=False)
    smallest = et.Budget(refused.value.smallest_bytes)
    made = et.plan(task.graph, task.costs, smallest, planner="melon", use_cache=False)
    assert made.planner == "melon"
    assert made.peak_bytes <= refused.value.smallest_bytes


def test_a_budget_that_it_fails_is_kept_by_the_plan_for_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    task = small("residual")
    limit = budget(task, 0.8)

    def fails_here(request: Request) -> Schedule:
        return Schedule(None if request.budget_bytes == limit else melon(request.problem, request.budget_bytes))

    monkeypatch.setitem(registry._PLANNERS, "melon", replace(registry.named("melon"), find=fails_here))
    made = et.plan(task.graph, task.costs, et.Budget(limit), planner="melon", updates=task.updates, use_cache=False)
    assert made.peak_bytes <= limit
    assert made.recomputed


# ---- what is evicted


def with_times(given: Problem, again_s: dict[int, float]) -> Problem:
    """The same problem without workspaces, each op of one second but these."""
    ops = [OpCost({"first": Run(again_s.get(n, 1.0))}) for n in range(len(given.graph.ops))]
    return problem(given.graph, replace(given.costs, ops=tuple(ops)), given.updates)


def test_the_largest_tps_goes_first() -> None:
    """Six layers, each one addmm and one tanh of 1,024 bytes and one second; the backward pass reads what tanh made.

                released after   read again at   freed   ops to make it again      TPS ÷ bytes
    tanh_1           4                75           70      2                          35, goes first
    tanh_2           7                64           56      2, or 4 without tanh_1     28, then 14: goes last
    tanh_3          10                53           42      2                          21, goes second
    """
    task = with_times(small("chain"), {})
    found = calibrate(task, budget(task, 0.75))
    assert found is not None
    names = [task.graph.ops[task.maker[eviction.storage]].name for eviction in found.evictions]
    assert names == ["tanh_1", "tanh_3", "tanh_2"]
    assert [eviction.tps / 1024 for eviction in found.evictions] == pytest.approx([35, 21, 14])


def test_what_takes_long_to_make_again_stays() -> None:
    plain = small("chain")
    dear = next(number for number, op in enumerate(plain.graph.ops) if op.name == "tanh_1")
    task = with_times(plain, {dear: 100.0})
    found = calibrate(task, budget(task, 0.8))
    assert found is not None
    assert found.evictions
    assert dear not in [task.maker[eviction.storage] for eviction in found.evictions]


def largest_tps(given: Problem, found: Calibrated, number: int) -> tuple[float, float]:
    """The TPS of an eviction, and the largest at that moment, played anew from the order alone."""
    order, eviction = found.order, found.evictions[number]
    ready, position = given.tables, given.position
    seen: set[int] = set()
    first_run = [not (op in seen or seen.add(op)) for op in order]  # type: ignore[func-returns-value]
    running = next(t for t in range(eviction.time, len(order)) if first_run[t])  # the op that the chain is for
    now = position[order[running]]
    coming = {at: at - now + running for at in range(now, len(given.order))}  # position → time, as it stood
    locked = {s for t in range(eviction.time, running + 1) for s in given.reads[order[t]]}
    locked |= set(given.makes[order[eviction.time]])
    last: dict[int, int] = {}
    gone: dict[int, int] = {e.storage: e.time for e in found.evictions[:number]}
    for t, op in enumerate(order[: eviction.time]):
        last |= dict.fromkeys((*given.reads[op], *given.makes[op]), t)
        for s in given.makes[op]:
            if gone.get(s, t + 1) <= t:
                del gone[s]
    uses = {s: [at for at in coming if s in ready.reads[at]] for s in last}
    begin = max((t + 1 for t in range(eviction.time) if first_run[t]), default=0)  # of the chain, if there is one
    in_chain = {s for op in order[begin : eviction.time] for s in given.makes[op]}
    live = {s for s in last if s not in gone and (uses[s] or s in locked & in_chain)}

    def missing(s: int) -> set[int]:
        op = given.maker[s]
        return {op}.union(*(missing(r) for r in given.reads[op] if r not in live))

    def tps(s: int) -> float:
        time_s = sum(given.costs.ops[op].again_s for op in missing(s))
        return given.size[s] * (coming[uses[s][0]] - last[s] - 1) / time_s

    candidates = [s for s in live - locked if uses[s] and uses[s][0] <= ready.until[s]]
    return tps(eviction.storage), max(tps(s) for s in candidates)


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(["chain", "residual", "attention"]), part=st.floats(0.4, 0.95))
def test_every_eviction_is_of_the_largest_tps(name: str, part: float) -> None:
    task = small(name)
    found = calibrate(task, budget(task, part))
    for number in range(len(found.evictions) if found else 0):
        assert found is not None
        taken, largest = largest_tps(task, found, number)
        assert taken == pytest.approx(largest, rel=1e-5)
        assert found.evictions[number].tps == pytest.approx(taken, rel=1e-5)


def test_costs_of_another_graph_are_refused() -> None:
    task = small("tiny")
    with pytest.raises(et.UserError):
        et.plan(task.graph, Costs("other", "modelled", task.costs.ops), et.Budget(10**9), planner="melon")
