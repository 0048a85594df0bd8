"""A picture of memory from what was traced: the ops that ran, their bytes, and what is alive at the peak."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.measure.picture import ALIVE_SHOWN, load, save, traced
from edgetrain.measure.timeline import Tracer
from edgetrain.report.embedded import held_bytes
from edgetrain.run.memory import Alive, MemoryTrace, TracedOp

MB = 1_000_000


def trace(alive: int = 2) -> MemoryTrace:
    ops = (
        TracedOp("a", "aten.mul.Tensor", "m", "forward", 1 * MB, 3 * MB, 2 * MB, 0),
        TracedOp("view", "aten.view.default", "m", "forward", 2 * MB, 2 * MB, 2 * MB, 0),
        TracedOp("b", "aten.mul.Tensor", "n", "backward", 2 * MB, 4 * MB, 2 * MB, 5 * MB),
        TracedOp("a", "aten.mul.Tensor", "m", "backward", 2 * MB, 3 * MB, 2 * MB, 0),
    )
    there = tuple(Alive(f"t{n}", "activation" if n else "parameter", MB) for n in range(alive))
    return MemoryTrace(ops, 4 * MB, "b", 9 * MB, 1 * MB, there)


def test_ops_that_ran_with_their_workspace_and_those_that_ran_again() -> None:
    curve = traced([trace()], {"a", "b"}).curves[0]
    assert [(i.op, i.held_bytes, i.again) for i in curve.instants] == [
        ("a", 3 * MB, False), ("b", 9 * MB, False), ("a", 3 * MB, True),
    ]  # fmt: skip
    assert (curve.peak.op, curve.lasting_bytes) == ("b", 1 * MB)


def test_what_is_alive_is_told_by_role_and_by_tensor() -> None:
    roles, tensors = traced([trace(alive=ALIVE_SHOWN + 3)], {"a", "b"}).tables
    assert roles.rows == (("activation", "27 MB", "96 %"), ("parameter", "1 MB", "4 %"))
    assert len(tensors.rows) == ALIVE_SHOWN + 1
    assert tensors.rows[-1] == ("3 more", "", "3 MB")


def test_of_a_real_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = (torch.randn(4, 8), torch.arange(4) % 3)
    step = et.prepare(model, lambda m, x, y: F.cross_entropy(m(x), y), torch.optim.SGD(model.parameters(), 0.1), batch)
    found = step.trace_memory(*batch)
    ran = [step.graph.ops[n].name for n in step.plan.order if not step.graph.ops[n].view]
    picture = traced([found], set(ran))
    assert [instant.op for instant in picture.curves[0].instants] == ran
    assert picture.curves[0].peak.held_bytes == found.peak_with_workspace_bytes
    save(picture, tmp_path)
    assert load(tmp_path) == picture


def test_a_step_in_micro_batches_holds_bytes_over_all_of_its_ops(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = (torch.randn(6, 8), torch.arange(6) % 3)
    updates = torch.optim.SGD(model.parameters(), 0.1)
    step = et.prepare(model, lambda m, x, y: F.cross_entropy(m(x), y), updates, batch, micro_batches=3)
    tracer = Tracer(step, tmp_path)
    tracer(*batch)
    timeline = tracer.result()
    traces = step.trace_micro_batches(*batch)
    assert len(traces) == 3
    assert max(trace.peak_bytes for trace in traces) == step.trace_memory(*batch).peak_bytes
    picture = traced(traces, {op.name for op in timeline.ops})
    assert [instant.op for instant in picture.curves[0].instants] == [op.name for op in timeline.ops]
    assert not any(instant.again for instant in picture.curves[0].instants)
    held = held_bytes(timeline, picture)
    assert held is not None
    assert all(n_bytes and n_bytes > 0 for n_bytes in held)
