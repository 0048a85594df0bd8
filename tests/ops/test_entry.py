"""Entries are found by kind, name and in-place form, and say of PyTorch's ops what PyTorch's own schemas say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from edgetrain.graph.ir import Graph, Op, Ref, Storage, Tensor
from edgetrain.ops import Entry, entry_of, register, unregister
from edgetrain.ops.call import overwritable, resolve
from edgetrain.ops.entry import registered

aten = torch.ops.aten
OF_TORCH = sorted(kind.removeprefix("aten.") for kind in registered() if kind.startswith("aten."))


def overloads(name: str) -> Iterator[Any]:
    """Those of PyTorch that the entry of this name stands for, without forms that write into an argument."""
    name, _, overload = name.partition(".")
    packet = getattr(aten, name, None) or getattr(aten, f"{name}_", None)
    assert packet is not None, f"PyTorch has no op {name}"
    found = [getattr(packet, one) for one in packet.overloads() if overload in ("", one)]
    assert found, f"PyTorch has no op {name}.{overload}"
    yield from (one for one in found if not any(argument.is_out for argument in one._schema.arguments))


@pytest.mark.parametrize("name", OF_TORCH)
def test_an_entry_is_of_an_op_that_pytorch_has(name: str) -> None:
    assert list(overloads(name))


def arguments(name: str, say: Callable[[Entry], Any]) -> Iterator[tuple[list[str], Any]]:
    for function in overloads(name):
        value = say(entry_of(str(function)))
        if value is not None:
            yield [argument.name for argument in function._schema.arguments], value


@pytest.mark.parametrize("name", OF_TORCH)
def test_places_of_arguments_are_those_of_the_schema(name: str) -> None:
    for names, state in arguments(name, lambda entry: entry.state):
        assert [names[place] for place in state.arguments] == ["running_mean", "running_var"]
        assert names[state.training] in ("training", "train")
    for names, reduction in arguments(name, lambda entry: entry.along.reduction):
        assert names[reduction] == "reduction"
    for names, labels in arguments(name, lambda entry: entry.along.labels):
        assert [names[place] for place in labels] == ["target", "weight", "ignore_index"]
    for names, places in arguments(name, lambda entry: entry.along.places):
        assert names[places] == "offsets"


def test_what_may_be_overwritten_has_the_same_bits() -> None:
    """Each op of one tensor that is said to be able to, over its argument."""
    checked = 0
    for name in OF_TORCH:
        function = getattr(getattr(aten, name.partition(".")[0], None), "default", None)
        how = entry_of(f"aten.{name}.default").overwrites
        if function is None or how is None or len(function._schema.arguments) != 1:
            continue
        x = torch.linspace(0.1, 0.9, 37)
        over = resolve(how.form.format(name=f"aten.{name}", overload="default"))
        expected = function(x)
        assert torch.equal(over(x), expected)
        assert torch.equal(x, expected), f"{name} did not change its argument"
        checked += 1
    assert checked >= 15


def test_a_sum_may_lie_over_either_of_its_terms_and_a_difference_over_the_first() -> None:
    storages = tuple(Storage(12, "activation") for _ in range(3))
    tensors = tuple(Tensor(name, n, (3,), (1,), "float32") for n, name in enumerate("abc"))

    def over(kind: str) -> tuple[int, ...]:
        op = Op("op", kind, (Ref(0), Ref(1)), (), (2,), "forward")
        return overwritable(Graph(storages, tensors, (op,), {}, ()), op)

    assert over("aten.add.Tensor") == over("aten.mul.Tensor") == (0, 1)
    assert over("aten.sub.Tensor") == over("aten.div.Tensor") == (0,)
    assert over("aten.maximum.default") == ()


def test_the_nearest_entry_is_found() -> None:
    assert entry_of("aten.div.Tensor").along.linear == entry_of("aten.div_.Tensor").along.linear == "quotient"
    assert entry_of("aten.div.Tensor_mode").along.linear == entry_of("aten.div_.Tensor_mode").along.linear == ""
    assert entry_of("aten.no_such_op.default") == Entry()
    assert entry_of("aten.avg_pool3d.default").category == "pooling and reduction"  # by the words of its name
    try:
        register(Entry(raises="never"), "mine.op")
        register(Entry(category="loss"), "mine.op.special")
        assert entry_of("mine.op.default").raises == entry_of("mine.op_.other").raises == "never"
        assert entry_of("mine.op.special").category == "loss"
        assert entry_of("mine.other.default") == Entry()
    finally:
        unregister("mine.op", "mine.op.special")
    assert entry_of("mine.op.default") == Entry()
