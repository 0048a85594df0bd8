"""Dynamic tensor rematerialization, played on graphs."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.plan.plan import Updates
from edgetrain.plan.planners.dtr import Heuristic, dtr
from tests.plan.problems import STEPS, budget, check_order, small

HEURISTICS: tuple[Heuristic, ...] = ("dtr", "dtr_eq", "lru", "size")


@settings(max_examples=80, deadline=None)
@given(
    **STEPS,
    part=st.floats(0.3, 1.0),
    heuristic=st.sampled_from(HEURISTICS),
)
def test_every_order_is_within_the_budget_and_legal(
    name: str, updates: Updates, part: float, heuristic: Heuristic
) -> None:
    check_order(small(name, updates), part, partial(dtr, heuristic=heuristic))


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_it_recomputes_where_memory_is_short_and_only_there(heuristic: Heuristic) -> None:
    problem = small("residual")
    assert dtr(problem, problem.keep_all.peak_bytes, heuristic=heuristic) == problem.order
    order = dtr(problem, budget(problem, 0.7), heuristic=heuristic)
    assert order is not None
    assert len(order) > len(problem.order)
    assert dtr(problem, problem.keep_all.persistent_bytes, heuristic=heuristic) is None


def test_the_heuristics_differ() -> None:
    problem = small("residual")
    assert len({dtr(problem, budget(problem, 0.55), heuristic=heuristic) for heuristic in HEURISTICS}) > 1
