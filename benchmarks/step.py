"""Is a captured step slower than plain PyTorch, and what memory does it take?

    python benchmarks/step.py [MODEL …]     prints the table and keeps it in benchmarks/results/step.{json,md}

Each contender is a process of its own, so that none sees another's allocator. They take turns, in a new random order
each round, so that noise of the machine meets all of them; the ratio is taken within a round, and its median is given
with a 95 % interval from order statistics. Memory is how far the resident memory of the process grew at most over
what it was with model and batch in place, and what PyTorch's allocator served at most in one step. The captured graph
comes from the cache, as on every run but the first.
"""

from __future__ import annotations

import argparse
import json
import math
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
PLAIN = ("eager", "eager channels-last")
COLUMNS = (*PLAIN, "torch.compile", "edgetrain")


@dataclass(frozen=True)
class Case:
    model: str
    batch: int
    optimizer: str
    images: bool

    def contenders(self, compile_too: bool) -> list[str]:
        plain = list(PLAIN) if self.images else ["eager"]
        return [*plain, "edgetrain", *(["torch.compile"] if compile_too else [])]


CASES = {
    case.model: case
    for case in (
        Case("mobilenet_v2", 16, "sgd", images=True),
        Case("squeezenet", 16, "sgd", images=True),
        Case("resnet18", 16, "sgd", images=True),
        Case("bert_small", 8, "adamw", images=False),
    )
}


# ---- in the process of a contender


def make_step(case: Case, name: str) -> tuple[Callable[[], object], int]:
    """A function that makes one training step, and the resident bytes before it. Same weights and batch for all."""
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
    before = _status("VmRSS")
    if name == "edgetrain":
        step = et.prepare(model, entry.task.loss, optimizer, batch)
        return lambda: step(*batch), before
    forward = torch.compile(model) if name == "torch.compile" else model

    def eager() -> None:
        optimizer.zero_grad()
        entry.task.loss(forward, *batch).backward()
        optimizer.step()

    return eager, before


def serve(case: Case, name: str) -> None:
    """Answers on standard output. `step`: one step, its seconds. `memory`: what it took in all since the start."""
    step, before = make_step(case, name)
    for line in sys.stdin:
        if line.strip() == "step":
            began = time.perf_counter()
            step()
            print(json.dumps(time.perf_counter() - began), flush=True)
        else:
            grown = _status("VmHWM") - before
            print(json.dumps({"grown_bytes": grown, "allocated_bytes": allocated_peak(step)}), flush=True)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


# ---- in the process that compares them


class Contender:
    def __init__(self, case: Case, name: str) -> None:
        command = [sys.executable, __file__, "--serve", case.model, name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, word: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a contender ended with exit code {self.process.wait()}")
        return json.loads(answer)


def measure(case: Case, rounds: int, compile_too: bool) -> tuple[dict[str, list[float]], dict[str, Any]]:
    running = {name: Contender(case, name) for name in case.contenders(compile_too)}
    for one in running.values():
        one.ask("step")  # warm up, one after the other
        one.ask("step")
    times: dict[str, list[float]] = {name: [] for name in running}
    shuffle = random.Random(0)
    for _ in range(rounds):
        order = list(running)
        shuffle.shuffle(order)
        for name in order:
            times[name].append(running[name].ask("step"))
    memory = {name: one.ask("memory") for name, one in running.items()}
    for one in running.values():
        one.process.kill()
    return times, memory


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Median with a 95 % interval from order statistics, which assumes nothing of the distribution."""
    ordered, n = sorted(values), len(values)
    rank, tail = 0, 0.5**n
    while rank < n // 2 and tail + math.comb(n, rank + 1) * 0.5**n <= 0.025:
        rank += 1
        tail += math.comb(n, rank) * 0.5**n
    return statistics.median(ordered), ordered[rank], ordered[n - 1 - rank]


def run_case(case: Case, rounds: int, compile_too: bool) -> dict[str, Any]:
    times, memory = measure(case, rounds, compile_too)
    faster = min((name for name in times if name in PLAIN), key=lambda name: statistics.median(times[name]))
    ratios = [a / b for a, b in zip(times["edgetrain"], times[faster], strict=True)]
    median, low, high = median_interval(ratios)
    least = min((name for name in memory if name in PLAIN), key=lambda name: int(memory[name]["grown_bytes"]))
    return {
        "model": case.model,
        "batch": case.batch,
        "optimizer": case.optimizer,
        "rounds": rounds,
        "median_s": {name: statistics.median(values) for name, values in times.items()},
        "faster_eager": faster,
        "time_ratio": {"median": median, "low": low, "high": high},
        "memory": memory,
        "leaner_eager": least,
        "memory_ratio": memory["edgetrain"]["grown_bytes"] / memory[least]["grown_bytes"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model, batch | eager | channels-last | torch.compile | edgetrain | time ratio (95 %) | memory, ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds = [row["median_s"].get(name) for name in COLUMNS]
        cells = [f"{s * 1e3:.0f} ms" if s is not None else "—" for s in seconds]
        ratio, memory = row["time_ratio"], row["memory"]
        plain, ours = memory[row["leaner_eager"]]["grown_bytes"], memory["edgetrain"]["grown_bytes"]
        lines.append(
            f"| {row['model']}, {row['batch']} | {' | '.join(cells)} | "
            f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f}) | "
            f"{plain / 1e6:.0f} → {ours / 1e6:.0f} MB, {row['memory_ratio']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"which of {', '.join(CASES)}; all by default")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(CASES[given.serve[0]], given.serve[1])
        return
    rows = []
    for name in given.models or CASES:
        print(f"{name} …", file=sys.stderr, flush=True)
        rows.append(run_case(CASES[name], given.rounds, not given.no_compile))
    record = new_record([Path(sys.argv[0]).name, *sys.argv[1:]])
    about = {"machine": record.machine.cpu, "cores": record.machine.usable_cores, "commit": record.commit}
    about |= {"dirty": record.dirty, "torch": record.versions.torch, "created": record.created}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "step.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    (RESULTS / "step.md").write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
