"""A budget that moves, 200 times: what following it costs, and whether anything is lost by it.

In:  MobileNetV2 at 224 pixels, batch 16, one thread; a trace of budgets between keep-all and a quarter of the way up
     from the smallest feasible.
Out: results/moving.json and moving.md: the seconds that changes of plan took by kind, as a part of the time trained;
     bytes over the budget at a step's start; steps; whether the weights are bitwise those of a constant budget.

    python -m benchmarks.moving [--changes 200] [--every 2] [--batch 16] [--input-size 224]    about 15 minutes

The trace. Changes come at random instants of the time trained, as they do where another program takes memory: about
one in `--every` steps, exponentially apart, each to a budget drawn evenly from the range. So nearly all of them come
while a step runs. A rise is followed at the next step, and so is a fall that the rest of the step keeps anyway; a fall
that it does not keep is met in the middle of it. Time is counted in steps: the part of a step that has passed is the
time since it began by what a step takes that keeps all.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import edgetrain as et
from benchmarks.contenders import RESULTS, Built, Case, about, build
from benchmarks.markdown import head, line, made
from edgetrain.run.adaptive import Switch
from edgetrain.run.step import Step

SEED = 4
WARM_UP = 3


@dataclass
class Trace:
    """The budget of the moment. It changes when the time trained has come to the next of `instants`.

    step_s: what a step takes that keeps all. begin_s: when the one that runs began; done_steps: how many were before.
    at_start_bytes: the budget in force at its start; None until it has asked.
    in_step: changes that came while a step ran; falls_in_step: those that were falls.
    """

    instants: list[float]
    budgets: list[int]
    now_bytes: int
    step_s: float = 1.0
    begin_s: float = 0.0
    done_steps: int = 0
    at_start_bytes: int | None = None
    changes: int = 0
    in_step: int = 0
    falls_in_step: int = 0
    asked: int = 0

    def __call__(self) -> int:
        self.asked += 1
        running = self.at_start_bytes is not None
        # A step that takes longer than others is one step all the same.
        part = min(0.999, (time.perf_counter() - self.begin_s) / self.step_s) if running else 0.0
        self._come_to(self.done_steps + part, running=running)
        if not running:
            self.at_start_bytes, self.begin_s = self.now_bytes, time.perf_counter()
        return self.now_bytes

    def next_step(self) -> None:
        self.at_start_bytes = None

    def begun_with(self) -> int:
        assert self.at_start_bytes is not None
        return self.at_start_bytes

    def _come_to(self, at: float, *, running: bool) -> None:
        while self.changes < len(self.instants) and self.instants[self.changes] <= at:
            coming = self.budgets[self.changes]
            self.in_step += running
            self.falls_in_step += running and coming < self.now_bytes
            self.now_bytes = coming
            self.changes += 1


def trace(count: int, every: float, low: int, high: int) -> Trace:
    draw = random.Random(SEED)
    instants, at = [], 0.0
    for _ in range(count):
        at += draw.expovariate(1 / every)
        instants.append(at)
    return Trace(instants, [draw.randint(low, high) for _ in range(count)], high)


def peaks(step: Step) -> list[int]:
    (variant,) = step._variants.values()
    assert variant.ladder is not None
    return [plan.peak_bytes for plan in variant.ladder.plans]


@dataclass(frozen=True)
class Run:
    """What one replay came to. starts: for each step the budget at its start and the bytes of its plan."""

    losses: list[float]
    seconds: list[float]
    starts: list[tuple[int, int]]
    switches: list[Switch]
    trace: Trace
    peaks: list[int]


def replay(case: Case, count: int, every: float) -> tuple[Built, Run]:
    built = build(case)
    moving: list[Trace] = []
    step = et.prepare(
        built.model, built.loss, built.optimizer, built.batch, memory=lambda: moving[0]() if moving else 10**15
    )
    most, *_, least = found = peaks(step)
    low, high = least + (most - least) // 4, most
    losses, seconds, starts = [], [], []
    for _ in range(WARM_UP):
        begin = time.perf_counter()
        losses.append(float(step(*built.batch)))
        seconds.append(time.perf_counter() - begin)
    budget = trace(count, every, low, high)
    budget.step_s = seconds[-1]
    moving.append(budget)
    seconds.clear()
    while budget.changes < count:
        budget.next_step()
        begin = time.perf_counter()
        losses.append(float(step(*built.batch)))
        seconds.append(time.perf_counter() - begin)
        budget.done_steps += 1
        starts.append((budget.begun_with(), step.plan.peak_bytes))
        if len(seconds) % 20 == 0:
            print(f"step {len(seconds)}, {budget.changes} changes", file=sys.stderr, flush=True)
    return built, Run(losses, seconds, starts, step.switches, budget, found)


def constant(case: Case, steps: int) -> tuple[Built, list[float]]:
    """The same training under one budget, in the middle of the range: recomputing, and never switching."""
    built = build(case)
    largest = et.prepare(built.model, built.loss, built.optimizer, built.batch, memory="1TB").plan.peak_bytes
    step = et.prepare(built.model, built.loss, built.optimizer, built.batch, memory=int(0.6 * largest), planner="fast")
    return built, [float(step(*built.batch)) for _ in range(steps)]


def states(built: Built) -> Iterator[torch.Tensor]:
    yield from built.model.state_dict().values()
    for state in built.optimizer.state.values():
        yield from (value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor))


def bitwise(a: Built, b: Built) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    return all(torch.equal(bits(x), bits(y)) for x, y in zip(states(a), states(b), strict=True))


def summary(run: Run, total_s: float) -> dict[str, Any]:
    """By kind of switch: how many, what planning took, what handing memory back took."""

    def of(switches: list[Switch]) -> dict[str, Any]:
        planning = [switch.planning_s for switch in switches]
        back = [switch.giving_back_s for switch in switches]
        return {
            "count": len(switches),
            "planning_s": sum(planning),
            "planning_median_s": statistics.median(planning) if planning else None,
            "planning_most_s": max(planning, default=None),
            "planning_part": sum(planning) / total_s,
            "giving_back_s": sum(back),
            "giving_back_part": sum(back) / total_s,
        }

    return {
        "in a step": of([switch for switch in run.switches if switch.in_step]),
        "between steps": of([switch for switch in run.switches if not switch.in_step]),
        "all": of(run.switches),
    }


def measure(case: Case, count: int, every: float) -> dict[str, Any]:
    built, run = replay(case, count, every)
    total_s = sum(run.seconds)
    steps = WARM_UP + len(run.seconds)
    other, losses = constant(case, steps)
    return {
        "case": asdict(case),
        "changes": run.trace.changes,
        "changes_in_a_step": run.trace.in_step,
        "falls_in_a_step": run.trace.falls_in_step,
        "steps": len(run.seconds),
        "total_s": total_s,
        "step_median_s": statistics.median(run.seconds),
        "ladder_bytes": run.peaks,
        "budget_bytes": [min(run.trace.budgets), max(run.trace.budgets)],
        "switches": summary(run, total_s),
        "over_bytes_at_start": max(max(0, plan - budget) for budget, plan in run.starts),
        "falls_not_met": sum(switch.over_bytes > 0 for switch in run.switches),
        "most_over_bytes": max(switch.over_bytes for switch in run.switches),
        "losses_same": losses == run.losses,
        "weights_bitwise": bitwise(built, other),
        "asked": run.trace.asked,
        "all_switches": [asdict(switch) for switch in run.switches],
        "seconds": run.seconds,
    }


def page(results: dict[str, Any]) -> Iterator[str]:
    yield "# A budget that moves"
    for result in results.values():
        yield ""
        yield from section(result)


def section(result: dict[str, Any]) -> Iterator[str]:
    case, switches = result["case"], result["switches"]
    yield f"## {name_of(result)}"
    yield ""
    yield f"{case['model']}, batch {case['batch']}, {case['input_size']} pixels, one thread. {made(result['about'])}."
    yield ""
    low, high = (n / 1e6 for n in result["budget_bytes"])
    yield (
        f"{result['changes']} changes of the budget at random instants over {result['steps']} steps, drawn evenly from "
        f"{low:.0f} to {high:.0f} MB (from a quarter of the way up from the smallest plan to keep-all). "
        f"{result['changes_in_a_step']} of them came while a step ran, {result['falls_in_a_step']} of those as a fall; "
        f"{switches['in a step']['count']} of these the step could not keep, and were met in the middle of it. The "
        "others were followed at the next step."
    )
    yield ""
    yield from head(
        "change of plan", "how often", "planning, median", "most", "all", "of the time", "handing memory back"
    )
    for kind, row in switches.items():
        yield line(
            kind, str(row["count"]), _ms(row["planning_median_s"]), _ms(row["planning_most_s"]),
            f"{row['planning_s']:.2f} s", f"**{100 * row['planning_part']:.2f} %**",
            f"{row['giving_back_s']:.2f} s, {100 * row['giving_back_part']:.2f} %",
        )  # fmt: skip
    yield ""
    yield (
        f"Trained for {result['total_s']:.0f} s, the median of a step is {result['step_median_s']:.2f} s. Planning "
        "is all that a change takes: choosing a plan, or evicting and planning the rest anew, validating it, building "
        "what runs it, taking the live tensors over. Handing memory back is what the kernel takes to have its pages "
        "again."
    )
    yield ""
    yield from head("promise", "found")
    yield line("bytes over the budget in force at a step's start", str(result["over_bytes_at_start"]))
    yield line("falls in a step that could not be met in full", f"{result['falls_not_met']}")
    yield line(
        "no step lost or repeated (losses of all steps are those of a constant budget)", _yes(result["losses_same"])
    )
    yield line("weights and momentum bitwise those of a constant budget", _yes(result["weights_bitwise"]))


def name_of(result: dict[str, Any]) -> str:
    case = result["case"]
    return f"{case['model']}, batch {case['batch']}, {case['input_size']} pixels, {result['changes']} changes"


def keep(file: Path, result: dict[str, Any]) -> dict[str, Any]:
    """All results of the file, this one among them in place of an older one of its name."""
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    kept[name_of(result)] = result
    file.write_text(json.dumps(kept, indent=1) + "\n")
    return kept


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.2f} ms"


def _yes(same: bool) -> str:
    return "yes" if same else "**no**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--every", type=float, default=2.0, help="steps from one change to the next, on average")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--input-size", type=int, default=224)
    parser.add_argument("--out", type=Path, default=RESULTS / "moving.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    case = Case("mobilenet_v2", given.batch, "sgd", input_size=given.input_size)
    result = {"about": about(), **measure(case, given.changes, given.every)}
    text = "\n".join(page(keep(given.out, result))) + "\n"
    given.out.with_suffix(".md").write_text(text)
    print(text)
    if result["over_bytes_at_start"] or not result["losses_same"] or not result["weights_bitwise"]:
        sys.exit("a promise was not kept")


if __name__ == "__main__":
    main()
