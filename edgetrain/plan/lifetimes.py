"""From an order of ops to a whole schedule: who is freed when, what is overwritten, and how many bytes that takes.

In:  a graph and the numbers of its ops in the order in which they run.
Out: the actions (`schedule`), and the bytes held at each instant (`timeline`).

    bytes
      │          ┌──┐ during: results are there, inputs still are
      │    ┌──┐──┘  └──┐
      │ ───┘  └────────┴──  after: what nobody reads any more is gone
      └───────────────────── ops
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgetrain.graph.ir import PERSISTENT, Graph
from edgetrain.ops.call import overwritable
from edgetrain.plan.plan import Action, Compute, Free


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes of the step's tensors around one op. `undo` is the part kept to take the step back if it fails."""

    op: int
    before_bytes: int
    during_bytes: int
    after_bytes: int
    undo_bytes: int


def schedule(graph: Graph, order: Sequence[int]) -> tuple[Action, ...]:
    """Each storage freed right after its last use, and overwritten by that last use where the kernel can."""
    last_use: dict[int, int] = {}
    for position, number in enumerate(order):
        op = graph.ops[number]
        for t in (*op.reads, *op.creates):
            last_use[graph.tensors[t].storage] = position
    kept = {graph.tensors[t].storage for t in graph.outputs}
    if not any(op.phase == "update" for op in graph.ops):
        kept |= {graph.tensors[t].storage for t in graph.gradients.values()}
    dying: dict[int, list[int]] = {}
    for storage, position in last_use.items():
        if graph.storages[storage].role not in PERSISTENT and storage not in kept:
            dying.setdefault(position, []).append(storage)
    actions: list[Action] = []
    for position, number in enumerate(order):
        dead = dying.get(position, [])
        into = _into(graph, number, dead)
        actions.append(Compute(number, into))
        actions += [Free(storage) for storage in dead if storage != into]
    return tuple(actions)


def _into(graph: Graph, number: int, dead: list[int]) -> int | None:
    op = graph.ops[number]
    read = [graph.tensors[t].storage for t in op.reads]
    for t in overwritable(graph, op):
        storage = graph.tensors[t].storage
        if storage in dead and read.count(storage) == 1:
            return storage
    return None


def undo_bytes(graph: Graph, op: int, *, early: bool) -> int:
    """What must be copied before the op runs, so that a step that fails can be taken back."""
    if graph.ops[op].phase == "update" and not early:
        return 0
    return sum(
        graph.storages[s].n_bytes
        for s in graph.ops[op].writes
        if graph.storages[s].role in ("parameter", "buffer", "state")
    )


def persistent_bytes(graph: Graph) -> int:
    return sum(s.n_bytes for s in graph.storages if s.role in PERSISTENT)


def timeline(graph: Graph, actions: Sequence[Action], *, early: bool) -> list[Moment]:
    """The bytes held at each op. An op that runs over storage `into` hands that memory on to its result."""
    size = [s.n_bytes for s in graph.storages]
    alive = {number for number, s in enumerate(graph.storages) if s.role in PERSISTENT}
    held = sum(size[s] for s in alive)
    undo = 0
    moments: list[Moment] = []
    for action in actions:
        if isinstance(action, Free):
            alive.discard(action.storage)
            held -= size[action.storage]
            last = moments[-1]
            moments[-1] = Moment(last.op, last.before_bytes, last.during_bytes, held + undo, undo)
            continue
        before = held + undo
        undo += undo_bytes(graph, action.op, early=early)
        new = {graph.tensors[t].storage for t in graph.ops[action.op].creates} - alive
        alive |= new
        if action.into is None:
            held += sum(size[s] for s in new)
        else:
            alive.discard(action.into)
        moments.append(Moment(action.op, before, held + undo, held + undo, undo))
    return moments
