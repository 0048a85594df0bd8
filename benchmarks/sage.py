"""SAGE's eviction with accumulation beside either alone: the memory in which a batch still trains, and its time there.

    python -m benchmarks.sage [--only SECTION] [--batch N …] [--device samsung_s10] [MODEL …]

prints its tables and keeps them in benchmarks/results/sage.{json,md}; what a run leaves out stays there as it was.

    smallest   the least memory in which each way trains a batch, and its time there, for several batches
    budgets    one batch in less and less memory: the time and the number of micro-batches of each way
    ran        SAGE's plan for real, on this machine: whether its bytes are those that were planned, and its time

The first two run nothing. Bytes are those of all tensors of a step, as planned; times are modelled for the device,
which is one of the phones of the paper, and given as a part of the time of neither. `ran` measures what ops cost here.

    neither         every tensor until its last use, the batch whole; each gradient goes when its update is made
    as frameworks   the same with all gradients until the end of the step
    segments        checkpointing alone, planned ahead (Chen): the best number of segments
    eviction        checkpointing alone, as SAGE does it at run time ("DGC only" in the paper)
    accumulation    micro-batches alone, which keep all ("DGA only")
    SAGE            eviction, and where that is not enough the largest micro-batch that fits
    fast, optimal   ours, of the whole batch; "fast in parts" with as many micro-batches as take the least time

Accumulators count as memory. Batch norm and dropout make other numbers in micro-batches than in the whole batch: all
four nets have one or the other, so whatever accumulates here needs allow_inexact=True. Checkpointing does not.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

import edgetrain as et
from benchmarks import sage_tables
from benchmarks.budget import say
from benchmarks.contenders import EDGETRAIN, Built, Case, build, prepare, ratio
from benchmarks.study import keeping, options
from edgetrain import zoo
from edgetrain.graph.mean_loss import batch_norms, inexact
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.micro_batches import MicroPlan, counts, exactness, kept_bytes, together, within
from edgetrain.plan.plan import Updates
from edgetrain.plan.planners.chen import chen
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.refusal import SMALLEST_STEP, TooSmall, lower_bound_bytes, smallest_by
from edgetrain.plan.registry import named
from edgetrain.run.capturing import Capturing
from edgetrain.run.micro_step import MicroStep
from edgetrain.run.options import Options

DEVICE = "samsung_s10"
BATCHES = (8, 32, 128)
BATCH = 32  # of the budgets
FRACTIONS = (0.5, 0.25, 0.1, 0.05)
# What SAGE was evaluated with; beside each the width and the size of images, or the length of text, for --small.
CASES = {
    Case("resnet50", BATCH, "sgd"): (0.125, 64),
    Case("densenet121", BATCH, "sgd"): (0.25, 64),
    Case("mobilenet_v2", BATCH, "sgd"): (0.35, 64),
    Case("bert_small", BATCH, "adamw"): (0.125, 32),
}
RAN = "mobilenet_v2"

Row = dict[str, Any]
Maker = Callable[[Problem], et.Plan]


def cases(*, small: bool) -> list[Case]:
    """All; or the same in seconds and few megabytes, to see whether everything works."""
    if not small:
        return list(CASES)
    return [replace(case, batch=4, classes=10, width=width, input_size=n) for case, (width, n) in CASES.items()]


# ---- a step and its micro-batches, on a device


@dataclass(frozen=True)
class Subject:
    """A step that is captured, and what cuts it into micro-batches."""

    case: Case
    built: Built
    step: et.Step
    capturing: Capturing
    device: str

    @cached_property
    def task(self) -> Problem:
        return task_of(self.step.graph, None, self.device)

    def whole(self, make: Maker) -> et.Plan:
        return make(self.task)

    def cut(self, make: Callable[[Problem, int], et.Plan], count: int) -> MicroPlan:
        """Each micro-batch planned alone; `make` is told the bytes that are held beside its graph. As `et.prepare` does
        it, but that the losses of the zoo are means is known."""
        graphs, part = self.capturing.micro_graphs(self.built.batch, count)
        kept = kept_bytes(next(iter(graphs.accumulating.values())))
        others = (*inexact(part.captured.graph), *batch_norms(part.captured.graph))

        def plan_one(graph: et.Graph, updates: Updates | None) -> et.Plan:
            return replace(make(task_of(graph, updates, self.device), kept), exact=exactness(part.exact, others))

        accumulating = {size: plan_one(graph, "early") for size, graph in graphs.accumulating.items()}
        return together(graphs.sizes, accumulating, plan_one(graphs.ending, None), kept_bytes=kept)


@cache
def subject(case: Case, device: str) -> Subject:
    say(f"{case.model}, batch {case.batch}: capture")
    built = build(case)
    step = prepare(built, EDGETRAIN)
    return Subject(case, built, step, Capturing(built.model, built.loss, built.optimizer, Options()), device)


def task_of(graph: et.Graph, updates: Updates | None, device: str) -> Problem:
    return problem(graph, et.model_costs(graph, device), updates or keep_all(graph).updates)


# ---- the least memory of each way


def by_segments(task: Problem) -> et.Plan:
    """The least memory over numbers of segments up to four times the square root of the ops."""
    return task.plan(min(segmented(task), key=task.peak_bytes), planner="chen")


def segmented(task: Problem) -> list[tuple[int, ...]]:
    forward = sum(op.phase == "forward" and not op.view for op in task.graph.ops)
    orders = [chen(task, None, segments=number) for number in range(1, 4 * math.isqrt(forward) + 1)]
    return list(dict.fromkeys(order for order in orders if order is not None))


def by(name: Literal["sage", "fast"]) -> Maker:
    return lambda task: task.plan(smallest_by(task, named(name).find)[0], planner=name)


def kept(task: Problem) -> et.Plan:
    return task.keep_all


def as_frameworks(task: Problem) -> et.Plan:
    return replace(task, updates="together", order=keep_all(task.graph, updates="together").order).keep_all


def smallest(case: Case, batches: Sequence[int], device: str, *, ours: bool) -> dict[str, Any]:
    rows = [row for batch in batches for row in _smallest(subject(replace(case, batch=batch), device), ours=ours)]
    return {"device": device, "rows": rows}


def _smallest(of: Subject, *, ours: bool = True) -> list[Row]:
    each, made = of.case.batch, dict[str, et.Plan]()

    def in_parts(make: Maker, whole: et.Plan, numbers: Collection[int]) -> et.Plan:
        """In the number of micro-batches of the least memory; of those that are as good the one of least time."""
        found = [whole, *(of.cut(lambda task, _: make(task), number) for number in numbers if number > 1)]
        least = min(plan.peak_bytes for plan in found)
        fitting = [plan for plan in found if plan.peak_bytes <= least * (1 + SMALLEST_STEP)]
        return min(fitting, key=lambda plan: plan.time_s or 0.0)

    ways: dict[str, Callable[[], et.Plan]] = {
        "as frameworks": lambda: of.whole(as_frameworks),
        "neither": lambda: of.whole(kept),
        "segments": lambda: of.whole(by_segments),
        "eviction": lambda: of.whole(by("sage")),
        "accumulation": lambda: in_parts(kept, made["neither"], counts(each)),
        "SAGE": lambda: in_parts(by("sage"), made["eviction"], counts(each)),
    }
    if ours:
        ways["fast"] = lambda: of.whole(by("fast"))
        ways["fast in parts"] = lambda: in_parts(by("fast"), made["fast"], {number_in(made["SAGE"]), each})
    for name, make in ways.items():
        say(f"{of.case.model}, batch {each}: least memory, {name}")
        made[name] = make()
    return [{"batch": each, "way": name, **_told(plan, made["neither"])} for name, plan in made.items()]


def _told(plan: et.Plan, neither: et.Plan) -> Row:
    """`above_bytes`: what is held above the lasting tensors of the whole batch, so that accumulators count."""
    assert plan.time_s is not None
    assert neither.time_s is not None
    return {
        "bytes": plan.peak_bytes,
        "above_bytes": plan.peak_bytes - neither.persistent_bytes,
        "micro_batches": number_in(plan),
        "time": plan.time_s / neither.time_s,
        "time_s": plan.time_s,
        "exact": plan.exact,
    }


def number_in(plan: et.Plan) -> int:
    return plan.micro_batches if isinstance(plan, MicroPlan) else 1


# ---- one batch in less and less memory


def budgets(case: Case, fractions: Sequence[float], device: str, search_s: float) -> dict[str, Any]:
    of = subject(case, device)
    neither = of.whole(kept)
    lasting = neither.persistent_bytes
    rows: list[Row] = []
    for fraction in fractions:
        budget = lasting + int(fraction * (neither.peak_bytes - lasting))
        for name, make in _ways(of, budget, search_s).items():
            say(f"{case.model}: {name} in {fraction} of the memory")
            row: Row = {"fraction": fraction, "budget_bytes": budget, "way": name}
            try:
                row |= _told(make(), neither)
            except et.Infeasible:
                row["bytes"] = None
            rows.append(row)
    told = {"batch": case.batch, "device": device, "search_s": search_s, "lasting_bytes": lasting}
    return told | {"neither_bytes": neither.peak_bytes, "neither_s": neither.time_s, "rows": rows}


def _ways(of: Subject, budget: int, search_s: float) -> dict[str, Callable[[], et.Plan]]:
    def by_name(planner: str) -> Callable[[Problem, int], et.Plan]:
        return lambda task, beside: _within(task, budget - beside, planner, search_s)

    def in_parts(planner: str, number: Literal["auto", "fewest"]) -> et.Plan:
        def attempt(count: int, quickly: bool) -> _Made:
            make = by_name(planner)
            return _Made(of.whole(lambda task: make(task, 0)) if count == 1 else of.cut(make, count))

        return within(of.case.batch, attempt, number).plan

    def alone(planner: str) -> Callable[[], et.Plan]:
        return lambda: of.whole(lambda task: by_name(planner)(task, 0))

    return {
        "segments": lambda: of.whole(lambda task: _segments_within(task, budget)),
        "eviction": alone("sage"),
        "accumulation": lambda: in_parts("keep-all", "fewest"),
        "SAGE": lambda: in_parts("sage", "fewest"),
        "SAGE, least time": lambda: in_parts("sage", "auto"),
        "optimal": alone("optimal"),
        "fast in parts": lambda: in_parts("fast", "auto"),
    }


@dataclass(frozen=True)
class _Made:
    plan: et.Plan


def _within(task: Problem, budget: int, planner: str, search_s: float) -> et.Plan:
    bound = lower_bound_bytes(task)
    if bound > budget:
        raise TooSmall.by(bound)
    return et.plan(
        task.graph, task.costs, et.Budget(budget), planner=planner, time_limit_s=search_s, updates=task.updates,
        page=False,
    )  # fmt: skip


def _segments_within(task: Problem, budget: int) -> et.Plan:
    fitting = [order for order in segmented(task) if task.peak_bytes(order) <= budget]
    if not fitting:
        raise et.Infeasible("no number of segments fits", smallest_bytes=0, bound_bytes=0)
    quickest = min(fitting, key=task.costs.time_s)
    return task.plan(quickest, planner="chen")


# ---- for real


def ran(case: Case, rounds: int) -> dict[str, Any]:
    """A budget below what eviction alone can keep: the steps of neither and of SAGE, taking turns in one process."""
    say(f"{case.model}, batch {case.batch}: what ops cost here")
    built = build(case)
    free = prepared(built, 10**12)
    alone, least = (smallest_kept(built, free.plan.persistent_bytes, number) for number in (1, None))
    if least >= alone:
        raise RuntimeError(f"{case.model}: accumulators take what smaller micro-batches save; take a larger batch")
    budget = (least + alone) // 2
    say(f"{case.model}: SAGE in {budget / 1e6:.0f} MB, where eviction alone keeps {alone / 1e6:.0f} MB")
    twin = build(case)
    step = prepared(twin, budget)
    plan, found = step.plan, step.of_shape(*twin.batch)
    assert isinstance(plan, MicroPlan)
    assert isinstance(found, MicroStep)
    assert plan.ending is not None
    times = _turns({"neither": lambda: free(*built.batch), "SAGE": lambda: step(*twin.batch)}, rounds)
    assert found.most_bytes is not None
    return {
        "batch": case.batch,
        "neither_bytes": free.plan.peak_bytes,
        "eviction_bytes": alone,
        "budget_bytes": budget,
        "planned_bytes": plan.peak_bytes,
        # What the arena served at most, what lasts, and the copies that take a failed step back.
        "ran_bytes": found.most_bytes + plan.persistent_bytes + plan.undo_bytes - plan.ending.undo_bytes,
        "sizes": list(plan.sizes),
        "exact": plan.exact,
        "measured": ratio(times["SAGE"], times["neither"]),
        "load": os.getloadavg()[1],
        "neither_s": statistics.median(times["neither"]),
        "rounds": rounds,
    }


def smallest_kept(built: Built, too_small: int, micro_batches: int | None) -> int:
    try:
        return prepared(built, too_small, micro_batches=micro_batches).plan.peak_bytes
    except et.Infeasible as answer:
        return answer.smallest_bytes


def prepared(built: Built, memory: int, **options: Any) -> et.Step:
    return et.prepare(
        built.model, built.loss, built.optimizer, built.batch, memory=memory, planner="sage", allow_inexact=True,
        **options,
    )  # fmt: skip


def _turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    shuffle = random.Random(0)
    for number in range(rounds + 1):
        for name in shuffle.sample(list(ways), len(ways)):
            began = time.perf_counter()
            ways[name]()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - began)
    return times


# ---- the command

SECTIONS = tuple(sage_tables.SHOWN)


def result_of(section: str, case: Case, given: argparse.Namespace) -> dict[str, Any] | None:
    if section == "smallest":
        batches = given.batch or ((2, 4) if given.small else BATCHES)
        return smallest(case, batches, given.device, ours=not given.without_ours)
    if section == "budgets":
        return budgets(case, FRACTIONS[:2] if given.small else FRACTIONS, given.device, given.search)
    return ran(replace(case, batch=BATCH), given.rounds) if case.model == RAN else None


def main() -> None:
    given = _arguments()
    with keeping("sage", sage_tables.page, given) as results:
        for case in cases(small=given.small):
            for section in given.only or SECTIONS:
                if not given.models or case.model in given.models:
                    result = result_of(section, case, given)
                    if result is not None:
                        results.put(section, case.model, result)
            subject.cache_clear()  # nets with their batches: gigabytes in all
        results.show()


def _arguments() -> argparse.Namespace:
    parser = options(__doc__, [case.model for case in CASES if case.model in zoo.MODELS], SECTIONS)
    parser.add_argument("--device", default=DEVICE, help="for which times are modelled")
    parser.add_argument("--batch", type=int, action="append", help=f"for smallest, in place of {BATCHES}")
    parser.add_argument("--without-ours", action="store_true", help="leaves fast out of smallest: it takes minutes")
    parser.add_argument("--search", type=float, default=10.0, help="seconds for each search of optimal")
    parser.add_argument("--rounds", type=int, default=9, help="of what is run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
