"""The planner `poet`: the least energy, by recomputing and paging together (POET, Patil et al. 2022).

Its search is that of `optimal`, whose class of schedules holds POET's for graphs of few ops (`plan/mip/program.py`).
"""

from __future__ import annotations

from edgetrain.plan.mip.apart import find, smallest
from edgetrain.plan.planner import Planner

POET = Planner(
    "poet", "search for the least energy, recomputing and paging together (POET)", find, smallest, quick="fast",
    objectives=("energy",), wants_store=True,
)  # fmt: skip
