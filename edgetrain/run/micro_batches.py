"""A batch cut into micro-batches and planned, each of its graphs under the same budget.

In:  a batch, the number of micro-batches, who plans a graph (`PlansGraphs`).
Out: `Planned`: the graphs, their plans and costs; or what micro-batches would do, as a line of an answer.

    structure of the loss ─ cut and capture ─ refuse what is impossible ─ test the loss with numbers ─ plan each graph
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch

from edgetrain.costs.table import Costs
from edgetrain.errors import Infeasible, UserError
from edgetrain.graph.ir import Graph
from edgetrain.graph.mean_loss import sample_items
from edgetrain.graph.rewrite.accumulate import accumulators
from edgetrain.plan.budget import show_bytes
from edgetrain.plan.micro_batches import MicroGraphs, MicroPlan, exactness, infeasible, kept_bytes, together
from edgetrain.plan.plan import Exact, Plan, Updates
from edgetrain.run.capturing import Batch, Capturing, Part
from edgetrain.run.require_mean import MeanLoss

LAST = 0
T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """A graph that is to be planned. updates: where they must stand; None: as is best. beside_bytes: what the step
    holds beside the graph's tensors, of the same budget."""

    graph: Graph
    exact: Exact = "bitwise"
    updates: Updates | None = None
    beside_bytes: int = 0


class PlansGraphs(Protocol):
    """Who plans the graphs of micro-batches. at_once: a `TooSmall` where a bound rules the budget out."""

    def refuse(self, subject: Subject, *, at_once: bool = False) -> None:
        """Infeasible where that is known before anything is run."""

    def plan(self, subject: Subject, *, at_once: bool = False) -> tuple[Plan, Costs | None]:
        """A plan, and the costs that it was made with."""
        ...

    def keep_all_bytes(self, subject: Subject) -> int:
        """What it takes when all is kept."""
        ...


@dataclass(frozen=True)
class Planned:
    """costs: samples → those of such a micro-batch that is not the last; LAST → those of the last."""

    graphs: MicroGraphs
    plan: MicroPlan
    costs: Mapping[int, Costs | None]
    part: Part


@dataclass
class Accumulators:
    """The sums of gradients, one for each parameter, shared by all steps of a model."""

    optimizer: torch.optim.Optimizer
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, graph: Graph) -> dict[str, torch.Tensor]:
        for name, (group, index) in accumulators(graph).items():
            parameter = self.optimizer.param_groups[group]["params"][index].detach()
            there = self.tensors.get(name)
            if there is None or (there.shape, there.dtype, there.device) != (
                parameter.shape, parameter.dtype, parameter.device,
            ):  # fmt: skip
                self.tensors[name] = torch.empty_like(parameter, memory_format=torch.preserve_format)
        return self.tensors

    def touch(self, graph: Graph) -> None:
        """From now on the process holds their pages."""
        for total in self.of(graph).values():
            total.zero_()


def subjects_of(graphs: MicroGraphs, exact: Exact, kept: int) -> Iterator[tuple[int, Subject]]:
    yield LAST, Subject(graphs.ending, exact, None, kept)
    for size, graph in graphs.accumulating.items():
        yield size, Subject(graph, exact, "early", kept)  # nothing that a caller sees changes in those


def kept_beside(graphs: MicroGraphs) -> int:
    """The copies that are kept beside the tensors of each micro-batch."""
    return kept_bytes(next(iter(graphs.accumulating.values())))


@dataclass(frozen=True)
class MicroBatches:
    """sums: to be touched before anything is planned, where the process is bounded and optimizer state is there: what
    the process holds is looked at then."""

    capturing: Capturing
    mean: MeanLoss
    planner: PlansGraphs
    sums: Accumulators | None = None

    def planned(self, batch: Batch, count: int, *, at_once: bool = False) -> Planned:
        """The batch in so many micro-batches, verified, captured and planned, and not compiled yet."""
        self.mean.structure(batch)
        graphs, part = self.capturing.micro_graphs(batch, count)
        kept = kept_beside(graphs)
        _for_each(graphs, part.exact, kept, lambda subject: self.planner.refuse(subject, at_once=at_once))
        exact = exactness(part.exact, self.mean.require(batch))  # runs the model many times
        if self.sums is not None:
            self.sums.touch(graphs.ending)
        plans = _for_each(graphs, exact, kept, lambda subject: self.planner.plan(subject, at_once=at_once))
        accumulating = {size: plans[size][0] for size in graphs.accumulating}
        plan = together(graphs.sizes, accumulating, plans[LAST][0], kept_bytes=kept)
        return Planned(graphs, plan, {size: costs for size, (_, costs) in plans.items()}, part)

    def would_do(self, batch: Batch, answer: Infeasible) -> str:
        """Would micro-batches keep a budget that the whole batch cannot? As a line of that answer."""
        try:
            return self._smallest(batch, answer, 'micro_batches="auto"')
        except UserError as error:
            return f"refused; {error.what}"

    def why_refused(self, batch: Batch, refused: UserError, answer: Infeasible) -> str:
        """Why there are none, and what they would do if they were allowed. As a line of the answer."""
        why = f"refused; {refused.what}"
        try:
            return f"{why}; {self._smallest(batch, answer)}"
        except UserError:
            return why

    def _smallest(self, batch: Batch, answer: Infeasible, *options: str) -> str:
        """What the smallest micro-batches take when they keep all: an upper bound of what they need."""
        samples, _ = sample_items(batch)
        if samples < 2:
            return "the batch has one sample"
        reasons = replace(self.mean, allow_inexact=True, reasons={}).require(batch)
        graphs, part = self.capturing.micro_graphs(batch, samples)
        kept = kept_beside(graphs)
        peak = kept + max(self.planner.keep_all_bytes(subject) for _, subject in subjects_of(graphs, part.exact, kept))
        if peak >= answer.smallest_bytes:
            return f"one for each sample, without recomputing, would take {show_bytes(peak)}"
        needed = " and ".join((*options, *(("allow_inexact=True",) if reasons else ())))
        return f"{peak} bytes ({show_bytes(peak)}) would do with {needed}"


def _for_each(graphs: MicroGraphs, exact: Exact, kept: int, work: Callable[[Subject], T]) -> dict[int, T]:
    """What `work` gives for each graph; where it is infeasible for some, the answer of the one that needs most."""
    results: dict[int, T] = {}
    failed: list[Infeasible] = []
    for size, subject in subjects_of(graphs, exact, kept):
        try:
            results[size] = work(subject)
        except Infeasible as answer:
            failed.append(answer)
    if failed:
        raise infeasible(max(failed, key=lambda answer: answer.smallest_bytes), graphs.sizes, kept)
    return results
