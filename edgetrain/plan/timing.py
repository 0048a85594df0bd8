"""How long a schedule takes, and how much energy: compute and transfers played side by side.

In:  a graph, the actions of a step, what its ops and its store cost.
Out: `Timing`.

    compute   ─ op ─ op ─ op ─ · · · wait · · · ─ op ─ op ─
    store       ├─ out a ─┤├─ out b ─┤   ├──── in a ────┤       one transfer at a time, in the order of asking

An op waits for what it reads; a storage is freed, or overwritten, when its transfer is over. Energy: what each op and
each transfer takes, and what the device takes all the while.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgetrain.costs.table import Costs
from edgetrain.errors import InternalError
from edgetrain.graph.ir import Graph
from edgetrain.plan.plan import Action, Compute, Free, PageIn, PageOut


@dataclass(frozen=True, slots=True)
class Timing:
    """waited_s: the part of the time in which nothing was computed. energy_j: None where the costs do not tell."""

    time_s: float
    waited_s: float
    moved_s: float
    energy_j: float | None


def play(graph: Graph, actions: Sequence[Action], costs: Costs, *, overlap: bool = True) -> Timing:
    """overlap: transfers run beside the ops; otherwise everything waits for them."""
    clock = _Clock()
    done: set[int] = set()
    spent: list[float | None] = []
    for action in actions:
        if isinstance(action, Compute):
            read = {graph.tensors[t].storage for t in graph.ops[action.op].reads}
            clock.wait(s for s in read if s in clock.reading or s == action.into)
            if action.op in done and graph.ops[action.op].view:
                continue  # taken anew by itself, and costs nothing
            run = costs.ops[action.op].run("again" if action.op in done else "first")
            done.add(action.op)
            clock.now_s += run.time_s
            spent.append(run.energy_j)
        elif isinstance(action, Free):
            clock.wait([action.storage])
        else:
            spent.append(clock.transfer(action, graph.storages[action.storage].n_bytes, costs))
            if not overlap:
                clock.wait([action.storage])
    return Timing(clock.now_s, clock.waited_s, clock.moved_s, _energy(spent, costs.idle_w, clock.now_s))


class _Clock:
    def __init__(self) -> None:
        self.now_s = self.free_s = self.waited_s = self.moved_s = 0.0
        self.reading: dict[int, float] = {}  # storage → when it is there
        self.writing: dict[int, float] = {}

    def wait(self, storages: Iterable[int]) -> None:
        for s in storages:
            end = max(self.reading.pop(s, 0.0), self.writing.pop(s, 0.0))
            self.waited_s += max(0.0, end - self.now_s)
            self.now_s = max(self.now_s, end)

    def transfer(self, action: PageOut | PageIn, n_bytes: int, costs: Costs) -> float | None:
        """Returns the joules that it takes."""
        if costs.store is None:
            raise InternalError("a plan pages, and its costs know no store")
        out = isinstance(action, PageOut)
        seconds = costs.store.out_s(n_bytes) if out else costs.store.in_s(n_bytes)
        self.free_s = max(self.now_s, self.free_s) + seconds
        self.moved_s += seconds
        (self.writing if out else self.reading)[action.storage] = self.free_s
        return None if costs.store.power_w is None else costs.store.power_w * seconds


def _energy(spent: Sequence[float | None], idle_w: float | None, time_s: float) -> float | None:
    known = [joules for joules in spent if joules is not None]
    return None if len(known) < len(spent) or idle_w is None else sum(known) + idle_w * time_s
