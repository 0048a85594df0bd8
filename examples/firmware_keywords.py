"""New keywords, learned in a microcontroller: the last layers of a DS-CNN, trained in the emulator of an nrf52840.

python examples/firmware_keywords.py FOLDER     with kws01_mfcc_int8_1000.tar.xz of MLPerf Tiny (see docs/firmware.md)

A DS-CNN is trained here on eight keywords. Its first layers stay as they are, in flash; its last block and a new
classifier learn the four classes that it has not heard, as C in 256 KB. PyTorch does the same, for comparison.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from firmware_study import command
from torch import nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.firmware.emulate import Run, run_firmware
from edgetrain.firmware.fit import plan_for
from edgetrain.firmware.target import load_target
from edgetrain.zoo import datasets
from edgetrain.zoo.models.ds_cnn import DsCnn, ds_cnn

KNOWN = 8  # classes 0 to 7 are known before, 8 to 11 are new
SAMPLES = 2
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Results:
    """Shares of right answers on samples that nothing was trained on: of the known classes, and of the new ones."""

    known: float
    firmware: float
    pytorch: float
    run: Run

    def lines(self) -> list[str]:
        return [
            f"eight keywords, trained here: {self.known:.1%} right",
            f"four new classes, {len(self.run.losses)} steps of {SAMPLES} as firmware: {self.firmware:.1%}",
            f"the same in PyTorch: {self.pytorch:.1%}",
        ]


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def samples(split: datasets.Split, *, known: bool) -> Batch:
    x, y = split.batch(torch.arange(len(split)))
    chosen = (y < KNOWN) if known else (y >= KNOWN)
    return x[chosen], y[chosen] if known else y[chosen] - KNOWN


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).float().mean())


def pretrained(x: torch.Tensor, y: torch.Tensor, *, epochs: int, width: float) -> DsCnn:
    """Trained on the known classes, each sample moved in time by a few frames."""
    model = ds_cnn(classes=KNOWN, width=width)
    assert isinstance(model, DsCnn)
    steps = epochs * (len(x) // 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=steps)
    for _ in range(epochs):
        for part in torch.randperm(len(x))[: len(x) // 32 * 32].split(32):
            moved = torch.roll(x[part], int(torch.randint(-4, 5, ())), dims=2)
            optimizer.zero_grad()
            loss(model, moved, y[part]).backward()
            optimizer.step()
            scheduler.step()
    return model


def for_new_classes(model: DsCnn, classes: int) -> list[nn.Parameter]:
    """Make it learn with its last block and a new classifier alone. All batch norms keep their statistics."""
    model.requires_grad_(False).eval()
    model.classifier = nn.Linear(model.classifier.in_features, classes)
    return [*model.blocks[-1].requires_grad_(True).parameters(), *model.classifier.parameters()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss(model, *batch).backward()
        optimizer.step()


def study(
    folder: str | Path, out: Path, *, target: str = "nrf52840", steps: int = 200, epochs: int = 12, seed: int = 0
) -> Results:
    torch.manual_seed(seed)
    data = datasets.load(str(folder), seed=seed)
    model = pretrained(*samples(data.train, known=True), epochs=epochs, width=0.5)
    known = accuracy(model, *samples(data.test, known=True))

    optimizer = torch.optim.SGD(for_new_classes(model, len(data.classes) - KNOWN), lr=0.005, momentum=0.9)
    x, y = samples(data.train, known=False)
    order = torch.cat([torch.randperm(len(x)) for _ in range(1 + steps * SAMPLES // len(x))])
    batches = [(x[part], y[part]) for part in order.split(SAMPLES)[:steps]]
    graph = et.lower_for_firmware(et.capture(model, loss, optimizer, batches[0]))
    board = load_target(target)
    et.export(graph, plan_for(graph, board), model, optimizer, target=board, out=out)

    run = run_firmware(out, batches)
    there = copy.deepcopy(model)
    there.load_state_dict(dict(run.tensors), strict=False)  # what was not trained is in the model already
    train(model, optimizer, batches)
    test = samples(data.test, known=False)
    return Results(known, accuracy(there, *test), accuracy(model, *test), run)


if __name__ == "__main__":
    command(study, steps=200, text="Learn new keywords as firmware. FOLDER holds the archive of MLPerf Tiny.")
