"""Melon's way to keep a budget beside ours: what it costs in time, and what its pool wastes.

    python -m benchmarks.melon [--only SECTION] [--search 10] [MODEL …]

prints its tables and keeps them in benchmarks/results/melon.{json,md}; what a run leaves out stays there as it was.

    plans    predicted extra time, planned peak and seconds to plan of each planner, at fractions of the memory that a
             step takes when it keeps all
    pools    the arena that the requests of each plan take, by Melon's rule and by our layout, above the live peak

Nothing is run but what measures the costs of ops: times are those that the plans predict. A fraction is one of the
keep-all peak above what lasts (parameters, buffers, optimizer state, inputs). The planner "TPS alone" is Melon's
without its pool: it evicts while the bytes alive, not the pool, are above the budget. Where a planner finds nothing,
the smallest budget that it was found to keep stands there.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import edgetrain as et
from benchmarks.budget import Known, known, say
from benchmarks.contenders import Case
from benchmarks.markdown import head, line, made
from benchmarks.study import keeping, options
from edgetrain import zoo
from edgetrain.plan.layout import Block, Layout, check, lay_out
from edgetrain.plan.planners.melon import melon, pool
from edgetrain.plan.problem import problem
from edgetrain.run.arena import lifetimes, predict

FRACTIONS = (0.9, 0.7, 0.5, 0.4, 0.3)
TPS_ALONE = "TPS alone"
PLANNERS = ("melon", TPS_ALONE, "fast", "optimal")
# What Melon was evaluated with, as far as the zoo has it; beside each the width and the size of images for --small.
CASES = {
    Case("mobilenet_v1", 16, "sgd"): (0.25, 64),
    Case("mobilenet_v2", 16, "sgd"): (0.35, 64),
    Case("squeezenet", 16, "sgd"): (1.0, 64),
    Case("resnet50", 8, "sgd"): (0.125, 64),
}

Row = dict[str, Any]
Result = Mapping[str, Any]


def cases(*, small: bool) -> list[Case]:
    """All that the zoo has; or the same in seconds and few megabytes, to see whether everything works."""
    there = {case: sizes for case, sizes in CASES.items() if case.model in zoo.MODELS}
    if not small:
        return list(there)
    return [replace(case, batch=4, classes=10, width=width, input_size=size) for case, (width, size) in there.items()]


# ---- plans


def tps_alone(found: Known, budget: int) -> et.Plan | None:
    task = problem(found.graph, found.costs, found.keep_all.updates)
    order = melon(task, budget, pooled=False)
    return None if order is None else task.plan(order, planner=TPS_ALONE)


@functools.cache
def planned(case: Case, planner: str, fraction: float, search_s: float) -> tuple[et.Plan | None, int | None, float]:
    """The plan, or none; the smallest budget that the planner says it can keep, if it does; the seconds it took."""
    found = known(case)
    made, smallest, budget = None, None, found.budget(fraction)
    say(f"{case.model}: {planner} at {fraction}")
    began = time.perf_counter()
    try:
        if planner == TPS_ALONE:
            made = tps_alone(found, budget)
        else:
            made = et.plan(
                found.graph, found.costs, et.Budget(budget), planner=planner, time_limit_s=search_s,
                updates=found.keep_all.updates, exact=found.keep_all.exact, use_cache=False,
            )  # fmt: skip
    except et.Infeasible as answer:
        smallest = answer.smallest_bytes
    return made, smallest, time.perf_counter() - began


def plans(case: Case, search_s: float) -> dict[str, Any]:
    found = known(case)
    lasting = found.keep_all.persistent_bytes
    above = found.keep_all.peak_bytes - lasting
    rows: list[Row] = []
    for fraction in FRACTIONS:
        for planner in PLANNERS:
            made, smallest, plan_s = planned(case, planner, fraction, search_s)
            row: Row = {"fraction": fraction, "planner": planner, "plan_s": plan_s}
            if made is None:
                row["smallest_fraction"] = None if smallest is None else (smallest - lasting) / above
            else:
                assert made.time_s is not None
                row |= {
                    "extra": made.time_s / found.keep_all_s - 1,
                    "planned_bytes": made.peak_bytes,
                    "reached_fraction": found.fraction(made),
                    "recomputed_ops": len(made.recomputed),
                    "gap": made.gap,
                }
            rows.append(row)
    return {
        "batch": case.batch,
        "ops": len(found.graph.ops),
        "keep_all_bytes": found.keep_all.peak_bytes,
        "persistent_bytes": lasting,
        "keep_all_predicted_s": found.keep_all_s,
        "search_s": search_s,
        "rows": rows,
    }


# ---- pools


def pools(case: Case, search_s: float) -> dict[str, Any]:
    found = known(case)
    made: list[tuple[float, str, et.Plan]] = [(1.0, "keep-all", found.keep_all)]
    for fraction in FRACTIONS:
        for planner in PLANNERS:
            plan, _, _ = planned(case, planner, fraction, search_s)
            if plan is not None:
                made.append((fraction, planner, plan))
    rows = [{"fraction": fraction, "planner": name, **_heights(requests(found, plan))} for fraction, name, plan in made]
    return {"batch": case.batch, "search_s": search_s, "rows": rows}


def requests(found: Known, plan: et.Plan) -> list[Block]:
    """What a step under the plan asks of the allocator, as the costs predict it."""
    events = predict(found.graph, plan, found.costs, tuple(found.graph.sources), rehearse=False)
    if events is None:
        raise RuntimeError("the costs do not tell what the step will ask for")
    return lifetimes(events)


def _heights(blocks: Sequence[Block]) -> Row:
    theirs, ours = pool(blocks), lay_out(blocks)
    row: Row = {"blocks": len(blocks), "live_peak_bytes": ours.live_peak_bytes, "our_way": ours.how}
    for name, layout in (("melon", theirs), ("ours", ours)):
        check(blocks, layout)
        row |= {f"{name}_bytes": layout.height_bytes, f"{name}_waste": _waste(layout)}
    return row


def _waste(layout: Layout) -> float:
    return layout.height_bytes / layout.live_peak_bytes - 1


SECTIONS: dict[str, Callable[[Case, float], dict[str, Any]]] = {"plans": plans, "pools": pools}

# ---- as Markdown


def page(kept: Mapping[str, Mapping[str, Result]]) -> str:
    shown = {"plans": _plans, "pools": _pools}
    lines: list[str] = []
    for section, show in shown.items():
        for model, result in kept.get(section, {}).items():
            lines += [
                f"## {section}: {model}, batch {result['batch']}",
                "",
                *show(result),
                "",
                made(result["about"]),
                "",
            ]
    return "\n".join(lines)


def _plans(result: Result) -> Iterator[str]:
    lasting, peak = result["persistent_bytes"], result["keep_all_bytes"]
    yield f"{result['ops']} ops; keep-all holds {_mb(peak)}, {_mb(lasting)} of it lasting."
    yield ""
    yield from head("fraction", "planner", "extra time", "peak", "ops again", "planned in", "gap")
    for row in result["rows"]:
        first = (f"{row['fraction']:g}", row["planner"])
        if "extra" not in row:
            least = row["smallest_fraction"]
            why = "none found" if least is None else f"none; {least:.2f} is its smallest"
            yield line(*first, why, "—", "—", f"{row['plan_s']:.2f} s", "—")
            continue
        held = f"{_mb(row['planned_bytes'])}, {row['reached_fraction']:.2f}"
        gap = "—" if row["gap"] is None else _percent(row["gap"])
        again = str(row["recomputed_ops"])
        yield line(*first, _percent(row["extra"]), held, again, f"{row['plan_s']:.2f} s", gap)


def _pools(result: Result) -> Iterator[str]:
    yield from head("fraction", "plan of", "blocks", "live peak", "Melon's pool", "waste", "our layout", "waste")
    for row in result["rows"]:
        yield line(
            f"{row['fraction']:g}", row["planner"], str(row["blocks"]), _mb(row["live_peak_bytes"]),
            _mb(row["melon_bytes"]), _percent(row["melon_waste"]), _mb(row["ours_bytes"]), _percent(row["ours_waste"]),
        )  # fmt: skip


def _percent(part: float) -> str:
    return f"{100 * part:.2f} %"


def _mb(n_bytes: float) -> str:
    return f"{n_bytes / 1e6:.1f} MB"


# ---- the command


def main() -> None:
    given = _arguments()
    with keeping("melon", page, given) as results:
        for case in cases(small=given.small):
            for section in given.only or SECTIONS:
                if not given.models or case.model in given.models:
                    results.put(section, case.model, SECTIONS[section](case, given.search))
        results.show()


def _arguments() -> argparse.Namespace:
    parser = options(__doc__, [case.model for case in cases(small=False)], SECTIONS)
    parser.add_argument("--search", type=float, default=10.0, help="seconds for each search of optimal")
    return parser.parse_args()


if __name__ == "__main__":
    main()
