"""Where no plan keeps a budget: what is proven, what is known to work, and what stands in the way.

In:  a problem, a budget, an order that was found for more.
Out: `Infeasible`, with the lasting tensors by bytes, a bound that holds for every schedule, and a budget that works.

    bytes  │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▓▓▓▓▓▓▓▓▓▓▓▓▓│░░░░░░░░░│
           │ lasting        │ hungriest op│ unknown │ works
           └────────────────┴─────────────┴─────────┴────────
                                          │ bound: proven, none below it can
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from edgetrain.costs.table import OpCost
from edgetrain.errors import Infeasible
from edgetrain.graph.ir import PERSISTENT, Graph, Role
from edgetrain.plan.budget import show_bytes
from edgetrain.plan.fast import is_late, walks_until
from edgetrain.plan.lifetimes import Moment, alive_at, overwrites, persistent_bytes, random_state_bytes
from edgetrain.plan.plan import Item
from edgetrain.plan.problem import Problem

Planner = Callable[[Problem, int], tuple[int, ...] | None]
SMALLEST_STEP = 0.005  # how finely a planner's smallest budget is sought
_NAMED = 4  # tensors that a message names
_WORDS: tuple[tuple[Role, str], ...] = (
    ("parameter", "parameters"), ("state", "optimizer state"), ("buffer", "buffers"), ("input", "batch"),
    ("constant", "constants"),
)  # fmt: skip


def smallest_by(task: Problem, planner: Planner, *, until: float = math.inf) -> tuple[tuple[int, ...], int]:
    """The smallest budget that a planner was found to keep, by bisection, and its order there."""
    best, high, low = task.order, task.peak_bytes(task.order), least_bytes(task)
    with walks_until(until):
        while high - low > max(1, SMALLEST_STEP * high) and not is_late():
            middle = (low + high) // 2
            order = planner(task, middle)
            if order is None:
                low = middle
            else:
                best, high = order, middle
    return best, high


def least_bytes(task: Problem) -> int:
    """No schedule at all takes less: lasting tensors, the state of the generator, and what the hungriest op takes."""
    ops = (number for number, op in enumerate(task.graph.ops) if not op.view)
    hungriest = max((op_bytes(task, number) for number in ops), default=0)
    return persistent_bytes(task.graph) + random_state_bytes(task.graph, task.updates) + hungriest


def op_bytes(task: Problem, number: int, cost: OpCost | None = None) -> int:
    """What is there beside the lasting tensors while the op runs for the first time, in the way that takes least.
    cost: another than that of the problem."""
    cost = cost or task.costs.ops[number]
    own = sum(task.size[s] for s in {*task.reads[number], *task.makes[number]})
    fresh = own + cost.run("first").workspace_bytes
    if overwrites(task.graph, number):
        fresh = min(fresh, own - task.size[task.makes[number][0]] + cost.run("over").workspace_bytes)
    return fresh


def lasting(graph: Graph) -> list[tuple[str, int]]:
    """Name and bytes of what lasts through the step whatever the plan, largest first."""
    names = {tensor.storage: tensor.name for tensor in reversed(graph.tensors)}
    found = [
        (names.get(number, storage.role), storage.n_bytes)
        for number, storage in enumerate(graph.storages)
        if storage.role in PERSISTENT
    ]
    return sorted(found, key=lambda pair: -pair[1])


def infeasible(
    task: Problem,
    budget: int,
    order: Sequence[Item],
    smallest_bytes: int,
    *,
    found_by: str,
    bound_bytes: int | None = None,
) -> Infeasible:
    """order: one that keeps `smallest_bytes`. found_by: which planner found it. bound_bytes: the proven one, where it
    is not the problem's own."""
    moment, alive = tightest(task, order)
    op = task.graph.ops[moment.op]
    bound = least_bytes(task) if bound_bytes is None else bound_bytes
    there = lasting(task.graph)
    where = f" of {op.module}" if op.module else ""
    total = show_bytes(sum(n for _, n in there))
    return Infeasible(
        f"no plan was found that keeps {show_bytes(budget)}: the smallest that is known to work is "
        f"{show_bytes(smallest_bytes)} ({smallest_bytes} bytes), and none below {show_bytes(bound)} can\n"
        f"  proven: every plan takes {bound} bytes or more: what lasts, and what one op reads and makes\n"
        f"  known to work: {smallest_bytes} bytes, by {found_by}\n"
        f"  lasting: {total}: {_by_role(task.graph)}; {_named(there)}\n"
        f"  tightest at: {op.name}{where}\n"
        f"  alive there: {total} of parameters, state, buffers and inputs; {_named(alive)}\n"
        f"  next step: ask for {smallest_bytes} bytes or more, or take a smaller batch",
        smallest_bytes=smallest_bytes, bound_bytes=bound, op=op.name, alive=[name for name, _ in alive], lasting=there,
    )  # fmt: skip


def _by_role(graph: Graph) -> str:
    bytes_of = graph.bytes_by_role()
    there = sorted(((words, bytes_of[role]) for role, words in _WORDS if bytes_of[role]), key=lambda pair: -pair[1])
    return ", ".join(f"{words} {show_bytes(n_bytes)}" for words, n_bytes in there)


def _named(tensors: Sequence[tuple[str, int]]) -> str:
    names = ", ".join(f"{name} ({show_bytes(n_bytes)})" for name, n_bytes in tensors[:_NAMED])
    return names + (f" and {len(tensors) - _NAMED} more" if len(tensors) > _NAMED else "")


def tightest(task: Problem, order: Sequence[Item]) -> tuple[Moment, list[tuple[str, int]]]:
    """Where the schedule holds most, and what is alive there that does not last, largest first."""
    moments = task.moments(order)
    at = max(range(len(moments)), key=lambda n: moments[n].most_bytes)
    paging_in = moments[at].paged_bytes > moments[at].during_bytes
    alive = alive_at(task.graph, task.actions(order), at, paging_in=paging_in)
    names = {tensor.storage: tensor.name for tensor in reversed(task.graph.tensors)}
    found = sorted(((names[s], task.size[s]) for s in alive), key=lambda pair: -pair[1])
    return moments[at], found
