"""The mixed-integer program of the planner `optimal`: its variables, its rows, and schedules as its solutions.

In:  a problem, and how long chains of recomputes may be.
Out: `Formulation`: rows that every schedule of the class keeps, a solution as an order of ops, an order as a solution.
     The budget is not part of it.

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

`wide` takes all that POET's program has, for graphs of few ops: the step is not parted into forward and backward, every
op is a stage, before it any op may be recomputed that can be, and each stage is a point of whatever may be of use there
or later. What the step leaves behind stays from when it is made.

The rows for recomputes count their own inputs and results, what is kept, and what the stage itself waits for; what
else a chain holds in between is found by playing the schedule through, and cut off by a row of its own
(`Formulation.cut`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgetrain.costs.table import Way
from edgetrain.errors import InternalError
from edgetrain.plan import lifetimes
from edgetrain.plan.budget import Objective
from edgetrain.plan.mip.places import Place
from edgetrain.plan.plan import Compute, Item
from edgetrain.plan.problem import Problem

Row = dict[int, float]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MemoryRow:
    """fixed + Σ bytes · variable ≤ budget"""

    row: Row
    fixed_bytes: float

    def breaks(self, values: Values, budget: float) -> bool:
        held = self.fixed_bytes + float(sum(a * values[v] for v, a in self.row.items()))
        return held > budget + 0.5


class Formulation:
    """The variables and rows for one problem and one depth."""

    def __init__(
        self,
        problem: Problem,
        *,
        depth: int,
        reach: int | None = None,
        recompute: bool = True,
        wide: bool = False,
    ) -> None:
        self.problem, self.depth, self.reach, self.recompute = problem, depth, reach or depth, recompute
        self.wide = wide
        p = problem
        self.ops = [number for number in p.order if not p.is_view[number]]
        self.at = {number: index for index, number in enumerate(self.ops)}
        phases = [p.graph.ops[number].phase for number in self.ops]
        self.first_backward = next((i for i, phase in enumerate(phases) if phase != "forward"), len(phases))
        self.forward_last, self.uses = self._wide_uses() if wide else self._uses()
        self.stages = sorted({use for uses in self.uses.values() for use in uses})
        self.before, self.during = self._fixed()
        kept = (action for action in p.actions(p.order) if isinstance(action, Compute))
        self.overwritten = {action.op: action.into for action in kept if action.into is not None}
        self.points = {s: list(uses) for s, uses in self.uses.items()}
        self.candidates = self._wide_candidates() if wide else {t: self._candidates(t) for t in self.stages}
        # stage → storage → the first recompute there that reads it
        self.first_reader = {
            t: {s: self.at[j] for j in reversed(ops) for s in p.reads[j]} for t, ops in self.candidates.items()
        }
        self.count = 0
        self.K = {(s, g): self._variable() for s, points in self.points.items() for g in range(len(points))}
        self.R = {(t, i): self._variable() for t in self.stages for i in self.candidates[t]}
        self.continuous: list[int] = []

    def _variable(self) -> int:
        self.count += 1
        return self.count - 1

    def extra(self, objective: Objective) -> Row:
        """The seconds, or joules, above those of keeping all."""
        ops = self.problem.costs.ops
        return {v: self._weigh(objective, ops[i].again_s, ops[i].run("again").energy_j) for (_, i), v in self.R.items()}

    def _weigh(self, objective: Objective, time_s: float, energy_j: float | None) -> float:
        if objective == "time":
            return time_s
        if energy_j is None:
            raise InternalError("a plan is sought by energy, and its costs know none")
        return energy_j + time_s * (self.problem.costs.idle_w or 0.0)

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

    def _wide_uses(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        """The same where the step is not parted: where each storage is made, and where it is read. What the step must
        leave behind stays from when it is made."""
        p = self.problem
        kept = lifetimes.results(p.graph)
        maker = {s: index for index, number in enumerate(self.ops) for s in p.makes[number] if s not in kept}
        uses: dict[int, list[int]] = {}
        for index, number in enumerate(self.ops):
            for s in p.reads[number]:
                if s in maker:
                    uses.setdefault(s, []).append(index)
        return maker, uses

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
        candidates: set[int] = set()
        front = [s for s in p.reads[self.ops[stage]] if s in self.uses]
        for level in range(self.depth if self.recompute else 0):
            new = {p.maker[s] for s in front} - candidates
            new = {op for op in new if p.deadline[op] > p.position[self.ops[stage]]}
            candidates |= new
            front = [s for op in new for s in p.reads[op]]
            for s in front if level < self.reach else ():
                self.points.setdefault(s, [])
                self._add_point(s, stage)
        for s in (s for op in candidates if len(p.makes[op]) > 1 for s in p.makes[op] if s in self.uses):
            self._add_point(s, stage)  # recomputed beside what the chain is for
        # An op whose input can neither be kept until the stage nor be recomputed there cannot run.
        while True:
            lost = {
                op
                for op in candidates
                for s in p.reads[op]
                if self.gap(s, stage) is None and p.maker[s] not in candidates
            }
            if not lost:
                return sorted(candidates, key=self.at.__getitem__)
            candidates -= lost

    def _wide_candidates(self) -> dict[int, list[int]]:
        """Before every op, all that may be recomputed there and may be of use then or later; each such stage is a point
        of what they read and make."""
        p = self.problem
        candidates: dict[int, list[int]] = {t: [] for t in range(len(self.ops))}
        useful = {s: uses[-1] for s, uses in self.uses.items()}  # the last stage at which it can be of use
        for index in range(len(self.ops) - 1, -1, -1):
            i = self.ops[index]
            last = max((useful[s] for s in p.makes[i] if s in useful), default=-1)
            stages = [t for t in range(index + 1, last + 1) if p.deadline[i] > p.position[self.ops[t]]]
            if not self.recompute or not stages or any(s not in self.forward_last for s in (*p.reads[i], *p.makes[i])):
                continue
            for t in stages:
                candidates[t].insert(0, i)
            for s in p.reads[i]:
                useful[s] = max(useful[s], stages[-1])
            for s in (*p.reads[i], *(s for s in p.makes[i] if s in useful)):
                self.points[s] = sorted({*self.points[s], *stages})
        self.stages = [t for t in candidates if candidates[t] or t in self.stages]
        return {t: candidates[t] for t in self.stages}

    def _add_point(self, s: int, stage: int) -> None:
        points = self.points[s]
        if stage not in points and (s not in self.uses or stage < points[-1]):
            insort(points, stage)

    # ---- what a program with paging has more of

    def transit(self, index: int) -> Row:
        """The bytes of what is on its way to the store or back while an op runs."""
        return {}

    def brings(self, s: int, stage: int) -> list[int]:
        """The variables that page a storage in for a stage."""
        return []

    def brought(self, order: Sequence[Item]) -> dict[int, set[int]]:
        """Storage → the stages for which it is paged in."""
        return {}

    def limits(self) -> Iterator[tuple[Row, float]]:
        """Rows Σ a·x ≤ b beside those of logic and memory."""
        return iter(())

    def _before(self, index: int, values: Values) -> list[Item]:
        """What happens before the recomputes of a stage."""
        return []

    def _after(self, index: int, values: Values) -> list[Item]:
        """What happens after an op."""
        return []

    # ---- the rows

    def present(self, s: int, stage: int) -> list[int]:
        """The variables of which one must be 1 for the storage to be there at the stage."""
        gap = self.gap(s, stage)
        again = self.R.get((stage, self.problem.maker[s]))
        kept = [] if gap is None else [self.K[s, gap]]
        return [*kept, *([] if again is None else [again]), *self.brings(s, stage)]

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

    def while_running(self) -> list[MemoryRow]:
        return [self._while_running(index) for index in range(len(self.ops))]

    def while_recomputing(self) -> list[list[MemoryRow]]:
        """For each stage, a row for each op that may be recomputed before it."""
        return [[self._while_recomputing(t, i) for i in self.candidates[t]] for t in self.stages]

    def _while_running(self, index: int) -> MemoryRow:
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
        return MemoryRow(_sum(row, self.transit(index)), fixed)

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
        result_bytes = self.problem.size[self.problem.makes[number][0]]
        return max(result_bytes + ways[way].get(number, 0) - ways["over"].get(number, 0), 0.0)

    def _while_recomputing(self, t: int, i: int) -> MemoryRow:
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
                row |= dict.fromkeys((self.present(s, t)[0], *self.brings(s, t)), float(p.size[s]))
                continue
            later = self._later(s, t)
            if later is not None:
                row[later] = float(p.size[s])
                recomputed = self.R.get((t, p.maker[s]))
                if recomputed is not None and self.at[p.maker[s]] > self.at[i]:
                    row[recomputed] = row.get(recomputed, 0.0) - p.size[s]
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
        return MemoryRow(_sum(row, self.transit(t)), self.before[t])

    def _across(self, t: int) -> list[int]:
        """The storages with a gap that spans the stage or ends at it."""
        return [s for s, points in self.points.items() if self.forward_last[s] < t <= points[-1]]

    def between(self, first: int, last: int) -> list[int]:
        """The variables that have to do with the stages from the first to the last."""
        variables = [v for (t, _), v in self.R.items() if first <= t <= last]
        for (s, g), v in self.K.items():
            begin = self.points[s][g - 1] if g else self.forward_last[s]
            if begin <= last and first <= self.points[s][g]:
                variables.append(v)
        return variables

    # ---- from a solution to an order and back

    def order(self, values: Values) -> tuple[Item, ...]:
        chosen: dict[int, list[int]] = {}
        for (t, i), v in self.R.items():
            if values[v] > 0.5:
                chosen.setdefault(t, []).append(i)
        items: list[Item] = []
        views: list[int] = []  # taken for the op that follows: after its recomputes, of what they make
        for number in self.problem.order:
            if number not in self.at:
                views.append(number)
                continue
            index = self.at[number]
            items += [*self._before(index, values), *sorted(chosen.get(index, ()), key=self.at.__getitem__)]
            items += [*views, number, *self._after(index, values)]
            views.clear()
        return (*items, *views)

    def values(self, order: Sequence[Item]) -> Values | None:
        """The solution that gives this order; None where it is not of the class."""
        p = self.problem
        solution = np.zeros(self.count)
        waiting: list[int] = []
        done: set[int] = set()
        for number in (n for n in order if isinstance(n, int) and not p.is_view[n]):
            if number in done:
                waiting.append(number)
                continue
            done.add(number)
            t = self.at[number]
            if any((t, i) not in self.R for i in waiting):
                return None
            solution[[self.R[t, i] for i in waiting]] = 1.0
            waiting.clear()
        chosen = {(t, i) for (t, i), v in self.R.items() if solution[v]}
        brought = self.brought(order)
        for s, points in self.points.items():
            wanted = {*self.uses.get(s, ()), *(t for t, i in chosen if s in p.reads[i])}
            recomputed = {t for t, i in chosen if i == p.maker[s]} | brought.get(s, set())
            for g, point in enumerate(points):
                wants = min((t for t in wanted if t >= point), default=math.inf)
                makes = min((t for t in recomputed if t >= point), default=math.inf)
                kept = wants < makes
                # Recomputed while it is kept, it would not be there all the while.
                if kept and any((points[g - 1] if g else self.forward_last[s]) < t < point for t in recomputed):
                    return None
                solution[self.K[s, g]] = float(kept)
        return solution

    def cut(self, values: Values, place: Place) -> MemoryRow:
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
            count([*dict.fromkeys((self.R[t, i], *(v for reasons_of in lasting for v in reasons_of or ())))], saved)
            row[self.R[t, i]] -= saved
        return MemoryRow(row, fixed)

    def _reasons(self, values: Values, t: int, i: int, s: int) -> list[int] | None:
        """Variables that are 1 and with which s is there after op i was recomputed before stage t, for the stage, for
        another recompute or for later."""
        p = self.problem
        gap = self.gap(s, t)
        there = self._there(values, t, i, s)
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
        reader = next(waits, None)
        return None if reader is None else [there, reader]

    def _there(self, values: Values, t: int, i: int, s: int) -> int | None:
        """The variable by which s is there when op i is recomputed before stage t."""
        gap, again = self.gap(s, t), self.R.get((t, self.problem.maker.get(s, -1)))
        if gap is not None and self.forward_last[s] < t and values[self.K[s, gap]] > 0.5:
            return self.K[s, gap]
        if again is not None and values[again] > 0.5 and self.at[self.problem.maker[s]] < self.at[i]:
            return again
        return None


def _sum(row: Row, more: Row) -> Row:
    return {v: row.get(v, 0.0) + more.get(v, 0.0) for v in {**row, **more}} if more else row
