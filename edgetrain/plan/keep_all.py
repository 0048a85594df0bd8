"""The planner `keep-all`: nothing is computed twice; every tensor lives from the op that makes it to its last reader.

The order is that of `order.py`, with one choice: where the updates stand.

- early: each update as soon as its gradient is final and nobody needs the old value any more; the gradient goes at
  once. Only for an executor under which nothing can fail from the first update on;
- guarded: the same order, with a copy of what the update changes kept until the step has succeeded;
- together: all updates at the end; gradients live until then, copies are not needed;
- final: as early, for a program that never takes a step back and keeps no copies (firmware).

An executor that cannot promise what "early" needs gets "guarded", unless the copies raise the peak by more than
`TOLERATED`. For convolutional nets the peak is at the start of the backward pass, when hardly a copy exists yet; for
nets whose parameters and Adam state outweigh their activations it is together. See
docs/design/0002-all-or-nothing.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgetrain.arguments import checked
from edgetrain.graph.ir import Graph
from edgetrain.native import arena
from edgetrain.ops.call import cannot_fail
from edgetrain.ops.entry import entry_of
from edgetrain.plan.lifetimes import persistent_bytes, schedule, timeline
from edgetrain.plan.order import in_order
from edgetrain.plan.plan import Action, Exact, Item, Plan, Updates, Workspace

TOLERATED = 0.02


def early_is_safe(graph: Graph) -> bool:
    """Nothing can fail after the first update: all memory is in an arena, and no kernel there looks at values."""
    on_cpu = all(storage.device == "cpu" for storage in graph.storages)
    return on_cpu and arena.available() and all(cannot_fail(op) for op in graph.ops if op.phase != "forward")


@checked()
def keep_all(
    graph: Graph,
    *,
    updates: Updates | None = None,
    early: bool = True,
    exact: Exact = "bitwise",
    workspace: Workspace | None = None,
) -> Plan:
    """
    updates:   fixes the choice, which is early by default, where that is safe and `early` allows it.
    exact:     what the caller knows of the graph's numbers (its memory format).
    workspace: the bytes that the kernel of an op takes above its results.
    """
    if updates is None and early and early_is_safe(graph):
        updates = "early"
    if updates:
        return _plan(graph, updates, exact, workspace or {})
    guarded, together = (_plan(graph, how, exact, workspace or {}) for how in ("guarded", "together"))
    return guarded if guarded.peak_bytes <= together.peak_bytes * (1 + TOLERATED) else together


def _plan(graph: Graph, updates: Updates, exact: Exact, workspace: Workspace) -> Plan:
    order = in_order(graph, updates, workspace)
    return plan_of(graph, order, planner="keep-all", updates=updates, exact=exact, workspace=workspace)


def plan_of(
    graph: Graph,
    order: Sequence[Item],
    *,
    planner: str,
    updates: Updates,
    exact: Exact,
    workspace: Workspace,
) -> Plan:
    """The plan that runs the ops in this order."""
    actions = schedule(graph, order)
    moments = timeline(graph, actions, updates=updates, workspace=workspace)
    return Plan(
        planner=planner,
        graph_key=graph.key,
        schedule=actions,
        peak_bytes=max((m.most_bytes for m in moments), default=0),
        persistent_bytes=persistent_bytes(graph),
        undo_bytes=moments[-1].undo_bytes if moments else 0,
        exact=exactness(graph, exact),
        updates=updates,
        workspace_bytes=workspace,
    )


def plan_with(graph: Graph, plan: Plan, actions: tuple[Action, ...]) -> Plan:
    """The plan with another schedule; what it predicts of time and energy is not known then."""
    moments = timeline(graph, actions, updates=plan.updates, workspace=plan.workspace_bytes)
    return replace(
        plan, schedule=actions, peak_bytes=max(m.most_bytes for m in moments), undo_bytes=moments[-1].undo_bytes,
        time_s=None, energy_j=None, bound=None,
    )  # fmt: skip


def exactness(graph: Graph, exact: Exact) -> Exact:
    """On a GPU plain PyTorch's Adam takes many tensors at once and rounds otherwise than ours."""
    updates = (entry_of(op.kind).update for op in graph.ops)
    adam = any(update is not None and update.rounds_on_gpu for update in updates)
    on_gpu = any(s.device != "cpu" for s in graph.storages)
    return "rounding" if adam and on_gpu and exact == "bitwise" else exact
