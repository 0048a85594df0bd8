"""Paging in place of recomputing: a schedule that recomputes, improved one transfer at a time.

In:  a problem whose costs know a store, a schedule within a budget, what a schedule is worth.
Out: a schedule within the budget that is worth as much or more.

    recompute   ─ make s ─ use ─ · · · · · · · · · · · · ─ make s again (and what it is made from) ─ use
    page        ─ make s ─ use ├─ write ─┤ · · · · · ├─ read ─┤ ─────────────────────────────────── use

The store is idle while nothing is paged, so the first transfers cost nothing but their memory while they are on their
way. Each recompute in turn, those first that take most time for their bytes, is replaced by a transfer beside the ops,
or by one that all wait for, if the schedule that comes out keeps the budget and is worth more. Recomputes whose results
nobody reads any more go too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from edgetrain.plan.mip.paging import PagingFormulation
from edgetrain.plan.plan import Free, Item, PageIn, PageOut
from edgetrain.plan.problem import Problem
from edgetrain.plan.timing import Timing, play


def page_instead(
    problem: Problem,
    order: Sequence[Item],
    budget_bytes: int,
    worth: Callable[[Timing], float],
    *,
    until: float,
    overlap: bool = True,
) -> tuple[Item, ...]:
    """worth: what a schedule costs that takes so much; less is better.
    until: the instant of `time.monotonic` at which to stop.
    """
    form = PagingFormulation(problem, depth=1, overlap=overlap)
    best, best_worth = tuple(order), worth(problem.timing(order, overlap=overlap))
    for s, at in _recomputes(problem, order):
        for waits in form.ways:
            if time.monotonic() > until:
                return best
            changed = _paged(form, best, s, at, waits)
            if changed is None:
                continue
            actions = problem.actions(changed)
            changed_worth = worth(play(problem.graph, actions, problem.costs, overlap=overlap))
            if changed_worth < best_worth and problem.peak_of(actions) <= budget_bytes:
                best, best_worth = changed, changed_worth
                break
    return best


def _recomputes(problem: Problem, order: Sequence[Item]) -> list[tuple[int, int]]:
    """Each storage that is recomputed, with the op of the problem's order before which that happens."""
    recomputes: list[tuple[int, int]] = []
    waiting: list[int] = []
    done: set[int] = set()
    for item in order:
        if not isinstance(item, int) or problem.is_view[item]:
            continue
        if item in done:
            waiting += problem.makes[item]
            continue
        done.add(item)
        recomputes += [(s, item) for s in waiting]
        waiting.clear()
    made_s = {s: problem.costs.ops[op].again_s for s, op in problem.maker.items()}
    return sorted(recomputes, key=lambda pair: made_s[pair[0]] / max(1, problem.size[pair[0]]), reverse=True)


def _paged(form: PagingFormulation, order: Sequence[Item], s: int, before: int, waits: bool) -> tuple[Item, ...] | None:
    """The order in which the storage is paged in before that op, where it was recomputed. None where it was not, or
    cannot be paged."""
    problem, point = form.problem, form.at[before]
    sends = next((way for way in (waits, *form.ways) if (s, way) in form.freed), None)
    at = _place(problem, order, problem.maker[s], before)
    if sends is None or at is None or form.forward_last[s] >= point:
        return None
    store, n_bytes = form.store, problem.size[s]
    begin = point
    if not waits:
        begin = max(form.begin_of(point, store.in_s(n_bytes)), form.freed[s, sends])
    changed = [item for n, item in enumerate(order) if n != at]
    if PageOut(s) not in changed:
        changed.insert(_first(changed, form.ops[form.forward_last[s]]) + 1, PageOut(s))
        changed.insert(_before(problem, changed, form.ops[form.freed[s, sends]]), Free(s))
    changed.insert(_before(problem, changed, form.ops[min(begin, point)]), PageIn(s))
    return _pruned(problem, changed)


def _place(problem: Problem, order: Sequence[Item], op: int, before: int) -> int | None:
    """Where an op is run again right before another one runs for the first time."""
    at = _first(order, before) - 1
    while at >= 0:
        item = order[at]
        if item == op:
            return at if _first(order, op) < at else None
        if isinstance(item, int) and not problem.is_view[item] and _first(order, item) == at:
            return None
        at -= 1
    return None


def _first(order: Sequence[Item], op: int) -> int:
    return order.index(op)


def _before(problem: Problem, order: Sequence[Item], op: int) -> int:
    """The place before the recomputes and views that are run for an op."""
    at = _first(order, op)
    while at > 0:
        item = order[at - 1]
        again = isinstance(item, int) and (problem.is_view[item] or _first(order, item) < at - 1)
        if not again and not isinstance(item, PageIn):
            break
        at -= 1
    return at


def _pruned(problem: Problem, order: Sequence[Item]) -> tuple[Item, ...]:
    """Without recomputes of what nobody reads before it is made the next time."""
    kept: list[Item] = []
    wanted: set[int] = set()
    first = {item: at for at, item in reversed(list(enumerate(order))) if isinstance(item, int)}
    for at in range(len(order) - 1, -1, -1):
        item = order[at]
        if isinstance(item, PageIn):
            wanted.discard(item.storage)
        elif isinstance(item, int):
            created = problem.makes[item]
            if first[item] < at and not problem.is_view[item] and wanted.isdisjoint(created):
                continue
            wanted.difference_update(created)
            wanted.update(problem.reads[item])
        kept.append(item)
    return tuple(reversed(kept))
