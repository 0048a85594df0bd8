"""The timeline of ops: all of them, in order, nested in their step, and the numbers of the step that it watches."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import UserError
from edgetrain.measure.timeline import WHAT_FILE, WHEN_FILE, Timeline, Tracer, load_timeline
from edgetrain.run.compiled import CompiledStep
from edgetrain.run.step import Step

pytestmark = pytest.mark.usefixtures("one_cache", "one_round")
BATCH = (torch.linspace(-1, 1, 16 * 32).reshape(16, 32), torch.arange(16) % 5)


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def prepared(**options: Any) -> Step:
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(32, 5))
    return et.prepare(model, loss, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), BATCH, **options)


def tight() -> int:
    step = prepared()
    least, most = step.plan.persistent_bytes, step.plan.peak_bytes
    return least + int(0.6 * (most - least))


def traced(step: Step, steps: int = 3, folder: Path | None = None) -> Timeline:
    tracer = Tracer(step, folder)
    for _ in range(steps):
        tracer(*BATCH)
    return tracer.result()


def test_every_op_of_the_plan_in_its_order() -> None:
    step = prepared(memory=tight())
    found = traced(step)
    ran = [n for n in step.plan.order if not step.graph.ops[n].view]
    assert [op.name for op in found.ops] == [step.graph.ops[n].name for n in ran]
    assert step.plan.recomputed
    again = [op.name for op in found.ops if op.why == "recomputed"]
    assert again == [step.graph.ops[n].name for at, n in enumerate(ran) if n in ran[:at]]
    assert {op.phase for op in found.ops} == {"forward", "backward", "update"}
    assert any(op.module == "2" and op.flops == 2 * 16 * 32 * 32 for op in found.ops)


def test_ops_follow_one_another_inside_their_step() -> None:
    found = traced(prepared())
    assert found.begin_ns.shape == found.end_ns.shape == (3, len(found.ops))
    assert (found.begin_ns <= found.end_ns).all()
    assert (found.end_ns[:, :-1] <= found.begin_ns[:, 1:]).all()
    assert (found.step_ns[:, 0] <= found.begin_ns[:, 0]).all()
    assert (found.end_ns[:, -1] <= found.step_ns[:, 1]).all()
    assert (found.step_ns[:-1, 1] <= found.step_ns[1:, 0]).all()
    assert (found.op_s.sum(axis=1) <= found.step_s).all()


@pytest.mark.parametrize("options", [dict, lambda: {"memory": tight()}, lambda: {"micro_batches": 3}])
def test_the_numbers_are_those_of_the_step(options: Callable[[], dict[str, Any]]) -> None:
    watched, plain = prepared(**options()), prepared(**options())
    tracer = Tracer(watched)
    for _ in range(3):
        assert torch.equal(tracer(*BATCH), plain(*BATCH))


def test_micro_batches_have_numbers() -> None:
    step = prepared(micro_batches=3)
    found = traced(step)
    parts = [op.micro_batch for op in found.ops]
    assert parts == sorted(parts)
    assert set(parts) == {0, 1, 2}
    assert all(op.why == "first" for op in found.ops)
    assert {op.micro_batch for op in found.ops if op.kind == "edgetrain.sgd.update"} == {2}


def test_waits_for_the_store_are_told(tmp_path: Path) -> None:
    step = prepared(memory=tight(), page_to=tmp_path, planner="page-only")
    assert step.plan.paged
    found = traced(step)
    waits = [op for op in found.ops if op.why == "paged"]
    assert {op.kind for op in waits} == {"edgetrain.page.wait"}
    sizes = {step.graph.storages[s].n_bytes for s in step.plan.paged}
    assert {op.read_bytes for op in waits} == sizes
    assert found.left_out == 0


def test_a_step_whose_plan_changed_in_its_middle_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgetrain.run.adaptive.PERIOD_S", 0.0)
    monkeypatch.setattr("edgetrain.run.adaptive.ASKING_PART", math.inf)
    asked, low = [0], tight()
    middle = range(0)

    def budget() -> int:
        asked[0] += 1
        return low if asked[0] in middle else 10**12

    step = prepared(memory=budget)
    tracer = Tracer(step)
    tracer(*BATCH)
    middle = range(asked[0] + 20, asked[0] + 10**6)
    tracer(*BATCH)
    found = tracer.result()
    assert [switch.in_step for switch in step.switches][-1]
    assert (found.steps, found.left_out) == (1, 1)


def test_it_comes_back_from_its_files(tmp_path: Path) -> None:
    found = traced(prepared(), folder=tmp_path)
    back = load_timeline(tmp_path)
    assert back is not None
    assert back.ops == found.ops
    for name in ("step_ns", "begin_ns", "end_ns"):
        assert np.array_equal(getattr(back, name), getattr(found, name))
    assert load_timeline(tmp_path / "nothing") is None


def test_a_file_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    found = traced(prepared(), folder=tmp_path)
    raw = (tmp_path / WHEN_FILE).read_bytes()
    (tmp_path / WHEN_FILE).write_bytes(raw[:-5])
    back = load_timeline(tmp_path)
    assert back is not None
    assert np.array_equal(back.begin_ns, found.begin_ns[:-1])


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2}, {"ops": 3}, {"ops": [3]}, {"ops": [{"name": "x"}]}, {"flops": -1}, {"flops": 10**30},
        {"phase": "sideways"}, {"why": "<script>"},
    ],
)  # fmt: skip
def test_files_are_not_trusted(change: dict[str, Any], tmp_path: Path) -> None:
    traced(prepared(), folder=tmp_path)
    data = json.loads((tmp_path / WHAT_FILE).read_text())
    for key, value in change.items():
        (data if key in data else data["ops"][0])[key] = value
    (tmp_path / WHAT_FILE).write_text(json.dumps(data))
    with pytest.raises(UserError):
        load_timeline(tmp_path)


def test_an_op_that_ends_before_it_begins(tmp_path: Path) -> None:
    found = traced(prepared(), folder=tmp_path)
    rows = np.frombuffer((tmp_path / WHEN_FILE).read_bytes(), dtype="<i8").reshape(found.steps, -1).copy()
    rows[1, 4], rows[1, 4 + len(found.ops)] = rows[1, 4 + len(found.ops)] + 1, rows[1, 4]
    (tmp_path / WHEN_FILE).write_bytes(rows.tobytes())
    with pytest.raises(UserError, match="damaged"):
        load_timeline(tmp_path)


@pytest.mark.parametrize("time_ns", [-1, 2**62])
def test_times_that_no_clock_shows(tmp_path: Path, time_ns: int) -> None:
    found = traced(prepared(), folder=tmp_path)
    rows = np.full((2, 2 + 2 * len(found.ops)), time_ns, dtype="<i8")
    (tmp_path / WHEN_FILE).write_bytes(rows.tobytes())
    with pytest.raises(UserError, match="no clock"):
        load_timeline(tmp_path)


def test_the_step_of_a_shape_is_timed_too() -> None:
    step = prepared()
    compiled = step.of_shape(*BATCH)
    assert isinstance(compiled, CompiledStep)
    places: list[int] = []
    compiled.timed(places.append, *BATCH)
    assert places[1::2] == [~place for place in places[::2]]
