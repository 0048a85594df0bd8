"""The order in which a step runs when nothing is recomputed.

In:  a graph, where its updates stand, the workspace of its kernels where it is known.
Out: the numbers of its ops: the captured order, in which
     - each update is moved up to where all that it waits for has run (not where updates run together);
     - two neighbours change places as long as that lowers the exact bytes there: the gradient of a layer's weight,
       which lets its input go, comes before that of the input, which brings another in.

        bytes   ▁▃█▆▂   →   ▁▃▆▅▂        what is held before and after the two is the same either way

Ops change places only if neither changes what the other touches, they do not both draw random numbers, and forward
stays before backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from edgetrain.graph.ir import PERSISTENT, Graph
from edgetrain.plan import lifetimes
from edgetrain.plan.plan import Updates, Workspace

MAX_PASSES = 20


def in_order(graph: Graph, updates: Updates, workspace: Workspace) -> list[int]:
    order = list(range(len(graph.ops))) if updates == "together" else early_order(graph)
    written = {s for op in graph.ops if op.phase != "update" for s in op.writes}
    read = {t for op in graph.ops for t in op.reads}

    def follows(number: int) -> bool:
        """A view goes with the op that reads it; not where what it shows is written in place, before or after."""
        op = graph.ops[number]
        shown = {graph.tensors[t].storage for t in op.reads}
        return op.view and shown.isdisjoint(written) and any(t in read for t in op.creates)

    stay = [number for number in order if not follows(number)]
    full = lifetimes.with_views(graph, _Neighbours(graph, updates, workspace, stay).settled())
    if updates == "together":  # nothing else runs between them
        full.sort(key=lambda number: graph.ops[number].phase == "update")
    return full


def early_order(graph: Graph) -> list[int]:
    """The captured order with each update moved up to where all that it waits for has run.

    It waits for the op that makes its gradient and for every reader of the parameter: the gradient of a layer's input
    still needs the old weight.
    """
    last_touch: dict[int, int] = {}
    for number, op in enumerate(graph.ops):
        if op.phase != "update":
            for t in (*op.reads, *op.creates):
                last_touch[graph.tensors[t].storage] = number
    made_at = {t: number for number, op in enumerate(graph.ops) for t in op.creates}
    after: dict[int, list[int]] = {}
    changed: dict[int, int] = {}  # storage → where the update stands that changes it: one may read what another did
    for number, op in enumerate(graph.ops):
        if op.phase == "update":
            wait = max((last_touch.get(s, -1) for s in op.writes), default=-1)
            wait = max([wait, *(made_at.get(t, -1) for t in op.reads)])
            wait = max([wait, *(changed.get(graph.tensors[t].storage, -1) for t in op.reads)])
            changed.update(dict.fromkeys(op.writes, wait))
            after.setdefault(wait, []).append(number)
    order: list[int] = []
    for number, op in enumerate(graph.ops):
        if op.phase != "update":
            order += [number, *after.get(number, [])]
    return order


@dataclass
class _Neighbours:
    """An order of ops, and the moves in it."""

    graph: Graph
    updates: Updates
    workspace: Workspace
    order: list[int]

    @cached_property
    def touched(self) -> list[set[int]]:
        return [{self.graph.tensors[t].storage for t in (*op.reads, *op.creates)} for op in self.graph.ops]

    @cached_property
    def changed(self) -> list[set[int]]:
        return [{*op.writes, *lifetimes.new_storages(self.graph, n)} for n, op in enumerate(self.graph.ops)]

    @cached_property
    def last(self) -> dict[int, int]:
        """Storage → the position of its last use; those that outlive the step are not there."""
        kept = lifetimes.results(self.graph)
        last_use = {s: at for at, number in enumerate(self.order) for s in self.touched[number]}
        lasting = (s for s, storage in enumerate(self.graph.storages) if storage.role in PERSISTENT)
        for s in (*kept, *lasting):
            last_use.pop(s, None)
        return last_use

    def settled(self) -> list[int]:
        for _ in range(MAX_PASSES):
            moved = sum(self._try(at) for at in range(len(self.order) - 1))
            if not moved:
                break
        return self.order

    def _try(self, at: int) -> bool:
        a, b = self.order[at : at + 2]
        if not self._may_swap(a, b):
            return False
        shared = self.touched[a] & self.touched[b]
        ends_a = {s for s in self.touched[a] - shared if self.last.get(s) == at}
        ends_b = {s for s in self.touched[b] - shared if self.last.get(s) == at + 1}
        ends_both = {s for s in shared if self.last.get(s) == at + 1}
        if self._bytes(b, ends_b, a, ends_a | ends_both) >= self._bytes(a, ends_a, b, ends_b | ends_both):
            return False
        self.order[at], self.order[at + 1] = b, a
        self.last.update(dict.fromkeys(ends_b, at))
        self.last.update(dict.fromkeys(ends_a, at + 1))
        return True

    def _may_swap(self, a: int, b: int) -> bool:
        first, second = self.graph.ops[a], self.graph.ops[b]
        if first.phase != second.phase and ("forward" in (first.phase, second.phase) or self.updates == "together"):
            return False
        clash = not self.changed[a].isdisjoint(self.touched[b]) or not self.changed[b].isdisjoint(self.touched[a])
        clash |= any(t in second.reads for t in first.creates)  # a view
        return not clash and not (first.random and second.random)

    def _bytes(self, a: int, ends_a: set[int], b: int, ends_b: set[int]) -> tuple[int, int]:
        """The most that is held while the two run in this order, and what is held between them."""
        most_a, between = self._one(a, ends_a)
        most_b, _ = self._one(b, ends_b)
        return max(most_a, between + most_b), between

    def _one(self, number: int, ends: set[int]) -> tuple[int, int]:
        """What an op adds while it runs, and what it leaves, when these storages end with it."""
        new, first, over, targets = self.sizes[number]
        into = any(s in ends for s in targets)
        return over if into else first, new - sum(self.graph.storages[s].n_bytes for s in ends)

    @cached_property
    def sizes(self) -> list[tuple[int, int, int, tuple[int, ...]]]:
        """For each op: the bytes that it makes and has copied, what it adds while it runs, the same when it overwrites
        an input, and which it can."""
        sizes = []
        for number in range(len(self.graph.ops)):
            created = [self.graph.storages[s].n_bytes for s in lifetimes.new_storages(self.graph, number)]
            new = sum(created) + lifetimes.undo_bytes(self.graph, number, self.updates)
            targets = lifetimes.overwrites(self.graph, number)
            first = new + self.workspace.get("first", {}).get(number, 0)
            over = new - created[0] + self.workspace.get("over", {}).get(number, 0) if targets else first
            sizes.append((new, first, over, targets))
        return sizes
