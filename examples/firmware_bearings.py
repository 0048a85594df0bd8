"""A motor that knows how it sounds when all is well: an autoencoder, trained in the emulator of an nrf52840.

python examples/firmware_bearings.py FOLDER     with recordings of the CWRU Bearing Data Center (see docs/firmware.md)

It learns to rebuild spectra of a normal bearing; what it rebuilds badly is a fault. Tested on what it never heard: the
recordings of two faults, and the last 1.8 seconds of the normal one, a quarter second after the three that it learned.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from firmware_study import command
from torch import nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.firmware.emulate import Run, run_firmware
from edgetrain.zoo.datasets import bearings
from edgetrain.zoo.models.autoencoder import Autoencoder

HIDDEN, LATENT, SAMPLES = 20, 4, 8
LEARNED, GAP = 0.6, 0.05  # shares of the normal recording: learned from; and left out behind it
Spectra = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Results:
    """auroc: how surely a window of that fault is rebuilt worse than one of the normal bearing; 0.5 is chance."""

    auroc: Mapping[str, float]
    before: Mapping[str, float]
    run: Run

    def lines(self) -> list[str]:
        before = self.before
        return [f"{name}: AUROC {value:.4f} (before training {before[name]:.4f})" for name, value in self.auroc.items()]


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), x)


def divided(folder: str | Path) -> tuple[torch.Tensor, torch.Tensor, Spectra]:
    """(normal to learn from, normal to test, faults)."""
    recordings = bearings.load(folder)
    (normal,) = (name for name in recordings if "Normal" in name)
    whole = recordings[normal]
    cut = int(LEARNED * len(whole))
    learned, unseen = whole[:cut], whole[cut + int(GAP * len(whole)) :]
    faults = {name: bearings.spectra(value) for name, value in recordings.items() if name != normal}
    return bearings.spectra(learned), bearings.spectra(unseen), faults


def auroc(normal: torch.Tensor, fault: torch.Tensor) -> float:
    """The share of pairs in which the fault has the higher score; equal ones count half."""
    higher, same = fault[:, None] > normal, fault[:, None] == normal
    return float((higher.double() + same.double() / 2).mean())


def judged(model: nn.Module, normal: torch.Tensor, faults: Spectra) -> dict[str, float]:
    def scores(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            rebuilt: torch.Tensor = model(x)
            return (rebuilt - x).square().mean(1)

    return {name: auroc(scores(normal), scores(x)) for name, x in faults.items()}


def study(folder: str | Path, out: Path, *, target: str = "nrf52840", steps: int = 1000, seed: int = 0) -> Results:
    torch.manual_seed(seed)
    learned, unseen, faults = divided(folder)
    model = Autoencoder(features=bearings.BANDS, hidden=HIDDEN, latent=LATENT)
    before = judged(model, unseen, faults)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = [(learned[torch.randint(len(learned), (SAMPLES,))],) for _ in range(steps)]
    graph = et.lower_for_firmware(et.capture(model, loss, optimizer, batches[0]))
    et.export(graph, et.keep_all(graph, updates="final"), model, optimizer, target=target, out=out)
    run = run_firmware(out, batches)
    model.load_state_dict(dict(run.tensors), strict=False)
    return Results(judged(model, unseen, faults), before, run)


if __name__ == "__main__":
    command(study, steps=1000, text="Learn the sound of a bearing as firmware. FOLDER holds the recordings.")
