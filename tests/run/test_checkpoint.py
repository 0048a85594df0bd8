"""Checkpoints: back bit for bit, refused when touched, and never in the way of the one before."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from edgetrain.errors import UserError
from edgetrain.run import checkpoint as checkpoints
from edgetrain.run.checkpoint import State, latest, restore, rng_preserved, save

STATE = State(
    step=7,
    epoch=1,
    offset=3,
    length=10,
    batch=2,
    seed=5,
    scheduler={"kind": "cosine"},
    evaluation={"accuracy": 0.1 + 0.2},
    metadata={"model": "odd", "classes": 3},
)


class Odd(nn.Module):
    """Everything that is hard to store: tied weights, several types, strides, extra state, an empty buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(4)
        self.brief = nn.Parameter(torch.randn(5).bfloat16())
        self.register_buffer("codes", torch.randint(-128, 127, (6,), dtype=torch.int8))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("strided", torch.arange(12.0).reshape(3, 4).t()[1:])
        self.note: dict[str, object] = {"scale": float("inf"), "pair": (1, [None, "x"])}

    def get_extra_state(self) -> dict[str, object]:
        return self.note

    def set_extra_state(self, state: dict[str, object]) -> None:
        self.note = state

    def loss(self) -> Tensor:
        image = self.norm(self.conv(torch.randn(2, 3, 5, 5))).square().mean()
        tied = self.head(self.embed(torch.tensor([1, 2]))).square().mean()
        return torch.stack([image, tied, self.brief.float().sum()]).sum()


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.8, 0.95), amsgrad=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": adam,
    "capturable": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "groups": lambda model: torch.optim.RMSprop(
        [{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(model.parameters())], centered=True
    ),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
}


def trained(make: Callable[[nn.Module], Optimizer] = adam, seed: int = 0) -> tuple[Odd, Optimizer]:
    torch.manual_seed(seed)
    model = Odd()
    optimizer = make(model)
    for _ in range(2):
        train_one(model, optimizer)
    return model, optimizer


def train_one(model: Odd, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    loss = model.loss()
    loss.backward()
    optimizer.step()


def assert_same(one: Any, other: Any) -> None:
    """Equal in values, types, structure; tensors bit for bit and with the same strides."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_round_trip_is_bit_for_bit(tmp_path: Path, kind: str) -> None:
    model, optimizer = trained(OPTIMIZERS[kind])
    path = save(tmp_path, model, optimizer, STATE)
    assert path == tmp_path / "step-00000007"
    other, fresh = trained(OPTIMIZERS[kind], seed=1)
    found, messages = latest(tmp_path)
    assert found is not None
    assert (found.state, messages) == (STATE, [])
    restore(found, other, fresh)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert other.head.weight is other.embed.weight


def test_training_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    model, optimizer = trained()
    random.seed(3)
    np.random.seed(4)
    save(tmp_path, model, optimizer, STATE)
    train_one(model, optimizer)
    drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(1).item()]
    shutil.copytree(tmp_path, tmp_path / "kept")
    other, fresh = trained(seed=1)
    found, _ = latest(tmp_path / "kept")
    assert found is not None
    restore(found, other, fresh)
    shutil.rmtree(tmp_path / "kept")  # nothing restored may depend on the file any longer
    train_one(other, fresh)
    again = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(1).item()]
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert drawn == again


def test_the_file_is_plain_safetensors_with_tied_weights_once(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = save(tmp_path, model, optimizer, STATE)
    tensors = safetensors.torch.load_file(path / "tensors.safetensors")
    assert "model/embed.weight" in tensors
    assert "model/head.weight" not in tensors
    assert torch.equal(tensors["model/brief"], model.brief)
    assert torch.equal(tensors["optimizer/conv.weight/exp_avg"], optimizer.state[model.conv.weight]["exp_avg"])
    content = json.loads((path / "state.json").read_text())["content"]
    assert content["aliases"] == {"model/head.weight": "model/embed.weight"}


def test_optimizer_state_of_another_type_keeps_it(tmp_path: Path) -> None:
    model, optimizer = trained()
    codes = torch.arange(5, dtype=torch.int8)
    optimizer.state[model.brief]["codes"] = codes
    optimizer.state[model.brief]["master"] = torch.randn(5)
    save(tmp_path, model, optimizer, STATE)
    other, fresh = trained(seed=1)
    found, _ = latest(tmp_path)
    assert found is not None
    restore(found, other, fresh)
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_views_into_one_arena_are_stored_apart(tmp_path: Path) -> None:
    arena = torch.arange(10.0)
    model = nn.ParameterDict({"a": nn.Parameter(arena[:6]), "b": nn.Parameter(arena[4:])})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = save(tmp_path, model, optimizer, STATE)
    tensors = safetensors.torch.load_file(path / "tensors.safetensors")
    assert torch.equal(tensors["model/b"], arena[4:])


def test_rng_preserved() -> None:
    torch.manual_seed(0)
    with rng_preserved():
        inside = (torch.rand(1).item(), random.random(), np.random.rand())
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == inside


def test_the_generators_of_an_accelerator_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed: what torch.cuda would be asked and told on a machine with two of them, then on one with one."""
    states = [torch.arange(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)]
    told: list[Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    save(tmp_path, model, optimizer, STATE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", told.extend)
    found, _ = latest(tmp_path)
    assert found is not None
    restore(found, model, optimizer)
    assert len(told) == 1
    assert torch.equal(told[0], states[0])


# Refusing what is not whole


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two whole checkpoints of a small model, steps 1 and 2."""
    folder = tmp_path_factory.mktemp("two")
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (1, 2):
        save(folder, model, optimizer, replace(STATE, step=step))
    return folder


def refused(folder: Path) -> str:
    """The message of a folder in which the newest is broken and the one before is not."""
    found, messages = latest(folder)
    assert found is not None
    assert found.state.step == 1
    assert len(messages) == 1
    assert "step-00000002" in messages[0]
    return messages[0]


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
def test_cut_short_at_any_byte_is_refused(tmp_path: Path, two: Path, name: str) -> None:
    folder = Path(shutil.copytree(two, tmp_path / "copy"))
    file = folder / "step-00000002" / name
    data = file.read_bytes()
    header = int.from_bytes(data[:8], "little") + 8
    interesting = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(data) // 2, len(data) - 2, len(data) - 1}
    for length in sorted(interesting & set(range(len(data)))):
        file.write_bytes(data[:length])
        message = refused(folder)
        assert name in message
    file.write_bytes(data + b"\0")
    refused(folder)
    file.unlink()
    assert "No such file" in refused(folder)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
def test_any_flipped_bit_is_refused(tmp_path: Path, two: Path, name: str) -> None:
    folder = Path(shutil.copytree(two, tmp_path / "copy"))
    file = folder / "step-00000002" / name
    data = file.read_bytes()
    chosen = random.Random(0).sample(range(len(data) * 8), 400)
    for bit in [0, 7, len(data) * 8 - 1, *chosen]:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        refused(folder)
    file.write_bytes(data)
    found, messages = latest(folder)
    assert found is not None
    assert (found.state.step, messages) == (2, [])


def test_half_written_folders_are_never_read(tmp_path: Path, two: Path) -> None:
    folder = Path(shutil.copytree(two, tmp_path / "copy"))
    shutil.copytree(folder / "step-00000002", folder / ".tmp-step-00000003")
    (folder / "step-00000004").mkdir()
    (folder / "step-notanumber").mkdir()
    found, messages = latest(folder)
    assert found is not None
    assert found.state.step == 2
    assert [message.split()[1] for message in messages] == ["step-00000004"]


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path, two: Path) -> None:
    folder = Path(shutil.copytree(two, tmp_path / "copy"))
    file = folder / "step-00000002" / "state.json"
    content = json.loads(file.read_text())["content"]
    file.write_bytes(checkpoints._sealed({**content, "schema": 99}))
    assert "99" in refused(folder)


def test_an_empty_or_missing_folder_has_none(tmp_path: Path) -> None:
    assert latest(tmp_path) == (None, [])
    assert latest(tmp_path / "nowhere") == (None, [])


# Keeping and removing


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_keeps_the_newest_and_clears_leftovers(tmp_path: Path) -> None:
    model, optimizer = trained()
    (tmp_path / ".tmp-step-00000009").mkdir()
    (tmp_path / ".tmp-step-00000009" / "tensors.safetensors").touch()
    for step in (1, 2, 3):
        save(tmp_path, model, optimizer, replace(STATE, step=step))
    assert steps(tmp_path) == ["step-00000002", "step-00000003"]
    save(tmp_path, model, optimizer, replace(STATE, step=4), keep=1)
    assert steps(tmp_path) == ["step-00000004"]


def test_a_broken_later_one_goes_and_a_whole_later_one_stays(tmp_path: Path) -> None:
    model, optimizer = trained()
    for step in (5, 6):
        save(tmp_path, model, optimizer, replace(STATE, step=step))
    (tmp_path / "step-00000006" / "state.json").write_text("{")
    save(tmp_path, model, optimizer, replace(STATE, step=4), keep=1)
    assert steps(tmp_path) == ["step-00000004", "step-00000005"]


def test_a_step_saved_again_replaces_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    save(tmp_path, model, optimizer, STATE, keep=1)
    again = replace(STATE, batch=4)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", _killed_after(1))
        with pytest.raises(RuntimeError, match="killed"):
            save(tmp_path, model, optimizer, again, keep=1)
    found, _ = latest(tmp_path)
    assert found is not None
    assert (found.state, found.path.name) == (STATE, "step-00000007.old")
    save(tmp_path, model, optimizer, again, keep=1)
    found, _ = latest(tmp_path)
    assert found is not None
    assert found.state == again
    assert steps(tmp_path) == ["step-00000007"]


def _killed_after(renames: int) -> Callable[[Path, Path], Path]:
    """Path.rename in a process that dies after so many calls."""
    rename, left = Path.rename, iter(range(renames))

    def patched(self: Path, target: Path) -> Path:
        if next(left, None) is None:
            raise RuntimeError("killed")
        return rename(self, target)

    return patched


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB; skips where it cannot be mounted."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_told_and_harms_nothing(small_disk: Path) -> None:
    small, large = nn.Linear(100, 50), nn.Linear(1000, 100)
    folder = small_disk / "checkpoints"
    save(folder, small, torch.optim.SGD(small.parameters()), replace(STATE, step=1))
    with pytest.raises(UserError, match="disk is full") as caught:
        save(folder, large, torch.optim.SGD(large.parameters()), replace(STATE, step=2))
    assert str(folder) in str(caught.value)
    needed = int((caught.value.expected or "").split()[0])
    assert 400_400 < needed < 500_000
    assert steps(folder) == ["step-00000001"]
    found, messages = latest(folder)
    assert found is not None
    assert (found.state.step, messages) == (1, [])


@pytest.mark.parametrize("call", range(5))
def test_a_disk_full_at_any_sync_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    model, optimizer = trained()
    save(tmp_path, model, optimizer, replace(STATE, step=1))
    fsync, calls = os.fsync, iter(range(10))

    def full(handle: int) -> None:
        if next(calls) == call:
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    told = False
    try:
        save(tmp_path, model, optimizer, replace(STATE, step=2))
    except UserError as error:
        told = "disk is full" in str(error)
    found, messages = latest(tmp_path)
    assert found is not None
    assert told == (call < 4)  # tensors, state, the new folder, its parent
    assert found.state.step == (1 if call < 3 else 2)
    assert messages == []


# What does not fit


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path, model, optimizer, STATE)
    found, _ = latest(tmp_path)
    assert found is not None
    linear = nn.Linear(2, 2)
    with pytest.raises(UserError, match="does not fit"):
        restore(found, linear, torch.optim.Adam(linear.parameters()))
    with pytest.raises(UserError, match="Adam"):
        restore(found, model, torch.optim.SGD(model.parameters()))
    with pytest.raises(UserError, match="does not fit"):
        restore(found, model, torch.optim.Adam(list(model.parameters())[:2]))


def test_what_cannot_be_held_is_refused_before_writing(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    stranger = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))])
    with pytest.raises(UserError, match="not the model's"):
        save(tmp_path, model, stranger, STATE)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(UserError, match="optimizer_groups/0/odd"):
        save(tmp_path, model, optimizer, STATE)
    optimizer.param_groups[0]["odd"] = None
    with pytest.raises(UserError, match="plain JSON"):
        save(tmp_path, model, optimizer, replace(STATE, metadata={"a": {1, 2}}))
    assert steps(tmp_path) == []
