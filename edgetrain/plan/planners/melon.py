"""The planner `melon`: a pool by lifetimes, and eviction by TPS (Melon, Wang et al. 2022).

In:  a problem, a budget in bytes.
Out: the order in which Melon would run the step, or None where it finds no room (`melon`); with it the pool that the
     order was found for (`calibrate`). `pool` lays out any blocks by Melon's rule.
Promised: the pool is legal, and its height and the lasting tensors are within the budget together. So is the peak that
     `lifetimes.timeline` gives for the order, because the pool holds all that is counted there.

The rule of the pool: longest lifetime first, then the largest, then the first born; each into the smallest gap that
fits between placed blocks alive at the same time, else on top of them. So what lives long lies beneath what does not:

    room ──────────────┌─┐──────────────        room ─────────────────────────────────
                       │c│ too high
          ┌────────────┴─┴──────────┐                ┌───┐      ┌─┐              ┌───┐
        ┌─┤            b            ├─┐              │ a │      │c│              │ a │
        │ └─────────────────────────┘ │              └─┬─┴──────┴─┴──────────────┴─┬─┘
        │              a              │                │             b             │
        └─────────────────────────────┘                └───────────────────────────┘
                                                a goes after its last use and is recomputed; the rest sinks

The walk goes through the ops. What an op makes comes into the pool, for all the time until its last use. While the pool
is above what the budget leaves, the storage of the largest

    TPS = bytes × freed lifetime ÷ recompute time

goes: its life is cut off, and the pool is calibrated. The freed lifetime is the number of ops between its release and
its next use; the recompute time counts every ancestor that is missing now. Where an op misses something, the missing
ancestors run again before it, the timeline is longer by that much, and what they make is placed like all else.

How the pool is calibrated, and where this departs from what was published:
- What an op makes is placed best-fit among what lies there. Where that is too high, all that was made so far is laid
  out anew by the rule, so that what lay above a released block sinks. What is still to come has no place yet.
- A release is hoisted to just after the last use at once, not when all is planned. Until it is, an evicted storage
  lies under all that was made since, and hardly anything sinks: `hoist="last"` meets few budgets.
- After a pool that was too high by n bytes, none is laid out before n more have gone: it would hardly be low enough.
- Updates in place stand early in the graph here. So some ops can run again only up to a deadline, some never
  (`Problem.deadline`), and what could not be recomputed at its next use is not evicted.
- Workspaces of kernels, and the copies that are kept to take a failed step back, are blocks of the pool too. A view is
  part of its storage. A result that overwrites an input, as `lifetimes.schedule` will have it, takes on its block.
- An op that makes several storages is run again for any of them; those that are still there lie where they lay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgetrain.plan.layout import Block, Layout, lay_out, live_peak
from edgetrain.plan.planner import Planner, greedy
from edgetrain.plan.problem import TICK_S, Problem, Tables
from edgetrain.plan.walk import NoRoom, Walk

ALIGNMENT = 64
Hoist = Literal["at once", "last"]


@dataclass(frozen=True, slots=True)
class Eviction:
    """time: the place in the order of the op that it made room for."""

    storage: int
    time: int
    tps: float


@dataclass(frozen=True)
class Calibrated:
    """blocks: all that the step holds beside the lasting tensors; a unit of time is an op of the order."""

    order: tuple[int, ...]
    evictions: tuple[Eviction, ...]
    blocks: tuple[Block, ...]
    layout: Layout


def pool(blocks: Sequence[Block], *, alignment: int = ALIGNMENT) -> Layout:
    """The layout by Melon's rule. It is one of the greedy ones of `lay_out`, which breaks ties by the order given."""
    by_birth = sorted(range(len(blocks)), key=lambda n: blocks[n].start)
    layout = lay_out(
        [blocks[n] for n in by_birth],
        alignment=alignment, orders=("lifetime",), fits=("best",), improve_placements=0,
    )  # fmt: skip
    offsets = [0] * len(blocks)
    for n, offset in zip(by_birth, layout.offsets, strict=True):
        offsets[n] = offset
    return Layout(tuple(offsets), layout.height_bytes, layout.live_peak_bytes, "Melon's pool")


def melon(
    problem: Problem,
    budget_bytes: int,
    *,
    until: float = math.inf,
    pooled: bool = True,
    hoist: Hoist = "at once",
    alignment: int = ALIGNMENT,
) -> tuple[int, ...] | None:
    """The order alone; see `calibrate`."""
    calibrated = calibrate(problem, budget_bytes, until=until, pooled=pooled, hoist=hoist, alignment=alignment)
    return None if calibrated is None else calibrated.order


def calibrate(
    problem: Problem,
    budget_bytes: int,
    *,
    until: float = math.inf,
    pooled: bool = True,
    hoist: Hoist = "at once",
    alignment: int = ALIGNMENT,
) -> Calibrated | None:
    """
    pooled: False asks that the bytes alive keep the budget, not the pool: what TPS alone comes to. The pool that is
            laid out for it in the end may be too high.
    hoist:  when the release of an evicted storage moves to just after its last use.
    alignment: of every block of the pool, in bytes; sizes are rounded up to it.
    """
    walk = _Progressive(problem.tables, budget_bytes, pooled=pooled, hoist=hoist, alignment=alignment, until=until)
    try:
        sequence = walk.run()
    except NoRoom:
        return None
    walk.pool.cut(walk.releases)
    blocks = walk.pool.blocks()
    layout = walk.pool.layout() if pooled else pool(blocks, alignment=alignment)
    return Calibrated(tuple(problem.order[at] for at in sequence), tuple(walk.evictions), blocks, layout)


class _Pool:
    """Blocks that come one after the other, lives that change, and where each lies."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.table = np.zeros((4, 64), dtype=np.int64)  # rows: offset, rounded bytes, start, end
        self.count = 0

    @property
    def rows(self) -> NDArray[np.int64]:
        return self.table[:, : self.count]

    def add(self, n_bytes: int, start: int, end: int) -> int:
        """The number of a new block, which has no place yet."""
        if self.count == self.table.shape[1]:
            self.table = np.concatenate([self.table, np.zeros_like(self.table)], axis=1)
        self.table[:, self.count] = 0, -(-n_bytes // self.alignment) * self.alignment, start, end
        self.count += 1
        return self.count - 1

    def extend(self, time: int, steps: int) -> None:
        """So many steps come in at this time; what is alive there lives on across them."""
        end = self.rows[3]
        end[end > time] += steps

    def cut(self, ends: dict[int, int]) -> None:
        for block, end in ends.items():
            self.table[3, block] = end

    def live_bytes(self, time: int) -> int:
        _, size, start, end = self.rows
        return int(size[(start <= time) & (end > time)].sum())

    def place(self, first: int, room_bytes: int) -> bool:
        """Each block from the first one on best-fit among those before it; whether all are within the room."""
        for block in range(first, self.count):
            offset = self.best_fit(block)
            self.table[0, block] = offset
            if offset + self.table[1, block] > room_bytes:
                return False
        return True

    def best_fit(self, block: int) -> int:
        _, size, start, end = self.table[:, block].tolist()
        low, sizes, starts, ends = self.table[:, :block]
        beside = ((starts < end) & (ends > start) & (sizes > 0)).nonzero()[0]
        if not len(beside) or not size:
            return 0
        beside = beside[low[beside].argsort()]
        tops = np.maximum.accumulate(low[beside] + sizes[beside])
        floors = np.concatenate([[0], tops[:-1]])  # of the gap beneath each of them
        gaps = low[beside] - floors
        fitting = (gaps >= size).nonzero()[0]
        return int(floors[fitting[gaps[fitting].argmin()]]) if len(fitting) else int(tops[-1])

    def lay_out(self, room_bytes: int) -> int:
        """All anew by the rule, if that is within the room; the height that it comes to."""
        layout = pool(self.blocks(), alignment=self.alignment)
        if layout.height_bytes <= room_bytes:
            self.rows[0] = layout.offsets
        return layout.height_bytes

    def blocks(self) -> tuple[Block, ...]:
        return tuple(Block(*row) for row in self.rows[1:].T.tolist())

    def layout(self) -> Layout:
        low, size, _, _ = self.rows
        height = int((low + size).max(initial=0))
        return Layout(
            tuple(low.tolist()), height, live_peak(self.blocks(), alignment=self.alignment), "Melon's pool, calibrated"
        )


class _Progressive(Walk):
    """The walk's time is the number of ops that have run; a position that is to come is `ahead` of it by what has run
    again."""

    def __init__(
        self, tables: Tables, budget: int, *, pooled: bool, hoist: Hoist, alignment: int, until: float = math.inf
    ) -> None:
        super().__init__(tables, budget, until=until)
        self.pooled, self.hoist = pooled, hoist
        self.room_bytes = budget - tables.persistent_bytes
        self.pool = _Pool(alignment)
        self.ahead = 0
        self.first_new = 0  # the first block that the op at hand brings
        self.block = [-1] * len(tables.size)  # storage → the block of its present life
        self.releases: dict[int, int] = {}  # block of an evicted storage → the time after its last use
        self.evictions: list[Eviction] = []
        self.in_chain: dict[int, int] = {}  # storage → the time after its last reader in the chain under way
        self.touched = np.zeros(len(tables.size), dtype=np.int64)  # the time of its last use
        self.size = np.array(tables.size, dtype=np.float64)
        self.own_s = np.array(tables.own_s)
        self.least_s = self.own_s.copy()  # recompute times as far as known: they only grow until something comes back
        self.dies = [self.end] * len(tables.size)  # storage → the position after its last use
        for at, uses in enumerate(tables.next_use):
            for s, use in uses.items():
                if use > self.end:
                    self.dies[s] = at + 1

    # ---- the timeline

    def recompute(self, missing: Sequence[int]) -> None:
        begin, chain = len(self.sequence), sorted(self.makers(missing))
        self.pool.extend(begin, len(chain))
        self.ahead += len(chain)
        self.in_chain = {r: begin + k + 1 for k, at in enumerate(chain) for r in self.tables.reads[at]}
        super().recompute(missing)
        self.in_chain = {}

    def execute(self, at: int, uses: dict[int, int] | None) -> None:
        self.first_new = self.pool.count
        self.add_blocks(at, uses)
        for s in (*self.tables.reads[at], *self.tables.makes[at]):
            self.touched[s] = len(self.sequence)
        super().execute(at, uses)

    def add_blocks(self, at: int, uses: dict[int, int] | None) -> None:
        """The blocks that the op brings, in the order of the rule. `uses`: as for `execute`."""
        tables, time, again = self.tables, len(self.sequence), uses is None
        makes = tables.makes[at]
        workspace = tables.again_workspace if again else tables.first_workspace
        over = self.overwritten(at, uses)
        if over is not None:
            # All that is alive from now on is alive now too, and lies beside it already: the place is free for longer.
            self.block[makes[0]] = self.block[over]
            self.pool.cut({self.block[over]: self.end_of(makes[0], again=again)})
            makes, workspace = makes[1:], tables.over_workspace
        new: list[tuple[int, int, int | None]] = [  # end, bytes, storage
            (self.end_of(s, again=again), tables.size[s], s) for s in makes if not self.live[s]
        ]
        new.append((time + 1, workspace[at], None))
        if not again:
            new.append((self.end + self.ahead, tables.undo[at], None))
        for end, n_bytes, s in sorted(new, key=lambda block: (-block[0], -block[1])):
            if s is not None:
                self.block[s] = self.pool.add(n_bytes, time, end)
            elif n_bytes:
                self.pool.add(n_bytes, time, end)

    def overwritten(self, at: int, uses: dict[int, int] | None) -> int | None:
        """The input whose memory the op's first result will take: one that ends here, as in `execute`."""
        tables = self.tables
        if not tables.makes[at] or self.live[tables.makes[at][0]]:
            return None
        ending = (s for s in tables.overwrites[at] if self.locks[s] == 1)
        return next((s for s in ending if (uses[s] if uses else self.next_use[s]) > self.end), None)

    def end_of(self, s: int, *, again: bool) -> int:
        """Until when a storage that is made now will live, as things stand."""
        end = self.in_chain.get(s, len(self.sequence) + 1)
        if again and self.next_use[s] > self.end:
            return end
        return max(end, self.dies[s] + self.ahead)

    # ---- eviction

    def make_room(self, need: int, options: list[tuple[int, int]]) -> int | None:
        """Until the pool is within the room; what the op needs is in it already."""
        time, too_high = len(self.sequence), 0
        while self.pool.live_bytes(time) > self.room_bytes:
            self.evict(time)
        while self.pooled and not self.pool.place(self.first_new, self.room_bytes):
            if too_high <= 0:
                too_high = self.pool.lay_out(self.room_bytes) - self.room_bytes
                if too_high <= 0:
                    break
            too_high -= self.evict(time)
        return None

    def evict(self, time: int) -> int:
        """Cut off the life of the storage of the largest TPS; its bytes."""
        s, _ = self.choose([])
        if s is None:
            self.fail()
        self.evictions.append(Eviction(s, time, float(self.tps()[s])))
        block, release = self.block[s], int(self.touched[s]) + 1
        self.releases[block] = release
        self.pool.cut({block: release if self.hoist == "at once" else time})
        self.drop(s)
        return self.tables.size[s]

    def choose(self, options: list[tuple[int, int]]) -> tuple[int | None, bool]:
        while True:
            tps = self.tps() * self.evictable
            s = int(tps.argmax())
            if tps[s] <= 0:
                return None, False
            time_s = sum(self.tables.again_s[at] for at in self.makers([s])) + TICK_S
            if time_s <= self.least_s[s] * (1 + 1e-9):
                return s, False
            self.least_s[s] = time_s

    def tps(self) -> NDArray[np.float64]:
        """Of every storage; no less than it is where a recompute time has not been looked at."""
        release = self.touched + 1 if self.hoist == "at once" else len(self.sequence)
        tps: NDArray[np.float64] = self.size * (self.next_use + self.ahead - release) / self.least_s
        return tps

    def on_recomputed(self, s: int) -> None:
        self.least_s[:] = self.own_s


MELON = Planner("melon", "a pool by lifetimes, and eviction by bytes × lifetime ÷ time (Melon)", greedy(melon))
