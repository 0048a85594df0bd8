"""From an order of ops to a whole schedule: who is freed when, what is overwritten, and how many bytes that takes.

In:  a graph and the numbers of its ops in the order in which they run. A number that comes again is recomputed. Between
     them, what is paged out and in (`Item` in plan.py).
Out: the actions (`schedule`), and the bytes held at each instant (`timeline`).

    bytes
      │          ┌──┐ during: results are there, inputs still are
      │    ┌──┐──┘  └──┐
      │ ───┘  └────────┴──  after: what nobody reads any more is gone
      └───────────────────── ops

A storage that is recomputed, or paged in, has several lives: each goes from where it is made to the last reader before
it is made the next time. So the order alone says what is kept and what is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from edgetrain.costs.table import Way
from edgetrain.graph.ir import PERSISTENT, Graph
from edgetrain.ops.call import overwritable
from edgetrain.plan.plan import RANDOM_STATE_BYTES, Action, Compute, Free, Item, PageIn, Updates, Workspace

T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes of the step's tensors around one op; `during` holds the workspace of its kernel too. `undo` is the part
    kept to take the step back if it fails; `paged` the most that is held when something is paged in after the op."""

    op: int
    before_bytes: int
    during_bytes: int
    after_bytes: int
    undo_bytes: int
    paged_bytes: int = 0

    @property
    def most_bytes(self) -> int:
        return max(self.during_bytes, self.paged_bytes)


_AFTER, _PAGED = 3, 5  # the places of two fields


def made_by(graph: Graph) -> Mapping[int, int]:
    """Tensor → the op that makes it; persistent tensors are not there."""
    return graph.made_by


def new_storages(graph: Graph, number: int) -> tuple[int, ...]:
    """The storages that come to be when the op runs."""
    return graph.new_storages[number]


def alive_during(graph: Graph, actions: Iterable[Action]) -> Iterator[tuple[Compute, Set[int]]]:
    """Each op that runs, and the storages that are there meanwhile and do not last; what is overwritten counts as the
    result. The set is the same object each time, and goes on changing."""
    alive: set[int] = set()
    for action in actions:
        if isinstance(action, Free):
            alive.discard(action.storage)
        elif isinstance(action, PageIn):
            alive.add(action.storage)
        elif isinstance(action, Compute):
            alive.update(new_storages(graph, action.op))
            if action.into is not None:
                alive.discard(action.into)
            yield action, alive


def alive_at(graph: Graph, actions: Sequence[Action], at: int, *, paging_in: bool) -> set[int]:
    """The storages that do not last and are there when the op at position `at` of those that run holds most: while it
    runs, or where something is paged in after it and before the next."""
    runs = [n for n, action in enumerate(actions) if isinstance(action, Compute)]
    first = runs[at]
    _, during = next(islice(alive_during(graph, actions), at, None))
    if not paging_in:
        return set(during)
    alive, fullest = set(during), set[int]()
    for action in actions[first + 1 : runs[at + 1] if at + 1 < len(runs) else len(actions)]:
        if isinstance(action, Free):
            alive.discard(action.storage)
        elif isinstance(action, PageIn):
            alive.add(action.storage)
            fullest = max(fullest, set(alive), key=lambda held: sum(graph.storages[s].n_bytes for s in held))
    return fullest


def results(graph: Graph) -> set[int]:
    """The storages that must be there at the end of the step."""
    kept = {graph.tensors[t].storage for t in graph.outputs}
    if not any(op.phase == "update" for op in graph.ops):
        kept |= {graph.tensors[t].storage for t in graph.gradients.values()}
    return kept


def with_views(graph: Graph, order: Sequence[T]) -> list[T | int]:
    """The order with the views of a storage taken anew after it was recomputed; they cost nothing."""
    maker, ops, new = made_by(graph), graph.ops, graph.new_storages
    storage = [tensor.storage for tensor in graph.tensors]
    there: dict[int, set[int]] = {}  # storage → its tensors that are made now
    full: list[T | int] = []

    def run(number: int) -> None:
        op = ops[number]
        for t in op.reads:
            maker_op = maker.get(t)
            if maker_op is not None and ops[maker_op].view and t not in there.get(storage[t], ()):
                run(maker_op)
        for s in new[number]:
            there[s] = set()
        for t in op.creates:
            there.setdefault(storage[t], set()).add(t)
        full.append(number)

    whole = whole_tensors(graph) if any(isinstance(item, PageIn) for item in order) else {}
    for item in order:
        if isinstance(item, PageIn):
            there[item.storage] = {whole[item.storage]}
        if not isinstance(item, int):
            full.append(item)
            continue
        op = ops[item]
        if not (op.view and all(t in there.get(storage[t], ()) for t in op.creates)):
            run(item)
    return full


def whole_tensors(graph: Graph) -> dict[int, int]:
    """Storage → the one tensor that its op makes there, all of it: what can be paged out and in."""
    created: dict[int, list[int]] = {}
    for number, op in enumerate(graph.ops):
        new = new_storages(graph, number)
        for t in op.creates:
            if graph.tensors[t].storage in new:
                created.setdefault(graph.tensors[t].storage, []).append(t)
    return {
        s: tensors[0]
        for s, tensors in created.items()
        if len(tensors) == 1 and graph.tensors[tensors[0]].n_bytes == graph.storages[s].n_bytes > 0
    }


def schedule(
    graph: Graph, order: Sequence[Item], *, over: Sequence[tuple[int, ...]] | None = None
) -> tuple[Action, ...]:
    """Each storage freed right after the last use of its life, and overwritten by that use where the kernel can.

    over: `overwrites` of each op, where it is known already.
    """
    full = with_views(graph, order)
    kept = results(graph)
    touched = graph.touched
    last_use: dict[int, int] = {}  # storage → position of the last use of its present life
    dying: dict[int, list[int]] = {}

    def begin(storage: int, position: int) -> None:
        if storage in last_use:
            dying.setdefault(last_use[storage], []).append(storage)
        last_use[storage] = position

    for position, item in enumerate(full):
        if isinstance(item, PageIn):
            begin(item.storage, position)
            continue
        if not isinstance(item, int):
            last_use[item.storage] = position
            continue
        for s in new_storages(graph, item):
            begin(s, position)
        for s in touched[item]:
            last_use[s] = position
    for s, position in last_use.items():
        if s not in kept:
            dying.setdefault(position, []).append(s)
    actions: list[Action] = []
    for position, item in enumerate(full):
        dead = dying.get(position, [])
        into = None
        if isinstance(item, int):
            if dead:
                into = next((s for s in (over[item] if over else overwrites(graph, item)) if s in dead), None)
            actions.append(Compute(item, into))
        elif not isinstance(item, Free):
            actions.append(item)
        actions += [Free(storage) for storage in dead if storage != into]
    return tuple(actions)


def overwrites(graph: Graph, number: int) -> tuple[int, ...]:
    """The storages that the op can overwrite with its first result where they end with it, the first choice first."""
    op = graph.ops[number]
    read = [graph.tensors[t].storage for t in op.reads]
    storages = (graph.tensors[t].storage for t in overwritable(graph, op))
    return tuple(s for s in storages if graph.storages[s].role not in PERSISTENT and read.count(s) == 1)


def way_of(action: Compute, done: Set[int]) -> Way:
    """How the op is run, when these ops have run already."""
    return "over" if action.into is not None else "again" if action.op in done else "first"


def undo_bytes(graph: Graph, op: int, updates: Updates) -> int:
    """What must be copied before the op runs for the first time, so that a step that fails can be taken back."""
    quiet = updates == "final" or (graph.ops[op].phase == "update" and updates != "guarded")
    if quiet or not graph.ops[op].writes:
        return 0
    return sum(graph.storages[s].n_bytes for s in graph.ops[op].writes if graph.storages[s].role in PERSISTENT)


def random_state_bytes(graph: Graph, updates: Updates) -> int:
    """What a step that draws random numbers keeps from its begin to its end, so that it can be taken back."""
    return RANDOM_STATE_BYTES if updates != "final" and any(op.random for op in graph.ops) else 0


def persistent_bytes(graph: Graph) -> int:
    return sum(s.n_bytes for s in graph.storages if s.role in PERSISTENT)


def hungriest_bytes(graph: Graph) -> int:
    """What the op reads and makes that takes most of what does not last: no step takes less above what lasts."""
    size = [0 if s.role in PERSISTENT else s.n_bytes for s in graph.storages]
    return max((sum(size[s] for s in touched) for touched in graph.touched), default=0)


def timeline(graph: Graph, actions: Sequence[Action], *, updates: Updates, workspace: Workspace) -> list[Moment]:
    """The bytes held at each op. An op that runs over storage `into` hands that memory on to its result.

    updates:   where the updates stand, which says what is copied.
    workspace: the bytes that the kernel of an op takes above its results.
    """
    size = [s.n_bytes for s in graph.storages]
    new = graph.new_storages
    held = persistent_bytes(graph)
    undo = random_state_bytes(graph, updates)
    done: set[int] = set()
    rows: list[list[int]] = []  # the fields of each moment
    for action in actions:
        if isinstance(action, Free):
            held -= size[action.storage]
            rows[-1][_AFTER] = held + undo
            continue
        if isinstance(action, PageIn):
            held += size[action.storage]
            rows[-1][_AFTER], rows[-1][_PAGED] = held + undo, max(rows[-1][_PAGED], held + undo)
        if not isinstance(action, Compute):
            continue
        before = held + undo
        way = way_of(action, done)
        if action.op not in done:
            undo += undo_bytes(graph, action.op, updates)
            done.add(action.op)
        # Over `into`, the first result takes its place; others, if there are any, are new.
        for s in new[action.op][1 if action.into is not None else 0 :]:
            held += size[s]
        extra = workspace.get(way, {}).get(action.op, 0)
        rows.append([action.op, before, held + undo + extra, held + undo, undo, 0])
    return [Moment(*row) for row in rows]
