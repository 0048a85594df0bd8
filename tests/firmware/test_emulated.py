"""Real firmware in QEMU: the same bits as on this machine, its memory to the byte, and faults that are seen."""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from edgetrain.errors import UserError
from edgetrain.firmware import parity
from edgetrain.firmware.build import build, load_project
from edgetrain.firmware.emulate import FirmwareFailed, Run, command, run_firmware, write_batches
from edgetrain.firmware.references import References
from tests.firmware.firmware_nets import NETS, Exported, Net, adam, make, plain_sgd, sgd

missing = [tool for tool in ("arm-none-eabi-gcc", "qemu-system-arm") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")

STEPS = 3
SMALL = replace(NETS["everything"], samples=2)
RAM_BYTES = {
    "nrf52840": 256 * 1024, "stm32f746": 320 * 1024, "stm32f405": 128 * 1024, "cortex-m55": 512 * 1024,
    "mkr1000": 32 * 1024,
}  # fmt: skip
CASES = [(target, "tiny_cnn") for target in RAM_BYTES]
CASES += [("nrf52840", "wide_depthwise")]
CASES += [(target, "everything") for target in RAM_BYTES if target != "mkr1000"]


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Net], tuple[Exported, Run, list[tuple[torch.Tensor, ...]]]]:
    """The same net on this machine, run once."""

    @functools.cache
    def run(net: Net) -> tuple[Exported, Run, list[tuple[torch.Tensor, ...]]]:
        folder = tmp_path_factory.mktemp("here") / "fw"
        exported = make(net, folder, optimizer=adam)
        batches = exported.batches(STEPS)
        return exported, run_firmware(folder, batches, variant="debug"), batches

    return run


@pytest.mark.parametrize(("target", "name"), CASES)
def test_a_board_gives_the_same_bits_as_this_machine(
    target: str,
    name: str,
    reference: Callable[[Net], tuple[Exported, Run, list[tuple[torch.Tensor, ...]]]],
    tmp_path: Path,
) -> None:
    net = SMALL if name == "everything" else NETS[name]
    _, expected, batches = reference(net)
    exported = make(net, tmp_path / "fw", optimizer=adam, target=target)
    run = run_firmware(tmp_path / "fw", batches, variant="debug")
    assert run.losses == expected.losses
    assert all(torch.equal(value, expected.tensors[name]) for name, value in run.tensors.items())
    for step in range(STEPS):
        assert all(torch.equal(value, expected.gradients[step][name]) for name, value in run.gradients[step].items())
        assert all(map(torch.equal, run.sides[step], expected.sides[step]))
    # Memory: predicted by the plan, linked, and measured by paint.
    live = exported.plan.peak_bytes - exported.plan.persistent_bytes
    assert run.built.sections[".arena"] == run.arena_used_bytes == exported.project.arena_bytes == live
    assert exported.project.lasting_bytes + exported.project.frozen_bytes == exported.plan.persistent_bytes
    assert 0 <= run.built.sections[".bss"] - exported.project.lasting_bytes < 64
    assert run.built.ram_bytes <= RAM_BYTES[target]
    assert 0 < run.stack_used_bytes < run.built.sections[".stack"] - 512
    assert run.instructions is not None
    assert run.instructions > 10_000


@pytest.mark.parametrize(
    ("target", "compiler"),
    [("linux-aarch64", "aarch64-linux-gnu-gcc"), ("linux-armv6", "arm-none-eabi-gcc")],
)
def test_a_linux_board_gives_the_same_bits_as_this_machine(
    target: str,
    compiler: str,
    reference: Callable[[Net], tuple[Exported, Run, list[tuple[torch.Tensor, ...]]]],
    tmp_path: Path,
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    _, expected, batches = reference(NETS["tiny_cnn"])
    make(NETS["tiny_cnn"], tmp_path / "fw", optimizer=adam, target=target)
    run = run_firmware(tmp_path / "fw", batches, variant="debug")
    assert run.losses == expected.losses
    assert all(torch.equal(value, expected.tensors[name]) for name, value in run.tensors.items())
    for step in range(STEPS):
        assert all(torch.equal(value, expected.gradients[step][name]) for name, value in run.gradients[step].items())


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make(NETS["mlp"], tmp_path_factory.mktemp("board") / "fw", optimizer=plain_sgd, target="nrf52840")


@pytest.fixture
def folder(board: Exported, tmp_path: Path) -> Path:
    """A copy of the project to be spoilt."""
    return shutil.copytree(board.project.folder, tmp_path / "copy")


def test_numbers_in_the_emulator_are_as_exact_as_pytorch_and_counts_do_not_change(board: Exported) -> None:
    batches = board.batches(10)
    run, rows = parity.compare(board.project.folder, board.model, board.net.loss, board.optimizer, batches)
    parity.require_right(rows)
    again = run_firmware(board.project.folder, batches, variant="debug")
    assert run.instructions_by == again.instructions_by
    assert run.calls == again.calls
    by_op = {call.op: call.instructions for call in run.calls}
    assert by_op["dense_backward_weight_1"] > by_op["relu_forward_1"] >= run.instructions_by["relu_forward"] > 0


def test_two_runs_are_the_same_to_the_byte_and_so_is_the_time_on_the_board(board: Exported, folder: Path) -> None:
    """Each loss is replaced by what the board's clock says: the time of the machine that emulates must not show."""
    model = folder / "model.c"
    clock = "*(volatile uint32_t *)0xe000e014u = 0xffffffu;\n    *(volatile uint32_t *)0xe000e010u = 5u;"
    text = model.read_text().replace("    step_number = 0;\n", f"    step_number = 0;\n    {clock}\n")
    text, replaced = re.subn(r"\*loss_value = .*;", "*loss_value = (float)*(volatile uint32_t *)0xe000e018u;", text)
    assert replaced == 1
    assert clock in text
    model.write_text(text)
    described, batches = load_project(folder), board.batches(20)
    program = build(folder, "debug").program.resolve()
    written = []
    for name in ("one", "two"):
        place = folder / name
        place.mkdir()
        write_batches(place / "batches.bin", described, batches)
        subprocess.run(command(described, program), cwd=place, check=True)
        written.append({path.name: path.read_bytes() for path in place.iterdir()})
    assert written[0].keys() >= {"losses.bin", "trained.bin", "report.bin", "shown.bin"}
    assert written[0] == written[1]
    assert len(set(struct.unpack("<20f", written[0]["losses.bin"]))) == 20  # the clock ran


def test_a_hundred_steps_in_the_emulator_are_as_exact_as_pytorch_and_the_same_bits_as_here(tmp_path: Path) -> None:
    net, steps = NETS["minilearn_har"], 100
    linux, board = (make(net, tmp_path / t, optimizer=sgd, target=t) for t in ("linux-x86_64", "nrf52840"))
    batches = linux.batches(steps)
    run, expected = (run_firmware(exported.project.folder, batches, variant="debug") for exported in (board, linux))
    assert run.losses == expected.losses
    assert all(torch.equal(value, expected.tensors[name]) for name, value in run.tensors.items())
    for a, b in zip(run.gradients, expected.gradients, strict=True):
        assert all(torch.equal(value, b[name]) for name, value in a.items())
    rows = parity.rows_of({steps: run}, References(board.model, net.loss, board.optimizer), batches)
    parity.require_right(rows)
    assert {row.what for row in rows} == {"gradient", "tensor"}


STRAY = {
    "a write past the board's RAM": "*(volatile float *)0x20040000u = 1.0f;",
    "a write to flash": "*(volatile unsigned char *)(uintptr_t)model_weights = 1;",
    "a read past flash": "(void)*(volatile float *)0x00100000u;",
    "a jump to RAM": "((void (*)(void))0x20001001u)();",
}


@pytest.mark.parametrize("stray", STRAY)
def test_a_stray_access_ends_the_run_with_its_code(stray: str, board: Exported, folder: Path) -> None:
    model = folder / "model.c"
    model.write_text(model.read_text().replace("    step_number += 1;", f"    step_number += 1;\n    {STRAY[stray]}"))
    with pytest.raises(FirmwareFailed, match="fault") as caught:
        run_firmware(folder, board.batches(1), time_limit_s=60)
    assert caught.value.code == 5


def test_a_stack_that_overflows_ends_the_run_with_its_code(board: Exported, folder: Path) -> None:
    model = folder / "model.c"
    deep = "int deep(volatile int n);\nint deep(volatile int n)\n{\n    return n == 0 ? 0 : 1 + deep(n - 1) + n;\n}\n\n"
    text = model.read_text().replace("int train_step(", deep + "int train_step(")
    model.write_text(text.replace("    step_number += 1;", "    step_number += 1;\n    (void)deep(100000);"))
    with pytest.raises(FirmwareFailed, match="fault") as caught:
        run_firmware(folder, board.batches(1), time_limit_s=60)
    assert caught.value.code == 5


def test_a_bad_label_ends_the_run_with_its_code(board: Exported) -> None:
    x, y = board.batches(1)[0]
    with pytest.raises(FirmwareFailed) as caught:
        run_firmware(board.project.folder, [(x, y), (x, y + 7)])
    assert caught.value.code == 4


def test_a_program_that_is_too_large_does_not_link(folder: Path) -> None:
    script = folder / "board/link_emulated.ld"
    script.write_text(re.sub(r"(RAM \(rw\).*LENGTH = )\d+", r"\g<1>4608", script.read_text()))
    with pytest.raises(UserError, match="does not fit"):
        build(folder)


class Wide(nn.Module):
    """110 KB of weights, and 51 KB of arena: more than 128 KB together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(100, 128), nn.Linear(128, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.relu(self.first(x)))
        return result


def test_an_arena_that_does_not_fit_beside_the_weights_lies_in_the_other_memory(tmp_path: Path) -> None:
    exported = make(Net(Wide, (100,), 100), tmp_path / "fw", optimizer=plain_sgd, target="stm32f405")
    script = (tmp_path / "fw/board/link.ld").read_text()
    assert "ARENA (rw) : ORIGIN = 0x10000000, LENGTH = 65536" in script
    assert "FLASH (rx) : ORIGIN = 0x08000000" in script
    run, rows = parity.compare(
        tmp_path / "fw", exported.model, exported.net.loss, exported.optimizer, exported.batches(1)
    )
    parity.require_right(rows)
    assert run.arena_used_bytes == exported.project.arena_bytes
