"""The planner `chen`: checkpoints at the borders of segments of the forward pass (Chen et al. 2016).

In:  a problem, a budget in bytes or none.
Out: the order of least time among 1, 2, ... n segments that is within the budget, or None; without a budget the order
     for √n segments, n being the ops of the forward pass. Each op runs twice at most.

    forward    ├── segment 1 ──┤── segment 2 ──┤── segment 3 ──┤ loss
    kept                       ■               ■   all of the last segment
    backward   seg. 1 again ◄──┤ seg. 2 again ◄┤ ◄─────────────┘

Where the cuts are: the bytes that the backward pass reads are shared out evenly among the segments, and each cut goes,
within half a share of its place, to where the fewest bytes pass from the ops before it to the ops after it in the
forward pass. In a net that is a chain of blocks these are its articulation points. What passes is kept; what else the
backward pass reads is dropped, and recomputed when the backward pass first reads anything of the segment. What cannot
be recomputed then stays.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import takewhile

from edgetrain.plan import lifetimes
from edgetrain.plan.planner import Planner, greedy
from edgetrain.plan.problem import Problem


@dataclass(frozen=True)
class _Forward:
    """positions: of the ops of the forward pass in the problem's order, without views.

    backward_use: storage made in the forward pass → where the rest of the step first reads it.
    passing_bytes: how much passes over a cut behind each of the positions.
    """

    positions: tuple[int, ...]
    made_at: dict[int, int]
    last_forward_use: dict[int, int]
    backward_use: dict[int, int]
    passing_bytes: tuple[int, ...]
    kept: frozenset[int]


def chen(
    problem: Problem, budget_bytes: int | None, *, segments: int | None = None, until: float = math.inf
) -> tuple[int, ...] | None:
    """`segments` fixes their number."""
    forward = _forward(problem)
    n = len(forward.positions)
    if segments is None and budget_bytes is None:
        segments = max(1, round(math.sqrt(n)))
    numbers = range(1, n + 1) if segments is None else [segments]
    in_time = takewhile(lambda _: time.monotonic() <= until, numbers)
    orders = dict.fromkeys(_order(problem, forward, _cuts(problem, forward, number)) for number in in_time)
    for order in sorted(orders, key=problem.costs.time_s):
        if budget_bytes is None or problem.peak_bytes(order) <= budget_bytes:
            return order
    return None


def _forward(problem: Problem) -> _Forward:
    p = problem
    first_backward = next((at for at, op in enumerate(p.order) if p.graph.ops[op].phase != "forward"), len(p.order))
    made_at = {s: at for at, op in enumerate(p.order[:first_backward]) for s in p.makes[op]}
    last_forward_use = {s: at for at, op in enumerate(p.order[:first_backward]) for s in (*p.makes[op], *p.reads[op])}
    backward_use: dict[int, int] = {}
    for at in range(first_backward, len(p.order)):
        for s in p.reads[p.order[at]]:
            if s in made_at:
                backward_use.setdefault(s, at)
    change = [0] * (first_backward + 1)
    for s, maker in made_at.items():
        change[maker] += p.size[s]
        change[last_forward_use[s]] -= p.size[s]
    passing, held = [], 0
    for at in range(first_backward):
        held += change[at]
        if not p.is_view[p.order[at]]:
            passing.append(held)
    positions = tuple(at for at in range(first_backward) if not p.is_view[p.order[at]])
    kept = frozenset(lifetimes.results(p.graph))
    return _Forward(positions, made_at, last_forward_use, backward_use, tuple(passing), kept)


def _cuts(problem: Problem, forward: _Forward, segments: int) -> list[int]:
    """Indices into `positions` behind which a segment ends, the last one not among them."""
    total, sums = 0, []
    for at in forward.positions:
        created = problem.makes[problem.order[at]]
        total += sum(problem.size[s] for s in created if s in forward.backward_use)
        sums.append(total)
    share = total / segments
    cuts: set[int] = set()
    for number in range(1, segments):
        near = [i for i, done in enumerate(sums[:-1]) if abs(done - number * share) <= share / 2]
        if near:
            cuts.add(min(near, key=lambda i: (forward.passing_bytes[i], abs(sums[i] - number * share))))
    return sorted(cuts)


def _order(problem: Problem, forward: _Forward, cuts: list[int]) -> tuple[int, ...]:
    again: dict[int, list[int]] = {}  # position in the order → what runs again before it
    begin = 0
    for cut in cuts:
        chosen = _again(problem, forward, forward.positions[begin : cut + 1])
        if chosen:
            where, ops = chosen
            again.setdefault(where, [])[:0] = ops  # segments that come together: the earlier one first
        begin = cut + 1
    order: list[int] = []
    for at, op in enumerate(problem.order):
        order += again.get(at, [])
        order.append(op)
    return tuple(order)


def _again(problem: Problem, forward: _Forward, segment: tuple[int, ...]) -> tuple[int, list[int]] | None:
    """Where a segment runs again, and which of its ops do."""
    p, order = problem, problem.order
    inner = {
        s
        for at in segment
        for s in p.makes[order[at]]
        if s not in forward.kept and forward.last_forward_use[s] <= segment[-1]
    }
    while True:
        wanted = [s for s in inner if s in forward.backward_use]
        if not wanted:
            return None
        where = min(forward.backward_use[s] for s in wanted)
        stay = {s for s in inner if p.deadline[order[forward.made_at[s]]] <= where}
        if not stay:
            break
        inner -= stay
    positions: set[int] = set()
    while wanted:
        at = forward.made_at[wanted.pop()]
        if at not in positions:
            positions.add(at)
            wanted += [r for r in p.reads[order[at]] if r in inner]
    return where, [order[at] for at in sorted(positions)]


CHEN = Planner("chen", "recompute segments of the forward pass (Chen et al. 2016)", greedy(chen), keeps_what_fits=False)
