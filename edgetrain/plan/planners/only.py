"""The planners `recompute-only` and `page-only`: the search of `optimal` with one of its two means."""

from __future__ import annotations

from edgetrain.plan.mip.apart import find, smallest
from edgetrain.plan.planner import Planner

RECOMPUTE_ONLY = Planner(
    "recompute-only", "search as optimal does, without paging", find, smallest, quick="fast",
    objectives=("time", "energy"), page=False,
)  # fmt: skip
PAGE_ONLY = Planner(
    "page-only", "search as optimal does, without recomputing", find, smallest, quick="keep-all",
    objectives=("time", "energy"), recompute=False, wants_store=True,
)  # fmt: skip
