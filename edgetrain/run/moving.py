"""A budget that moves: the plans that are made ahead, over the range of budgets that may come.

In:  a pipeline, a batch, the number of micro-batches. Out: a `Variant` with a step for each plan, and the ladder that
     says which of them a budget calls for.

    smallest that works ├──┬──┬──┬──┬──┬──┤ all that is kept, or that this machine has        one plan for each rung
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from edgetrain.errors import Infeasible, UserError
from edgetrain.graph.mean_loss import sample_items
from edgetrain.plan.lifetimes import persistent_bytes
from edgetrain.plan.micro_batches import counts, infeasible, within
from edgetrain.plan.planner import Number
from edgetrain.plan.refusal import lasting, lower_bound_bytes, with_bound
from edgetrain.plan.unmeasured import here_bytes, refuse_too_large
from edgetrain.run.activity import doing
from edgetrain.run.adaptive import RUNGS, BudgetWatch, Ladder, automatic, given, rungs, smallest_bytes
from edgetrain.run.capturing import Batch
from edgetrain.run.conditions import Known
from edgetrain.run.graph_planner import GraphPlanner
from edgetrain.run.micro_batches import Subject, kept_beside, subjects_of
from edgetrain.run.pipeline import Pipeline, Variant
from edgetrain.run.require_mean import MeanLoss


@dataclass(frozen=True)
class _Cut:
    """The graphs of a batch cut into micro-batches of these sizes, or whole; the one that updates first."""

    subjects: tuple[Subject, ...]
    sizes: tuple[int, ...] = ()

    @property
    def kept(self) -> int:
        """Bytes that are held beside all of them."""
        return self.subjects[0].beside_bytes


def following(pipeline: Pipeline, batch: Batch, count: Number) -> Variant:
    planner, follow = pipeline.planner, pipeline.planner.options.follow
    samples = 1 if count == 1 else sample_items(batch)[0]
    cuts = _cuts(pipeline, batch, count, samples)
    graph = cuts[0].subjects[0].graph
    assert follow is not None
    budget = automatic(persistent_bytes(graph)) if follow == "auto" else given(follow)
    _refuse_all(planner, cuts, budget())
    cuts = _tested(pipeline.mean, batch, cuts)
    smallest, largest, bound = _range(planner, cuts)
    smallest, largest = _here(planner, cuts[0].subjects[0], smallest, largest)
    watch, shared = BudgetWatch(lambda: largest), dict[str, Known]()
    variants = []
    time_left = planner.series.time_left
    part = time_left.part
    for number, memory_bytes in enumerate(rungs(smallest, largest)):
        time_left.part = part / (RUNGS - number)
        rung = partial(pipeline.within(memory_bytes, watch, shared).variant, batch)
        variants.append(rung(min(count, samples)) if isinstance(count, int) else within(samples, rung, count))
    steps_by_peak = {variant.plan.peak_bytes: variant.steps[0] for variant in variants}
    ladder = Ladder([variant.plan for variant in variants], bound, lasting(cuts[0].subjects[0].graph))
    steps = [steps_by_peak[plan.peak_bytes] for plan in ladder.plans]
    for step in steps:
        step.get_ready()
    watch.budget = budget
    return Variant(steps, variants[0].captured, ladder, watch)


def _here(planner: GraphPlanner, first: Subject, smallest: int, largest: int) -> tuple[int, int]:
    """The part of the range that this machine may ever have."""
    graph, there = first.graph, planner.state_is_there
    plain = planner.keep_all(first)
    refuse_too_large(graph, plain, smallest, planner=planner.series.planner, state_is_there=there)
    here = here_bytes(graph, state_is_there=there)
    return smallest, largest if here is None else max(smallest, min(largest, here))


def _cuts(pipeline: Pipeline, batch: Batch, count: Number, samples: int) -> list[_Cut]:
    """For each number of micro-batches that may be used."""
    numbers = [min(count, samples)] if isinstance(count, int) else counts(samples)
    cuts: list[_Cut] = []
    for number in numbers:
        try:
            cuts.append(_cut(pipeline, batch, number))
        except UserError:
            if not cuts:
                raise
            break  # micro-batches are refused; those that came before do without
    return cuts


def _cut(pipeline: Pipeline, batch: Batch, count: int) -> _Cut:
    if count == 1:
        return _Cut((Subject(pipeline.capturing.capture(batch).graph),))
    pipeline.mean.structure(batch)
    graphs, part = pipeline.capturing.micro_graphs(batch, count)
    subjects = (subject for _, subject in subjects_of(graphs, part.exact, kept_beside(graphs)))
    return _Cut(tuple(subjects), graphs.sizes)


def _tested(mean: MeanLoss, batch: Batch, cuts: list[_Cut]) -> list[_Cut]:
    """Without those in micro-batches, where a test shows that the loss is no mean over samples."""
    if not any(cut.sizes for cut in cuts):
        return cuts
    try:
        mean.require(batch)
    except UserError:
        cuts = [cut for cut in cuts if not cut.sizes]
        if not cuts:
            raise
    return cuts


def _refuse_all(planner: GraphPlanner, cuts: Sequence[_Cut], memory_bytes: int) -> None:
    """Infeasible where the budget of this moment is impossible whatever the number of micro-batches."""
    answers = []
    for cut in cuts:
        answer = _refusal(planner.within(memory_bytes), cut)
        if answer is None:
            return
        answers.append(answer)
    best = min(answers, key=lambda answer: answer.smallest_bytes)
    raise with_bound(best, min(answer.bound_bytes for answer in answers))


def _refusal(planner: GraphPlanner, cut: _Cut) -> Infeasible | None:
    answers: list[Infeasible] = []
    for subject in cut.subjects:
        try:
            planner.refuse(subject)
        except Infeasible as answer:
            answers.append(answer)
    worst = max(answers, key=lambda answer: answer.smallest_bytes, default=None)
    return infeasible(worst, cut.sizes, cut.kept) if worst is not None and cut.sizes else worst


def _range(planner: GraphPlanner, cuts: Sequence[_Cut]) -> tuple[int, int, int]:
    """From the least that is kept in any number of micro-batches that may be used to keeping all in the fewest; and a
    bound on every plan."""
    ranges = [_range_of(planner, cut) for cut in cuts]
    return min(smallest for smallest, _, _ in ranges), ranges[0][1], min(bound for _, _, bound in ranges)


def _range_of(planner: GraphPlanner, cut: _Cut) -> tuple[int, int, int]:
    smallest, largest, bounds = [], [], []
    for subject in cut.subjects:
        task = planner.task(subject)
        doing("looking for the smallest budget")
        with planner.series.time_left.planning() as left_s:
            smallest.append(smallest_bytes(task, planner.series.planner, left_s))
        largest.append(task.keep_all.peak_bytes)
        bounds.append(lower_bound_bytes(task))
    return max(smallest) + cut.kept, max(largest) + cut.kept, max(bounds) + cut.kept
