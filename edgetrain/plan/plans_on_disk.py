"""Plans that were searched for before, so that the next run of the same program starts at once.

A plan is found under the hash of the graph, the costs, the budget and the time for the search. The order of the
smallest peak that was ever found for a graph is kept too: a budget that an `Infeasible` names works when it is asked
for.

A file that cannot be read, or holds anything but a legal plan, is a miss.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from edgetrain.costs.table import to_json
from edgetrain.errors import EdgetrainError
from edgetrain.graph import cache
from edgetrain.plan.plan import Plan
from edgetrain.plan.problem import Problem
from edgetrain.plan.validate import validate


def find(task: Problem, budget: int, time_limit_s: float) -> Plan | None:
    return _read(task, f"{budget}-{time_limit_s}")


def keep(task: Problem, budget: int, time_limit_s: float, plan: Plan) -> None:
    _write(_path(task, f"{budget}-{time_limit_s}"), plan)


def smallest(task: Problem) -> tuple[int, ...] | None:
    plan = _read(task, "smallest")
    return None if plan is None else plan.order


def keep_smallest(task: Problem, order: tuple[int, ...]) -> None:
    _write(_path(task, "smallest"), task.plan(order, planner="optimal"))


def _read(task: Problem, what: str) -> Plan | None:
    path = _path(task, what)
    if path is None:
        return None
    try:
        plan = Plan.load(path)
        validate(task.graph, plan)
    except EdgetrainError:
        return None
    return plan


def _path(task: Problem, what: str) -> Path | None:
    folder = cache.folder()
    if folder is None:
        return None
    parts = json.dumps([task.graph.key, to_json(task.costs), task.updates, what], sort_keys=True)
    return folder.parent / "plans" / f"{hashlib.sha256(parts.encode()).hexdigest()[:24]}.json"


def _write(path: Path | None, plan: Plan) -> None:
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        plan.save(part)
        os.replace(part, path)
