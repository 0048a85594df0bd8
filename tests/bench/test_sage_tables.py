"""The benchmark of SAGE on a net in small: every way keeps its account, and the page says what was found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sage, sage_tables
from benchmarks.contenders import Case
from edgetrain.errors import Infeasible

CASE = Case("lenet", 16, "sgd")


@pytest.fixture(scope="module")
def of(kept: Path) -> Iterator[sage.Subject]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGETRAIN_CACHE", str(kept))
        yield sage.subject(CASE, sage.DEVICE)


def test_sage_needs_no_more_than_either_alone_and_the_page_says_so(of: sage.Subject) -> None:
    rows = {row["way"]: row for row in sage._smallest(of)}
    held = {way: row["bytes"] for way, row in rows.items()}
    assert held["SAGE"] <= min(held["eviction"], held["accumulation"])
    assert max(held["eviction"], held["segments"], held["accumulation"]) < held["neither"] < held["as frameworks"]
    assert (rows["neither"]["time"], rows["neither"]["micro_batches"]) == (1.0, 1)
    assert rows["accumulation"]["micro_batches"] == 16
    assert rows["accumulation"]["exact"] == "rounding"  # it has no batch norm and no dropout
    assert rows["eviction"]["time"] > 1
    page = sage_tables.page({"smallest": {"a net": _kept({"device": sage.DEVICE, "rows": list(rows.values())})}})
    less = f"{100 * (held['SAGE'] / held['accumulation'] - 1):+.0f} %".replace("-", "−")
    first = next(line for line in page.splitlines() if line.startswith("| a net, 16"))
    assert first.split("|")[3].strip().startswith(less)
    assert "modelled for Samsung Galaxy S10" in page


def test_what_keeps_a_budget_is_planned_and_what_does_not_is_left_out(of: sage.Subject) -> None:
    for row in sage._smallest(of):
        if row["way"] in ("segments", "eviction", "accumulation", "SAGE"):
            made = sage._ways(of, row["bytes"], 0.5)[row["way"]]()
            assert made.peak_bytes <= row["bytes"]
            assert made.time_s is not None
            assert made.time_s <= row["time_s"] * 1.001  # that is the plan of the same memory, or a faster one
    for make in sage._ways(of, of.whole(sage.kept).persistent_bytes, 0.5).values():
        with pytest.raises(Infeasible):
            make()
    rows = [{"fraction": 0.1, "budget_bytes": 10**6, "way": "SAGE", "bytes": None}]
    page = sage_tables.page({"budgets": {"a net": _kept({"batch": 8, "device": sage.DEVICE, "rows": rows})}})
    assert "| a net, 8 | 0.1 | 1.0 MB | — |" in page


def _kept(result: dict[str, Any]) -> dict[str, Any]:
    about = {"commit": "0" * 40, "dirty": False, "created": "now", "machine": "one", "cores": 2, "torch": "2"}
    return {"about": about, **result}
