"""What export writes, what it refuses before it writes anything, and what the program refuses when it runs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import edgetrain as et
from edgetrain.errors import Infeasible, UserError
from edgetrain.firmware.arena import arena_of
from edgetrain.firmware.build import load_project
from edgetrain.firmware.emulate import FirmwareFailed, run_firmware
from edgetrain.firmware.target import load_target, place, target_names
from edgetrain.graph.ir import Graph
from tests.firmware.firmware_nets import NETS, Exported, Net, cross_entropy, make, plain_sgd, sgd


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make(NETS["mlp"], tmp_path_factory.mktemp("mlp") / "fw")


def lowered(model: nn.Module, net: Net) -> Graph:
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    return et.lower_for_firmware(et.capture(model, net.loss, optimizer, net.batch(), use_cache=False))


# ---- what is written


def test_the_kernels_that_are_used_and_no_others(mlp: Exported) -> None:
    sources = sorted(path.name for path in (mlp.project.folder / "kernels").glob("*.c"))
    gemm = ["gemm_nn.c", "gemm_nt.c", "gemm_tn.c"]
    wanted = ["bias.c", "dense.c", "functions.c", *gemm, "relu.c", "sgd.c", "softmax_cross_entropy.c"]
    assert sources == wanted
    assert sorted(path.name for path in (mlp.project.folder / "board").iterdir()) == ["board.h", "linux.c"]


def test_the_step_reads_as_if_written_by_hand(mlp: Exported) -> None:
    text = (mlp.project.folder / "model.c").read_text()
    assert "dense_forward(dense_1, input_0, m_0_weight, m_0_bias, BATCH, 12, 9);" in text
    assert "float *const relu_1 = dense_1; /* over dense_1 */" in text
    assert "malloc" not in text
    assert max(map(len, text.splitlines())) <= 120
    calls = [line for line in text.splitlines() if "_forward(" in line or "_backward" in line or "_update(" in line]
    ops = [op for op in mlp.graph.ops if not op.view]
    predicted = sum(op.phase == "forward" for op in ops) - 1  # without the loss
    assert len(calls) == len(ops) + predicted


@pytest.mark.parametrize("name", ["lenet", "autoencoder", "everything", "mobilenet_v2"])
def test_the_arena_is_what_the_plan_says_to_the_byte(name: str) -> None:
    torch.manual_seed(0)
    graph = lowered(NETS[name].build(), NETS[name])
    plan = et.keep_all(graph, updates="final")
    arena = arena_of(graph, plan)
    assert arena.height_bytes == arena.live_bytes == plan.peak_bytes - plan.persistent_bytes
    for a in arena.lives:
        for b in arena.lives:
            if a.storage < b.storage and max(a.start, b.start) < min(a.end, b.end):
                apart = a.offset + graph.storages[a.storage].n_bytes <= b.offset
                apart |= b.offset + graph.storages[b.storage].n_bytes <= a.offset
                assert apart, (a, b)


def test_weights_that_are_not_trained_stay_in_flash(tmp_path: Path) -> None:
    exported = make(NETS["frozen"], tmp_path / "fw", optimizer=plain_sgd)
    text = (tmp_path / "fw/model.c").read_text()
    assert "static const float *const first_weight = (const float *)(const void *)(model_weights" in text
    assert "static float grouped_weight[" in text
    assert exported.project.frozen_bytes > 0
    assert exported.project.lasting_bytes + exported.project.frozen_bytes == exported.plan.persistent_bytes


def test_a_project_is_read_back_and_one_that_was_changed_is_refused(mlp: Exported, tmp_path: Path) -> None:
    described = load_project(mlp.project.folder)
    assert described["arena_bytes"] == mlp.project.arena_bytes
    assert [tensor.get("below") for tensor in described["inputs"]] == [None, 3]  # x, and labels of three classes
    wrong_labels = [described["inputs"][0], {**described["inputs"][1], "below": 0}]
    for key, value in (
        ("edgetrain firmware", 99), ("emulator", [1]), ("tensors", [{"name": "x"}]), ("compiler", None),
        ("inputs", wrong_labels),
    ):  # fmt: skip
        (tmp_path / "project.json").write_text(json.dumps({**described, key: value}))
        with pytest.raises(UserError, match="firmware project"):
            load_project(tmp_path)
    with pytest.raises(UserError, match="firmware project"):
        load_project(tmp_path / "nowhere")


@pytest.mark.skipif(shutil.which("clang") is None, reason="clang is not installed")
def test_clang_finds_nothing_to_complain_about_and_gives_the_same_bits(mlp: Exported, tmp_path: Path) -> None:
    everything = make(NETS["everything"], tmp_path / "fw")
    batches = everything.batches(2)
    gcc = run_firmware(tmp_path / "fw", batches)
    shutil.rmtree(tmp_path / "fw/build")
    clang = run_firmware(tmp_path / "fw", batches, compiler="clang")
    assert gcc.losses == clang.losses
    assert all(torch.equal(value, clang.tensors[name]) for name, value in gcc.tensors.items())


class Named(nn.Module):
    """Parameters whose names mean something else in C."""

    def __init__(self) -> None:
        super().__init__()
        self.switch, self.exp = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(6))
        self.settings, self.arena = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.relu(F.linear(x, self.switch, self.exp)), self.settings, self.arena)


def test_names_that_c_has_for_other_things_are_no_trouble(tmp_path: Path) -> None:
    exported = make(Net(Named, (8,), 3), tmp_path / "fw")
    run = run_firmware(tmp_path / "fw", exported.batches(1))
    assert {"switch", "exp", "settings", "arena"} <= set(run.tensors)


# ---- what is refused


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return result


def test_an_op_without_a_kernel_is_named_with_its_module() -> None:
    with pytest.raises(UserError, match=r"no kernel for aten\.gelu\.default \(op gelu_1, module body\.1\)"):
        lowered(Odd(), Net(Odd, (8,), 3))


def weighted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model, x, y) * 0.5


def test_a_loss_that_is_scaled_has_no_kernel_and_is_not_trained_wrongly() -> None:
    model = NETS["mlp"].build()
    optimizer = plain_sgd(list(model.parameters()))
    graph = et.capture(model, weighted, optimizer, NETS["mlp"].batch(), use_cache=False)
    with pytest.raises(UserError, match="has no kernel"):
        et.lower_for_firmware(graph)


@pytest.mark.parametrize(
    ("module", "x", "said"),
    [
        (nn.ConvTranspose2d(2, 2, 3), (2, 2, 6, 6), "transposed convolution"),
        (nn.Conv1d(2, 2, 3), (2, 2, 6), "convolution"),
        (nn.MaxPool2d(3, dilation=2), (2, 2, 8, 8), "dilation"),
        (nn.MaxPool2d(17), (2, 2, 17, 17), "more than 256 places"),
        (nn.Softmax(1), (2, 6), "softmax"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_is_near_a_kernel_but_is_none_is_refused(module: nn.Module, x: tuple[int, ...], said: str) -> None:
    scale = nn.Parameter(torch.ones(x[1:]).flatten())
    model = nn.Sequential(nn.Flatten(), nn.Linear(scale.numel(), scale.numel()), nn.Unflatten(1, x[1:]), module)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result = model(x)
        return F.mse_loss(result, result.detach() * 0)

    optimizer = plain_sgd(list(model.parameters()))
    with pytest.raises(UserError, match=said):
        et.lower_for_firmware(et.capture(model, loss, optimizer, (torch.randn(x),), use_cache=False))


def test_nothing_is_written_when_something_is_wrong(mlp: Exported, tmp_path: Path) -> None:
    captured = et.capture(mlp.model, mlp.net.loss, mlp.optimizer, mlp.net.batch(), use_cache=False)
    early = et.keep_all(mlp.graph, updates="early")
    cases = (
        (captured, et.keep_all(captured), mlp.model, mlp.optimizer, "linux-x86_64", "PyTorch's ops"),
        (mlp.graph, early, mlp.model, mlp.optimizer, "linux-x86_64", "memory that firmware does not use"),
        (mlp.graph, mlp.plan, nn.Linear(12, 9), mlp.optimizer, "z80", "cannot be built for 'z80'"),
        (mlp.graph, mlp.plan, mlp.model, sgd(list(nn.Linear(2, 2).parameters())), "linux-x86_64", "not in this model"),
    )
    for graph, plan, model, optimizer, target, said in cases:
        with pytest.raises(UserError, match=said):
            et.export(graph, plan, model, optimizer, target=target, out=tmp_path / "fw")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        et.export(mlp.graph, mlp.plan, mlp.model, mlp.optimizer, target="linux-x86_64", out=tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_a_step_that_does_not_fit_says_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(Infeasible, match="this step takes") as caught:
        make(NETS["lenet"], tmp_path / "fw", target="nrf52840")
    assert list(tmp_path.iterdir()) == []
    net = dataclasses.replace(NETS["lenet"], samples=1)
    smaller = make(net, tmp_path / "fw", target="linux-x86_64", optimizer=plain_sgd)
    assert caught.value.smallest_bytes > smaller.project.ram_bytes > 262_144


def test_a_plan_for_firmware_is_no_plan_for_pytorch(mlp: Exported) -> None:
    graph = et.capture(mlp.model, mlp.net.loss, mlp.optimizer, mlp.net.batch(), use_cache=False)
    with pytest.raises(UserError, match="it is for firmware"):
        et.compile(graph, et.keep_all(graph, updates="final"), mlp.model, mlp.optimizer)


# ---- targets


def test_every_target_of_the_survey_is_there() -> None:
    wanted = {
        "nrf52840", "stm32f746", "stm32f405", "mkr1000", "cortex-m55", "linux-x86_64", "linux-aarch64", "linux-armv6",
    }  # fmt: skip
    assert wanted <= set(target_names())
    assert load_target("rpi4").name == "linux-aarch64"
    assert load_target("cortex-m55").device.key == "cortex_m55"


def test_regions_that_touch_are_one_and_an_arena_lies_within_one() -> None:
    (ram,) = load_target("stm32f746").ram
    assert (ram.address, ram.n_bytes) == (0x20000000, 320 * 1024)
    split = load_target("stm32f405")
    assert [memory.n_bytes for memory in split.ram] == [131_072, 65_536]
    beside = place(split, arena_bytes=60_000, rest_bytes=60_000)
    assert beside is not None
    assert not beside.apart
    apart = place(split, arena_bytes=60_000, rest_bytes=100_000)
    assert apart is not None
    assert (apart.arena.name, apart.rest.name) == ("CCM", "SRAM")
    turned = place(split, arena_bytes=120_000, rest_bytes=50_000)
    assert turned is not None
    assert (turned.arena.name, turned.rest.name) == ("SRAM", "CCM")
    assert place(split, arena_bytes=140_000, rest_bytes=10_000) is None  # 192 KB in all, but not in one piece


# ---- what the program itself refuses


def test_a_label_that_is_no_class_ends_the_run_and_changes_nothing(mlp: Exported) -> None:
    x, y = mlp.net.batch()
    for bad in (torch.full_like(y, 3), torch.full_like(y, -1)):
        with pytest.raises(FirmwareFailed, match="a label is no class") as caught:
            run_firmware(mlp.project.folder, [(x, bad)])
        assert caught.value.code == 4
    with pytest.raises(UserError, match="does not fit"):
        run_firmware(mlp.project.folder, [(x[:2], y[:2])])
