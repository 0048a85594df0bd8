"""A training step that keeps one bit of each activation: it is planned, measured, paged and run by its packed bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import edgetrain as et
from edgetrain.graph.ir import BITS, Graph, Op, Ref, Storage
from edgetrain.graph.ir import Tensor as Data
from edgetrain.graph.verify import verify
from edgetrain.ops.entry import Entry, register, unregister, work
from edgetrain.plan.plan import PageIn
from edgetrain.plan.problem import problem
from tests.helpers.paged import paged_plan, widest_gaps, with_store
from tests.helpers.plain import Training, differing, towards_ramp, training

WIDTH, SAMPLES = 13, 5  # 65 bits: no whole number of bytes
N_BYTES = 9
KINDS = ("packed.positive.default", "packed.where.default")
POWERS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


@torch.library.custom_op("packed::positive", mutates_args=())
def positive_bits(x: Tensor) -> Tensor:
    bits = nn.functional.pad((x > 0).flatten().to(torch.uint8), (0, -x.numel() % 8))
    return (bits.view(-1, 8) * POWERS).sum(1, dtype=torch.uint8)


@torch.library.custom_op("packed::where", mutates_args=())
def where_bits(dy: Tensor, bits: Tensor) -> Tensor:
    mask = (bits.view(-1, 1) & POWERS).ne(0).flatten()[: dy.numel()].view(dy.shape)
    return dy * mask


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))


def with_bits(graph: Graph) -> Graph:
    """The backward pass of ReLU reads the bits of its mask in place of its result."""
    forward = next(n for n, op in enumerate(graph.ops) if op.kind == "aten.relu.default")
    backward = next(n for n, op in enumerate(graph.ops) if op.kind == "aten.threshold_backward.default")
    (y,) = graph.ops[forward].creates
    dy = graph.ops[backward].reads[0]
    shaped, mask = graph.tensors[y], len(graph.tensors)
    bits = Data("mask", len(graph.storages), shaped.shape, shaped.stride, BITS)
    ops = list(graph.ops)
    ops[backward] = replace(ops[backward], kind="packed.where.default", args=(Ref(dy), Ref(mask)))
    ops.insert(forward + 1, Op("mask", "packed.positive.default", (Ref(y),), (), (mask,), "forward"))
    rewritten = replace(
        graph, ops=tuple(ops), tensors=(*graph.tensors, bits),
        storages=(*graph.storages, Storage(bits.n_bytes, "activation")),
    )  # fmt: skip
    verify(rewritten)
    return rewritten


@pytest.fixture
def pair() -> Iterator[tuple[Training, Training, Graph, Tensor]]:
    torch.manual_seed(0)
    ours = training(net(), towards_ramp)
    x = torch.randn(SAMPLES, 6)
    register(Entry(), *KINDS)
    graph = with_bits(et.capture(ours.model, ours.loss, ours.optimizer, (x,)))
    yield ours, ours.twin(), graph, x
    unregister(*KINDS)


def mask_of(graph: Graph) -> int:
    return next(t for t, tensor in enumerate(graph.tensors) if tensor.dtype == BITS)


def test_a_mask_takes_an_eighth_of_a_byte(pair: tuple[Training, Training, Graph, Tensor]) -> None:
    """In its storage, and in the bytes that its ops read and write."""
    graph = pair[2]
    mask = mask_of(graph)
    assert graph.tensors[mask].n_bytes == graph.storages[graph.tensors[mask].storage].n_bytes == N_BYTES
    made, read = (op for op in graph.ops if mask in (*op.reads, *op.creates))
    whole = 4 * SAMPLES * WIDTH
    assert (work(graph, made).read_bytes, work(graph, made).written_bytes) == (whole, N_BYTES)
    assert (work(graph, read).read_bytes, work(graph, read).written_bytes) == (whole + N_BYTES, whole)


def test_a_step_with_a_mask_is_plain_training(pair: tuple[Training, Training, Graph, Tensor]) -> None:
    ours, plain, graph, x = pair
    step = et.compile(graph, et.keep_all(graph), ours.model, ours.optimizer)
    for _ in range(3):
        assert torch.equal(step(x), plain.plain_step(x))
    assert differing(ours.snapshot(), plain.snapshot()) == []


def test_a_mask_is_measured_and_paged(pair: tuple[Training, Training, Graph, Tensor], tmp_path: Path) -> None:
    """Its bytes go to the store between the two ops that touch it, and come back."""
    ours, plain, graph, x = pair
    costs = with_store(et.measure_costs(graph, use_cache=False))
    task = problem(graph, costs, "early")
    mask = graph.tensors[mask_of(graph)].storage
    plan = paged_plan(task, [gap for gap in widest_gaps(task) if gap.storage == mask])
    assert [action for action in plan.schedule if isinstance(action, PageIn)] == [PageIn(mask)]
    step = et.compile(graph, plan, ours.model, ours.optimizer, costs=costs, page_to=tmp_path)
    for _ in range(3):
        assert torch.equal(step(x), plain.plain_step(x))
    assert differing(ours.snapshot(), plain.snapshot()) == []
