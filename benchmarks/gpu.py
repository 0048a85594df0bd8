"""A budget on a GPU: MobileNetV2 at batch 256 in 0.30 of plain PyTorch's memory.

    python -m benchmarks.gpu      on a machine with a CUDA device; keeps benchmarks/results/gpu.{json,md}

All contenders run in one process, one after the other with the allocator's cache emptied in between, in several rounds;
a step's time is the median over rounds of the mean of ten steps. Memory is how far `torch.cuda.max_memory_allocated`
lies above what was there before the model was made: model, optimizer's state and batch count for all.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import edgetrain as et
from edgetrain import zoo
from edgetrain.measure.record import new_record

RESULTS = Path(__file__).parent / "results"
PART = 0.30
STEPS = 10
Work = Callable[[], object]


def made(batch: int) -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = zoo.build("mobilenet_v2").cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    items = tuple(t.cuda() for t in zoo.get("mobilenet_v2").example(batch))
    return model, optimizer, items


@contextmanager
def eager(batch: int, *, by_block: bool = False) -> Iterator[tuple[Work, dict[str, Any]]]:
    model, optimizer, items = made(batch)
    if by_block:
        blocks: nn.Sequential = model.features  # type: ignore[assignment]
        for block in blocks:
            inner = block.forward
            block.forward = lambda *x, inner=inner: checkpoint(inner, *x, use_reentrant=False)
    loss = zoo.get("mobilenet_v2").task.loss

    def step() -> None:
        optimizer.zero_grad()
        loss(model, *items).backward()
        optimizer.step()

    yield step, {}


@contextmanager
def ours(batch: int, memory: int | None) -> Iterator[tuple[Work, dict[str, Any]]]:
    model, optimizer, items = made(batch)
    step = et.prepare(model, zoo.get("mobilenet_v2").task.loss, optimizer, items, memory=memory, plan_time_s=30)
    plan = step.plan
    about = {
        "plan": str(plan), "planned_bytes": plan.peak_bytes, "recomputed": len(plan.recomputed),
        "predicted_extra": None if plan.time_s is None else plan.time_s / (plan.keep_all_time_s or 1) - 1,
    }  # fmt: skip
    yield lambda: step(*items), about


def measure(make: Any) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()  # cuBLAS keeps a workspace for good
    with make as (step, about):
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        time_s = (time.perf_counter() - began) / STEPS
        return {"time_s": time_s, "bytes": torch.cuda.max_memory_allocated() - before, **about}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    batch = arguments.batch
    whole = measure(eager(batch))["bytes"]
    contenders: dict[str, Callable[[], Any]] = {
        "eager": lambda: eager(batch),
        "checkpoint of each block": lambda: eager(batch, by_block=True),
        "edgetrain, all kept": lambda: ours(batch, None),
        f"edgetrain, {PART} of eager's": lambda: ours(batch, int(PART * whole)),
    }
    rounds = [{name: measure(make()) for name, make in contenders.items()} for _ in range(arguments.rounds)]
    table = {}
    for name in contenders:
        ratios = [found[name]["time_s"] / found["eager"]["time_s"] for found in rounds]
        last = rounds[-1][name]
        table[name] = {
            **last,
            "time_s": statistics.median(found[name]["time_s"] for found in rounds),
            "time_ratio": statistics.median(ratios),
            "time_ratio_range": [min(ratios), max(ratios)],
            "memory_ratio": last["bytes"] / rounds[-1]["eager"]["bytes"],
        }
    lines = ["| MobileNetV2, batch 256 | memory | ratio | time | ratio (range) |", "|---|---|---|---|---|"]
    for name, row in table.items():
        low, high = row["time_ratio_range"]
        lines.append(
            f"| {name} | {row['bytes'] / 1e9:.2f} GB | {row['memory_ratio']:.2f} | {1e3 * row['time_s']:.0f} ms "
            f"| {row['time_ratio']:.2f} ({low:.2f}–{high:.2f}) |"
        )
    text = "\n".join(lines)
    print(text)
    print(json.dumps(table, indent=1))
    record = new_record(["benchmarks/gpu.py"])
    RESULTS.mkdir(exist_ok=True)
    kept = {
        "machine": torch.cuda.get_device_name(),
        "commit": record.commit,
        "torch": torch.__version__,
        "table": table,
    }
    (RESULTS / "gpu.json").write_text(json.dumps(kept, indent=1) + "\n")
    (RESULTS / "gpu.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
