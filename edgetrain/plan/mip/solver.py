"""HiGHS with the rows of a formulation: what the planner `optimal` solves, again and again with more rows.

In:  a formulation, a budget in bytes or none; then solutions to start from, rows that forbid what is too much.
Out: the values of the variables, and a bound. Units are chosen so that HiGHS's absolute tolerances are small.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from edgetrain.plan.budget import Objective
from edgetrain.plan.mip.program import Formulation, MemoryRow, Row, Values


def _common(rows: Sequence[MemoryRow]) -> Row:
    """The terms that are in most of the rows."""
    count = Counter(term for row in rows for term in row.row.items())
    return {v: a for (v, a), times in count.items() if 2 * times > len(rows)}


def _without(row: Row, shared: Row) -> Row:
    """What is left of a row when the shared terms are in it already."""
    left = {v: row.get(v, 0.0) - shared.get(v, 0.0) for v in {**row, **shared}}
    return {v: a for v, a in left.items() if a}


class Solver:
    """HiGHS with the rows of a formulation. Without a budget the budget itself is the objective.

    limits: what a step may take more than keeping all does, in seconds and in joules.
    """

    def __init__(
        self,
        form: Formulation,
        budget: int | None,
        objective: Objective = "time",
        limits: Mapping[Objective, float] | None = None,
    ) -> None:
        import highspy

        self.form, self.budget = form, budget
        self._highs: Any = highspy.Highs()
        self._infinity = highspy.kHighsInf
        self._none = highspy.HighsModelStatus.kInfeasible
        self._highs.setOptionValue("output_flag", False)
        # The solver's tolerances are absolute: what is small in seconds or megabytes must not be small for it.
        sizes = [n for n, lasts in zip(form.problem.size, form.problem.lasting, strict=True) if not lasts]
        self._unit_bytes = min(1e6, float(max([*sizes, 1])))
        self._unit = self._unit_bytes  # of what is sought
        # After the decisions: the budget, and for each stage what all its recomputes have in common.
        again = form.while_recomputing()
        self._shared = [_common(rows) for rows in again]
        n, m = form.count, form.count + 1 + len(self._shared)
        cost, low, high = np.zeros(m), np.zeros(m), np.ones(m)
        high[n:] = high[form.continuous] = math.inf
        if budget is None:
            cost[n] = 1.0
        else:
            extra, waits = form.extra(objective), set(form.continuous)
            self._unit = max((a for v, a in extra.items() if v not in waits), default=0.0) or 1.0
            for v, a in extra.items():
                cost[v] = a / self._unit
            low[n] = high[n] = budget / self._unit_bytes
        self._highs.addVars(m, low, high)
        columns = np.arange(m, dtype=np.int32)
        self._highs.changeColsCost(m, columns, cost)
        kinds = np.full(m, highspy.HighsVarType.kInteger)
        kinds[n:] = kinds[form.continuous] = highspy.HighsVarType.kContinuous
        self._highs.changeColsIntegrality(m, columns, kinds)
        self._high = high[:n]
        self._add([*form.logic(), *form.limits()])
        for limited, amount in (limits or {}).items():
            self.limit(limited, amount)
        self.forbid(form.while_running())
        for at, (shared, rows) in enumerate(zip(self._shared, again, strict=True)):
            self._add([({**{v: a / self._unit_bytes for v, a in shared.items()}, n + 1 + at: -1.0}, 0.0)])
            self.forbid([MemoryRow(_without(row.row, shared), row.fixed_bytes) for row in rows], also=n + 1 + at)

    def limit(self, what: Objective, amount: float) -> None:
        extra = self.form.extra(what)
        unit = max(extra.values(), default=0.0) or 1.0
        self._add([({v: a / unit for v, a in extra.items()}, amount / unit)])

    def forbid(self, rows: Iterable[MemoryRow], *, also: int | None = None) -> None:
        """also: a variable that is part of each row."""
        limit = {self.form.count: -1.0} | ({} if also is None else {also: 1.0})
        unit = self._unit_bytes
        self._add([({v: a / unit for v, a in m.row.items()} | limit, -m.fixed_bytes / unit) for m in rows])

    def _add(self, rows: list[tuple[Row, float]]) -> None:
        index = [v for row, _ in rows for v in row]
        value = [a for row, _ in rows for a in row.values()]
        starts = np.cumsum([0, *(len(row) for row, _ in rows)])[:-1]
        self._highs.addRows(
            len(rows), np.full(len(rows), -self._infinity), np.array([limit for _, limit in rows]), len(index),
            starts.astype(np.int32), np.array(index, dtype=np.int32), np.array(value),
        )  # fmt: skip

    def start_from(self, values: Values) -> None:
        import highspy

        solution = highspy.HighsSolution()
        shared = [sum(a * values[v] for v, a in row.items()) / self._unit_bytes for row in self._shared]
        solution.col_value = [*values, 0.0 if self.budget is None else self.budget / self._unit_bytes, *shared]
        self._highs.setSolution(solution)

    def hold(self, values: Values, free: Sequence[int]) -> None:
        """From now on every decision is as in the solution, but for those that are free."""
        low, high = values.copy(), values.copy()
        open_ = [*free, *self.form.continuous]
        low[open_], high[open_] = 0.0, self._high[open_]
        self._highs.changeColsBounds(len(values), np.arange(len(values), dtype=np.int32), low, high)

    def release(self) -> None:
        n = self.form.count
        self._highs.changeColsBounds(n, np.arange(n, dtype=np.int32), np.zeros(n), self._high)

    def run(self, time_limit_s: float, relative_gap: float, absolute_gap: float) -> None:
        # HiGHS counts the time of all runs of one model together.
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + max(time_limit_s, 0.0))
        self._highs.setOptionValue("mip_rel_gap", relative_gap)
        self._highs.setOptionValue("mip_abs_gap", absolute_gap / self._unit)
        self._highs.run()

    @property
    def infeasible(self) -> bool:
        return bool(self._highs.getModelStatus() == self._none)

    @property
    def values(self) -> Values | None:
        if self._highs.getInfo().primal_solution_status != 2:
            return None
        return np.array(self._highs.getSolution().col_value)[: self.form.count]

    @property
    def bound(self) -> float:
        """In seconds or joules; without a budget, in bytes."""
        bound: float = self._highs.getInfo().mip_dual_bound
        return bound * self._unit
