"""How much one step is like the next, for courses whose likeness is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from edgetrain.errors import UserError
from edgetrain.measure.likeness import of_times, of_windows
from edgetrain.measure.windows import Windows

MS = 1_000_000


def course(steps: int, noise: float, shape: Any, *, step_ms: float = 200.0, window_ms: float = 10.0) -> Any:
    """Windows over steps of one shape (a function of the part of the step that is over), and the steps."""
    draw = np.random.default_rng(0)
    edges = np.arange(0, steps * step_ms + window_ms, window_ms)
    middle = (edges[:-1] + edges[1:]) / 2
    level = np.array([shape(at % step_ms / step_ms, at // step_ms) for at in middle])
    level = level + noise * draw.standard_normal(len(level))
    edges_ns = (edges * MS).astype(np.int64)
    starts = (np.arange(steps) * step_ms * MS).astype(np.int64)
    windows = Windows(edges_ns[:-1], edges_ns[1:], level * window_ms / 1e3)
    return windows, starts, starts + int(step_ms * MS)


def wave(part: float, step: float) -> float:
    return 5 + 3 * math.sin(2 * math.pi * part)


def test_the_same_course_again_and_again() -> None:
    found = of_windows(*course(20, 0.0, wave))
    assert found is not None
    assert found.correlation == pytest.approx(1.0)
    assert found.difference == pytest.approx(0.0, abs=1e-9)
    assert found.pairs == 19


def test_noise_makes_steps_less_alike() -> None:
    found = [of_windows(*course(40, noise, wave)) for noise in (0.1, 1.0, 10.0)]
    likes = [one.correlation for one in found if one is not None and one.correlation is not None]
    assert len(likes) == 3
    assert 0.99 < likes[0] < 1
    assert 0.6 < likes[1] < 0.95
    assert abs(likes[2]) < 0.3
    differences = [one.difference for one in found if one is not None]
    assert differences[0] == pytest.approx(0.1 * 2 / np.pi**0.5 / 5, rel=0.15)  # mean distance of two normal values
    assert differences == sorted(differences)


def test_a_course_that_turns_around_is_not_alike() -> None:
    found = of_windows(*course(20, 0.0, lambda part, step: 5 + (-1) ** step * np.sin(2 * np.pi * part)))
    assert found is not None
    assert found.correlation == pytest.approx(-1.0)


def test_a_flat_course_has_no_shape() -> None:
    found = of_windows(*course(5, 0.0, lambda part, step: 4.0))
    assert found is not None
    assert (found.correlation, found.pairs) == (None, 4)
    assert found.difference == pytest.approx(0.0, abs=1e-9)


def test_steps_that_take_more_or_less_time_are_laid_over_each_other() -> None:
    lengths = np.random.default_rng(1).uniform(150, 250, 30)
    ends = np.cumsum(lengths)
    starts = np.concatenate([[0.0], ends[:-1]])
    edges = np.arange(0, ends[-1], 5.0)
    middle = (edges[:-1] + edges[1:]) / 2
    place = np.searchsorted(ends, middle, side="right")
    level = np.array([wave(part, 0.0) for part in (middle - starts[place]) / lengths[place]])
    edges_ns = (edges * MS).astype(np.int64)
    windows = Windows(edges_ns[:-1], edges_ns[1:], level * 0.005)
    found = of_windows(windows, (starts * MS).astype(np.int64), (ends * MS).astype(np.int64))
    assert found is not None
    assert found.correlation is not None
    assert found.correlation > 0.99


def test_what_is_not_covered_is_left_out() -> None:
    windows, starts, ends = course(10, 0.0, wave)
    there = np.ones(len(windows.amount), dtype=bool)
    there[45:55] = False  # half a second is missing: steps 2 (from window 40 on) has a hole
    holed = Windows(windows.start_ns[there], windows.end_ns[there], windows.amount[there])
    found = of_windows(holed, starts, ends)
    assert found is not None
    assert found.pairs == 7
    assert found.correlation == pytest.approx(1.0)


def test_too_little_to_see() -> None:
    assert of_windows(*course(20, 0.0, wave, step_ms=30.0)) is None
    assert of_windows(*course(1, 0.0, wave)) is None
    windows, starts, ends = course(5, 0.0, wave)
    assert of_windows(windows, starts[:0], ends[:0]) is None
    assert of_windows(windows, starts + 10**12, ends + 10**12) is None


def test_of_times() -> None:
    found = of_times([1.0, 1.1, 1.0, 1.1])
    assert found is not None
    assert found.difference == pytest.approx(0.1)
    assert found.pairs == 3
    assert of_times([1.0]) is None
    with pytest.raises(UserError):
        of_times([1.0, 0.0])
