"""Operations and bytes of ops, counted against PyTorch's own counter and by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import edgetrain as et
from edgetrain import zoo
from edgetrain.graph.ir import Graph
from edgetrain.ops import norm
from edgetrain.ops.entry import work
from edgetrain.ops.work import KINDS, Work

COUNTED = ("conv", "depthwise", "dense")


def captured(model: nn.Module, *x: torch.Tensor, momentum: float = 0.0) -> Graph:
    updates = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return et.capture(model, lambda m, *b: m(*b).square().mean(), updates, x)


def works(graph: Graph, name: str) -> list[Work]:
    return [work(graph, op) for op in graph.ops if op.kind.split(".")[1] == name]


def products(graph: Graph, phase: str | None = None) -> int:
    done = [work(graph, op) for op in graph.ops if phase in (None, op.phase)]
    return sum(w.flops for w in done if w.kind in COUNTED)


@pytest.mark.parametrize("name", ["lenet", "alexnet", "squeezenet", "resnet18", "bert_small", "autoencoder"])
def test_a_step_of_the_zoo_has_the_operations_that_pytorch_counts(name: str) -> None:
    entry = zoo.get(name)
    size = {"bert_small": 16, "lenet": 28, "autoencoder": 28}.get(name, 64)
    model = zoo.build(name, input_size=size)
    batch = entry.example(2, input_size=size)
    graph = et.capture(model, entry.task.loss, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        entry.task.loss(model, *batch).backward()
    assert products(graph) == counter.get_total_flops() > 0


def test_depthwise_convolutions_count_their_groups() -> None:
    """PyTorch's counter takes the groups into account in the forward pass alone; the backward pass has twice as many
    operations, but for the gradient of the images."""
    model = zoo.build("mobilenet_v2", input_size=64)
    batch = zoo.get("mobilenet_v2").example(2, input_size=64)
    graph = et.capture(model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(batch[0])
    forward = products(graph, "forward")
    assert forward == counter.get_total_flops()
    first = 2 * 2 * 32 * 32 * 32 * 3 * 9
    assert products(graph, "backward") == 2 * forward - first


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


@settings(max_examples=20, deadline=None)
@given(
    groups=st.integers(1, 3), a=st.integers(1, 3), b=st.integers(1, 3), kernel=st.integers(1, 3),
    stride=st.integers(1, 2), batch=st.integers(1, 3), side=st.integers(4, 7), transposed=st.booleans(),
)  # fmt: skip
def test_any_convolution_counts_as_pytorch_counts_it(
    groups: int, a: int, b: int, kernel: int, stride: int, batch: int, side: int, transposed: bool
) -> None:
    make = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = make(groups * a, groups * b, kernel, stride, groups=groups)
    x = torch.zeros(batch, groups * a, side, side)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x)
    graph = captured(nn.Sequential(layer), x)
    (done,) = works(graph, "convolution")
    if not transposed or groups == 1:  # its formula for transposed ones leaves the groups out
        assert done.flops == counter.get_total_flops()
    multiplied = batch * layer.weight[0].numel() * layer.weight.shape[0]
    places = side * side if transposed else ((side - kernel) // stride + 1) ** 2
    assert done.flops == 2 * multiplied * places
    depthwise = groups > 1 and a == 1
    assert done.kind == ("depthwise" if depthwise else "conv")
    channels = groups * (b if transposed else a)
    columns = 0 if depthwise or (kernel == 1 and stride == 1) else 4 * batch * places * channels * kernel**2
    assert done.columns_bytes == columns


def test_bytes_are_those_of_each_tensor_once() -> None:
    graph = captured(nn.Linear(3, 5), torch.zeros(7, 3), momentum=0.9)
    (forward,) = works(graph, "addmm")
    assert (forward.kind, forward.flops) == ("dense", 2 * 7 * 3 * 5)
    assert (forward.read_bytes, forward.written_bytes) == (4 * (5 + 7 * 3 + 3 * 5), 4 * 7 * 5)
    weight, bias = works(graph, "sgd")
    for done, n in ((weight, 15), (bias, 5)):
        # Parameter, gradient and momentum are read; parameter and momentum are written.
        assert (done.kind, done.read_bytes, done.written_bytes) == ("elementwise", 4 * 3 * n, 4 * 2 * n)
        assert done.flops == 6 * n


def test_what_is_expanded_is_read_once_and_a_view_does_nothing() -> None:
    class Expands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([(x * self.scale.expand(4, 6)).t(), x.t()])

    graph = captured(Expands(), torch.zeros(4, 6))
    product = next(w for w in works(graph, "mul") if w.read_bytes == 4 * (24 + 1))
    assert (product.flops, product.written_bytes) == (24, 96)
    (together,) = works(graph, "cat")
    assert together == Work("move", 0, 192, 192)
    views = [op for op in graph.ops if op.view]
    assert views
    assert all(work(graph, op) == Work("nothing") for op in views)


def test_pooling_counts_its_kernel_and_attention_its_two_products() -> None:
    graph = captured(nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d(2)), torch.zeros(3, 1, 4, 4))
    (pooled,) = works(graph, "max_pool2d_with_indices")
    assert (pooled.kind, pooled.flops, pooled.written_bytes) == ("elementwise", 3 * 2 * 4 * 4, 24 * (4 + 8))

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(x * self.scale, x, x)

    flash = captured(Attends(), torch.zeros(2, 3, 16, 8))
    found = [w for op in flash.ops if "attention" in op.kind for w in [work(flash, op)]]
    assert [(w.kind, w.flops) for w in found] == [
        ("dense", 2 * 2 * 2 * 3 * 16 * 16 * 8), ("dense", 5 * 2 * 2 * 3 * 16 * 16 * 8),
    ]  # fmt: skip


@pytest.mark.skipif(norm.missing() is not None, reason="the kernels of batch norm are not built")
def test_batch_norm_of_our_own_is_counted() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    step = et.prepare(
        model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters(), lr=0.1), (torch.zeros(2, 3, 6, 6),)
    )
    kinds = {op.kind: work(step.graph, op) for op in step.graph.ops if op.kind.startswith("edgetrain.norm.")}
    n = 2 * 8 * 4 * 4
    assert {kind: w.flops for kind, w in kinds.items()} == {
        "edgetrain.norm.statistics": 4 * n, "edgetrain.norm.apply": 4 * n, "edgetrain.norm.backward": 12 * n,
    }  # fmt: skip
    assert all(w.kind == "elementwise" for w in kinds.values())
    # x and the running statistics are read, mean and invstd made, the running ones written.
    assert kinds["edgetrain.norm.statistics"].read_bytes == 4 * (n + 16)
    assert kinds["edgetrain.norm.statistics"].written_bytes == 4 * (16 + 16)


def test_every_op_of_a_graph_has_a_kind() -> None:
    entry = zoo.get("char_lstm")
    model = zoo.build("char_lstm")
    batch = tuple(t[:, :3].contiguous() for t in entry.example(2))
    graph = et.capture(model, entry.task.loss, torch.optim.Adam(model.parameters()), batch)
    found = {work(graph, op).kind for op in graph.ops}
    assert found <= set(KINDS)
    assert {"dense", "elementwise", "move", "nothing"} <= found
