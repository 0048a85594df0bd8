"""What a planner is: one signature, a name, a line of help.

In:  `Request`: a problem, a budget in bytes, and how far the search may go.
Out: `Schedule`: an order of ops within the budget, and a bound where one is proven; or None where none was found.

`planners/` has one file for each; its `__init__.py` lists them by name and takes in others (`register`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from edgetrain.plan.budget import Objective
from edgetrain.plan.plan import Bound, Item
from edgetrain.plan.problem import Problem

Order = tuple[Item, ...]
GREEDY_S = 1.0  # a greedy planner may take so long, however little time is left
Number = int | Literal["auto", "fewest"]  # of micro-batches; the words: see `micro_batches.within`


@dataclass(frozen=True)
class Aim:
    """What is sought among which schedules.

    limits: what a step may take: seconds and joules. page: to the store that the costs know, if they do.
    overlap: transfers run beside the ops.
    """

    objective: Objective = "time"
    limits: Mapping[Objective, float] = field(default_factory=dict)
    recompute: bool = True
    page: bool = True
    overlap: bool = True

    def pages(self, problem: Problem) -> bool:
        return self.page and problem.costs.store is not None


@dataclass(frozen=True)
class Request:
    """
    budget_bytes: bounds every byte of the step's tensors.
    until:        the instant of `time.monotonic` at which the planner gives up.
    aim:          what is sought, by a planner that can seek anything but the least time.
    known:        orders within the budget that are known already.
    solver_bytes: what a search may take above what this process holds; None: as much as it likes.
    """

    problem: Problem
    budget_bytes: int
    until: float = math.inf
    aim: Aim = field(default_factory=Aim)
    known: Sequence[Order] = ()
    solver_bytes: int | None = None


@dataclass(frozen=True)
class Schedule:
    """
    order: None where none was found. bound: on all schedules of a class, where one is proven.
    planner: the name of the planner that found it, where that is another than the one that was asked.
    cut_short: the search ended before its time, so another one may find more.
    """

    order: Sequence[Item] | None
    bound: Bound | None = None
    planner: str = ""
    note: str = ""
    cut_short: bool = False


Find = Callable[[Request], Schedule]


@dataclass(frozen=True)
class Planner:
    """
    name, help:    as users see them; the help is one line.
    find:          the order of least time, or energy, that it finds within a budget.
    smallest:      an order in as few bytes as it finds, whatever the budget; None: by bisection over `find`.
    quick:         the planner that stands in where an answer is needed at once: itself, unless it searches.
    objectives:    what it can seek; one that can seek a single thing seeks it whatever was asked for.
    recompute, page: what its schedules may do.
    wants_store:   a device is planned with its store, though nobody asked to page.
    needs_budget:  it cannot do without one.
    keeps_what_fits: where all fits, the plan keeps all and the planner is not asked.
    micro_batches: how many a batch is taken in where nobody says.
    when_moving:   the planner in its place where the budget moves, and many plans are needed.
    """

    name: str
    help: str
    find: Find
    smallest: Find | None = None
    quick: str = ""
    objectives: tuple[Objective, ...] = ("time",)
    recompute: bool = True
    page: bool = True
    wants_store: bool = False
    needs_budget: bool = True
    keeps_what_fits: bool = True
    micro_batches: Number = 1
    when_moving: str = ""

    @property
    def searches(self) -> bool:
        return self.smallest is not None

    def number_of(self, given: int | Literal["auto"] | None) -> Number:
        """Of micro-batches: what was asked for, or what the planner does by itself."""
        return self.micro_batches if given is None else given


def greedy(order: Callable[..., Sequence[Item] | None]) -> Find:
    """The signature of a planner for a function of problem, budget and `until` that seeks the least time."""

    def find(request: Request) -> Schedule:
        return Schedule(order(request.problem, request.budget_bytes, until=request.until))

    return find
