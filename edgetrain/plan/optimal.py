"""The planner `optimal`: mixed-integer programming over storages.

In:  a problem, a budget in bytes, a schedule to start from.
Out: the order of least extra time that was found within the budget, and a proven bound on the best of its class.

Class of schedules: the ops run in the order of the problem; forward ops alone are recomputed, right before an op of
the backward pass that reads an activation (a *stage*), in chains of at most `depth` ops; a storage is kept over the
whole gap between two of its *points*, or not at all. Its points are the stages that read it, and those before which an
op that reads it may be recomputed (as one of the last `reach` of a chain, where fewer points will do).

                      forward            │ stages of the backward pass
    storage s   make ── use ── use ──────┼───── point ───────── point        K[s,0], K[s,1]: kept over the gap
                                 gap 0   │          gap 1
                                         │      R[t,i]: op i is recomputed before stage t

    need       a stage finds what it reads:       K[s,gap] + R[t,maker(s)] ≥ 1
    inputs     so does a recompute:               R[t,i] ≤ K[s,gap] + R[t,maker(s)]
    retention  kept is what was there:            K[s,g+1] ≤ K[s,g] + R[t_g,maker(s)]
    memory     one row for each op, and one for each recompute. While a stage runs that does not itself read s, s is
               there if it is kept over the gap that follows
    least      Σ R[t,i] · time(i)

The rows for recomputes count their own inputs and results, what is kept, and what the stage itself waits for; what
else a chain holds in between is found by playing the schedule through, and cut off by a row of its own
(`Formulation.cut`).
Tight budgets need longer chains: where none of the class fits, `depth` is doubled.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgetrain.costs.table import Way
from edgetrain.plan import lifetimes
from edgetrain.plan.plan import Compute, Free
from edgetrain.plan.problem import Problem

DEPTH = 6
REACH = 4  # where the chains are longer than a few ops, and the smallest peak alone is sought
DEEPEST = 48
MOST_VARIABLES = 4000  # for chains of more than DEPTH ops
CLASS = "recompute of forward ops before ops of the backward pass that read activations, in chains of at most {} ops"

Row = dict[int, float]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Found:
    """order: None if none was found in the time. extra_bound_s: no schedule of the class takes less extra time.
    infeasible: the class holds no schedule within the budget (proven); an order is then the one it started from."""

    order: tuple[int, ...] | None
    extra_s: float
    extra_bound_s: float
    schedules: str
    infeasible: bool = False


@dataclass(frozen=True)
class _Memory:
    """fixed + Σ bytes · variable ≤ budget"""

    row: Row
    fixed_bytes: float

    def breaks(self, values: Values, budget: float) -> bool:
        held = self.fixed_bytes + float(sum(a * values[v] for v, a in self.row.items()))
        return held > budget + 0.5


class Formulation:
    """The variables and rows for one problem and one depth; the budget is not part of it."""

    def __init__(self, problem: Problem, *, depth: int, reach: int | None = None) -> None:
        self.problem, self.depth, self.reach = problem, depth, reach or depth
        p = problem
        self.ops = [number for number in p.order if not p.is_view[number]]
        self.at = {number: index for index, number in enumerate(self.ops)}
        phases = [p.graph.ops[number].phase for number in self.ops]
        self.first_backward = next((i for i, phase in enumerate(phases) if phase != "forward"), len(phases))
        self.forward_last, self.uses = self._uses()
        self.stages = sorted({use for uses in self.uses.values() for use in uses})
        self.before, self.during = self._fixed()
        kept = (action for action in p.actions(p.order) if isinstance(action, Compute))
        self.overwritten = {action.op: action.into for action in kept if action.into is not None}
        self.points = {s: list(uses) for s, uses in self.uses.items()}
        self.candidates = {t: self._candidates(t) for t in self.stages}
        # stage → storage → the first recompute there that reads it
        self.first_reader = {
            t: {s: self.at[j] for j in reversed(found) for s in p.reads[j]} for t, found in self.candidates.items()
        }
        self.cost: list[float] = []
        self.K = {(s, g): self._variable(0.0) for s, points in self.points.items() for g in range(len(points))}
        self.R = {(t, i): self._variable(p.costs.ops[i].again_s) for t in self.stages for i in self.candidates[t]}

    def _variable(self, cost: float) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def _uses(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        """For what the forward pass makes: where it touches it last, and where the backward pass reads it."""
        p = self.problem
        last: dict[int, int] = {}
        uses: dict[int, list[int]] = {}
        for index, number in enumerate(self.ops):
            if index < self.first_backward:
                last.update(dict.fromkeys((*p.makes[number], *p.reads[number]), index))
            else:
                for s in p.reads[number]:
                    if s in last:
                        uses.setdefault(s, []).append(index)
        return last, uses

    def _fixed(self) -> tuple[list[int], list[int]]:
        """The bytes before and during each op that no decision changes: all but the storages with gaps."""
        p = self.problem
        before, during = [0] * len(self.ops), [0] * len(self.ops)
        for moment in p.moments(p.order):
            if moment.op in self.at:
                before[self.at[moment.op]], during[self.at[moment.op]] = moment.before_bytes, moment.during_bytes
        for s, uses in self.uses.items():
            for index in range(self.forward_last[s] + 1, uses[-1] + 1):
                before[index] -= p.size[s]
                during[index] -= p.size[s]
        return before, during

    def gap(self, s: int, stage: int) -> int | None:
        """The gap of a storage that spans the stage or ends at it; None after its last use."""
        points = self.points.get(s)
        if points is None or stage > points[-1]:
            return None
        return bisect_left(points, stage)

    def _candidates(self, stage: int) -> list[int]:
        """The ops that may be recomputed before the stage, inputs first. The stage becomes a point of what those that
        end a chain read."""
        p = self.problem
        found: set[int] = set()
        front = [s for s in p.reads[self.ops[stage]] if s in self.uses]
        for level in range(self.depth):
            new = {p.maker[s] for s in front} - found
            new = {op for op in new if p.deadline[op] > p.position[self.ops[stage]]}
            found |= new
            front = [s for op in new for s in p.reads[op]]
            for s in front if level < self.reach else ():
                self.points.setdefault(s, [])
                self._add_point(s, stage)
        for s in (s for op in found if len(p.makes[op]) > 1 for s in p.makes[op] if s in self.uses):
            self._add_point(s, stage)  # made again beside what the chain is for
        # An op whose input can neither be kept until the stage nor be recomputed there cannot run.
        while True:
            lost = {op for op in found for s in p.reads[op] if self.gap(s, stage) is None and p.maker[s] not in found}
            if not lost:
                return sorted(found, key=self.at.__getitem__)
            found -= lost

    def _add_point(self, s: int, stage: int) -> None:
        points = self.points[s]
        if stage not in points and (s not in self.uses or stage < points[-1]):
            insort(points, stage)

    # ---- the rows

    def present(self, s: int, stage: int) -> list[int]:
        """The variables of which one must be 1 for the storage to be there at the stage."""
        gap = self.gap(s, stage)
        again = self.R.get((stage, self.problem.maker[s]))
        return [*([] if gap is None else [self.K[s, gap]]), *([] if again is None else [again])]

    def logic(self) -> Iterator[tuple[Row, float]]:
        """Rows Σ a·x ≤ b: need, inputs, retention."""
        p = self.problem
        for t in self.stages:
            for s in p.reads[self.ops[t]]:
                if s in self.uses:
                    yield dict.fromkeys(self.present(s, t), -1.0), -1.0
            for i in self.candidates[t]:
                for s in p.reads[i]:
                    yield {**dict.fromkeys(self.present(s, t), -1.0), self.R[t, i]: 1.0}, 0.0
        for s, points in self.points.items():
            for g in range(1, len(points)):
                yield {**dict.fromkeys(self.present(s, points[g - 1]), -1.0), self.K[s, g]: 1.0}, 0.0

    def while_running(self) -> list[_Memory]:
        return [self._while_running(index) for index in range(len(self.ops))]

    def while_recomputing(self) -> list[list[_Memory]]:
        """For each stage, a row for each op that may be recomputed before it."""
        return [[self._while_recomputing(t, i) for i in self.candidates[t]] for t in self.stages]

    def _while_running(self, index: int) -> _Memory:
        p = self.problem
        number = self.ops[index]
        row: Row = {}
        fixed = float(self.during[index])
        for s, points in self.points.items():
            if not self.forward_last[s] < index <= points[-1]:
                continue
            if s in p.reads[number]:
                fixed += p.size[s]
            else:
                later = self._later(s, index)
                if later is not None:
                    row[later] = float(p.size[s])
        # What it overwrites is gone for certain where nothing can keep it; or it is as long as a variable says.
        saved = self._saved(number, "first")
        if saved and number in self.overwritten:
            fixed += saved
        ends = [self._later(s, index) for s in lifetimes.overwrites(p.graph, number) if self._may_end(s, index)]
        if saved and ends:
            fixed -= saved
            if None not in ends:
                fixed -= saved * (len(ends) - 1)
                for later in ends:
                    assert later is not None
                    row[later] = row.get(later, 0.0) + saved
        return _Memory(row, fixed)

    def _later(self, s: int, index: int) -> int | None:
        """The variable that keeps a storage from the op on; None where it is not read again."""
        if s not in self.points or index < self.forward_last[s]:
            return None
        gap = self.gap(s, index)
        if gap is None:
            return None
        gap += self.points[s][gap] == index
        return self.K[s, gap] if gap < len(self.points[s]) else None

    def _may_end(self, s: int, index: int) -> bool:
        """Whether a storage can end with the op, which reads it."""
        if s in self.points:
            return index >= self.forward_last[s]
        return self.overwritten.get(self.ops[index]) == s

    def _saved(self, number: int, way: Way) -> float:
        """The bytes that an op takes less when it overwrites an input."""
        ways = self.problem.costs.workspace_bytes
        if not lifetimes.overwrites(self.problem.graph, number):
            return 0.0
        made = self.problem.size[self.problem.makes[number][0]]
        return max(made + ways[way].get(number, 0) - ways["over"].get(number, 0), 0.0)

    def _while_recomputing(self, t: int, i: int) -> _Memory:
        """What it takes at least: it may overwrite an input that the stage does not read."""
        p = self.problem
        own = {*p.reads[i], *p.makes[i]}
        needed = p.reads[self.ops[t]]
        wanted = {s for s in needed if s in self.uses} - own
        row: Row = {}
        for s in self._across(t):
            if s in own:
                continue
            # It is kept for somebody: for what comes after this, or for a recompute before it that may end it.
            before = self.first_reader[t].get(s, len(self.ops)) < self.at[i]
            if s in needed or t not in self.points[s] or not before:
                row[self.present(s, t)[0]] = float(p.size[s])
                continue
            later = self._later(s, t)
            if later is not None:
                row[later] = float(p.size[s])
                made = self.R.get((t, p.maker[s]))
                if made is not None and self.at[p.maker[s]] > self.at[i]:
                    row[made] = row.get(made, 0.0) - p.size[s]
        for j in self.candidates[t]:
            if self.at[j] < self.at[i] and wanted.intersection(p.makes[j]):
                row[self.R[t, j]] = row.get(self.R[t, j], 0.0) + sum(p.size[s] for s in wanted.intersection(p.makes[j]))
        taken = float(sum(p.size[s] for s in own) + p.workspace.get(i, 0))
        options = [s for s in lifetimes.overwrites(p.graph, i) if s not in needed]
        if options:
            saved = self._saved(i, "again")
            taken -= saved
            later = self._later(options[0], t) if len(options) == 1 else None
            if later is not None:
                row[later] = row.get(later, 0.0) + min(saved, p.size[options[0]])
        row[self.R[t, i]] = row.get(self.R[t, i], 0.0) + taken
        return _Memory(row, self.before[t])

    def _across(self, t: int) -> list[int]:
        """The storages with a gap that spans the stage or ends at it."""
        return [s for s, points in self.points.items() if self.forward_last[s] < t <= points[-1]]

    # ---- from a solution to an order and back

    def order(self, values: Values) -> tuple[int, ...]:
        chosen: dict[int, list[int]] = {}
        for (t, i), v in self.R.items():
            if values[v] > 0.5:
                chosen.setdefault(t, []).append(i)
        found: list[int] = []
        views: list[int] = []  # taken for the op that follows: after its recomputes, of what they make
        for number in self.problem.order:
            if number not in self.at:
                views.append(number)
                continue
            found += [*sorted(chosen.get(self.at[number], ()), key=self.at.__getitem__), *views, number]
            views.clear()
        return (*found, *views)

    def values(self, order: Sequence[int]) -> Values | None:
        """The solution that gives this order; None where it is not of the class."""
        p = self.problem
        found = np.zeros(len(self.cost))
        waiting: list[int] = []
        done: set[int] = set()
        for number in (n for n in order if not p.is_view[n]):
            if number in done:
                waiting.append(number)
                continue
            done.add(number)
            t = self.at[number]
            if any((t, i) not in self.R for i in waiting):
                return None
            found[[self.R[t, i] for i in waiting]] = 1.0
            waiting.clear()
        chosen = {(t, i) for (t, i), v in self.R.items() if found[v]}
        for s, points in self.points.items():
            wanted = {*self.uses.get(s, ()), *(t for t, i in chosen if s in p.reads[i])}
            made = {t for t, i in chosen if i == p.maker[s]}
            for g, point in enumerate(points):
                wants = min((t for t in wanted if t >= point), default=math.inf)
                makes = min((t for t in made if t >= point), default=math.inf)
                kept = wants < makes
                # Made again while it is kept, it would not be there all the while.
                if kept and any((points[g - 1] if g else self.forward_last[s]) < t < point for t in made):
                    return None
                found[self.K[s, g]] = float(kept)
        return found

    def cut(self, values: Values, place: Place) -> _Memory:
        """What a solution holds while op i is recomputed before stage t: a storage counts where the variables that keep
        it there are all 1."""
        p = self.problem
        t, i = self.at[place.before], place.op
        reads, saved = set(p.reads[i]), self._saved(i, "again")
        row: Row = {self.R[t, i]: float(sum(p.size[s] for s in {*reads, *p.makes[i]}) + p.workspace.get(i, 0))}
        fixed = float(self.before[t])

        def count(reasons: Sequence[int], n_bytes: float) -> None:
            nonlocal fixed
            for v in reasons:
                row[v] = row.get(v, 0.0) + n_bytes
            fixed -= n_bytes * (len(reasons) - 1)

        for s in place.alive - {*reads, *p.makes[i]}:
            reasons = self._reasons(values, t, i, s)
            if reasons:
                count(reasons, p.size[s])
        # It overwrites an input unless each of those that it could overwrite is kept.
        options = lifetimes.overwrites(p.graph, i)
        lasting = [self._reasons(values, t, i, s) for s in options if s not in p.reads[self.ops[t]]]
        if saved and options and None in lasting:
            row[self.R[t, i]] -= saved
        elif saved and lasting:
            count([*dict.fromkeys((self.R[t, i], *(v for found in lasting for v in found or ())))], saved)
            row[self.R[t, i]] -= saved
        return _Memory(row, fixed)

    def _reasons(self, values: Values, t: int, i: int, s: int) -> list[int] | None:
        """Variables that are 1 and with which s is there after op i was recomputed before stage t, for the stage, for
        another recompute or for later."""
        p = self.problem
        gap, again = self.gap(s, t), self.R.get((t, p.maker.get(s, -1)))
        there = None
        if gap is not None and self.forward_last[s] < t and values[self.K[s, gap]] > 0.5:
            there = self.K[s, gap]
        elif again is not None and values[again] > 0.5 and self.at[p.maker[s]] < self.at[i]:
            there = again
        if there is None:
            return None
        if s in p.reads[self.ops[t]] or (gap is not None and t not in self.points[s] and there == self.K[s, gap]):
            return [there]
        later = self._later(s, t)
        if later is not None and values[later] > 0.5:
            return [there, later]
        waits = (
            self.R[t, j] for j in self.candidates[t]
            if s in p.reads[j] and self.at[j] > self.at[i] and values[self.R[t, j]] > 0.5
        )  # fmt: skip
        found = next(waits, None)
        return None if found is None else [there, found]


@dataclass(frozen=True)
class Place:
    """A place of a schedule that holds too much: at `op`, run for the first time or again, in the stage of `before`."""

    op: int
    again: bool
    before: int
    held_bytes: int
    alive: frozenset[int]


def places_over(problem: Problem, order: Sequence[int], budget: float) -> list[Place]:
    """The worst place of each stage that holds more than the budget."""
    actions = problem.actions(order)
    moments = iter(problem.moments(order))
    done: set[int] = set()
    alive: set[int] = set()
    places: list[tuple[int, bool, int, frozenset[int]]] = []
    found: list[Place] = []
    for action in actions:
        if isinstance(action, Free):
            alive.discard(action.storage)
            continue
        assert isinstance(action, Compute)
        again = action.op in done
        done.add(action.op)
        alive |= set(lifetimes.new_storages(problem.graph, action.op))
        held = next(moments).during_bytes
        if action.into is not None:
            alive.discard(action.into)
        if held > budget and not problem.is_view[action.op]:
            places.append((action.op, again, held, frozenset(alive)))
        if not again and not problem.is_view[action.op]:
            if places:
                op, was_again, held, there = max(places, key=lambda place: place[2])
                found.append(Place(op, was_again, action.op, held, there))
            places.clear()
    return found


def _common(rows: Sequence[_Memory]) -> Row:
    """The terms that are in most of the rows."""
    count = Counter(term for row in rows for term in row.row.items())
    return {v: a for (v, a), times in count.items() if 2 * times > len(rows)}


def _without(row: Row, shared: Row) -> Row:
    """What is left of a row when the shared terms are in it already."""
    left = {v: row.get(v, 0.0) - shared.get(v, 0.0) for v in {**row, **shared}}
    return {v: a for v, a in left.items() if a}


class _Solver:
    """HiGHS with the rows of a formulation. Without a budget the budget itself is the objective."""

    def __init__(self, form: Formulation, budget: int | None) -> None:
        import highspy

        self.form, self.budget = form, budget
        self._highs: Any = highspy.Highs()
        self._infinity = highspy.kHighsInf
        self._none = highspy.HighsModelStatus.kInfeasible
        self._highs.setOptionValue("output_flag", False)
        # After the decisions: the budget in megabytes, and for each stage what all its recomputes have in common.
        again = form.while_recomputing()
        self._shared = [_common(rows) for rows in again]
        n, m = len(form.cost), len(form.cost) + 1 + len(self._shared)
        cost, low, high = np.zeros(m), np.zeros(m), np.ones(m)
        high[n:] = math.inf
        if budget is None:
            cost[n] = 1.0
        else:
            cost[:n] = form.cost
            low[n] = high[n] = budget / 1e6
        self._highs.addVars(m, low, high)
        columns = np.arange(m, dtype=np.int32)
        self._highs.changeColsCost(m, columns, cost)
        kinds = np.full(m, highspy.HighsVarType.kInteger)
        kinds[n:] = highspy.HighsVarType.kContinuous
        self._highs.changeColsIntegrality(m, columns, kinds)
        self._add(list(form.logic()))
        self.forbid(form.while_running())
        for at, (shared, rows) in enumerate(zip(self._shared, again, strict=True)):
            self._add([({**{v: a / 1e6 for v, a in shared.items()}, n + 1 + at: -1.0}, 0.0)])
            self.forbid([_Memory(_without(row.row, shared), row.fixed_bytes) for row in rows], also=n + 1 + at)

    def forbid(self, rows: Iterable[_Memory], *, also: int | None = None) -> None:
        """also: a variable that is part of each row."""
        limit = {len(self.form.cost): -1.0} | ({} if also is None else {also: 1.0})
        self._add([({v: a / 1e6 for v, a in m.row.items()} | limit, -m.fixed_bytes / 1e6) for m in rows])

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
        shared = [sum(a * values[v] for v, a in row.items()) / 1e6 for row in self._shared]
        solution.col_value = [*values, 0.0 if self.budget is None else self.budget / 1e6, *shared]
        self._highs.setSolution(solution)

    def run(self, time_limit_s: float, relative_gap: float, absolute_gap: float) -> None:
        # HiGHS counts the time of all runs of one model together.
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + max(time_limit_s, 0.0))
        self._highs.setOptionValue("mip_rel_gap", relative_gap)
        self._highs.setOptionValue("mip_abs_gap", absolute_gap)
        self._highs.run()

    @property
    def infeasible(self) -> bool:
        return bool(self._highs.getModelStatus() == self._none)

    @property
    def values(self) -> Values | None:
        if self._highs.getInfo().primal_solution_status != 2:
            return None
        return np.array(self._highs.getSolution().col_value)[: len(self.form.cost)]

    @property
    def bound(self) -> float:
        found: float = self._highs.getInfo().mip_dual_bound
        return found


def optimal(
    problem: Problem,
    budget_bytes: int,
    *,
    start: Sequence[int] | None = None,
    time_limit_s: float = 10.0,
    gap: float = 0.005,
) -> Found:
    """The order of least time within the budget. It stops when the time of the whole step is within `gap` of the bound,
    or when the time is up."""
    end = time.monotonic() + time_limit_s
    depth = _depth(problem)
    while True:
        found = _at_depth(problem, budget_bytes, start, end, gap, depth)
        if not found.infeasible or depth >= min(DEEPEST, len(problem.order)) or time.monotonic() > end:
            return found
        depth *= 2


def _depth(problem: Problem) -> int:
    """Longer chains for smaller problems: the class is larger, and with more points its relaxation is tighter."""
    depth = DEPTH
    while depth < 2 * DEPTH and len(Formulation(problem, depth=depth + 2).cost) <= MOST_VARIABLES:
        depth += 2
    return depth


def _at_depth(problem: Problem, budget: int, start: Sequence[int] | None, end: float, gap: float, depth: int) -> Found:
    best = start if start is not None and problem.peak_bytes(start) <= budget else None
    form = Formulation(problem, depth=depth)
    solver = _Solver(form, budget)
    whole = problem.keep_all_time_s
    extra = math.inf if best is None else problem.costs.time_s(best) - whole
    bound, infeasible = 0.0, False
    while time.monotonic() < end:
        first = None if best is None else form.values(best)
        if first is not None:
            solver.start_from(first)
        solver.run(end - time.monotonic(), 0.0, gap * (whole + max(bound, 0.0)))
        infeasible = solver.infeasible
        values = solver.values
        if math.isfinite(solver.bound):
            bound = max(bound, solver.bound)
        if infeasible or values is None:
            break
        order = form.order(values)
        over = places_over(problem, order, budget)
        took = problem.costs.time_s(order) - whole
        if not over:
            if took < extra:
                best, extra = order, took
            break
        cuts = [form.cut(values, place) for place in over if place.again]
        if not any(cut.breaks(values, budget) for cut in cuts):
            break
        solver.forbid(cuts)
    # A start from outside the class may be better than all of it.
    bound = min(bound, extra)
    return Found(None if best is None else tuple(best), extra, bound, CLASS.format(depth), infeasible)


def smallest(problem: Problem, *, time_limit_s: float = 10.0, depth: int = 2 * DEPTH) -> tuple[int, ...]:
    """An order of the class whose peak is as small as was found in the time."""
    end = time.monotonic() + time_limit_s
    form = Formulation(problem, depth=depth, reach=REACH)
    solver = _Solver(form, None)
    best = problem.order
    while time.monotonic() < end:
        solver.run(end - time.monotonic(), 0.002, 0.0)
        values = solver.values
        if values is None:
            break
        order = form.order(values)
        if problem.peak_bytes(order) < problem.peak_bytes(best):
            best = order
        target = solver.bound * 1e6 * 1.002
        over = places_over(problem, order, target)
        if not over:
            break
        cuts = [form.cut(values, place) for place in over if place.again]
        if not any(cut.breaks(values, target) for cut in cuts):
            break
        solver.forbid(cuts)
    return tuple(best)
