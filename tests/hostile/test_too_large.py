"""Work that this machine has no room for, or that does not end in its time: refused before it is begun, in words."""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import edgetrain as et
from edgetrain.bench import demo
from edgetrain.cli import app
from edgetrain.errors import UserError
from edgetrain.firmware.emulate import run_firmware
from edgetrain.measure.sensors import room
from edgetrain.native import arena
from edgetrain.plan import unmeasured
from edgetrain.plan.process import resident_bytes

LEFT_BYTES = 200_000_000  # of the machine, beside this process
LIMIT_S = 20.0


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    there = resident_bytes() - arena.resident_bytes() + LEFT_BYTES
    for module in (room, unmeasured):
        monkeypatch.setattr(module, "room_bytes", lambda: there)


RUN_HERE = [
    ("train", "lenet", "--batch", "120000"),
    ("train", "lenet", "--batch", "120000", "--out", "mine"),
    ("train", "lenet", "--batch", "120000", "--memory", "1TB"),
    ("train", "lenet", "--batch", "120000", "--process-memory", "1TB"),
    ("train", "lenet", "--batch", "120000", "--planner", "keep-all"),
    ("train", "lenet", "--batch", "120000", "--optimizer", "adam", "--micro-batches", "2"),
    ("profile", "lenet", "--batch", "12000"),
    ("profile", "lenet", "--batch", "12000", "--memory", "1TB"),
    ("profile", "lenet", "--batch", "12000", "--micro-batches", "2"),
    ("demo", "--batch", "500"),
]


@pytest.mark.parametrize("words", RUN_HERE, ids=" ".join)
@pytest.mark.usefixtures("small_machine")
def test_a_step_that_this_machine_has_no_room_for(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begin = time.monotonic()
    ended = CliRunner().invoke(app, list(words))
    assert isinstance(ended.exception, UserError), repr(ended.exception)
    assert "memory" in str(ended.exception)
    assert re.search("smaller|fewer", ended.exception.next_step or "")
    assert not list(tmp_path.iterdir())
    assert time.monotonic() - begin < LIMIT_S


@pytest.mark.usefixtures("small_machine")
def test_what_does_not_fit_here_can_be_planned_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, ["plan", "lenet", "--batch", "12000", "--device", "rpi4", "--runtime", "library"])
    assert ended.exit_code == 0, ended.output
    assert "Raspberry Pi" in ended.output


def deep() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(24) for layer in (nn.Linear(50, 50), nn.Tanh())], nn.Linear(50, 2))
    batch = torch.randn(40_000, 50), torch.randint(2, (40_000,))
    return net, torch.optim.SGD(net.parameters(), lr=0.1), batch


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


@pytest.mark.usefixtures("small_machine")
def test_the_budget_that_is_named_works() -> None:
    net, optimizer, batch = deep()
    with pytest.raises(UserError, match="would take") as told:
        et.prepare(net, loss, optimizer, batch, use_cache=False)
    named = re.search(r"memory=(\d+)", told.value.next_step or "")
    assert named is not None, told.value
    step = et.prepare(net, loss, optimizer, batch, memory=int(named[1]), planner="fast", use_cache=False)
    assert step.plan.peak_bytes <= int(named[1])
    assert torch.isfinite(step(*batch))


@pytest.mark.usefixtures("small_machine")
def test_a_budget_that_moves_is_planned_up_to_what_is_there() -> None:
    net, optimizer, batch = deep()
    step = et.prepare(net, loss, optimizer, batch, memory=lambda: "10GB", use_cache=False)
    assert step.plan.peak_bytes <= LEFT_BYTES + 100_000_000


def test_a_run_that_fails_for_want_of_memory_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def full(*args: object, **options: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("edgetrain.run.trainer.sample_numbers", full)
    assert isinstance(CliRunner().invoke(app, ["train", "lenet", "--out", "mine"]).exception, RuntimeError)
    assert not list(tmp_path.iterdir())


# ---- firmware


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("firmware") / "fw"
    ended = CliRunner().invoke(app, ["export", "lenet", "--target", "linux-x86_64", "--batch", "2", "--out", str(out)])
    assert ended.exit_code == 0, ended.output
    run_firmware(out, [(torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.int64))], variant="fast")  # builds it
    return out


@pytest.mark.parametrize("data", [(), ("--data", "digits")], ids=lambda data: " ".join(data) or "random")
def test_the_time_limit_holds_from_the_beginning(project: Path, data: tuple[str, ...]) -> None:
    begin = time.monotonic()
    ended = CliRunner().invoke(app, ["emulate", str(project), "--steps", "1000000", *data, "--time-limit", "1"])
    assert isinstance(ended.exception, UserError), repr(ended.exception)
    assert "within 1 s" in str(ended.exception)
    assert time.monotonic() - begin < LIMIT_S


@pytest.mark.parametrize("data", [(), ("--data", "digits")], ids=lambda data: " ".join(data) or "random")
def test_a_run_that_the_disk_has_no_room_for(
    project: Path, data: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, 10**9))
    ended = CliRunner().invoke(app, ["emulate", str(project), "--steps", "10000000", *data])
    assert isinstance(ended.exception, UserError), repr(ended.exception)
    assert "fewer steps" in str(ended.exception)


def test_batches_are_made_as_they_are_written(project: Path) -> None:
    made = itertools.count()

    class Slow:
        def __len__(self) -> int:
            return 100_000

        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            while next(made) < len(self):
                time.sleep(0.05)
                yield torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.int64)

    with pytest.raises(UserError, match=r"within 0\.5 s"):
        run_firmware(project, Slow(), variant="fast", time_limit_s=0.5)
    assert next(made) < 50


@pytest.mark.usefixtures("small_machine")
def test_a_check_that_there_is_no_room_for(tmp_path: Path) -> None:
    words = ["export", "lenet", "--target", "linux-x86_64", "--batch", "8", "--check", "10000", "--out"]
    ended = CliRunner().invoke(app, [*words, str(tmp_path / "fw")])
    assert isinstance(ended.exception, UserError), repr(ended.exception)
    assert "check" in str(ended.exception)
    assert not list(tmp_path.iterdir())


def test_the_demo_as_it_stands_has_room() -> None:
    demo._require_room(demo.Settings())
