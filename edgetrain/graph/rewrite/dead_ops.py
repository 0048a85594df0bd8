"""One pass from the last op to the first: what nothing needs is left out.

An op is live if it makes or changes something that a live op after it reads, or that is asked for at the end. Some
must run whatever is read of them: `must_run` says which.
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
    """needed, reads, changes: storages: those that are read at the end, those that a call reads, and those that it
    makes or writes."""
    kept, needed = [], set(needed)
    for call in reversed(calls):
        if must_run(call) or not needed.isdisjoint(changes(call)):
            kept.append(call)
            needed.update(reads(call))
    return kept[::-1]


def remove_dead_ops(builder: Builder) -> None:
    """Keep what makes outputs and gradients, changes what lasts, draws random numbers, or refuses values."""
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
