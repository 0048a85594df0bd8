"""What can be said of a budget before any op was timed: is it impossible, and what would work?

In:  a graph, a budget in bytes. Out: nothing where a plan may keep it; or what `refusal.py` says, in a second.

Measuring a step takes many times as long as running it. A graph's bytes alone prove most of what is impossible; for the
rest the workspace of a kernel counts. It is measured for the hungriest ops alone, the others are taken to need no
more than `_workspace` allows:

    op         bytes read and made    + workspace
    a          ████████████████       ▒▒▒▒▒▒▒▒       measured: what a takes is a bound on every plan
    b          ███████████            ░░░░░░░░       at most as much: b need not be run
    c          ██████                 ░░░░░░

A plan with these workspaces keeps its budget with the measured ones too, if they are smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from edgetrain.costs import calls
from edgetrain.costs.measured import ROUNDS, is_known, measure_events, without_a_trace
from edgetrain.costs.table import Costs, OpCost, Run, Store, Way
from edgetrain.costs.work import Work, work
from edgetrain.errors import UserError
from edgetrain.graph.ir import Graph
from edgetrain.native import arena
from edgetrain.plan.plan import Updates
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.refusal import least_bytes, op_bytes

FLOPS_S, BYTES_S = 5e9, 1e9  # a slow core, to guess how long something takes
QUICK_S = 0.5  # where all ops are measured in less, that is done before anything is said
HUNGRIEST_S = 0.6  # for measuring the hungriest ops
_SMALL_BYTES = 16_384
_FLOAT_S = (torch.float32, torch.bfloat16, torch.float16)


def takes_long(graph: Graph, *, use_cache: bool = True) -> bool:
    """Whether measuring what the ops cost is worth to be put off."""
    runs = 2 * (ROUNDS + 2)  # most ops can be run in two ways
    return runs * sum(_guessed_s(work(graph, op)) for op in graph.ops) > QUICK_S and not (use_cache and is_known(graph))


def _guessed_s(of: Work) -> float:
    return of.flops / FLOPS_S + of.moved_bytes / BYTES_S


def unmeasured(graph: Graph, known: dict[int, dict[Way, Run]] | None = None, store: Store | None = None) -> Costs:
    """Costs that no op exceeds in bytes; times are guessed. known: what was measured of some ops."""
    ops = []
    for number, op in enumerate(graph.ops):
        of = work(graph, op)
        workspace, made = _workspace(graph, number, of), calls.made_bytes(graph, op)
        run = Run(_guessed_s(of), (workspace, *made, -1) if workspace else made)
        ways = {way: replace(found, time_s=run.time_s) for way, found in (known or {}).get(number, {}).items()}
        ops.append(OpCost({"first": run} | ways))
    return Costs(graph.key, "modelled", tuple(ops), store=store)


def _workspace(graph: Graph, number: int, of: Work) -> int:
    """More than any kernel was seen to take: convolutions reorder what they read and make, and those that oneDNN does
    not run lay out their columns; others copy what they touch at most."""
    op = graph.ops[number]
    if op.view or of.kind == "nothing":
        return 0
    touched = sum(graph.storages[s].n_bytes for s in {graph.tensors[t].storage for t in (*op.reads, *op.creates)})
    if of.kind not in ("conv", "depthwise"):
        return touched + _SMALL_BYTES
    types = {getattr(torch, graph.tensors[t].dtype) for t in op.reads}
    fast = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled and types.issubset(_FLOAT_S)
    return 2 * touched + (0 if fast else of.columns_bytes) + _SMALL_BYTES


def by_bytes(graph: Graph, updates: Updates) -> Problem:
    """The problem without workspaces and times: what holds for it as a bound holds for the real one."""
    return problem(graph, Costs(graph.key, "modelled", tuple(OpCost({"first": Run(0.0)}) for _ in graph.ops)), updates)


def looked_at(
    graph: Graph, updates: Updates, *, until: float, may_run: Callable[[int], bool] = lambda n_bytes: True
) -> tuple[Problem, int]:
    """The problem with workspaces that no op exceeds, and a proven bound on every plan.

    may_run: whether an op that takes so many bytes by its arguments and results may be run here.
    """
    bare = by_bytes(graph, updates)
    upper = problem(graph, unmeasured(graph), updates)
    known: dict[int, dict[Way, Run]] = {}
    own, most = ({n: op_bytes(task, n) for n, op in enumerate(graph.ops) if not op.view} for task in (bare, upper))
    lasting = bare.keep_all.persistent_bytes
    bound = max(own.values(), default=0)
    end = min(until, time.monotonic() + HUNGRIEST_S)
    with without_a_trace():
        for number in sorted(most, key=lambda n: -most[n]) if arena.available() else ():
            late = time.monotonic() + 2 * _guessed_s(work(graph, graph.ops[number])) > end
            if most[number] <= bound or late or not may_run(own[number]):
                break
            try:
                known[number] = measure_events(graph, number)
            except UserError:
                break  # it is said when all are measured
            seen = replace(upper, costs=unmeasured(graph, known))
            bound = max(bound, op_bytes(seen, number))
    task = problem(graph, unmeasured(graph, known), updates)
    return task, max(least_bytes(bare), lasting + bound)
