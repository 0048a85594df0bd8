"""Compute and transfers side by side: cases reckoned by hand, and a simulation, tick by tick, that shares nothing with
the clock of `timing.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.costs.table import Costs, OpCost, Run, Store
from edgetrain.errors import InternalError
from edgetrain.graph.ir import Graph
from edgetrain.plan.plan import Action, Compute, Free, PageIn, PageOut
from edgetrain.plan.timing import Timing, play

A, B = 0, 1  # two storages, of 10 and 40 bytes, which tensors of the same numbers fill
STORE = Store(in_bytes_s=20.0, out_bytes_s=10.0, in_latency_s=0.5, out_latency_s=1.0, power_w=4.0)
# in: A 1.0 s, B 2.5 s; out: A 2.0 s, B 5.0 s


def graph(reads: Sequence[Sequence[int]], sizes: Sequence[int] = (10, 40)) -> Graph:
    """Of a graph, what `play` looks at."""
    return cast(
        Graph,
        SimpleNamespace(
            ops=[SimpleNamespace(reads=tuple(read), view=False) for read in reads],
            tensors=[SimpleNamespace(storage=number) for number in range(len(sizes))],
            storages=[SimpleNamespace(n_bytes=n_bytes) for n_bytes in sizes],
        ),
    )


def costs(*runs: Run, store: Store | None = STORE, idle_w: float | None = 2.0) -> Costs:
    again = Run(0.25, (), 1.0)
    return Costs("", "modelled", tuple(OpCost({"first": run, "again": again}) for run in runs), {}, store, idle_w)


READS = [[], [A], [B], []]
SECONDS = costs(Run(1.0, (), 3.0), Run(2.0, (), 5.0), Run(4.0, (), 7.0), Run(8.0, (), 9.0))


@pytest.mark.parametrize(
    ("actions", "time_s", "waited_s", "moved_s"),
    [
        ([Compute(0), Compute(1)], 3.0, 0.0, 0.0),
        ([Compute(0), Compute(0), Compute(1)], 3.25, 0.0, 0.0),  # the second time is cheaper
        ([Compute(0), PageOut(A), Compute(3)], 9.0, 0.0, 2.0),  # beside the op
        ([Compute(0), PageOut(A), Free(A), Compute(3)], 11.0, 2.0, 2.0),  # its memory goes when it has gone
        ([Compute(0), PageOut(A), Compute(0), Free(A)], 3.0, 1.75, 2.0),  # a part of it is hidden
        ([Compute(0), PageOut(A), Compute(1)], 3.0, 0.0, 2.0),  # what is on its way out can be read
        ([Compute(0), PageOut(A), Compute(1, into=A)], 5.0, 2.0, 2.0),  # but not overwritten
        ([PageIn(A), Compute(3), Compute(1)], 10.0, 0.0, 1.0),
        ([PageIn(A), Compute(1)], 3.0, 1.0, 1.0),  # who reads it waits for it
        ([PageIn(B), Compute(0), Compute(2)], 6.5, 1.5, 2.5),
        ([PageIn(B), Compute(0), Compute(2), Compute(2)], 6.75, 1.5, 2.5),  # once
        ([PageOut(B), PageOut(A), Free(A), Compute(0)], 8.0, 7.0, 7.0),  # one after another
        ([PageOut(B), PageIn(A), Compute(1), Free(B)], 8.0, 6.0, 6.0),
        ([PageOut(A), Compute(3), PageIn(B), Compute(2)], 14.5, 2.5, 4.5),  # the store has had nothing to do meanwhile
        ([PageIn(A), Free(A)], 1.0, 1.0, 1.0),  # nobody writes into memory that is gone
        ([Compute(0), PageOut(A)], 1.0, 0.0, 2.0),
    ],
)
def test_by_hand(actions: list[Action], time_s: float, waited_s: float, moved_s: float) -> None:
    found = play(graph(READS), actions, SECONDS)
    assert (found.time_s, found.waited_s, found.moved_s) == pytest.approx((time_s, waited_s, moved_s), abs=1e-12)


def test_energy_is_that_of_ops_of_transfers_and_of_all_the_time() -> None:
    found = play(graph(READS), [Compute(0), PageOut(A), Free(A), PageIn(A), Compute(1), Compute(0)], SECONDS)
    assert found.time_s == pytest.approx(1 + 2 + 1 + 2 + 0.25)
    assert found.energy_j == pytest.approx((3 + 5 + 1) + 4.0 * (2 + 1) + 2.0 * 6.25)
    waits = play(graph(READS), [Compute(0), PageOut(A), Free(A)], SECONDS)
    hides = play(graph(READS), [Compute(0), PageOut(A), Compute(1), Free(A)], SECONDS)
    assert waits.energy_j is not None
    assert hides.energy_j == pytest.approx(
        waits.energy_j + 5
    )  # both take three seconds: to wait costs what idling does


@pytest.mark.parametrize(
    ("known", "actions"),
    [
        (costs(Run(1.0)), [Compute(0)]),  # of an op
        (costs(Run(1.0, (), 1.0), idle_w=None), [Compute(0)]),  # of the device
        (costs(Run(1.0, (), 1.0), store=Store(1.0, 1.0)), [Compute(0), PageOut(A), Free(A)]),  # of the store
    ],
)
def test_energy_is_not_known_where_a_part_of_it_is_not(known: Costs, actions: list[Action]) -> None:
    assert play(graph([[]]), actions, known).energy_j is None


def test_a_store_that_moves_nothing_needs_no_power() -> None:
    found = play(graph([[]]), [Compute(0)], costs(Run(1.0, (), 1.0), store=Store(1.0, 1.0)))
    assert found.energy_j == pytest.approx(3.0)


def test_costs_without_a_store_cannot_page() -> None:
    with pytest.raises(InternalError, match="no store"):
        play(graph([[]]), [Compute(0), PageOut(A)], costs(Run(1.0), store=None))


# ---- against a simulation

SIZES = (1, 2, 5, 9)
TICKS = Store(in_bytes_s=1.0, out_bytes_s=0.5, in_latency_s=1.0, out_latency_s=3.0)


@dataclass(frozen=True)
class Drawn:
    reads: list[list[int]]
    seconds: list[int]
    actions: list[Action]


@st.composite
def programs(draw: st.DrawFn) -> Drawn:
    """Any actions whose transfers make sense: nothing goes out while it comes, or comes while it goes."""
    n_ops = draw(st.integers(1, 6))
    reads = [draw(st.lists(st.integers(0, 3), max_size=3, unique=True)) for _ in range(n_ops)]
    seconds = [draw(st.integers(0, 7)) for _ in range(n_ops)]
    actions: list[Action] = []
    going: set[int] = set()
    coming: set[int] = set()
    for sort in draw(st.lists(st.sampled_from("CCFOI"), max_size=25)):
        s = draw(st.integers(0, 3))
        if sort == "C":
            op = draw(st.integers(0, n_ops - 1))
            into = draw(st.sampled_from([None, *reads[op]]))
            actions.append(Compute(op, into))
            coming -= set(reads[op])
            going -= {into}
        elif sort == "F":
            actions.append(Free(s))
            going.discard(s)
            coming.discard(s)
        elif sort == "O" and s not in coming:
            actions.append(PageOut(s))
            going.add(s)
        elif sort == "I" and s not in going:
            actions.append(PageIn(s))
            coming.add(s)
    return Drawn(reads, seconds, actions)


class Ticks:
    """A second at a time: the device works at one op or waits, the store at its first transfer or at none."""

    def __init__(self, program: Drawn, overlap: bool) -> None:
        self.program, self.overlap = program, overlap
        self.left = deque(program.actions)
        self.queue: deque[list[int]] = deque()  # storage, whether it comes, seconds left
        self.busy = self.time = self.waited = self.moved = 0
        self.done: set[int] = set()

    def under_way(self, storage: int, *, coming: bool | None = None) -> bool:
        return any(s == storage and coming in (None, bool(comes)) for s, comes, _ in self.queue)

    def blocked(self, action: Action) -> bool:
        if not self.overlap and self.queue:
            return True
        if isinstance(action, Compute):
            reads = self.program.reads[action.op]
            over = action.into is not None and self.under_way(action.into)
            return over or any(self.under_way(s, coming=True) for s in reads)
        return isinstance(action, Free) and self.under_way(action.storage)

    def act(self) -> None:
        """All that takes no time, up to an op that takes some."""
        while self.left and not self.busy and not self.blocked(self.left[0]):
            action = self.left.popleft()
            if isinstance(action, Compute):
                again = action.op in self.done
                self.busy = 2 * self.program.seconds[action.op] if again else self.program.seconds[action.op]
                self.done.add(action.op)
            elif isinstance(action, PageIn):
                self.queue.append([action.storage, 1, 1 + SIZES[action.storage]])
            elif isinstance(action, PageOut):
                self.queue.append([action.storage, 0, 3 + 2 * SIZES[action.storage]])

    def run(self) -> tuple[int, int, int]:
        self.act()
        while self.left or self.busy or (self.queue and not self.overlap):
            self.time += 1
            if self.busy:
                self.busy -= 1
            else:
                self.waited += 1
            if self.queue:
                self.queue[0][2] -= 1
                self.moved += 1
                if not self.queue[0][2]:
                    self.queue.popleft()
            self.act()
        return self.time, self.waited, self.moved + sum(left for _, _, left in self.queue)


def played(program: Drawn, *, overlap: bool) -> Timing:
    ops = tuple(OpCost({"first": Run(float(n)), "again": Run(2.0 * n)}) for n in program.seconds)
    known = Costs("", "modelled", ops, {}, TICKS)
    return play(graph(program.reads, SIZES), program.actions, known, overlap=overlap)


@settings(max_examples=300, deadline=None)
@given(program=programs(), overlap=st.booleans())
def test_any_schedule_against_the_simulation(program: Drawn, overlap: bool) -> None:
    found = played(program, overlap=overlap)
    assert (found.time_s, found.waited_s, found.moved_s) == Ticks(program, overlap).run()


@settings(max_examples=100, deadline=None)
@given(program=programs())
def test_without_overlap_time_is_the_sum(program: Drawn) -> None:
    seen: set[int] = set()
    compute_s = 0
    for action in program.actions:
        if isinstance(action, Compute):
            compute_s += program.seconds[action.op] * (2 if action.op in seen else 1)
            seen.add(action.op)
    alone, beside = played(program, overlap=False), played(program, overlap=True)
    assert alone.time_s == compute_s + alone.moved_s
    assert alone.waited_s == alone.moved_s == beside.moved_s
    assert compute_s <= beside.time_s <= alone.time_s
