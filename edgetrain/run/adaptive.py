"""A budget that moves: which plan a step follows, and when it must go on with another one.

In:  a function that gives the budget of the moment, or "auto"; plans over the range of budgets, made ahead.
Out: the plan for the next step (`Ladder`), and a watch that a step asks between its ops (`BudgetWatch`).

    budget  ────────┐          ┌──────────────
                    │          │
    plan      large │  small   │  large            a change is followed at the next step
                    ↑
                    if the step that runs would need more than there is now: it stops between two ops, and the rest of
                    it is planned anew from what is alive (`plan/rest.py`)

The budget is asked for at most every `PERIOD_S`, in the thread that trains; there is no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgetrain.errors import Infeasible, UserError
from edgetrain.measure.sensors.memory import memory as memory_now
from edgetrain.native import arena
from edgetrain.plan.budget import parse_bytes, show_bytes
from edgetrain.plan.fast import fast
from edgetrain.plan.plan import Plan
from edgetrain.plan.planning import SIMPLE, smallest_by
from edgetrain.plan.problem import Problem
from edgetrain.plan.process import RESERVE_BYTES

PERIOD_S = 0.02
RUNGS = 7  # plans over the range of budgets
LEFT_PART = 0.05  # of the memory that there is, which "auto" leaves to others
PRESSURE = 0.1  # from this part of the time on that somebody waits for memory, "auto" takes no more than it has

Budget = Callable[[], int]


@dataclass(frozen=True)
class Switch:
    """A change of plan.

    step:       its number, from 0.
    in_step:    the budget fell while the step ran, and this is for the rest of it.
    planning_s: what the change took.
    over_bytes: what the rest needs above the budget, where nothing was found that does not.
    """

    step: int
    budget_bytes: int
    peak_bytes: int
    in_step: bool
    planning_s: float
    over_bytes: int = 0


def given(function: Callable[[], object]) -> Budget:
    """The budget that a user's function gives: a number of bytes, or "300MB"."""

    def budget() -> int:
        amount = function()
        if not isinstance(amount, int | float | str):
            raise UserError(
                "the function for memory gave something else than an amount",
                expected='a number of bytes, or a string such as "300MB"', received=repr(amount),
            )  # fmt: skip
        return parse_bytes(amount)

    return budget


def automatic(persistent_bytes: int) -> Budget:
    """What a step's tensors may take in all: those that last are there already, the arena keeps what it has, and the
    rest comes from what is available, but for a part that is left to others."""

    def budget() -> int:
        now = memory_now()
        if now is None:
            raise UserError(
                'memory="auto" needs a system that tells what memory is available', next_step="give a budget in bytes"
            )  # fmt: skip
        spare = now.available_bytes - int(LEFT_PART * now.limit_bytes) - RESERVE_BYTES
        if now.pressure is not None and now.pressure > PRESSURE:
            spare = min(spare, 0)
        return max(1, persistent_bytes + arena.resident_bytes() + spare)

    return budget


class Ladder:
    """Plans of one step for several budgets, the largest peak first."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = sorted({plan.peak_bytes: plan for plan in plans}.values(), key=lambda plan: -plan.peak_bytes)

    def within(self, budget_bytes: int) -> int:
        """The number of the plan of the largest peak that keeps the budget."""
        found = next((n for n, plan in enumerate(self.plans) if plan.peak_bytes <= budget_bytes), None)
        if found is None:
            least = self.plans[-1].peak_bytes
            raise Infeasible(
                f"the budget fell to {show_bytes(budget_bytes)}, and the smallest plan needs {show_bytes(least)}; "
                "nothing of this step has happened\n  next step: call it again when there is more memory",
                smallest_bytes=least, bound_bytes=least,
            )  # fmt: skip
        return found


def rungs(smallest_bytes: int, largest_bytes: int) -> list[int]:
    """The budgets for which plans are made ahead, from large to small."""
    part = (largest_bytes - smallest_bytes) / (RUNGS - 1)
    return [largest_bytes - round(n * part) for n in range(RUNGS)]


def plans_ahead(task: Problem, planner: str, make: Callable[[int], Plan]) -> list[Plan]:
    """Plans for budgets from keeping all down to the smallest that a planner keeps. make: the plan for a budget."""
    greedy = SIMPLE.get(planner, fast)
    _, smallest = smallest_by(task, greedy)
    return [make(budget) for budget in rungs(smallest, task.keep_all.peak_bytes)]


class BudgetFell(Exception):
    """Raised between two ops of a step that would need more than there is now. at: the place in the schedule."""

    def __init__(self, at: int, budget_bytes: int) -> None:
        super().__init__(f"the budget fell to {budget_bytes} bytes")
        self.at, self.budget_bytes = at, budget_bytes


class BudgetWatch:
    """Asked before each op. `following` says what the rest of the step needs, action by action."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._needs: Sequence[int] = ()
        self._met: int | None = None
        self._next_s = 0.0
        self._failed: Exception | None = None

    def following(self, needs: Sequence[int], *, met: int | None = None) -> None:
        """met: the budget for which these needs are the least that was found; only one below it counts from now on."""
        self._needs, self._met = needs, met
        self._next_s = time.monotonic() + PERIOD_S

    def now(self) -> int:
        """The budget before a step. What went wrong while the last one ran is told here, where nothing is under way."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        return self.budget()

    def __call__(self, at: int) -> None:
        if time.monotonic() < self._next_s or self._failed is not None:
            return
        try:
            budget = self.budget()
        except Exception as error:
            self._failed = error
            return
        self._next_s = time.monotonic() + PERIOD_S
        if self._needs[at] > budget and (self._met is None or budget < self._met):
            raise BudgetFell(at, budget)
