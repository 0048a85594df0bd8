"""Is a captured step slower than plain PyTorch, and what memory does it take?

    python benchmarks/step.py [CASE …]         prints the table and keeps it in benchmarks/results/step.{json,md}

Time: one process for each case. All contenders take turns, in a new random order each round, so that noise of the
machine meets all of them; the ratio is taken within a round, and its median is given with a 95 % interval (order
statistics). Memory: a process of its own for each contender: how far the resident memory grew at most over what it
was with model, optimizer state and batch in place; and what PyTorch's allocator served at most. Both cover three
whole steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import edgetrain as et
from edgetrain import zoo
from edgetrain.measure.record import new_record
from edgetrain.run.memory import allocated_peak

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Case:
    model: str
    batch: int
    optimizer: str
    images: bool


CASES = {
    case.model: case
    for case in (
        Case("mobilenet_v2", 16, "sgd", images=True),
        Case("squeezenet", 16, "sgd", images=True),
        Case("resnet18", 16, "sgd", images=True),
        Case("bert_small", 8, "adamw", images=False),
    )
}
PLAIN = ("eager", "eager channels-last")


def contender(case: Case, name: str) -> Callable[[], object]:
    """A function that makes one training step. The same initial weights and batch for every contender."""
    entry = zoo.get(case.model)
    torch.manual_seed(0)
    model = zoo.build(case.model)
    batch = entry.example(case.batch)
    if name == "eager channels-last":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch = (batch[0].contiguous(memory_format=torch.channels_last), *batch[1:])
    optimizer: torch.optim.Optimizer
    if case.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if name == "edgetrain":
        step = et.prepare(model, entry.task.loss, optimizer, batch)
        return lambda: step(*batch)
    loss_of: Callable[..., torch.Tensor] = entry.task.loss
    if name == "torch.compile":
        compiled = torch.compile(model)
        original = loss_of
        loss_of = lambda _model, *b: original(compiled, *b)  # noqa: E731

    def step_eagerly() -> None:
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        optimizer.step()

    return step_eagerly


def names(case: Case, compile_too: bool) -> list[str]:
    plain = list(PLAIN) if case.images else ["eager"]
    return [*plain, "edgetrain", *(["torch.compile"] if compile_too else [])]


def measure_times(case: Case, rounds: int, compile_too: bool) -> dict[str, list[float]]:
    steps = {name: contender(case, name) for name in names(case, compile_too)}
    for step in steps.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    shuffle = random.Random(0)
    for _ in range(rounds):
        order = list(steps)
        shuffle.shuffle(order)
        for name in order:
            began = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - began)
    return times


def measure_memory(case: Case, name: str) -> dict[str, int]:
    """Run this in a fresh process. The captured graph comes from the cache, as on every run but the first."""
    step = contender(case, name)
    step()  # makes the optimizer state and the threads
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
    before = _status("VmRSS")
    for _ in range(3):
        step()
    grown = _status("VmHWM") - before
    return {"grown_bytes": grown, "allocated_bytes": allocated_peak(step)}


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Median with a 95 % interval from order statistics, which assumes nothing of the distribution."""
    ordered, n = sorted(values), len(values)
    rank, tail = 0, 0.5**n
    while rank < n // 2 and tail + math.comb(n, rank + 1) * 0.5**n <= 0.025:
        rank += 1
        tail += math.comb(n, rank) * 0.5**n
    return statistics.median(ordered), ordered[rank], ordered[n - 1 - rank]


def child(*arguments: str) -> Any:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TORCHINDUCTOR_CPP_WRAPPER": "0"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_case(case: Case, rounds: int, compile_too: bool) -> dict[str, Any]:
    extra = [] if compile_too else ["--no-compile"]
    times: dict[str, list[float]] = child("--times", case.model, "--rounds", str(rounds), *extra)
    memory = {name: child("--memory", case.model, name) for name in names(case, compile_too)}
    faster = min((name for name in times if name in PLAIN), key=lambda name: statistics.median(times[name]))
    ratios = [a / b for a, b in zip(times["edgetrain"], times[faster], strict=True)]
    median, low, high = median_interval(ratios)
    smallest = min(memory[name]["grown_bytes"] for name in PLAIN if name in memory)
    return {
        "model": case.model,
        "batch": case.batch,
        "optimizer": case.optimizer,
        "rounds": rounds,
        "median_s": {name: statistics.median(values) for name, values in times.items()},
        "faster_eager": faster,
        "ratio": {"median": median, "low": low, "high": high},
        "memory": memory,
        "memory_ratio": memory["edgetrain"]["grown_bytes"] / smallest,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model, batch | eager | eager channels-last | torch.compile | edgetrain | time ratio (95 %) | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds = [row["median_s"].get(name) for name in ("eager", "eager channels-last", "torch.compile", "edgetrain")]
        cells = [f"{s * 1e3:.0f} ms" if s is not None else "—" for s in seconds]
        ratio = row["ratio"]
        plain = min(row["memory"][name]["grown_bytes"] for name in PLAIN if name in row["memory"])
        ours = row["memory"]["edgetrain"]["grown_bytes"]
        lines.append(
            f"| {row['model']}, {row['batch']} | {' | '.join(cells)} | "
            f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f}) | "
            f"{plain / 1e6:.0f} → {ours / 1e6:.0f} MB ({row['memory_ratio']:.2f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases", nargs="*", default=list(CASES), choices=[*CASES, []], help="which models; all by default"
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out, which takes minutes to warm up"
    )
    parser.add_argument("--times", help=argparse.SUPPRESS)
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.times:
        print(json.dumps(measure_times(CASES[given.times], given.rounds, not given.no_compile)))
    elif given.memory:
        print(json.dumps(measure_memory(CASES[given.memory[0]], given.memory[1])))
    else:
        rows = []
        for name in given.cases:
            print(f"{name} …", file=sys.stderr, flush=True)
            rows.append(run_case(CASES[name], given.rounds, not given.no_compile))
        record = new_record([Path(sys.argv[0]).name, *sys.argv[1:]])
        RESULTS.mkdir(exist_ok=True)
        about = {"machine": record.machine.cpu, "cores": record.machine.usable_cores, "commit": record.commit}
        about |= {"torch": record.versions.torch, "created": record.created}
        (RESULTS / "step.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
        (RESULTS / "step.md").write_text(table(rows) + "\n")
        print(table(rows))


if __name__ == "__main__":
    main()
