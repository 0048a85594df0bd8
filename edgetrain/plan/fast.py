"""The planner `fast`: greedy eviction planned ahead, in milliseconds.

In:  a problem, a budget in bytes; what is the same for every budget can be prepared once (`prepare`), for planning
     again while training runs.
Out: an order within the budget, or None if it finds none. Promised: the bytes that the walk accounts for are never
     less than what `lifetimes.timeline` gives for the order that comes out.

The walk goes through the ops and holds bytes. Where the next op does not fit, the storage of the worst
recompute time for its bytes goes; where an op misses something, the missing ancestors run again first:

    budget ─────────────────────────────────────────────
               ┌─┐ evict a  ┌─┐ evict b    ┌──┐ make a again (and what it is made from, in the order of the graph;
          ┌────┘ └──────────┘ └────────────┘  └──  temporaries of the chain go at once)
     ─────┘  op    op   op    op    op ...

Three things make it good:
- scores (`SCORES`): what a storage costs to bring back, for its bytes. None is best everywhere; `tries` of them are
  walked, then the best of them with costs shaken by a tenth, and the best order is kept;
- `polish`: what was evicted is in truth gone since its last use, so the walk's account leaves gaps. A recompute goes
  where what it makes could as well have stayed;
- `repairs`: where a chain does not fit, what it was to make becomes dearer to evict, and the walk begins anew.

A chain runs right before the op that needs it, never earlier; so a budget that only fits where something is made again
ahead of its use, while fewer gradients are there, is not found.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgetrain.plan import lifetimes
from edgetrain.plan.problem import Problem

ScoreName = Literal["chain", "half", "around", "tight", "time", "own"]
SHAKE = 0.1  # standard deviation of the logarithm of a shaken cost
DEARER = 4.0  # factor by which a repair raises costs
MOST_TIMES = 8  # a walk that runs more than so many times the ops of a step leads nowhere
TICK_S = 1e-9  # added to times that may be nought


_until: ContextVar[float] = ContextVar("until", default=math.inf)


@contextmanager
def walks_until(until: float) -> Iterator[None]:
    """Greedy planners give up at this instant of `time.monotonic`, and find nothing more."""
    before = _until.set(until)
    try:
        yield
    finally:
        _until.reset(before)


def is_late() -> bool:
    return time.monotonic() > _until.get()


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


@dataclass(frozen=True, eq=False)
class Prepared:
    """What every walk reads. Lists are by position in the problem's order; the last five by storage.

    next_use: storage that the op touches → the position where it is touched next; the number of ops for a result of the
              step after its last use, one more for what is never touched again.
    workspace: of the op's first run, of one again, of one over an input. `lifetimes.schedule` overwrites wherever it
              can; so the first two are never so small that overwriting would take more.
    during:   the bytes at each position when all is kept.
    until:    the last position at which the storage can be made again, ancestors included. An ancestor that cannot be
              made again itself is there until its own last use.
    readers:  what is made from it.
    """

    order: tuple[int, ...]
    reads: list[tuple[int, ...]]
    makes: list[tuple[int, ...]]
    next_use: list[dict[int, int]]
    overwrites: list[tuple[int, ...]]
    first_workspace: list[int]
    again_workspace: list[int]
    over_workspace: list[int]
    undo: list[int]
    first_s: NDArray[np.float64]
    again_s: list[float]
    during: NDArray[np.int64]
    persistent_bytes: int
    kept: frozenset[int]
    size: tuple[int, ...]
    made_at: list[int]
    until: list[int]
    own_s: list[float]
    readers: list[list[int]]


def prepare(problem: Problem) -> Prepared:
    p, graph, order = problem, problem.graph, problem.order
    reads, makes = [p.reads[op] for op in order], [p.makes[op] for op in order]
    kept = frozenset(lifetimes.results(graph))
    next_use, final = _uses(reads, makes, kept)
    made_at, readers = [-1] * len(p.size), [[] for _ in p.size]  # type: tuple[list[int], list[list[int]]]
    until, own_s = [-1] * len(p.size), [1.0] * len(p.size)
    for at, op in enumerate(order):
        limit = min((max(final[r], until[r]) for r in reads[at]), default=len(order))
        for s in makes[at]:
            made_at[s], until[s] = at, min(p.deadline[op] - 1, limit)
            own_s[s] = p.costs.ops[op].again_s + TICK_S
        for r in reads[at]:
            readers[r] += makes[at]
    overwrites = [p.overwrites[op] for op in order]
    workspace = p.costs.workspace_bytes
    over = [workspace["over"].get(op, 0) for op in order]
    undo = [lifetimes.undo_bytes(graph, op, p.updates) for op in order]
    undo[:1] = [n + lifetimes.random_state_bytes(graph, p.updates) for n in undo[:1]]  # from the first op to the end
    saved = [over[at] - p.size[found[0]] if found else 0 for at, found in enumerate(overwrites)]
    return Prepared(
        order, reads, makes, next_use, overwrites,
        [max(workspace["first"].get(op, 0), saved[at]) for at, op in enumerate(order)],
        [max(workspace["again"].get(op, 0), saved[at]) for at, op in enumerate(order)],
        over, undo,
        np.array([p.costs.ops[op].time_s for op in order]), [p.costs.ops[op].again_s for op in order],
        np.array([m.during_bytes for m in p.moments(order)], dtype=np.int64),
        lifetimes.persistent_bytes(graph), kept, p.size, made_at, until, own_s, readers,
    )  # fmt: skip


def _uses(
    reads: list[tuple[int, ...]], makes: list[tuple[int, ...]], kept: Iterable[int]
) -> tuple[list[dict[int, int]], dict[int, int]]:
    """For each op the next use of what it touches; the last use of each storage."""
    n = len(reads)
    coming: dict[int, int] = dict.fromkeys(kept, n)
    final = dict(coming)
    next_use: list[dict[int, int]] = [{} for _ in range(n)]
    for at in range(n - 1, -1, -1):
        for s in (*reads[at], *makes[at]):
            next_use[at][s] = coming.get(s, n + 1)
            final.setdefault(s, at)
        coming.update(dict.fromkeys(next_use[at], at))
    return next_use, final


def fast(
    problem: Problem,
    budget_bytes: int,
    *,
    prepared: Prepared | None = None,
    score: ScoreName = "chain",
    tries: int = 4,
    polish: bool = True,
    repairs: int = 12,
) -> tuple[int, ...] | None:
    """The order of least time that `tries` walks find, `score` first; the same for the same arguments, given time."""
    ready = prepared or prepare(problem)
    if ready.during.max(initial=0) <= budget_bytes:
        return ready.order
    names: list[ScoreName] = [score, *(name for name in SCORES if name != score)]
    best: list[int] | None = None
    best_s, best_name = float("inf"), score
    for number in range(max(1, tries)):
        if is_late():
            break
        name = names[number] if number < len(names) else best_name
        shake = number if number >= len(names) else None
        found = _walk(ready, budget_bytes, SCORES[name], shake, repairs if best is None else 0)
        if found is not None and polish:
            found = _Polish(ready, budget_bytes, found).run()
        time_s = sum(ready.again_s[at] for at in found) if found is not None else best_s
        if time_s < best_s:
            best, best_s, best_name = found, time_s, name
    return None if best is None else tuple(ready.order[at] for at in best)


def _walk(ready: Prepared, budget: int, score: Score, shake: int | None, repairs: int) -> list[int] | None:
    dearness = np.ones(len(ready.size))
    if shake is not None:
        dearness = np.exp(SHAKE * np.random.default_rng(shake).standard_normal(len(ready.size)))
    for _ in range(repairs + 1):
        try:
            return Greedy(ready, budget, score, dearness).run()
        except NoRoom as failed:
            if not failed.wanted:
                return None
            dearness[failed.wanted] *= DEARER
    return None


class NoRoom(Exception):
    """`wanted`: what the chain that did not fit was to make; empty where the op itself does not fit."""

    def __init__(self, wanted: list[int]) -> None:
        super().__init__()
        self.wanted = wanted


class Walk(ABC):
    """The account of one walk through the ops, for any rule of what is evicted (`choose`).

    Storages that an op or a chain under way needs are locked, once for each need. What is in the store is brought back
    where it is needed, and costs nothing to evict.

    sequence: the positions of the ops in the problem's order; -1 - s where storage s is paged in.
    """

    def __init__(self, ready: Prepared, budget: int, stored: Iterable[int] = ()) -> None:
        self.ready, self.budget = ready, budget
        self.stored = frozenset(stored)
        count = len(ready.size)
        self.end = len(ready.order)
        self.now, self.resumed = 0, False
        self.held = ready.persistent_bytes
        self.sequence: list[int] = []
        self.chain: list[int] = []  # what is left of the chain under way
        self.live = bytearray(count)
        self.locks = [0] * count
        self.next_use = np.full(count, self.end + 1, dtype=np.int64)
        self.evictable = np.zeros(count)  # 1 where it is there, not locked, and can be made again at its next use

    @abstractmethod
    def choose(self, options: list[tuple[int, int]]) -> tuple[int | None, bool]:
        """A storage to evict, or one of `options` and True: inputs of the op that it could overwrite, and their next
        uses. None where there is nothing."""

    def came_back(self, s: int) -> None:  # noqa: B027  # most planners need not know
        """The storage was made again."""

    def begin_at(self, position: int, live: Iterable[int]) -> None:
        """In the middle of a step: the ops before the position have run, and these storages are there."""
        ready = self.ready
        coming: dict[int, int] = dict.fromkeys(ready.kept, self.end)
        for at in range(self.end - 1, position - 1, -1):
            coming.update(dict.fromkeys((*ready.reads[at], *ready.makes[at]), at))
        self.now, self.resumed = position, True
        self.held += sum(ready.undo[:position])
        self.next_use[list(coming)] = list(coming.values())
        for s in live:
            self.live[s] = 1
            self.held += ready.size[s]
            self.settle(s)

    def bring_results(self) -> None:
        """In the middle of a step, a result that is not there any more comes first, for no op asks for it."""
        gone = [s for s in self.ready.kept if not self.live[s] and 0 <= self.ready.made_at[s] < self.now]
        for s in gone:
            if s in self.stored:
                self.bring_back(s)
        self.make_again([s for s in gone if s not in self.stored])

    def run(self) -> list[int]:
        ready = self.ready
        if self.resumed:
            self.bring_results()
        for at in range(self.now, self.end):
            reads = ready.reads[at]
            self.now = at
            self.held += ready.undo[at]
            missing = [s for s in reads if not self.live[s] and s not in self.stored]
            for s in reads:
                self.lock(s)
            if missing:
                self.make_again(missing)
            self.execute(at, ready.next_use[at])
            for s in reads:
                self.locks[s] -= 1
            for s, use in ready.next_use[at].items():
                self.next_use[s] = use
                self.settle(s)
        return self.sequence

    # ---- what is there

    def lock(self, s: int) -> None:
        self.locks[s] += 1
        self.evictable[s] = 0.0

    def settle(self, s: int) -> None:
        """After a use: gone if it was the last, evictable if nothing locks it."""
        if self.live[s] and not self.locks[s]:
            use = self.next_use[s]
            if use > self.end:
                self.drop(s)
            else:
                self.evictable[s] = 1.0 if use <= self.ready.until[s] or s in self.stored else 0.0

    def drop(self, s: int) -> None:
        self.live[s] = 0
        self.held -= self.ready.size[s]
        self.evictable[s] = 0.0

    # ---- running ops

    def make_again(self, missing: Sequence[int]) -> None:
        """The missing storages and their missing ancestors, each used up as the chain goes on."""
        ready = self.ready
        makers = self.makers(missing)
        if self.resumed and any(ready.until[s] < self.now for at in makers for s in ready.makes[at]):
            raise NoRoom([])  # what was lost need not be such that it can be made again
        self.chain = sorted(makers, reverse=True)
        for at in self.chain:
            for r in ready.reads[at]:
                self.lock(r)
        while self.chain:
            at = self.chain[-1]
            made = [s for s in ready.makes[at] if not self.live[s]]
            self.execute(at, None)
            self.chain.pop()
            for r in ready.reads[at]:
                self.locks[r] -= 1
                self.settle(r)
            for s in made:
                self.settle(s)
                self.came_back(s)

    def makers(self, wanted: Iterable[int]) -> set[int]:
        """The positions of the ops to run for these storages."""
        ready, live, stored = self.ready, self.live, self.stored
        found: set[int] = set()
        stack = [ready.made_at[s] for s in wanted if s not in stored]
        while stack:
            at = stack.pop()
            if at not in found:
                found.add(at)
                stack += [ready.made_at[r] for r in ready.reads[at] if not live[r] and r not in stored]
        return found

    def bring_back(self, s: int) -> None:
        self.make_room(self.ready.size[s], [])
        self.live[s] = 1
        self.held += self.ready.size[s]
        self.sequence.append(-1 - s)

    def execute(self, at: int, uses: dict[int, int] | None) -> None:
        """Make room and run the op. `uses`: the next uses of what it touches; None when it runs again."""
        ready = self.ready
        for s in ready.reads[at] if self.stored else ():
            if not self.live[s]:
                self.bring_back(s)
        new = [s for s in ready.makes[at] if not self.live[s]]
        again = [s for s in ready.makes[at] if self.live[s]]  # made beside the others: to evict it would gain nothing
        for s in again:
            self.lock(s)
        results = sum(ready.size[s] for s in new)
        over = None
        options: list[tuple[int, int]] = []
        for s in ready.overwrites[at] if new else ():
            use = uses[s] if uses else int(self.next_use[s])
            if self.locks[s] > 1:
                continue
            if use > self.end:
                over = s
                break
            if use <= ready.until[s]:
                options.append((s, use))
        if over is None:
            workspace = ready.again_workspace if uses is None else ready.first_workspace
            over = self.make_room(results + workspace[at], options)
        if over is not None:
            self.make_room(results + ready.over_workspace[at] - ready.size[over], [])
            self.drop(over)
        for s in new:
            self.live[s] = 1
            self.held += ready.size[s]
        for s in again:
            self.locks[s] -= 1
            self.settle(s)
        self.sequence.append(at)
        if len(self.sequence) > MOST_TIMES * self.end + 100:
            self.fail()  # it makes again what it has just evicted, over and over
        if is_late():
            raise NoRoom([])

    def make_room(self, need: int, options: list[tuple[int, int]]) -> int | None:
        """Evict until the bytes fit; the input to overwrite, where that is the choice."""
        while self.held + need > self.budget:
            s, overwrite = self.choose(options)
            if s is None:
                self.fail()
            elif overwrite:
                return s
            else:
                self.drop(s)
        return None

    def fail(self) -> NoReturn:
        raise NoRoom([s for at in self.chain for s in self.ready.makes[at]])


class Greedy(Walk):
    """Evicts by a score. Costs only grow while storages go, so they are looked at only when they matter."""

    def __init__(
        self,
        ready: Prepared,
        budget: int,
        score: Score = SCORES["chain"],
        dearness: NDArray[np.float64] | None = None,
        stored: Iterable[int] = (),
    ) -> None:
        super().__init__(ready, budget, stored)
        self.score = score
        dearness = np.ones(len(ready.size)) if dearness is None else dearness
        self.dearness: list[float] = dearness.tolist()
        self.own = [s * d for s, d in zip(ready.own_s, self.dearness, strict=True)]
        self.cost = list(self.own)
        self.gain = np.array(ready.size, dtype=np.float64) / np.array(self.cost)
        self.clock = _clock(ready, budget, score)

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

    def came_back(self, s: int) -> None:
        for t in self.ready.readers[s]:
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
        self.gain[s] = self.ready.size[s] / cost

    def cost_of(self, s: int) -> float:
        ready, score = self.ready, self.score
        cost = own_s = ready.own_s[s]
        if score.ancestors:
            cost += score.ancestors * (sum(ready.again_s[at] for at in self.makers([s])) + TICK_S - own_s)
        if score.descendants:
            cost += score.descendants * sum(ready.again_s[at] for at in self.missing_descendants(s))
        return cost * self.dearness[s]

    def missing_descendants(self, s: int) -> set[int]:
        """The positions of the ops whose missing results, still wanted, are made from the storage."""
        ready = self.ready
        found: set[int] = set()
        stack = [s]
        while stack:
            for t in ready.readers[stack.pop()]:
                at = ready.made_at[t]
                if at < self.now and not self.live[t] and at not in found and self.next_use[t] <= self.end:
                    found.add(at)
                    stack.append(t)
        return found


def _clock(ready: Prepared, budget: int, score: Score) -> NDArray[np.float64] | None:
    """The time at each position, and at the two past the end, as the score counts it."""
    if score.span == "none":
        return None
    length = ready.first_s + TICK_S
    if score.span == "tight":
        length = np.where(ready.during > budget, length, length * 1e-3)
    return np.concatenate([[0.0], np.cumsum(length), [length.sum()]])


class _Polish:
    """Takes recomputes out of a sequence where what they make could as well have stayed.

        storage   ├──use──┤ · · · · gap · · · · ├made again──use──┤      the bytes of the gap are free: make it one life

    lives: storage → for each life the places in the sequence where it is made and used; past the end for a result.
    """

    PASSES = 3

    def __init__(self, ready: Prepared, budget: int, sequence: list[int]) -> None:
        self.ready, self.budget, self.sequence = ready, budget, sequence
        self.lives: dict[int, list[list[int]]] = {}
        self.is_again = bytearray(len(sequence))
        seen = bytearray(len(ready.order))
        undo = np.zeros(len(sequence) + 1, dtype=np.int64)
        for place, at in enumerate(sequence):
            for s in ready.reads[at]:
                self.lives[s][-1].append(place)
            for s in ready.makes[at]:
                self.lives.setdefault(s, []).append([place])
            self.is_again[place] = seen[at]
            undo[place] = 0 if seen[at] else ready.undo[at]
            seen[at] = 1
        self.over: list[int | None] = [None] * len(sequence)  # what each op overwrites
        self.memory = self._memory() + np.cumsum(undo) + ready.persistent_bytes

    def _memory(self) -> NDArray[np.int64]:
        ready, end = self.ready, len(self.sequence)
        change = np.zeros(end + 1, dtype=np.int64)
        dying: list[list[int]] = [[] for _ in self.sequence]
        for s, lives in self.lives.items():
            for life in lives:
                change[life[0]] += ready.size[s]
                if s in ready.kept and life is lives[-1]:
                    life.append(end)
                else:
                    change[life[-1] + 1] -= ready.size[s]
                    dying[life[-1]].append(s)
        memory = np.cumsum(change)
        for place, at in enumerate(self.sequence):
            over = next((s for s in ready.overwrites[at] if s in dying[place]), None)
            self.over[place] = over
            memory[place] += self._workspace(place) if over is None else ready.over_workspace[at] - ready.size[over]
        return memory

    def _workspace(self, place: int) -> int:
        """What the op there takes above its results if it overwrites nothing."""
        again = self.is_again[place]
        return (self.ready.again_workspace if again else self.ready.first_workspace)[self.sequence[place]]

    def run(self) -> list[int]:
        again = [place for place, is_again in enumerate(self.is_again) if is_again]
        left = sorted(again, key=lambda place: self.ready.again_s[self.sequence[place]], reverse=True)
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
        ready, at = self.ready, self.sequence[place]
        memory = self.memory.copy()
        joined = [(s, self._life(s, place)) for s in ready.makes[at]]
        ended = [self.lives[r][self._life(r, place - 1)] for r in ready.reads[at]]
        for r, life in zip(ready.reads[at], ended, strict=True):
            if life[-1] == place:
                memory[life[-2] + 1 : place] -= ready.size[r]
        for s, k in joined:
            if len(self.lives[s][k]) > 1:
                last = self.lives[s][k - 1][-1]
                memory[last + 1 : place] += ready.size[s]
                if self.over[last] == s:
                    memory[last] += ready.size[s] - ready.over_workspace[self.sequence[last]] + self._workspace(last)
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
