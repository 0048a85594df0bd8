"""The planner `optimal`: its rows never ask for more than a schedule holds, and it is as good as the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest

from edgetrain.plan.mip.places import places_over
from edgetrain.plan.mip.program import Formulation, Values
from edgetrain.plan.mip.search import DEPTH, optimal
from edgetrain.plan.plan import Updates
from edgetrain.plan.planners.dtr import Heuristic, dtr
from edgetrain.plan.planners.fast import ScoreName, fast
from edgetrain.plan.problem import Problem
from tests.oracles.checkmate import checkmate
from tests.plan.problems import budget, check, extra_s, small

NETS = ("chain", "residual", "dropout", "attention")
PARTS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
NEARLY_S = 1e-6


def in_class(form: Formulation, order: tuple[int, ...]) -> Values | None:
    """The solution of the formulation that is this order; None where it is not of the class."""
    values = form.values(order)
    if values is None or [n for n in form.order(values) if n in form.at] != [n for n in order if n in form.at]:
        return None
    logical = all(sum(a * values[v] for v, a in row.items()) <= most + 1e-9 for row, most in form.logic())
    return values if logical else None


def orders(task: Problem) -> Iterator[tuple[int, ...]]:
    """What greedy planners make of the problem: schedules of every kind."""
    yield task.order
    for part in PARTS:
        limit = budget(task, part)
        found = [fast(task, limit, score=score, tries=1) for score in get_args(ScoreName)]
        found += [dtr(task, limit, heuristic=heuristic) for heuristic in get_args(Heuristic)]
        yield from (order for order in found if order is not None)


@pytest.mark.parametrize("updates", ["early", "guarded"])
@pytest.mark.parametrize("name", NETS)
def test_no_row_counts_more_than_a_schedule_of_the_class_holds(name: str, updates: Updates) -> None:
    task = small(name, updates)
    form = Formulation(task, depth=DEPTH)
    solutions = {order: values for order in orders(task) if (values := in_class(form, order)) is not None}
    assert len(solutions) > 5
    lowest = min(task.peak_bytes(order) for order in solutions)
    rows = [*form.while_running(), *(row for rows in form.while_recomputing() for row in rows)]
    for order, values in solutions.items():
        rows += [form.cut(values, place) for place in places_over(task, order, lowest) if place.again]
    for order, values in solutions.items():
        held = task.peak_bytes(order)
        assert [row for row in rows if row.breaks(values, held)] == []


@pytest.mark.parametrize("name", NETS[1:])
def test_a_cut_tells_what_a_recompute_holds(name: str) -> None:
    task = small(name)
    form = Formulation(task, depth=DEPTH)
    told = 0
    for order in orders(task):
        values = in_class(form, order)
        for place in places_over(task, order, 0) if values is not None else ():
            if place.again:
                assert values is not None
                row = form.cut(values, place)
                assert row.breaks(values, place.held_bytes - 1)
                assert not row.breaks(values, place.held_bytes)
                told += 1
    assert told


@pytest.mark.parametrize("name", ["short", "dropout"])
@pytest.mark.parametrize("part", [0.95, 0.9, 0.85, 0.8])
def test_it_equals_the_oracle_where_the_oracle_stays_in_its_class(name: str, part: float) -> None:
    task = small(name)
    limit = budget(task, part)
    proven = checkmate(task, limit)
    found = optimal(task, limit, start=fast(task, limit), gap=0.0, time_limit_s=30)
    if proven is None:
        assert found.order is None
        return
    if found.order is not None:
        check(task, found.order, limit)
        assert extra_s(task, found.order) >= proven.extra_s - NEARLY_S
    if in_class(Formulation(task, depth=DEPTH), proven.order) is not None:
        assert found.extra == pytest.approx(proven.extra_s, abs=NEARLY_S)
        assert found.extra_bound <= proven.extra_s + NEARLY_S
