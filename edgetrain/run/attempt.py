"""One run of a program, until all of it has happened or nothing; and what a step follows meanwhile.

Plain state: `CompiledStep` says what happens to it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from edgetrain.graph.ir import Op
from edgetrain.native import arena
from edgetrain.ops import call
from edgetrain.plan.plan import Plan
from edgetrain.run.binding import Before
from edgetrain.run.program import Program
from edgetrain.run.undo import StepSignals, Undo


@dataclass(frozen=True)
class Rest:
    """How a step goes on after the budget fell. needs: what each of its actions and those after it need."""

    plan: Plan
    program: Program
    needs: list[int]
    budget_bytes: int
    planning_s: float


@dataclass(frozen=True)
class Now:
    """What a step follows from here on. rest: the variables that its program takes up, until it has begun.
    met: see `BudgetWatch.follow`."""

    plan: Plan
    program: Program
    needs: list[int]
    met: int | None = None
    rest: dict[str, Any] = field(default_factory=dict)


@dataclass
class Attempt:
    """One run of a program, until all of it has happened or nothing.

    noted: what the updates change is in `undo`. done: it has happened. torn: in part, by a fault of ours.
    over: all is put back that does not belong to what has happened. refusing: the op whose kernel ended it.
    """

    program: Program
    keep: bool
    completed: int
    now: Now
    undo: Undo
    watch: arena.Watch | None
    interrupt: StepSignals = field(default_factory=StepSignals)
    before: Before = field(default_factory=list)
    given: tuple[Any, ...] = ()
    noted: bool = False
    done: bool = False
    torn: bool = False
    over: bool = False
    refusing: Op | None = None
    around: BaseException | None = field(default_factory=sys.exception)  # what the caller is about to handle
    grad: bool = field(default_factory=torch.is_grad_enabled)
    autocast: list[str] = field(default_factory=call.autocast_devices)

    def enter(self) -> None:
        torch._C._set_grad_enabled(False)
        call.set_autocast(self.autocast, False)
        if self.watch is not None:
            self.watch.begin()

    def hold(self) -> None:
        """From here on the step cannot be taken back: called by the program before the first update."""
        self.interrupt.hold()

    def leave(self) -> None:
        if self.watch is not None:
            self.watch.end()
        torch._C._set_grad_enabled(self.grad)
        call.set_autocast(self.autocast, True)
        self.over = True
        self.given = ()  # which has this attempt in it, and tensors of the step

    @property
    def error(self) -> BaseException | None:
        """What ends it, where something does."""
        error = sys.exception()
        return None if error is self.around else error
