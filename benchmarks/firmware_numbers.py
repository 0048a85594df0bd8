"""How exact is firmware? Every gradient and every tensor after 1, 10 and 100 steps, with several seeds.

    python benchmarks/firmware_numbers.py [--only lenet ds_cnn] [--seeds 5]

Each net is exported for this machine in its scalar form, whose bits are the emulator's, and run beside PyTorch
(`edgetrain.firmware.parity`). A ratio is the error against float64 in units of PyTorch float32's own; at most 4 is
right. Results: benchmarks/results/firmware_numbers.json and .md; nets that are not asked for keep theirs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contenders import RESULTS, about
from markdown import head, line, made
from torch import nn

import edgetrain as et
from edgetrain.firmware import parity
from edgetrain.firmware.emulate import run_firmware
from edgetrain.firmware.references import References
from edgetrain.zoo.models.autoencoder import autoencoder
from edgetrain.zoo.models.ds_cnn import ds_cnn
from edgetrain.zoo.models.lenet import lenet
from edgetrain.zoo.models.minilearn import (
    CIFAR_SHAPE,
    HAR_SHAPE,
    KWS_SHAPE,
    minilearn_cifar,
    minilearn_har,
    minilearn_kws,
)
from edgetrain.zoo.models.mobilenet_v2 import mobilenet_v2
from edgetrain.zoo.tasks import classify_loss, reconstruct_loss

STEPS = (1, 10, 100)
SAMPLES = 4
Optimizers = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def narrow_mobilenet() -> nn.Module:
    model = mobilenet_v2(width=0.35, classes=10, input_size=64)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # firmware draws other masks than PyTorch
    return model


def sgd(parameters: Sequence[nn.Parameter], *, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4)


def adam(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


@dataclass(frozen=True)
class Case:
    """classes: None for a net that rebuilds its input. long_seeds: how many of the seeds go to the last of `steps`."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int | None
    optimizer: Optimizers
    how: str
    long_seeds: int = 5
    steps: tuple[int, ...] = STEPS


_PLAIN = partial(sgd, lr=0.01)
_SLOW = partial(torch.optim.SGD, lr=1e-5)
CASES = {
    "mlp": Case(mlp, (32,), 10, adam, "Adam 1e-3"),
    "minilearn_har": Case(minilearn_har, HAR_SHAPE, 6, _PLAIN, "SGD 0.01, momentum"),
    "autoencoder": Case(autoencoder, (1, 28, 28), None, adam, "Adam 1e-3"),
    "lenet": Case(lenet, (1, 28, 28), 10, _PLAIN, "SGD 0.01, momentum"),
    "minilearn_kws": Case(minilearn_kws, KWS_SHAPE, 12, _PLAIN, "SGD 0.01, momentum"),
    "minilearn_cifar": Case(minilearn_cifar, CIFAR_SHAPE, 10, _PLAIN, "SGD 0.01, momentum"),
    "ds_cnn": Case(ds_cnn, (1, 49, 10), 12, _PLAIN, "SGD 0.01, momentum", long_seeds=3),
    # With fresh weights its gradients are a hundred times as large as its weights. At a higher rate rounding soon grows
    # so far that hundreds of activations are undecided at once, and sides can no longer be told.
    "mobilenet_v2": Case(narrow_mobilenet, (3, 64, 64), 10, _SLOW, "SGD 1e-5", long_seeds=1, steps=(1, 10)),
}


def measured(case: Case, seed: int, steps: Sequence[int]) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = case.build()
    optimizer, loss = case.optimizer(list(model.parameters())), classify_loss
    batches: list[tuple[torch.Tensor, ...]] = [
        (torch.randn(SAMPLES, *case.shape), torch.randint(case.classes or 1, (SAMPLES,))) for _ in range(max(steps))
    ]
    if case.classes is None:
        loss, batches = reconstruct_loss, [batch[:1] for batch in batches]
    graph = et.lower_for_firmware(et.capture(model, loss, optimizer, batches[0], use_cache=False))
    plan = et.keep_all(graph, updates="final")
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "fw"
        et.export(graph, plan, model, optimizer, target="linux-x86_64", out=out)
        runs = {n: run_firmware(out, batches[:n], variant="debug") for n in steps}
    references = References(model, loss, optimizer)
    rows = parity.rows_of(runs, references, batches)
    found = {str(n): _summary([row for row in rows if row.step == n]) for n in steps}
    return {"seed": seed, "turned": references.turned, "steps": found}


def _summary(rows: Sequence[parity.Row]) -> dict[str, Any]:
    worst = max(rows, key=lambda row: row.ratio)
    return {
        "tensors": len(rows),
        "wrong": sum(not row.right for row in rows),
        "worst_ratio": worst.ratio,
        "worst": f"{worst.what} {worst.name}",
        "median_ratio": statistics.median(row.ratio for row in rows),
        "median_relative_error": statistics.median(row.error / row.scale for row in rows if row.scale),
    }


def page(data: Mapping[str, Any]) -> Iterator[str]:
    yield "# Firmware's numbers against float64"
    yield ""
    yield "Ratio: the largest error of a tensor, in units of PyTorch float32's own (the largest of five runs); up to 4"
    yield "is right. Worst: of all tensors and seeds. Error: the median of it, in parts of a tensor's largest number."
    yield "Turned: activations that rounding put on the other side of a bend than float64 would, over all steps."
    yield "Batches of 4, random data; made by `benchmarks/firmware_numbers.py`."
    yield ""
    yield from head("net", "optimizer", "steps", "seeds", "tensors", "wrong", "worst ratio", "median", "error")
    for name, entry in data.items():
        for n in map(str, STEPS):
            found = [seed["steps"][n] for seed in entry["seeds"] if n in seed["steps"]]
            if found:
                yield _line(name, entry["how"], n, found)
    yield ""
    for name, entry in data.items():
        turned = sum(seed["turned"] for seed in entry["seeds"])
        yield f"- {name}: {turned} turned; {made(entry['about'])}, {entry['seconds']:.0f} s"


def _line(name: str, how: str, n: str, found: Sequence[Mapping[str, Any]]) -> str:
    worst = max(f["worst_ratio"] for f in found)
    median = statistics.median(f["median_ratio"] for f in found)
    error = statistics.median(f["median_relative_error"] for f in found)
    tensors, wrong = sum(f["tensors"] for f in found), sum(f["wrong"] for f in found)
    cells = (len(found), tensors, wrong, f"{worst:.2f}", f"{median:.2f}", f"{error:.1e}")
    return line(name, how, n, *map(str, cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    file = RESULTS / "firmware_numbers.json"
    data: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in asked.only:
        case, started = CASES[name], time.monotonic()
        seeds = []
        for seed in range(asked.seeds):
            seeds.append(measured(case, seed, case.steps if seed < case.long_seeds else case.steps[:-1]))
            print(name, json.dumps(seeds[-1]), flush=True)
        data[name] = {"about": about(), "how": case.how, "seconds": time.monotonic() - started, "seeds": seeds}
        data = {known: data[known] for known in CASES if known in data}
        file.write_text(json.dumps(data, indent=1) + "\n")
        (RESULTS / "firmware_numbers.md").write_text("\n".join(page(data)) + "\n")


if __name__ == "__main__":
    main()
