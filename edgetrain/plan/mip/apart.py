"""The search in a process of its own: `find` and `smallest` of the planners that search.

In:  a `Request`. Out: a `Schedule` with a bound; the best that is known without a search where that was ended for lack
     of time or memory. The solver's 50 MB and more go with its process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from edgetrain import child
from edgetrain.plan.budget import show_bytes
from edgetrain.plan.mip.search import Found, optimal
from edgetrain.plan.mip.search import smallest as smallest_order
from edgetrain.plan.plan import Bound, Item, items_from_json, items_to_json
from edgetrain.plan.planner import GREEDY_S, Aim, Request, Schedule
from edgetrain.plan.planners.fast import FAST, fast

STARTS = 48  # greedy walks from which the best one is what the search starts from: half a second
ENDING_S = 1.0  # a search that does not end by itself is ended so long after its time


def find(request: Request, *, planner: str = "") -> Schedule:
    """planner: the name under which the schedule is known, where it is not that of the planner that was asked."""
    aim, start = request.aim, _start(request)
    try:
        # Where nothing is known that keeps the budget, half of the time is for the smallest that can be kept.
        result = _search(request, aim, start, _left_s(request) / (1 if start is not None else 2))
    except child.Ended:
        return Schedule(start, planner=FAST.name, note=_why_cut_short(request), cut_short=True)
    order = result.order
    if order is None and aim.limits:
        # What stands in the way: memory alone, or the limits as well?
        only = next(iter(aim.limits))
        with contextlib.suppress(child.Ended):
            order = _search(request, replace(aim, limits={}, objective=only), start, _left_s(request)).order
    return Schedule(order, _bound(request, result), planner)


def smallest(request: Request) -> Schedule:
    """An order in as few bytes as are found in the time, whatever the budget."""
    time_limit_s = _left_s(request)
    with contextlib.suppress(child.Ended):
        items = child.forked(
            lambda: items_to_json(smallest_order(request.problem, aim=request.aim, time_limit_s=time_limit_s)),
            most_bytes=request.solver_bytes, time_limit_s=time_limit_s + min(time_limit_s, ENDING_S),
        )  # fmt: skip
        return Schedule(items_from_json(items))
    return Schedule(None, cut_short=True)


def _left_s(request: Request) -> float:
    return max(0.0, request.until - time.monotonic())


def _start(request: Request) -> Sequence[Item] | None:
    """The best order within the budget that is known without a search."""
    task = request.problem
    if not request.aim.recompute:
        return None
    until = time.monotonic() + max(GREEDY_S, _left_s(request) / 2)
    walked = fast(task, request.budget_bytes, tries=STARTS, until=until)
    orders = [*([] if walked is None else [walked]), *request.known]
    return min(orders, key=lambda order: task.timing(order).time_s, default=None)


def _search(request: Request, aim: Aim, start: Sequence[Item] | None, time_limit_s: float) -> Found:
    def work() -> Any:
        result = optimal(request.problem, request.budget_bytes, aim=aim, start=start, time_limit_s=time_limit_s)
        return asdict(replace(result, order=None)) | {"items": result.order and items_to_json(result.order)}

    answer = child.forked(work, most_bytes=request.solver_bytes, time_limit_s=time_limit_s + ENDING_S)
    items = answer.pop("items")
    return replace(Found(**answer), order=None if items is None else items_from_json(items))


def _bound(request: Request, result: Found) -> Bound:
    whole = request.problem.timing(request.problem.order)
    if request.aim.objective == "time":
        return Bound(whole.time_s + result.extra_bound, result.schedules)
    assert whole.energy_j is not None
    return Bound(None, result.schedules, whole.energy_j + result.extra_bound)


def _why_cut_short(request: Request) -> str:
    n_bytes = request.solver_bytes
    room = "" if n_bytes is None else f" ({show_bytes(max(0, n_bytes))} were left for it)"
    why = "time" if not _left_s(request) else f"memory{room}"
    return f"the search for a better plan ended for lack of {why}, so the fast planner served"
