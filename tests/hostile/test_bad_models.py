"""Models of a user's own that no command can train: one error in words, no traceback, nothing written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import edgetrain as et
from edgetrain.cli import app
from edgetrain.cli.output import in_words_of_commands
from edgetrain.errors import UserError

MODELS = """
import torch
from torch import nn

def net(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, classes))

def without(classes):
    return nn.Flatten()

def buffers(classes):
    made = nn.Flatten()
    made.register_buffer("scale", torch.ones(1))
    return made

def frozen(classes):
    return net(classes).requires_grad_(False)

def quantised(classes):
    import warnings
    warnings.simplefilter("ignore")
    return torch.ao.quantization.quantize_dynamic(net(classes), {nn.Linear}, dtype=torch.qint8)

def lazy(classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

def meta(classes):
    with torch.device("meta"):
        return net(classes)

def double(classes):
    return net(classes).double()

def half(classes):
    return net(classes).half()

def nothing(classes):
    return None

def raises(classes):
    raise KeyError(classes)
"""
WRONG = ["without", "buffers", "frozen", "quantised", "lazy", "meta", "double", "half", "nothing", "raises"]
COMMANDS: dict[str, tuple[str, ...]] = {
    "graph": ("--optimizer", "adam"), "plan": ("--memory", "1MB"), "profile": ("--optimizer", "adamw"), "train": (),
    "export": ("--target", "linux-x86_64", "--out", "fw"), "plan ": ("--device", "nrf52840"),
}  # fmt: skip
PYTHON = re.compile(r"requires_grad|empty parameter list|\w\(\)|Traceback|et\.\w")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODELS)
    return tmp_path / "mine.py"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_model_that_cannot_be_trained(
    wrong: str, command: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = [command.strip(), f"{file}:{wrong}", *COMMANDS[command]]
    ended = CliRunner().invoke(app, words + ([] if command == "train" else ["--input-size", "8"]))
    if command in ("graph", "plan") and wrong in ("double", "half") and ended.exit_code == 0:
        return  # a graph is made of types and shapes, and computes nothing
    assert isinstance(ended.exception, UserError), repr(ended.exception)
    told = in_words_of_commands(str(ended.exception))
    assert wrong in ("double", "half") or not PYTHON.search(told), told
    kept = command == "profile" and wrong in ("double", "half")  # the idle baseline was measured by then
    assert kept or not list((tmp_path / "here").iterdir())


def test_a_batch_of_another_type_in_python() -> None:
    model = nn.Linear(4, 2).double()

    def trained() -> torch.Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return et.prepare(model, lambda m, x: m(x).sum(), optimizer, (torch.ones(3, 4),))(torch.ones(3, 4))

    with pytest.raises(UserError, match="float"):
        trained()


@pytest.mark.parametrize("command", ["train", "plan", "export"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_momentum_is_for_sgd(command: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    more = {"export": ["--target", "linux-x86_64", "--out", "fw"], "plan": ["--memory", "1MB"]}.get(command, [])
    for value in ("0.9", "0.5", "0"):
        ended = CliRunner().invoke(app, [command, "lenet", "--optimizer", optimizer, "--momentum", value, *more])
        assert ended.exit_code == 2
        assert "--momentum" in ended.output
    assert not list(tmp_path.iterdir())
