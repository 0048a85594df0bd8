"""A smaller budget never gives a larger peak, whatever the order of the questions; a damaged file is a miss."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

import edgetrain as et
from edgetrain.plan.known_plans import KnownPlans
from edgetrain.plan.plan import Plan
from edgetrain.plan.problem import Problem
from tests.plan.problems import NETS, budget, small

PARTS = [1.2, *(part / 40 for part in range(40, 4, -1))]
EVERY = {"optimal": 6, "fast": 2, "chen": 6, "dtr": 2, "melon": 4}


def peaks(task: Problem, planner: str, parts: Sequence[float], *, use_cache: bool = True) -> dict[int, int]:
    """Budget → the peak of its plan, for the budgets that can be kept, asked for in this order."""
    found = {}
    for limit in (budget(task, part) for part in parts):
        try:
            plan = et.plan(
                task.graph, task.costs, et.Budget(limit),
                planner=planner, time_limit_s=0.1, updates=task.updates, use_cache=use_cache,
            )  # fmt: skip
        except et.Infeasible:
            continue
        assert plan.peak_bytes <= limit
        found[limit] = plan.peak_bytes
    return found


@pytest.mark.parametrize("way", ["down", "up", "anyhow"])
@pytest.mark.parametrize("name", [name for name in NETS if name not in ("tiny", "short")])
@pytest.mark.parametrize("planner", EVERY)
def test_a_smaller_budget_never_gives_a_larger_peak(planner: str, name: str, way: str) -> None:
    parts = PARTS[:: EVERY[planner]]
    if way == "anyhow":
        parts = random.Random(0).sample(parts, len(parts))
    found = peaks(small(name), planner, parts[:: -1 if way == "up" else 1])
    assert len(found) >= 2
    in_order = [found[limit] for limit in sorted(found)]
    assert in_order == sorted(in_order)


@pytest.mark.parametrize("off", [True, False])
def test_it_holds_without_the_cache(off: bool, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if off:
        monkeypatch.setenv("EDGETRAIN_CACHE", "off")
    found = peaks(small("residual"), "dtr", PARTS[::-1], use_cache=off)
    in_order = [found[limit] for limit in sorted(found)]
    assert in_order == sorted(in_order)
    assert list(own_cache.iterdir()) == []


def plan(task: Problem, peak_part: float) -> Plan:
    return et.plan(task.graph, task.costs, et.Budget(budget(task, peak_part)), planner="fast", updates=task.updates)


def test_a_plan_is_found_for_what_it_keeps_and_no_more() -> None:
    task = small("chain")
    known, made = KnownPlans(task, "test"), plan(task, 0.7)
    limit = made.peak_bytes + 100
    known.keep(limit, made)
    assert known.keeping(limit) == known.keeping(made.peak_bytes) == made
    assert known.keeping(limit + 1) is known.keeping(made.peak_bytes - 1) is None
    assert known.below(limit + 1) == made
    assert known.below(limit) is None
    assert known.holding_more(limit + 1, made.peak_bytes - 1) == made
    assert known.holding_more(limit + 1, made.peak_bytes) is known.holding_more(limit, 0) is None
    assert KnownPlans(task, "another way").keeping(limit) is None
    assert KnownPlans(small("residual"), "test").keeping(limit) is None


@pytest.mark.parametrize("content", ["", "{}", "not json", None])
def test_a_file_that_holds_anything_else_is_a_miss(content: str | None, own_cache: Path) -> None:
    task = small("chain")
    known, made = KnownPlans(task, "test"), plan(task, 0.7)
    limit = made.peak_bytes + 100
    known.keep(limit, made)
    (file,) = own_cache.glob(f"plans/*/{limit}-*.json")
    if content is None:  # a plan with a name that promises less
        file.rename(file.with_name(f"{limit}-{made.peak_bytes - 50}.json"))
    else:
        file.write_text(content)
    assert known.keeping(limit) is None


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGETRAIN_CACHE", str(tmp_path / "file"))
    task = small("chain")
    known, made = KnownPlans(task, "test"), plan(task, 0.7)
    known.keep(made.peak_bytes, made)
    assert known.keeping(made.peak_bytes) is None
