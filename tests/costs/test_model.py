"""Costs modelled for a device: the roofline by hand, what a plan needs of them, and what a process would hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import edgetrain as et
from edgetrain.costs.model import Rates, held, resident_bytes, store
from edgetrain.costs.table import Costs
from edgetrain.devices.device import Device, Quantity, load
from edgetrain.errors import Infeasible, UserError
from edgetrain.graph.ir import Graph
from edgetrain.ops.call import overwritable
from edgetrain.ops.entry import work
from edgetrain.ops.work import Work
from edgetrain.plan.planning import PLANNERS
from edgetrain.plan.timing import play


def number(value: float, plus_minus: float = 0.0) -> Quantity:
    return Quantity(value, "made up", plus_minus)


RATES = Rates(
    {"conv": number(100, 0.5), "depthwise": number(50), "dense": number(200), "elementwise": number(10)},
    bandwidth_bytes_s=number(20, 0.1), overhead_s=number(3.0, 1.0), overlaps=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A net with all kinds of op, deep enough that a plan has something to recompute."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU6()]
    net = nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(8 * 16, 10))
    batch = torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.int64)
    updates = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return et.capture(net, lambda m, x, y: nn.functional.cross_entropy(m(x), y), updates, batch)


def test_the_slower_of_computing_and_moving_decides() -> None:
    assert RATES.time_s(Work("conv", 1000, 10, 10)) == 1000 / 100 + 3
    assert RATES.time_s(Work("conv", 10, 500, 500)) == 1000 / 20 + 3
    assert RATES.time_s(Work("dense", 1000, 0, 0)) == 1000 / 200 + 3
    assert RATES.time_s(Work("depthwise", 1000, 0, 0)) == 1000 / 50 + 3
    assert RATES.time_s(Work("elementwise", 1000, 10, 10)) == 1000 / 10 + 3
    assert RATES.time_s(Work("move", 0, 10, 10)) == 20 / 20 + 3
    assert RATES.time_s(Work("nothing")) == 3


def test_a_library_that_lays_out_data_apart_takes_the_sum() -> None:
    apart = replace(RATES, overlaps=False)
    assert apart.time_s(Work("conv", 1000, 10, 10)) == 1000 / 100 + 20 / 20 + 3
    assert apart.time_s(Work("elementwise", 1000, 10, 10)) == 1000 / 10 + 3


def test_doubt_is_that_of_the_numbers_that_decide() -> None:
    assert RATES.time_and_doubt_s(Work("conv", 1000, 10, 10))[1] == 10 * 0.5 + 3 * 1.0
    assert RATES.time_and_doubt_s(Work("conv", 10, 500, 500))[1] == pytest.approx(50 * 0.1 + 3)


def test_costs_are_those_of_the_device(graph: Graph) -> None:
    device = load("rpi4")
    costs = et.model_costs(graph, "rpi4")
    rates = Rates.of(device, device.processor)
    assert (costs.origin, costs.graph_key, len(costs.ops)) == ("modelled", graph.key, len(graph.ops))
    for op, cost in zip(graph.ops, costs.ops, strict=True):
        expected = 0.0 if op.view else rates.time_s(work(graph, op))
        assert cost.time_s == cost.again_s == expected
        assert cost.run("first").energy_j == pytest.approx(3.0 * expected)
    assert costs.idle_w == 2.7
    assert costs.store == store(device)
    assert costs.store is not None
    assert costs.store.in_s(45_500_000) == pytest.approx(1 + 5.1e-6)
    assert costs.uncertainty is not None
    assert 0.3 < costs.uncertainty < 0.7
    assert costs.about["device"] == "Raspberry Pi 4B"
    assert not any(costs.workspace_bytes.values())


def test_memory_has_a_power_of_its_own_where_it_is_known(graph: Graph) -> None:
    device = load("jetson_tx2")
    assert device.memory.power_w is not None
    assert device.processor.power_w is not None
    for op, cost in zip(graph.ops, et.model_costs(graph, device).ops, strict=True):
        moving_s = work(graph, op).moved_bytes / device.memory.bandwidth_bytes_s.value
        expected = device.processor.power_w.value * cost.time_s + device.memory.power_w.value * moving_s
        assert cost.run("first").energy_j == pytest.approx(expected)


def test_requests_are_the_results_and_over_an_input_one_less(graph: Graph) -> None:
    costs = et.model_costs(graph, "rpi4")
    over = 0
    for op, cost in zip(graph.ops, costs.ops, strict=True):
        read = {graph.tensors[t].storage for t in op.reads}
        made = {graph.tensors[t].storage for t in op.creates} - read
        assert sum(cost.run("first").events) == sum(graph.storages[s].n_bytes for s in made)
        if overwritable(graph, op):
            over += 1
            first = graph.storages[graph.tensors[op.creates[0]].storage].n_bytes
            assert sum(cost.run("over").events) == sum(cost.run("first").events) - first
    assert over


def test_costs_that_were_saved_are_read_back_equal(graph: Graph, tmp_path: Path) -> None:
    costs = et.model_costs(graph, "meizu_16t")
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs


@pytest.mark.parametrize("planner", PLANNERS)
def test_planners_take_modelled_costs(graph: Graph, planner: str) -> None:
    costs = et.model_costs(graph, "rpi4")
    keep_all = et.plan(graph, costs, et.Budget(), planner="keep-all")
    lasting = keep_all.persistent_bytes
    budget = lasting + (keep_all.peak_bytes - lasting) * 8 // 10
    if planner == "keep-all":
        with pytest.raises(Infeasible):
            et.plan(graph, costs, et.Budget(budget), planner=planner)
        return
    made = et.plan(graph, costs, et.Budget(budget), planner=planner, time_limit_s=2)
    assert made.peak_bytes <= budget
    assert made.recomputed or made.paged
    assert made.time_s == pytest.approx(play(graph, made.schedule, costs).time_s)
    assert made.time_s is not None
    assert keep_all.time_s is not None
    assert made.time_s > keep_all.time_s


def test_another_processor_can_be_asked_for(graph: Graph) -> None:
    big, little = (
        sum(op.time_s for op in et.model_costs(graph, "meizu_16t", processor=p).ops) for p in ("big", "little")
    )
    assert little > big
    with pytest.raises(UserError, match="no processor 'gpu' whose rates are all known") as told:
        et.model_costs(graph, "meizu_16t", processor="gpu")
    assert told.value.expected == "big or little"


def test_a_device_without_power_storage_or_memory_of_its_library_says_none(graph: Graph) -> None:
    device = load("stm32f746")
    bare = replace(device, idle_w=None, processors={"cpu": replace(device.processor, power_w=None)})
    costs = et.model_costs(graph, bare)
    assert (costs.store, costs.idle_w) == (None, None)
    assert all(run.energy_j is None for op in costs.ops for run in op.ways.values())
    assert resident_bytes(graph, bare) is None


def test_what_a_process_holds_is_the_sum_of_its_parts(graph: Graph) -> None:
    parts = held(graph)
    parameters = 8 * 27 + 8 + 16 + 4 * (72 + 8 + 16) + 1280 + 10
    assert parts.parameters == 4 * parameters
    # Only the first convolution lays anything out: forward, and for the gradient of its weight.
    assert parts.columns == 2 * 4 * 4 * 256 * 27
    image = 4 * 4 * 8 * 256
    assert 15 * image < parts.forward < 15 * image + 20_000  # convolutions, norms, activations; the head is small
    device = _with_library(load("meizu_16t"), 1000, 3, 2, 5)
    total = 1000 + 3 * parts.parameters + 2 * parts.forward + 5 * parts.columns
    assert resident_bytes(graph, device) == total


def _with_library(device: Device, base: float, lasting: float, kept: float, columns: float) -> Device:
    library = replace(
        device.library, base_bytes=number(base), lasting=number(lasting), held=number(kept), columns=number(columns)
    )
    return replace(device, library=library)
