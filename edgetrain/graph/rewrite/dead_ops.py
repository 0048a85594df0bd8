"""Dead-op elimination: one pass from the last op to the first leaves out what nothing needs.

An op is live if it creates or changes something that a later live op reads, or that the graph gives at its end. Some
ops must run even if nothing reads their results: `must_run` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from edgetrain.graph.ir import PERSISTENT, Op
from edgetrain.graph.rewrite.builder import Builder
from edgetrain.ops.entry import entry_of

Call = TypeVar("Call")


def live(
    calls: Sequence[Call],
    needed: set[int],
    *,
    reads: Callable[[Call], Iterable[int]],
    changes: Callable[[Call], Iterable[int]],
    must_run: Callable[[Call], bool],
) -> list[Call]:
    """The calls that must run, and those on which they or `needed` depend.

    needed, reads, changes: the storages that are read at the end, that a call reads, and that it creates or writes.
    """
    kept, needed = [], set(needed)
    for call in reversed(calls):
        if must_run(call) or not needed.isdisjoint(changes(call)):
            kept.append(call)
            needed.update(reads(call))
    return kept[::-1]


def remove_dead_ops(builder: Builder) -> None:
    """Keep ops that create outputs and gradients, change what persists, draw random numbers, or refuse values."""
    storage = [tensor.storage for tensor in builder.tensors]
    lasts = [s.role in PERSISTENT for s in builder.storages]

    def must_run(op: Op) -> bool:
        refuses = op.phase == "forward" and entry_of(op.kind).raises == "for values"
        checks = not (op.creates or op.writes)
        return op.random or refuses or checks or any(lasts[s] for s in op.writes)

    builder.ops = live(
        builder.ops,
        {storage[t] for t in (*builder.outputs, *builder.gradients.values())},
        reads=lambda op: (storage[t] for t in op.reads),
        changes=lambda op: (*op.writes, *(storage[t] for t in op.creates)),
        must_run=must_run,
    )
