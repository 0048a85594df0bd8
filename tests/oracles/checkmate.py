"""An oracle for tests: the dense mixed-integer program of Checkmate (Jain et al. 2020), for graphs of few ops.

In:  a problem of at most `MOST_OPS` ops, views not counted, and a budget in bytes.
Out: the order of least time within the budget, its extra time, and the bound that HiGHS proves for it; None if no order
     of the class is within the budget.

Stage t of the step ends with op t running for the first time; before it any op that may run again then does so, once at
most, in the order of the problem:

    R[t,i]     op i runs in stage t               R[t,t] = 1
    S[t,s]     storage s is there when stage t begins
    F[t,i,s]   storage s goes after op i in stage t, its last use there, and is not there in stage t + 1
    I[t,i]     op i overwrites an input that goes with it
    U[t,i]     bytes after op i in stage t before anything goes:  U[t,i] = U[t,i-1] − Σ F[t,i-1,s]·size + R[t,i]·results

    inputs     R[t,i] ≤ S[t,s] + R[t,maker(s)]           for all s that i reads
    retention  S[t,s] ≤ S[t-1,s] + R[t-1,maker(s)]
    once       S[t,s] + R[t,maker(s)] ≤ 1                 what is made again was not worth keeping until then
    memory     U[t,i] + R[t,i]·workspace − I[t,i]·(overwritten + workspace − workspace over it) ≤ budget
    least      Σ R[t,i]·time(i)

The account is that of `lifetimes.timeline`: workspace, copies and overwriting as there. It differs in one place: a
storage that a view reads counts as read by the op that follows the view, and can be held for one op more than it would.
The class of schedules holds those of every other planner here, except where one runs an op twice before the same op.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgetrain.errors import UserError
from edgetrain.plan.problem import Problem, Tables

MOST_OPS = 60
Row = dict[int, float]


@dataclass(frozen=True)
class Proven:
    """No order of the class within the budget takes less extra time than `bound_s`."""

    order: tuple[int, ...]
    extra_s: float
    bound_s: float


def checkmate(problem: Problem, budget_bytes: int, *, time_limit_s: float = 60.0) -> Proven | None:
    n_ops = sum(not view for view in problem.is_view)
    if n_ops > MOST_OPS:
        raise UserError(
            "the oracle is for small graphs", expected=f"at most {MOST_OPS} ops", received=f"{n_ops} ops",
            next_step="use the planner `optimal` or `fast`",
        )  # fmt: skip
    program = _Program(problem, problem.tables, budget_bytes)
    return program.solve(time_limit_s) if program.possible else None


@dataclass
class _Program:
    problem: Problem
    ready: Tables
    budget: int
    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    rows: list[tuple[Row, float]] = field(default_factory=list)  # Σ a·x ≤ b
    possible: bool = True  # False once a row without variables cannot hold

    def __post_init__(self) -> None:
        p, ready = self.problem, self.ready
        self.at = [at for at, op in enumerate(p.order) if not p.is_view[op]]  # op t of the program → its position
        self.n = len(self.at)
        index = {at: t for t, at in enumerate(self.at)}
        self.reads = [ready.reads[at] for at in self.at]
        self.makes = [ready.makes[at] for at in self.at]
        self.maker = {s: t for t, made in enumerate(self.makes) for s in made}
        self.awaited: list[set[int]] = [set(reads) for reads in self.reads]  # what the first run of t waits for
        for at in range(len(p.order)):
            if at not in index:
                following = next((t for t in range(self.n) if self.at[t] > at), self.n - 1)
                self.awaited[following] |= set(ready.reads[at])
        self.unit = max(1, math.gcd(*p.size, *ready.first_workspace, *ready.again_workspace, *ready.over_workspace))
        self._variables()
        for t in range(self.n):
            self._stage(t)
        for s in ready.kept:
            self._need({self.S[self.n, s]: -1.0}, -1.0)

    # ---- columns

    def _variable(self, cost: float = 0.0) -> int:
        self.cost.append(cost)
        self.upper.append(1.0)
        return len(self.cost) - 1

    def _variables(self) -> None:
        p, ready, n = self.problem, self.ready, self.n
        self.R: dict[tuple[int, int], int] = {}
        self.S: dict[tuple[int, int], int] = {}
        self.F: dict[tuple[int, int, int], int] = {}
        for t in range(n):
            for i in range(t):
                if p.deadline[p.order[self.at[i]]] > self.at[t]:
                    self.R[t, i] = self._variable(ready.again_s[self.at[i]])
            self.R[t, t] = self._variable()
            self._need({self.R[t, t]: -1.0}, -1.0)
        for s, made in self.maker.items():
            for t in range(made + 1, n + 1):
                self.S[t, s] = self._variable()
        for t, i in self.R:
            for s in (*self._reads(t, i), *self.makes[i]):
                self.F[t, i, s] = self._variable()

    def _reads(self, t: int, i: int) -> set[int]:
        return self.awaited[t] if i == t else set(self.reads[i])

    # ---- rows

    def _need(self, row: Row, limit: float) -> None:
        if row:
            self.rows.append((row, limit))
        elif limit < 0:
            self.possible = False

    def _there(self, t: int, s: int, sign: float) -> Row:
        """S[t,s] + R[t,maker(s)], as far as they exist."""
        found = (self.S.get((t, s)), self.R.get((t, self.maker[s])))
        return {v: sign for v in found if v is not None}

    def _stage(self, t: int) -> None:
        for i in range(t + 1):
            if (t, i) in self.R:
                for s in self._reads(t, i):
                    self._need({**self._there(t, s, -1.0), self.R[t, i]: 1.0}, 0.0)
        for s, made in self.maker.items():
            if made < t:
                self._need(self._there(t, s, 1.0), 1.0)
            if made <= t:
                self._need({**self._there(t, s, -1.0), self.S[t + 1, s]: 1.0}, 0.0)
        self._frees(t)
        self._memory(t)

    def _frees(self, t: int) -> None:
        """F[t,i,s] may be 1 only if i runs, s is not there in the next stage, and no later op of the stage reads it. It
        only ever helps, so it needs no row from below."""
        for (stage, i, s), free in self.F.items():
            if stage != t:
                continue
            self._need({free: 1.0, self.R[t, i]: -1.0}, 0.0)
            self._need({free: 1.0, self.S[t + 1, s]: 1.0}, 1.0)
            for j in range(i + 1, t + 1):
                if (t, j) in self.R and s in self._reads(t, j):
                    self._need({free: 1.0, self.R[t, j]: 1.0}, 1.0)

    def _memory(self, t: int) -> None:
        ready, size, unit = self.ready, self.problem.size, self.unit
        fixed = ready.persistent_bytes + sum(ready.undo[: self.at[t]])
        held: Row = {self.S[t, s]: size[s] / unit for s, made in self.maker.items() if made < t}
        for i in range(t + 1):
            run = self.R.get((t, i))
            if run is None:
                continue
            if i == t:
                fixed += ready.undo[self.at[t]]
            results = sum(size[s] for s in self.makes[i])
            held[run] = held.get(run, 0.0) + results / unit
            row = dict(held)
            workspace = (ready.first_workspace if i == t else ready.again_workspace)[self.at[i]]
            row[run] += workspace / unit
            over = [s for s in ready.overwrites[self.at[i]] if (t, i, s) in self.F]
            if over:
                in_place = self._variable()
                row[in_place] = -(size[over[0]] + workspace - ready.over_workspace[self.at[i]]) / unit
                self._need({in_place: 1.0, **{self.F[t, i, s]: -1.0 for s in over}}, 0.0)
            self._need(row, (self.budget - fixed) // unit)
            for s in (*self._reads(t, i), *self.makes[i]):
                held[self.F[t, i, s]] = held.get(self.F[t, i, s], 0.0) - size[s] / unit

    # ---- the solution

    def solve(self, time_limit_s: float) -> Proven | None:
        import highspy

        solver: Any = highspy.Highs()
        for option, value in (
            ("output_flag", False), ("time_limit", time_limit_s), ("mip_rel_gap", 0.0), ("mip_abs_gap", 1e-9),
            ("threads", 1),
        ):  # fmt: skip
            solver.setOptionValue(option, value)
        n = len(self.cost)
        scale = max([*self.cost, 1e-12])
        solver.addVars(n, np.zeros(n), np.array(self.upper))
        columns = np.arange(n, dtype=np.int32)
        solver.changeColsCost(n, columns, np.array(self.cost) / scale)
        whole = np.array(
            [*self.R.values(), *self.S.values()], dtype=np.int32
        )  # then the others are whole by themselves
        kinds = np.full(len(whole), highspy.HighsVarType.kInteger)
        solver.changeColsIntegrality(len(whole), whole, kinds)
        _add_rows(solver, self.rows)
        solver.run()
        info = solver.getInfo()
        if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return None
        if info.primal_solution_status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
            raise UserError(
                "the oracle found no order in its time", received=f"{time_limit_s} s", next_step="give it more time"
            )
        order = self._order(solver.getSolution().col_value)
        extra_s = self.problem.costs.time_s(order) - self.problem.keep_all_time_s
        return Proven(order, extra_s, info.mip_dual_bound * scale)

    def _order(self, values: Sequence[float]) -> tuple[int, ...]:
        order: list[int] = []
        numbers = self.problem.order
        done = 0
        for t, at in enumerate(self.at):
            order += [numbers[self.at[i]] for i in range(t) if (t, i) in self.R and values[self.R[t, i]] > 0.5]
            order += numbers[done : at + 1]  # the views before the op, and the op
            done = at + 1
        return (*order, *numbers[done:])


def _add_rows(solver: Any, rows: Sequence[tuple[Row, float]]) -> None:
    starts, columns, values = [], [], []  # type: tuple[list[int], list[int], list[float]]
    for row, _ in rows:
        starts.append(len(columns))
        columns += row
        values += row.values()
    solver.addRows(
        len(rows), np.full(len(rows), -np.inf), np.array([limit for _, limit in rows], dtype=np.float64), len(columns),
        np.array(starts, dtype=np.int32), np.array(columns, dtype=np.int32), np.array(values, dtype=np.float64),
    )  # fmt: skip
