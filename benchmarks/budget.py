"""What does a budget of bytes cost in time: as planned, as measured, and against other ways to save memory?

    python -m benchmarks.budget [--rounds 15] [--only SECTION] [--compile] [MODEL …]

prints its tables and keeps them in benchmarks/results/budget.{json,md}; what a run leaves out stays there as it was.

    plans        extra time, seconds to plan and gap at fractions of the memory that a step takes when it keeps all
    measured     time and resident memory of plain PyTorch, its checkpointing and our plans, in one interleaved run
    prediction   the time of a step as planned from measured costs, against the time that it takes
    batch        how large a batch trains in the memory of a small one, and under 1 GB

A fraction is one of the keep-all peak above what lasts (parameters, buffers, optimizer state, inputs). Where no plan
keeps a budget, the smallest that works takes its place and says so. What ops cost is measured anew by every run, which
has a cache of its own; so planning is never helped by an earlier plan. The limits beside the numbers are those that
the project set itself.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import edgetrain as et
from benchmarks import budget_tables
from benchmarks.contenders import (
    EAGER_CHANNELS_LAST,
    EDGETRAIN,
    Case,
    Way,
    build,
    faster,
    plain,
    prepare,
    ratio,
    take_turns,
)
from benchmarks.study import keeping, options
from edgetrain.bench.contender import Refused

AROUND_SEARCH_S = 2.0  # of the seconds allowed: a process is started, the graph is sent there, the plan is validated
PROBE_ROUNDS = 3
PROBES = 3
AIM = 0.96  # of the memory that may be taken: what processes grow by differs from run to run
NEAR = 0.95  # a process that grew by this part of what it may has a budget that is close enough


@dataclass(frozen=True)
class Subject:
    """A model and what is asked of it.

    extra:     fraction of the memory → the extra time that its plan may take, as a part of the step.
    growth:    part of the resident memory that eager training grows by → the time, as a part of eager's. 1 is keep-all.
               None, here and in extra: shown, and nothing is asked.
    predicted: fractions whose predicted times are compared.
    """

    case: Case
    plan_s: float
    gap: float
    extra: Mapping[float, float | None]
    growth: Mapping[float, float | None] = field(default_factory=dict)
    predicted: tuple[float, ...] = ()

    @property
    def search_s(self) -> float:
        return self.plan_s - AROUND_SEARCH_S


@dataclass(frozen=True)
class Batches:
    """base: plain PyTorch trains this batch; `tried`: those that we try in the same memory, until one does not fit.
    large: trained in `process_bytes`, in at most `time_ratio` of eager's time."""

    model: str
    base: int
    tried: tuple[int, ...]
    large: int
    process_bytes: int
    time_ratio: float


SUBJECTS = (
    Subject(
        Case("mobilenet_v2", 16, "sgd"),
        plan_s=10,
        gap=0.01,
        extra={0.5: 0.12, 0.3: 0.17},
        growth={1.0: 0.75, 0.33: 0.9, 0.25: 1.0, 0.18: 1.2},
        predicted=(1.0, 0.9, 0.75, 0.6, 0.5, 0.35, 0.25),
    ),
    Subject(
        Case("resnet50", 8, "sgd"), plan_s=60, gap=0.05, extra={0.5: 0.06, 0.3: 0.14}, growth={1.0: None, 0.5: None}
    ),
    Subject(Case("squeezenet", 16, "sgd"), plan_s=10, gap=0.01, extra={0.5: None}, growth={1.0: None, 0.5: None}),
    Subject(Case("bert_small", 8, "adamw"), plan_s=10, gap=0.02, extra={0.5: 0.16}, predicted=(1.0, 0.7, 0.5)),
)
BATCHES = Batches("mobilenet_v2", 4, tuple(range(16, 129, 8)), 32, 10**9, 1.3)

# The same in seconds and in few megabytes: whether everything works, not how well.
_SMALL = {"mobilenet_v2": (0.35, 64), "resnet50": (0.125, 64), "squeezenet": (1.0, 64), "bert_small": (0.125, 128)}
SMALL_BATCHES = replace(BATCHES, base=96, tried=(8, 16), large=8)


def small(subject: Subject) -> Subject:
    width, size = _SMALL[subject.case.model]
    case = replace(subject.case, batch=4, classes=10, width=width, input_size=size)
    return replace(subject, case=case, plan_s=AROUND_SEARCH_S + 2, predicted=subject.predicted[::3])


# ---- plans


@dataclass(frozen=True)
class Known:
    """The graph that a step of the case runs, what its ops cost here, and the plan that keeps all."""

    graph: et.Graph
    costs: et.Costs
    keep_all: et.Plan

    @property
    def keep_all_s(self) -> float:
        assert self.keep_all.time_s is not None
        return self.keep_all.time_s

    def budget(self, fraction: float) -> int:
        lasting = self.keep_all.persistent_bytes
        return lasting + int(fraction * (self.keep_all.peak_bytes - lasting))

    def fraction(self, plan: et.Plan) -> float:
        lasting = self.keep_all.persistent_bytes
        return (plan.peak_bytes - lasting) / (self.keep_all.peak_bytes - lasting)

    def plan(self, memory_bytes: int, search_s: float) -> et.Plan:
        """As `et.prepare` plans it, so that a contender finds the plan in the cache."""
        return et.plan(
            self.graph, self.costs, et.Budget(memory_bytes),
            time_limit_s=search_s, updates=self.keep_all.updates, exact=self.keep_all.exact,
        )  # fmt: skip

    def budget_that_works(self, memory_bytes: int, search_s: float) -> tuple[int, et.Plan]:
        """This budget, or else the smallest that works, and its plan."""
        try:
            return memory_bytes, self.plan(memory_bytes, search_s)
        except et.Infeasible as answer:
            return answer.smallest_bytes, self.plan(answer.smallest_bytes, search_s)


@functools.cache
def known(case: Case) -> Known:
    say(f"{case.model}, batch {case.batch}: what its ops cost")
    built = build(case)
    step = prepare(built, EDGETRAIN)
    costs = et.measure_costs(step.graph)
    keep_all = et.plan(
        step.graph, costs, et.Budget(), planner="keep-all", updates=step.plan.updates, exact=step.plan.exact
    )
    return Known(step.graph, costs, keep_all)


def plans(subject: Subject, cache: Path) -> dict[str, Any]:
    found = known(subject.case)
    rows = []
    for fraction, extra in subject.extra.items():
        say(f"{subject.case.model}: plan at {fraction}")
        shutil.rmtree(cache / "plans", ignore_errors=True)
        rows.append(_timed_plan(found, subject, fraction) | {"extra_limit": extra})
    return {
        "batch": subject.case.batch,
        "keep_all_bytes": found.keep_all.peak_bytes,
        "persistent_bytes": found.keep_all.persistent_bytes,
        "keep_all_predicted_s": found.keep_all_s,
        "plan_limit_s": subject.plan_s,
        "gap_limit": subject.gap,
        "rows": rows,
    }


def _timed_plan(found: Known, subject: Subject, fraction: float) -> dict[str, Any]:
    """`refused_s`: the seconds it took to say that nothing fits, where that was the answer."""
    budget, refused_s = found.budget(fraction), None
    began = time.perf_counter()
    try:
        made = found.plan(budget, subject.search_s)
    except et.Infeasible as answer:
        budget, refused_s = answer.smallest_bytes, time.perf_counter() - began
        began = time.perf_counter()
        made = found.plan(budget, subject.search_s)
    plan_s = time.perf_counter() - began
    assert made.time_s is not None
    return {
        "asked_fraction": fraction,
        "fraction": found.fraction(made),
        "budget_bytes": budget,
        "planned_bytes": made.peak_bytes,
        "extra": made.time_s / found.keep_all_s - 1,
        "recomputed_ops": len(made.recomputed),
        "plan_s": plan_s,
        "refused_s": refused_s,
        "gap": made.gap,
    }


# ---- measured


def measured(subject: Subject, rounds: int, compile_too: bool) -> dict[str, Any]:
    case, found = subject.case, known(subject.case)
    say(f"{case.model}: plain PyTorch, to know its memory")
    times, memory = take_turns(case, plain(case), PROBE_ROUNDS)
    best = faster(times)
    ours = _plans_to_measure(subject, found, memory[best]["grown_bytes"])
    others = _other_ways(case, best == EAGER_CHANNELS_LAST.name, compile_too)
    say(f"{case.model}: {rounds} rounds")
    times, memory = take_turns(case, [*plain(case), *ours, *others], rounds)
    best = faster(times)
    limits = {_grown_name(part): (part, limit) for part, limit in subject.growth.items() if limit is not None}
    return {
        "batch": case.batch,
        "rounds": rounds,
        "faster_eager": best,
        "keep_all_predicted_s": found.keep_all_s,
        "rows": [
            {
                "name": name,
                "median_s": statistics.median(times[name]),
                "time_ratio": ratio(times[name], times[best]),
                "memory_ratio": memory[name]["grown_bytes"] / memory[best]["grown_bytes"],
                **dict(zip(("memory_ratio_limit", "time_ratio_limit"), limits.get(name, ()), strict=False)),
                **memory[name],
                **_extra(times, memory[name], name, found),
            }
            for name in times
        ],
    }


def _extra(times: Mapping[str, Sequence[float]], taken: Mapping[str, Any], name: str, found: Known) -> dict[str, Any]:
    """Over keep-all, as a part of its time: as planned, and as it was."""
    predicted_s = taken.get("plan", {}).get("predicted_s")
    if predicted_s is None or name == EDGETRAIN.name:
        return {}
    against = ratio(times[name], times[EDGETRAIN.name])
    return {
        "predicted_extra": predicted_s / found.keep_all_s - 1,
        "measured_extra": {key: value - 1 for key, value in against.items()},
    }


def _plans_to_measure(subject: Subject, found: Known, eager_bytes: int) -> list[Way]:
    ways = [EDGETRAIN]
    for fraction in subject.extra:
        say(f"{subject.case.model}: plan at {fraction}")
        budget, made = found.budget_that_works(found.budget(fraction), subject.search_s)
        reached = found.fraction(made)
        shown = f"{fraction:g}" if reached <= fraction else f"{reached:.2f}, as {fraction:g} is infeasible"
        ways.append(_ours(f"edgetrain at {shown}", subject, budget))
    for part in subject.growth:
        if part < 1:
            ways.append(_ours(_grown_name(part), subject, _budget_for_growth(subject, found, AIM * part * eager_bytes)))
    return ways


def _grown_name(part: float) -> str:
    return EDGETRAIN.name if part == 1 else f"edgetrain in {part:g} of eager's memory"


def _ours(name: str, subject: Subject, memory_bytes: int) -> Way:
    return Way(name, "edgetrain", memory_bytes=memory_bytes, plan_time_s=subject.search_s)


def _budget_for_growth(subject: Subject, found: Known, may_grow_bytes: float) -> int:
    """A budget of the step's tensors under which the process grows by about so much, found by trying.

    A process grows by less than the step's tensors, as parameters are there before, and by more, as libraries take
    memory too; the difference is much the same for all budgets.
    """
    budget = int(may_grow_bytes)
    for _ in range(PROBES):
        say(f"{subject.case.model}: a budget for {may_grow_bytes / 1e6:.0f} MB more in the process")
        asked = budget
        budget, _ = found.budget_that_works(asked, subject.search_s)
        _, memory = take_turns(subject.case, [_ours("probe", subject, budget)], 1)
        grown = memory["probe"]["grown_bytes"]
        smallest = budget > asked and grown > may_grow_bytes
        if smallest or NEAR * may_grow_bytes <= grown <= may_grow_bytes:
            break
        budget += int(may_grow_bytes * (1 + NEAR) / 2 - grown)
    return budget


def _other_ways(case: Case, channels_last: bool, compile_too: bool) -> list[Way]:
    """What PyTorch offers to save memory, in the format that is the faster one for it."""
    ways = [Way("checkpoint per block", "checkpoint", channels_last)]
    if case.model == "mobilenet_v2":
        ways.append(Way("checkpoint_sequential", "checkpoint_sequential", channels_last))
    if compile_too:
        ways.append(Way("torch.compile, activation budget 0.5", "compile", channels_last, activation_budget=0.5))
    return ways


# ---- prediction


def prediction(subject: Subject, rounds: int) -> dict[str, Any]:
    found = known(subject.case)
    made: dict[tuple[int, ...], Way] = {}  # fractions that are infeasible may end in the same plan
    fractions = {}
    for fraction in subject.predicted:
        say(f"{subject.case.model}: plan at {fraction}")
        budget, plan = found.budget_that_works(found.budget(fraction), subject.search_s)
        way = made.setdefault(plan.order, _ours(f"{fraction:g}", subject, budget))
        fractions[way.name] = found.fraction(plan)
    say(f"{subject.case.model}: {rounds} rounds")
    times, memory = take_turns(subject.case, made.values(), rounds)
    rows = []
    for name, values in times.items():
        predicted_s, measured_s = memory[name]["plan"]["predicted_s"], statistics.median(values)
        row = {"fraction": fractions[name], "predicted_s": predicted_s, "measured_s": measured_s}
        rows.append(row | {"error": predicted_s / measured_s - 1})
    return {"batch": subject.case.batch, "rounds": rounds, "rows": rows}


# ---- batch


def batch(subject: Subject, asked: Batches, rounds: int) -> dict[str, Any]:
    """The peak of the whole process counts here: what plain PyTorch needs, we may have."""
    _, memory = take_turns(replace(subject.case, batch=asked.base), plain(subject.case), PROBE_ROUNDS)
    room = min(took["peak_bytes"] for took in memory.values())
    rows = []
    for size in asked.tried:
        rows.append(_batch_in(replace(subject.case, batch=size), subject.search_s, room))
        if not rows[-1]["fits"]:
            break
    return {
        "base_batch": asked.base,
        "base_peak_bytes": room,
        "rows": rows,
        "large": _large(replace(subject.case, batch=asked.large), subject.search_s, asked, rounds),
    }


def _batch_in(case: Case, search_s: float, process_bytes: int) -> dict[str, Any]:
    known(case)  # measures what its ops cost, outside the process that is watched
    say(f"{case.model}: batch {case.batch} in {process_bytes / 1e6:.0f} MB")
    way = replace(EDGETRAIN, process_memory_bytes=process_bytes, plan_time_s=search_s)
    try:
        times, memory = take_turns(case, [way], PROBE_ROUNDS)
    except Refused as why:
        return {"batch": case.batch, "fits": False, "refused": str(why)}
    took = memory[way.name]
    median = statistics.median(times[way.name])
    return {"batch": case.batch, "fits": took["peak_bytes"] <= process_bytes, "median_s": median, **took}


def _large(case: Case, search_s: float, asked: Batches, rounds: int) -> dict[str, Any]:
    alone = _batch_in(case, search_s, asked.process_bytes)
    result = {"process_bytes": asked.process_bytes, "time_ratio_limit": asked.time_ratio}
    if "refused" in alone:
        return result | alone
    say(f"{case.model}: batch {case.batch}, {rounds} rounds")
    way = replace(EDGETRAIN, process_memory_bytes=asked.process_bytes, plan_time_s=search_s)
    times, memory = take_turns(case, [*plain(case), way], rounds)
    best, took = faster(times), memory[way.name]
    return result | {
        "batch": case.batch,
        "rounds": rounds,
        "fits": took["peak_bytes"] <= asked.process_bytes,
        "median_s": statistics.median(times[way.name]),
        "faster_eager": best,
        "eager_median_s": statistics.median(times[best]),
        "eager_peak_bytes": memory[best]["peak_bytes"],
        "time_ratio": ratio(times[way.name], times[best]),
        **took,
    }


# ---- the command


def say(what: str) -> None:
    print(f"{what} …", file=sys.stderr, flush=True)


def _of_earlier_runs(before: dict[str, Any], names: set[str]) -> list[dict[str, Any]]:
    """torch.compile takes minutes, so its row outlives runs without it."""
    rows = [row for row in before["rows"] if row["name"].startswith("torch.compile") and row["name"] not in names]
    return [{"earlier": before["about"]["created"], **row} for row in rows]


def main() -> None:
    given = _arguments()
    subjects = [small(subject) for subject in SUBJECTS] if given.small else list(SUBJECTS)
    asked = SMALL_BATCHES if given.small else BATCHES
    with keeping("budget", budget_tables.page, given) as results:
        cache = Path(os.environ["EDGETRAIN_CACHE"])
        sections: dict[str, Callable[[Subject], dict[str, Any]]] = {
            "plans": lambda subject: plans(subject, cache),
            "measured": lambda subject: measured(subject, given.rounds, given.compile),
            "prediction": lambda subject: prediction(subject, given.rounds),
            "batch": lambda subject: batch(subject, asked, given.rounds),
        }
        for section in given.only or sections:
            for subject in subjects:
                if _wanted(section, subject, given.models, asked):
                    model, result = subject.case.model, sections[section](subject)
                    before = results.load().get(section, {}).get(model)
                    if section == "measured" and before is not None:
                        result["rows"] += _of_earlier_runs(before, {row["name"] for row in result["rows"]})
                    results.put(section, model, result)
        results.show()


def _wanted(section: str, subject: Subject, models: Sequence[str], asked: Batches) -> bool:
    if models and subject.case.model not in models:
        return False
    if section == "prediction":
        return bool(subject.predicted)
    return section != "batch" or subject.case.model == asked.model


def _arguments() -> argparse.Namespace:
    parser = options(__doc__, [subject.case.model for subject in SUBJECTS], budget_tables.SECTIONS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="with torch.compile, which takes minutes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
