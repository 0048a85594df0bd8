"""Measured costs: what ops ask for is what the step asks for, and each different call is measured once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.costs import calls, measured
from edgetrain.errors import UserError
from edgetrain.graph.ir import Graph
from edgetrain.graph.rewrite.fuse import fuse_batch_norm
from edgetrain.native import arena
from edgetrain.ops import call
from edgetrain.plan.keep_all import keep_all
from edgetrain.run.arena import predict
from edgetrain.run.compiled import CompiledStep
from tests.helpers.marks import needs_arena
from tests.helpers.plain import sgd


def convolutional(channels: int = 6) -> nn.Module:
    body = [
        nn.Conv2d(3, channels, 3),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 1),
        nn.ReLU6(),
    ]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(channels, 5))


def attentive() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(40, 5))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutional": (convolutional, (4, 3, 10, 10)),
    "attentive": (attentive, (4, 5, 8)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": sgd,
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1),
}


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def example(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator), torch.randint(5, shape[:1], generator=generator)


def captured(net: str, optimizer: str = "SGD", **options: Any) -> tuple[Graph, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    build, shape = NETS[net]
    model = build()
    made = OPTIMIZERS[optimizer](model.parameters())
    return et.capture(model, cross_entropy, made, example(shape), use_cache=False, **options), model, made


def linear(n: int = 4, width: int = 6, dtype: torch.dtype = torch.float32, **options: Any) -> Graph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5)).to(dtype)
    x, y = torch.randn(n, width, dtype=dtype), torch.randint(5, (n,))
    return et.capture(model, cross_entropy, sgd(model.parameters()), (x, y), use_cache=False, **options)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many calls each measurement was for."""
    found: list[int] = []
    real = measured.measure

    def measure(graph: Graph, keys: set[str], *rest: Any) -> Any:
        found.append(len(keys))
        return real(graph, keys, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(measured, "measure", measure)
        yield found


# ---- what the step asks for -----------------------------------------------------------------------------------


@needs_arena
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("net", "optimizer"), [("convolutional", "SGD"), ("convolutional", "Adam"), ("attentive", "SGD")]
)
def test_events_are_those_of_the_step(net: str, optimizer: str, fused: bool) -> None:
    """Request by request, return by return."""
    graph, model, made = captured(net, optimizer, **({"memory_format": "channels_last"} if fused else {}))
    graph = fuse_batch_norm(graph) if fused else graph
    costs = et.measure_costs(graph, rounds=1)
    plan = keep_all(graph, updates="early", workspace=costs.workspace_bytes)
    step = CompiledStep(graph, plan, model, made, {}, costs=costs)
    batch = example(NETS[net][1])
    for _ in range(3):
        step(*batch)
    found = step.arena
    assert found is not None
    assert found.most_bytes == plan.peak_bytes - plan.persistent_bytes
    told = predict(graph, plan, costs, step._program.held, rehearse=False)
    assert told is not None
    assert [event for event in told if event >= 0] == [event for event in found.events if event >= 0]
    assert len(told) == len(found.events)
    assert plan.peak_bytes >= keep_all(graph, updates="early").peak_bytes


@needs_arena
def test_costs_do_not_depend_on_settings_of_the_moment() -> None:
    """Autocast, the default type and gradients that are recorded are the caller's; the step runs without them."""
    graph = linear()
    right = et.measure_costs(graph, rounds=1, use_cache=False)
    events = [{way: run.events for way, run in cost.ways.items()} for cost in right.ops]

    def now() -> Any:
        found = et.measure_costs(graph, rounds=1, use_cache=False)
        return [{way: run.events for way, run in cost.ways.items()} for cost in found.ops]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert now() == events
    with torch.inference_mode():
        assert now() == events
    torch.set_default_dtype(torch.float64)
    try:
        assert now() == events
    finally:
        torch.set_default_dtype(torch.float32)


@needs_arena
def test_arguments_are_of_the_type_of_the_graph_whatever_the_default() -> None:
    graph = linear()
    torch.set_default_dtype(torch.float64)
    try:
        for number in range(len(graph.ops)):
            for call in calls.calls(graph, number).values():
                for t, real in calls.Pool(graph).tensors(call).items():
                    tensor = graph.tensors[t]
                    assert (str(real.dtype), tuple(real.shape)) == (f"torch.{tensor.dtype}", tensor.shape)
    finally:
        torch.set_default_dtype(torch.float32)


def test_measuring_leaves_no_trace() -> None:
    """The random state, gradients and memory are as before."""
    graph, _, _ = captured("convolutional")
    torch.manual_seed(7)
    before = torch.get_rng_state()
    costs = et.measure_costs(graph, rounds=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    if arena.available():
        assert arena.resident_bytes() == 0
    assert all(run.time_s >= 0 for cost in costs.ops for run in cost.ways.values())
    assert sum(cost.time_s for cost in costs.ops) > 0
    assert costs.origin == "measured"
    assert costs.graph_key == graph.key
    assert set(costs.about) >= {"processor", "cores", "threads", "torch"}


def test_every_way_to_run_an_op_is_measured() -> None:
    graph, _, _ = captured("convolutional")
    costs = et.measure_costs(graph, rounds=1)
    ways = {op.kind: set(cost.ways) for op, cost in zip(graph.ops, costs.ops, strict=True)}
    assert ways["aten.native_batch_norm.default"] == {"first", "again"}
    assert ways["aten.relu.default"] == {"first", "over"}
    assert ways["aten.convolution.default"] == {"first"}
    # Over an input, no memory is asked for.
    over = [cost.ways["over"] for cost in costs.ops if "over" in cost.ways]
    assert {event for run in over for event in run.events if event > 100} == set()


# ---- kept -----------------------------------------------------------------------------------------------------


def test_a_second_call_measures_nothing(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    graph, _, _ = captured("convolutional")
    told: list[tuple[int, int]] = []
    with counted(monkeypatch) as measurements:
        first = et.measure_costs(graph, rounds=2, progress=lambda *part: told.append(part))
        assert et.measure_costs(graph, rounds=2) == first
        assert et.measure_costs(graph) == first
        assert len(measurements) == 1
    assert told[-1][0] == told[-1][1] == len(told) == 3 * measurements[0]
    (file,) = (own_cache / "costs").iterdir()
    assert len(json.loads(file.read_text())) == measurements[0]


def test_what_another_graph_shares_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, other = linear(), linear(n=9)
    wanted = {calls.key(other, call) for n in range(len(other.ops)) for call in calls.calls(other, n).values()}
    known = {calls.key(graph, call) for n in range(len(graph.ops)) for call in calls.calls(graph, n).values()}
    assert wanted & known  # updates
    assert wanted - known
    with counted(monkeypatch) as measurements:
        et.measure_costs(graph, rounds=1)
        et.measure_costs(other, rounds=1)
    assert measurements == [len(known), len(wanted - known)]


def test_without_the_cache_nothing_is_read_or_written(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    graph = linear()
    with counted(monkeypatch) as measurements:
        et.measure_costs(graph, rounds=1, use_cache=False)
        et.measure_costs(graph, rounds=1, use_cache=False)
        monkeypatch.setenv("EDGETRAIN_CACHE", "off")
        et.measure_costs(graph, rounds=1)
        et.measure_costs(graph, rounds=1)
    assert len(measurements) == 4
    assert list(own_cache.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 3}', '{"a": [1, [2], 3]}', '{"a": [-1, []]}', "null"])
def test_a_file_that_holds_something_else_is_as_good_as_none(text: str, own_cache: Path) -> None:
    graph = linear()
    first = et.measure_costs(graph, rounds=1)
    (file,) = (own_cache / "costs").iterdir()
    file.write_text(text)
    again = et.measure_costs(graph, rounds=1)
    assert [set(cost.ways) for cost in again.ops] == [set(cost.ways) for cost in first.ops]
    assert et.measure_costs(graph, rounds=1) == again


def test_other_threads_are_another_machine(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    graph = linear()
    et.measure_costs(graph, rounds=1)
    real = measured.machine()
    monkeypatch.setattr(measured, "machine", lambda: {**real, "threads": "64"})
    with counted(monkeypatch) as measurements:
        et.measure_costs(graph, rounds=1)
    assert len(measurements) == 1
    assert len(list((own_cache / "costs").iterdir())) == 2


def test_no_rounds_are_refused() -> None:
    with pytest.raises(UserError, match="at least one round"):
        et.measure_costs(linear(), rounds=0)


def test_the_other_process_measures_the_same_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no arena, ops run in a process of its own."""
    graph = linear()
    here = et.measure_costs(graph, rounds=1, use_cache=False)
    monkeypatch.setattr(measured, "_here", measured._in_child)
    there = et.measure_costs(graph, rounds=1, use_cache=False)
    for a, b in zip(here.ops, there.ops, strict=True):
        assert {way: run.events for way, run in a.ways.items()} == {way: run.events for way, run in b.ways.items()}


# ---- keys -----------------------------------------------------------------------------------------------------


def keys(graph: Graph) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for number, op in enumerate(graph.ops):
        found.setdefault(op.kind, []).append(calls.key(graph, calls.calls(graph, number)["first"]))
    return found


def test_equal_calls_have_equal_keys() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh())))
    graph = et.capture(
        model, lambda m, x: m(x).square().mean(), sgd(model.parameters()), (torch.randn(4, 6),), use_cache=False
    )
    found = keys(graph)
    assert len(found["aten.tanh.default"]) == 3
    assert len(set(found["aten.tanh.default"])) == 1
    assert len(set(found["aten.addmm.default"])) == 1
    assert len(set(found["edgetrain.sgd.update"])) == 2  # of weights and of biases
    assert keys(linear()) == keys(linear())


@pytest.mark.parametrize("other", [{"n": 5}, {"width": 7}, {"dtype": torch.float64}])
def test_other_shapes_and_types_have_other_keys(other: dict[str, Any]) -> None:
    a, b = keys(linear())["aten.tanh.default"], keys(linear(**other))["aten.tanh.default"]
    assert set(a).isdisjoint(b)


def test_strides_arguments_and_ways_are_part_of_the_key() -> None:
    plain, _, _ = captured("convolutional")
    strided, _, _ = captured("convolutional", memory_format="channels_last")
    for kind in ("aten.convolution.default", "aten.relu.default", "aten.native_batch_norm.default"):
        assert set(keys(plain)[kind]).isdisjoint(keys(strided)[kind])
    for number in range(len(plain.ops)):
        made = {way: calls.key(plain, call) for way, call in calls.calls(plain, number).items()}
        assert len(set(made.values())) == len(made)
        first = calls.calls(plain, number)["first"]
        other = replace(first.op, args=(*first.op.args, 17))
        assert calls.key(plain, replace(first, op=other)) != made["first"]
        if len(first.op.outputs) > 1:
            dropped = replace(first.op, outputs=(None, *first.op.outputs[1:]))
            assert calls.key(plain, replace(first, op=dropped)) != made["first"] or first.op.outputs[0] is None


def test_the_same_tensor_twice_is_another_call() -> None:
    def squared(model: nn.Module, x: Tensor) -> Tensor:
        h: Tensor = model(x)
        return (h * h + h * h.tanh()).mean()

    model = nn.Linear(6, 6)
    graph = et.capture(model, squared, sgd(model.parameters()), (torch.randn(4, 6),), use_cache=False)
    products = [n for n, op in enumerate(graph.ops) if op.kind == "aten.mul.Tensor" and op.phase == "forward"]
    assert len({calls.key(graph, calls.calls(graph, n)["first"]) for n in products}) == 2


# ---- within a bound


@needs_arena
def test_measuring_takes_no_more_than_it_may() -> None:
    graph = linear(4096, 256)  # blocks of 4.2 MB
    n_bytes = 4096 * 256 * 4
    with mapped_most() as most:
        et.measure_costs(graph, rounds=1, use_cache=False)
    hungry = most()
    assert hungry > 2.5 * n_bytes
    with mapped_most() as most:
        costs = et.measure_costs(graph, rounds=1, use_cache=False, most_bytes=int(1.2 * n_bytes))
    assert 0 < most() <= 1.2 * n_bytes + 1e5
    left_out = [op for op, cost in zip(graph.ops, costs.ops, strict=True) if not op.view and cost.time_s == 0]
    assert left_out
    for op, cost in zip(graph.ops, costs.ops, strict=True):
        made = {graph.tensors[t].storage for t in op.creates} - {graph.tensors[t].storage for t in op.reads}
        if op in left_out:
            assert cost.run("first").most_bytes == sum(graph.storages[s].n_bytes for s in made)


@contextmanager
def mapped_most() -> Iterator[Callable[[], int]]:
    """The height of the arena while costs are measured, as told by what is handed back at the end."""
    heights: list[int] = []
    trim = arena.trim

    def watched(n_bytes: int) -> None:
        heights.append(arena.resident_bytes())
        trim(n_bytes)

    trim(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "trim", watched)
        yield lambda: max(heights)


def test_an_op_that_cannot_be_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = linear()
    resolve = call.resolve

    def picky(kind: str, kernel: str = "") -> Callable[..., Any]:
        def refuse(*args: object) -> None:
            raise RuntimeError("all elements should be between 2 and 3")

        return refuse if kind.startswith("aten.addmm") else resolve(kind, kernel)

    monkeypatch.setattr(call, "resolve", picky)
    with pytest.raises(UserError, match=r"addmm_1 .* cannot be measured on its own: all elements should be"):
        et.measure_costs(graph, use_cache=False)


def test_losses_that_look_at_values_can_be_measured() -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8), nn.Sigmoid())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    graph = et.capture(net, lambda m, x: F.binary_cross_entropy(m(x), x), optimizer, (torch.rand(3, 8),))
    assert sum(cost.time_s for cost in et.measure_costs(graph, rounds=1, use_cache=False).ops) > 0
