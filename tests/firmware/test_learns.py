"""Firmware learns: a CNN of 20,466 parameters, all trained from scratch on MNIST in the 256 KB of an nrf52840.

The long run is on this machine; the emulator gives the same bits for the first steps, as it does for all, in 19
thousand million instructions.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from edgetrain.firmware.emulate import run_firmware
from edgetrain.zoo import datasets
from tests.firmware.firmware_nets import Net, make

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif("EDGETRAIN_DATA" not in os.environ, reason="EDGETRAIN_DATA does not name the data folder"),
    pytest.mark.skipif(shutil.which("qemu-system-arm") is None, reason="qemu-system-arm is not installed"),
]
STEPS, SAMPLES, RAM_BYTES = 4000, 4, 262_144


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, 10),
    )  # fmt: skip


def test_a_cnn_in_256_kb_passes_95_percent_on_mnist(tmp_path: Path) -> None:
    data = datasets.load(str(Path(os.environ["EDGETRAIN_DATA"]) / "mnist"))
    net = Net(small, (1, 28, 28), 10, samples=SAMPLES)
    linux, emulated = (
        make(net, tmp_path / target, target=target, optimizer=lambda p: torch.optim.SGD(p, lr=0.02))
        for target in ("linux-x86_64", "nrf52840")
    )
    assert sum(p.numel() for p in linux.model.parameters()) >= 20_000
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(1))
    batches = [data.train.batch(order[n * SAMPLES : (n + 1) * SAMPLES]) for n in range(STEPS)]
    run = run_firmware(tmp_path / "linux-x86_64", batches)
    board = run_firmware(tmp_path / "nrf52840", batches[:20])
    assert board.losses == run.losses[:20]
    assert board.built.ram_bytes <= RAM_BYTES
    linux.model.load_state_dict(run.tensors)
    with torch.no_grad():
        x, y = data.test.batch(torch.arange(len(data.test)))
        right = int((linux.model.eval()(x).argmax(1) == y).sum())
    assert right >= 0.95 * len(y)
    assert emulated.project.ram_bytes < board.built.ram_bytes
