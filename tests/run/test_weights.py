"""Weights from files: every kind that is about, and nothing that could run."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from edgetrain import zoo
from edgetrain.errors import UserError
from edgetrain.run.checkpoint import State, save
from edgetrain.run.weights import load_weights

STATE = State(1, 0, 1, 1, 1, 0, {}, None, {})


class Net(nn.Module):
    def __init__(self, classes: int = 5, width: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width))
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(width, classes))


class Tied(nn.Module):
    def __init__(self, words: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 3)
        self.head = nn.Linear(3, words, bias=False)
        self.head.weight = self.embed.weight


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model: nn.Module, expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("nest", [(), ("state_dict",), ("model",), ("model", "state_dict")])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_state_dicts_of_every_kind(tmp_path: Path, nest: tuple[str, ...], prefix: str) -> None:
    source, file = Net(), tmp_path / "weights.pth"
    data: dict[str, object] = OrderedDict((prefix + name, value) for name, value in weights(source).items())
    for name in nest:
        data = {name: data, "epoch": 3, "best": 0.5}
    torch.save(data, file)
    model = Net()
    assert "Loaded 9 tensors" in load_weights(model, file)[0]
    assert same(model, weights(source))


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.bin"])
def test_safetensors_whatever_the_name(tmp_path: Path, name: str) -> None:
    source, model = Net(), Net()
    safetensors.torch.save_file(weights(source), tmp_path / name)
    load_weights(model, tmp_path / name)
    assert same(model, weights(source))


def test_the_old_format_of_torch(tmp_path: Path) -> None:
    source, model = Net(), Net()
    torch.save(source.state_dict(), tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    load_weights(model, tmp_path / "w.pt")
    assert same(model, weights(source))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_old_names_in_torchvision_s_densenet_files(tmp_path: Path, prefix: str) -> None:
    """norm.1 for norm1 and conv.2 for conv2 inside the dense layers, and no batch counters; the rest as it is."""
    source, model = (zoo.build("densenet121", classes=3, width=0.125) for _ in range(2))
    old = {
        prefix + re.sub(r"(denselayer\d+\.[a-z]+)(\d)", r"\1.\2", name): value
        for name, value in weights(source).items()
        if not name.endswith("num_batches_tracked")
    }
    assert prefix + "features.denseblock3.denselayer24.conv.2.weight" in old
    torch.save(old, tmp_path / "densenet121.pth")
    assert "Loaded 606 tensors" in load_weights(model, tmp_path / "densenet121.pth")[0]
    assert same(model, weights(source))


def test_a_checkpoint_of_our_own(tmp_path: Path) -> None:
    source, model = Tied(), Tied()
    path = save(tmp_path, source, torch.optim.Adam(source.parameters()), replace(STATE))
    load_weights(model, path / "tensors.safetensors")
    assert same(model, weights(source))


def test_tied_weights_need_be_there_once(tmp_path: Path) -> None:
    source, model = Tied(), Tied()
    safetensors.torch.save_file({"embed.weight": source.embed.weight.detach()}, tmp_path / "w.safetensors")
    load_weights(model, tmp_path / "w.safetensors")
    assert same(model, weights(source))


def test_files_without_batch_counters(tmp_path: Path) -> None:
    source, model = Net(), Net()
    old = {name: value for name, value in weights(source).items() if "num_batches" not in name}
    torch.save(old, tmp_path / "w.pth")
    load_weights(model, tmp_path / "w.pth")
    assert same(model, weights(source))


def test_a_model_whose_own_names_begin_with_module(tmp_path: Path) -> None:
    source, model = nn.ModuleDict({"module": nn.Linear(2, 2)}), nn.ModuleDict({"module": nn.Linear(2, 2)})
    torch.save(source.state_dict(), tmp_path / "w.pth")
    load_weights(model, tmp_path / "w.pth")
    assert same(model, weights(source))


def test_a_fresh_head_when_asked(tmp_path: Path) -> None:
    source, model = Net(classes=1000), Net(classes=5)
    before = weights(model)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    with pytest.raises(UserError, match="resize_head") as caught:
        load_weights(model, tmp_path / "w.pth")
    assert "classifier.1.weight [1000, 4] for [5, 4]" in str(caught.value)
    assert same(model, before)
    messages = load_weights(model, tmp_path / "w.pth", resize_head=True)
    assert "classifier.1 keeps its fresh initial values: the file has 1000 classes, the model 5" in messages[1]
    expected = weights(source) | {name: value for name, value in before.items() if "classifier" in name}
    assert same(model, expected)


def test_two_heads(tmp_path: Path) -> None:
    def heads(classes: int) -> nn.ModuleDict:
        return nn.ModuleDict({"aux": nn.Linear(3, classes), "body": nn.Linear(2, 3), "fc": nn.Linear(3, classes)})

    torch.save(heads(10).state_dict(), tmp_path / "w.pth")
    messages = load_weights(heads(4), tmp_path / "w.pth", resize_head=True)
    assert [message.split()[2] for message in messages[1:]] == ["aux", "fc"]


def test_resize_head_forgives_nothing_else(tmp_path: Path) -> None:
    torch.save(Net(width=8).state_dict(), tmp_path / "wide.pth")
    with pytest.raises(UserError, match="other shapes"):
        load_weights(Net(), tmp_path / "wide.pth", resize_head=True)
    torch.save(Tied(9).state_dict(), tmp_path / "words.pth")
    with pytest.raises(UserError, match="other shapes"):
        load_weights(Tied(), tmp_path / "words.pth", resize_head=True)
    fits = Net()
    torch.save(fits.state_dict(), tmp_path / "fits.pth")
    assert len(load_weights(Net(), tmp_path / "fits.pth", resize_head=True)) == 1


def test_missing_and_unexpected_names_are_listed(tmp_path: Path) -> None:
    model = Net()
    before = weights(model)
    torch.save({f"other.{n}": torch.ones(1) for n in range(9)} | {"features.0.bias": torch.ones(4)}, tmp_path / "w")
    with pytest.raises(UserError) as caught:
        load_weights(model, tmp_path / "w")
    assert "missing: features.0.weight" in str(caught.value)
    assert "9 unexpected: other.0, other.1, other.2, other.3, …" in str(caught.value)
    assert same(model, before)


class Harmful:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize("new", [True, False])
def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path, new: bool) -> None:
    trace = tmp_path / "was-here"
    torch.save({"weight": Harmful(trace)}, tmp_path / "w.pth", _use_new_zipfile_serialization=new)
    with pytest.raises(UserError, match="could run any code") as caught:
        load_weights(Net(), tmp_path / "w.pth")
    assert "system" in str(caught.value)
    assert not trace.exists()


def test_a_pickled_model_is_refused_with_a_way_out(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(UserError, match="state_dict"):
        load_weights(nn.Linear(2, 2), tmp_path / "model.pt")


@pytest.mark.parametrize("data", [b"", b"hello", b"PK\x03\x04broken", b"\x80\x02broken", b"\xff" * 8 + b"{}"])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "w"
    file.write_bytes(data)
    with pytest.raises(UserError, match="/w "):
        load_weights(Net(), file)


def test_no_file_and_no_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load_weights(Net(), tmp_path / "nowhere.pth")
    torch.save({"epoch": 3, "net": {"a": torch.ones(1)}}, tmp_path / "w")
    with pytest.raises(UserError, match="epoch, net"):
        load_weights(Net(), tmp_path / "w")
    torch.save(torch.ones(3), tmp_path / "tensor")
    with pytest.raises(UserError, match="received: Tensor"):
        load_weights(Net(), tmp_path / "tensor")
