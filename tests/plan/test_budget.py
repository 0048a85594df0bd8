"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest

from edgetrain.errors import UserError
from edgetrain.plan.budget import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [(1, 1), ("17", 17), ("300MB", 300_000_000), ("300 mb", 300_000_000), ("1.5GiB", 3 * 2**29), ("64KiB", 65_536)],
)
def test_amounts(text: int | str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "MB", "-3MB", "3 megabytes", "0MB", 0, -1, True, "1e9", "0x10"])
def test_what_is_no_amount(text: int | str) -> None:
    with pytest.raises(UserError, match="amount of memory"):
        parse_bytes(text)


def test_shown_as_they_are_written() -> None:
    assert [show_bytes(n) for n in (12, 1500, 35_180_000, 902_101_412, 19.3e9)] == [
        "12 B", "1.5 kB", "35.2 MB", "902 MB", "19.3 GB",
    ]  # fmt: skip
