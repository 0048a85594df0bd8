"""What it takes that a captured graph is never stale: two captures, the comparison before each step, the net below it.

    python -m benchmarks.capture [--seconds 60]     prints it and keeps it in benchmarks/results/capture.json

Limits: both captures and the comparison 2 s for MobileNetV2 and 6 s for a transformer of 24 layers on two cores;
looking before a step 150 µs for LeNet, and 3 % of a step; capturing again 1 % of a run. Looks and steps take turns in
one process; the share of the captures is that of a run of --seconds with nothing else in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from benchmarks.contenders import RESULTS, about
from edgetrain.graph.capture.training import capture_with_externals
from edgetrain.zoo import registry

CAPTURES = 5
LOOKS = 200
Case = tuple[str, nn.Module, tuple[Tensor, Tensor]]


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scores: Tensor = model(x)
    return F.cross_entropy(scores.flatten(0, -2), y)


def cases() -> Iterator[Case]:
    torch.manual_seed(0)
    for name in ("lenet", "mobilenet_v2"):
        shape = registry.get(name).input_shape()
        yield name, registry.build(name), (torch.randn(16, *shape), torch.randint(10, (16,)))
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 24, enable_nested_tensor=False), nn.Linear(256, 10))
    yield "transformer, 24 layers", model, (torch.randn(4, 64, 256), torch.randint(10, (4 * 64,)))


def measured(model: nn.Module, batch: tuple[Tensor, Tensor], seconds: float) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    captures = [
        seconds_of(lambda: capture_with_externals(model, cross_entropy, optimizer, batch)) for _ in range(CAPTURES)
    ]
    step = et.prepare(model, cross_entropy, optimizer, batch)
    begin, number = time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
        step(*batch)
        number += 1
    run_s = time.perf_counter() - begin
    looks, steps = [], []
    for _ in range(LOOKS if run_s / number < 0.02 else LOOKS // 10):
        looks.append(seconds_of(lambda: step.of_shape(*batch)))
        steps.append(seconds_of(lambda: step(*batch)))
    looks.sort()
    return {
        "two_captures_s": captures,
        "look_s": {"median": statistics.median(looks), "p90": looks[int(0.9 * len(looks))], "min": looks[0]},
        "step_s": statistics.median(steps),
        "look_share": statistics.median(looks) / statistics.median(steps),
        "run_s": run_s, "steps": number, "capturing_again_s": step.recapturing_s,
        "capturing_again_share": step.recapturing_s / run_s,
    }  # fmt: skip


def seconds_of(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    seconds = parser.parse_args().seconds
    rows = {name: measured(model, batch, seconds) for name, model, batch in cases()}
    text = json.dumps({"about": about(), "rows": rows}, indent=1)
    (RESULTS / "capture.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
