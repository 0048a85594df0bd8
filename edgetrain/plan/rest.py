"""The rest of a step, planned anew in the middle of it, from what is alive.

In:  a problem, the plan that the step follows so far and how far it has come, a budget for what is left.
Out: a whole plan: the old schedule up to there, what is freed, and a new schedule to the end.

    old plan    ─ op ─ op ─ op ─┊─ op ─ op ─ op ─
                                ┊ the budget fell, or a transfer failed
    new plan    ─ op ─ op ─ op ─┊─ frees ─ op ─ op ─ recompute ─ op ─

What is never used again goes first. Then, as long as something does not fit, what is cheapest to recompute for its
bytes: by SAGE's rule (`sage.py`), and by that of `fast.py`, which counts missing ancestors too; the rest that takes
less time is taken.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass

from edgetrain.errors import InternalError
from edgetrain.graph.ir import Graph
from edgetrain.plan import lifetimes
from edgetrain.plan.keep_all import plan_with
from edgetrain.plan.plan import Action, Compute, Free, Item, PageIn, PageOut, Plan
from edgetrain.plan.planners.fast import Greedy
from edgetrain.plan.planners.sage import Sage
from edgetrain.plan.problem import Problem
from edgetrain.plan.walk import NoRoom

NEAR = 0.03  # how finely the least bytes for a rest are sought


@dataclass(frozen=True)
class State:
    """Where a step is after some actions of its schedule."""

    position: int
    alive: frozenset[int]
    stored: frozenset[int]


def state(task: Problem, actions: Sequence[Action]) -> State:
    """The state after these actions."""
    done: set[int] = set()
    alive: set[int] = set()
    stored: set[int] = set()
    for action in actions:
        if isinstance(action, Free):
            alive.discard(action.storage)
        elif isinstance(action, PageIn):
            alive.add(action.storage)
        elif isinstance(action, PageOut):
            stored.add(action.storage)
        else:
            done.add(action.op)
            alive.update(task.makes[action.op])
            if action.into is not None:
                alive.discard(action.into)
    left = (at for at, op in enumerate(task.order) if op not in done and not task.is_view[op])
    position = next(left, len(task.order))
    while position and task.order[position - 1] not in done:
        position -= 1  # the views before it, which have not been taken either
    return State(position, frozenset(alive), frozenset(stored))


def rest(
    task: Problem,
    plan: Plan,
    at: int,
    budget_bytes: int,
    *,
    lost: Set[int] = frozenset(),
    use_store: bool = True,
) -> Plan | None:
    """The plan that follows `plan` for its first `at` actions and holds at most the budget from there on; None where
    none is found.

    lost: storages that should be alive and are not. use_store: what was paged out is there to be read back.
    """
    past = plan.schedule[:at]
    now = state(task, past)
    stored = now.stored - lost if use_store else frozenset[int]()
    sequences = []
    for walk in (Sage(task.tables, budget_bytes, stored), Greedy(task.tables, budget_bytes, stored=stored)):
        walk.begin_at(now.position, now.alive - lost)
        with contextlib.suppress(NoRoom):
            sequences.append(walk.run())
    if not sequences:
        return None
    sequence = min(sequences, key=lambda sequence: sum(task.tables.again_s[n] for n in sequence if n >= 0))
    coming: list[Item] = [task.order[n] if n >= 0 else PageIn(-1 - n) for n in sequence]
    return plan_with(task.graph, plan, _joined(task, past, now.alive, lost, coming))


def bytes_from(graph: Graph, plan: Plan) -> list[int]:
    """For each action of the plan, the most that is held from there to the end."""
    moments = lifetimes.timeline(graph, plan.schedule, updates=plan.updates, workspace=plan.workspace_bytes)
    needs: list[int] = []
    max_bytes, left = 0, len(moments)
    for action in reversed(plan.schedule):
        if isinstance(action, Compute):
            left -= 1
            max_bytes = max(max_bytes, moments[left].most_bytes)
        needs.append(max_bytes)
    return needs[::-1]


def least_rest(
    task: Problem,
    plan: Plan,
    at: int,
    budget_bytes: int,
    *,
    lost: Set[int],
    use_store: bool,
) -> Plan | None:
    """As `rest`, in as few bytes above the budget as are found to do; None where what is lost cannot be recomputed."""

    def within(n_bytes: int) -> Plan | None:
        return rest(task, plan, at, n_bytes, lost=lost, use_store=use_store)

    plan_within = within(budget_bytes)
    if plan_within is not None:
        return plan_within
    # If nothing is lost the plan can go on as it was.
    best = plan if use_store and not lost else within(sys.maxsize)
    if best is None:
        return None
    low, high = budget_bytes, bytes_from(task.graph, best)[at]
    while high - low > max(1, NEAR * high):
        middle = (low + high) // 2
        plan_within = within(middle)
        if plan_within is None:
            low = middle
        else:
            best, high = plan_within, middle
    return best


def _joined(
    task: Problem, past: Sequence[Action], alive: Set[int], lost: Set[int], coming: Sequence[Item]
) -> tuple[Action, ...]:
    """The actions that were taken, what is freed, and those that run these ops."""
    before = [action.op if isinstance(action, Compute) else action for action in past if not isinstance(action, Free)]
    whole = task.actions([*before, *coming])
    run = [n for n, action in enumerate(whole) if not isinstance(action, Free)]
    cut = run[len(before)] if len(before) < len(run) else len(whole)
    kept = state(task, whole[:cut]).alive
    if not kept <= alive - lost:
        raise InternalError("the rest of a step reads what is not there")
    return (*past, *(Free(s) for s in sorted(alive - kept)), *whole[cut:])
