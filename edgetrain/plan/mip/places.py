"""Where a schedule holds more than the budget, played through: what the program's rows did not count.

In:  a problem, an order of ops, a budget in bytes. Out: the worst place of each stage, from which a row is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgetrain.plan import lifetimes
from edgetrain.plan.plan import Item
from edgetrain.plan.problem import Problem


@dataclass(frozen=True)
class Place:
    """A place of a schedule that holds too much: at `op`, run for the first time or again, in the stage of `before`."""

    op: int
    again: bool
    before: int
    held_bytes: int
    alive: frozenset[int]


def places_over(problem: Problem, order: Sequence[Item], budget: float) -> list[Place]:
    """The worst place of each stage that holds more than the budget."""
    moments = iter(problem.moments(order))
    done: set[int] = set()
    places: list[tuple[int, bool, int, frozenset[int]]] = []
    worst: list[Place] = []
    for action, alive in lifetimes.alive_during(problem.graph, problem.actions(order)):
        again = action.op in done
        done.add(action.op)
        held = next(moments).during_bytes
        if held > budget and not problem.is_view[action.op]:
            places.append((action.op, again, held, frozenset(alive)))
        if not again and not problem.is_view[action.op]:
            if places:
                op, was_again, held, there = max(places, key=lambda place: place[2])
                worst.append(Place(op, was_again, action.op, held, there))
            places.clear()
    return worst
