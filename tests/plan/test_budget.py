"""Amounts of memory as people write them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from edgetrain.errors import UserError
from edgetrain.plan.budget import Budget, parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        (1, 1), ("17", 17), ("300MB", 300_000_000), ("300 mb", 300_000_000), ("1.5GiB", 3 * 2**29), ("64KiB", 65_536),
        (9e6, 9_000_000),
    ],
)  # fmt: skip
def test_amounts(text: float | str, n_bytes: int) -> None:
    parsed = parse_bytes(text)
    assert (parsed, type(parsed)) == (n_bytes, int)


NO_AMOUNTS = [
    "", "MB", "-3MB", "3 megabytes", "0MB", 0, -1, True, "1e9", "0x10", 9.5, -9e6, math.nan, math.inf, None, [1],
]  # fmt: skip


@pytest.mark.parametrize("text", NO_AMOUNTS)
def test_what_is_no_amount(text: Any) -> None:
    with pytest.raises(UserError, match="amount of memory"):
        parse_bytes(text)
    if text is not None:
        with pytest.raises(UserError, match="amount of memory"):
            Budget(text)
        with pytest.raises(UserError, match="amount of memory"):
            Budget(process_memory_bytes=text)


def test_a_budget_holds_bytes_however_they_are_written() -> None:
    text: Any = "300MB"
    assert Budget(text, process_memory_bytes=1) == Budget(300_000_000, 1)
    assert Budget() == Budget(None, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Budget(1).memory_bytes = 2  # type: ignore[misc]


@pytest.mark.parametrize(("objective", "told"), [("speed", "no objective"), (1, "no objective")])
def test_an_objective_that_nothing_honours_is_refused(objective: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        Budget(objective=objective)


def test_shown_as_they_are_written() -> None:
    assert [show_bytes(n) for n in (12, 1500, 35_180_000, 902_101_412, 19.3e9)] == [
        "12 B", "1.5 kB", "35.2 MB", "902 MB", "19.3 GB",
    ]  # fmt: skip


@pytest.mark.parametrize("amount", [0, -1.0, float("inf"), float("nan"), "soon"])
def test_limits_of_time_and_energy_are_numbers_above_0(amount: Any) -> None:
    for name in ("time_s", "energy_j"):
        with pytest.raises(UserError, match=f"{name} of a budget"):
            Budget(**{name: amount})
    assert Budget(time_s=0.5, energy_j=2, objective="energy").energy_j == 2
