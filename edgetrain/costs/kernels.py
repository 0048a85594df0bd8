"""Which kernel runs each op, where its entry has several: the fastest that keeps what is promised of the numbers.

In:  the costs of every kernel that takes the op's tensors. Out: the same costs, with the fastest kernels as those that
     run; a plan that is made with them names them (`Plan.kernels`), and the compiled step runs them.

Kernels that give the same bits may change from one way to run an op to another. One that rounds otherwise runs an op in
each way or in none: what is recomputed is then what it was.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from edgetrain.costs.table import Costs, Kernels, OpCost, Run, Way
from edgetrain.graph.ir import Graph
from edgetrain.ops.entry import Entry, entry_of


def fastest(graph: Graph, costs: Costs, exact: Literal["bitwise", "rounding", "no"]) -> Costs:
    """exact: the promise of the plan; "bitwise" takes kernels alone that give the bits of the first one."""
    if not any(cost.others for cost in costs.ops):
        return costs
    ops = (
        _fastest(entry_of(op.kind), cost, bitwise=exact == "bitwise")
        for op, cost in zip(graph.ops, costs.ops, strict=True)
    )
    return replace(costs, ops=tuple(ops))


def _fastest(entry: Entry, cost: OpCost, *, bitwise: bool) -> OpCost:
    rounding = {kernel.name for kernel in entry.kernels if kernel.exact == "rounding"}
    runs = {way: cost.runs(way) for way in cost.ways}
    best: dict[Way, Run] = {
        way: min((run for run in each if run.kernel not in rounding), key=lambda run: run.time_s)
        for way, each in runs.items()
    }
    for name in sorted(rounding) if not bitwise else ():
        alone = {way: run for way, each in runs.items() for run in each if run.kernel == name}
        if alone.keys() == runs.keys() and alone["first"].time_s < best["first"].time_s:
            best = alone
    return cost.running(best)


def running(costs: Costs, kernels: Kernels) -> Costs:
    """The costs with these kernels as those that run."""
    if not kernels:
        return costs
    ops = []
    for number, cost in enumerate(costs.ops):
        names = {way: kernels.get(way, {}).get(number, "") for way in cost.ways}
        chosen = {way: next((r for r in cost.runs(way) if r.kernel == name), None) for way, name in names.items()}
        ops.append(cost.running({way: run for way, run in chosen.items() if run is not None}))
    return replace(costs, ops=tuple(ops))
