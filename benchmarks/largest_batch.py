"""How large a batch trains in the memory that plain PyTorch takes for a small one, without micro-batches?

    python -m benchmarks.largest_batch [--rounds 7] [--only SECTION] [--search 10] [MODEL …]

prints its tables and keeps them in benchmarks/results/largest_batch.{json,md}; what a run leaves out stays as it was.

    measured   the room is the peak resident memory of plain PyTorch's process (its faster format in time, its smaller
               one in memory); batches of ours are tried until one does not fit or takes more than 1.5× the time a
               sample. Processes take turns.
    planned    the room is what the tensors of plain PyTorch's order take (all kept, gradients too, as the plan without
               early updates has them); the largest batch that each planner keeps in it at no more than 1.5× the time
               a sample. Times are modelled for one device, as the table says.

Melon reports up to 4.33× the batch of its baseline in the same memory.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import edgetrain as et
from benchmarks.budget import PROBE_ROUNDS, known, say
from benchmarks.contenders import EDGETRAIN, Case, Way, build, compete, faster, plain, ratio, take_turns
from benchmarks.markdown import head, line, made
from benchmarks.study import keeping, options
from edgetrain.bench.contender import Refused

MELON = 4.33
MOST_TIME = 1.5  # a sample, of plain PyTorch's
UPWARDS = (4.5, 6, 8, 12, 16)
DOWNWARDS = (4, 3, 2)  # where the first does not do
DEVICE = "rpi4"
PLANNERS = ("keep-all", "melon", "fast", "optimal")


# The batch is that of plain PyTorch; beside each the width and the size of images for --small.
CASES = {
    Case("mobilenet_v1", 8, "sgd"): (0.25, 64),
    Case("mobilenet_v2", 8, "sgd"): (0.35, 64),
    Case("squeezenet", 8, "sgd"): (1.0, 64),
    Case("resnet50", 4, "sgd"): (0.125, 64),
}


def cases(*, small: bool) -> list[Case]:
    """All; or the same in seconds and few megabytes, to see whether everything works."""
    if not small:
        return list(CASES)
    return [replace(case, batch=32, classes=10, width=width, input_size=size) for case, (width, size) in CASES.items()]


# ---- measured


def measured(case: Case, search_s: float, rounds: int) -> dict[str, Any]:
    say(f"{case.model}: plain PyTorch, batch {case.batch}")
    _, memory = take_turns(case, plain(case), PROBE_ROUNDS)
    room = min(took["peak_bytes"] for took in memory.values())
    rows: list[dict[str, Any]] = []
    for times in UPWARDS:
        rows.append(_against_plain(case, round(times * case.batch), room, search_s, rounds))
        if not rows[-1].get("counts"):
            break
    for times in () if rows[0].get("counts") else DOWNWARDS:
        rows.append(_against_plain(case, round(times * case.batch), room, search_s, rounds))
        if rows[-1].get("counts"):
            break
    largest = max((row["batch"] for row in rows if row.get("counts")), default=None)
    return {"base": case.batch, "room_bytes": room, "largest": largest, "rounds": rounds, "rows": rows}


def _against_plain(case: Case, batch: int, room: int, search_s: float, rounds: int) -> dict[str, Any]:
    larger = replace(case, batch=batch)
    known(larger)  # measures what its ops cost, outside the process that is watched
    say(f"{case.model}: batch {batch} in {room / 1e6:.0f} MB")
    ours = Way("ours", EDGETRAIN.kind, process_memory_bytes=room, plan_time_s=search_s)
    try:
        times, memory = compete([*((case, way) for way in plain(case)), (larger, ours)], rounds)
    except Refused:
        return {"batch": batch, "refused": True}
    best = faster(times)
    each = ratio([t / batch for t in times[ours.name]], [t / case.batch for t in times[best]])
    took = memory[ours.name]
    return {
        "batch": batch, "sample_s": statistics.median(times[ours.name]) / batch,
        "plain": best, "plain_sample_s": statistics.median(times[best]) / case.batch, "time_ratio": each,
        "counts": took["peak_bytes"] <= room and each["median"] <= MOST_TIME, **took,
    }  # fmt: skip


# ---- planned


def planned(case: Case, search_s: float, rounds: int) -> dict[str, Any]:
    graph, costs = _modelled(case)
    plain_plan = et.plan(graph, costs, et.Budget(), planner="keep-all", updates="together")
    assert plain_plan.time_s is not None
    room, sample_s = plain_plan.peak_bytes, plain_plan.time_s / case.batch
    rows = [{"planner": name, **_largest(case, name, room, sample_s, search_s)} for name in PLANNERS]
    return {"base": case.batch, "room_bytes": room, "device": DEVICE, "search_s": search_s, "rows": rows}


def _largest(case: Case, planner: str, room: int, sample_s: float, search_s: float) -> dict[str, Any]:
    """By doubling, then halving what is between; a batch that takes too long counts as one that does not fit."""

    def fits(batch: int) -> et.Plan | None:
        say(f"{case.model}: {planner}, batch {batch} in {room / 1e6:.0f} MB of tensors")
        graph, costs = _modelled(replace(case, batch=batch))
        try:
            plan = et.plan(graph, costs, et.Budget(room), planner=planner, time_limit_s=search_s, use_cache=False)
        except et.Infeasible:
            return None
        assert plan.time_s is not None
        return plan if plan.time_s / batch <= MOST_TIME * sample_s else None

    best, low, high = fits(case.batch), case.batch, 2 * case.batch
    if best is None:
        return {"batch": None}
    while (plan := fits(high)) is not None:
        best, low, high = plan, high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        plan = fits(middle)
        best, low, high = (plan, middle, high) if plan is not None else (best, low, middle)
    assert best.time_s is not None
    return {"batch": low, "time_ratio": best.time_s / low / sample_s, "peak_bytes": best.peak_bytes}


def _modelled(case: Case) -> tuple[et.Graph, et.Costs]:
    built = build(case)
    graph = et.capture(built.model, built.loss, built.optimizer, built.batch)
    return graph, et.model_costs(graph, DEVICE)


SECTIONS: dict[str, Callable[[Case, float, int], dict[str, Any]]] = {"measured": measured, "planned": planned}

# ---- as Markdown


def page(kept: Mapping[str, Mapping[str, Any]]) -> str:
    shown = {"measured": _measured_table, "planned": _planned_table}
    lines = ["# The largest batch in the memory of a small one", ""]
    for section, show in shown.items():
        if section in kept:
            lines += [f"## {section}", "", *show(kept[section]), ""]
            lines += [f"- {model}: {made(result['about'])}" for model, result in kept[section].items()]
            lines += [""]
    return "\n".join(lines)


def _measured_table(results: Mapping[str, Any]) -> Iterator[str]:
    yield from head("model", "batch", "process at most", "a sample", "plain PyTorch", "time ratio a sample (95 %)")
    for model, result in results.items():
        for row in result["rows"]:
            first = (model, f"{row['batch']} = {row['batch'] / result['base']:g}×")
            if "refused" in row:
                yield line(*first, f"none in {_mb(result['room_bytes'])}", "—", "—", "—")
                continue
            kept = f"{_mb(row['peak_bytes'])} of {_mb(result['room_bytes'])}"
            theirs = f"batch {result['base']}, {row['plain']}: {_ms(row['plain_sample_s'])}"
            found = row["time_ratio"]
            between = f"{found['median']:.2f} ({found['low']:.2f}–{found['high']:.2f})"
            yield line(*first, kept, _ms(row["sample_s"]), theirs, between)
    yield ""
    over = []
    for model, result in results.items():
        times = 0.0 if result["largest"] is None else result["largest"] / result["base"]
        over.append(times > MELON)
        yield f"- {model}: {times:g}× at no more than {MOST_TIME}× the time a sample."
    yield f"- Above Melon's {MELON}×: {sum(over)} of {len(over)}."


def _planned_table(results: Mapping[str, Any]) -> Iterator[str]:
    yield from head("model", "tensors may take", "planner", "largest batch", "time ratio a sample")
    for model, result in results.items():
        for row in result["rows"]:
            where = f"{_mb(result['room_bytes'])} (batch {result['base']})"
            if row["batch"] is None:
                yield line(model, where, row["planner"], f"none, not even {result['base']}", "—")
                continue
            batch = f"{row['batch']} = {row['batch'] / result['base']:.1f}×"
            yield line(model, where, row["planner"], batch, f"{row['time_ratio']:.2f}")
    yield ""
    yield f"Times are modelled for {DEVICE}; nothing ran."


def _mb(n_bytes: float) -> str:
    return f"{n_bytes / 1e6:.0f} MB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


# ---- the command


def main() -> None:
    given = _arguments()
    with keeping("largest_batch", page, given) as results:
        for section in given.only or SECTIONS:
            for case in cases(small=given.small):
                if not given.models or case.model in given.models:
                    results.put(section, case.model, SECTIONS[section](case, given.search, given.rounds))
        results.show()


def _arguments() -> argparse.Namespace:
    parser = options(__doc__, [case.model for case in CASES], SECTIONS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--search", type=float, default=10.0, help="seconds for each search of optimal")
    return parser.parse_args()


if __name__ == "__main__":
    main()
