"""The planner `dtr`: Dynamic Tensor Rematerialization (Kirisame et al. 2021), played on a graph.

In:  a problem, a budget in bytes, a heuristic.
Out: the order that DTR would run the step in, or None where it runs out of memory.

DTR decides online: it knows the past, not what comes. Where an allocation does not fit, the storage with the least h
goes; an op that misses something recomputes it, ancestors first. What the program no longer uses is evicted at once
(the paper's eager eviction). One thing it is told of the future, because the graph updates in place where DTR would
copy: a storage that could not be recomputed at its next use stays.

    staleness   the time since the last access
    dtr         (own time + that of the evicted neighbourhood e*) ÷ (bytes × staleness); e*: the evicted ancestors
                that it would be made from, and the evicted descendants that would be made from it
    dtr_eq      the same with e* by union-find: evicted storages that touch are one set with one sum; one that comes
                back leaves its set with its own time, and the set is not split
    lru         1 ÷ staleness
    size        1 ÷ bytes
"""

from __future__ import annotations

import math
from typing import Literal

from edgetrain.plan.planner import Planner, greedy
from edgetrain.plan.problem import TICK_S, Problem, Tables
from edgetrain.plan.walk import NoRoom, Walk

Heuristic = Literal["dtr", "dtr_eq", "lru", "size"]


def dtr(
    problem: Problem, budget_bytes: int, *, heuristic: Heuristic = "dtr", until: float = math.inf
) -> tuple[int, ...] | None:
    try:
        walk = _Online(problem.tables, budget_bytes, heuristic, until=until)
        return tuple(problem.order[at] for at in walk.run())
    except NoRoom:
        return None


class _Online(Walk):
    def __init__(self, tables: Tables, budget: int, heuristic: Heuristic, *, until: float = math.inf) -> None:
        super().__init__(tables, budget, until=until)
        self.heuristic = heuristic
        self.clock_s = 0.0
        self.accessed_s = [0.0] * len(tables.size)
        self.ran = bytearray(len(tables.order))
        self.sets = _Sets(len(tables.size))

    def execute(self, at: int, uses: dict[int, int] | None) -> None:
        super().execute(at, uses)
        self.clock_s += self.tables.again_s[at] if self.ran[at] else float(self.tables.first_s[at])
        self.ran[at] = 1
        for s in (*self.tables.reads[at], *self.tables.makes[at]):
            self.accessed_s[s] = self.clock_s

    def choose(self, options: list[tuple[int, int]]) -> tuple[int | None, bool]:
        candidates = self.evictable.nonzero()[0].tolist()
        if candidates:
            return min(candidates, key=self.h), False
        return (options[0][0], True) if options else (None, False)

    def h(self, s: int) -> float:
        stale_s = self.clock_s - self.accessed_s[s] + TICK_S
        n_bytes = self.tables.size[s] + 1
        match self.heuristic:
            case "lru":
                return 1 / stale_s
            case "size":
                return 1 / n_bytes
            case "dtr":
                return (self.tables.own_s[s] + self.around_s(s)) / (n_bytes * stale_s)
            case "dtr_eq":
                sets = {self.sets.find(t) for t in self.neighbours(s) if self.is_evicted(t)}
                return (self.tables.own_s[s] + sum(self.sets.sum_s[t] for t in sets)) / (n_bytes * stale_s)

    # ---- the evicted neighbourhood

    def is_evicted(self, s: int) -> bool:
        at = self.tables.made_at[s]
        return bool(self.ran[at]) and not self.live[s] and self.tables.until[s] >= self.now

    def neighbours(self, s: int) -> list[int]:
        return [*self.tables.reads[self.tables.made_at[s]], *self.tables.readers[s]]

    def around_s(self, s: int) -> float:
        """The time of e*, each op once."""
        tables = self.tables
        ops = self.makers([s]) - {tables.made_at[s]}
        stack, seen = [s], {s}
        while stack:
            for t in tables.readers[stack.pop()]:
                if t not in seen and self.is_evicted(t):
                    seen.add(t)
                    stack.append(t)
                    ops.add(tables.made_at[t])
        return sum(tables.again_s[at] for at in ops)

    # ---- the sets of evicted storages

    def drop(self, s: int) -> None:
        super().drop(s)
        if self.heuristic == "dtr_eq" and self.is_evicted(s):
            self.sets.add(s, self.tables.own_s[s])
            for t in self.neighbours(s):
                if t != s and self.is_evicted(t):
                    self.sets.join(s, t)

    def on_recomputed(self, s: int) -> None:
        if self.heuristic == "dtr_eq":
            self.sets.leave(s, self.tables.own_s[s])


class _Sets:
    """Union-find over evictions: a storage that is evicted again is a new member."""

    def __init__(self, count: int) -> None:
        self.member = list(range(count))  # storage → its present member number
        self.parent = list(range(count))
        self.sum_s = [0.0] * count

    def find(self, s: int) -> int:
        member = self.member[s]
        while self.parent[member] != member:
            self.parent[member] = self.parent[self.parent[member]]
            member = self.parent[member]
        return member

    def add(self, s: int, own_s: float) -> None:
        self.member[s] = len(self.parent)
        self.parent.append(self.member[s])
        self.sum_s.append(own_s)

    def leave(self, s: int, own_s: float) -> None:
        root = self.find(s)
        self.sum_s[root] = max(0.0, self.sum_s[root] - own_s)

    def join(self, s: int, t: int) -> None:
        a, b = self.find(s), self.find(t)
        if a != b:
            self.parent[b] = a
            self.sum_s[a] += self.sum_s[b]


DTR = Planner("dtr", "evict online, knowing the past alone (DTR)", greedy(dtr))
