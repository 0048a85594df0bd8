"""The vectorised program of Linux boards: as exact as PyTorch, the same bits on any number of threads, small."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edgetrain.errors import UserError
from edgetrain.firmware import parity
from edgetrain.firmware.build import Variant, build
from edgetrain.firmware.emulate import FirmwareFailed, Run, run_firmware
from tests.firmware.firmware_nets import NETS, Exported, Net, Optimizers, adam, make, nesterov, plain_sgd, sgd

BESIDES_BYTES = 2_000_000  # what the program may take beside arena and weights


class Shapes(nn.Module):
    """What the kernels have ways of their own for: few and many channels, groups, strides, dilation, wide borders.

    No bias stands before a batch norm, as in `Everything`. More than KC products in a sum: 40 × 9.
    """

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Conv2d(2, 19, 5, padding=4, stride=(1, 2))
        self.one_tap = nn.Conv2d(19, 40, 1, stride=2)
        self.many = nn.Conv2d(40, 24, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(24)
        self.groups = nn.Conv2d(24, 36, 3, padding=3, groups=4, dilation=(1, 2), stride=(3, 1))
        self.depthwise = nn.Conv2d(36, 36, (3, 4), padding=(1, 2), groups=36, stride=(1, 2))
        self.several = nn.Conv2d(36, 72, 3, padding=1, groups=36)
        self.hidden, self.last = nn.Linear(72, 33), nn.Linear(33, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.norm(self.many(self.one_tap(torch.tanh(self.few(x)))))
        a = torch.tanh(self.depthwise(torch.tanh(self.groups(a))))
        a = F.adaptive_avg_pool2d(torch.tanh(self.several(F.max_pool2d(a, 2))), 1).flatten(1)
        result: torch.Tensor = self.last(torch.tanh(self.hidden(a)))
        return result


class Separable(nn.Module):
    """As in MobileNet: depthwise and pointwise by turns."""

    def __init__(self) -> None:
        super().__init__()
        channels = (3, 16, 24)
        layers: list[nn.Module] = []
        for C, K in itertools.pairwise(channels):
            layers += [nn.Conv2d(C, 6 * K, 1, bias=False), nn.BatchNorm2d(6 * K), nn.ReLU6()]
            layers += [nn.Conv2d(6 * K, 6 * K, 3, 2, 1, groups=6 * K, bias=False), nn.BatchNorm2d(6 * K), nn.ReLU6()]
            layers += [nn.Conv2d(6 * K, K, 1, bias=False), nn.BatchNorm2d(K)]
        self.layers, self.last = nn.Sequential(*layers), nn.Linear(24, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(F.adaptive_avg_pool2d(self.layers(x), 1).flatten(1))
        return result


SHAPES = Net(Shapes, (2, 21, 30), 5, samples=3)
SEPARABLE = Net(Separable, (3, 32, 32), 7, samples=8)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make(SHAPES, tmp_path_factory.mktemp("shapes") / "fw", optimizer=nesterov)


@pytest.fixture(scope="module")
def reference(shapes: Exported) -> tuple[list[tuple[torch.Tensor, ...]], Run]:
    """Two batches, and what this machine makes of them."""
    batches = shapes.batches(2)
    return batches, run_firmware(shapes.project.folder, batches, variant="fast")


def compared(exported: Exported, steps: int, variant: Variant = "fast_debug") -> tuple[Run, list[parity.Row]]:
    batches = exported.batches(steps)
    return parity.compare(
        exported.project.folder, exported.model, exported.net.loss, exported.optimizer, batches, variant=variant
    )  # fmt: skip


@pytest.mark.parametrize(
    ("net", "optimizer", "steps"),
    [
        (NETS["lenet"], sgd, 10), (NETS["ds_cnn"], sgd, 3), (NETS["everything"], adam, 2), (SHAPES, nesterov, 2),
        (SEPARABLE, plain_sgd, 1),
    ],
    ids=["lenet", "ds_cnn", "everything", "shapes", "separable"],
)  # fmt: skip
def test_every_gradient_and_every_tensor_is_as_exact_as_pytorch(
    net: Net, optimizer: Optimizers, steps: int, tmp_path: Path
) -> None:
    exported = make(net, tmp_path / "fw", optimizer=optimizer)
    run, rows = compared(exported, steps)
    parity.require_right(rows)
    assert len(run.losses) == steps
    assert run.arena_used_bytes == exported.project.arena_bytes


def test_little_memory_beside_arena_and_weights_and_the_same_bits_for_any_number_of_threads(tmp_path: Path) -> None:
    net = Net(NETS["mobilenet_v2"].build, (3, 64, 64), 10, samples=8)
    exported = make(net, tmp_path / "fw", optimizer=plain_sgd)
    batches = exported.batches(2)
    single, three = (run_firmware(tmp_path / "fw", batches, variant="fast", threads=n) for n in (1, 3))
    assert single.losses == three.losses
    assert all(torch.equal(value, three.tensors[name]) for name, value in single.tensors.items())
    weights_bytes = sum(4 * p.numel() for p in exported.model.parameters())
    assert three.resident_bytes is not None
    assert exported.project.arena_bytes < three.resident_bytes
    # Buffers of batch norms and the batch itself are within these 2 MB too.
    assert three.resident_bytes <= exported.project.arena_bytes + weights_bytes + BESIDES_BYTES


def test_threads_do_not_race_and_it_would_be_seen_if_they_did(shapes: Exported, tmp_path: Path) -> None:
    folder = shutil.copytree(shapes.project.folder, tmp_path / "fw")
    batches = shapes.batches(1)
    run_firmware(folder, batches, variant="fast_races", threads=3)
    source = folder / "kernels/fast/convolve.c"
    planted = "static int tasks_run;\n\nstatic void convolve_task("
    text = source.read_text().replace("static void convolve_task(", planted, 1)
    source.write_text(
        text.replace("    const tiling *job = context;", "    const tiling *job = context;\n    tasks_run++;", 1)
    )
    with pytest.raises(FirmwareFailed, match="data race"):
        run_firmware(folder, batches, variant="fast_races", threads=3)


@pytest.mark.parametrize(
    ("target", "compiler"),
    [("linux-aarch64", "aarch64-linux-gnu-gcc"), ("linux-armv6", "arm-none-eabi-gcc")],
)
def test_other_linux_boards_agree_with_this_machine(
    target: str, compiler: str, reference: tuple[list[tuple[torch.Tensor, ...]], Run], tmp_path: Path
) -> None:
    missing = [tool for tool in (compiler, "qemu-arm") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {missing}")
    make(SHAPES, tmp_path / "fw", optimizer=nesterov, target=target)
    run = run_firmware(tmp_path / "fw", reference[0], variant="fast", threads=2)
    _agree(run, reference[1])
    if target == "linux-armv6":
        listed = subprocess.run(["readelf", "-A", str(run.built.program)], capture_output=True, text=True, check=True)
        assert re.search(r"Tag_CPU_arch: v6", listed.stdout)  # no library brought instructions of a newer core


def test_clang_builds_it_without_a_warning(
    shapes: Exported, reference: tuple[list[tuple[torch.Tensor, ...]], Run], tmp_path: Path
) -> None:
    if shutil.which("clang") is None:
        pytest.skip("clang is not installed")
    folder = shutil.copytree(shapes.project.folder, tmp_path / "fw", ignore=shutil.ignore_patterns("build"))
    _agree(run_firmware(folder, reference[0], variant="fast", compiler="clang"), reference[1])


def _agree(run: Run, expected: Run) -> None:
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, value in run.tensors.items():
        torch.testing.assert_close(value, expected.tensors[name], rtol=1e-4, atol=1e-5)


def test_a_microcontroller_has_no_fast_program(tmp_path: Path) -> None:
    exported = make(NETS["mlp"], tmp_path / "fw", optimizer=plain_sgd, target="nrf52840")
    assert not (exported.project.folder / "kernels/fast").exists()
    with pytest.raises(UserError, match="no vectorised program"):
        build(exported.project.folder, "fast")


def test_a_project_has_what_it_needs_and_no_more(tmp_path: Path) -> None:
    exported = make(NETS["mlp"], tmp_path / "fw", optimizer=plain_sgd)
    fast = exported.project.folder / "kernels/fast"
    there = {path.name for path in fast.iterdir()}
    texts = [path.read_text() for path in fast.iterdir()]
    included = {name for text in texts for name in re.findall(r'#include "(?!\.\./)(.*)"', text)}
    assert included == {name for name in there if name.endswith(".h")}
    assert "dense.c" in there
    assert not there & {"norm.c", "conv2d.c", "convolve_depthwise.c"}


def test_a_pc_without_avx_is_told_so(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("qemu-x86_64 is not installed")
    exported = make(NETS["mlp"], tmp_path / "fw", optimizer=plain_sgd)
    described = exported.project.folder / "project.json"
    project = json.loads(described.read_text())
    described.write_text(json.dumps(project | {"emulator": [emulator, "-cpu", "Nehalem"]}))
    with pytest.raises(FirmwareFailed, match="no AVX2") as caught:
        run_firmware(exported.project.folder, exported.batches(1), variant="fast")
    assert caught.value.code == 16
