"""Layouts predicted without running a kernel are those that the kernel gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from edgetrain.graph import ir
from edgetrain.graph.capture import predicted_layouts

aten = torch.ops.aten


def contiguous(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(4, 6, 3, 5).to(dtype)


def channels_last(dtype: torch.dtype = torch.float32) -> Tensor:
    return contiguous(dtype).contiguous(memory_format=torch.channels_last)


def turned(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(6, 4, 5, 3).to(dtype).permute(1, 0, 3, 2)


LAYOUTS = (contiguous, channels_last, turned)

# The kernel, and its arguments with two tensors in the places of A and B.
POINTWISE: dict[Any, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    aten.hardtanh_backward.default: lambda a, b: (a, b, 0.0, 6.0),
    aten.hardswish_backward.default: lambda a, b: (a, b),
    aten.hardsigmoid_backward.default: lambda a, b: (a, b),
    aten.softplus_backward.default: lambda a, b: (a, b, 1.0, 20.0),
    aten.elu_backward.default: lambda a, b: (a, 1.0, 1.0, 1.0, False, b),
    aten.threshold_backward.default: lambda a, b: (a, b, 0.0),
    aten.leaky_relu_backward.default: lambda a, b: (a, b, 0.1, False),
    aten.silu_backward.default: lambda a, b: (a, b),
    aten.gelu_backward.default: lambda a, b: (a, b),
    aten.mish_backward.default: lambda a, b: (a, b),
    aten.sigmoid_backward.default: lambda a, b: (a, b),
    aten.tanh_backward.default: lambda a, b: (a, b),
    aten.huber_loss_backward.default: lambda a, b: (torch.rand(()), a, b, 1, 1.0),
    aten.smooth_l1_loss_backward.default: lambda a, b: (torch.rand(()), a, b, 1, 1.0),
    aten.mse_loss_backward.default: lambda a, b: (torch.rand(()), a, b, 1),
    aten.log_sigmoid_forward.default: lambda a, _: (a,),
    aten.glu_backward.default: lambda a, b: (a[:, :3], b, 1),
    aten.native_batch_norm_backward.default: lambda a, b: (
        a, b, torch.rand(6), torch.rand(6), torch.rand(6), torch.rand(6), torch.rand(6), True, 1e-5, [True, True, True],
    ),
    aten.native_group_norm_backward.default: lambda a, b: (
        a, b, torch.rand(4, 2), torch.rand(4, 2), torch.rand(6), 4, 6, 15, 2, [True, True, True],
    ),
}  # fmt: skip


def layouts(result: Any) -> list[tuple[Any, ...]]:
    results = [result] if isinstance(result, Tensor) else list(result)
    return [(tuple(t.shape), t.stride(), t.dtype) for t in results]


def predicted(kernel: Any, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    mode = FakeTensorMode()
    fakes = tuple(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args)
    with mode:
        return layouts(predicted_layouts.result_of(kernel, fakes, {}))


@pytest.mark.parametrize("second", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("first", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("kernel", POINTWISE, ids=str)
def test_layouts_are_those_of_the_kernel(
    kernel: Any, first: Callable[[], Tensor], second: Callable[[], Tensor]
) -> None:
    if kernel is aten.native_group_norm_backward.default and (second is not first or first is turned):
        return  # autograd never calls it so, and the kernel counts on that
    args = POINTWISE[kernel](first(), second())
    assert predicted(kernel, args) == layouts(kernel(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_norms_keep_statistics_in_the_type_of_their_parameters(dtype: torch.dtype, training: bool) -> None:
    x, w = contiguous(dtype), torch.rand(6)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.native_batch_norm.default, (x, w, w, w.clone(), w.clone(), training, 0.1, 1e-5)),
        (aten.native_layer_norm.default, (x, [5], torch.rand(5), None, 1e-5)),
        (aten.native_layer_norm.default, (x, [5], None, None, 1e-5)),
        (aten.native_group_norm.default, (x, w, w, 4, 6, 15, 2, 1e-5)),
    ]
    for kernel, args in calls:
        assert predicted(kernel, args) == layouts(kernel(*args)), kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_what_a_bag_keeps_for_its_backward(
    dtype: torch.dtype, mode: int, padding: int, last: bool, weighted: bool
) -> None:
    func, scales = (
        torch.ops.aten._embedding_bag.default,
        torch.ones(12, dtype=dtype) if weighted and mode == 0 else None,
    )
    args = (
        torch.ones(10, 4, dtype=dtype), torch.arange(12) % 9, torch.tensor([0, 3, 12]), False, mode, False, scales,
        last, padding,
    )  # fmt: skip
    real = func(*args)
    with FakeTensorMode() as fakes_of:
        fakes = tuple(fakes_of.from_tensor(a) if isinstance(a, Tensor) else a for a in args)
        predicted = predicted_layouts.result_of(func, fakes, {})
    assert [predicted_layouts.layout_of(t) for t in predicted] == [predicted_layouts.layout_of(t) for t in real]


def test_what_was_learned_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted_layouts, "_learned", {})
    args = (contiguous(), channels_last())
    before, nothing = predicted(aten.add.Tensor, args), predicted_layouts.learned()
    key = predicted_layouts.key_of("aten.add.Tensor", args, {})
    layout = predicted_layouts.layout_of(channels_last())
    assert predicted_layouts.learn(key, {0: layout})
    assert not predicted_layouts.learn(key, {0: layout}), "it was known"
    assert not predicted_layouts.learn(key, {0: predicted_layouts.layout_of(turned())}), (
        "the same call gave something else before"
    )
    assert predicted(aten.add.Tensor, args) == [((4, 6, 3, 5), channels_last().stride(), torch.float32)] != before
    assert predicted(aten.mul.Tensor, args) == before
    assert predicted(aten.add.Tensor, args[::-1]) != before
    assert predicted_layouts.learned() != nothing, "a graph depends on it, so the cache must"


def test_what_was_learned_holds_for_the_same_arguments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted_layouts, "_learned", {})
    x = contiguous()
    before = predicted(aten.sum.dim_IntList, (x, [1]))
    larger = (4, 3, 5), (15, 5, 1), "float32", 1000
    assert predicted_layouts.learn(predicted_layouts.key_of("aten.sum.dim_IntList", (x, [0]), {}), {0: larger})
    assert predicted(aten.sum.dim_IntList, (x, [0])) == [((4, 3, 5), (15, 5, 1), torch.float32)]
    assert predicted(aten.sum.dim_IntList, (x, [1])) == before


def test_calls_of_a_graph_and_of_a_recording_have_the_same_key() -> None:
    tensor = ir.Tensor("x", 0, (4, 6, 3, 5), (90, 15, 5, 1), "float32")
    graph = ((tensor, (1, 2), 0.5, None, ir.Atom("dtype", "float64")), {"device": ir.Atom("device", "cpu")})
    recording = ((contiguous(), [1, 2], 0.5, None, torch.float64), {"device": torch.device("cpu")})
    assert predicted_layouts.key_of("aten.any.default", *graph) == predicted_layouts.key_of(
        "aten.any.default", *recording
    )
