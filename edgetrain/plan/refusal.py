"""Where no plan keeps a budget: what is proven, what is known to work, and what stands in the way.

In:  a problem, a budget, an order that was found for more.
Out: `Infeasible`, with the lasting tensors by bytes, a bound that holds for every schedule, and a budget that works.

    bytes  │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▓▓▓▓▓▓▓▓▓▓▓▓▓│░░░░░░░░░│
           │ lasting        │ hungriest op│ unknown │ works
           └────────────────┴─────────────┴─────────┴────────
                                          │ lower bound: proven
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from edgetrain.costs.table import OpCost
from edgetrain.errors import Infeasible
from edgetrain.graph.ir import PERSISTENT, Graph, Role
from edgetrain.plan.budget import show_bytes
from edgetrain.plan.lifetimes import Moment, alive_at, overwrites, persistent_bytes, random_state_bytes
from edgetrain.plan.plan import Item
from edgetrain.plan.planner import Find, Order, Request
from edgetrain.plan.problem import Problem

SMALLEST_STEP = 0.005  # how finely a planner's smallest budget is sought
_NAMED = 4  # tensors that a message names
_WORDS: tuple[tuple[Role, str], ...] = (
    ("parameter", "parameters"), ("state", "optimizer state"), ("buffer", "buffers"), ("input", "batch"),
    ("constant", "constants"),
)  # fmt: skip


def smallest_by(task: Problem, find: Find, *, until: float = math.inf) -> tuple[Order, int]:
    """The smallest budget that a planner was found to keep, by bisection, and its order there."""
    best: Order = task.order
    high, low = task.peak_bytes(best), lower_bound_bytes(task)
    while high - low > max(1, SMALLEST_STEP * high) and time.monotonic() <= until:
        middle = (low + high) // 2
        order = find(Request(task, middle, until)).order
        if order is None:
            low = middle
        else:
            best, high = tuple(order), middle
    return best, high


def lower_bound_bytes(task: Problem) -> int:
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


def lasting(graph: Graph, without: Collection[int] = ()) -> list[tuple[str, int]]:
    """Name and bytes of what lasts through the step whatever the plan, largest first. without: these storages."""
    names = {tensor.storage: tensor.name for tensor in reversed(graph.tensors)}
    return _largest_first(
        [
            (names.get(number, storage.role), storage.n_bytes)
            for number, storage in enumerate(graph.storages)
            if storage.role in PERSISTENT and number not in without
        ]
    )


def _largest_first(named: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(named, key=lambda pair: -pair[1])


@dataclass(frozen=True)
class Evidence:
    """What stands in the way of a budget. roles: what lasts, in words. op, module, alive: where it is tightest, and
    what is there that does not last. where, more: said before all of it, and of what to do next."""

    budget: int
    smallest_bytes: int
    bound_bytes: int
    found_by: str
    lasting: Sequence[tuple[str, int]]
    roles: Sequence[tuple[str, int]]
    op: str
    module: str
    alive: Sequence[tuple[str, int]]
    where: str = ""
    more: str = ""

    def beside(self, what: str, n_bytes: int) -> Evidence:
        """The same where so much more lasts."""
        return replace(
            self, budget=self.budget + n_bytes, smallest_bytes=self.smallest_bytes + n_bytes,
            bound_bytes=self.bound_bytes + n_bytes, lasting=_largest_first([*self.lasting, (what, n_bytes)]),
            roles=[*self.roles, (what, n_bytes)],
        )  # fmt: skip

    def __str__(self) -> str:
        smallest, bound, module = self.smallest_bytes, self.bound_bytes, f" of {self.module}" if self.module else ""
        total = show_bytes(sum(n for _, n in self.lasting))
        roles = ", ".join(f"{words} {show_bytes(n_bytes)}" for words, n_bytes in _largest_first(self.roles))
        return (
            f"{self.where}no plan fits in {show_bytes(self.budget)}: the smallest budget known to work is "
            f"{show_bytes(smallest)} ({smallest} bytes), and {show_bytes(bound)} is a proven lower bound\n"
            f"  proven: every plan takes {bound} bytes or more: what lasts, and what one op reads and makes\n"
            f"  known to work: {smallest} bytes, by {self.found_by}\n"
            f"  lasting: {total}: {roles}; {_named(self.lasting)}\n"
            f"  tightest at: {self.op}{module}\n"
            f"  alive there: {total} that lasts; {_named(self.alive)}\n"
            f"  next step: ask for {smallest} bytes or more, or take a smaller batch{self.more}"
        )


class Refusal(Infeasible):
    """Infeasible for lack of bytes for tensors. evidence: what it says; None once that was put into other words."""

    evidence: Evidence | None = None

    @classmethod
    def of(cls, evidence: Evidence) -> Refusal:
        answer = cls(
            str(evidence), smallest_bytes=evidence.smallest_bytes, bound_bytes=evidence.bound_bytes, op=evidence.op,
            alive=[name for name, _ in evidence.alive], lasting=evidence.lasting,
        )  # fmt: skip
        answer.evidence = evidence
        return answer


class TooSmall(Infeasible):
    """A bound says that no plan keeps the budget; nothing was searched, so `smallest_bytes` is that bound alone."""

    @classmethod
    def by(cls, bound_bytes: int) -> TooSmall:
        return cls("a bound rules it out", smallest_bytes=bound_bytes, bound_bytes=bound_bytes)


def with_bound(answer: Infeasible, bound_bytes: int) -> Infeasible:
    """The same answer where no more than this is proven, since something else may be tried."""
    if bound_bytes >= answer.bound_bytes:
        return answer
    if isinstance(answer, Refusal) and answer.evidence is not None:
        return Refusal.of(replace(answer.evidence, bound_bytes=bound_bytes))
    return answer.in_words(str(answer), bound_bytes=bound_bytes)


def infeasible(
    task: Problem,
    budget: int,
    order: Sequence[Item],
    smallest_bytes: int,
    *,
    found_by: str,
    bound_bytes: int | None = None,
) -> Refusal:
    """order: one that keeps `smallest_bytes`. found_by: which planner found it. bound_bytes: the proven one, where it
    is not the problem's own."""
    moment, alive = tightest(task, order)
    op = task.graph.ops[moment.op]
    roles = task.graph.bytes_by_role()
    return Refusal.of(
        Evidence(
            budget, smallest_bytes, lower_bound_bytes(task) if bound_bytes is None else bound_bytes, found_by,
            lasting(task.graph), [(words, roles[role]) for role, words in _WORDS if roles[role]],
            op.name, op.module, alive,
        )
    )  # fmt: skip


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
    return moments[at], _largest_first([(names[s], task.size[s]) for s in alive])
