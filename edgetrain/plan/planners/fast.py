"""The planner `fast`: greedy eviction planned ahead, in milliseconds.

Where the next op does not fit, the storage of the least recompute time for its bytes is evicted (`walk.py` draws it).
Three things make it good:
- scores (`SCORES`): what a storage costs to bring back, for its bytes. None is best everywhere; `tries` of them are
  walked, then the best of them with costs shaken by a tenth, and the best order is kept;
- `polish`: what was evicted is in truth gone since its last use, so the walk's account leaves gaps. A recompute goes
  where its result could as well have stayed;
- `repairs`: where a chain does not fit, evicting what it was to recompute gets a penalty, and the walk begins anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgetrain.plan.planner import Planner, greedy
from edgetrain.plan.problem import TICK_S, Problem, Tables
from edgetrain.plan.walk import NoRoom, Walk

ScoreName = Literal["chain", "half", "around", "tight", "time", "own"]
SHAKE = 0.1  # standard deviation of the logarithm of a shaken cost
PENALTY = 4.0  # factor by which a repair raises costs


@dataclass(frozen=True, slots=True)
class Score:
    """The storage with the least (own + ancestors · a + descendants · d) ÷ (bytes × span) goes.

    own: the time of the op that makes it; a: of its ancestors that are missing now; d: of what is missing now and made
    from it. span: 1, the time until its next use, or the part of that time where keeping all is over the budget.
    """

    ancestors: float = 1.0
    descendants: float = 0.0
    span: Literal["none", "time", "tight"] = "none"


SCORES: dict[ScoreName, Score] = {
    "chain": Score(),
    "half": Score(ancestors=0.5),
    "around": Score(descendants=0.3),
    "tight": Score(span="tight"),
    "time": Score(span="time"),
    "own": Score(ancestors=0.0),
}


def fast(
    problem: Problem,
    budget_bytes: int,
    *,
    until: float = math.inf,
    score: ScoreName = "chain",
    tries: int = 4,
    polish: bool = True,
    repairs: int = 12,
) -> tuple[int, ...] | None:
    """The order of least time that `tries` walks find, `score` first; the same for the same arguments, given time."""
    tables = problem.tables
    if tables.during.max(initial=0) <= budget_bytes:
        return tables.order
    names: list[ScoreName] = [score, *(name for name in SCORES if name != score)]
    best: list[int] | None = None
    best_s, best_name = float("inf"), score
    for number in range(max(1, tries)):
        if time.monotonic() > until:
            break
        name = names[number] if number < len(names) else best_name
        shake = number if number >= len(names) else None
        sequence = _walk(tables, budget_bytes, SCORES[name], shake, repairs if best is None else 0, until)
        if sequence is not None and polish:
            sequence = _Polish(tables, budget_bytes, sequence).run()
        time_s = sum(tables.again_s[at] for at in sequence) if sequence is not None else best_s
        if time_s < best_s:
            best, best_s, best_name = sequence, time_s, name
    return None if best is None else tuple(tables.order[at] for at in best)


def _walk(tables: Tables, budget: int, score: Score, shake: int | None, repairs: int, until: float) -> list[int] | None:
    penalty = np.ones(len(tables.size))
    if shake is not None:
        penalty = np.exp(SHAKE * np.random.default_rng(shake).standard_normal(len(tables.size)))
    for _ in range(repairs + 1):
        try:
            return Greedy(tables, budget, score, penalty, until=until).run()
        except NoRoom as failed:
            if not failed.wanted:
                return None
            penalty[failed.wanted] *= PENALTY
    return None


class Greedy(Walk):
    """Evicts by a score. Costs only grow while storages go, so they are looked at only when they matter."""

    def __init__(
        self,
        tables: Tables,
        budget: int,
        score: Score = SCORES["chain"],
        penalty: NDArray[np.float64] | None = None,
        stored: Iterable[int] = (),
        *,
        until: float = math.inf,
    ) -> None:
        super().__init__(tables, budget, stored, until=until)
        self.score = score
        penalty = np.ones(len(tables.size)) if penalty is None else penalty
        self.penalty: list[float] = penalty.tolist()
        self.own = [s * d for s, d in zip(tables.own_s, self.penalty, strict=True)]
        self.cost = list(self.own)
        self.gain = np.array(tables.size, dtype=np.float64) / np.array(self.cost)
        self.clock = _clock(tables, budget, score)

    def choose(self, options: list[tuple[int, int]]) -> tuple[int | None, bool]:
        while True:
            values = self.gain * self.evictable
            if self.clock is not None:
                values *= self.clock[self.next_use] - self.clock[self.now]
            s = int(values.argmax())
            if values[s] <= 0 or not self.grown(s):
                break
        for option, use in options:
            span = 1.0 if self.clock is None else self.clock[use] - self.clock[self.now]
            if self.gain[option] * span >= values[s]:
                return option, True
        return (s, False) if values[s] > 0 else (None, False)

    def on_recomputed(self, s: int) -> None:
        for t in self.tables.readers[s]:
            self.set_cost(t, self.own[t])  # at least

    def grown(self, s: int) -> bool:
        """Whether the storage costs more than was known."""
        cost = self.cost_of(s)
        if cost <= self.cost[s] * (1 + 1e-6):
            return False
        self.set_cost(s, cost)
        return True

    def set_cost(self, s: int, cost: float) -> None:
        self.cost[s] = cost
        self.gain[s] = self.tables.size[s] / cost

    def cost_of(self, s: int) -> float:
        tables, score = self.tables, self.score
        cost = own_s = tables.own_s[s]
        if score.ancestors:
            cost += score.ancestors * (sum(tables.again_s[at] for at in self.makers([s])) + TICK_S - own_s)
        if score.descendants:
            cost += score.descendants * sum(tables.again_s[at] for at in self.missing_descendants(s))
        return cost * self.penalty[s]

    def missing_descendants(self, s: int) -> set[int]:
        """The positions of the ops whose missing results, still wanted, are made from the storage."""
        tables = self.tables
        positions: set[int] = set()
        stack = [s]
        while stack:
            for t in tables.readers[stack.pop()]:
                at = tables.made_at[t]
                if at < self.now and not self.live[t] and at not in positions and self.next_use[t] <= self.end:
                    positions.add(at)
                    stack.append(t)
        return positions


def _clock(tables: Tables, budget: int, score: Score) -> NDArray[np.float64] | None:
    """The time at each position, and at the two past the end, as the score counts it."""
    if score.span == "none":
        return None
    length = tables.first_s + TICK_S
    if score.span == "tight":
        length = np.where(tables.during > budget, length, length * 1e-3)
    return np.concatenate([[0.0], np.cumsum(length), [length.sum()]])


class _Polish:
    """Takes recomputes out of a sequence where what they make could as well have stayed.

        storage   ├──use──┤ · · · · gap · · · · ├recomputed──use──┤      the bytes of the gap are free: make it one life

    lives: storage → for each life the places in the sequence where it is made and used; past the end for a result.
    """

    PASSES = 3

    def __init__(self, tables: Tables, budget: int, sequence: list[int]) -> None:
        self.tables, self.budget, self.sequence = tables, budget, sequence
        self.lives: dict[int, list[list[int]]] = {}
        self.is_again = bytearray(len(sequence))
        seen = bytearray(len(tables.order))
        undo = np.zeros(len(sequence) + 1, dtype=np.int64)
        for place, at in enumerate(sequence):
            for s in tables.reads[at]:
                self.lives[s][-1].append(place)
            for s in tables.makes[at]:
                self.lives.setdefault(s, []).append([place])
            self.is_again[place] = seen[at]
            undo[place] = 0 if seen[at] else tables.undo[at]
            seen[at] = 1
        self.over: list[int | None] = [None] * len(sequence)  # what each op overwrites
        self.memory = self._memory() + np.cumsum(undo) + tables.persistent_bytes

    def _memory(self) -> NDArray[np.int64]:
        tables, end = self.tables, len(self.sequence)
        change = np.zeros(end + 1, dtype=np.int64)
        dying: list[list[int]] = [[] for _ in self.sequence]
        for s, lives in self.lives.items():
            for life in lives:
                change[life[0]] += tables.size[s]
                if s in tables.kept and life is lives[-1]:
                    life.append(end)
                else:
                    change[life[-1] + 1] -= tables.size[s]
                    dying[life[-1]].append(s)
        memory = np.cumsum(change)
        for place, at in enumerate(self.sequence):
            over = next((s for s in tables.overwrites[at] if s in dying[place]), None)
            self.over[place] = over
            memory[place] += self._workspace(place) if over is None else tables.over_workspace[at] - tables.size[over]
        return memory

    def _workspace(self, place: int) -> int:
        """What the op there takes above its results if it overwrites nothing."""
        again = self.is_again[place]
        return (self.tables.again_workspace if again else self.tables.first_workspace)[self.sequence[place]]

    def run(self) -> list[int]:
        again = [place for place, is_again in enumerate(self.is_again) if is_again]
        left = sorted(again, key=lambda place: self.tables.again_s[self.sequence[place]], reverse=True)
        gone: set[int] = set()
        for _ in range(self.PASSES):
            taken = {place for place in left if self._take_out(place)}
            if not taken:
                break
            gone |= taken
            left = [place for place in left if place not in taken]
        return [at for place, at in enumerate(self.sequence) if place not in gone]

    def _take_out(self, place: int) -> bool:
        """Do without the recompute, if the bytes allow it. What lives across its place lives before and after it too,
        so the place itself counts for nothing from then on."""
        tables, at = self.tables, self.sequence[place]
        memory = self.memory.copy()
        joined = [(s, self._life(s, place)) for s in tables.makes[at]]
        ended = [self.lives[r][self._life(r, place - 1)] for r in tables.reads[at]]
        for r, life in zip(tables.reads[at], ended, strict=True):
            if life[-1] == place:
                memory[life[-2] + 1 : place] -= tables.size[r]
        for s, k in joined:
            if len(self.lives[s][k]) > 1:
                last = self.lives[s][k - 1][-1]
                memory[last + 1 : place] += tables.size[s]
                if self.over[last] == s:
                    memory[last] += tables.size[s] - tables.over_workspace[self.sequence[last]] + self._workspace(last)
        memory[place] = 0
        if memory.max() > self.budget:
            return False
        self.memory = memory
        for s, k in joined:
            life = self.lives[s].pop(k)
            if len(life) > 1:
                before = self.lives[s][k - 1]
                if self.over[before[-1]] == s:
                    self.over[before[-1]] = None
                before += life[1:]
        for life in ended:
            life.remove(place)
        return True

    def _life(self, s: int, place: int) -> int:
        """The number of the life of a storage that has begun at the place or before it."""
        lives = self.lives[s]
        k = len(lives) - 1
        while lives[k][0] > place:
            k -= 1
        return k


FAST = Planner("fast", "evict greedily, planned in milliseconds", greedy(fast))
