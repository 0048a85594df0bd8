"""Kernels by name: only torch's own are found, and an op run over its own input gives the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import edgetrain as et
from edgetrain.errors import UserError
from edgetrain.graph.ir import Graph, Op, Ref, Source, Storage, Value
from edgetrain.graph.ir import Tensor as GraphTensor
from edgetrain.ops import call


@pytest.mark.parametrize(
    "kind",
    [
        "aten.from_file.default",  # reads a file
        "aten.save.default",  # writes one: a function of TorchScript's that no kernel stands behind
        "aten.warn.default",
        "aten.set_.source_Storage",
        "aten.resize_.default",
        "aten.no_such_op.default",
        "aten.mm.no_such_overload",
        "aten.__class__.mro",
        "aten.mm.__call__",
        "edgetrain.sgd.update",
    ],
)
def test_what_is_no_compute_kernel_is_not_found(kind: str) -> None:
    with pytest.raises(UserError, match="has no op"):
        call.resolve(kind)


@pytest.mark.parametrize("kind", ["aten.mm.default", "aten.reshape.default", "aten.convolution_backward.default"])
def test_kernels_are_found(kind: str) -> None:
    assert str(call.resolve(kind)) == kind


def test_a_graph_file_cannot_write_a_file(tmp_path: Path) -> None:
    """A graph is data that somebody may have changed; a step built from it calls kernels and nothing else."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = et.capture(model, lambda model, x: model(x).sum(), optimizer, (torch.ones(1, 2),))
    written = tmp_path / "written"
    evil = Op("evil", "aten.save.default", (Ref(graph.inputs[0]), str(written)), (), (), "forward")
    changed = Graph(**{**vars(graph), "ops": (evil, *graph.ops)})
    with pytest.raises(UserError, match="has no op"):
        et.compile(changed, et.keep_all(changed), model, optimizer)(torch.ones(1, 2))
    assert not written.exists()


# ---- over its own input ---------------------------------------------------------------------------------------

SHAPE = (3, 5)
UNARY: dict[str, tuple[Any, ...]] = {
    "relu.default": (),
    "hardtanh.default": (0.0, 6.0),
    "sigmoid.default": (),
    "tanh.default": (),
    "silu.default": (),
    "gelu.default": (),
    "elu.default": (1.0, 1.0, 1.0),
    "leaky_relu.default": (0.2,),
    "hardswish.default": (),
    "hardsigmoid.default": (),
    "exp.default": (),
    "log.default": (),
    "neg.default": (),
    "sqrt.default": (),
    "rsqrt.default": (),
    "abs.default": (),
    "square.default": (),
    "clamp.default": (0.2, 0.6),
    "clamp_min.default": (0.3,),
    "clamp_max.default": (0.3,),
    "reciprocal.default": (),
    "sin.default": (),
    "cos.default": (),
    "erf.default": (),
    "add.Scalar": (2.0,),
    "mul.Scalar": (2.0,),
    "div.Scalar": (3.0,),
    "sub.Scalar": (3.0,),
    "masked_fill.Scalar": (torch.eye(3, 5, dtype=torch.bool), 7.0),
}
BINARY: dict[str, tuple[Any, ...]] = {
    "add.Tensor": (),
    "sub.Tensor": (),
    "mul.Tensor": (),
    "div.Tensor": (),
    "threshold_backward.default": (0.5,),
    "hardtanh_backward.default": (0.2, 0.6),
    "sigmoid_backward.default": (),
    "tanh_backward.default": (),
    "gelu_backward.default": (),
    "silu_backward.default": (),
    "leaky_relu_backward.default": (0.1, False),
}


def graph_of(kind: str, args: list[Any], *, kwargs: tuple[tuple[str, Value], ...] = ()) -> Graph:
    """One op over tensors of one shape, each a storage of its own."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    names: list[Value] = []
    for a in args:
        names.append(Ref(next(i for i, t in enumerate(tensors) if t is a)) if isinstance(a, Tensor) else a)
    result = call.resolve(kind)(*args, **dict(kwargs))
    every = [*tensors, result]
    op = Op("op", kind, tuple(names), kwargs, (len(tensors),), "forward")
    return Graph(
        storages=tuple(Storage(t.untyped_storage().nbytes(), "activation") for t in every),
        tensors=tuple(
            GraphTensor(str(i), i, tuple(t.shape), t.stride(), str(t.dtype).removeprefix("torch."))
            for i, t in enumerate(every)
        ),
        ops=(op,),
        sources={i: Source("input", str(i)) for i in range(len(tensors))},
        outputs=(len(tensors),),
    )


def run_over(graph: Graph, target: int, tensors: list[Tensor], args: list[Any]) -> Tensor:
    kind, swap = call.in_place(graph.ops[0], target)
    if swap:
        args = [args[1], args[0], *args[2:]]
    extra = {"grad_input": tensors[target]} if kind.endswith(".grad_input") else {}
    result: Tensor = call.resolve(kind)(*args, **extra)
    assert result.data_ptr() == tensors[target].data_ptr(), "it made a new tensor"
    return result


@pytest.mark.parametrize("kind", [*UNARY, *BINARY])
def test_an_op_over_its_own_input_gives_the_same_bits(kind: str) -> None:
    made = torch.Generator().manual_seed(0)
    tensors = [torch.rand(SHAPE, generator=made, dtype=torch.float64) for _ in range(2 if kind in BINARY else 1)]
    args = [*tensors, *(UNARY | BINARY)[kind]]
    graph = graph_of(f"aten.{kind}", args)
    right = call.resolve(f"aten.{kind}")(*args)
    choices = call.overwritable(graph, graph.ops[0])
    assert choices[:1] == (0,)
    assert choices == ((0, 1) if kind in ("add.Tensor", "mul.Tensor") else (0,))
    for target in choices:
        fresh = [t.clone() for t in tensors]
        assert torch.equal(run_over(graph, target, fresh, [*fresh, *args[len(tensors) :]]), right)


def test_what_may_not_be_overwritten() -> None:
    a, row = torch.rand(SHAPE, dtype=torch.float64), torch.rand(1, 5, dtype=torch.float64)
    refused = {
        "another op": graph_of("aten.cumsum.default", [a, 1]),
        "no form in place": graph_of("aten.pow.Tensor_Scalar", [a, 3]),
        "a result of another shape": graph_of("aten.add.Tensor", [row, a]),
        "a result of another type": graph_of("aten.div.Tensor", [torch.arange(5), torch.arange(5)]),
        "another layout": graph_of("aten.relu.default", [torch.rand(6, 5)[:3]]),
        "a scaled second argument": graph_of("aten.sub.Tensor", [row, a], kwargs=(("alpha", 2.0),)),
    }
    for why, graph in refused.items():
        assert call.overwritable(graph, graph.ops[0]) == (), why
    graph = graph_of("aten.add.Tensor", [row, a])
    wider = graph_of("aten.mul.Tensor", [a, row])
    assert call.overwritable(wider, wider.ops[0]) == (0,), "the narrow argument has no room"
    assert call.overwritable(graph, graph.ops[0]) == (1,), "arguments of a sum may change places"
