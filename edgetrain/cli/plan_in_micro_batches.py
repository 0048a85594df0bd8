"""`edgetrain plan` in micro-batches: the plan of the last one, and what the whole step comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from edgetrain.cli.plan_study import Study, costs_of, seconds
from edgetrain.costs.table import Costs
from edgetrain.graph.ir import Graph
from edgetrain.graph.mean_loss import sample_items
from edgetrain.measure.picture import Table
from edgetrain.plan.budget import show_bytes
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.micro_batches import MicroPlan, TooSmall, within
from edgetrain.plan.plan import Exact, Plan, Updates
from edgetrain.plan.planner import Number
from edgetrain.plan.planning import plan as make_plan
from edgetrain.plan.problem import problem
from edgetrain.plan.refusal import least_bytes
from edgetrain.plan.registry import named
from edgetrain.plan.time_left import TimeLeft
from edgetrain.plan.unmeasured import is_heavy, refuse_impossible, unmeasured
from edgetrain.run.activity import doing
from edgetrain.run.micro_batches import LAST, Planned
from edgetrain.run.step import Step


@dataclass(frozen=True)
class Micro:
    """A step in micro-batches beside the whole batch that it is cut from."""

    plan: MicroPlan
    whole: Plan

    def table(self, study: Study) -> Table:
        most, least = self.plan.most, self.plan.least
        of = f"{most}" if most == least else f"{least} to {most}"
        rows = [
            ("peak memory", show_bytes(self.whole.peak_bytes), show_bytes(self.plan.peak_bytes)),
            ("  lasting tensors", show_bytes(self.whole.persistent_bytes), show_bytes(self.plan.persistent_bytes)),
        ]
        if self.whole.time_s is not None and self.plan.time_s is not None:
            times = (seconds(self.whole.time_s), seconds(self.plan.time_s))
            rows.append((f"time of a step, {study.time_words}", *times))
        note = "Accumulators count as lasting tensors. What follows is the last micro-batch, which makes the updates."
        header = ("", "whole batch, keep all", f"{len(self.plan.sizes)} micro-batches of {of}")
        return Table("The step in micro-batches", note, header, tuple(rows))

    def told(self) -> dict[str, Any]:
        return {
            "sizes": list(self.plan.sizes),
            "peak_bytes": self.plan.peak_bytes,
            "lasting_bytes": self.plan.persistent_bytes,
            "time_s": self.plan.time_s,
            "exact": self.plan.exact,
            "recomputed_ops": sum(len(part.recomputed) for part in self.plan.parts),
            "whole_batch": {"peak_bytes": self.whole.peak_bytes, "time_s": self.whole.time_s},
        }


@dataclass(frozen=True)
class _Attempt:
    """A plan, in micro-batches or not."""

    plan: Plan
    planned: Planned | None = None


def in_micro_batches(
    study: Study,
    step: Step,
    example: Sequence[Any],
    budget: int | None,
    count: Number,
    *,
    allow_inexact: bool,
) -> tuple[Study, Plan, Micro | None]:
    """The study and plan of the last micro-batch, and what the whole step comes to; or, where that is best, of the
    whole batch."""
    quickly = False
    samples = sample_items(example)[0]
    time_left = TimeLeft(study.time_limit_s, 0.5)  # several plans, nobody knows how many

    def refuse(graph: Graph, updates: Updates | None, beside: int) -> None:
        if budget is not None and study.device is None:
            refuse_impossible(
                graph, max(1, budget - beside), planner=named(study.planner),
                updates=updates or keep_all(graph).updates,
                page=False, at_once=quickly,
            )  # fmt: skip

    def plan_one(graph: Graph, exact: Exact, updates: Updates | None, beside: int) -> tuple[Plan, Costs | None]:
        costs = costs_of(graph, study.device, page=study.costs.store is not None)
        where = updates or keep_all(graph).updates
        if quickly and budget is not None and least_bytes(problem(graph, costs, where)) > budget - beside:
            bound = least_bytes(problem(graph, costs, where))
            raise TooSmall("a bound rules it out", smallest_bytes=bound, bound_bytes=bound)
        left = None if budget is None else max(1, budget - beside)
        doing("planning" if left is None else f"planning within {show_bytes(left)}")
        with time_left.planning() as left_s:
            made = make_plan(
                graph,
                costs,
                replace(study.limits, memory_bytes=left),
                planner=study.planner,
                time_limit_s=study.time_limit_s,
                updates=where,
                exact=exact,
                left_s=left_s,
            )
        return made, costs

    def attempt(number: int, bounded: bool) -> _Attempt:
        nonlocal quickly
        quickly = bounded
        if number <= 1:
            with time_left.planning() as left_s:
                return _Attempt(study.plan(budget, left_s))
        planned = parts.planned(tuple(example), number)
        return _Attempt(planned.plan, planned)

    def keep_all_bytes(graph: Graph, updates: Updates | None) -> int:
        by_bytes = study.device is None and is_heavy(graph)
        page = study.costs.store is not None
        costs = unmeasured(graph) if by_bytes else costs_of(graph, study.device, page=page)
        return problem(graph, costs, updates or keep_all(graph).updates).keep_all.peak_bytes

    parts = step.in_micro_batches(plan_one, keep_all_bytes, refuse, allow_inexact=allow_inexact)
    if isinstance(count, int):
        made = attempt(min(count, samples), False)
    elif budget is None:
        made = _Attempt(study.keep_all)
    else:
        made = within(samples, attempt, count, partial(parts.why_refused, tuple(example)))
    if made.planned is None:
        return study, made.plan, None
    ending, costs = made.planned.plan.ending, made.planned.costs[LAST]
    assert ending is not None
    assert costs is not None
    graph = made.planned.graphs.ending
    last = replace(study, graph=graph, costs=costs, captured=ending)
    return last, ending, Micro(made.planned.plan, study.keep_all)
