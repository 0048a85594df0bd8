"""The update kernels against torch.optim: the same numbers, the same state, and nothing changed behind one's back."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgetrain.ops import update
from edgetrain.ops.call import resolve
from edgetrain.run.undo import Undo
from tests.helpers.plain import bits, relative_error

N_STEPS = 10
ROUNDING = 1e-12

SGD_SETTINGS: list[dict[str, Any]] = [
    {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": decay, "maximize": maximize}
    for momentum, dampening, nesterov, decay, maximize in itertools.product(
        (0.0, 0.9), (0.0, 0.3), (False, True), (0.0, 0.1), (False, True)
    )
    if not (nesterov and (momentum == 0 or dampening != 0))  # torch.optim refuses these
]
ADAM_SETTINGS: list[dict[str, Any]] = [
    {"weight_decay": decay, "amsgrad": amsgrad, "maximize": maximize}
    for decay, amsgrad, maximize in itertools.product((0.0, 0.1), (False, True), (False, True))
]
OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def show(options: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in options.items() if value) or "plain"


class Ours:
    """One parameter trained by a kernel alone, with the settings of a real optimizer's group."""

    def __init__(self, kind: str, start: Tensor, options: dict[str, Any]) -> None:
        self.kind = kind
        self.p = start.clone(memory_format=torch.preserve_format)
        self.group = OPTIMIZERS[kind]([nn.Parameter(self.p)], lr=0.05, **options).param_groups[0]
        self.state: dict[str, Any] = {}

    def step(self, g: Tensor, *, scratch: bool = False, undo: Undo | None = None) -> None:
        given = update.settings(self.kind, self.group)
        fresh = update.make_state(self.kind, self.p, self.state, given)
        resolve(update.kind_of(self.kind))(self.p, g, self.state, given, fresh, scratch, undo)

    def tensors(self) -> dict[str, Tensor]:
        return {"parameter": self.p} | self.state


class Theirs:
    """The same by torch.optim."""

    def __init__(self, kind: str, start: Tensor, options: dict[str, Any]) -> None:
        self.p = nn.Parameter(start.clone(memory_format=torch.preserve_format))
        self.optimizer = OPTIMIZERS[kind]([self.p], lr=0.05, **options)

    def step(self, g: Tensor) -> None:
        self.p.grad = g.clone(memory_format=torch.preserve_format)
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        return {"parameter": self.p.detach()} | dict(self.optimizer.state.get(self.p, {}))


def gradients(like: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.empty_like(like).copy_(torch.randn(like.shape, generator=generator, dtype=like.dtype))
        for _ in range(N_STEPS)
    ]


def start(*, dtype: torch.dtype = torch.float64, channels_last: bool = False) -> Tensor:
    value = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(2), dtype=dtype)
    return value.contiguous(memory_format=torch.channels_last) if channels_last else value


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", SGD_SETTINGS, ids=show)
def test_sgd_is_bitwise(options: dict[str, Any], dtype: torch.dtype, scratch: bool) -> None:
    ours, theirs = Ours("sgd", start(dtype=dtype), options), Theirs("sgd", start(dtype=dtype), options)
    for g in gradients(ours.p):
        theirs.step(g)
        ours.step(g, scratch=scratch)
        right, found = theirs.tensors(), ours.tensors()
        assert found.keys() == right.keys()
        for name, tensor in right.items():
            assert torch.equal(bits(found[name]), bits(tensor)), name


@pytest.mark.parametrize("kind", ["adam", "adamw"])
@pytest.mark.parametrize("options", ADAM_SETTINGS, ids=show)
@pytest.mark.parametrize("scratch", [True, False])
def test_adam_is_bitwise(kind: str, options: dict[str, Any], scratch: bool) -> None:
    ours, theirs = Ours(kind, start(), options), Theirs(kind, start(), options)
    for g in gradients(ours.p):
        theirs.step(g)
        ours.step(g, scratch=scratch)
        right, found = theirs.tensors(), ours.tensors()
        assert found.keys() == right.keys()
        for name, tensor in right.items():
            assert torch.equal(bits(found[name]), bits(tensor)), name
    assert ours.state["step"] == N_STEPS
    assert {k: v.dtype for k, v in ours.tensors().items()} == {k: v.dtype for k, v in theirs.tensors().items()}


def test_adam_of_another_kind_is_another_update() -> None:
    """The bound above would be worth nothing if it did not tell Adam's weight decay from AdamW's."""
    ours, theirs = Ours("adam", start(), {"weight_decay": 0.1}), Theirs("adamw", start(), {"weight_decay": 0.1})
    for g in gradients(ours.p)[:2]:
        theirs.step(g)
        ours.step(g)
    assert relative_error(ours.tensors(), theirs.tensors()) > 1e-3


def test_adam_with_decoupled_decay_is_adamw() -> None:
    options = {"weight_decay": 0.1, "decoupled_weight_decay": True}
    ours, theirs = Ours("adam", start(), options), Theirs("adam", start(), options)
    for g in gradients(ours.p):
        theirs.step(g)
        ours.step(g)
    assert relative_error(ours.tensors(), theirs.tensors()) < ROUNDING


EVERY = [("sgd", options) for options in SGD_SETTINGS] + [
    (kind, options) for kind in ("adam", "adamw") for options in ADAM_SETTINGS
]


@pytest.mark.parametrize(("kind", "options"), EVERY, ids=lambda v: v if isinstance(v, str) else show(v))
def test_without_scratch_the_gradient_is_left_alone(kind: str, options: dict[str, Any]) -> None:
    ours = Ours(kind, start(), options)
    for g in gradients(ours.p)[:3]:
        before = g.clone()
        ours.step(g, scratch=False)
        assert torch.equal(bits(g), bits(before))


def test_scratch_spares_a_copy_by_writing_to_the_gradient() -> None:
    ours = Ours("sgd", start(), {"weight_decay": 0.1})
    g = gradients(ours.p)[0]
    right = g.add(ours.p, alpha=0.1)
    ours.step(g, scratch=True)
    assert torch.equal(g, right)


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous parameter", "channels-last parameter"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sgd", {}),
        ("sgd", {"momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
        ("sgd", {"momentum": 0.9, "nesterov": True}),
        ("adam", {"amsgrad": True, "weight_decay": 0.1}),
        ("adamw", {}),
    ],
    ids=lambda v: v if isinstance(v, str) else show(v),
)
def test_a_gradient_of_another_layout(kind: str, options: dict[str, Any], channels_last: bool) -> None:
    value = start(channels_last=channels_last)
    ours, theirs = Ours(kind, value, options), Theirs(kind, value, options)
    other = torch.contiguous_format if channels_last else torch.channels_last
    for g in gradients(ours.p):
        turned = g.contiguous(memory_format=other)
        assert turned.stride() != ours.p.stride()
        theirs.step(g)
        ours.step(turned)
    assert relative_error(ours.tensors(), theirs.tensors()) < ROUNDING
    assert ours.p.stride() == value.stride()


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize(("kind", "options"), EVERY, ids=lambda v: v if isinstance(v, str) else show(v))
def test_undo_is_told_of_everything_that_changes(kind: str, options: dict[str, Any], first: bool) -> None:
    ours = Ours(kind, start(), options)
    given = gradients(ours.p)
    if not first:
        ours.step(given[0])
    before = {name: tensor.clone() for name, tensor in ours.tensors().items()}
    undo = Undo(random=False)
    ours.step(given[1], undo=undo)
    assert not torch.equal(ours.p, before["parameter"])
    undo.take_back()
    for name, tensor in before.items():  # state that the step made itself goes as a whole; the step sees to that
        assert torch.equal(bits(ours.tensors()[name]), bits(tensor)), name


def test_the_settings_are_those_of_the_group_now() -> None:
    ours, theirs = Ours("sgd", start(), {"momentum": 0.9}), Theirs("sgd", start(), {"momentum": 0.9})
    for n, g in enumerate(gradients(ours.p)):
        for group in (ours.group, theirs.optimizer.param_groups[0]):
            group["lr"], group["momentum"] = 0.1 / (n + 1), 0.9 - 0.05 * n
        theirs.step(g)
        ours.step(g)
    assert torch.equal(bits(ours.p), bits(theirs.p))
