"""An oracle for tests: POET's mixed-integer program as published (Patil et al. 2022), for graphs of few ops.

In:  `Instance`: for each node its time, energy and bytes, what paging its result costs, the edges, and the budgets.
     `Switches`: what counts and what is allowed, each by name. The defaults are right; the released planner's are not.
Out: `Solution`: the schedule of least energy (or time) within the budgets, as five matrices, and a proven bound.

Stage t ends with node t running for the first time. i < t; what is not here is 0:

    R[t,i]      node i runs in stage t, in the order of the nodes      R[t,t] = 1
    S_ram[t,i]  its result is in RAM when stage t begins
    S_sd[t,i]   its result is in storage when stage t begins
    M_out[t,i]  it is written to storage in stage t                    M_out ≤ S_ram
    M_in[t,i]   it is read back in stage t                             M_in ≤ S_sd
    Free[t,i,k] it goes after its reader k has run in stage t: k runs, no later reader does, and stage t + 1 begins
                without it:  h = 1 − R[t,k] + S_ram[t+1,i] + Σ R[t,j > k];  1 − Free ≤ h ≤ κ·(1 − Free)
    U[t,k]      bytes in RAM while node k of stage t runs:  U[t,0] = m·R[t,0] + Σ m·S_ram[t],
                U[t,k+1] = U[t,k] + m·R[t,k+1] − Σ m·Free[t,·,k];  U ≤ budget

    inputs      R[t,v] ≤ R[t,u] + S_ram[t,u]                           for an edge u → v
    retention   S_ram[t+1,i] ≤ S_ram[t,i] + R[t,i] + M_in[t,i],  S_sd[t+1,i] ≤ S_sd[t,i] + M_out[t,i]
    time        Σ R·time (+ M·time) ≤ budget
    least       Σ R·energy + M_in·energy + M_out·energy

One stage as it can be played, and as `poet_check.py` plays it:

    │ write M_out │ run R in order, dropping what is done with │ drop what S_ram[t+1] has not │ read M_in │ stage t + 1

Played so, one transfer at a time and none while a node runs, U is never less than the RAM really held. A transfer under
way while stage t computes is not in it: the bytes of M_in[t,i] count from U[t+1,0] on. U is more than what is held, and
the optimum can be worse than need be, where
  - something is read back: it is in RAM from the first run of stage t + 1, whoever reads it, recomputes before it too;
  - something is written: not before the stage after it was made, and its bytes go within that stage only if a reader of
    it runs there;
  - a result that is in RAM is computed again: it counts twice;
  - a node would have to run twice in one stage, or out of order: such schedules are not in the class.
Nothing has to be there at the end: what no node reads is gone when its stage ends, so U is too little for a step that
must leave gradients behind (`instance` adds a last node that reads them). The published program knows no limit of
storage, no workspace of kernels, none that overwrites its input, and a second run costs what the first one does.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from edgetrain.costs.table import Costs
from edgetrain.errors import InternalError, UserError
from edgetrain.plan import lifetimes
from edgetrain.plan.problem import Problem

MOST_NODES = 40
LEVELS = 2**22  # the solver tells apart sizes that differ by one in this many
Matrix = tuple[tuple[bool, ...], ...]  # [stage][node]
Row = dict[int, float]


@dataclass(frozen=True, slots=True)
class Paging:
    """What it costs to write the result of a node to storage and to read it back. Energies are None where unknown."""

    out_s: float
    in_s: float
    out_j: float | None = None
    in_j: float | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """
    n_bytes:     of its result.
    energy_j:    None where nothing tells.
    paging:      None where its result cannot be paged.
    sort:        an input comes from outside, once: in truth it cannot run again.
    again_until: the stage from which it may not run again; None if it always may.
    """

    time_s: float
    n_bytes: int
    energy_j: float | None = None
    paging: Paging | None = None
    sort: Literal["input", "forward", "backward"] = "forward"
    again_until: int | None = None


@dataclass(frozen=True)
class Instance:
    """
    nodes: in topological order.
    edges: (u, v): node v reads the result of node u.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    parameter_bytes: int
    memory_bytes: int
    time_s: float | None = None

    def __post_init__(self) -> None:
        if not self.nodes:
            raise UserError("there is nothing to schedule", expected="at least one node")
        if self.time_s is not None and not self.time_s >= 0:
            raise UserError("a time budget is not negative", received=f"{self.time_s}")
        for u, v in self.edges:
            if not 0 <= u < v < len(self.nodes):
                raise UserError("an edge leads from a node to a later one", received=f"{u} → {v}")
        if len(set(self.edges)) < len(self.edges):
            raise UserError("an edge is there twice")
        for number, node in enumerate(self.nodes):
            page = node.paging or Paging(0.0, 0.0)
            costs = (node.time_s, node.energy_j, page.out_s, page.in_s, page.out_j, page.in_j)
            if node.n_bytes < 0 or any(c is not None and not 0 <= c < math.inf for c in costs):
                raise UserError("bytes, times and energies are finite and not negative", received=f"{number}: {node}")


@dataclass(frozen=True, kw_only=True)
class Switches:
    """
    parameters_count:   the bytes of parameters are inside the memory budget. The released planner leaves them out.
    paging_time_counts: transfers are inside the time budget. The released planner leaves them out.
    free_inputs:        an input can be had again for nothing, as the released planner has it.
    backward_again:     gradients may be recomputed, as published.
    recompute, page:    False fixes to 0 all R[t,i] with i < t, all S_sd, M_in and M_out.
    """

    parameters_count: bool = True
    paging_time_counts: bool = True
    free_inputs: bool = False
    backward_again: bool = True
    recompute: bool = True
    page: bool = True
    objective: Literal["energy", "time"] = "energy"


@dataclass(frozen=True)
class Schedule:
    R: Matrix
    S_ram: Matrix
    S_sd: Matrix
    M_in: Matrix
    M_out: Matrix


@dataclass(frozen=True)
class Solution:
    """What is said of the schedule is the truth whatever the switches: `time_s` with all transfers, one after another,
    `peak_bytes` with the parameters, by the published account.

    status: what is not optimal may still hold a schedule. Sizes are too uneven if rounding them to one part in `LEVELS`
            of the largest decides what fits.
    bound:  no schedule of the class has a smaller objective, in joules or seconds.
    """

    status: Literal["optimal", "infeasible", "time is up", "sizes too uneven"]
    bound: float
    schedule: Schedule | None = None
    energy_j: float | None = None
    time_s: float | None = None
    peak_bytes: int | None = None


def solve(instance: Instance, switches: Switches | None = None, *, time_limit_s: float = 60.0) -> Solution:
    switches = switches or Switches()
    if len(instance.nodes) > MOST_NODES:
        raise UserError(
            "the oracle is for small graphs",
            expected=f"at most {MOST_NODES} nodes", received=f"{len(instance.nodes)} nodes",
        )  # fmt: skip
    energies = [e for n in instance.nodes for e in (n.energy_j, *((n.paging.out_j, n.paging.in_j) if n.paging else ()))]
    if switches.objective == "energy" and None in energies:
        raise UserError("the energy of a node or a transfer is not known", next_step='objective="time"')
    room_bytes = instance.memory_bytes - (instance.parameter_bytes if switches.parameters_count else 0)
    if room_bytes < 0:
        return Solution("infeasible", math.inf)
    return _solve(instance, switches, room_bytes, time_limit_s)


def _solve(instance: Instance, switches: Switches, room_bytes: int, time_limit_s: float) -> Solution:
    """Sizes go to the solver as whole units. Where a unit that divides them all would be less than 1 / LEVELS of the
    largest, they are rounded down, which proves a bound; if that lets too much in, also up, which gives a schedule."""
    sizes = [node.n_bytes for node in instance.nodes]
    whole = max(1, math.gcd(*sizes))
    unit = max(whole, -(-max(sizes) // LEVELS))
    down = _Program(instance, switches, [size // unit for size in sizes], room_bytes // unit).solve(time_limit_s)
    if down.peak_bytes is None or down.peak_bytes - instance.parameter_bytes <= room_bytes:
        return down
    if unit == whole:
        raise InternalError(f"a schedule of POET's program holds {down.peak_bytes} bytes, which is above the budget")
    up = _Program(instance, switches, [-(-size // unit) for size in sizes], room_bytes // unit).solve(time_limit_s)
    if up.status == down.status == "optimal" and up.bound <= down.bound * (1 + 1e-9):
        return replace(up, bound=down.bound)
    return replace(up, bound=down.bound, status="time is up" if up.status == "time is up" else "sizes too uneven")


class _Program:
    """The columns are numbered as they come. One that the triangular structure or a switch makes 0 is not there."""

    def __init__(self, instance: Instance, switches: Switches, sizes: Sequence[int], room: int) -> None:
        """Sizes and the room that there is for them are whole numbers of some unit."""
        self.instance, self.switches, self.nodes = instance, switches, instance.nodes
        # The solver's tolerances are absolute, so it sees sizes of at most 1. Half a unit more room lets nothing
        # more in, and the solver's rounding then keeps nothing out.
        largest = max([*sizes, 1])
        self.sizes, self.room = [size / largest for size in sizes], (room + 0.5) / largest
        self.T = len(instance.nodes)
        self.readers: list[list[int]] = [[] for _ in self.nodes]
        self.read_by: list[list[int]] = [[] for _ in self.nodes]
        for u, v in sorted(instance.edges):
            self.readers[u].append(v)
            self.read_by[v].append(u)
        self.cost: list[float] = []
        self.time_s: list[float] = []
        self.bounds: list[tuple[float, float]] = []
        self.whole: list[int] = []
        self.rows: list[tuple[Row, float]] = []  # Σ a·x ≤ b
        self.equal: list[tuple[Row, float]] = []  # Σ a·x = b
        self._columns()
        self._correctness()
        self._memory()
        if instance.time_s is not None and instance.time_s < math.inf:
            unit_s = max([*self.time_s, 1e-300])
            self._at_most({c: s / unit_s for c, s in enumerate(self.time_s) if s}, instance.time_s / unit_s)

    # ---- columns

    def _binary(self, time_s: float = 0.0, energy_j: float | None = 0.0, least: int = 0) -> int:
        self.cost.append(time_s if self.switches.objective == "time" else energy_j or 0.0)
        self.time_s.append(time_s)
        self.bounds.append((least, 1.0))
        self.whole.append(len(self.cost) - 1)
        return self.whole[-1]

    def _columns(self) -> None:
        self.R: dict[tuple[int, int], int] = {}
        self.S_ram: dict[tuple[int, int], int] = {}
        self.S_sd: dict[tuple[int, int], int] = {}
        self.M_in: dict[tuple[int, int], int] = {}
        self.M_out: dict[tuple[int, int], int] = {}
        for t in range(self.T):
            for i, node in enumerate(self.nodes[:t]):
                if self._may_run_again(t, i):
                    free = node.sort == "input"
                    self.R[t, i] = self._binary() if free else self._binary(node.time_s, node.energy_j)
                self.S_ram[t, i] = self._binary()
                if node.paging is not None and self.switches.page:
                    self._paging_columns(t, i, node.paging)
            self.R[t, t] = self._binary(self.nodes[t].time_s, self.nodes[t].energy_j, least=1)

    def _paging_columns(self, t: int, i: int, page: Paging) -> None:
        counts = self.switches.paging_time_counts
        self.S_sd[t, i] = self._binary()
        if t + 1 < self.T:  # after the last stage there is nothing to page for
            self.M_in[t, i] = self._binary(page.in_s * counts, page.in_j)
            self.M_out[t, i] = self._binary(page.out_s * counts, page.out_j)

    def _may_run_again(self, t: int, i: int) -> bool:
        node, switches = self.nodes[i], self.switches
        if node.sort == "input":
            return switches.recompute and switches.free_inputs
        in_time = node.again_until is None or t < node.again_until
        return switches.recompute and in_time and (node.sort != "backward" or switches.backward_again)

    # ---- rows

    def _at_most(self, row: Row, limit: float) -> None:
        self.rows.append((row, limit))

    @staticmethod
    def _sum(*columns: int | None) -> Row:
        """Minus their sum, without those that are not there."""
        return {column: -1.0 for column in columns if column is not None}

    def _correctness(self) -> None:
        R, S_ram, S_sd, M_in, M_out = self.R, self.S_ram, self.S_sd, self.M_in, self.M_out
        for (t, v), run in R.items():
            for u in self.read_by[v]:
                self._at_most({run: 1.0, **self._sum(R.get((t, u)), S_ram[t, u] if u < t else None)}, 0.0)
        for (t, i), kept in S_ram.items():
            before = (t - 1, i)
            self._at_most({kept: 1.0, **self._sum(S_ram.get(before), R.get(before), M_in.get(before))}, 0.0)
        for (t, i), kept in S_sd.items():
            self._at_most({kept: 1.0, **self._sum(S_sd.get((t - 1, i)), M_out.get((t - 1, i)))}, 0.0)
        for at, moved in M_in.items():
            self._at_most({moved: 1.0, S_sd[at]: -1.0}, 0.0)
        for at, moved in M_out.items():
            self._at_most({moved: 1.0, S_ram[at]: -1.0}, 0.0)

    def _memory(self) -> None:
        for t in range(self.T):
            last: int | None = None
            for k in range(t + 1):
                used = self._bytes_column()
                row: Row = {used: -1.0}
                if (t, k) in self.R:
                    row[self.R[t, k]] = self.sizes[k]
                if last is None:
                    row |= {self.S_ram[t, i]: self.sizes[i] for i in range(t)}
                else:
                    row[last] = 1.0
                    row |= self._freed(t, k - 1)
                self.equal.append((row, 0.0))
                last = used

    def _freed(self, t: int, k: int) -> Row:
        """Minus what goes after node k; nothing if it cannot run."""
        if (t, k) not in self.R:
            return {}
        return {self._free(t, i, k): -self.sizes[i] for i in self.read_by[k]}

    def _bytes_column(self) -> int:
        self.cost.append(0.0)
        self.time_s.append(0.0)
        self.bounds.append((0.0, self.room))
        return len(self.cost) - 1

    def _free(self, t: int, i: int, k: int) -> int:
        """The column Free[t,i,k], with 1 − Free ≤ h ≤ κ(1 − Free)."""
        free = self._binary()
        later = [self.R[t, j] for j in self.readers[i] if j > k and (t, j) in self.R]
        hazards: Row = {self.R[t, k]: -1.0, **dict.fromkeys(later, 1.0)}
        if t + 1 < self.T:
            hazards[self.S_ram[t + 1, i]] = 1.0
        most = float(len(hazards))
        self._at_most({free: -1.0, **{column: -a for column, a in hazards.items()}}, 0.0)
        self._at_most({free: most, **hazards}, most - 1.0)
        return free

    # ---- the solution

    def solve(self, time_limit_s: float) -> Solution:
        import highspy

        solver, scale = self._load(time_limit_s)
        solver.run()
        info, status = solver.getInfo(), solver.getModelStatus()
        # No cost is negative, so the program is never unbounded.
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return Solution("infeasible", math.inf)
        bound = max(0.0, info.mip_dual_bound * scale)
        if info.primal_solution_status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
            return Solution("time is up", bound)
        found = self._tidy([value > 0.5 for value in solver.getSolution().col_value])
        optimal = status == highspy.HighsModelStatus.kOptimal
        return self._account("optimal" if optimal else "time is up", bound, found)

    def _load(self, time_limit_s: float) -> tuple[Any, float]:
        import highspy

        solver: Any = highspy.Highs()
        for option, value in (
            ("output_flag", False), ("time_limit", time_limit_s), ("mip_rel_gap", 0.0), ("mip_abs_gap", 1e-9),
            ("threads", 1), ("mip_feasibility_tolerance", 1e-9), ("primal_feasibility_tolerance", 1e-9),
        ):  # fmt: skip
            solver.setOptionValue(option, value)
        n = len(self.cost)
        scale = max(self.cost) or 1.0
        least, most = (np.array(ends) for ends in zip(*self.bounds, strict=True))
        solver.addVars(n, least, most)
        solver.changeColsCost(n, np.arange(n, dtype=np.int32), np.array(self.cost) / scale)
        whole = np.array(self.whole, dtype=np.int32)
        solver.changeColsIntegrality(len(whole), whole, np.full(len(whole), highspy.HighsVarType.kInteger))
        _add_rows(solver, self.rows, equal=False)
        _add_rows(solver, self.equal, equal=True)
        return solver, scale

    def _tidy(self, values: Sequence[bool]) -> Schedule:
        """The schedule without what it holds or moves for nothing, which costs nothing or is not yet optimal."""
        R, S_ram, S_sd, M_in, M_out = (
            {at: values[column] for at, column in columns.items()}
            for columns in (self.R, self.S_ram, self.S_sd, self.M_in, self.M_out)
        )
        for t, i in sorted(S_ram, reverse=True):
            at, after = (t, i), (t + 1, i)
            made = R.get(at, False)
            if at in M_in:
                M_in[at] = S_ram[after] and not (S_ram[at] or made)
                M_out[at] = M_out[at] and S_sd[after] and not S_sd[at]
                S_sd[at] = S_sd[at] and (M_in[at] or (S_sd[after] and not M_out[at]))
            elif at in S_sd:
                S_sd[at] = False
            read = not made and any(R.get((t, j), False) for j in self.readers[i])
            kept = S_ram.get(after, False) and not (made or M_in.get(at, False))
            S_ram[at] = S_ram[at] and (read or kept or M_out.get(at, False))
        return Schedule(*(self._matrix(entries) for entries in (R, S_ram, S_sd, M_in, M_out)))

    def _matrix(self, entries: dict[tuple[int, int], bool]) -> Matrix:
        return tuple(tuple(entries.get((t, i), False) for i in range(self.T)) for t in range(self.T))

    def _account(self, status: Literal["optimal", "time is up"], bound: float, found: Schedule) -> Solution:
        paid = [cost for t in range(self.T) for i in range(t + 1) for cost in self._paid(found, t, i)]
        known_j = [energy_j for _, energy_j in paid if energy_j is not None]
        energy_j = math.fsum(known_j) if len(known_j) == len(paid) else None
        time_s = math.fsum(time_s for time_s, _ in paid)
        return Solution(status, bound, found, energy_j, time_s, self._peak_bytes(found))

    def _paid(self, found: Schedule, t: int, i: int) -> Iterator[tuple[float, float | None]]:
        """Time and energy of what node i does in stage t."""
        node = self.nodes[i]
        if found.R[t][i] and (t == i or node.sort != "input"):
            yield node.time_s, node.energy_j
        if node.paging is not None and found.M_in[t][i]:
            yield node.paging.in_s, node.paging.in_j
        if node.paging is not None and found.M_out[t][i]:
            yield node.paging.out_s, node.paging.out_j

    def _peak_bytes(self, found: Schedule) -> int:
        """The parameters and the most that U is, in whole bytes."""
        peak = 0
        for t in range(self.T):
            runs = found.R[t]
            kept = found.S_ram[t + 1] if t + 1 < self.T else (False,) * self.T
            held = sum(node.n_bytes for node, there in zip(self.nodes, found.S_ram[t], strict=True) if there)
            for k in range(t + 1):
                held += self.nodes[k].n_bytes * runs[k]
                peak = max(peak, held)
                for i in self.read_by[k]:
                    if runs[k] and not kept[i] and not any(runs[j] for j in self.readers[i] if j > k):
                        held -= self.nodes[i].n_bytes
        return self.instance.parameter_bytes + peak


def _add_rows(solver: Any, rows: Sequence[tuple[Row, float]], *, equal: bool) -> None:
    starts, columns, values = [], [], []  # type: tuple[list[int], list[int], list[float]]
    for row, _ in rows:
        starts.append(len(columns))
        columns += row
        values += row.values()
    most = np.array([limit for _, limit in rows], dtype=np.float64)
    least = most if equal else np.full(len(rows), -np.inf)
    solver.addRows(
        len(rows), least, most, len(columns),
        np.array(starts, dtype=np.int32), np.array(columns, dtype=np.int32), np.array(values, dtype=np.float64),
    )  # fmt: skip


# ---- from a captured graph


def instance(problem: Problem, *, memory_bytes: int, time_s: float | None = None) -> Instance:
    """Each op but the views is a node, in the order of the problem; its bytes are those of all storages that it makes,
    which come and go together. Lasting tensors are the parameters. Energies are those above what the device takes when
    it idles.

    What the step must leave behind is read by a last node that costs nothing. A result that another op writes in place
    is not paged: a copy in storage would not be changed with it. Backward and update ops cannot run twice here.
    """
    places = [place for place, op in enumerate(problem.order) if not problem.is_view[op]]
    ops = [problem.order[place] for place in places]
    stage = {op: t for t, op in enumerate(ops)}
    nodes = [_node(problem, op, bisect_left(places, problem.deadline[op])) for op in ops]
    edges = {(stage[problem.maker[s]], t) for t, op in enumerate(ops) for s in problem.reads[op]}
    kept = {stage[problem.maker[s]] for s in lifetimes.results(problem.graph) if s in problem.maker}
    if kept:
        nodes.append(Node(0.0, 0, 0.0, sort="backward", again_until=0))
        edges |= {(i, len(ops)) for i in kept}
    graph = problem.graph
    parameter_bytes = lifetimes.persistent_bytes(graph) + lifetimes.random_state_bytes(graph, problem.updates)
    return Instance(tuple(nodes), tuple(sorted(edges)), parameter_bytes, memory_bytes, time_s)


def _node(problem: Problem, op: int, again_until: int) -> Node:
    run, makes = problem.costs.ops[op].run("first"), problem.makes[op]
    n_bytes = sum(problem.size[s] for s in makes)
    fixed = any(s in other.writes for other in problem.graph.ops for s in makes)
    paging = _paging(problem.costs, n_bytes) if n_bytes and not fixed else None
    if problem.graph.ops[op].phase != "forward":
        return Node(run.time_s, n_bytes, run.energy_j, paging, "backward", again_until=0)
    return Node(run.time_s, n_bytes, run.energy_j, paging, "forward", again_until)


def _paging(costs: Costs, n_bytes: int) -> Paging | None:
    store = costs.store
    if store is None:
        return None
    out_s, in_s = store.out_s(n_bytes), store.in_s(n_bytes)
    power_w = store.power_w
    return Paging(out_s, in_s, *((None, None) if power_w is None else (out_s * power_w, in_s * power_w)))
