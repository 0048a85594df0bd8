"""When a step is captured again: often while that is cheap, and never for more than 1 % of a long run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import edgetrain as et
from edgetrain.graph.capture import predicted_layouts
from edgetrain.run import recapture
from edgetrain.run.recapture import Recapture


def asked(monkeypatch: pytest.MonkeyPatch, *, step_s: float, capture_s: float, steps: int) -> list[int]:
    """After which steps the step is captured again, by a clock of the test's own."""
    now_s, after = 0.0, list[int]()
    monkeypatch.setattr(recapture, "time", SimpleNamespace(perf_counter=lambda: now_s))

    def difference() -> None:
        nonlocal now_s
        now_s += capture_s
        after.append(step)

    captured: Any = SimpleNamespace(layouts=predicted_layouts.learned(), difference=difference, took_s=2 * capture_s)
    net = Recapture()
    for step in range(steps):
        net.require_same(captured, step)
        now_s += step_s
    assert net.spent_s == pytest.approx(capture_s * len(after))
    return after


def test_a_small_step_is_captured_again_at_each_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, step_s=0.001, capture_s=0.02, steps=300) == [2, 4, 8, 16, 32, 64, 128, 256]


def test_a_large_one_waits_until_it_is_one_percent_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    after = asked(monkeypatch, step_s=1.0, capture_s=1.0, steps=2000)
    assert all(n + number >= 100 * (number + 1) for number, n in enumerate(after))
    assert after[-1] > 1000


def test_a_capture_that_takes_longer_than_those_before_is_within_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, took_s = 0.0, iter([0.3, 0.43, 0.6, 0.8])
    monkeypatch.setattr(recapture, "time", SimpleNamespace(perf_counter=lambda: now_s))

    def difference() -> None:
        nonlocal now_s
        now_s += next(took_s, 0.8)

    captured: Any = SimpleNamespace(layouts=predicted_layouts.learned(), difference=difference, took_s=0.6)
    net = Recapture()
    for step in range(2000):
        net.require_same(captured, step)
        now_s += 0.2
        assert net.spent_s <= max(recapture.FREE_S, recapture.MAX_SHARE * now_s)
    assert net.spent_s > 2.0


def test_what_is_measured_is_not_captured_again() -> None:
    model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    step = et.prepare(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1), (x,))
    with step.not_captured_again():
        for _ in range(9):
            step(x)
    assert step.recapturing_s == 0.0
    step(x)
    assert step.recapturing_s > 0.0
