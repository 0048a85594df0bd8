"""Under fire: a fault at every call of a change of plan, in turn, and at every eviction. No step is lost by it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

from edgetrain.native import arena
from edgetrain.plan.walk import Walk
from edgetrain.run.compiled import CompiledStep
from edgetrain.run.step import BudgetWarning, Step
from tests.helpers.marks import PLANNED_STEPS
from tests.helpers.moving_budget import PLENTY, Moving, Trained, ask_before_every_op, copied, quarter_up, same
from tests.helpers.plain import bits

pytestmark = PLANNED_STEPS
FALL_AT = 45  # the ask at which the budget falls: in the backward pass, after some updates


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_before_every_op(monkeypatch)


class Fault(MemoryError):
    pass


class Fire:
    """Raises at one of the calls of our own code that are made while a function runs; counts them."""

    def __init__(self, at: int | None) -> None:
        self.at, self.calls = at, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        # A generator is entered again to be closed, where nothing can be raised.
        ours = "/edgetrain/" in frame.f_code.co_filename and frame.f_code.co_name != "<genexpr>"
        if event == "call" and ours:
            self.calls += 1
            if self.calls == self.at:
                sys.setprofile(None)
                raise Fault(f"at call {self.at}, of {frame.f_code.co_name}")


@contextmanager
def fire(owner: type, name: str, at: int | None = None) -> Iterator[Fire]:
    """While the method of the class runs. The first call is that of the method itself, which is let through."""
    found, real = Fire(None if at is None else at + 1), getattr(owner, name)

    def watched(*args: Any) -> Any:
        sys.setprofile(found)
        try:
            return real(*args)
        finally:
            sys.setprofile(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, watched)
        yield found
    found.calls -= 1


class Pair:
    """A run whose budget moves, and one whose budget does not."""

    def __init__(self, **options: Any) -> None:
        self.budget = Moving()
        self.ours, self.constant = Trained(memory=self.budget, **options), Trained(**options)
        self.low, self.high = quarter_up(self.ours.step)
        self.whole()

    def whole(self) -> None:
        """A step of each, with the same numbers."""
        assert torch.equal(bits(self.ours()), bits(self.constant()))

    def fall(self, at: int = FALL_AT) -> None:
        """The budget falls in the middle of the next step, and is what it was at the one after it."""
        asked = self.budget.asked
        self.budget.rule = lambda n: self.low if n - asked > at else PLENTY

    def rise(self) -> None:
        self.budget.rule = lambda _: PLENTY

    def same(self) -> bool:
        return same(self.ours.state(), self.constant.state())


def turns(calls: int, most: int) -> list[int]:
    """Every call from the first to the last, or as many of them as there is time for."""
    return list(range(1, calls + 1, max(1, calls // most)))


@pytest.mark.parametrize("options", [{}, {"check_finite": True}], ids=["early", "guarded"])
def test_a_fault_at_every_call_of_planning_in_the_middle_of_a_step(options: dict[str, Any]) -> None:
    pair = Pair(**options)
    for _ in range(2):  # the second time some of it is known already, as it will be below
        pair.fall()
        with fire(CompiledStep, "_with_less") as counted:
            pair.whole()
    assert counted.calls > 1000
    assert pair.ours.step.switches[-1].in_step
    for at in turns(counted.calls, 25):
        pair.fall()
        with (
            fire(CompiledStep, "_with_less", at),
            pytest.warns(BudgetWarning, match="could not be planned anew .Fault"),
        ):
            pair.whole()  # the step goes on as it was
        failed = pair.ours.step.switches[-1]
        assert failed.in_step
        assert failed.failed is not None
        assert failed.over_bytes == failed.peak_bytes - pair.low > 0
        assert pair.same()
        pair.fall()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pair.whole()  # and the next one follows the budget
        assert pair.ours.step.switches[-1].failed is None
        assert pair.ours.step.switches[-1].over_bytes < failed.over_bytes
    assert pair.same()


def test_a_fault_at_every_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    drop, calls, broken = Walk.drop, 0, -1

    def dropped(walk: Walk, s: int) -> None:
        nonlocal calls
        calls += 1
        if calls == broken:
            raise Fault(f"at eviction {calls}")
        drop(walk, s)

    monkeypatch.setattr(Walk, "drop", dropped)
    pair.fall()
    pair.whole()
    for broken in range(1, calls + 1, 4):  # noqa: B007  # `dropped` reads it
        calls = 0
        pair.fall()
        with pytest.warns(BudgetWarning, match="at eviction"):
            pair.whole()
        assert pair.same()
    broken = -1
    pair.fall()
    pair.whole()
    assert pair.ours.step.switches[-1].failed is None
    assert pair.same()


def test_a_fault_at_every_call_of_a_switch_between_steps() -> None:
    pair = Pair()
    for _ in range(2):
        pair.rise()
        pair.whole()
        pair.budget.rule = lambda _: pair.low
        with fire(Step, "_chosen") as counted:
            pair.ours()
        pair.constant()
    assert counted.calls > 5
    for at in range(1, counted.calls + 1):
        pair.rise()
        pair.whole()
        before, number = copied(pair.ours.state()), len(pair.ours.step.switches)
        pair.budget.rule = lambda _: pair.low
        with fire(Step, "_chosen", at), pytest.raises(Fault):
            pair.ours()
        assert same(pair.ours.state(), before)  # nothing of that step has happened
        pair.whole()
        assert pair.ours.step.plan.peak_bytes <= pair.low
        assert len(pair.ours.step.switches) - number <= 2
    assert pair.same()


def test_a_signal_in_planning_takes_the_step_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is no reason to go on: the step is taken back, and what it held is free at once."""
    pair = Pair(check_finite=True)
    before, held = copied(pair.ours.state()), arena.resident_bytes()
    pair.fall(10)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgetrain.run.compiled.least_rest", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        pair.ours()
    assert same(pair.ours.state(), before)
    arena.trim(0)
    assert held > 0
    assert arena.resident_bytes() == 0  # though the error and its frames are still there
    assert caught.value.__traceback__ is not None
    pair.rise()
    pair.whole()
    assert pair.same()
