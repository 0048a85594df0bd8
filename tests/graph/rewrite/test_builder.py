"""Building and changing graphs: layouts as PyTorch's, names that no other op has, and nothing illegal that leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import edgetrain as et
from edgetrain.errors import InternalError
from edgetrain.graph.ir import BITS, Graph, Op, Ref, Source, Tensor
from edgetrain.graph.rewrite.builder import Builder, contiguous, dense_strides
from edgetrain.graph.rewrite.fuse import fuse_batch_norm

LAYOUTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=5)


def captured() -> Graph:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return et.capture(model, lambda m, x: m(x).square().mean(), optimizer, (torch.zeros(5, 4),))


@given(LAYOUTS)
def test_dense_strides_are_those_of_empty_like(layout: list[tuple[int, int]]) -> None:
    """Whatever lies there: gaps, overlaps, numbers shown many times, dimensions of one or of none."""
    shape, stride = tuple(n for n, _ in layout), tuple(s for _, s in layout)
    real = torch.empty(2000).as_strided(shape, stride)
    assert dense_strides(Tensor("t", 0, shape, stride, "float32")) == torch.empty_like(real).stride()
    assert contiguous(shape) == torch.empty(shape).stride()


@given(LAYOUTS)
def test_a_tensor_is_dense_where_pytorch_says_so(layout: list[tuple[int, int]]) -> None:
    shape, stride = tuple(n for n, _ in layout), tuple(s for _, s in layout)
    real = torch.empty(2000).as_strided(shape, stride)
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(real)
    assert Tensor("t", 0, shape, stride, "float32").dense == dense


def test_a_graph_is_built_from_nothing() -> None:
    """A storage of its own for each tensor, a number for each op of one name."""
    builder = Builder()
    x = builder.add("x", "input", (2, 3), "float32")
    builder.sources[x] = Source("input", "0")
    for _ in range(2):
        x = builder.add_like(x, "y", "activation")
        builder.add_op(Op("relu", "aten.relu.default", (Ref(x - 1),), (), (x,), "forward"))
    builder.outputs = [x]
    graph = builder.build()
    assert [op.name for op in graph.ops] == ["relu_1", "relu_2"]
    assert [(s.n_bytes, s.role) for s in graph.storages] == [(24, "input"), (24, "activation"), (24, "activation")]
    assert et.keep_all(graph).peak_bytes == 72 - 24  # the second overwrites the first


def test_storages_are_whole_words() -> None:
    class Words(Builder):
        word_bytes = 4

    builder = Words()
    for n in (1, 32, 33):
        builder.add("bits", "activation", (n,), BITS)
    assert [s.n_bytes for s in builder.storages] == [4, 4, 8]


def test_an_op_that_is_added_gets_a_name_that_no_other_has() -> None:
    graph = captured()
    (relu,) = (op for op in graph.ops if op.kind == "aten.relu.default")
    assert relu.name == "relu_1"
    assert Builder(graph).numbered("relu") == "relu_2"


def test_a_graph_rewritten_by_nothing_is_the_same() -> None:
    graph = captured()
    assert Builder(graph).build() == Builder(graph).build(compact=True) == graph


def test_what_nothing_touches_is_left_out_on_demand() -> None:
    graph = captured()
    builder = Builder(graph)
    builder.add("nothing", "activation", (7,), "float32")
    assert len(builder.build().tensors) == len(graph.tensors) + 1
    assert builder.build(compact=True) == graph


def test_ops_are_replaced_in_their_places() -> None:
    graph = captured()
    builder = Builder(graph)
    at = next(n for n, op in enumerate(graph.ops) if op.kind == "aten.relu.default")
    other = replace(graph.ops[at], kind="aten.relu6.default")
    builder.replace_ops({at: [other]})
    assert builder.build().ops == (*graph.ops[:at], other, *graph.ops[at + 1 :])
    builder.replace_ops({at: []})
    with pytest.raises(InternalError, match="which no op before it creates"):
        builder.build()


def test_a_fused_graph_is_verified() -> None:
    """What batch norm's ops make elsewhere is not made any more: the graph that would leave is illegal."""
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    x = torch.zeros(2, 2, 4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = et.capture(model, lambda m, x: m(x).square().mean(), optimizer, (x,), memory_format="channels_last")
    assert any(op.kind == "edgetrain.norm.apply" for op in fuse_batch_norm(graph).ops)
    broken = replace(graph, gradients={})
    with pytest.raises(InternalError, match="updated parameters"):
        fuse_batch_norm(broken)
