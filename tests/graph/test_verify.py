"""Every rule of a legal graph, broken once: `verify` names what is wrong, and finds nothing in a legal one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from edgetrain.errors import InternalError
from edgetrain.graph.capture.training import capture
from edgetrain.graph.ir import BITS, Graph, Op, Quantization, Ref, Source
from edgetrain.graph.verify import broken_rules, verify

Break = Callable[[Graph], Graph]


class Net(nn.Module):
    """A little of everything: a view, a constant, a random op, a buffer that is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.norm(self.linear(x)))
        return y.view(-1) * torch.tensor([2.0])


@cache
def legal() -> Graph:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return capture(model, lambda m, x: m(x).square().mean(), optimizer, (torch.randn(5, 3),), use_cache=False)


# ---- ways to break it -----------------------------------------------------------------------------------------


def at(graph: Graph, is_it: Callable[[Op], bool]) -> int:
    """The first such op."""
    return next(n for n, op in enumerate(graph.ops) if is_it(op))


def kind(word: str) -> Callable[[Op], bool]:
    return lambda op: word in op.kind


def op(graph: Graph, number: int, **changes: Any) -> Graph:
    ops = list(graph.ops)
    ops[number] = replace(ops[number], **changes)
    return replace(graph, ops=tuple(ops))


def tensor(graph: Graph, number: int, **changes: Any) -> Graph:
    tensors = list(graph.tensors)
    tensors[number] = replace(tensors[number], **changes)
    return replace(graph, tensors=tuple(tensors))


def storage(graph: Graph, number: int, **changes: Any) -> Graph:
    storages = list(graph.storages)
    storages[number] = replace(storages[number], **changes)
    return replace(graph, storages=tuple(storages))


def named(graph: Graph, name: str) -> int:
    return next(n for n, t in enumerate(graph.tensors) if t.name == name)


def without(mapping: Any, key: int) -> dict[int, Any]:
    return {k: v for k, v in mapping.items() if k != key}


def swapped(graph: Graph, a: int, b: int) -> Graph:
    ops = list(graph.ops)
    ops[a], ops[b] = ops[b], ops[a]
    return replace(graph, ops=tuple(ops))


def made(graph: Graph, word: str) -> int:
    """The first tensor that the first such op makes."""
    return graph.ops[at(graph, kind(word))].creates[0]


def source_of(graph: Graph, sort: str) -> int:
    return next(t for t, s in graph.sources.items() if s.sort == sort)


def view_that_does_not_share(graph: Graph) -> Graph:
    """The result of the first view gets a storage of its own."""
    view = made_by_view(graph)
    grown = replace(graph, storages=(*graph.storages, graph.storages[graph.tensors[view].storage]))
    return tensor(grown, view, storage=len(graph.storages))


def made_by_view(graph: Graph) -> int:
    forward = at(graph, lambda o: o.view and o.kind.startswith("aten.view") and o.phase == "forward")
    return graph.ops[forward].creates[0]


def result_in_a_storage_already_there(graph: Graph) -> Graph:
    """The mask of the dropout is laid over the result of the batch norm."""
    return tensor(graph, made(graph, "bernoulli"), storage=graph.tensors[made(graph, "native_batch_norm")].storage)


def write_to_what_is_not_read(graph: Graph) -> Graph:
    last_state = graph.tensors[named(graph, "norm.bias.momentum_buffer")].storage
    return op(graph, at(graph, kind("sgd")), writes=(last_state,))


def state_changed_by_the_loss(graph: Graph) -> Graph:
    number = at(graph, kind("mean"))
    state = named(graph, "linear.weight.momentum_buffer")
    reading = (*graph.ops[number].args, Ref(state))
    return op(graph, number, args=reading, writes=(graph.tensors[state].storage,))


def random_backward(graph: Graph) -> Graph:
    return op(graph, at(graph, lambda o: o.phase == "backward"), random=True)


def gradient_of_another_shape(graph: Graph) -> Graph:
    weight, bias = named(graph, "linear.weight"), named(graph, "linear.bias")
    return replace(graph, gradients={**graph.gradients, weight: graph.gradients[bias]})


def gradient_of_another_type(graph: Graph) -> Graph:
    return tensor(graph, graph.gradients[named(graph, "linear.bias")], dtype="int32")


def no_update(graph: Graph) -> Graph:
    return replace(graph, ops=graph.ops[:-1])


def two_updates(graph: Graph) -> Graph:
    return replace(graph, ops=(*graph.ops, replace(graph.ops[-1], name="once_more")))


def output_that_nothing_makes(graph: Graph) -> Graph:
    """A tensor beside the others, in a storage of its own."""
    loss = graph.tensors[graph.loss]
    lonely = replace(loss, name="lonely", storage=len(graph.storages))
    grown = replace(graph, storages=(*graph.storages, graph.storages[loss.storage]), tensors=(*graph.tensors, lonely))
    return replace(grown, outputs=(len(graph.tensors),))


def constant_without_value(graph: Graph) -> Graph:
    return replace(graph, constants={})


def value_without_constant(graph: Graph) -> Graph:
    return replace(graph, constants={**graph.constants, named(graph, "linear.bias"): b"\0" * 16})


def same_source(graph: Graph) -> Graph:
    a, b = source_of(graph, "optimizer"), source_of(graph, "buffer")
    return replace(graph, sources={**graph.sources, b: graph.sources[a]})


def sourced_activation(graph: Graph) -> Graph:
    return replace(graph, sources={**graph.sources, graph.loss: Source("external", "loss")})


def ends_after_storage(graph: Graph) -> Graph:
    weight = named(graph, "linear.weight")
    return tensor(graph, weight, offset=1)


def wider_stride(graph: Graph) -> Graph:
    return tensor(graph, named(graph, "linear.weight"), stride=(4, 1))


def of_integers(graph: Graph, units: Quantization | None, dtype: str = "int8", name: str = "linear.weight") -> Graph:
    return tensor(graph, named(graph, name), dtype=dtype, quantization=units)


def units(scale: float = 0.5, zero: int = 0, count: int = 1, axis: int | None = None) -> Quantization:
    return Quantization((scale,) * count, (zero,) * count, axis)


def roomy(graph: Graph, name: str) -> Graph:
    """The gradient of that parameter has more memory than it needs."""
    return storage(graph, graph.tensors[graph.gradients[named(graph, name)]].storage, n_bytes=1000)


def gradient_of(graph: Graph, name: str, dtype: str, scales: Quantization | None = None) -> Graph:
    return tensor(graph, graph.gradients[named(graph, name)], dtype=dtype, quantization=scales)


BREAKS: dict[str, tuple[Break, str]] = {
    # numbers, names, words
    "role": (lambda g: storage(g, 0, role="scratch"), "storage 0 has role 'scratch'"),
    "negative size": (lambda g: storage(g, 1, n_bytes=-4), "storage 1 has role .* and -4 bytes"),
    "storage out of range": (lambda g: tensor(g, 0, storage=999), r"tensor 0 \(input.0\) lies in storage 999"),
    "storage below zero": (lambda g: tensor(g, 0, storage=-1), r"tensor 0 \(input.0\) lies in storage -1"),
    "dtype": (lambda g: tensor(g, 0, dtype="float31"), r"tensor 0 \(input.0\) has type 'float31'"),
    "stride of another length": (lambda g: tensor(g, 0, stride=(1,)), r"tensor 0 \(input.0\) has type .*\(1,\)"),
    "offset below zero": (lambda g: tensor(g, 0, offset=-1), r"tensor 0 \(input.0\) has a number below zero"),
    "stride below zero": (lambda g: tensor(g, 0, stride=(3, -1)), r"tensor 0 \(input.0\) has a number below zero"),
    "shape below zero": (lambda g: tensor(g, 0, shape=(-5, 3)), r"tensor 0 \(input.0\) has a number below zero"),
    "two ops of one name": (lambda g: op(g, 1, name=g.ops[0].name), "two ops are called "),
    "phase": (lambda g: op(g, 0, phase="sideways"), "has phase 'sideways'"),
    "read out of range": (lambda g: op(g, 0, args=(Ref(999),)), "refers to a tensor or storage that does not exist"),
    "read below zero": (lambda g: op(g, 0, kwargs=(("x", Ref(-1)),)), "refers to a tensor or storage that does"),
    "output out of range": (lambda g: op(g, 0, outputs=(999,)), "refers to a tensor or storage that does not exist"),
    "write out of range": (lambda g: op(g, 0, writes=(999,)), "refers to a tensor or storage that does not exist"),
    "loss out of range": (lambda g: replace(g, outputs=(999,)), "outputs, gradients or constants refer to a tensor"),
    "source out of range": (
        lambda g: replace(g, sources={**g.sources, 999: Source("external", "x")}),
        "sources, outputs, gradients or constants refer to a tensor that does not exist",
    ),
    "gradient out of range": (
        lambda g: replace(g, gradients={**g.gradients, 0: -1}),
        "gradients or constants refer to a tensor that does not exist",
    ),
    "constant out of range": (lambda g: replace(g, constants={999: b""}), "constants refer to a tensor that does"),
    # integers and bits
    "scales of floats": (lambda g: of_integers(g, units(), "float32"), r"linear.weight \(float32\) carries scales"),
    "scales of truth values": (lambda g: of_integers(g, units(), "bool"), r"\(bool\) carries scales, which only"),
    "scales of packed bits": (lambda g: of_integers(g, units(), BITS), r"\(uint1\) carries scales, which only"),
    "scale of zero": (lambda g: of_integers(g, units(0.0)), r"\(int8\) has a scale that is not positive and finite"),
    "scale below zero": (lambda g: of_integers(g, units(-0.5)), "a scale that is not positive and finite"),
    "scale without end": (lambda g: of_integers(g, units(math.inf)), "a scale that is not positive and finite"),
    "scale that is no number": (lambda g: of_integers(g, units(math.nan)), "a scale that is not positive and finite"),
    "zero point above int8": (lambda g: of_integers(g, units(zero=128)), "a zero point outside of -128 to 127"),
    "zero point below int8": (lambda g: of_integers(g, units(zero=-129)), "a zero point outside of -128 to 127"),
    "zero point below uint8": (lambda g: of_integers(g, units(zero=-1), "uint8"), "a zero point outside of 0 to 255"),
    "two scales of a tensor": (lambda g: of_integers(g, units(count=2)), "2 scales and 2 zero points, expected 1 of"),
    "no scale": (lambda g: of_integers(g, units(count=0)), "0 scales and 0 zero points, expected 1 of each"),
    "scales of another axis": (lambda g: of_integers(g, units(count=4, axis=1)), "4 scales and 4 .* expected 3 of"),
    "fewer zero points": (
        lambda g: of_integers(g, Quantization((0.5,) * 4, (0,), 0)), "4 scales and 1 zero points, expected 4 of each"
    ),
    "axis out of range": (lambda g: of_integers(g, units(axis=2)), "has scales along axis 2 of 2"),
    "axis below zero": (lambda g: of_integers(g, units(axis=-1)), "has scales along axis -1 of 2"),
    "bits that begin inside a byte": (
        lambda g: tensor(g, named(g, "linear.weight"), dtype=BITS, offset=4), "packed bits with gaps, or they begin ins"
    ),
    "bits with gaps": (
        lambda g: tensor(g, named(g, "linear.weight"), dtype=BITS, stride=(4, 1)), "packed bits with gaps"
    ),
    "bits shown many times": (
        lambda g: tensor(g, named(g, "linear.weight"), dtype=BITS, stride=(0, 1)), "packed bits with gaps"
    ),
    "bits beyond their storage": (
        lambda g: storage(tensor(g, 0, dtype=BITS), g.tensors[0].storage, n_bytes=1), "ends at byte 2 of a storage of 1"
    ),
    "float gradient of bare integers": (
        lambda g: of_integers(g, None, "int8", "linear.bias"), r"the gradient of linear.bias is float32\[4\], .* int8"
    ),
    "gradient of bare integers for scales": (
        lambda g: gradient_of(of_integers(g, units(), name="linear.bias"), "linear.bias", "int8"),
        r"the gradient of linear.bias is int8\[4\], the parameter int8\[4\] \(scale 0.5, zero point 0\)",
    ),
    "complex gradient for scales": (
        lambda g: gradient_of(roomy(of_integers(g, units(), name="norm.bias"), "norm.bias"), "norm.bias", "complex64"),
        r"the gradient of norm.bias is complex64\[4\], the parameter int8\[4\]",
    ),
    "gradient of lower precision": (
        lambda g: gradient_of(g, "linear.bias", "float16"), r"the gradient of linear.bias is float16\[4\]"
    ),
    # storages
    "offset beyond the storage": (ends_after_storage, "linear.weight ends at byte 52 of a storage of 48"),
    "stride beyond the storage": (wider_stride, "linear.weight ends at byte 60 of a storage of 48"),
    "smaller storage": (lambda g: storage(g, g.tensors[g.loss].storage, n_bytes=3), "ends at byte 4 of a storage of 3"),
    "parameter without source": (
        lambda g: replace(g, sources=without(g.sources, named(g, "linear.bias"))),
        "has role parameter and no source",
    ),
    "activation with source": (sourced_activation, "has role activation and a source"),
    "one source twice": (same_source, "two tensors have the same source"),
    "constant without value": (constant_without_value, "is a constant without a value, or carries a value"),
    "value without constant": (
        lambda g: replace(g, sources={**g.sources, source_of(g, "constant"): Source("external", "x")}),
        "is a constant without a value, or carries a value",
    ),
    "value of a parameter": (value_without_constant, "linear.bias is a constant without a value, or carries a value"),
    "value too short": (
        lambda g: replace(g, constants=dict.fromkeys(g.constants, b"\0\0")), "takes 4 bytes, its value has 2"
    ),
    # order
    "phases out of order": (
        lambda g: replace(g, ops=(g.ops[-1], *g.ops[:-1])), r"\(forward\) stands after an op of phase update"
    ),
    "random op in backward": (random_backward, "draws random numbers in the backward phase"),
    "read before made": (lambda g: swapped(g, 0, 1), r"reads \w+, which no op before it creates"),
    "made twice": (
        lambda g: op(g, at(g, kind("bernoulli")), outputs=(made(g, "native_batch_norm"),)),
        "is created a second time, by bernoulli",
    ),
    "parameter made": (
        lambda g: op(g, 0, outputs=(named(g, "linear.bias"),)), "linear.bias is created a second time, by "
    ),
    "view that does not share": (view_that_does_not_share, "is a view, but .* does not share a storage that it reads"),
    "no view, but shares": (result_in_a_storage_already_there, "is no view, but .* lies in a storage that exists"),
    # writes
    "write to what is not read": (write_to_what_is_not_read, r"sgd_1 changes storage \d+, which it does not read"),
    "state changed before the update": (state_changed_by_the_loss, r"mean_1 \(forward\) changes optimizer state"),
    "view that writes": (
        lambda g: op(
            g,
            at(g, lambda o: o.view),
            writes=(g.tensors[g.ops[at(g, lambda o: o.view)].reads[0]].storage,),
        ),
        "is a view and changes something",
    ),
    "update of another kind": (
        lambda g: op(g, len(g.ops) - 1, kind="aten.add_.Tensor"), "of kind aten.add_.Tensor stands in phase update"
    ),
    "update in the backward pass": (
        lambda g: op(g, at(g, kind("sgd")), phase="backward", writes=()),
        "of kind edgetrain.sgd.update stands in phase backward",
    ),
    # ends
    "loss that nothing makes": (output_that_nothing_makes, "lonely is an output or a gradient, but no op creates it"),
    "gradient of another shape": (
        gradient_of_another_shape, r"the gradient of linear.weight is float32\[4\], the parameter float32\[4,3\]"
    ),
    "gradient of another type": (gradient_of_another_type, r"the gradient of linear.bias is int32\[4\]"),
    "missing update": (no_update, "the updated parameters are not those that have a gradient"),
    "second update": (two_updates, "the updated parameters are not those that have a gradient"),
    "gradient left out": (
        lambda g: replace(g, gradients=without(g.gradients, named(g, "linear.bias"))),
        "the updated parameters are not those that have a gradient",
    ),
}  # fmt: skip


def test_captured_graph_is_legal() -> None:
    verify(legal())


LEGAL: dict[str, Break] = {
    "integers": lambda g: of_integers(g, units(), "int8", "norm.running_mean"),
    "ends of the zero point": lambda g: of_integers(
        of_integers(g, units(zero=-128)), units(zero=255), "uint8", "input.0"
    ),
    "scales by row": lambda g: of_integers(g, units(count=4, axis=0)),
    "scales by column": lambda g: of_integers(g, units(count=3, axis=1), "int16"),
    "float gradient of integers": lambda g: of_integers(g, units()),
    "short float gradient of integers": lambda g: gradient_of(of_integers(g, units()), "linear.weight", "bfloat16"),
    "wider integers as gradient": lambda g: gradient_of(of_integers(g, units()), "linear.weight", "int32", units(1e-6)),
    "gradient of integers for floats": lambda g: gradient_of(g, "linear.weight", "int8", units(count=4, axis=0)),
    "packed bits": lambda g: storage(tensor(g, 0, dtype=BITS), g.tensors[0].storage, n_bytes=2),
    "packed bits, columns first": lambda g: tensor(g, 0, dtype=BITS, stride=(1, 5)),
    "packed bits from a whole byte": lambda g: tensor(g, 0, dtype=BITS, offset=16),
    "no packed bits": lambda g: tensor(g, 0, dtype=BITS, shape=(0, 3), stride=(7, 2)),
}


@pytest.mark.parametrize("change", LEGAL)
def test_graph_of_integers_and_bits_is_legal(change: str) -> None:
    verify(LEGAL[change](legal()))


@given(st.permutations(range(3)), st.lists(st.integers(1, 4), min_size=3, max_size=3), st.data())
def test_bits_are_dense_where_each_lies_at_a_place_of_its_own(
    order: list[int], shape: list[int], data: st.DataObject
) -> None:
    """Held against all places, listed: legal are those that fill the bytes from the first bit on."""
    stride = [0, 0, 0]
    step = 1
    for dim in order:
        stride[dim], step = step, step * shape[dim]
    stride[data.draw(st.integers(0, 2))] += data.draw(st.sampled_from([0, 0, 1, 2]))
    grids = np.indices(shape).reshape(3, -1)
    places = sorted((np.array(stride) @ grids).tolist())
    graph = legal()
    bits = tensor(graph, 0, dtype=BITS, shape=tuple(shape), stride=tuple(stride))
    roomy = storage(bits, graph.tensors[0].storage, n_bytes=1000)
    assert (broken_rules(roomy) == []) == (places == list(range(len(places))))


@pytest.mark.parametrize("broken", BREAKS)
def test_each_broken_rule_is_named(broken: str) -> None:
    """The error names the rule, and asks for a report."""
    change, text = BREAKS[broken]
    with pytest.raises(InternalError) as caught:
        verify(change(legal()))
    assert re.search(text, str(caught.value)), str(caught.value)
    assert "please report it" in str(caught.value)


def test_no_more_than_ten_are_listed() -> None:
    """A graph in pieces does not fill the screen."""
    graph = legal()
    shattered = replace(graph, tensors=tuple(replace(t, dtype="float31") for t in graph.tensors))
    with pytest.raises(InternalError) as caught:
        verify(shattered)
    assert len(graph.tensors) > 10
    assert str(caught.value).count("float31") == 10
