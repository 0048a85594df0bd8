"""Graphs kept on disk: found again by the same program, and never by one that would train otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from edgetrain.graph import cache
from edgetrain.graph.capture import Captured, capture_inference, capture_with_externals
from edgetrain.graph.ir import Graph


class Net(nn.Module):
    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(3, 2, 3), nn.Dropout(0.5)
        self.scale = scale
        self.settings = {"power": [1, 2]}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.conv(x))
        return y * self.scale


def helper(x: Tensor) -> Tensor:
    return x.square()


def other_helper(x: Tensor) -> Tensor:
    return x.abs()


def loss_by_helper(model: nn.Module, x: Tensor) -> Tensor:
    return helper(model(x)).mean()


def mean(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output.mean()


def capture(
    model: nn.Module | None = None,
    loss: Callable[..., Tensor] = mean,
    *,
    shape: tuple[int, ...] = (2, 3, 4, 4),
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1),
    memory_format: Literal["preserve", "channels_last"] = "preserve",
    unused: Literal["error", "freeze"] = "error",
    use_cache: bool = True,
) -> Captured:
    model = model or Net()
    return capture_with_externals(
        model, loss, optimizer(model.parameters()), (torch.randn(shape),),
        memory_format=memory_format, unused=unused, use_cache=use_cache,
    )  # fmt: skip


def files(own_cache: Path) -> list[Path]:
    return sorted((own_cache / "graphs").glob("*"))


# ---- hits -----------------------------------------------------------------------------------------------------


def test_second_capture_is_found(own_cache: Path) -> None:
    """Equal to the first, and to one made without the cache."""
    first, second = capture(), capture()
    assert (first.cached, second.cached) == (False, True)
    assert first.not_cached_because is None
    assert second.graph == first.graph == capture(use_cache=False).graph
    assert len(files(own_cache)) == 1


def test_values_of_tensors_do_not_matter() -> None:
    """A step reads them anew each time; so does it the learning rate."""
    weights = torch.ones(2)
    model = Net()

    def weighted(m: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = m(x)
        return (output.mean((0, 2, 3)) * weights).sum()

    assert not capture(model, weighted).cached
    weights.add_(1)
    with torch.no_grad():
        model.conv.weight.mul_(3)
    found = capture(model, weighted, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    assert found.cached
    assert [t is weights for t in found.externals.values()] == [True]


def test_prediction_is_found_too(own_cache: Path) -> None:
    """Under a name of its own, whatever the training flags."""
    model = Net()
    graph = capture_inference(model, (torch.ones(2, 3, 4, 4),))
    (file,) = files(own_cache)
    before = file.stat().st_ino
    assert capture_inference(model.eval(), (torch.ones(2, 3, 4, 4),)) == graph
    assert [f.stat().st_ino for f in files(own_cache)] == [before]
    assert not capture(model).cached


# ---- misses ---------------------------------------------------------------------------------------------------


def closure(value: float | Tensor) -> Callable[..., Tensor]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = model(x)
        return output.mean() * value

    return loss


def closure_over_dict(value: float) -> Callable[..., Tensor]:
    options = {"by": [value]}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = model(x)
        return output.mean() * options["by"][0]

    return loss


def by_default(value: float) -> Callable[..., Tensor]:
    def loss(model: nn.Module, x: Tensor, by: float = value) -> Tensor:
        output: Tensor = model(x)
        return output.mean() * by

    return loss


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_double() -> Captured:
    model = Net()
    example = torch.randn(2, 3, 4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with default_dtype(torch.float64):
        return capture_with_externals(model, mean, optimizer, (example,))


def with_other_power() -> Captured:
    model = Net()
    model.settings["power"][1] = 3
    return capture(model)


def with_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def biases_only(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.dim() == 1], lr=0.1)


def with_frozen_weight() -> Captured:
    model = Net()
    model.conv.weight.requires_grad_(False)
    return capture(model)


def strided() -> Captured:
    model = Net()
    example = torch.randn(2, 4, 4, 3).permute(0, 3, 1, 2)
    return capture_with_externals(model, mean, torch.optim.SGD(model.parameters(), lr=0.1), (example,))


Pair = tuple[Callable[[], Captured], Callable[[], Captured]]
DIFFERING: dict[str, Pair] = {
    "bytecode of the loss": (
        lambda: capture(loss=lambda m, x: m(x).mean()),
        lambda: capture(loss=lambda m, x: m(x).sum()),
    ),
    "number in the loss": (
        lambda: capture(loss=lambda m, x: m(x).mean() * 2.0),
        lambda: capture(loss=lambda m, x: m(x).mean() * 3.0),
    ),
    "operator in the loss": (
        lambda: capture(loss=lambda m, x: m(x).mean() + m(x).mean()),
        lambda: capture(loss=lambda m, x: m(x).mean() * m(x).mean()),
    ),
    "closure": (lambda: capture(loss=closure(2.0)), lambda: capture(loss=closure(3.0))),
    "type in the closure": (lambda: capture(loss=closure(1)), lambda: capture(loss=closure(True))),
    "shape of a tensor in the closure": (
        lambda: capture(loss=closure(torch.ones(()))),
        lambda: capture(loss=closure(torch.ones((), dtype=torch.float64))),
    ),
    "dict in the closure": (lambda: capture(loss=closure_over_dict(2)), lambda: capture(loss=closure_over_dict(3))),
    "default argument": (lambda: capture(loss=by_default(2.0)), lambda: capture(loss=by_default(3.0))),
    "attribute of the module": (lambda: capture(Net(2.0)), lambda: capture(Net(3.0))),
    "nested attribute of the module": (lambda: capture(), with_other_power),
    "shape": (lambda: capture(), lambda: capture(shape=(3, 3, 4, 4))),
    "strides of the example": (lambda: capture(), strided),
    "training flag": (lambda: capture(), lambda: capture(Net().eval())),
    "default dtype": (lambda: capture(), in_double),
    "momentum": (lambda: capture(), lambda: capture(optimizer=with_momentum)),
    "optimizer": (lambda: capture(), lambda: capture(optimizer=lambda p: torch.optim.Adam(p))),
    "parameters of the optimizer": (lambda: capture(), lambda: capture(optimizer=biases_only)),
    "frozen parameter": (lambda: capture(), with_frozen_weight),
    "memory format": (lambda: capture(), lambda: capture(memory_format="channels_last")),
    "unused": (lambda: capture(), lambda: capture(unused="freeze")),
}


@pytest.mark.parametrize("what", DIFFERING)
def test_what_differs_is_not_found(what: str, own_cache: Path) -> None:
    """Each is found again by itself, and the other is not."""
    one, other = DIFFERING[what]
    assert [one().cached, other().cached, one().cached, other().cached] == [False, False, True, True]
    assert len(files(own_cache)) == 2


def test_changed_helper_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that the loss reaches through a global of its module."""
    assert not capture(loss=loss_by_helper).cached
    assert capture(loss=loss_by_helper).cached
    monkeypatch.setattr(sys.modules[__name__], "helper", other_helper)
    changed = capture(loss=loss_by_helper)
    assert not changed.cached
    assert any("abs" in op.kind for op in changed.graph.ops)


def test_forward_hook_is_not_overlooked() -> None:
    model = Net()
    assert not capture(model).cached
    hook = model.conv.register_forward_hook(lambda _module, _args, output: output * 3)
    assert [capture(model).cached for _ in range(2)] == [False, True]
    hook.remove()
    assert capture(model).cached


def test_changed_method_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y

    assert not capture().cached
    monkeypatch.setattr(Net, "forward", forward)
    assert not capture().cached


# ---- when it is off -------------------------------------------------------------------------------------------


def test_open_file_in_the_closure_turns_it_off(own_cache: Path, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            log.write("")
            return mean(model, x)

        found = [capture(loss=loss) for _ in range(2)]
    assert [f.cached for f in found] == [False, False]
    assert found[0].not_cached_because == "log is a _io.TextIOWrapper"
    assert files(own_cache) == []


def test_generator_in_the_closure_turns_it_off(own_cache: Path) -> None:
    numbers = (n for n in range(3))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        assert numbers is not None
        return mean(model, x)

    found = capture(loss=loss)
    assert found.not_cached_because == "numbers is a builtins.generator"
    assert not capture(loss=loss).cached
    assert files(own_cache) == []


def test_off_writes_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGETRAIN_CACHE", "off")
    monkeypatch.chdir(own_cache)
    assert cache.folder() is None
    assert not any(capture().cached for _ in range(2))
    assert list(own_cache.iterdir()) == []


def test_use_cache_false_neither_reads_nor_writes(own_cache: Path) -> None:
    assert not capture(use_cache=False).cached
    assert files(own_cache) == []
    capture()
    assert not capture(use_cache=False).cached


def test_folder_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EDGETRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg" / "edgetrain" / "graphs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.folder() == tmp_path / "home" / ".cache" / "edgetrain" / "graphs"


# ---- files ----------------------------------------------------------------------------------------------------


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def altered(content: bytes) -> bytes:
    """Still JSON, still a legal graph, of a step that scales by another number."""
    assert content.count(b", 2.0]") >= 1
    return content.replace(b", 2.0]", b", 7.0]")


def illegal(content: bytes) -> bytes:
    return content.replace(b'"activation"', b'"parameter"')


@pytest.mark.parametrize("spoil", [truncated, altered, illegal, lambda _: b"", lambda _: b"\xff\xfe"])
def test_spoilt_file_is_a_miss_and_is_replaced(spoil: Callable[[bytes], bytes], own_cache: Path) -> None:
    right = capture().graph
    (file,) = files(own_cache)
    whole = file.read_bytes()
    file.write_bytes(spoil(whole))
    again = capture()
    assert (again.cached, again.graph) == (False, right)
    assert file.read_bytes() == whole
    assert capture().cached


def test_folder_in_the_place_of_a_file_is_a_miss(own_cache: Path) -> None:
    capture()
    (file,) = files(own_cache)
    file.unlink()
    file.mkdir()
    assert not capture().cached
    assert files(own_cache) == [file]  # nothing half-written beside it


def test_folder_that_cannot_be_made_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file stands where the folder would be."""
    (tmp_path / "taken").write_text("mine")
    monkeypatch.setenv("EDGETRAIN_CACHE", str(tmp_path / "taken"))
    assert not any(capture().cached for _ in range(2))
    assert (tmp_path / "taken").read_text() == "mine"


def test_unwritable_folder_is_no_error(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a full disk: whatever the system refuses, the capture itself is there."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("mkstemp", "save", "replace"):
        with monkeypatch.context() as patch:
            where: Any = {"mkstemp": tempfile, "save": Graph, "replace": os}[name]
            patch.setattr(where, name, refuse)
            assert not capture().cached
        assert files(own_cache) == [], name


def test_absent_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGETRAIN_CACHE", str(tmp_path / "a" / "b"))
    assert not capture().cached
    assert capture().cached


def test_oldest_files_are_dropped(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used: to be found counts as use."""
    monkeypatch.setattr(cache, "MOST", 2)
    ages = {1.0: 300, 2.0: 200}
    for scale, age in ages.items():
        before = set(files(own_cache))
        capture(Net(scale))
        (new,) = set(files(own_cache)) - before
        os.utime(new, (new.stat().st_atime - age, new.stat().st_mtime - age))
    assert capture(Net(1.0)).cached
    capture(Net(3.0))
    assert len(files(own_cache)) == 2
    assert capture(Net(1.0)).cached
    assert capture(Net(3.0)).cached
    assert not capture(Net(2.0)).cached


# ---- other processes ------------------------------------------------------------------------------------------

PROGRAM = """
import torch
from torch import nn

NAMES = {"conv", "norm", "head", "scale"}
MODES = frozenset(["a", "b", "c", "d"])


def helper(x, *, power=2, mode="a"):
    return x ** power if mode in {"a", "b", "c"} and mode in MODES else x


class Net(nn.Module):
    KINDS = {"relu", "tanh", "none"}

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(3, 3) for name in sorted(NAMES)})
        self.tags = {"x", "y", "z"}

    @property
    def size(self):
        return len(self.tags)

    @staticmethod
    def double(x):
        return x * 2

    def forward(self, x):
        for name, layer in self.layers.items():
            x = helper(layer(x), mode="a") if name in NAMES and "relu" in self.KINDS else x
        return self.double(x) * self.size


def loss(model, x):
    return model(x).mean()
"""

MAIN = """
import os
import torch
from edgetrain import zoo
from edgetrain.graph import cache
from edgetrain.graph.capture import capture_with_externals
from program import Net, loss

torch.manual_seed(0)
net = Net()
first = capture_with_externals(net, loss, torch.optim.Adam(net.parameters()), (torch.ones(2, 3),))
lenet = zoo.build("lenet")
entropy = zoo.get("lenet").task.loss
sgd = torch.optim.SGD(lenet.parameters(), lr=0.1, momentum=0.9)
second = capture_with_externals(lenet, entropy, sgd, zoo.get("lenet").example(2))
print(first.not_cached_because, second.not_cached_because, *sorted(os.listdir(cache.folder())))
"""


def test_processes_with_other_hash_seeds_agree(tmp_path: Path) -> None:
    """Sets and their order among the constants, globals and attributes; a model of a file and one of the zoo."""
    (tmp_path / "program.py").write_text(PROGRAM)
    running = []
    for seed in ("1", "2"):
        (tmp_path / seed).mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed, "EDGETRAIN_CACHE": str(tmp_path / seed)}
        environment["PYTHONPATH"] = str(tmp_path)
        running.append(
            subprocess.Popen([sys.executable, "-c", MAIN], env=environment, stdout=subprocess.PIPE, text=True)
        )
    printed = [process.communicate(timeout=60)[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert printed[0][:2] == ["None", "None"]
    assert len(printed[0][2:]) == 2
    assert printed[0] == printed[1]
