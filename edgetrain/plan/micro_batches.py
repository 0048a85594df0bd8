"""Plans of a step that takes its batch in micro-batches.

In:  the graphs of its micro-batches (graph/rewrite/accumulate.py), what their ops cost, a budget.
Out: `MicroPlan`: a plan for each of the graphs, under the same budget, and what they come to together.

    bytes  │ parameters, state, accumulators, the whole batch, copies to take the step back      the same all the time
           │   ▟▙    ▟▙    ▟▙    ▟█▙
           └──────────────────────────  accumulating, accumulating, accumulating, ending

Slices differ by one sample at most, the larger ones first, so there are at most two sizes and three graphs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from edgetrain import files, saved
from edgetrain.errors import Infeasible, UserError
from edgetrain.graph.ir import PERSISTENT, Graph
from edgetrain.plan import plan as plans
from edgetrain.plan.lifetimes import random_state_bytes
from edgetrain.plan.plan import Exact, Plan
from edgetrain.plan.refusal import Refusal, TooSmall, with_bound

SCHEMA = 1


@dataclass(frozen=True)
class MicroGraphs:
    """
    sizes:        the samples of each micro-batch, in order; the last has none where it only clips and updates.
    accumulating: samples → the graph of a micro-batch of as many that is not the last.
    ending:       the graph of the last one.
    """

    sizes: tuple[int, ...]
    accumulating: Mapping[int, Graph]
    ending: Graph


@dataclass(frozen=True)
class MicroPlan(Plan):
    """The plan of a step in micro-batches. Its schedule is that of the last one, which makes the updates; the amounts
    are those of the whole step: `peak_bytes` the most that it ever holds, times and energy the sums.

    sizes: the samples of each micro-batch, in order. accumulating: samples → the plan of a micro-batch that is not the
    last. ending: the plan of the last. (`undo_bytes` counts the copies of what the forward pass changes once more: they
    are kept from the first micro-batch to the last.)
    """

    sizes: tuple[int, ...] = ()
    accumulating: tuple[tuple[int, Plan], ...] = ()
    ending: Plan | None = None

    @property
    def parts(self) -> tuple[Plan, ...]:
        """The plan of each micro-batch, in order."""
        assert self.ending is not None
        plan_of = dict(self.accumulating)
        return (*(plan_of[size] for size in self.sizes[:-1]), self.ending)

    def __str__(self) -> str:
        of = f"{self.most}" if self.most == self.least else f"{self.least} to {self.most}"
        plain = super().__str__()
        recomputed = sum(len(part.recomputed) for part in self.parts)
        more = f" ({recomputed} ops recomputed in all)" if recomputed else ""
        return f"{self.micro_batches} micro-batches of {of} samples{more}; {plain}"

    @property
    def micro_batches(self) -> int:
        """How many there are that have samples."""
        return sum(size > 0 for size in self.sizes)

    @property
    def most(self) -> int:
        return max(self.sizes)

    @property
    def least(self) -> int:
        return min(size for size in self.sizes if size)

    def save(self, path: str | Path) -> None:
        assert self.ending is not None
        data = {
            "edgetrain plan in micro-batches": SCHEMA,
            "sizes": list(self.sizes),
            "undo_bytes": self.undo_bytes,
            "accumulating": [[size, plans.to_json(plan)] for size, plan in self.accumulating],
            "ending": plans.to_json(self.ending),
        }
        files.write_text(path, json.dumps(data))

    @staticmethod
    def load(path: str | Path) -> MicroPlan:
        return saved.load(path, "plan file in micro-batches", _from_json)


def _from_json(data: dict[str, Any]) -> MicroPlan:
    if data["edgetrain plan in micro-batches"] != SCHEMA:
        raise ValueError(f"schema {data['edgetrain plan in micro-batches']!r}, expected {SCHEMA}")
    sizes = tuple(data["sizes"])
    accumulating = {size: plans.from_json(part) for size, part in data["accumulating"]}
    if not all(type(n) is int and n >= 0 for n in (*sizes, *accumulating)) or not sum(sizes) or 0 in sizes[:-1]:
        raise ValueError(f"sizes are {sizes}")
    if set(sizes[:-1]) != set(accumulating):
        raise ValueError("there is not one plan for each size")
    ending = plans.from_json(data["ending"])
    kept = data["undo_bytes"] - ending.undo_bytes
    if type(kept) is not int or kept < 0:
        raise ValueError(f"undo_bytes is {data['undo_bytes']!r}")
    return together(sizes, accumulating, ending, kept_bytes=kept)


def together(sizes: tuple[int, ...], accumulating: Mapping[int, Plan], ending: Plan, *, kept_bytes: int) -> MicroPlan:
    """What the plans of the micro-batches come to. kept_bytes: `kept_bytes(graph)`."""
    parts = [*(accumulating[size] for size in sizes[:-1]), ending]
    of_ending = {f.name: getattr(ending, f.name) for f in fields(Plan)}
    return MicroPlan(
        **of_ending
        | {
            "peak_bytes": max(part.peak_bytes for part in parts) + kept_bytes,
            "undo_bytes": ending.undo_bytes + kept_bytes,
            "time_s": _sum([part.time_s for part in parts]),
            "energy_j": _sum([part.energy_j for part in parts]),
            "keep_all_time_s": _sum([part.keep_all_time_s for part in parts]),
            "bound": None,
        },
        sizes=sizes,
        accumulating=tuple(accumulating.items()),
        ending=ending,
    )


def _sum(amounts: list[float | None]) -> float | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None


def sizes_of(samples: int, count: int) -> tuple[int, ...]:
    """The samples cut into so many micro-batches, or one for each sample where there are fewer."""
    count = min(count, samples)
    each, more = divmod(samples, count)
    return (each + 1,) * more + (each,) * (count - more)


def counts(samples: int) -> list[int]:
    """The numbers of micro-batches that are tried: 1, 2, 4, … and one for each sample."""
    numbers, count = [], 1
    while count < samples:
        numbers.append(count)
        count *= 2
    return [*numbers, samples]


def kept_bytes(graph: Graph) -> int:
    """What is copied before the first micro-batch, so that a later one that fails takes all of them back: what the
    forward pass changes that lasts, and the state of the generator where random numbers are drawn."""
    changed = {s for op in graph.ops if op.phase == "forward" for s in op.writes}
    copies = sum(graph.storages[s].n_bytes for s in changed if graph.storages[s].role in PERSISTENT)
    return copies + random_state_bytes(graph, "early")


def exactness(exact: Exact, reasons: tuple[str, ...]) -> Exact:
    """Sums over micro-batches round otherwise than sums over the batch. reasons: `mean_loss.inexact`."""
    return "no" if reasons or exact == "no" else "rounding"


class Made(Protocol):
    @property
    def plan(self) -> Plan: ...


T = TypeVar("T", bound=Made)


def within(
    samples: int,
    attempt: Callable[[int, bool], T],
    number: Literal["auto", "fewest"],
    why_refused: Callable[[UserError, Infeasible], str] = lambda refused, answer: f"refused; {refused.what}",
) -> T:
    """What keeps the budget in micro-batches.

    attempt: a number of micro-batches → what was made, or Infeasible; or at once TooSmall, if the second argument asks
    for that.
    number: "auto": the one of least time, of those that are tried. More are tried until one needs nothing twice: from
    there on they only make kernels less efficient. "fewest": that of the largest micro-batch that keeps the budget at
    all, as SAGE takes it; it is halved until one does, and then made larger again as far as that goes.
    why_refused: what an Infeasible tells where no micro-batches may be taken.
    """
    kept: dict[int, T] = {}
    failed: dict[int, Infeasible] = {}
    refused: UserError | None = None
    for count in counts(samples):
        try:
            kept[count] = attempt(count, True)
        except Infeasible as answer:
            failed[count] = answer
            continue
        except UserError as error:
            if count == 1:
                raise
            refused = error  # no number of micro-batches will do
            break
        if number == "fewest":
            return _fewer(max(failed, default=0), count, kept[count], attempt)
        if not any(part.recomputed or part.paged for part in parts_of(kept[count].plan)):
            break
    if kept:
        return min(kept.values(), key=lambda result: result.plan.time_s or 0.0)
    best = min(failed, key=lambda count: failed[count].smallest_bytes)
    try:
        if not isinstance(failed[best], TooSmall):
            raise failed[best]
        return attempt(best, False)  # which says what is known to work
    except Infeasible as answer:
        weakest = with_bound(answer, min(other.bound_bytes for other in failed.values()))
        refusal = weakest if refused is None else with_line(weakest, f"micro-batches: {why_refused(refused, answer)}")
        raise refusal from None


def _fewer(too_few: int, enough: int, result: T, attempt: Callable[[int, bool], T]) -> T:
    """The fewest micro-batches that keep the budget, by bisection. made: what as many as are `enough` give."""
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        try:
            result, enough = attempt(middle, True), middle
        except Infeasible:
            too_few = middle
    return result


def with_line(answer: Infeasible, line: str) -> Infeasible:
    """The same answer with one more line before the next step."""
    lines = str(answer).splitlines()
    at = next((n for n, text in enumerate(lines) if text.startswith("  next step")), len(lines))
    return answer.in_words("\n".join((*lines[:at], f"  {line}", *lines[at:])))


def parts_of(plan: Plan) -> tuple[Plan, ...]:
    return plan.parts if isinstance(plan, MicroPlan) else (plan,)


def infeasible(answer: Infeasible, sizes: tuple[int, ...], kept: int) -> Infeasible:
    """The same answer for a step in micro-batches, which keeps so many bytes of copies beside the tensors of each."""
    if isinstance(answer, TooSmall):
        return answer  # a bound that holds without the copies too
    count, samples = sum(size > 0 for size in sizes), max(sizes)
    where = f"with {count} micro-batches of {samples} samples "
    more = ', or take more micro-batches (micro_batches="auto" tries them)' if samples > 1 else ""
    if not isinstance(answer, Refusal) or answer.evidence is None:  # of the whole process, whose bytes are all there
        return answer.in_words(f"{where}{answer}{more}")
    evidence = answer.evidence.beside(_COPIES, kept) if kept else answer.evidence
    return Refusal.of(replace(evidence, where=where, more=more))


_COPIES = "copies to take a failed step back"
