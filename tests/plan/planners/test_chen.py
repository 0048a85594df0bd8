"""Checkpoints at the borders of segments."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.plan.plan import Updates
from edgetrain.plan.planners.chen import chen
from tests.plan.problems import NETS, STEPS, check, check_order, extra_s, small


@settings(max_examples=40, deadline=None)
@given(
    **STEPS,
    part=st.floats(0.3, 1.0),
)
def test_every_order_is_within_the_budget_and_legal(name: str, updates: Updates, part: float) -> None:
    check_order(small(name, updates), part, chen)


@pytest.mark.parametrize("name", sorted(NETS))
@pytest.mark.parametrize("segments", [None, 1, 2, 3, 5, 8])
def test_no_more_than_a_second_forward_pass(name: str, segments: int | None) -> None:
    problem = small(name)
    order = chen(problem, None, segments=segments)
    assert order is not None
    check(problem, order, None)
    counts = Counter(op for op in order)
    assert max(counts.values()) <= 2
    forward = [op for op in problem.order if problem.graph.ops[op].phase == "forward"]
    assert extra_s(problem, order) < problem.costs.time_s(forward)
    assert all(problem.graph.ops[op].phase == "forward" for op, count in counts.items() if count == 2)


@pytest.mark.parametrize("name", ["chain", "residual"])
def test_without_a_budget_it_saves_memory(name: str) -> None:
    problem = small(name)
    order = chen(problem, None)
    assert order is not None
    assert problem.peak_bytes(order) < problem.keep_all.peak_bytes


def test_one_segment_keeps_all() -> None:
    problem = small("residual")
    assert chen(problem, None, segments=1) == problem.order
    assert chen(problem, problem.keep_all.peak_bytes) == problem.order
    assert chen(problem, problem.keep_all.persistent_bytes) is None
