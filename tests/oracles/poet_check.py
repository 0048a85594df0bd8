"""Is a schedule of POET's program right? An independent and deliberately simple check, as `validate.py` is for plans.

In:  an instance, a solution with a schedule, and the switches under which it was made.
Out: the bytes really held at the most, parameters included; InternalError if the schedule is not legal, is outside a
     budget or is not what the solution says of it.

It shares no code with the program, only its plain data: it plays the schedule through, stage by stage and node by node.

    stage t   write what M_out says, from RAM
              run what R says, in order; after each run drop what no later run of the stage reads and S_ram[t+1] has not
              read back what M_in says, from what was in storage when the stage began
    then      what S_ram[t+1] says is in RAM must be there, and nothing else stays

The bytes are those held at each of these instants. They are never more than what the published account says.
"""

from __future__ import annotations

import math

from edgetrain.errors import InternalError
from tests.oracles.poet_as_published import Instance, Node, Schedule, Solution, Switches


def check(instance: Instance, solution: Solution, switches: Switches | None = None) -> int:
    _require(solution.schedule is not None, "there is no schedule")
    assert solution.schedule is not None
    play = _Play(instance, solution.schedule, switches or Switches())
    play.run()
    play.compare(solution)
    return play.peak_bytes


class _Play:
    def __init__(self, instance: Instance, schedule: Schedule, switches: Switches) -> None:
        self.instance, self.schedule, self.switches = instance, schedule, switches
        self.ram: set[int] = set()
        self.storage: set[int] = set()
        self.run_s = self.paging_s = 0.0
        self.energies_j: list[float | None] = []
        self.peak_bytes = 0
        self.n = len(instance.nodes)

    def run(self) -> None:
        for name in ("R", "S_ram", "S_sd", "M_in", "M_out"):
            matrix = getattr(self.schedule, name)
            square = len(matrix) == self.n and all(len(row) == self.n for row in matrix)
            _require(square, f"{name} is not {self.n} × {self.n}")
        for t in range(self.n):
            self._stage(t)

    def _row(self, name: str, t: int) -> set[int]:
        return {i for i, there in enumerate(getattr(self.schedule, name)[t]) if there} if t < self.n else set()

    def _stage(self, t: int) -> None:
        ram, storage = self._row("S_ram", t), self._row("S_sd", t)
        _require(ram <= self.ram, f"stage {t} begins with {sorted(ram - self.ram)} in RAM, which are not there")
        _require(storage <= self.storage, f"stage {t}: {sorted(storage - self.storage)} were never written")
        self.ram, self.storage = ram, set(storage)
        self._hold(t)
        for i in sorted(self._row("M_out", t)):
            self._write(t, i)
        runs = self._row("R", t)
        _require(t in runs and max(runs) == t, f"stage {t} does not end with node {t}")
        kept = self._row("S_ram", t + 1)
        for k in sorted(runs):
            self._compute(t, k)
            later = {u for u, v in self.instance.edges if v in runs and v > k}
            self.ram &= later | kept
        for i in sorted(self._row("M_in", t)):
            self._read_back(t, i, storage)

    def _node(self, i: int) -> Node:
        return self.instance.nodes[i]

    def _compute(self, t: int, k: int) -> None:
        node = self._node(k)
        missing = [u for u, v in self.instance.edges if v == k and u not in self.ram]
        _require(not missing, f"stage {t}: node {k} reads {missing}, which are not in RAM")
        if k < t:
            self._may_run_again(t, k)
        if k == t or node.sort != "input":
            self.run_s += node.time_s
            self.energies_j.append(node.energy_j)
        self.ram.add(k)
        self._hold(t)

    def _may_run_again(self, t: int, k: int) -> None:
        node = self._node(k)
        _require(self.switches.recompute, f"stage {t}: node {k} runs again, and nothing may")
        if node.sort == "input":
            _require(self.switches.free_inputs, f"stage {t}: the input {k} is had again")
            return
        _require(node.sort != "backward" or self.switches.backward_again, f"stage {t}: gradient {k} runs again")
        _require(node.again_until is None or t < node.again_until, f"stage {t}: node {k} runs again too late")

    def _write(self, t: int, i: int) -> None:
        page = self._node(i).paging
        _require(self.switches.page and page is not None, f"stage {t}: {i} is written, but may not be paged")
        assert page is not None
        _require(i in self.ram, f"stage {t}: {i} is written, but is not in RAM")
        self.storage.add(i)
        self.paging_s += page.out_s
        self.energies_j.append(page.out_j)

    def _read_back(self, t: int, i: int, stored: set[int]) -> None:
        page = self._node(i).paging
        _require(self.switches.page and page is not None, f"stage {t}: {i} is read back, but may not be paged")
        assert page is not None
        _require(i in stored, f"stage {t}: {i} is read back, but was not in storage when the stage began")
        self.ram.add(i)
        self._hold(t)
        self.paging_s += page.in_s
        self.energies_j.append(page.in_j)

    def _hold(self, t: int) -> None:
        held_bytes = sum(self._node(i).n_bytes for i in self.ram)
        parameter_bytes = self.instance.parameter_bytes
        self.peak_bytes = max(self.peak_bytes, held_bytes + parameter_bytes)
        total_bytes = held_bytes + (parameter_bytes if self.switches.parameters_count else 0)
        most = self.instance.memory_bytes
        _require(total_bytes <= most, f"stage {t}: {total_bytes} bytes are held, the budget is {most}")

    def compare(self, solution: Solution) -> None:
        """With what the solution says of itself, and with the time budget."""
        counted_s = self.run_s + (self.paging_s if self.switches.paging_time_counts else 0.0)
        most_s = self.instance.time_s
        _require(most_s is None or counted_s <= most_s * (1 + 1e-6), f"it takes {counted_s} s, the budget is {most_s}")
        time_s, energy_j = self.run_s + self.paging_s, self._energy_j()
        _require(_same(solution.time_s, time_s), f"it says {solution.time_s} s; it is {time_s}")
        _require(_same(solution.energy_j, energy_j), f"it says {solution.energy_j} J; it is {energy_j}")
        said_bytes = solution.peak_bytes or 0
        _require(self.peak_bytes <= said_bytes, f"it says {said_bytes} bytes; it holds {self.peak_bytes}")
        objective = counted_s if self.switches.objective == "time" else energy_j
        least = objective is not None and solution.bound <= objective * (1 + 1e-6) + 1e-12
        _require(least, f"its bound {solution.bound} is above its value {objective}")

    def _energy_j(self) -> float | None:
        known = [energy_j for energy_j in self.energies_j if energy_j is not None]
        return sum(known) if len(known) == len(self.energies_j) else None


def _same(said: float | None, found: float | None) -> bool:
    return said is found if said is None or found is None else math.isclose(said, found, abs_tol=1e-12)


def _require(holds: object, what: str) -> None:
    if not holds:
        raise InternalError(f"the schedule of POET's program is not legal: {what}")
