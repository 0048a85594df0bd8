"""When a run is steady: levels that change, outliers that do not count, drifts that never end."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import UserError
from edgetrain.measure.steady import _costs, changes, steady, warm_up


def noisy(seed: int, steps: int = 100, noise: float = 0.03) -> Any:
    return np.exp(noise * np.random.default_rng(seed).standard_normal(steps))


@pytest.mark.parametrize("kind", ["normal", "laplace", "standard_exponential"])
@pytest.mark.parametrize("steps", [20, 60])
def test_a_steady_run_is_steady_from_the_start(kind: str, steps: int) -> None:
    draw = np.random.default_rng(0)
    runs = [np.exp(0.03 * getattr(draw, kind)(size=steps)) for _ in range(40)]
    found = [steady(run) for run in runs]
    assert np.mean([one.first == 0 for one in found]) >= 0.9
    assert np.mean([one.first is not None for one in found]) >= 0.95


@pytest.mark.parametrize(("slow_steps", "factor"), [(1, 1.5), (4, 1.2), (10, 1.1), (30, 1.08), (60, 1.3), (40, 0.8)])
def test_warm_up_is_left_out(slow_steps: int, factor: float) -> None:
    firsts = []
    for seed in range(20):
        run = noisy(seed)
        run[:slow_steps] *= factor
        firsts.append(steady(run).first)
    assert all(first is not None for first in firsts)
    assert np.mean([abs(first - slow_steps) <= 2 for first in firsts if first is not None]) >= 0.85


def test_outliers_are_no_change() -> None:
    for seed in range(20):
        run = noisy(seed)
        run[[20, 21, 50, 77, 90]] *= 5
        assert steady(run).first == 0


def test_a_change_too_small_to_matter_does_not_matter() -> None:
    run = noisy(0, 200, 0.002)
    run[:100] *= 1.01
    found = steady(run)
    assert found.changes == (100,)
    assert found.first == 0
    assert steady(run, tolerance=0.005).first == 100


@pytest.mark.parametrize("steps", [40, 150])
def test_what_drifts_is_not_steady(steps: int) -> None:
    heats = noisy(1, steps, 0.01) * np.linspace(1.0, 1.4, steps)
    assert steady(heats).first is None
    falls = noisy(1, steps, 0.01) * np.linspace(1.15, 1.0, steps)
    assert steady(falls).first is None
    assert str(steady(heats)) == f"not reached in {steps} steps"


def test_a_run_that_changes_at_its_end_is_not_steady() -> None:
    run = noisy(2)
    run[-8:] *= 1.5
    assert steady(run).first is None
    assert changes(run) == (92,)
    assert steady([1.0] * 9).first is None
    assert steady([1.0] * 10).first == 0
    assert str(steady([1.0] * 10)) == "from step 0 on"


def test_long_runs_are_looked_at_in_pieces() -> None:
    run = noisy(3, 5000)
    run[:1500] *= 1.1
    first = steady(run).first
    assert first is not None
    assert abs(first - 1500) <= 2 * 17


def test_warm_up_runs_until_steady() -> None:
    run = noisy(4, 500)
    run[:25] *= np.linspace(1.8, 1.0, 25)
    times = iter(run)
    found, done = warm_up(lambda: next(times))
    assert found.first is not None
    assert 15 <= found.first <= 27
    assert len(done) < 60
    never = (1.02**n for n in itertools.count())
    found, done = warm_up(lambda: next(never), most_steps=50)
    assert (found.first, len(done)) == (None, 50)
    found, done = warm_up(lambda: 1.0, most_steps=5)
    assert (found.first, len(done)) == (None, 5)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_costs_are_distances_from_the_median(points: list[float]) -> None:
    for length, cost in enumerate(_costs(points), 1):
        part = points[:length]
        assert cost == pytest.approx(sum(abs(point - statistics.median(part)) for point in part), abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60), st.floats(1e-3, 1e3))
def test_the_unit_does_not_matter(times: list[float], factor: float) -> None:
    found = steady(times)
    assert found.first is None or 0 <= found.first <= len(times) - 10
    assert all(a < b for a, b in itertools.pairwise((0, *found.changes, len(times))))
    assert len(steady([time * factor for time in times]).changes) == len(found.changes)


@pytest.mark.parametrize("times", [[], [0.0], [-1.0], [float("nan")], [float("inf"), 1.0]])
def test_times_that_are_none(times: list[float]) -> None:
    with pytest.raises(UserError, match="above 0"):
        steady(times)
