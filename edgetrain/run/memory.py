"""The bytes that a step holds at each instant: known from the plan, checked against a real run.

In:  a graph and its plan; the step runs once under observation.
Out: `MemoryTrace`. For each op: the bytes of the step's tensors before, during and after it, and the bytes that its
     kernel took from PyTorch's allocator for itself and gave back (workspace). At the peak: what is alive.

The bytes of tensors are exact: after every op the storages that are really there are added up and must equal the
plan. The workspace is measured through PyTorch's own report of each allocation.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from edgetrain.errors import InternalError
from edgetrain.graph.ir import PERSISTENT, Graph, Role
from edgetrain.native.reports import allocations
from edgetrain.plan.lifetimes import Moment, alive_during, timeline
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


@dataclass(frozen=True, slots=True)
class Alive:
    name: str
    role: Role | str
    n_bytes: int


@dataclass(frozen=True)
class MemoryTrace:
    """peak_bytes counts tensors, as a plan does; peak_with_workspace_bytes adds what kernels take for themselves."""

    ops: tuple[TracedOp, ...]
    peak_bytes: int
    peak_op: str
    peak_with_workspace_bytes: int
    persistent_bytes: int
    alive: tuple[Alive, ...] = field(repr=False)

    def __str__(self) -> str:
        lines = [
            f"peak {self.peak_bytes / 1e6:.1f} MB of tensors at {self.peak_op}, "
            f"{self.peak_with_workspace_bytes / 1e6:.1f} MB with the workspace of kernels; alive there:"
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
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._seen: list[int] = []
        self.events: list[tuple[int, int]] = []  # nanoseconds, bytes taken (negative: given back)

    def look(self, _op: int, live: Sequence[torch.Tensor] | None = None, _made: Sequence[torch.Tensor] = ()) -> None:
        if live is None:
            self._starts.append(time.time_ns())
        else:
            self._ends.append(time.time_ns())
            self._seen.append(sum(t.untyped_storage().nbytes() for t in live))

    def result(self) -> MemoryTrace:
        self._compare()
        workspace = self._workspace()
        ops = tuple(self._op(m, w) for m, w in zip(self._moments, workspace, strict=True))
        at = max(range(len(ops)), key=lambda i: ops[i].during_bytes)
        return MemoryTrace(
            ops=ops,
            peak_bytes=ops[at].during_bytes,
            peak_op=ops[at].name,
            peak_with_workspace_bytes=max(op.during_bytes + op.workspace_bytes for op in ops),
            persistent_bytes=self._plan.persistent_bytes,
            alive=self._alive(at),
        )

    def _op(self, moment: Moment, workspace: int) -> TracedOp:
        op = self._graph.ops[moment.op]
        return TracedOp(
            op.name, op.kind, op.module, op.phase,
            moment.before_bytes, moment.during_bytes, moment.after_bytes, workspace,
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
        found = []
        for start, end in zip(self._starts, self._ends, strict=True):
            first, last = bisect_right(times, start), bisect_right(times, end)
            most = max(held[first : last + 1])
            found.append(max(0, most - max(held[first], held[last])))
        return found

    def _alive(self, at: int) -> tuple[Alive, ...]:
        """What is there during the op at position `at`, largest first."""
        graph = self._graph
        _, made = next(islice(alive_during(graph, self._plan.schedule), at, None))
        there = made | {n for n, s in enumerate(graph.storages) if s.role in PERSISTENT}
        names = {tensor.storage: tensor.name for tensor in reversed(graph.tensors)}
        found = [Alive(names[s], graph.storages[s].role, graph.storages[s].n_bytes) for s in there]
        undo = self._moments[at].undo_bytes
        if undo:
            found.append(Alive("copies to take the step back", "undo", undo))
        return tuple(sorted(found, key=lambda a: (-a.n_bytes, a.name)))


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
