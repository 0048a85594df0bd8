"""The bytes that a step holds at each instant: known from the plan, checked against a real run.

In:  a graph and its plan; the step runs once under observation.
Out: `MemoryTrace`. For each op: the bytes of the step's tensors before, during and after it, and the bytes that its
     kernel took from PyTorch's allocator for itself and gave back (workspace). At the peak, where tensors and workspace
     together are most: the op, and what is alive.

The bytes of tensors are exact: after every op the storages that are really there are added up and must equal the
plan. The workspace is measured through PyTorch's own report of each allocation.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from edgetrain.errors import InternalError
from edgetrain.graph.ir import PERSISTENT, Graph, Role
from edgetrain.native.reports import allocations
from edgetrain.plan.lifetimes import Moment, alive_at, timeline
from edgetrain.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class TracedOp:
    name: str
    kind: str
    module: str
    phase: str
    before_bytes: int
    during_bytes: int
    after_bytes: int
    workspace_bytes: int
    paged_bytes: int = 0  # the most that is held when something is paged in after the op

    @property
    def tensor_bytes(self) -> int:
        return max(self.during_bytes, self.paged_bytes)

    @property
    def most_bytes(self) -> int:
        return max(self.during_bytes + self.workspace_bytes, self.paged_bytes)


@dataclass(frozen=True, slots=True)
class Alive:
    """role: of a tensor; "undo" for what is kept to take the step back, "workspace" for what a kernel takes."""

    name: str
    role: Role | str
    n_bytes: int


@dataclass(frozen=True)
class MemoryTrace:
    """peak_with_workspace_bytes is the peak: the most that tensors and what kernels take for themselves come to.
    `peak_op` is the op there, and `alive` adds up to it. peak_bytes counts tensors alone, wherever they are most."""

    ops: tuple[TracedOp, ...]
    peak_bytes: int
    peak_op: str
    peak_with_workspace_bytes: int
    persistent_bytes: int
    alive: tuple[Alive, ...] = field(repr=False)

    def __str__(self) -> str:
        lines = [
            f"peak {self.peak_with_workspace_bytes / 1e6:.1f} MB at {self.peak_op}, workspace of kernels included "
            f"(at most {self.peak_bytes / 1e6:.1f} MB of tensors); alive there:"
        ]
        lines += [f"  {a.n_bytes / 1e6:9.2f} MB  {a.role:10}  {a.name}" for a in self.alive[:12]]
        if len(self.alive) > 12:
            rest = sum(a.n_bytes for a in self.alive[12:])
            lines.append(f"  {rest / 1e6:9.2f} MB  in {len(self.alive) - 12} more")
        return "\n".join(lines)


class Watch:
    """Collects what `look` is told before and after each op, and the allocations in between."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self._graph, self._plan = graph, plan
        self._moments = timeline(graph, plan.schedule, updates=plan.updates, workspace={})
        self._storage = {  # name of a variable → its storage, for those that do not last
            f"t{t}": tensor.storage
            for t, tensor in enumerate(graph.tensors)
            if graph.storages[tensor.storage].role not in PERSISTENT
        }
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._seen: list[int] = []
        self.events: list[tuple[int, int]] = []  # nanoseconds, bytes taken (negative: given back)

    def look(self, _op: int, live: Mapping[str, Any] | None = None, _made: Sequence[torch.Tensor] = ()) -> None:
        """live: the variables of the step."""
        if live is None:
            self._starts.append(time.time_ns())
        else:
            self._ends.append(time.time_ns())
            there = {self._storage[name]: live[name] for name in live.keys() & self._storage.keys()}
            self._seen.append(sum(t.untyped_storage().nbytes() for t in there.values()))

    def result(self) -> MemoryTrace:
        self._compare()
        workspace = self._workspace()
        ops = tuple(self._op(m, w) for m, w in zip(self._moments, workspace, strict=True))
        at = max(range(len(ops)), key=lambda i: ops[i].most_bytes)
        return MemoryTrace(
            ops=ops,
            peak_bytes=max(op.tensor_bytes for op in ops),
            peak_op=ops[at].name,
            peak_with_workspace_bytes=ops[at].most_bytes,
            persistent_bytes=self._plan.persistent_bytes,
            alive=self._alive(at, ops[at]),
        )

    def _op(self, moment: Moment, workspace: int) -> TracedOp:
        op = self._graph.ops[moment.op]
        return TracedOp(
            op.name, op.kind, op.module, op.phase,
            moment.before_bytes, moment.during_bytes, moment.after_bytes, workspace, moment.paged_bytes,
        )  # fmt: skip

    def _compare(self) -> None:
        for moment, seen in zip(self._moments, self._seen, strict=True):
            planned = moment.during_bytes - self._plan.persistent_bytes - moment.undo_bytes
            if planned != seen:
                raise InternalError(
                    f"{self._graph.ops[moment.op].name} left {seen} bytes of activations and gradients; "
                    f"the plan says {planned}"
                )

    def _workspace(self) -> list[int]:
        """For each op, the most that its kernel held above the tensors that are there before or after it."""
        held = [0]
        for _, n_bytes in self.events:
            held.append(held[-1] + n_bytes)
        times = [t for t, _ in self.events]
        workspaces = []
        for start, end in zip(self._starts, self._ends, strict=True):
            first, last = bisect_right(times, start), bisect_right(times, end)
            most = max(held[first : last + 1])
            workspaces.append(max(0, most - max(held[first], held[last])))
        return workspaces

    def _alive(self, at: int, op: TracedOp) -> tuple[Alive, ...]:
        """What is there when the op at position `at` holds most, largest first."""
        graph = self._graph
        paging_in = op.most_bytes > op.during_bytes + op.workspace_bytes
        planned = alive_at(graph, self._plan.schedule, at, paging_in=paging_in)
        there = planned | {n for n, s in enumerate(graph.storages) if s.role in PERSISTENT}
        names = {tensor.storage: tensor.name for tensor in reversed(graph.tensors)}
        alive = [Alive(names[s], graph.storages[s].role, graph.storages[s].n_bytes) for s in there]
        undo = self._moments[at].undo_bytes
        if undo:
            alive.append(Alive("what takes the step back", "undo", undo))
        if op.workspace_bytes and not paging_in:
            alive.append(Alive(f"workspace of {op.name}", "workspace", op.workspace_bytes))
        return tuple(sorted(alive, key=lambda a: (-a.n_bytes, a.name)))


@contextlib.contextmanager
def trace(graph: Graph, plan: Plan) -> Iterator[Watch]:
    """Watch the step that runs in the block."""
    watch = Watch(graph, plan)
    with allocations() as events:
        yield watch
    watch.events = events


def allocated_peak(work: Callable[[], object]) -> int:
    """Run `work` once: the most bytes that PyTorch's CPU allocator had served at one time, above what it had before.

    Counts every allocation, of plain PyTorch as of a captured step: tensors, gradients and the workspace of kernels.
    """
    with allocations() as events:
        work()
    held = most = 0
    for _, n_bytes in events:
        held += n_bytes
        most = max(most, held)
    return most
