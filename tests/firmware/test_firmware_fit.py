"""Plans for a target's memory, and the numbers of what would help where there is none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from firmware_nets import NETS, Net, adam, plain_sgd, sgd
from torch import nn

import edgetrain as et
from edgetrain.errors import Infeasible
from edgetrain.firmware.fit import (
    arena_room,
    last_layer,
    lasting_bytes,
    levers,
    plan_for,
    ram_bytes,
    training_only,
    with_one_sample,
)
from edgetrain.firmware.target import load_target, place
from edgetrain.graph.ir import Graph
from edgetrain.graph.verify import broken_rules
from edgetrain.plan.validate import validate

LENET = NETS["lenet"]


def step(net: Net, optimizer: object = plain_sgd, model: nn.Module | None = None) -> Graph:
    torch.manual_seed(0)
    model = model or net.build()
    updates = optimizer([p for p in model.parameters() if p.requires_grad])  # type: ignore[operator]
    return et.lower_for_firmware(et.capture(model, net.loss, updates, net.batch(), use_cache=False))


def test_what_fits_keeps_all_and_what_does_not_recomputes_within_the_memory() -> None:
    graph = step(NETS["everything"])
    board = load_target("stm32f405")
    kept = plan_for(graph, board)
    assert kept.planner == "keep-all"
    budget = ram_bytes(graph) - 4000
    less = plan_for(graph, board, memory_bytes=budget, time_limit_s=1)
    validate(graph, less)
    assert less.recomputed
    assert less.updates == "final"
    assert lasting_bytes(graph) + less.peak_bytes - less.persistent_bytes <= budget


def test_the_room_for_an_arena_is_the_largest_that_is_placed() -> None:
    graph = step(NETS["everything"])
    for name in ("nrf52840", "stm32f405", "stm32f746", "mkr1000"):
        target = load_target(name)
        room = arena_room(graph, target)
        assert room is not None
        assert place(target, arena_bytes=room, rest_bytes=lasting_bytes(graph)) is not None
        assert place(target, arena_bytes=room + 4, rest_bytes=lasting_bytes(graph)) is None
    assert arena_room(graph, load_target("linux-x86_64")) is None


def test_a_lever_says_what_the_changed_step_really_takes() -> None:
    full = step(LENET, adam)
    found = {lever.what: lever.ram_bytes for lever in levers(full, load_target("nrf52840"))}
    one = dataclasses.replace(LENET, samples=1)
    assert found["a batch of 1 in place of 4"] == ram_bytes(step(one, adam))
    assert found["SGD without momentum"] == ram_bytes(step(LENET, plain_sgd))
    model = LENET.build()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("classifier.4"))
    assert found["training classifier.4 alone"] == ram_bytes(step(LENET, adam, model))
    assert found["recomputing as much as can be"] < ram_bytes(full)


def test_the_graphs_behind_the_levers_are_legal() -> None:
    graph = step(NETS["everything"], sgd)
    assert broken_rules(with_one_sample(graph)) == []
    last = training_only(graph, last_layer(graph))
    assert broken_rules(last) == []
    assert {last.tensors[p].name for p in last.gradients} == {"last.weight", "last.bias"}
    assert not any(op.kind == "edgetrain.conv2d.backward_weight" for op in last.ops)


def test_infeasible_names_the_smallest_ram_and_what_would_help(tmp_path: Path) -> None:
    graph = step(dataclasses.replace(LENET, samples=8), adam)
    with pytest.raises(Infeasible, match="what would help, each by itself") as told:
        plan_for(graph, load_target("nrf52840"), time_limit_s=1)
    assert told.value.smallest_bytes > 262_144
    assert told.value.bound_bytes >= lasting_bytes(graph)
    assert "training classifier.4 alone" in str(told.value)
    with pytest.raises(Infeasible, match="50000 bytes were asked for"):
        plan_for(step(NETS["everything"]), load_target("linux-x86_64"), memory_bytes=50_000, time_limit_s=1)
