"""Costs as data: what they add up to, saved and read back equal, and files that are something else."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.costs.table import WAYS, Costs, OpCost, Origin, Run, Store, from_json, to_json
from edgetrain.errors import UserError


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Requests, and returns of some of them, in any order that can be."""
    events: list[int] = []
    open_: list[int] = []
    requests = 0
    for size in draw(st.lists(st.integers(-1, 10**12), max_size=12)):
        if size >= 0:
            events.append(size)
            open_.append(requests)
            requests += 1
        elif open_:
            events.append(-1 - open_.pop(draw(st.integers(0, len(open_) - 1))))
    return Run(draw(st.floats(0, 1e6)), tuple(events), draw(st.none() | st.floats(0, 1e6)))


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    others = st.dictionaries(st.sampled_from(WAYS[1:]), runs())
    ops = draw(st.lists(st.builds(lambda first, rest: OpCost({"first": first, **rest}), runs(), others), max_size=5))
    about = draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
    rate, amount = st.floats(1e-3, 1e12), st.floats(0, 1e3)
    store = draw(st.none() | st.builds(Store, rate, rate, amount, amount, st.none() | amount))
    origin: Origin = draw(st.sampled_from(["measured", "modelled"]))
    idle_w, uncertainty = draw(st.none() | amount), draw(st.none() | amount)
    return Costs(draw(st.text(max_size=8)), origin, tuple(ops), about, store, idle_w, uncertainty)


SMALL = Costs("key", "measured", (OpCost({"first": Run(0.5, (8, 16, -1))}), OpCost({"first": Run(0.25)})), {"a": "b"})


@settings(max_examples=50, deadline=None)
@given(given_costs=costs())
def test_costs_are_read_back_equal(given_costs: Costs) -> None:
    assert from_json(json.loads(json.dumps(to_json(given_costs)))) == given_costs


def test_costs_are_saved_and_loaded(tmp_path: Path) -> None:
    SMALL.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == SMALL
    SMALL.save(str(tmp_path / "costs.json"))
    assert Costs.load(str(tmp_path / "costs.json")) == SMALL


def test_bytes_of_a_run() -> None:
    #          100        300        200        700          600 held
    run = Run(0.0, (100, 200, -1, 500, -2, 100))
    assert run.most_bytes == 700
    assert run.workspace_bytes == 100  # 600 are its results
    assert Run(0.0).most_bytes == Run(0.0).workspace_bytes == 0
    assert Run(0.0, (64,)).workspace_bytes == 0
    assert Run(0.0, (64, -1)).workspace_bytes == 64


@settings(max_examples=50, deadline=None)
@given(run=runs())
def test_workspace_is_what_is_held_above_the_results(run: Run) -> None:
    sizes = [event for event in run.events if event >= 0]
    held = [0]
    for event in run.events:
        held.append(held[-1] + (event if event >= 0 else -sizes[-1 - event]))
    assert run.most_bytes == max(held)
    assert run.workspace_bytes == max(held) - held[-1]


def test_ways_fall_back_on_the_first() -> None:
    cost = OpCost({"first": Run(1.0, (8, -1)), "over": Run(2.0)})
    assert cost.run("again") == cost.run("first")
    assert (cost.time_s, cost.again_s) == (1.0, 1.0)
    again = OpCost({"first": Run(1.0, (8, -1)), "again": Run(0.5, (4, -1))})
    found = Costs("key", "modelled", (cost, again))
    assert found.workspace_bytes == {"first": {0: 8, 1: 8}, "again": {0: 8, 1: 4}, "over": {1: 8}}
    assert found.time_s([0, 1]) == 2.0
    assert found.time_s([0, 1, 1, 0, 1]) == 4.0
    assert found.time_s([]) == 0.0


def changed(**fields: Any) -> str:
    return json.dumps({**to_json(SMALL), **fields})


def with_first(run: Any) -> str:
    return changed(ops=[{"first": run}])


MALFORMED = {
    "empty": "",
    "no JSON": "{",
    "a list": "[]",
    "a number": "3",
    "nothing": "null",
    "another schema": changed(**{"edgetrain costs": 1}),
    "no schema": "{}",
    "another origin": changed(origin="guessed"),
    "ops are a number": changed(ops=3),
    "an op is a number": changed(ops=[3]),
    "an op is a list": changed(ops=[["first"]]),
    "no first way": changed(ops=[{"again": [0.1, []]}]),
    "an unknown way": changed(ops=[{"first": [0.1, []], "later": [0.1, []]}]),
    "a run of one part": with_first([0.1]),
    "a run of four parts": with_first([0.1, [], 3, 4]),
    "energy below nought": with_first([0.1, [], -3]),
    "a store that stands still": changed(store=asdict(Store(0.0, 1.0))),
    "a store without a rate": changed(store={"in_bytes_s": 1.0, "power_w": None}),
    "a store of something else": changed(store=asdict(Store(1.0, 1.0)) | {"colour": 1.0}),
    "power is text": changed(idle_w="much"),
    "a run is nothing": with_first(None),
    "time below nought": with_first([-0.1, []]),
    "time is text": with_first(["soon", []]),
    "time is not a number": with_first([float("nan"), []]),
    "time without end": with_first([float("inf"), []]),
    "events are text": with_first([0.1, "ab"]),
    "events are a number": with_first([0.1, 8]),
    "a fraction of a byte": with_first([0.1, [8.5]]),
    "truth for bytes": with_first([0.1, [True]]),
    "returned before it was asked for": with_first([0.1, [8, -2]]),
    "returned twice": with_first([0.1, [8, 8, -1, -1]]),
    "about is a list": changed(about=[1]),
    "about is nothing": changed(about=None),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_file_that_holds_something_else_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(MALFORMED[name], encoding="utf-8")
    with pytest.raises(UserError, match="not a cost file"):
        Costs.load(path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no cost file"):
        Costs.load(tmp_path / "missing.json")
    with pytest.raises(UserError, match="cannot be read"):
        Costs.load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a cost file"):
        Costs.load(tmp_path / "binary")
