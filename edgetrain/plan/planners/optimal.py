"""The planner `optimal`, and `auto`, which keeps all where that fits.

Mixed-integer programming from the best order that greedy planners find, with a proven bound (`plan/mip/`). Where the
costs know a store, tensors are paged to it beside recomputing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from edgetrain.plan.mip.apart import find, smallest
from edgetrain.plan.planner import Planner

OPTIMAL = Planner(
    "optimal", "search for the best plan, with a proven bound", find, smallest, quick="fast",
    objectives=("time", "energy"),
)  # fmt: skip
AUTO = replace(
    OPTIMAL, name="auto", help="keep all where that fits, optimal otherwise", find=partial(find, planner=OPTIMAL.name),
    needs_budget=False, when_moving="fast",
)  # fmt: skip
