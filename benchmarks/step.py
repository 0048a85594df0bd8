"""Is a captured step slower than plain PyTorch, and what memory does it take?

    python -m benchmarks.step [MODEL …]     prints the table and keeps it in benchmarks/results/step.{json,md}

The contenders (`contenders.py`) take turns, in a new random order each round; the ratio of times is taken within a
round, and its median is given with a 95 % interval from order statistics. Memory is how far the resident memory of the
process grew at most over what it was with model and batch in place, and what PyTorch's allocator served at most in one
step. The captured graph comes from the cache, as on every run but the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from benchmarks.contenders import (
    EAGER,
    EAGER_CHANNELS_LAST,
    EDGETRAIN,
    RESULTS,
    Case,
    Way,
    about,
    faster,
    plain,
    ratio,
    take_turns,
)

PLAIN = (EAGER.name, EAGER_CHANNELS_LAST.name)
COMPILE = Way("torch.compile", "compile")
COLUMNS = (*PLAIN, COMPILE.name, EDGETRAIN.name)

CASES = {
    case.model: case
    for case in (
        Case("mobilenet_v2", 16, "sgd"),
        Case("squeezenet", 16, "sgd"),
        Case("resnet18", 16, "sgd"),
        Case("bert_small", 8, "adamw"),
    )
}


def run_case(case: Case, rounds: int, compile_too: bool) -> dict[str, Any]:
    ways = [*plain(case), EDGETRAIN, *([COMPILE] if compile_too else [])]
    times, taken = take_turns(case, ways, rounds)
    memory = {name: {key: took[key] for key in ("grown_bytes", "allocated_bytes")} for name, took in taken.items()}
    least = min((name for name in memory if name in PLAIN), key=lambda name: int(memory[name]["grown_bytes"]))
    return {
        "model": case.model,
        "batch": case.batch,
        "optimizer": case.optimizer,
        "rounds": rounds,
        "median_s": {name: statistics.median(values) for name, values in times.items()},
        "faster_eager": faster(times),
        "time_ratio": ratio(times["edgetrain"], times[faster(times)]),
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
    given = parser.parse_args()
    rows = []
    for name in given.models or CASES:
        print(f"{name} …", file=sys.stderr, flush=True)
        rows.append(run_case(CASES[name], given.rounds, not given.no_compile))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "step.json").write_text(json.dumps({"about": about(), "rows": rows}, indent=1) + "\n")
    (RESULTS / "step.md").write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
