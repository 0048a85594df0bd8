"""Shapes that are kept compiled: a number of them and of bytes; what is dropped is freed, and captured anew."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import UserError
from edgetrain.native import arena
from edgetrain.run.shapes import size_of
from edgetrain.run.step import Step


def batch(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 8, generator=generator), torch.arange(n) % 4


def prepared(**options: Any) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return et.prepare(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer, batch(4), **options)


def test_the_number_is_a_setting() -> None:
    step = prepared(max_shapes=3)
    first = step.compiled(*batch(4))
    for n in (5, 6, 4, 7):  # 5 is the one not used for longest
        step(*batch(n))
    assert len(step._variants) == 3
    assert step.compiled(*batch(4)) is first
    assert step.compiled(*batch(5)) is not first
    assert len(step._variants) == 3


def test_the_size_is_a_setting_and_the_last_stays() -> None:
    wide = prepared(max_shapes=100)
    for n in range(5, 9):
        wide(*batch(n))
    one = wide._variants.n_bytes // 5
    step = prepared(max_shapes=100, max_shapes_bytes=3 * one + one // 2)
    for n in range(5, 9):
        step(*batch(n))
        assert step._variants.n_bytes <= 3 * one + one // 2
    assert len(step._variants) == 3
    tiny = prepared(max_shapes_bytes="1kB")
    for n in (5, 4, 5):
        tiny(*batch(n))
        assert len(tiny._variants) == 1


def test_the_size_grows_with_the_graph_and_leaves_the_model_out() -> None:
    def size(layers: int, width: int) -> int:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        step = et.prepare(
            model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), 0.1), (torch.randn(2, width),)
        )
        (variant,) = step._variants.values()
        return size_of(variant)

    assert 2 * size(4, 8) < size(16, 8)
    assert size(4, 512) < 1.1 * size(4, 8)


@pytest.mark.parametrize(
    "options", [{}, {"memory": "1MB"}, {"memory": lambda: "1MB"}, {"micro_batches": 2, "allow_inexact": True}]
)
def test_what_is_dropped_is_freed_at_once(options: dict[str, Any]) -> None:
    step = prepared(max_shapes=1, **options)
    step(*batch(6))
    gc.collect()
    gone: list[weakref.ref[Any]] = [weakref.ref(step.used), weakref.ref(step.used.graph)]
    gc.disable()
    try:
        step(*batch(8))
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()
    assert len(step._maker._capturing.slices) == 0


def test_no_weak_reference_to_a_live_tensor_stays() -> None:
    """They would be garbage; where that is collected while such a storage dies, Python 3.11 crashes."""
    step = prepared()
    for n in (4, 5, 6):
        step(*batch(n))
    tensors = [*step._model.parameters(), *step._model.buffers()]
    assert not any(weakref.getweakrefs(of) for t in tensors for of in (t, t.untyped_storage()))


def test_the_arena_shrinks_with_the_shapes_that_are_kept() -> None:
    if not arena.available():
        pytest.skip("needs the arena")
    arena.trim(0)
    step = prepared(max_shapes=2)
    step(*batch(20_000))
    high = arena.reached_bytes()
    for n in (5, 6):
        step(*batch(n))
    assert arena.reached_bytes() < high / 10


@pytest.mark.parametrize(
    "wrong", [{"max_shapes": 0}, {"max_shapes": 2.5}, {"max_shapes": True}, {"max_shapes_bytes": 0}]
)
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        prepared(**wrong)
