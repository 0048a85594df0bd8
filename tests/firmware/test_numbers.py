"""The C program's numbers against PyTorch in float64, tensor by tensor; and that a wrong kernel is found."""

from __future__ import annotations

import copy
import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import edgetrain as et
from edgetrain.firmware import parity
from edgetrain.firmware.emulate import run_firmware
from edgetrain.firmware.kernels import FOLDER
from edgetrain.firmware.references import References
from edgetrain.graph.ir import Graph
from edgetrain.plan.plan import Plan
from tests.firmware.firmware_nets import (
    NETS,
    Exported,
    Net,
    Optimizers,
    adam,
    adamw,
    cross_entropy,
    make,
    nesterov,
    plain_sgd,
    sgd,
    slow_sgd,
)


# Steps after which every gradient and every tensor is compared; benchmarks/firmware_numbers.py does 100 for all.
@pytest.mark.parametrize(
    ("name", "optimizer", "all_steps"),
    [
        ("lenet", sgd, (1, 10)), ("autoencoder", adam, (1, 10)), ("mlp", adamw, (1, 10, 100)), ("mlp", nesterov, (10,)),
        ("minilearn_kws", sgd, (1, 10)), ("minilearn_cifar", sgd, (1,)), ("minilearn_har", adam, (1, 10)),
        ("ds_cnn", sgd, (1, 10)), ("everything", adam, (1, 10)), ("frozen", plain_sgd, (1, 10)),
        ("mobilenet_v2", slow_sgd, (1,)), ("wide_depthwise", sgd, (1, 10)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_every_gradient_and_every_tensor_is_as_exact_as_pytorch(
    name: str, optimizer: Optimizers, all_steps: tuple[int, ...], tmp_path: Path
) -> None:
    exported = make(NETS[name], tmp_path / "fw", optimizer=optimizer)
    trained = {exported.graph.tensors[p].name for p in exported.graph.gradients}
    changed = {s for op in exported.graph.ops for s in op.writes}
    lasting = {
        exported.graph.tensors[t].name for t in exported.graph.sources if exported.graph.tensors[t].storage in changed
    }
    batches = exported.batches(max(all_steps))
    runs = {steps: run_firmware(tmp_path / "fw", batches[:steps], variant="debug") for steps in all_steps}
    rows = parity.rows_of(runs, References(exported.model, exported.net.loss, exported.optimizer), batches)
    parity.require_right(rows)
    for steps, run in runs.items():
        assert {row.name for row in rows if row.what == "gradient" and row.step == steps} == trained
        assert {row.name for row in rows if row.what == "tensor" and row.step == steps} == lasting
        assert len(run.losses) == steps
        assert run.arena_used_bytes == exported.plan.peak_bytes - exported.plan.persistent_bytes


@pytest.mark.skipif(shutil.which("clang") is None, reason="clang is not installed")
@pytest.mark.parametrize("name", ["everything", "ds_cnn", "wide_depthwise"])
def test_clang_gives_the_same_bits_as_gcc(name: str, tmp_path: Path) -> None:
    exported = make(NETS[name], tmp_path / "gcc", optimizer=adam)
    shutil.copytree(tmp_path / "gcc", tmp_path / "clang")
    batches = exported.batches(3)
    gcc = run_firmware(tmp_path / "gcc", batches, variant="debug")
    clang = run_firmware(tmp_path / "clang", batches, variant="debug", compiler="clang")
    assert gcc.losses == clang.losses
    assert gcc.tensors.keys() == clang.tensors.keys()
    assert all(torch.equal(value, clang.tensors[name]) for name, value in gcc.tensors.items())
    for a, b in zip(gcc.gradients, clang.gradients, strict=True):
        assert a.keys() == b.keys() != set()
        assert all(torch.equal(value, b[name]) for name, value in a.items())


def less_memory(graph: Graph) -> Plan:
    """A plan that recomputes."""
    keep = et.keep_all(graph, updates="final")
    budget = et.Budget(memory_bytes=keep.peak_bytes - (keep.peak_bytes - keep.persistent_bytes) // 8)
    costs = et.model_costs(graph, "linux_x86_64")
    return et.plan(graph, costs, budget, updates="final", planner="fast", use_cache=False)


def test_a_plan_that_recomputes_gives_the_same_bits(tmp_path: Path) -> None:
    net = Net(NETS["everything"].build, (3, 24, 24), 5, samples=8)
    keep = make(net, tmp_path / "keep", optimizer=plain_sgd)
    less = make(net, tmp_path / "less", optimizer=plain_sgd, planned=less_memory)
    assert less.plan.recomputed
    assert less.project.arena_bytes < keep.project.arena_bytes
    batches = keep.batches(3)
    a, b = run_firmware(tmp_path / "keep", batches), run_firmware(tmp_path / "less", batches)
    assert a.losses == b.losses
    assert all(torch.equal(value, b.tensors[name]) for name, value in a.tensors.items())
    assert b.arena_used_bytes <= less.project.arena_bytes


def test_training_goes_on_from_the_optimizers_state(tmp_path: Path) -> None:
    exported = make(NETS["mlp"], tmp_path / "first", optimizer=sgd)
    batches = exported.batches(4)
    for batch in batches[:2]:
        exported.optimizer.zero_grad()
        exported.net.loss(exported.model, *batch).backward()
        exported.optimizer.step()
    et.export(
        exported.graph, exported.plan, exported.model, exported.optimizer, target="linux-x86_64", out=tmp_path / "later"
    )
    rows = parity.compare(tmp_path / "later", exported.model, exported.net.loss, exported.optimizer, batches[2:])[1]
    parity.require_right(rows)


@pytest.mark.parametrize("name", ["lenet", "everything"])
def test_it_predicts_what_the_model_predicts(name: str, tmp_path: Path) -> None:
    exported = make(NETS[name], tmp_path / "fw")
    batches = exported.batches(2)
    run = run_firmware(tmp_path / "fw", batches, predict=True)
    exact = copy.deepcopy(exported.model).double().eval()
    for batch, result in zip(batches, run.results, strict=True):
        expected = exact(batch[0].double()).detach().numpy().ravel()
        np.testing.assert_allclose(result, expected, rtol=0, atol=4e-6 * np.abs(expected).max())


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(10, 64), nn.Dropout(0.25), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.drop(torch.sigmoid(self.first(x))))
        return result


def test_dropout_drops_its_part_and_the_gradients_are_those_of_what_is_left(tmp_path: Path) -> None:
    net = Net(Dropped, (10,), 4, samples=1)
    exported = make(net, tmp_path / "fw", optimizer=plain_sgd)
    batches = exported.batches(40)
    run = run_firmware(tmp_path / "fw", batches, variant="debug")
    # Of one sample, a column of the last layer's gradient is zero exactly where its input was dropped.
    masks = [(gradients["last.weight"] != 0).any(0).float() for gradients in run.gradients]
    assert 0.7 < float(torch.stack(masks).mean()) < 0.8
    assert not torch.equal(masks[0], masks[1])
    model = copy.deepcopy(exported.model).double()
    assert isinstance(model, Dropped)
    hidden = torch.sigmoid(model.first(batches[0][0].double())) * masks[0].double() / 0.75
    loss = F.cross_entropy(model.last(hidden), batches[0][1])
    loss.backward()
    assert run.losses[0] == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(run.gradients[0][name].double(), p.grad, rtol=1e-5, atol=1e-7)
    assert run_firmware(tmp_path / "fw", batches).losses == run.losses  # the same masks again


WRONG = {
    "lenet": (
        ("dense.c", ".inner = {B, O, I}", ".inner = {B - 1, O, I}"),
        ("kernel.h", ": value[k];", ": value[k] * 1.00001f;"),
        ("sgd.c", "w[i] - s->learning_rate * g", "w[i] - s->learning_rate * 1.0001f * g"),
        # What a program says of its sides is not believed where rounding does not explain it.
        ("relu.c", "y[i] = x[i] > 0.0f", "y[i] = x[i] > 1e-3f"),
        ("max_pool2d.c", "value > max ||", "value > max + 1e-3f ||"),
    ),
    "mlp": (
        ("adam.c", "rate * (mean[i]", "rate * 1.0001f * (mean[i]"),
        ("adam.c", "1.0 - power(s->beta2, count)", "1.0 - power(0.99901, count)"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_found(name: str, tmp_path: Path) -> None:
    exported = make(NETS[name], tmp_path / "fw", optimizer=sgd if name == "lenet" else adam)
    batches = exported.batches(1)
    for file, right, wrong in WRONG[name]:
        source = tmp_path / "fw/kernels" / file
        text = source.read_text()
        assert right in text
        source.write_text(text.replace(right, wrong))
        rows = parity.compare(tmp_path / "fw", exported.model, cross_entropy, exported.optimizer, batches)[1]
        with pytest.raises(parity.WrongNumbers, match="tensors of the firmware are wrong"):
            parity.require_right(rows)
        source.write_text(text)


CORNER = "depthwise3x3_forward(conv2d_2, norm_1, blocks_0_0_weight, NULL, &blocks_0_0_shape);"
SUBTLE = {
    "momentum, off by 1 %": (".momentum = 0.9f", ".momentum = 0.909f"),
    "another eps": ("1e-05f", "1.2e-05f"),
    "a tap that is dropped in one corner of one image": (
        CORNER,
        CORNER + " for (int c = 0; c < 64; c++) { conv2d_2[c] -= norm_1[c] * blocks_0_0_weight[c * 9 + 4]; }",
    ),
    "weight decay, off by 1 %": (".weight_decay = 1e-04f", ".weight_decay = 1.01e-04f"),
}


@pytest.fixture(scope="module")
def keywords(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A net with batch norms and with activations that rounding decides: what is wrong must not hide behind them."""
    return make(NETS["ds_cnn"], tmp_path_factory.mktemp("keywords") / "fw")


@pytest.mark.parametrize("what", SUBTLE)
def test_a_subtly_wrong_program_is_found(what: str, keywords: Exported, tmp_path: Path) -> None:
    shutil.copytree(keywords.project.folder, tmp_path / "fw")
    right, wrong = SUBTLE[what]
    source = tmp_path / "fw/model.c"
    text = source.read_text()
    assert right in text
    source.write_text(text.replace(right, wrong, 1))
    torch.manual_seed(1)
    batches = keywords.batches(2)
    rows = parity.compare(tmp_path / "fw", keywords.model, cross_entropy, keywords.optimizer, batches)[1]
    with pytest.raises(parity.WrongNumbers, match="tensors of the firmware are wrong"):
        parity.require_right(rows)


@pytest.mark.parametrize(
    ("name", "exact", "low", "high"),
    [("exp_float", np.exp, -103.0, 88.7), ("log_float", np.log, 1e-40, 3e38), ("tanh_float", np.tanh, -10.0, 10.0)],
)
def test_our_own_functions_are_within_two_units_in_the_last_place(
    name: str, exact: np.ufunc, low: float, high: float, tmp_path: Path
) -> None:
    library = tmp_path / "functions.so"
    flags = ["-std=c11", "-O2", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, str(FOLDER / "functions.c"), "-o", str(library), "-lm"], check=True)
    function = getattr(ctypes.CDLL(str(library)), name)
    function.argtypes, function.restype = [ctypes.c_float], ctypes.c_float
    rng = np.random.default_rng(0)
    spread = np.geomspace(low, high, 2000) if low > 0 else np.linspace(low, high, 2000)
    x = np.concatenate([spread, rng.normal(size=500).clip(low, high)]).astype(np.float32)
    x = x[x > 0] if low > 0 else x
    values = np.array([function(float(value)) for value in x], dtype=np.float64)
    right = exact(x.astype(np.float64))
    spacing = np.spacing(np.abs(right).astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(values - right) / spacing) <= 2
    special = [function(value) for value in (float("inf"), float("-inf"), 0.0)]
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(special, exact(np.array([np.inf, -np.inf, 0.0])))
    assert np.isnan(function(float("nan")))
