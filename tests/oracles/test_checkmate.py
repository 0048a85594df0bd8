"""The oracle: equal to brute force on tiny chains, and never slower than a planner."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations

import pytest

from edgetrain.errors import UserError
from edgetrain.plan.planners.chen import chen
from edgetrain.plan.planners.dtr import dtr
from edgetrain.plan.planners.fast import fast
from edgetrain.plan.planners.melon import melon
from edgetrain.plan.problem import Problem
from tests.oracles.checkmate import Proven, checkmate
from tests.plan.problems import budget, check, extra_s, small

PARTS = (1.0, 0.95, 0.9, 0.85, 0.8)
NEARLY_S = 1e-6


@cache
def proven(name: str, part: float) -> Proven | None:
    problem = small(name)
    return checkmate(problem, budget(problem, part))


def insertions(problem: Problem, most: int) -> Iterator[tuple[int, ...]]:
    """The orders with up to `most` ops run again, wherever they may."""
    base = [(at, op) for at, op in enumerate(problem.order) if not problem.is_view[op]]
    places = [(at, op) for at, _ in base for _, op in base if problem.position[op] < at < problem.deadline[op]]
    for count in range(most + 1):
        for chosen in combinations(places, count):
            again: dict[int, list[int]] = {}
            for at, op in chosen:
                again.setdefault(at, []).append(op)
            order: list[int] = []
            for at, op in enumerate(problem.order):
                order += sorted(again.get(at, []), key=problem.position.__getitem__)
                order.append(op)
            yield tuple(order)


def test_it_equals_brute_force_on_a_tiny_chain() -> None:
    problem = small("tiny")
    # An input that is gone when a recompute reads it lives on until then, so every such order is legal.
    tried = {(problem.peak_bytes(order), extra_s(problem, order)) for order in insertions(problem, 2)}
    for part in PARTS:
        limit = budget(problem, part)
        best_s = min((time_s for peak, time_s in tried if peak <= limit), default=None)
        found = proven("tiny", part)
        if best_s is not None:
            assert found is not None
            assert found.extra_s <= best_s + NEARLY_S
        if found is not None and len(found.order) <= len(problem.order) + 2:
            assert best_s == pytest.approx(found.extra_s, abs=NEARLY_S)


@pytest.mark.parametrize("name", ["short", "dropout"])
@pytest.mark.parametrize("part", PARTS)
def test_its_orders_are_within_the_budget_legal_and_proven(name: str, part: float) -> None:
    problem = small(name)
    limit = budget(problem, part)
    found = proven(name, part)
    if found is not None:
        check(problem, found.order, limit)
        assert found.extra_s == pytest.approx(found.bound_s, abs=NEARLY_S)
    for order in (fast(problem, limit), dtr(problem, limit), chen(problem, limit), melon(problem, limit)):
        if order is not None:
            assert found is not None
            assert found.extra_s <= extra_s(problem, order) + NEARLY_S


def test_all_is_kept_where_all_fits_and_nothing_fits_in_nothing() -> None:
    problem = small("short")
    assert proven("short", 1.0) == Proven(problem.order, 0.0, 0.0)
    assert checkmate(problem, problem.keep_all.persistent_bytes) is None


def test_it_refuses_what_is_too_large() -> None:
    with pytest.raises(UserError, match="small graphs"):
        checkmate(small("residual"), 10**9)


def test_time_that_runs_out_is_no_answer() -> None:
    problem = small("dropout")
    with pytest.raises(UserError, match="in its time"):
        checkmate(problem, budget(problem, 0.85), time_limit_s=0.0)
