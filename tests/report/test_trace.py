"""A trace: valid JSON, slices strictly nested, times that never go back, counters that are what was sampled."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.graph.ir import Phase
from edgetrain.measure.record import RunFolder, new_record
from edgetrain.measure.timeline import OpRun, Timeline, Why
from edgetrain.report.run import Run, load_run
from edgetrain.report.trace import trace_events, write_trace

DEPTHS = {"step": 0, "phase": 1, "layer": 2}


@pytest.fixture
def run(kept_profile: RunFolder) -> Run:
    return load_run(kept_profile)


def checked(events: list[dict[str, Any]]) -> list[tuple[int, str, float, float]]:
    """Every slice (depth, name, begin, end) of a trace; whatever a legal one may not do fails here."""
    open_: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    last: dict[int, float] = defaultdict(float)
    found = []
    for event in events:
        if event["ph"] == "M":
            continue
        assert event["ts"] >= last[event["pid"]], "time goes back"
        last[event["pid"]] = event["ts"]
        stack = open_[event["pid"], event["tid"]]
        if event["ph"] == "B":
            stack.append(event)
        elif event["ph"] == "E":
            begun = stack.pop()  # fails where more ends than begins
            found.append((len(stack), begun["name"], begun["ts"], event["ts"]))
        else:
            assert event["ph"] == "C"
            assert all(np.isfinite(value) for value in event["args"].values())
    assert not any(open_.values()), "something never ends"
    return found


def kinds_nest(events: list[dict[str, Any]]) -> None:
    """step ⊃ phase ⊃ layer ⊃ op, by the categories of what is open."""
    stack: list[str] = []
    for event in events:
        if event["ph"] == "B":
            place = DEPTHS.get(event["cat"], 3)
            assert all(DEPTHS.get(outer, 3) < place for outer in stack), (stack, event)
            assert stack[:1] == (["step"] if place else [])
            stack.append(event["cat"])
        elif event["ph"] == "E":
            stack.pop()


def test_slices_are_nested_and_nothing_is_lost(run: Run, tmp_path: Path) -> None:
    data = json.loads(write_trace([run], tmp_path / "trace.json").read_text())
    events = data["traceEvents"]
    slices = checked(events)
    kinds_nest(events)
    timeline = run.timeline
    assert timeline is not None
    assert [s[1] for s in slices if s[0] == 0] == [f"step {n + 1}" for n in range(timeline.steps)]
    begun = [event for event in events if event["ph"] == "B" and event["cat"] not in DEPTHS]
    assert [event["name"] for event in begun] == [op.name for op in timeline.ops] * timeline.steps
    assert {event["cat"] for event in begun} == {"first", "recomputed"}
    total = sum(end - begin for depth, name, begin, end in slices if name == timeline.ops[5].name and depth == 3)
    same = [place for place, op in enumerate(timeline.ops) if op.name == timeline.ops[5].name]  # it may run again
    assert total == pytest.approx(timeline.op_s[:, same].sum() * 1e6, rel=1e-3)
    assert isinstance(data["otherData"]["command"], str)


def test_counters_are_beside_the_slices(run: Run) -> None:
    events = list(trace_events(run))
    names = {event["name"] for event in events if event["ph"] == "C"}
    assert {
        "power: package (W, derived)", "cores busy: cpu0 (%, derived)", "memory: process resident (B, measured)",
        "temperature: temp cpu (°C, measured)", "tensors held (B, derived)",
    } <= names  # fmt: skip
    power = [e["args"]["W"] for e in events if e["ph"] == "C" and e["name"].startswith("power")]
    assert 1.2 < max(power) < 6.0001  # between the truth of idle time and that of a convolution
    assert min(power) > 1.1999
    assert not any("gpu" in name for name in names)  # a sensor that gave nothing is no counter of zeros


def test_energy_is_told_with_its_interval_and_where_it_is_shared(run: Run) -> None:
    timeline = run.timeline
    assert timeline is not None
    begun = [e for e in trace_events(run) if e["ph"] == "B" and e["cat"] not in DEPTHS][: len(timeline.ops)]
    first, merged, open_ended, unknown = begun[0]["args"], begun[-4]["args"], begun[-2]["args"], begun[-1]["args"]
    assert first["energy_low_j"] < first["energy_j"] < first["energy_high_j"]
    assert first["energy_from"] == "measured"
    assert merged["energy_shared_by_ops"] == 2
    assert "energy_high_j" not in open_ended
    assert "energy_j" not in unknown


def test_several_runs_are_several_processes(run: Run, tmp_path: Path) -> None:
    data = json.loads(write_trace([run, run], tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in data["traceEvents"]} == {1, 2}
    checked(data["traceEvents"])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_the_times_are_slices_nest(data: st.DataObject) -> None:
    """Ops that overlap, reach out of their step, or come late: a GPU's clock is not the processor's."""
    n, steps = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 3))
    phases: st.SearchStrategy[Phase] = st.sampled_from(("forward", "backward", "update"))
    whys: st.SearchStrategy[Why] = st.sampled_from(("first", "recomputed", "paged"))
    modules = st.sampled_from(("", "a", "a.b"))
    ops = tuple(OpRun("x", "k", data.draw(modules), data.draw(phases), data.draw(whys), 0, 1, 1, 1) for _ in range(n))
    times = st.integers(0, 50)

    def pairs(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        rows = [sorted((data.draw(times), data.draw(times))) for _ in range(count)]
        return np.array(rows, dtype=np.int64).reshape(count, 2)

    table = np.stack([pairs(n) for _ in range(steps)]) if steps else np.empty((0, n, 2), dtype=np.int64)
    timeline = Timeline(ops, pairs(steps), table[:, :, 0], table[:, :, 1])
    record = new_record(["x"])
    run = Run(RunFolder(Path("x")), record, timeline, None, (), (), None, ())
    events = json.loads(json.dumps(list(trace_events(run))))
    slices = checked(events)
    kinds_nest(events)
    assert sum(1 for s in slices if s[0] == 0) == steps
    assert sum(1 for s in slices if s[1] == "x") == n * steps


def test_names_from_outside_are_only_text(run: Run, tmp_path: Path) -> None:
    assert run.timeline is not None
    evil = '"},{"ph":"X","name":"'
    ops = tuple(replace(op, name=evil, module=evil) for op in run.timeline.ops)
    changed = replace(run, timeline=replace(run.timeline, ops=ops), picture=None)
    data = json.loads(write_trace([changed], tmp_path / "trace.json").read_text())
    checked(data["traceEvents"])
    assert {event["ph"] for event in data["traceEvents"]} == {"M", "B", "E", "C"}
