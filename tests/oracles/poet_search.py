"""Exhaustive searches that POET's program is held against, over sets of results in RAM and in storage as bit masks.

`published`: the rules and the account of the published program, played forward stage by stage.
`unbound`:   what is possible at all: run, drop, write and read back anything at any time.

Both keep, for each state, every (cost, time) that no other one of the state beats in both.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from tests.oracles.poet_as_published import Instance, Switches

NEARLY = 1e-9
Label = tuple[float, float]  # what is to be least, and the time that the budget counts


def ones(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def subsets(mask: int) -> Iterator[int]:
    part = mask
    while True:
        yield part
        if not part:
            return
        part = (part - 1) & mask


class Rules:
    """What a run or a transfer costs and what may happen, read off an instance and the switches."""

    def __init__(self, instance: Instance, switches: Switches) -> None:
        self.instance, self.switches = instance, switches
        self.n = len(instance.nodes)
        self.reads = [sum(1 << u for u, v in instance.edges if v == k) for k in range(self.n)]
        self.readers = [sum(1 << v for u, v in instance.edges if u == i) for i in range(self.n)]
        self.room = instance.memory_bytes - instance.parameter_bytes * switches.parameters_count
        self.pageable = sum(1 << i for i, node in enumerate(instance.nodes) if node.paging) * switches.page

    def size(self, mask: int) -> int:
        return sum(self.instance.nodes[i].n_bytes for i in ones(mask))

    def _label(self, time_s: float, energy_j: float | None, counts: bool = True) -> Label:
        counted_s = time_s if counts else 0.0
        if self.switches.objective == "time":
            return counted_s, counted_s
        assert energy_j is not None
        return energy_j, counted_s

    def run(self, t: int, k: int) -> Label | None:
        """Node k in stage t; None if it may not."""
        node, switches = self.instance.nodes[k], self.switches
        if k == t:
            return self._label(node.time_s, node.energy_j)
        if not switches.recompute or (node.sort == "backward" and not switches.backward_again):
            return None
        if node.sort == "input":
            return (0.0, 0.0) if switches.free_inputs else None
        if node.again_until is not None and t >= node.again_until:
            return None
        return self._label(node.time_s, node.energy_j)

    def write(self, i: int) -> Label:
        page = self.instance.nodes[i].paging
        assert page is not None
        return self._label(page.out_s, page.out_j, self.switches.paging_time_counts)

    def read_back(self, i: int) -> Label:
        page = self.instance.nodes[i].paging
        assert page is not None
        return self._label(page.in_s, page.in_j, self.switches.paging_time_counts)

    def in_time(self, label: Label) -> bool:
        return self.instance.time_s is None or label[1] <= self.instance.time_s + NEARLY


def add(*labels: Label) -> Label:
    return sum(label[0] for label in labels), sum(label[1] for label in labels)


def keep(front: set[Label], label: Label) -> bool:
    """Put it in, unless one that is there is as good."""
    if any(old[0] <= label[0] and old[1] <= label[1] for old in front):
        return False
    front -= {old for old in front if label[0] <= old[0] and label[1] <= old[1]}
    front.add(label)
    return True


# ---- by the published rules


def held(rules: Rules, ram: int, runs: int, kept: int) -> int:
    """The most bytes of a stage: a result goes after the last of its readers that runs, and otherwise not at all."""
    now = most = rules.size(ram)
    for k in ones(runs):
        now += rules.size(1 << k)
        most = max(most, now)
        for i in ones(rules.reads[k] & ~kept):
            if not rules.readers[i] & runs >> (k + 1) << (k + 1):
                now -= rules.size(1 << i)
    return most


def stage_runs(rules: Rules, t: int, ram: int) -> Iterator[tuple[int, Label]]:
    """What can run in stage t when this is in RAM."""
    for part in subsets((1 << t) - 1):
        runs = part | 1 << t
        costs = [rules.run(t, k) for k in ones(runs)]
        if all(not rules.reads[k] & ~(ram | runs) for k in ones(runs)):
            allowed = [cost for cost in costs if cost is not None]
            if len(allowed) == len(costs):
                yield runs, add(*allowed)


def published(instance: Instance, switches: Switches) -> float | None:
    """The least that the program can reach; None if nothing is within the budgets."""
    rules = Rules(instance, switches)
    states: dict[tuple[int, int], set[Label]] = {(0, 0): {(0.0, 0.0)}} if rules.room >= 0 else {}
    for t in range(rules.n):
        following: dict[tuple[int, int], set[Label]] = {}
        for (ram, stored), front in states.items():
            for runs, run_cost in stage_runs(rules, t, ram):
                read_back = stored if t + 1 < rules.n else 0
                for kept in subsets(ram | runs | read_back) if t + 1 < rules.n else (0,):
                    if held(rules, ram, runs, kept) > rules.room:
                        continue
                    moved = [rules.read_back(i) for i in ones(kept & ~(ram | runs))]
                    for written in subsets(ram & ~stored & rules.pageable) if t + 1 < rules.n else (0,):
                        cost = add(run_cost, *moved, *(rules.write(i) for i in ones(written)))
                        into = following.setdefault((kept, stored | written), set())
                        for label in front:
                            if rules.in_time(add(label, cost)):
                                keep(into, add(label, cost))
        states = {state: front for state, front in following.items() if front}
    return min((label[0] for front in states.values() for label in front), default=None)


# ---- without any rules


def unbound(instance: Instance, switches: Switches) -> float | None:
    """The least of any schedule whatever, by Dijkstra over (next node, RAM, storage)."""
    rules = Rules(instance, switches)
    fronts: dict[tuple[int, int, int], set[Label]] = {}
    queue: list[tuple[Label, tuple[int, int, int]]] = [((0.0, 0.0), (0, 0, 0))] if rules.room >= 0 else []
    while queue:
        label, state = heapq.heappop(queue)
        if state[0] == rules.n:
            return label[0]
        for cost, after in moves(rules, *state):
            total = add(label, cost)
            fits = rules.size(after[1]) <= rules.room and rules.in_time(total)
            if fits and keep(fronts.setdefault(after, set()), total):
                heapq.heappush(queue, (total, after))
    return None


def moves(rules: Rules, t: int, ram: int, stored: int) -> Iterator[tuple[Label, tuple[int, int, int]]]:
    for k in range(t + 1):
        cost = rules.run(t, k)
        if cost is not None and not rules.reads[k] & ~ram and not ram >> k & 1:
            yield cost, (t + (k == t), ram | 1 << k, stored)
    for i in ones(ram):
        yield (0.0, 0.0), (t, ram & ~(1 << i), stored)
    for i in ones(ram & ~stored & rules.pageable):
        yield rules.write(i), (t, ram, stored | 1 << i)
    for i in ones(stored & ~ram):
        yield rules.read_back(i), (t, ram | 1 << i, stored)
