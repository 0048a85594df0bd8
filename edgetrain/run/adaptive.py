"""A budget that moves: which plan a step follows, and when it must go on with another one.

In:  a function that gives the budget of the moment, or "auto"; plans over the range of budgets, made ahead.
Out: the plan for the next step (`Ladder`), and a watch that a step asks between its ops (`BudgetWatch`).

    budget  ────────┐          ┌──────────────
                    │          │
    plan      large │  small   │  large            a change is followed at the next step
                    ↑
                    if the step that runs would need more than there is now: the rest of it is planned anew from what
                    is alive (`plan/rest.py`), and only then it stops between two ops and goes on with that. Where
                    planning fails, the step goes on as it was

The budget is asked for at most every `PERIOD_S`, and less often (but every `LONGEST_S`) where asking would take more
than `ASKING_PART` of the time; in the thread that trains, there is no other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgetrain.errors import Infeasible, UserError
from edgetrain.measure.sensors.memory import memory as memory_now
from edgetrain.native import arena
from edgetrain.plan.budget import parse_bytes, show_bytes
from edgetrain.plan.plan import Plan
from edgetrain.plan.planner import GREEDY_S, Planner
from edgetrain.plan.problem import Problem
from edgetrain.plan.process import RESERVE_BYTES
from edgetrain.plan.refusal import smallest_by
from edgetrain.plan.registry import quick

PERIOD_S = 0.02
ASKING_PART, LONGEST_S = 0.005, 0.2  # of the time; what is available takes 0.3 ms to read, more on a busy machine
RUNGS = 7  # plans over the range of budgets
LEFT_PART = 0.05  # of the memory that there is, which "auto" leaves to others
PRESSURE = 0.1  # from this part of the time on that somebody waits for memory, "auto" takes no more than it has

Budget = Callable[[], int]


@dataclass(frozen=True)
class Switch:
    """A change of plan.

    step:       its number, from 0.
    in_step:    the budget changed while the step ran, and this is for the rest of it.
    planning_s: what it took to choose or make the plan, and what runs it.
    giving_back_s: what it took to hand memory back to the system that is not needed any more.
    over_bytes: what the rest needs above the budget, where nothing was found that does not.
    failed:     why the rest could not be planned; the step went on as it was then.
    """

    step: int
    budget_bytes: int
    peak_bytes: int
    in_step: bool
    planning_s: float
    over_bytes: int = 0
    giving_back_s: float = 0.0
    failed: str | None = None


@dataclass(frozen=True)
class Fall:
    """The budget fell below what the rest of a step needed. needs_bytes: what it needs now. The rest as in `Switch`."""

    budget_bytes: int
    needs_bytes: int
    planning_s: float
    giving_back_s: float = 0.0
    failed: str | None = None

    def switch(self, step: int) -> Switch:
        over_bytes = max(0, self.needs_bytes - self.budget_bytes)
        return Switch(
            step,
            self.budget_bytes,
            self.needs_bytes,
            True,
            self.planning_s,
            over_bytes,
            self.giving_back_s,
            self.failed,
        )


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
            )
        spare = now.available_bytes - int(LEFT_PART * now.limit_bytes) - RESERVE_BYTES
        if now.pressure is not None and now.pressure > PRESSURE:
            spare = min(spare, 0)
        return max(1, persistent_bytes + arena.resident_bytes() + spare)

    return budget


class Ladder:
    """Plans of one step for several budgets, the largest peak first. bound_bytes: proven, no plan takes less; lasting:
    what every plan holds (see `Infeasible`)."""

    def __init__(
        self, plans: Sequence[Plan], bound_bytes: int | None = None, lasting: Sequence[tuple[str, int]] = ()
    ) -> None:
        self.plans = sorted({plan.peak_bytes: plan for plan in plans}.values(), key=lambda plan: -plan.peak_bytes)
        self.bound_bytes = self.plans[-1].persistent_bytes if bound_bytes is None else bound_bytes
        self.lasting = lasting

    def nearest(self, budget_bytes: int) -> int:
        """As `within`, or the smallest plan where none keeps the budget."""
        return next((n for n, plan in enumerate(self.plans) if plan.peak_bytes <= budget_bytes), len(self.plans) - 1)

    def within(self, budget_bytes: int) -> int:
        """The number of the plan of the largest peak that keeps the budget."""
        nearest = self.nearest(budget_bytes)
        smallest = self.plans[-1].peak_bytes
        if smallest > budget_bytes:
            raise Infeasible(
                f"the budget fell to {show_bytes(budget_bytes)}, and the smallest plan needs {show_bytes(smallest)}; "
                f"nothing of this step has happened\n  proven: every plan takes {self.bound_bytes} bytes or more\n"
                "  next step: call it again when there is more memory",
                smallest_bytes=smallest, bound_bytes=self.bound_bytes, lasting=self.lasting,
            )  # fmt: skip
        return nearest


def rungs(smallest_bytes: int, largest_bytes: int) -> list[int]:
    """The budgets for which plans are made ahead, from large to small."""
    part = (largest_bytes - smallest_bytes) / (RUNGS - 1)
    return [largest_bytes - round(n * part) for n in range(RUNGS)]


def smallest_bytes(task: Problem, planner: Planner, left_s: float = math.inf) -> int:
    """The least that the planner keeps, or a greedy one where that would take long."""
    until = time.monotonic() + max(left_s, GREEDY_S)
    return smallest_by(task, quick(planner).find, until=until)[1]


class BudgetFell(Exception):
    """Raised between two ops of a step that would need more than there is now. at: the place in the schedule;
    following: how it goes on, as the step has said."""

    def __init__(self, at: int, following: Any) -> None:
        super().__init__("the budget fell")
        self.at, self.following = at, following


GoOn = Callable[[int, int], Any]


class BudgetWatch:
    """Asked before each op. `follow` says what the rest of the step needs, action by action, and how it would go on
    with less: a place in the schedule and a budget → anything but None, which `BudgetFell` then brings."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.last_bytes: int | None = None  # what it said last
        self._needs: Sequence[int] = ()
        self._go_on: GoOn | None = None
        self._met: int | None = None
        self._next_s = 0.0
        self._failed: Exception | None = None

    def follow(self, needs: Sequence[int], go_on: GoOn, *, met: int | None = None) -> None:
        """met: the budget for which these needs are the least that was found; only one below it counts from now on."""
        self._needs, self._go_on, self._met = needs, go_on, met
        self._next_s = time.monotonic() + PERIOD_S

    def done(self) -> None:
        """The step is over."""
        self._needs, self._go_on = (), None

    def now(self) -> int:
        """The budget before a step. What went wrong while the last one ran is told here, where nothing is under way."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        self.last_bytes = self.budget()
        return self.last_bytes

    def meanwhile(self) -> int | None:
        """The budget while a step is under way; None where it cannot be had, which is told before the next one."""
        begin = time.monotonic()
        try:
            if self._failed is not None:
                return None
            self.last_bytes = self.budget()
            return self.last_bytes
        except Exception as error:
            self._failed = error
            return None
        finally:
            took = time.monotonic() - begin
            self._next_s = begin + took + max(PERIOD_S, min(took / ASKING_PART, LONGEST_S))

    def __call__(self, at: int) -> None:
        if time.monotonic() < self._next_s:
            return
        budget = self.meanwhile()
        if budget is None or self._needs[at] <= budget or (self._met is not None and budget >= self._met):
            return
        self._met = budget
        following = self._go_on(at, budget) if self._go_on is not None else None
        if following is not None:
            raise BudgetFell(at, following)
