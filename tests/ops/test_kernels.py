"""An entry with several kernels: each is measured, and a step runs the fastest that keeps what the plan promises."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import edgetrain as et
from edgetrain.costs.measured import measure_kernels
from edgetrain.costs.table import Costs, Kernels, OpCost, Run, from_json, to_json
from edgetrain.errors import EdgetrainError
from edgetrain.measure.timeline import Tracer
from edgetrain.ops import Kernel, entry_of, register, unregister
from edgetrain.plan.plan import Compute, Plan
from edgetrain.plan.plan import from_json as plan_from_json
from edgetrain.plan.plan import to_json as plan_to_json

KIND = "aten.silu.default"
called: list[str] = []


def exact(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    called.append("exact")
    return torch.ops.aten.silu.out(x, out=torch.empty_like(x) if out is None else out)  # type: ignore[no-any-return]


def rounding(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    called.append("rounding")
    return torch.mul(x, x.sigmoid(), out=torch.empty_like(x) if out is None else out)


def for_doubles(tensors: tuple[Any, ...]) -> bool:
    return all(tensor.dtype == "float64" for tensor in tensors)


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    entry = entry_of(KIND)
    ours = (
        Kernel("exact", exact, over=True),
        Kernel("rounding", rounding, exact="rounding", over=True),
        Kernel("doubles", rounding, takes=for_doubles),
    )
    register(replace(entry, kernels=(*entry.kernels, *ours)), KIND)
    called.clear()
    yield
    unregister(KIND)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(nn.functional.silu(self.first(x)))
        return hidden


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = model(x).square().mean()
    return value


def captured() -> tuple[Net, torch.optim.Optimizer, tuple[Tensor], et.Graph]:
    torch.manual_seed(0)
    model, batch = Net(), (torch.randn(8, 16),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, batch, et.capture(model, mean_square, optimizer, batch)


def silu(graph: et.Graph) -> int:
    return next(n for n, op in enumerate(graph.ops) if op.kind == KIND)


def with_times(costs: Costs, number: int, **times: float) -> Costs:
    """The costs in which the kernels of one op take so long, whatever was measured."""

    def timed(run: Run) -> Run:
        return replace(run, time_s=times[run.kernel or "torch"])

    cost = costs.ops[number]
    ways = {way: timed(run) for way, run in cost.ways.items()}
    others = {way: tuple(map(timed, runs)) for way, runs in cost.others.items()}
    return replace(costs, ops=(*costs.ops[:number], OpCost(ways, others), *costs.ops[number + 1 :]))


def test_each_kernel_that_takes_the_tensors_is_measured() -> None:
    _, _, _, graph = captured()
    costs = et.measure_costs(graph, use_cache=False)
    cost = costs.ops[silu(graph)]
    assert {run.kernel for run in cost.runs("first")} == {"", "exact", "rounding"}
    assert all(run.time_s > 0 for run in cost.runs("first"))
    assert {"exact", "rounding"} <= set(called)
    assert not any(other.others for n, other in enumerate(costs.ops) if n != silu(graph))
    assert from_json(json.loads(json.dumps(to_json(costs)))) == costs
    # A kernel that makes more on its way asks for more.
    first, _, third = cost.runs("first")
    assert third.most_bytes > first.most_bytes


def test_another_set_of_kernels_is_measured_anew(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGETRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
    _, _, _, graph = captured()
    first = et.measure_costs(graph)
    called.clear()
    assert et.measure_costs(graph) == first
    assert not called
    entry = entry_of(KIND)
    register(replace(entry, kernels=(*entry.kernels[:1], Kernel("faster", exact), *entry.kernels[1:])), KIND)
    again = et.measure_costs(graph)
    assert called
    assert {run.kernel for run in again.ops[silu(graph)].runs("first")} == {"", "faster", "exact", "rounding"}


@pytest.mark.parametrize(
    ("promise", "times", "expected"),
    [
        ("bitwise", {"torch": 3e-6, "exact": 2e-6, "rounding": 1e-6}, "exact"),
        ("rounding", {"torch": 3e-6, "exact": 2e-6, "rounding": 1e-6}, "rounding"),
        ("bitwise", {"torch": 1e-6, "exact": 2e-6, "rounding": 3e-6}, ""),
        ("rounding", {"torch": 1e-6, "exact": 2e-6, "rounding": 3e-6}, ""),
    ],
)
def test_a_step_runs_the_fastest_kernel_that_keeps_the_promise(
    promise: Any, times: dict[str, float], expected: str
) -> None:
    model, optimizer, batch, graph = captured()
    costs = with_times(et.measure_costs(graph, use_cache=False), silu(graph), **times)
    plan = et.plan(graph, costs, et.Budget(10**9), exact=promise, use_cache=False)
    assert {name for names in plan.kernels.values() for name in names.values()} == ({expected} if expected else set())
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan
    plain = Net()
    plain.load_state_dict(model.state_dict())
    step = et.compile(graph, plan, model, optimizer, costs=costs)
    called.clear()
    loss = step(*batch)
    assert set(called) == ({expected} if expected else set())
    assert (f"by {expected}" in step.source) == bool(expected)
    assert step.costs is not None
    assert step.costs.kernels == plan.kernels
    value = mean_square(plain, *batch)
    value.backward()
    gradient = plain.first.weight.grad
    assert gradient is not None
    if promise == "bitwise":
        assert torch.equal(loss, value.detach())
    torch.testing.assert_close(loss, value.detach())
    torch.testing.assert_close(model.first.weight, plain.first.weight - 0.1 * gradient)


def test_what_is_recomputed_runs_by_the_same_kernel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.SiLU())))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(256, 16),)
    graph = et.capture(model, mean_square, optimizer, batch)
    costs = et.measure_costs(graph, use_cache=False)
    for number in [n for n, op in enumerate(graph.ops) if op.kind == KIND]:
        costs = with_times(costs, number, torch=3e-6, exact=2e-6, rounding=1e-6)
    kept = et.keep_all(graph)
    budget = et.Budget(kept.persistent_bytes + 2 * (kept.peak_bytes - kept.persistent_bytes) // 3)
    plan = et.plan(graph, costs, budget, exact="rounding", planner="fast", use_cache=False)
    assert any(graph.ops[n].kind == KIND for n in plan.recomputed)
    called.clear()
    et.compile(graph, plan, model, optimizer, costs=costs)(*batch)
    assert set(called) == {"rounding"}
    runs = sum(graph.ops[n].kind == KIND for n in plan.order)
    assert len(called) == 2 * runs  # in the rehearsal, and in the step


def test_a_step_that_keeps_all_measures_these_ops_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, batch, graph = captured()
    chosen = measure_kernels(graph, "bitwise", use_cache=False)
    assert {name for names in chosen.values() for name in names.values()} <= {"exact"}
    monkeypatch.setattr(
        "edgetrain.run.graph_planner.measure_kernels", lambda *_, **__: {"over": {silu(graph): "exact"}}
    )
    step = et.prepare(model, mean_square, optimizer, batch)
    called.clear()
    step(*batch)
    assert step.plan.kernels == {"over": {silu(graph): "exact"}}
    over = any(isinstance(a, Compute) and a.op == silu(graph) and a.into is not None for a in step.plan.schedule)
    assert ("exact" in called) == over
    unregister(KIND)
    assert measure_kernels(graph, "rounding", use_cache=False) == {}


def test_micro_batches_run_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, batch, _ = captured()
    plain = Net()
    plain.load_state_dict(model.state_dict())

    def chosen(graph: et.Graph, *_: Any, **__: Any) -> Kernels:
        return {"first": {silu(graph): "exact"}, "over": {silu(graph): "exact"}}

    monkeypatch.setattr("edgetrain.run.graph_planner.measure_kernels", chosen)
    step = et.prepare(model, mean_square, optimizer, batch, micro_batches=2)
    called.clear()
    loss = step(*batch)
    assert called.count("exact") >= 2  # in each of them
    assert set(called) == {"exact"}
    torch.testing.assert_close(loss, mean_square(plain, *batch).detach())


def test_a_profile_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, batch, graph = captured()
    kernels = {"first": {silu(graph): "exact"}, "over": {silu(graph): "exact"}}
    monkeypatch.setattr("edgetrain.run.graph_planner.measure_kernels", lambda *_, **__: kernels)
    tracer = Tracer(et.prepare(model, mean_square, optimizer, batch))
    tracer(*batch)
    ops = {op.kind: op for op in tracer.result().ops}
    assert ops[KIND].shown_kind == f"{KIND} by exact"
    assert ops[KIND].category == "activation"
    assert ops["aten.addmm.default"].shown_kind == "aten.addmm.default"


def test_a_plan_with_a_kernel_that_is_not_there_is_refused() -> None:
    model, optimizer, _, graph = captured()
    number = silu(graph)
    plan = et.keep_all(graph)

    def compiled(plan: Plan) -> None:
        et.compile(graph, plan, model, optimizer)

    wrong: list[Kernels] = [{"first": {number: name}} for name in ("nothing", "doubles")]
    wrong.append({"over": {number: "doubles"}})
    for kernels in wrong:
        with pytest.raises(EdgetrainError, match="not there for its tensors"):
            compiled(replace(plan, kernels=kernels))
    with pytest.raises(EdgetrainError, match="rounds, and the plan is bitwise"):
        compiled(replace(plan, kernels={"first": {number: "rounding"}}))
    with pytest.raises(EdgetrainError, match="which is not there"):
        compiled(replace(plan, kernels={"first": {10**6: "exact"}}))
