"""Where each block lies in the arena: "dynamic storage allocation".

In:  blocks, each with its bytes and a half-open lifetime.
Out: an offset for each, so that blocks alive at the same time never overlap, and the height that this takes.

    offset
      │   ┌────┐┌────────┐          height: the highest top of a block
      │   │ b  ││   d    │
      │ ┌─┴────┴┴──┬─────┴──┐
      │ │    a     │   c    │       live peak: the most bytes alive at one time; no layout can be lower
      └──────────────────────── time

Promised: the layout passes `check`, which shares no code with the search, and the same arguments give the same layout
(a time limit apart: what CP-SAT finds in it depends on the machine). How it is sought, each step only while the height
is above what is asked for:

1. split:    blocks that no chain of overlapping lifetimes connects are laid out by themselves;
2. greedy:   in several orders, each block at the lowest (or tightest) place where it fits among those placed before;
3. improve:  the block that would have broken the best height goes to the front of its order, again and again;
4. with a time limit: CP-SAT on the large blocks alone (the small ones fill what is left), more of 3, CP-SAT on all.

Greedy by size alone reaches the live peak of many training steps, at about 15 µs a block. Finding the lowest layout
of all is NP-hard.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edgetrain import child
from edgetrain.errors import InternalError, UserError

Order = Literal["size", "crowd", "area", "lifetime", "end", "start"]
Fit = Literal["first", "best"]
ORDERS: tuple[Order, ...] = ("size", "crowd", "area", "lifetime", "end", "start")
FITS: tuple[Fit, ...] = ("first", "best")

# CP-SAT with one worker for each of its strategies, even where there are fewer cores: they help each other.
WORKERS = 8
# Blocks below this share of the live peak are left out of the first search of CP-SAT.
SMALL = 1 / 2000
# The parts of the time limit that the first search and `improve` may take; the second search gets what is left.
CORE_TIME, IMPROVE_TIME = 0.4, 0.4

_NO_GAP = np.iinfo(np.int64).max

Ints = npt.NDArray[np.int64]
Starts = list[tuple[list[int], Fit]]  # orders to begin with, each with its fit


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are alive in the half-open lifetime [start, end), in any whole unit of time."""

    n_bytes: int
    start: int
    end: int

    def __post_init__(self) -> None:
        if self.n_bytes < 0 or self.end <= self.start:
            raise InternalError(f"no block has {self.n_bytes} bytes and is alive in [{self.start}, {self.end})")


@dataclass(frozen=True)
class Layout:
    """offsets:         one for each block, in the order in which they were given.
    height_bytes:    the arena that they take; sizes count rounded up to the alignment.
    live_peak_bytes: the most (rounded) bytes alive at one time: no layout can be lower than this.
    how:             the method that found it, such as "greedy by size, first fit".
    """

    offsets: tuple[int, ...]
    height_bytes: int
    live_peak_bytes: int
    how: str


def live_peak(blocks: Sequence[Block], *, alignment: int = 64) -> int:
    """The most bytes alive at one time, each size rounded up to the alignment."""
    return _Part.of(blocks, alignment).peak()


def lay_out(
    blocks: Sequence[Block],
    *,
    alignment: int = 64,
    capacity_bytes: int | None = None,
    time_limit_s: float = 0.0,
    orders: Sequence[Order] = ORDERS,
    fits: Sequence[Fit] = FITS,
    improve_placements: int = 8_000,
    split: bool = True,
    core: bool = True,
    seed: int = 0,
) -> Layout:
    """The lowest layout found; it stops as soon as one reaches the live peak or fits in `capacity_bytes`.

    A capacity that cannot be met is no error: the height says so.

    time_limit_s:       for step 4, which is only taken if the others leave a gap; 0 does without (and imports nothing).
    improve_placements: how often `improve` may place a block in step 3; 0 switches it off altogether.
    split, core:        step 1, and CP-SAT on the large blocks alone, can be switched off.
    seed:               of CP-SAT; nothing else is random.

    The quick way, for planning again at run time: `orders=("size",), fits=("first",), improve_placements=0`.
    """
    if alignment < 1 or not orders or not fits:
        raise UserError(
            "a layout needs an alignment, an order and a fit",
            expected="alignment >= 1, and at least one of orders and of fits",
            received=f"alignment={alignment}, orders={tuple(orders)}, fits={tuple(fits)}",
        )
    offsets = [0] * len(blocks)
    peak = live_peak(blocks, alignment=alignment)
    goal, height, how = max(peak, capacity_bytes or 0), 0, "nothing to place"
    deadline_s = time.monotonic() + time_limit_s
    for part in _parts(_Part.of(blocks, alignment), split=split):
        placed = _greedy(part, orders, fits, goal)
        starts = [(_ORDERS[order](part), fits[0]) for order in orders[:3]] if improve_placements else []
        placed = _improve(part, placed, starts, goal, placements=improve_placements)
        if placed.height > goal and time_limit_s > 0:
            placed = _search(part, placed, starts, goal, deadline_s, core=core, seed=seed)
        for number, offset in zip(part.numbers.tolist(), placed.offsets.tolist(), strict=True):
            offsets[number] = offset
        if placed.height > height:
            height, how = placed.height, placed.how
        goal = max(goal, height)  # the other parts need not be lower than this one
    return Layout(tuple(offsets), height, peak, how)


def check(blocks: Sequence[Block], layout: Layout, *, alignment: int = 64) -> None:
    """InternalError unless the layout is legal for the blocks and its numbers are true.

    Deliberately simple: blocks in order of start, each compared with all that are alive when it starts.
    """
    if len(layout.offsets) != len(blocks):
        raise _illegal(layout, f"{len(layout.offsets)} offsets for {len(blocks)} blocks")
    height = peak = 0
    alive: list[tuple[int, int, int]] = []  # until when, and the half-open range of addresses
    for number in sorted(range(len(blocks)), key=lambda n: blocks[n].start):
        block, low = blocks[number], layout.offsets[number]
        if low < 0 or low % alignment:
            raise _illegal(layout, f"block {number} lies at {low}; alignment {alignment}")
        if block.n_bytes == 0:
            continue
        high = low + (block.n_bytes + alignment - 1) // alignment * alignment
        alive = [other for other in alive if other[0] > block.start]
        for _, other_low, other_high in alive:
            if low < other_high and other_low < high:
                place = f"[{low}, {high}), where [{other_low}, {other_high}) is taken"
                raise _illegal(layout, f"block {number} of {block.n_bytes} bytes lies at {place}")
        alive.append((block.end, low, high))
        height = max(height, high)
        peak = max(peak, sum(other_high - other_low for _, other_low, other_high in alive))
    said = (layout.height_bytes, layout.live_peak_bytes)
    if said != (height, peak):
        raise _illegal(layout, f"it says (height, live peak) = {said} bytes; it is {(height, peak)}")


def _illegal(layout: Layout, what: str) -> InternalError:
    return InternalError(f"the layout ({layout.how}) is not legal: {what}")


# ------------------------------------------------------------------------------------------------- what is solved


@dataclass(frozen=True)
class _Part:
    """Blocks that are laid out together: their numbers, and as arrays their rounded sizes and lifetimes."""

    numbers: Ints
    size: Ints
    start: Ints
    end: Ints

    @staticmethod
    def of(blocks: Sequence[Block], alignment: int) -> _Part:
        """All blocks but those of no bytes, which lie anywhere."""
        numbers = np.array([n for n, block in enumerate(blocks) if block.n_bytes], dtype=np.int64)
        table = [(b.n_bytes, b.start, b.end) for b in blocks if b.n_bytes]
        size, start, end = np.array(table, dtype=np.int64).reshape(-1, 3).T
        return _Part(numbers, -(-size // alignment) * alignment, start, end)

    def take(self, which: Ints) -> _Part:
        return _Part(self.numbers[which], self.size[which], self.start[which], self.end[which])

    def live(self) -> tuple[Ints, Ints]:
        """The instants at which something starts or ends, and the bytes alive from each to the next."""
        instants, place = np.unique(np.concatenate([self.start, self.end]), return_inverse=True)
        change = np.zeros(len(instants), dtype=np.int64)
        np.add.at(change, place, np.concatenate([self.size, -self.size]))
        return instants, change.cumsum()

    def peak(self) -> int:
        return int(self.live()[1].max(initial=0))


def _parts(whole: _Part, *, split: bool) -> list[_Part]:
    """The parts that no lifetime connects, the one with the highest peak first."""
    if not len(whole.numbers):
        return []
    if not split:
        return [whole]
    by_start = whole.start.argsort(kind="stable")
    reach = np.maximum.accumulate(whole.end[by_start])
    cuts = np.flatnonzero(whole.start[by_start][1:] >= reach[:-1]) + 1
    parts = [whole.take(np.sort(which)) for which in np.split(by_start, cuts)]
    return sorted(parts, key=_Part.peak, reverse=True)


@dataclass(frozen=True)
class _Found:
    """Offsets of a part, and the order and fit that gave them."""

    offsets: Ints
    height: int
    how: str
    order: list[int]
    fit: Fit


# ------------------------------------------------------------------------------------------------- greedy


class _Shelf:
    """The blocks placed so far, in order of offset, so that the free places for one more are found in one pass."""

    def __init__(self, part: _Part) -> None:
        self.size, self.start, self.end = part.size.tolist(), part.start.tolist(), part.end.tolist()
        self.offsets = np.zeros(len(part.size), dtype=np.int64)
        self.table = np.zeros((4, len(part.size)), dtype=np.int64)  # rows: low, high, start, end
        self.count = 0
        self.height = 0

    def fill(self, order: Sequence[int], fit: Fit, limit: int) -> int | None:
        """Place blocks in this order; the first whose top would be above the limit is returned, None if all fit."""
        for block in order:
            offset = self.find(block, fit)
            if offset + self.size[block] > limit:
                return block
            self.put(block, offset)
        return None

    def find(self, block: int, fit: Fit) -> int:
        """The lowest place between blocks alive at the same time ("first"), or the tightest such place ("best")."""
        low, high, start, end = self.table[:, : self.count]
        beside = ((start < self.end[block]) & (end > self.start[block])).nonzero()[0]
        if not len(beside):
            return 0
        size = self.size[block]
        tops = np.maximum.accumulate(high[beside])
        gaps = low[beside]  # indexed by an array, so a copy
        gaps[1:] -= tops[:-1]
        fits = gaps >= size
        place = int(fits.argmax() if fit == "first" else np.where(fits, gaps, _NO_GAP).argmin())
        if gaps[place] < size:
            return int(tops[-1])
        return int(tops[place - 1]) if place else 0

    def put(self, block: int, offset: int) -> None:
        at, count = int(self.table[0, : self.count].searchsorted(offset)), self.count
        top = offset + self.size[block]
        self.table[:, at + 1 : count + 1] = self.table[:, at:count]
        self.table[:, at] = offset, top, self.start[block], self.end[block]
        self.offsets[block] = offset
        self.count += 1
        self.height = max(self.height, top)


def _greedy(part: _Part, orders: Sequence[Order], fits: Sequence[Fit], goal: int) -> _Found:
    """The best of all orders and fits. An attempt is given up as soon as it cannot beat the best one before."""
    best: _Found | None = None
    for fit, name in itertools.product(fits, orders):
        order = _ORDERS[name](part)
        shelf = _Shelf(part)
        if shelf.fill(order, fit, best.height - 1 if best else int(part.size.sum())) is None:
            best = _Found(shelf.offsets, shelf.height, f"greedy by {name}, {fit} fit", order, fit)
            if best.height <= goal:
                break
    assert best is not None  # the first attempt always ends: no greedy is higher than all blocks on one another
    return best


def _by(*keys: Ints | npt.NDArray[np.float64]) -> list[int]:
    """The numbers of the blocks sorted by the first key, ties by the next; the largest first."""
    return [int(n) for n in np.lexsort([-key for key in reversed(keys)])]


def _by_crowd(part: _Part) -> list[int]:
    """By the most bytes alive at any time in the block's life: what is alive at the peak comes before all else."""
    instants, live = part.live()
    first, last = instants.searchsorted(part.start), instants.searchsorted(part.end)
    most = [live[a:b].max() for a, b in zip(first.tolist(), last.tolist(), strict=True)]
    return _by(np.array(most), part.size)


_ORDERS: dict[Order, Callable[[_Part], list[int]]] = {
    "size": lambda p: _by(p.size, p.end - p.start),
    "area": lambda p: _by(p.size * (p.end - p.start).astype(np.float64)),  # not int64, which it may leave
    "lifetime": lambda p: _by(p.end - p.start, p.size),
    "crowd": _by_crowd,
    "end": lambda p: _by(p.end, p.size),
    "start": lambda p: _by(-p.start, p.size),
}


def _improve(
    part: _Part, best: _Found, starts: Starts, goal: int, *, placements: int = 0, until_s: float = 0.0
) -> _Found:
    """Aim one below the best height; whichever block does not fit there is placed first of all the next time.

    It begins with the order of the best layout and, in turn, with each of `starts`: they get stuck in other places. It
    ends with the placements spent and the moment passed; with no `starts` at once.
    """
    if not starts:
        return best
    for order, fit in itertools.cycle([(list(best.order), best.fit), *((list(order), fit) for order, fit in starts)]):
        if best.height <= goal or (placements <= 0 and time.monotonic() >= until_s):
            break
        shelf = _Shelf(part)
        stuck = shelf.fill(order, fit, best.height - 1)
        placements -= shelf.count + 1
        if stuck is None:
            how = best.how.removesuffix(", improved") + ", improved"
            best = _Found(shelf.offsets, shelf.height, how, list(order), fit)
        else:
            order.remove(stuck)
            order.insert(0, stuck)
    return best


# ------------------------------------------------------------------------------------------------- with a time limit


def _search(
    part: _Part, best: _Found, starts: Starts, goal: int, deadline_s: float, *, core: bool, seed: int
) -> _Found:
    """CP-SAT on the large blocks, which decide the height; then `improve`, with its layout as a start; then on all."""
    limit_s = deadline_s - time.monotonic()
    everything = np.arange(len(part.size))
    large = np.flatnonzero(part.size >= part.peak() * SMALL)
    if not core or not len(large):
        large = everything
    best, proven = _cp_sat(part, large, best, goal, CORE_TIME * limit_s, seed)
    if proven and len(large) == len(everything):
        return best
    best = _improve(part, best, starts, goal, until_s=time.monotonic() + IMPROVE_TIME * limit_s)
    if best.height > goal:
        best, _ = _cp_sat(part, everything, best, goal, deadline_s - time.monotonic(), seed)
    return best


def _cp_sat(part: _Part, which: Ints, best: _Found, goal: int, time_s: float, seed: int) -> tuple[_Found, bool]:
    """The best with `which` laid out by CP-SAT and the rest greedily around them, if that is lower; and whether CP-SAT
    proved that `which` cannot lie lower."""
    if time_s <= 0:
        return best, False
    chosen = part.take(which)
    room = part.peak() - chosen.peak()  # about what the rest will need above
    offsets, proven = _solve(chosen, best.offsets[which], goal - room, best.height, time_s, seed)
    if not offsets:
        return best, False
    shelf = _Shelf(part)
    for block, offset in zip(which.tolist(), offsets, strict=True):
        shelf.put(block, offset)
    rest = set(range(len(part.size))).difference(which.tolist())
    stuck = shelf.fill([block for block in _ORDERS["size"](part) if block in rest], "first", best.height - 1)
    if stuck is not None or shelf.height >= best.height:
        return best, proven
    how = "CP-SAT on the large blocks" if rest else "CP-SAT"
    # Placed in order of offset, each at the lowest place, no block comes to lie higher than here.
    return _Found(shelf.offsets, shelf.height, how, shelf.offsets.argsort(kind="stable").tolist(), "first"), proven


def _solve(part: _Part, hint: Ints, goal: int, height: int, time_s: float, seed: int) -> tuple[list[int], bool]:
    """Offsets of the lowest height in [goal, height] that CP-SAT finds in time (none if it finds none), and whether it
    proved them lowest.

    Bytes are in units of the sizes' common divisor, which divides every offset of some lowest layout, and instants are
    numbered. The solver has a process of its own: it takes 53 MB, and the solver of the planners cannot be loaded
    beside it.
    """
    unit = math.gcd(*part.size.tolist())
    instants = np.unique(part.start)
    data = {
        "sizes": (part.size // unit).tolist(),
        "starts": instants.searchsorted(part.start).tolist(),
        "ends": instants.searchsorted(part.end).tolist(),
        "hint": (hint // unit).tolist(),
        "goal": goal // unit,
        "height": height // unit,
        "time_s": time_s,
        "seed": seed,
    }
    if "highspy" in sys.modules:
        solution = child.run("edgetrain.plan.layout:cp_sat", data)
    else:
        solution = child.forked(lambda: cp_sat(data, None))
    if "missing" in solution:
        raise UserError(
            "a layout with a time limit needs OR-Tools",
            received=solution["missing"], next_step="pip install 'edgetrain[layout]', or leave the time limit at 0",
        )  # fmt: skip
    return [offset * unit for offset in solution["offsets"]], solution["proven"]


def cp_sat(data: dict[str, Any], _progress: child.Progress | None) -> dict[str, Any]:
    """In the other process: rectangles whose place in time is fixed must not overlap in the plane."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        return {"missing": str(error)}
    model = cp_model.CpModel()
    height = data["height"]
    top = model.new_int_var(data["goal"], height, "height")
    offsets, lives, places = [], [], []
    for size, start, end, value in zip(data["sizes"], data["starts"], data["ends"], data["hint"], strict=True):
        offset = model.new_int_var(0, height - size, "")
        model.add(offset + size <= top)
        model.add_hint(offset, value)
        offsets.append(offset)
        lives.append(model.new_fixed_size_interval_var(start, end - start, ""))
        places.append(model.new_fixed_size_interval_var(offset, size, ""))
    model.add_no_overlap_2d(lives, places)
    model.minimize(top)
    model.add_hint(top, height)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = data["time_s"]
    solver.parameters.num_workers = WORKERS
    solver.parameters.random_seed = data["seed"]
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return {"offsets": [], "proven": False}
    return {"offsets": [solver.value(offset) for offset in offsets], "proven": status == cp_model.OPTIMAL}
