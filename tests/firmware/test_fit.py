"""Plans for a target's memory, and the numbers of what would help where there is none."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import edgetrain as et
from edgetrain.devices.device import Quantity
from edgetrain.errors import Infeasible
from edgetrain.firmware import arena
from edgetrain.firmware.export import Project
from edgetrain.firmware.fit import (
    CODE_BYTES,
    arena_room,
    last_layer,
    lasting_bytes,
    levers,
    plan_for,
    ram_bytes,
    require_flash,
    training_only,
    with_one_sample,
)
from edgetrain.firmware.target import Target, keep, load_target, place
from edgetrain.graph.ir import Graph
from edgetrain.graph.verify import broken_rules
from edgetrain.plan.layout import Block, Layout, lay_out
from edgetrain.plan.validate import validate
from tests.firmware.firmware_nets import NETS, Net, adam, plain_sgd, sgd

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


def test_the_arena_that_a_plan_was_judged_by_is_the_one_that_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    searched: list[tuple[Block, ...]] = []

    def lay_out_once(blocks: Sequence[Block], *, alignment: int, time_limit_s: float) -> Layout:
        searched.append(tuple(blocks))
        return lay_out(blocks, alignment=alignment, time_limit_s=time_limit_s)

    monkeypatch.setattr(arena, "lay_out", lay_out_once)
    torch.manual_seed(0)
    net = dataclasses.replace(NETS["everything"], samples=3)  # whose arena no other test has laid out
    model = net.build()
    updates = plain_sgd(list(model.parameters()))
    graph = et.lower_for_firmware(et.capture(model, net.loss, updates, net.batch(), use_cache=False))
    board = load_target("nrf52840")
    plan = plan_for(graph, board, memory_bytes=ram_bytes(graph) - 4000, time_limit_s=1)
    judged = list(searched)
    et.export(graph, plan, model, updates, target=board, out=tmp_path / "fw", predict=False)
    assert judged
    assert searched == judged


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
    n_bytes = {lever.what: lever.n_bytes for lever in levers(full, load_target("nrf52840"))}
    single = dataclasses.replace(LENET, samples=1)
    assert n_bytes["a batch of 1 in place of 4"] == ram_bytes(step(single, adam))
    assert n_bytes["SGD without momentum"] == ram_bytes(step(LENET, plain_sgd))
    model = LENET.build()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("classifier.4"))
    assert n_bytes["training classifier.4 alone"] == ram_bytes(step(LENET, adam, model))
    assert n_bytes["recomputing as much as possible"] < ram_bytes(full)


def test_the_graphs_behind_the_levers_are_legal() -> None:
    graph = step(NETS["everything"], sgd)
    assert broken_rules(with_one_sample(graph)) == []
    last = training_only(graph, last_layer(graph))
    assert broken_rules(last) == []
    assert {last.tensors[p].name for p in last.gradients} == {"last.weight", "last.bias"}
    assert not any(op.kind == "edgetrain.conv2d.backward_weight" for op in last.ops)


def test_infeasible_names_the_smallest_ram_and_what_would_help(tmp_path: Path) -> None:
    graph = step(dataclasses.replace(LENET, samples=8), adam)
    with pytest.raises(Infeasible, match="what would help, each by itself") as caught:
        plan_for(graph, load_target("nrf52840"), time_limit_s=1)
    assert caught.value.smallest_bytes > 262_144
    assert caught.value.bound_bytes >= lasting_bytes(graph)
    assert "training classifier.4 alone" in str(caught.value)
    with pytest.raises(Infeasible, match="the budget is 50000 bytes"):
        plan_for(step(NETS["everything"]), load_target("linux-x86_64"), memory_bytes=50_000, time_limit_s=1)


# ---- flash


def small_flash(n_bytes: int, page_bytes: int = 4096) -> Target:
    """An nrf52840 with less flash."""
    target = load_target("nrf52840")
    (region,) = target.device.memory.flash
    source = "this test"
    region = dataclasses.replace(
        region, n_bytes=Quantity(n_bytes, source), page_bytes=Quantity(page_bytes, source),
    )  # fmt: skip
    memory = dataclasses.replace(target.device.memory, flash=(region,))
    return dataclasses.replace(target, device=dataclasses.replace(target.device, memory=memory))


def exported(target: Target, out: Path, optimizer: object, keep_every: int | None, only: str = "") -> Project:
    torch.manual_seed(0)
    model = NETS["everything"].build()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(only))
    updates = optimizer([p for p in model.parameters() if p.requires_grad])  # type: ignore[operator]
    graph = et.lower_for_firmware(et.capture(model, NETS["everything"].loss, updates, NETS["everything"].batch()))
    plan = et.keep_all(graph, updates="final")
    return et.export(graph, plan, model, updates, target=target, out=out, keep_every=keep_every)


def test_a_program_that_does_not_fit_flash_says_what_would_do(tmp_path: Path) -> None:
    board = load_target("nrf52840")
    kept = exported(board, tmp_path / "kept", adam, 10)
    need = CODE_BYTES + kept.weights_bytes + kept.kept_bytes
    with pytest.raises(Infeasible, match="of two checkpoints") as caught:
        exported(small_flash(need - 4096), tmp_path / "fw", adam, 10)
    assert caught.value.smallest_bytes == need
    exported(small_flash(-(-need // 4096) * 4096), tmp_path / "fits", adam, 10)
    # Each lever's number is what the changed program really is predicted to take.
    stated = dict(re.findall(r"^    (.*): (\d+) bytes$", str(caught.value), re.MULTILINE))
    none = exported(board, tmp_path / "none", adam, None)
    assert int(stated["no checkpoints in flash"]) == CODE_BYTES + none.weights_bytes
    plain = exported(board, tmp_path / "plain", plain_sgd, 10)
    assert int(stated["SGD without momentum"]) == CODE_BYTES + plain.weights_bytes + plain.kept_bytes
    last = exported(board, tmp_path / "last", adam, 10, only="last.")
    assert int(stated["training last alone"]) == CODE_BYTES + kept.weights_bytes + last.kept_bytes
    assert not (tmp_path / "fw").exists()


def test_weights_that_alone_are_too_large_for_flash_have_no_lever_but_a_narrower_model(tmp_path: Path) -> None:
    with pytest.raises(Infeasible, match="a narrower model") as caught:
        exported(small_flash(32 * 1024), tmp_path / "fw", adam, None)
    assert "what would help" not in str(caught.value)


def test_copies_lie_in_pages_of_one_size_at_the_end_of_flash() -> None:
    assert keep(load_target("mkr1000"), 1000).slot_bytes == 1280  # 1000 and 128, in rows of 256
    sectors = keep(load_target("stm32f746"), 100_000)
    assert (sectors.address, sectors.n_bytes) == (0x08080000, 2 * 262_144)
    graph = step(NETS["everything"])
    require_flash(graph, load_target("stm32f746"), weights_bytes=1000, copy_bytes=262_000)
    with pytest.raises(Infeasible, match="checkpoints can use the last 786432"):
        require_flash(graph, load_target("stm32f746"), weights_bytes=1000, copy_bytes=300_000)
