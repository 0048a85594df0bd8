"""A graph and its costs as planners see them: numbers only, each looked up once.

In:  a graph, what its ops cost, where the updates stand.
Out: `Problem`: for each op its time, the storages that it reads and makes; for each storage its bytes and its maker;
     which op may run again, and until when.

Views cost nothing and are taken anew by themselves (`lifetimes.with_views`), so planners never see them: an op reads
storages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgetrain.costs.table import Costs
from edgetrain.errors import UserError
from edgetrain.graph.ir import PERSISTENT, Graph
from edgetrain.ops.replay import replay
from edgetrain.plan import lifetimes
from edgetrain.plan.keep_all import plan_of
from edgetrain.plan.order import in_order
from edgetrain.plan.plan import Action, Bound, Exact, Item, Plan, Updates
from edgetrain.plan.timing import Timing, play

TICK_S = 1e-9  # added to times that may be nought


@dataclass(frozen=True)
class Problem:
    """
    order:    every op once, in the order in which they run when nothing is recomputed.
    reads:    op → the storages that it reads and that do not last, each once.
    makes:    op → the storages that it makes.
    rereads:  op → what it reads when it runs again.
    deadline: op → the position in `order` from which it may not run again: something that it reads has changed.
              0 for an op that may never run again.
    """

    graph: Graph
    costs: Costs
    updates: Updates
    order: tuple[int, ...]

    @cached_property
    def size(self) -> tuple[int, ...]:
        return tuple(s.n_bytes for s in self.graph.storages)

    @cached_property
    def lasting(self) -> tuple[bool, ...]:
        return tuple(s.role in PERSISTENT for s in self.graph.storages)

    @cached_property
    def is_view(self) -> tuple[bool, ...]:
        return tuple(op.view for op in self.graph.ops)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        storage = [t.storage for t in self.graph.tensors]
        return tuple(
            tuple(dict.fromkeys(storage[t] for t in op.reads if not self.lasting[storage[t]])) for op in self.graph.ops
        )

    @cached_property
    def makes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(lifetimes.new_storages(self.graph, number) for number in range(len(self.graph.ops)))

    @cached_property
    def maker(self) -> dict[int, int]:
        """Storage → the op that makes it."""
        return {s: number for number, storages in enumerate(self.makes) for s in storages}

    @cached_property
    def position(self) -> dict[int, int]:
        return {number: at for at, number in enumerate(self.order)}

    @cached_property
    def workspace(self) -> Mapping[int, int]:
        """Op → what its kernel takes above its results when it is run again."""
        return self.costs.workspace_bytes["again"]

    @cached_property
    def deadline(self) -> tuple[int, ...]:
        changed: dict[int, list[int]] = {}  # storage → positions of the ops that write it in place
        for at, number in enumerate(self.order):
            for s in self.graph.ops[number].writes:
                changed.setdefault(s, []).append(at)
        return tuple(self._deadline(number, changed) for number in range(len(self.graph.ops)))

    def _deadline(self, number: int, changed: dict[int, list[int]]) -> int:
        again = replay(self.graph.ops[number])
        if again is None or any(s in changed for s in self.makes[number]):
            return 0
        read = {self.graph.tensors[t].storage for t in again.reads}
        first = self.position[number]
        later = [at for s in read for at in changed.get(s, ()) if at > first]
        # What was written before the first time in the graph's order is in place; a storage that is both written in
        # place and not lasting would have to be written again too.
        if any(s in changed and not self.lasting[s] for s in read):
            return 0
        return min(later, default=len(self.order))

    @cached_property
    def keep_all(self) -> Plan:
        return self.plan(self.order, planner="keep-all")

    @cached_property
    def keep_all_time_s(self) -> float:
        return self.costs.time_s(self.order)

    @cached_property
    def pageable(self) -> frozenset[int]:
        """The storages that can be paged out and in: one tensor is all of it, and nothing changes it later."""
        changed = {s for op in self.graph.ops for s in op.writes}
        on_cpu = (s for s in lifetimes.whole_tensors(self.graph) if self.graph.storages[s].device == "cpu")
        return frozenset(s for s in on_cpu if s not in changed)

    @cached_property
    def overwrites(self) -> tuple[tuple[int, ...], ...]:
        """Op → the storages that it can overwrite where they end with it."""
        return tuple(lifetimes.overwrites(self.graph, number) for number in range(len(self.graph.ops)))

    @cached_property
    def tables(self) -> Tables:
        """What every walk through the ops reads: the same for every budget."""
        return _tables(self)

    def actions(self, order: Sequence[Item]) -> tuple[Action, ...]:
        return lifetimes.schedule(self.graph, order, over=self.overwrites)

    def timing(self, order: Sequence[Item], *, overlap: bool = True) -> Timing:
        return play(self.graph, self.actions(order), self.costs, overlap=overlap)

    def moments(self, order: Sequence[Item]) -> list[lifetimes.Moment]:
        return self._moments(self.actions(order))

    def _moments(self, actions: Sequence[Action]) -> list[lifetimes.Moment]:
        workspace = self.costs.workspace_bytes
        return lifetimes.timeline(self.graph, actions, updates=self.updates, workspace=workspace)

    def peak_bytes(self, order: Sequence[Item]) -> int:
        return self.peak_of(self.actions(order))

    def peak_of(self, actions: Sequence[Action]) -> int:
        return max((m.most_bytes for m in self._moments(actions)), default=0)

    def plan(
        self, order: Sequence[Item], *, planner: str, exact: Exact = "bitwise", bound: Bound | None = None
    ) -> Plan:
        """The plan that runs the ops in this order."""
        plain = plan_of(
            self.graph, order, planner=planner, updates=self.updates, exact=exact, workspace=self.costs.workspace_bytes
        )
        timing = play(self.graph, plain.schedule, self.costs)
        return replace(
            plain, time_s=timing.time_s, energy_j=timing.energy_j, keep_all_time_s=self.keep_all_time_s, bound=bound,
            origin=self.costs.origin, kernels=self.costs.kernels,
        )  # fmt: skip


def problem(graph: Graph, costs: Costs, updates: Updates) -> Problem:
    if costs.graph_key != graph.key:
        raise UserError(
            "these costs were measured for another graph",
            expected=f"graph {graph.key}", received=f"costs of {costs.graph_key}", next_step="et.measure_costs(graph)",
        )  # fmt: skip
    if len(costs.ops) != len(graph.ops):
        raise UserError("these costs are not of as many ops as the graph", next_step="et.measure_costs(graph)")
    return Problem(graph, costs, updates, tuple(in_order(graph, updates, costs.workspace_bytes)))


@dataclass(frozen=True, eq=False)
class Tables:
    """What every walk through the ops reads. Lists are by position in the problem's order; the last five by storage.

    next_use: storage that the op touches → the position where it is touched next; the number of ops for a result of the
              step after its last use, one more for what is never touched again.
    workspace: of the op's first run, of one again, of one over an input. `lifetimes.schedule` overwrites wherever it
              can; so the first two are never so small that overwriting would take more.
    during:   the bytes at each position when all is kept.
    until:    the last position at which the storage can be recomputed, ancestors included. An ancestor that cannot be
              recomputed itself is there until its own last use.
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


def _tables(p: Problem) -> Tables:
    graph, order = p.graph, p.order
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
    saved = [over[at] - p.size[targets[0]] if targets else 0 for at, targets in enumerate(overwrites)]
    return Tables(
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
