"""`edgetrain plan` in micro-batches: the plan of the last one, and what the whole step comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from edgetrain.cli.plan_study import Study, costs_of, seconds
from edgetrain.costs.table import Costs
from edgetrain.graph.mean_loss import sample_items
from edgetrain.measure.picture import Table
from edgetrain.plan.budget import show_bytes
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.micro_batches import MicroPlan, within
from edgetrain.plan.plan import Plan, Updates
from edgetrain.plan.planner import Number
from edgetrain.plan.planning import Series
from edgetrain.plan.problem import problem
from edgetrain.plan.time_left import TimeLeft
from edgetrain.plan.unmeasured import is_heavy, refuse_impossible, unmeasured
from edgetrain.run.activity import doing
from edgetrain.run.micro_batches import LAST, Planned, Subject
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


@dataclass(frozen=True)
class _GraphPlanner:
    """The graphs of micro-batches, planned with the costs of the study."""

    study: Study
    budget: int | None
    series: Series

    def refuse(self, subject: Subject, *, at_once: bool = False) -> None:
        if self.budget is not None and self.study.device is None:
            refuse_impossible(
                subject.graph, max(1, self.budget - subject.beside_bytes), planner=self.series.planner,
                updates=_updates(subject), page=False, at_once=at_once,
            )  # fmt: skip

    def plan(self, subject: Subject, *, at_once: bool = False) -> tuple[Plan, Costs | None]:
        costs = costs_of(subject.graph, self.study.device, page=self.study.costs.store is not None)
        left = None if self.budget is None else max(1, self.budget - subject.beside_bytes)
        doing("planning" if left is None else f"planning within {show_bytes(left)}")
        task, budget = problem(subject.graph, costs, _updates(subject)), replace(self.study.limits, memory_bytes=left)
        return self.series.plan(task, budget, exact=subject.exact, at_once=at_once), costs

    def keep_all_bytes(self, subject: Subject) -> int:
        graph, device = subject.graph, self.study.device
        by_bytes = device is None and is_heavy(graph)
        costs = unmeasured(graph) if by_bytes else costs_of(graph, device, page=self.study.costs.store is not None)
        return problem(graph, costs, _updates(subject)).keep_all.peak_bytes


def _updates(subject: Subject) -> Updates:
    return subject.updates or keep_all(subject.graph).updates


def in_micro_batches(
    study: Study,
    step: Step,
    example: Sequence[Any],
    budget: int | None,
    count: Number,
    allow_inexact: bool,
) -> tuple[Study, Plan, Micro | None]:
    """The study and plan of the last micro-batch, and what the whole step comes to; or, where that is best, of the
    whole batch."""
    batch, samples = tuple(example), sample_items(example)[0]
    time_left = TimeLeft(study.time_limit_s, 0.5)  # several plans, nobody knows how many
    planner = _GraphPlanner(study, budget, Series(study.planner, study.time_limit_s, time_left))
    parts = step.in_micro_batches(planner, allow_inexact=allow_inexact)

    def attempt(number: int, at_once: bool = False) -> _Attempt:
        if number <= 1:
            with time_left.planning() as left_s:
                return _Attempt(study.plan(budget, left_s))
        planned = parts.planned(batch, number, at_once=at_once)
        return _Attempt(planned.plan, planned)

    if isinstance(count, int):
        selected = attempt(min(count, samples))
    elif budget is None:
        selected = _Attempt(study.keep_all)
    else:
        selected = within(samples, attempt, count, partial(parts.why_refused, batch))
    if selected.planned is None:
        return study, selected.plan, None
    ending, costs = selected.planned.plan.ending, selected.planned.costs[LAST]
    assert ending is not None
    assert costs is not None
    last = replace(study, graph=selected.planned.graphs.ending, costs=costs, captured=ending)
    return last, ending, Micro(selected.planned.plan, study.keep_all)
