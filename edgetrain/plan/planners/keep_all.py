"""The planner `keep-all`: nothing is computed twice. `plan/keep_all.py` makes its plan; here it is kept or refused."""

from __future__ import annotations

from edgetrain.plan.planner import Planner, Request, Schedule


def find(request: Request) -> Schedule:
    task = request.problem
    return Schedule(task.order if task.keep_all.peak_bytes <= request.budget_bytes else None)


KEEP_ALL = Planner(
    "keep-all", "compute nothing twice", find, objectives=("time", "energy"), recompute=False, page=False,
    needs_budget=False,
)  # fmt: skip
