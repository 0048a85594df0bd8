"""A walk through the ops of a step that evicts where the next one does not fit: what greedy planners share.

In:  the tables of a problem (`Problem.tables`), a budget in bytes, a rule of what is evicted (`Walk.choose`).
Out: the positions of the ops in the order in which they run, recomputed ones again; `NoRoom` where that ends.
Promised: the bytes that the walk accounts for are never less than what `lifetimes.timeline` gives for that order.

    budget ─────────────────────────────────────────────
               ┌─┐ evict a  ┌─┐ evict b    ┌──┐ recompute a (and what it is made from, in the order of the graph;
          ┌────┘ └──────────┘ └────────────┘  └──  temporaries of the chain are freed at once)
     ─────┘  op    op   op    op    op ...

A chain runs right before the op that needs it, never earlier; so a budget that only fits where something is recomputed
ahead of its use, while fewer gradients are there, is not found.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NoReturn

import numpy as np

from edgetrain.plan.problem import Tables

MAX_TIMES = 8  # a walk that runs more than so many times the ops of a step leads nowhere


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
    until:    the instant of `time.monotonic` at which it gives up.
    """

    def __init__(self, tables: Tables, budget: int, stored: Iterable[int] = (), *, until: float = math.inf) -> None:
        self.tables, self.budget, self.until = tables, budget, until
        self.stored = frozenset(stored)
        count = len(tables.size)
        self.end = len(tables.order)
        self.now, self.resumed = 0, False
        self.held = tables.persistent_bytes
        self.sequence: list[int] = []
        self.chain: list[int] = []  # what is left of the chain under way
        self.live = bytearray(count)
        self.locks = [0] * count
        self.next_use = np.full(count, self.end + 1, dtype=np.int64)
        self.evictable = np.zeros(count)  # 1 where it is there, not locked, and can be recomputed at its next use

    @abstractmethod
    def choose(self, options: list[tuple[int, int]]) -> tuple[int | None, bool]:
        """A storage to evict, or one of `options` and True: inputs of the op that it could overwrite, and their next
        uses. None where there is nothing."""

    def on_recomputed(self, s: int) -> None:  # noqa: B027  # most planners need not know
        """The storage was recomputed."""

    def begin_at(self, position: int, live: Iterable[int]) -> None:
        """In the middle of a step: the ops before the position have run, and these storages are there."""
        tables = self.tables
        coming: dict[int, int] = dict.fromkeys(tables.kept, self.end)
        for at in range(self.end - 1, position - 1, -1):
            coming.update(dict.fromkeys((*tables.reads[at], *tables.makes[at]), at))
        self.now, self.resumed = position, True
        self.held += sum(tables.undo[:position])
        self.next_use[list(coming)] = list(coming.values())
        for s in live:
            self.live[s] = 1
            self.held += tables.size[s]
            self.settle(s)

    def restore_results(self) -> None:
        """In the middle of a step, a result that is not there any more comes first, for no op asks for it."""
        gone = [s for s in self.tables.kept if not self.live[s] and 0 <= self.tables.made_at[s] < self.now]
        for s in gone:
            if s in self.stored:
                self.page_in(s)
        self.recompute([s for s in gone if s not in self.stored])

    def run(self) -> list[int]:
        tables = self.tables
        if self.resumed:
            self.restore_results()
        for at in range(self.now, self.end):
            reads = tables.reads[at]
            self.now = at
            self.held += tables.undo[at]
            missing = [s for s in reads if not self.live[s] and s not in self.stored]
            for s in reads:
                self.lock(s)
            if missing:
                self.recompute(missing)
            self.execute(at, tables.next_use[at])
            for s in reads:
                self.locks[s] -= 1
            for s, use in tables.next_use[at].items():
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
                self.evictable[s] = 1.0 if use <= self.tables.until[s] or s in self.stored else 0.0

    def drop(self, s: int) -> None:
        self.live[s] = 0
        self.held -= self.tables.size[s]
        self.evictable[s] = 0.0

    # ---- running ops

    def recompute(self, missing: Sequence[int]) -> None:
        """The missing storages and their missing ancestors, each used up as the chain goes on."""
        tables = self.tables
        makers = self.makers(missing)
        if self.resumed and any(tables.until[s] < self.now for at in makers for s in tables.makes[at]):
            raise NoRoom([])  # what was lost need not be such that it can be recomputed
        self.chain = sorted(makers, reverse=True)
        for at in self.chain:
            for r in tables.reads[at]:
                self.lock(r)
        while self.chain:
            at = self.chain[-1]
            created = [s for s in tables.makes[at] if not self.live[s]]
            self.execute(at, None)
            self.chain.pop()
            for r in tables.reads[at]:
                self.locks[r] -= 1
                self.settle(r)
            for s in created:
                self.settle(s)
                self.on_recomputed(s)

    def makers(self, wanted: Iterable[int]) -> set[int]:
        """The positions of the ops to run for these storages."""
        tables, live, stored = self.tables, self.live, self.stored
        positions: set[int] = set()
        stack = [tables.made_at[s] for s in wanted if s not in stored]
        while stack:
            at = stack.pop()
            if at not in positions:
                positions.add(at)
                stack += [tables.made_at[r] for r in tables.reads[at] if not live[r] and r not in stored]
        return positions

    def page_in(self, s: int) -> None:
        self.make_room(self.tables.size[s], [])
        self.live[s] = 1
        self.held += self.tables.size[s]
        self.sequence.append(-1 - s)

    def execute(self, at: int, uses: dict[int, int] | None) -> None:
        """Make room and run the op. `uses`: the next uses of what it touches; None when it runs again."""
        tables = self.tables
        for s in tables.reads[at] if self.stored else ():
            if not self.live[s]:
                self.page_in(s)
        new = [s for s in tables.makes[at] if not self.live[s]]
        again = [s for s in tables.makes[at] if self.live[s]]  # made beside the others: to evict it would gain nothing
        for s in again:
            self.lock(s)
        results = sum(tables.size[s] for s in new)
        over = None
        options: list[tuple[int, int]] = []
        for s in tables.overwrites[at] if new else ():
            use = uses[s] if uses else int(self.next_use[s])
            if self.locks[s] > 1:
                continue
            if use > self.end:
                over = s
                break
            if use <= tables.until[s]:
                options.append((s, use))
        if over is None:
            workspace = tables.again_workspace if uses is None else tables.first_workspace
            over = self.make_room(results + workspace[at], options)
        if over is not None:
            self.make_room(results + tables.over_workspace[at] - tables.size[over], [])
            self.drop(over)
        for s in new:
            self.live[s] = 1
            self.held += tables.size[s]
        for s in again:
            self.locks[s] -= 1
            self.settle(s)
        self.sequence.append(at)
        if len(self.sequence) > MAX_TIMES * self.end + 100:
            self.fail()  # it makes again what it has just evicted, over and over
        if time.monotonic() > self.until:
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
        raise NoRoom([s for at in self.chain for s in self.tables.makes[at]])
