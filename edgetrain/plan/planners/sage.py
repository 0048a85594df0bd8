"""The planner `sage`: what SAGE (Gim & Ko 2022) does at run time, played on a graph.

In:  a problem, a budget in bytes.
Out: the order that SAGE would run the step in, or None where it runs out of memory.

Where an allocation does not fit, the storage of the smallest

    (compute time + 1) ÷ (size + 1)

goes, again and again until it fits; times are in microseconds, sizes in bytes. What the op at hand reads is locked, and
so is what cannot be recomputed. An op that misses something recomputes it, ancestors first. Nothing is known of what
comes, but one thing: a storage that could not be recomputed at its next use stays (the graph updates in place).

Where eviction is not enough SAGE shrinks the micro-batch: `micro_batches.within`, number "fewest".
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from edgetrain.plan.planner import Planner, greedy
from edgetrain.plan.problem import Problem, Tables
from edgetrain.plan.walk import NoRoom, Walk


def sage(problem: Problem, budget_bytes: int, *, until: float = math.inf) -> tuple[int, ...] | None:
    try:
        return tuple(problem.order[at] for at in Sage(problem.tables, budget_bytes, until=until).run())
    except NoRoom:
        return None


class Sage(Walk):
    def __init__(self, tables: Tables, budget: int, stored: Iterable[int] = (), *, until: float = math.inf) -> None:
        super().__init__(tables, budget, stored, until=until)
        self.score = [(1e6 * own_s + 1) / (n + 1) for own_s, n in zip(tables.own_s, tables.size, strict=True)]

    def choose(self, options: list[tuple[int, int]]) -> tuple[int | None, bool]:
        candidates = self.evictable.nonzero()[0].tolist()
        if candidates:
            return min(candidates, key=self.score.__getitem__), False
        return (options[0][0], True) if options else (None, False)


SAGE = Planner(
    "sage", "evict at run time; where that is not enough, take the largest micro-batches that fit (SAGE)",
    greedy(sage), micro_batches="fewest",
)  # fmt: skip
