"""The planner `keep-all`: nothing is computed twice; every tensor lives from the op that makes it to its last reader.

The order is the one captured, with one choice: where the updates stand.

- early: each update as soon as its gradient is final and nobody needs the old value any more; the gradient goes at
  once, and a copy of what the update changes is kept until the step has succeeded;
- together: all updates at the end; gradients live until then, copies are not needed.

Early is taken unless its copies raise the peak by more than `TOLERATED`. For convolutional nets the peak is at the
start of the backward pass, when hardly a copy exists yet, so it is early; for nets whose parameters and Adam state
outweigh their activations it is together. See docs/design/0002-all-or-nothing.md.
"""

from __future__ import annotations

from edgetrain.graph.ir import Graph
from edgetrain.plan.lifetimes import persistent_bytes, schedule, timeline
from edgetrain.plan.plan import Exact, Plan, Updates

TOLERATED = 0.02


def keep_all(graph: Graph, *, updates: Updates | None = None, exact: Exact = "bitwise") -> Plan:
    """`updates` fixes the choice; `exact` is what the caller knows of the graph's numbers (its memory format)."""
    if updates:
        return _plan(graph, updates, exact)
    early, together = _plan(graph, "early", exact), _plan(graph, "together", exact)
    return early if early.peak_bytes <= together.peak_bytes * (1 + TOLERATED) else together


def _plan(graph: Graph, updates: Updates, exact: Exact) -> Plan:
    early = updates == "early"
    actions = schedule(graph, early_order(graph) if early else range(len(graph.ops)))
    moments = timeline(graph, actions, early=early)
    # On a GPU plain PyTorch's Adam takes many tensors at once and rounds otherwise than ours.
    adam = any(op.kind.startswith("edgetrain.adam") for op in graph.ops)
    on_gpu = any(s.device != "cpu" for s in graph.storages)
    return Plan(
        planner="keep-all",
        graph_key=graph.key,
        schedule=actions,
        peak_bytes=max((m.during_bytes for m in moments), default=0),
        persistent_bytes=persistent_bytes(graph),
        undo_bytes=moments[-1].undo_bytes if moments else 0,
        exact="rounding" if adam and on_gpu and exact == "bitwise" else exact,
        updates=updates,
    )


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
    for number, op in enumerate(graph.ops):
        if op.phase == "update":
            wait = max((last_touch.get(s, -1) for s in op.writes), default=-1)
            wait = max([wait, *(made_at.get(t, -1) for t in op.reads)])
            after.setdefault(wait, []).append(number)
    order: list[int] = []
    for number, op in enumerate(graph.ops):
        if op.phase != "update":
            order += [number, *after.get(number, [])]
    return order
