"""What a compiled step is given beside its graph and plan: its conditions, and what the steps of one graph share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from edgetrain.costs.table import Costs
from edgetrain.graph.ir import Graph
from edgetrain.pagefile import Calls
from edgetrain.plan.plan import Updates
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.validate import Validator
from edgetrain.run.adaptive import BudgetWatch
from edgetrain.run.compile import Words


@dataclass(frozen=True)
class Conditions:
    """Under which a step runs. page_to: a folder to page to, by these calls. watch: of a budget that moves."""

    check_finite: bool = False
    page_to: str | Path | None = None
    watch: BudgetWatch | None = None
    page_calls: Calls | None = None


class Known:
    """What the steps of one graph share, whatever their plan: the lines of its programs, and what planning the rest of
    a step needs."""

    def __init__(
        self, graph: Graph, costs: Costs | None, updates: Updates, *, check_finite: bool, resumable: bool
    ) -> None:
        self._graph, self.costs, self._updates = graph, costs, updates
        self.words = Words(graph, check_finite=check_finite, resumable=resumable)

    @cached_property
    def validator(self) -> Validator:
        return Validator(self._graph)

    @cached_property
    def task(self) -> Problem:
        assert self.costs is not None
        return problem(self._graph, self.costs, self._updates)
