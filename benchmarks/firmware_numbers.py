"""How exact is firmware? Every gradient and every tensor after 1, 10 and 100 steps, with several seeds.

    python -m benchmarks.firmware_numbers [--only lenet ds_cnn] [--seeds 5] [--out FOLDER]

Each net is exported for this machine. Its scalar program, whose bits are the emulator's, and its vectorised one run
beside PyTorch (`edgetrain.firmware.parity`). A ratio is the error against float64 in units of PyTorch float32's own; at
most 4 is right. The exit code is 1 if something is not.

Results: benchmarks/results/firmware_numbers.json and .md; nets that are not asked for keep theirs, so several of these
may run side by side, each with some of the nets. CPU seconds of each are in the table.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import edgetrain as et
from benchmarks.contenders import RESULTS, about
from benchmarks.markdown import head, line, made
from benchmarks.small_nets import SMALL, Batch, Net
from edgetrain.firmware import parity
from edgetrain.firmware.build import Variant
from edgetrain.firmware.emulate import Run, run_firmware
from edgetrain.firmware.references import WAYS, References

STEPS = (1, 10, 100)
PROGRAMS: Mapping[str, Variant] = {"scalar": "debug", "vectorised": "fast_debug"}
Optimizers = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Sequence[nn.Parameter], *, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4)


def adam(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


@dataclass(frozen=True)
class Case:
    """seeds: how many at most, and how many of them go to the last of `steps`. ways: how many runs of PyTorch.
    trained: the net has learned something before, and sees something else now; otherwise all is random."""

    net: Net
    optimizer: Optimizers
    how: str
    seeds: tuple[int, int] = (5, 5)
    steps: tuple[int, ...] = STEPS
    ways: int = len(WAYS)
    trained: bool = False


_PLAIN = partial(sgd, lr=0.01)
CASES = {
    "mlp": Case(SMALL["mlp"], adam, "Adam 1e-3"),
    "minilearn_har": Case(SMALL["minilearn_har"], _PLAIN, "SGD 0.01, momentum"),
    "autoencoder": Case(SMALL["autoencoder"], adam, "Adam 1e-3"),
    "lenet": Case(SMALL["lenet"], _PLAIN, "SGD 0.01, momentum"),
    "minilearn_kws": Case(SMALL["minilearn_kws"], _PLAIN, "SGD 0.01, momentum", seeds=(3, 3)),
    "minilearn_cifar": Case(SMALL["minilearn_cifar"], _PLAIN, "SGD 0.01, momentum", seeds=(3, 3)),
    "ds_cnn": Case(SMALL["ds_cnn"], _PLAIN, "SGD 0.01, momentum", seeds=(3, 3), ways=5),
    "mobilenet_v2 trained": Case(
        SMALL["mobilenet_v2"], partial(sgd, lr=1e-3), "SGD 1e-3, momentum", seeds=(3, 3), ways=5, trained=True
    ),
    # With fresh weights its gradients are a hundred times as large as its weights, and a step magnifies rounding: at
    # 1e-3 PyTorch's own weights are off by 3e-3 after ten steps, and at 0.01 with momentum all is error after five.
    "mobilenet_v2 fresh": Case(
        SMALL["mobilenet_v2"], partial(torch.optim.SGD, lr=1e-5), "SGD 1e-5", seeds=(3, 3), steps=(1, 10), ways=5
    ),
}


# ---- something to learn


def patterns(net: Net) -> torch.Tensor:
    """A smooth image for each class."""
    return F.interpolate(torch.randn(net.classes or 1, net.shape[0], 8, 8), size=net.shape[1:], mode="bilinear")


def noisy(images: torch.Tensor, samples: int) -> Batch:
    y = torch.randint(len(images), (samples,))
    return images[y] + torch.randn(samples, *images.shape[1:]), y


def train(model: nn.Module, net: Net, *, steps: int = 200, samples: int = 16) -> None:
    """To tell noisy patterns apart; the rate rises for 20 steps, then falls to 0."""
    images, optimizer = patterns(net), sgd(list(model.parameters()), lr=0.05)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        optimizer.zero_grad()
        net.loss(model, *noisy(images, samples)).backward()
        optimizer.step()
    optimizer.zero_grad()


# ---- the comparison


def measured(case: Case, seed: int, steps: Sequence[int]) -> dict[str, Any]:
    torch.manual_seed(seed)
    net, model = case.net, case.net.build()
    if case.trained:
        train(model, net)
        images = patterns(net)
    batches = [noisy(images, net.samples) if case.trained else net.batch() for _ in range(max(steps))]
    optimizer = case.optimizer(list(model.parameters()))
    runs = ran(case, model, optimizer, batches, steps)
    references = References(model, net.loss, optimizer, programs=len(runs), ways=WAYS[: case.ways])
    rows = parity.rows_of_each(list(runs.values()), references, batches)
    found = {
        program: {str(n): _summary([row for row in rows[at] if row.step == n]) for n in steps}
        for at, program in enumerate(runs)
    }
    turned = {program: references.turned[at] for at, program in enumerate(runs)}
    losses = runs["scalar"][max(steps)].losses
    ends = [statistics.fmean(losses[: len(losses) // 10 or 1]), statistics.fmean(losses[-(len(losses) // 10 or 1) :])]
    return {"seed": seed, "turned": turned, "losses": ends, "programs": found}


def ran(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], steps: Sequence[int]
) -> dict[str, dict[int, Run]]:
    """Each program, by its number of steps."""
    graph = et.lower_for_firmware(et.capture(model, case.net.loss, optimizer, batches[0], use_cache=False))
    plan = et.keep_all(graph, updates="final")
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "fw"
        et.export(graph, plan, model, optimizer, target="linux-x86_64", out=out)
        return {
            program: {n: run_firmware(out, batches[:n], variant=variant, threads=1) for n in steps}
            for program, variant in PROGRAMS.items()
        }


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


# ---- the page


def page(data: Mapping[str, Any]) -> Iterator[str]:
    yield "# Firmware's numbers against float64"
    yield ""
    yield "Ratio: the largest error of a tensor, in units of PyTorch float32's own (the largest of eight runs, of five"
    yield "for the last three nets, each with its sums in another order); up to 4 is right. Worst: of all tensors and"
    yield "seeds. Error: the median of it, in parts of a tensor's largest number. First the scalar program, whose bits"
    yield "are those of every board; then `firmware_fast`. Batches of 4; random data, or, where the net was trained"
    yield "before, patterns that are new to it. Made by `benchmarks/firmware_numbers.py`."
    yield ""
    names = ("net", "optimizer", "steps", "seeds", "tensors")
    scalar, vectorised = ("wrong", "worst ratio", "median", "error"), ("vectorised: wrong", "worst ratio", "median")
    yield from head(*names, *scalar, *vectorised)
    for name, entry in data.items():
        for n in map(str, STEPS):
            found = [seed["programs"] for seed in entry["seeds"] if n in seed["programs"]["scalar"]]
            if found:
                yield _line(name, entry["how"], n, [f["scalar"][n] for f in found], [f["vectorised"][n] for f in found])
    yield ""
    yield "Turned: activations that rounding put on the other side of a bend than float64 would, over all steps of the"
    yield "scalar program. Loss: of the first and of the last tenth of the steps, mean over the longest runs."
    yield ""
    yield from (_about(name, entry) for name, entry in data.items())


def _about(name: str, entry: Mapping[str, Any]) -> str:
    turned = sum(seed["turned"]["scalar"] for seed in entry["seeds"])
    longest = max(len(seed["programs"]["scalar"]) for seed in entry["seeds"])
    ends = [seed["losses"] for seed in entry["seeds"] if len(seed["programs"]["scalar"]) == longest]
    first, last = (statistics.fmean(losses) for losses in zip(*ends, strict=True))
    seconds = f"{entry['cpu_s']:.0f} s of one core"
    return f"- {name}: {turned} turned, loss {first:.2f} → {last:.2f}; {made(entry['about'])}, {seconds}"


def _line(
    name: str, how: str, n: str, scalar: Sequence[Mapping[str, Any]], vectorised: Sequence[Mapping[str, Any]]
) -> str:
    error = statistics.median(f["median_relative_error"] for f in scalar)
    cells = [len(scalar), sum(f["tensors"] for f in scalar), *_ratios(scalar), f"{error:.1e}", *_ratios(vectorised)]
    return line(name, how, n, *map(str, cells))


def _ratios(found: Sequence[Mapping[str, Any]]) -> list[str]:
    worst = max(f["worst_ratio"] for f in found)
    median = statistics.median(f["median_ratio"] for f in found)
    return [str(sum(f["wrong"] for f in found)), f"{worst:.2f}", f"{median:.2f}"]


def keep(name: str, entry: Mapping[str, Any], folder: Path) -> None:
    """Into the files of the folder, whatever other processes have put there meanwhile."""
    file = folder / "firmware_numbers.json"
    with (Path(tempfile.gettempdir()) / "firmware_numbers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        data[name] = entry
        data = {known: data[known] for known in CASES if known in data}
        file.write_text(json.dumps(data, indent=1) + "\n")
        (folder / "firmware_numbers.md").write_text("\n".join(page(data)) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, default=5, help="at most; the larger nets have fewer")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the results")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    for name in asked.only:
        case, started = CASES[name], _cpu_s()
        seeds = []
        for seed in range(min(asked.seeds, case.seeds[0])):
            seeds.append(measured(case, seed, case.steps if seed < case.seeds[1] else case.steps[:-1]))
            print(name, json.dumps(seeds[-1]), flush=True)
        keep(name, {"about": about(), "how": case.how, "cpu_s": _cpu_s() - started, "seeds": seeds}, asked.out)
        wrong += sum(f["wrong"] for s in seeds for steps in s["programs"].values() for f in steps.values())
    return 1 if wrong else 0


def _cpu_s() -> float:
    """Of this process and of those that it waited for: compilers, programs."""
    times = os.times()
    return sum(times[:4])


if __name__ == "__main__":
    sys.exit(main())
