"""The greedy planner: within the budget by construction, legal, and good enough to rely on."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.plan.plan import Updates
from edgetrain.plan.planners.fast import SCORES, ScoreName, fast
from tests.plan.problems import NETS, STEPS, budget, check_order, extra_s, small


@settings(max_examples=80, deadline=None)
@given(
    **STEPS,
    part=st.floats(0.2, 1.0),
    score=st.sampled_from(sorted(SCORES)),
    tries=st.integers(1, 8),
    polish=st.booleans(),
)
def test_every_order_is_within_the_budget_and_legal(
    name: str, updates: Updates, part: float, score: ScoreName, tries: int, polish: bool
) -> None:
    check_order(small(name, updates), part, partial(fast, score=score, tries=tries, polish=polish))


@pytest.mark.parametrize("name", sorted(NETS))
def test_nothing_is_recomputed_where_all_fits(name: str) -> None:
    problem = small(name)
    assert fast(problem, problem.keep_all.peak_bytes) == problem.order
    assert fast(problem, problem.keep_all.peak_bytes - 1) != problem.order


def test_a_budget_that_nothing_can_meet() -> None:
    problem = small("chain")
    assert fast(problem, problem.keep_all.persistent_bytes) is None


@pytest.mark.parametrize("name", ["residual", "attention"])
def test_it_finds_orders_down_to_what_single_ops_need(name: str) -> None:
    problem = small(name)
    ready = problem.tables
    # What one op needs at least: its inputs, its results, its workspace, and what can never be made again.
    least, waiting = 0, dict[int, int]()
    for at, uses in enumerate(ready.next_use):
        fixed = {s for s, use in waiting.items() if use > ready.until[s]} | set(ready.reads[at])
        need = sum(ready.size[s] for s in fixed) + ready.persistent_bytes + sum(ready.undo[: at + 1])
        if not ready.overwrites[at]:
            need += sum(ready.size[s] for s in ready.makes[at]) + ready.first_workspace[at]
        least = max(least, need)
        waiting |= uses
        waiting = {s: use for s, use in waiting.items() if use <= len(ready.order)}
    above = least - ready.persistent_bytes
    order = fast(problem, ready.persistent_bytes + int(1.25 * above))
    assert order is not None


def test_more_tries_are_never_worse_and_polish_helps() -> None:
    problem = small("residual")
    limit = budget(problem, 0.6)

    def time_s(tries: int, polish: bool = True) -> float:
        order = fast(problem, limit, tries=tries, polish=polish)
        assert order is not None
        return extra_s(problem, order)

    times = [time_s(tries) for tries in (1, 2, 4, 6, 12)]
    assert times == sorted(times, reverse=True)
    assert time_s(1) <= time_s(1, polish=False)


def test_the_same_order_every_time() -> None:
    problem = small("residual")
    limit = budget(problem, 0.5)
    assert fast(problem, limit, tries=9) == fast(problem, limit, tries=9)
