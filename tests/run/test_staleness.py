"""What a program changes between two steps is seen by the next one, and what a step could not honour is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import edgetrain as et
from edgetrain.errors import UserError

X = torch.full((2, 3), 2.0)


@dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class Model(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.slotted = Slotted()
        self.mask: torch.Tensor | None
        self.wide: torch.Tensor
        self.register_buffer("mask", None)
        self.register_buffer("wide", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight * self.factor * self.slotted.scale
        return (x if self.mask is None else x * self.mask) * self.wide


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()  # type: ignore[no-any-return]


def class_attribute(model: Model) -> None:
    type(model).factor = 5.0


def slot(model: Model) -> None:
    model.slotted.scale = 5.0


def buffer_set(model: Model) -> None:
    model.mask = torch.zeros(3)


def buffer_of_another_shape(model: Model) -> None:
    model.wide = torch.full((1,), 0.25)


@pytest.mark.parametrize("change", [class_attribute, slot, buffer_set, buffer_of_another_shape])
def test_a_change_of_the_model_is_seen(change: Callable[[Model], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "factor", 1.0)
    model = Model()
    step = et.prepare(model, mean, torch.optim.SGD(model.parameters(), lr=0.0), (X,))
    assert step(X) == 2.0
    change(model)
    assert step(X) == mean(model, X) != 2.0


@dataclass(frozen=True)
class Settings:
    layers: tuple[Slotted, ...] = (Slotted(), Slotted())


def test_what_stays_as_it_is_is_captured_once() -> None:
    """Dataclasses have slots that hold objects; those are the same ones at each call."""
    model, given = Model(), Settings()
    model.settings = given  # type: ignore[assignment]
    step = et.prepare(model, mean, torch.optim.SGD(model.parameters(), lr=0.0), (X,))
    first = step.compiled(X)
    step(X)
    assert step.compiled(X) is first
    given.layers[1].scale = 2.0
    assert step.compiled(X) is not first


def test_a_module_of_the_users_own_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values, and the functions in the modules below it, in a new step that may find a graph in the cache."""
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("ALPHA = 1.0\n")
    (package / "losses.py").write_text("def f(x):\n    return x.mean()\n")
    (tmp_path / "own_loss.py").write_text(
        "import own_package.losses\n\ndef loss(model, x):\n"
        "    return own_package.losses.f(model(x)) * own_package.ALPHA\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_loss  # type: ignore[import-not-found]

    def first_loss() -> torch.Tensor:
        model = Model()
        return et.prepare(model, own_loss.loss, torch.optim.SGD(model.parameters(), lr=0.0), (X,))(X)

    assert first_loss() == 2.0
    own = sys.modules["own_package"]
    monkeypatch.setattr(own, "ALPHA", 5.0)
    assert first_loss() == 10.0
    monkeypatch.setattr(sys.modules["own_package.losses"], "f", lambda x: x.sum())
    assert first_loss() == 60.0


def test_hooks_that_would_never_run_are_refused() -> None:
    model = nn.Linear(3, 1)
    hooked = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UserError, match="hooks"):
        et.prepare(model, mean, hooked, (X,))
    model.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(UserError, match="hooks"):
        et.prepare(model, mean, torch.optim.SGD(model.parameters(), lr=0.1), (X,))


def test_optimizer_state_that_does_not_fit_is_refused_before_anything_changes() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = et.prepare(model, mean, optimizer, (X,))
    step(X)
    optimizer.state[model.bias]["exp_avg"] = torch.zeros(7)
    before = model.weight.detach().clone(), float(optimizer.state[model.weight]["step"])
    with pytest.raises(UserError, match="exp_avg"):
        step(X)
    assert torch.equal(model.weight, before[0])
    assert float(optimizer.state[model.weight]["step"]) == before[1]


def test_fused_adam_is_not_called_bitwise() -> None:
    model = nn.Linear(3, 2)
    step = et.prepare(model, mean, torch.optim.Adam(model.parameters(), fused=True), (X,))
    assert step.plan.exact == "rounding"
