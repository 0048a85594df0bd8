"""Every argument of every public function with a value of every type: a `UserError`, or it is well; nothing changes.

The arguments come from the signatures, so that a new one is tried by itself.
"""

from __future__ import annotations

import inspect
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from tests.helpers.plain import sgd

LIMIT_S = 10
DRAWN = int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 5
FUNCTIONS: tuple[Callable[..., Any], ...] = (
    et.prepare, et.capture, et.capture_inference, et.plan, et.keep_all, et.compile, et.measure_costs, et.model_costs,
    et.lower_for_firmware, et.export, et.verify,
)  # fmt: skip


class Opaque:
    """Nothing can be done with it."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError

    def __repr__(self) -> str:
        raise ArithmeticError


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 10**400, 1.5, float("nan"), float("inf"), 1j, "", "x" * 300, "a\nb", "\udcff", b"x", [], [1],
    (), {}, {"a": 1}, set(), object(), Opaque(), int, torch.ones(2), torch.ones(()), np.int64(-3), np.ones(3),
    np.array("a"), nn.Linear, nn.Linear(2, 2), Path("/nowhere"), range(3), ..., 2**63, "300MB",
)  # fmt: skip


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


class Subject:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        self.optimizer = sgd(self.model.parameters())
        self.batch = (torch.ones(6, 4), torch.arange(6) % 3)

    def look(self) -> list[Tensor]:
        return [*(p.detach().clone() for p in self.model.parameters()), torch.get_rng_state()]


@pytest.fixture
def well(one_cache: object) -> dict[str, Any]:
    subject = Subject()
    graph = et.capture(subject.model, loss, subject.optimizer, subject.batch)
    return {"graph": graph, "plan": et.keep_all(graph), "costs": et.measure_costs(graph, rounds=1),
            "budget": et.Budget(memory_bytes=10**7), "loss": loss, "device": "meizu_16t", "target": "nrf52840",
            "out": "project"}  # fmt: skip


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


ARGUMENTS = [(function, name) for function in FUNCTIONS for name in inspect.signature(function).parameters]


@pytest.mark.parametrize(("function", "name"), ARGUMENTS, ids=lambda part: getattr(part, "__name__", part))
def test_a_value_of_any_type(
    function: Callable[..., Any], name: str, well: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    subject = Subject()
    given = {**well, "model": subject.model, "optimizer": subject.optimizer, "example": subject.batch,
             "batch": subject.batch}  # fmt: skip
    needed = {
        key: given[key] for key, part in inspect.signature(function).parameters.items() if part.default is part.empty
    }
    before = subject.look()
    for value in random.Random(f"{function.__name__}{name}").sample(VALUES, min(DRAWN, len(VALUES))):
        if name == "memory" and isinstance(value, nn.Module):
            continue  # a function of the user that raises
        told = ""
        signal.alarm(LIMIT_S)
        try:
            function(**{**needed, name: value})
        except (et.UserError, et.Infeasible) as error:
            told = str(error)
        signal.alarm(0)
        assert len(told) < 1500
        now = subject.look()
        assert all(torch.equal(a, b) for a, b in zip(now[:-1], before[:-1], strict=True)), (name, type(value))


def test_the_words_name_argument_and_type(well: dict[str, Any]) -> None:
    with pytest.raises(et.UserError) as told:
        et.plan(well["graph"], well["costs"], None)  # type: ignore[arg-type]
    assert "budget" in str(told.value)
    assert "Budget" in str(told.value)
    assert "None" in str(told.value)
    for wrong in (None, 3, well["graph"]):
        with pytest.raises(et.UserError, match="step"):
            et.profile(wrong, ())  # type: ignore[arg-type]
