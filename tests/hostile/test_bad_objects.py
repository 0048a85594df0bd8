"""Batches, losses, optimizers and states that a step cannot take: one error, nothing changed, and the next proper step
has plain PyTorch's numbers."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et

SEEDS = 1 + int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 1000
CLASSES = 5
Attack = Callable[["Training", random.Random], Any]


class Training:
    """A small net, its optimizer and a step that has run once; and the same in plain PyTorch."""

    def __init__(self, kind: str, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        norm = nn.BatchNorm2d(3) if not options.get("micro_batches") else nn.Identity()
        self.model = nn.Sequential(nn.Conv2d(1, 3, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(48, CLASSES))
        self.x, self.y = torch.randn(6, 1, 6, 6), torch.randint(CLASSES, (6,))
        self.kind, self.options = kind, options
        self.optimizer = self.new(self.model)
        self.step = et.prepare(self.model, loss, self.optimizer, (self.x, self.y), memory_format="preserve", **options)
        self.step(self.x, self.y)

    def new(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.kind == "adam":
            return torch.optim.Adam(model.parameters(), lr=0.01)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if self.kind == "sgd" else 0.0)

    def everything(self) -> list[Any]:
        """Every bit of model and optimizer, settings too."""
        state = self.optimizer.state_dict()
        flat = [*self.model.state_dict().values(), *(v for s in state["state"].values() for v in s.values())]
        return [copy.deepcopy(v.detach()) if isinstance(v, Tensor) else v for v in flat] + [repr(state["param_groups"])]


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def same(a: list[Any], b: list[Any]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(
        torch.equal(u, v) if isinstance(u, Tensor) and isinstance(v, Tensor) else u is v or u == v for u, v in pairs
    )


def plain_step(training: Training, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    value = loss(model, training.x, training.y)
    value.backward()
    optimizer.step()
    return value.detach()


def require_refused_and_unchanged(training: Training, batch: tuple[Any, ...]) -> str:
    before = training.everything()
    with pytest.raises(et.UserError) as told:
        training.step(*batch)
    assert same(before, training.everything())
    assert len(str(told.value)) < 1500
    return str(told.value)


# ---- batches

BATCHES: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "numpy": lambda x, y: (x.numpy(), y), "numpy y": lambda x, y: (x, y.numpy()),
    "numpy scalar": lambda x, y: (x, np.int64(3)), "list": lambda x, y: (x.tolist(), y),
    "nested": lambda x, y: ((x,), y), "dict": lambda x, y: ({"x": x}, y), "bytes": lambda x, y: (b"x", y),
    "float64": lambda x, y: (x.double(), y), "float16": lambda x, y: (x.half(), y), "int": lambda x, y: (x.long(), y),
    "complex": lambda x, y: (x.to(torch.complex64), y), "bool": lambda x, y: (x > 0, y),
    "sparse": lambda x, y: (x.to_sparse(), y), "meta": lambda x, y: (x.to("meta"), y),
    "fewer": lambda x, y: (x[:3], y), "swapped": lambda x, y: (y, x),
    "one item": lambda x, y: (x,), "three items": lambda x, y: (x, y, y), "none": lambda x, y: (None, y),
    "text": lambda x, y: (x, "labels"), "other sides": lambda x, y: (x[..., :4], y), "flat": lambda x,
    y: (x.flatten(), y),
    "label too high": lambda x, y: (x, y + CLASSES), "one label too high": lambda x, y: (x, one(y, CLASSES)),
    "negative label": lambda x, y: (x, one(y, -1)), "huge label": lambda x, y: (x, one(y, 2**62)),
    "lowest label": lambda x, y: (x, one(y, -(2**63))), "float label": lambda x, y: (x, y.float()),
    "bool label": lambda x, y: (x, y > 1), "int32 label": lambda x, y: (x, y.int()), "int16 label": lambda x,
    y: (x, y.short()),
    "uint8 label": lambda x, y: (x, y.byte()), "nothing": lambda x, y: (),
    "needs a gradient": lambda x, y: (x.clone().requires_grad_(), y),
    "has a graph": lambda x, y: (x.clone().requires_grad_() * 2, y),
    "parameter": lambda x, y: (nn.Parameter(x), y),
    "constant parameter": lambda x, y: (nn.Parameter(x, requires_grad=False), y),
    "class of its own": lambda x, y: (x.as_subclass(Own), y), "attribute": lambda x, y: (with_attribute(x), y),
}  # fmt: skip


class Own(Tensor):
    pass


def with_attribute(x: Tensor) -> Tensor:
    x = x.clone()
    x.weight = 2.0  # type: ignore[attr-defined]
    return x


def one(y: Tensor, label: int) -> Tensor:
    y = y.clone()
    y[len(y) // 2] = label
    return y


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"memory": "1MB"}], ids=["whole", "micro", "budget"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_batches(kind: str, options: dict[str, Any], one_cache: object, one_round: None) -> None:
    for seed in range(SEEDS):
        training = Training(kind, seed, **options)
        for name, attack in BATCHES.items():
            told = require_refused_and_unchanged(training, attack(training.x, training.y))
            assert ("label" in told) >= ("label" in name), (name, told)
        require_next_step_is_plain(training, exact=not options.get("micro_batches"))


def require_next_step_is_plain(training: Training, *, exact: bool = True) -> None:
    model = copy.deepcopy(training.model)
    optimizer = training.new(model)
    optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    expected = plain_step(training, model, optimizer)
    torch.testing.assert_close(training.step(training.x, training.y), expected)
    for ours, theirs in zip(training.model.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs) if exact else torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_words_say_what_to_do(one_cache: object) -> None:
    training = Training("sgd")
    x, y = training.x, training.y
    assert "torch.from_numpy" in require_refused_and_unchanged(training, (x.numpy(), y))
    assert "torch.float32" in require_refused_and_unchanged(training, (x.double(), y))
    assert "numbers from 0 to 4" in require_refused_and_unchanged(training, (x, y + 100))
    assert "y.long()" in require_refused_and_unchanged(training, (x, y.float()))
    assert ".detach()" in require_refused_and_unchanged(training, (nn.Parameter(x), y))


# ---- the model and the optimizer's state between steps


def each_state(change: Callable[[dict[str, Any], Any], Any], *, of_one: bool = True) -> Attack:
    """Changes the state of a parameter drawn at random, or of all."""

    def attack(training: Training, drawn: random.Random) -> None:
        parameters = list(training.optimizer.state)
        for p in [drawn.choice(parameters)] if of_one else parameters:
            change(training.optimizer.state[p], p)

    return attack


def main_key(state: dict[str, Any]) -> str:
    return "momentum_buffer" if "momentum_buffer" in state else "exp_avg"


def put(make: Callable[[Tensor, Any], Any]) -> Attack:
    def change(state: dict[str, Any], p: Any) -> None:
        state[main_key(state)] = make(state[main_key(state)], p)

    return each_state(change)


def setting(name: str, value: object) -> Attack:
    return lambda training, _: training.optimizer.param_groups[0].__setitem__(name, value)


def foreign(training: Training, _: random.Random) -> None:
    """The state of the other kind of optimizer."""
    for p, state in training.optimizer.state.items():
        value = torch.zeros_like(p)
        other = {"exp_avg": value, "exp_avg_sq": value.clone(), "step": torch.tensor(1.0)}
        state.clear()
        state.update({"momentum_buffer": value} if training.kind == "adam" else other)


def shared(training: Training, _: random.Random) -> None:
    """Two parameters of one shape cannot be had here, so the same tensor is the state of two under two keys."""
    state = next(iter(training.optimizer.state.values()))
    state["exp_avg_sq"] = state["exp_avg"]


STATES: dict[str, Attack] = {
    "double": lambda t, _: (t.model.double(), (t.x.double(), t.y))[1],
    "double alone": lambda t, _: (t.model.double(), None)[1],
    "bfloat16": lambda t, _: (t.model.bfloat16(), (t.x.bfloat16(), t.y))[1],
    "half": lambda t, _: (t.model.half(), None)[1],
    "state float64": put(lambda s, p: s.double()), "state int": put(lambda s, p: s.long()),
    "state bfloat16": put(lambda s, p: s.bfloat16()), "state list": put(lambda s, p: [1.0]),
    "state flat": put(lambda s, p: s.flatten()[:1]), "state number": put(lambda s, p: 3.0),
    "state numpy": put(lambda s, p: s.numpy()), "state meta": put(lambda s, p: s.to("meta")),
    "state sparse": put(lambda s, p: s.to_sparse()), "state of the parameter": put(lambda s, p: p.data),
    "state expanded": put(lambda s, p: s.flatten()[:1].reshape([1] * p.dim()).expand(p.shape)),
    "state extra": each_state(lambda s, p: s.update(other=1)), "another kind": foreign,
    **{f"lr {n!r:.9}": setting("lr", n) for n in (float("nan"), -1, float("inf"), "0.1", None, [1], 10**400)},
    "weight decay": setting("weight_decay", "1"), "weight decay nan": setting("weight_decay", float("nan")),
    "no lr": lambda t, _: t.optimizer.param_groups[0].pop("lr") and None,
}  # fmt: skip
OF_SGD: dict[str, Attack] = {
    "momentum": setting("momentum", "a"), "momentum nan": setting("momentum", float("nan")),
    "dampening": setting("dampening", [0]),
    "adam's": lambda t, _: t.optimizer.load_state_dict(torch.optim.Adam(t.model.parameters()).state_dict()),
}  # fmt: skip
OF_ADAM: dict[str, Attack] = {
    "missing": each_state(lambda s, p: s.pop("exp_avg_sq")), "none": each_state(lambda s, p: s.update(exp_avg=None)),
    "shared": shared, "no step": each_state(lambda s, p: s.pop("step")),
    "step vector": each_state(lambda s, p: s.update(step=torch.ones(3))),
    "step nan": each_state(lambda s, p: s.update(step=torch.tensor(float("nan")))),
    "step negative": each_state(lambda s, p: s.update(step=torch.tensor(-1.0))),
    "step text": each_state(lambda s, p: s.update(step="1")), "betas": setting("betas", (2, 0.9)),
    "one beta": setting("betas", (0.9,)), "betas nan": setting("betas", (float("nan"), 0.9)),
    "eps": setting("eps", "x"),
    "sgd's": lambda t, _: t.optimizer.load_state_dict(torch.optim.SGD(t.model.parameters(), lr=0.1).state_dict()),
}  # fmt: skip
CASES = [
    (kind, name, attack)
    for kind, own in (("sgd", OF_SGD), ("adam", OF_ADAM))
    for name, attack in {**STATES, **own}.items()
]


@pytest.mark.parametrize(("kind", "name", "attack"), CASES, ids=[f"{kind}-{name}" for kind, name, _ in CASES])
def test_states_between_steps(kind: str, name: str, attack: Attack, one_cache: object) -> None:
    for seed in range(SEEDS):
        training = Training(kind, seed)
        kept, whole = copy.deepcopy(training.optimizer.state_dict()), copy.deepcopy(training.model.state_dict())
        batch = attack(training, random.Random(f"{seed}{name}"))
        with pytest.raises(et.UserError) as caught:
            training.step(*(batch or (training.x, training.y)))
        told = str(caught.value)
        assert "in part" not in told
        now = training.model.state_dict()
        assert all(torch.equal(whole[key].to(now[key].dtype), now[key]) for key in whole)
        training.model.float()
        training.optimizer.state.clear()
        training.optimizer = training.step._optimizer
        for group, before in zip(training.optimizer.param_groups, kept["param_groups"], strict=True):
            parameters = group["params"]
            group.clear()
            group.update({**before, "params": parameters})
        training.optimizer.load_state_dict(kept)
        training.model.load_state_dict(whole)
        require_next_step_is_plain(training)


def test_a_state_that_is_another_optimizers_is_refused_without_momentum_too(one_cache: object) -> None:
    training = Training("sgd without momentum")
    for p in training.model.parameters():
        training.optimizer.state[p] = {"exp_avg": torch.zeros_like(p), "step": torch.tensor(1.0)}
    require_refused_and_unchanged(training, (training.x, training.y))


def test_what_is_well_goes_on(one_cache: object) -> None:
    """channels-last weights, a learning rate as a tensor, and state that was loaded: no reason to refuse."""
    training = Training("adam")
    training.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    training.step(training.x, training.y)
    training.step(training.x[:4], training.y[:4])


# ---- losses, models, optimizers and examples

LOSSES: dict[str, Any] = {
    "tuple": lambda m, x, y: (loss(m, x, y), m(x)), "none": lambda m, x, y: None, "vector": lambda m, x,
    y: m(x).mean(0),
    "int": lambda m, x, y: 3, "float": lambda m, x, y: 0.5, "dict": lambda m, x, y: {"loss": loss(m, x, y)},
    "list": lambda m, x, y: [loss(m, x, y)], "text": lambda m, x, y: "loss", "long": lambda m, x, y: m(x).argmax(),
    "complex": lambda m, x, y: loss(m, x, y).to(torch.complex64), "item": lambda m, x, y: loss(m, x, y).item(),
    "detached": lambda m, x, y: loss(m, x, y).detach(), "raises": lambda m, x, y: 1 / 0, "name": "cross_entropy",
    "nothing": None, "array": lambda m, x, y: np.ones(3), "bool": lambda m, x, y: True, "deep": lambda m, x, y: deep(),
}  # fmt: skip


def deep() -> Any:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    training = Training("sgd")
    before = training.everything()
    with pytest.raises(et.UserError) as told:
        et.prepare(training.model, LOSSES[name], training.optimizer, (training.x, training.y))
    assert len(str(told.value)) < 1000
    assert "FakeTensor" not in str(told.value)
    assert same(before, training.everything())


PREPARED: dict[str, Callable[[Training], tuple[Any, Any, Any]]] = {
    "no model": lambda t: (None, t.optimizer, (t.x, t.y)), "a class": lambda t: (nn.Linear, t.optimizer, (t.x, t.y)),
    "a function": lambda t: (lambda x: x, t.optimizer, (t.x, t.y)),
    "no optimizer": lambda t: (t.model, None, (t.x, t.y)),
    "a class of optimizer": lambda t: (t.model, torch.optim.SGD, (t.x, t.y)),
    "of another model": lambda t: (t.model, t.new(copy.deepcopy(t.model)), (t.x, t.y)),
    "RMSprop": lambda t: (t.model, torch.optim.RMSprop(t.model.parameters()), (t.x, t.y)),
    "no batch": lambda t: (t.model, t.optimizer, None), "a tensor": lambda t: (t.model, t.optimizer, t.x),
    "a dictionary": lambda t: (t.model, t.optimizer, {"x": t.x}), "nothing": lambda t: (t.model, t.optimizer, ()),
    "arrays": lambda t: (t.model, t.optimizer, (t.x.numpy(), t.y.numpy())),
}  # fmt: skip


@pytest.mark.parametrize("name", PREPARED)
@pytest.mark.parametrize("unused", ["error", "freeze"])
def test_what_is_prepared(name: str, unused: Any) -> None:
    training = Training("sgd")
    before = training.everything()
    model, optimizer, example = PREPARED[name](training)
    with pytest.raises(et.UserError) as told:
        et.prepare(model, loss, optimizer, example, unused=unused)
    assert len(str(told.value)) < 1000
    assert same(before, training.everything())


@pytest.mark.parametrize("name", ["memory", "process_memory", "plan_time_s", "clip_norm", "micro_batches", "planner",
                                  "unused", "memory_format", "page_to"])  # fmt: skip
def test_settings_of_prepare(name: str) -> None:
    training = Training("sgd")
    values: tuple[Any, ...] = (float("nan"), -1, 10**400, "nonsense", [], 1j, b"x")
    for value in values:
        settings: dict[str, Any] = {"memory": "10MB"} if name == "page_to" else {}
        with pytest.raises(et.UserError) as told:
            et.prepare(training.model, loss, training.optimizer, (training.x, training.y), **{**settings, name: value})
        assert len(str(told.value)) < 1000
