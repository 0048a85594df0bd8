"""What a program changes between two steps, by every means of Python: the next step is plain PyTorch's, or refused.

Each case reads one thing in `forward` or in the loss, and changes it. The same program runs twice, in plain PyTorch
and through `et.prepare`; after the change both give the same loss, or the step is a UserError. Cases come by class:
where the value stands (`PLACES`), what code runs (`CODE`), what the model is made of (`MODELS`), what moves by itself
(`MOVING`).
"""

from __future__ import annotations

import array
import builtins
import collections
import contextlib
import contextvars
import copy
import ctypes
import datetime
import enum
import functools
import inspect
import itertools
import json
import operator
import os
import pickle
import random
import secrets
import sys
import threading
import time
import types
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.overrides import TorchFunctionMode

import edgetrain as et
from edgetrain.errors import UserError

X = torch.arange(1.0, 7.0).reshape(2, 3)
Reading = tuple[Callable[[Any], Any], Callable[[Any], object]]


class Net(nn.Module):
    """What `read` gives scales the output; `inside` says whether the model or the loss reads it."""

    factor: ClassVar[float] = 1.0

    def __init__(self, read: Callable[[Any], float] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.read = read
        with torch.no_grad():
            for number, p in enumerate(self.parameters()):
                p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape) * (number + 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(F.relu(self.first(x)))
        return y if self.read is None else y * self.read(self)


class Case(NamedTuple):
    model: nn.Module
    loss: Callable[..., Tensor]
    change: Callable[[], object]


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y.square().mean()


def in_the_model(place: Callable[[], Reading]) -> Case:
    read, change = place()
    model = Net(read)
    return Case(model, mean_square, lambda: change(model))


def in_the_loss(place: Callable[[], Reading]) -> Case:
    read, change = place()
    model = Net()

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = net(x)
        scaled: Tensor = y.square().mean() * read(net)
        return scaled

    return Case(model, loss, lambda: change(model))


def agrees(make: Callable[[], Case], *, steps: int = 1, lr: float = 0.01) -> str:
    """Train plainly and through a step, with the change in the middle. "same", or "refused"."""
    plain, ours = [], []
    case = make()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=lr)
    for number in range(steps + 2):
        if number == steps:
            case.change()
        optimizer.zero_grad()
        value = case.loss(case.model, X)
        value.backward()
        optimizer.step()
        plain.append(float(value))
    case = make()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=lr)
    try:
        step = et.prepare(case.model, case.loss, optimizer, (X,), memory_format="preserve")
        for number in range(steps + 2):
            if number == steps:
                case.change()
            ours.append(float(step(X)))
            assert ours == plain[: number + 1], f"a stale step: {ours}, and plain PyTorch gives {plain}"
    except UserError:
        return "refused"
    return "same"


# ---- where a value stands -----------------------------------------------------------------------------------------


class Slots:
    __slots__ = ("__private", "value")

    def __init__(self) -> None:
        self.value, self.__private = 1.0, 1.0

    def both(self) -> float:
        return self.value * self.__private

    def set_private(self) -> None:
        self.__private = 3.0


@dataclass
class Plain:
    value: float = 1.0
    inner: Any = None


class Meta(type):
    level = 1.0


class Magic:
    amount = 1.0

    def __float__(self) -> float:
        return self.amount

    def __len__(self) -> int:
        return 2

    def __getattr__(self, name: str) -> float:
        return self.__dict__["table"][name]  # type: ignore[no-any-return]


class Descriptor:
    def __init__(self) -> None:
        self.value = 1.0

    def __get__(self, _owner: object, _cls: object = None) -> float:
        return self.value


SCALE = 1.0
TABLE = {"a": 1.0}


def fresh(cls: type) -> type:
    """A class of the test's own, so that a change of it ends with the test."""
    return type(cls.__name__, (cls,), {})


def attribute() -> Reading:
    return lambda m: m.__dict__.get("scale", 1.0), lambda m: setattr(m, "scale", 2.0)


def new_attribute() -> Reading:
    return lambda m: getattr(m, "extra", 1.0), lambda m: setattr(m, "extra", 2.0)


def shadowed_class_attribute() -> Reading:
    return lambda m: m.factor, lambda m: setattr(m, "factor", 3.0)


def computed_name() -> Reading:
    names = ["fac" + "tor"]
    return lambda m: getattr(m, names[0]), lambda m: setattr(m, "factor", 3.0)


def changed_class_attribute() -> Reading:
    kept = fresh(Magic)()
    return lambda m: kept.amount, lambda m: setattr(type(kept), "amount", 2.0)


def changed_base_class() -> Reading:
    base = fresh(Magic)
    kept = fresh(base)()
    return lambda m: kept.amount, lambda m: setattr(base, "amount", 2.0)


def deleted_attribute() -> Reading:
    kept = Magic()
    kept.amount = 5.0
    return lambda m: kept.amount, lambda m: delattr(kept, "amount")


def other_class_of_an_object() -> Reading:
    kept, other = fresh(Magic)(), fresh(Magic)
    other.amount = 4.0  # type: ignore[attr-defined]
    return lambda m: kept.amount, lambda m: setattr(kept, "__class__", other)


def other_dict_of_an_object() -> Reading:
    kept = fresh(Magic)()
    kept.amount = 2.0
    return lambda m: kept.amount, lambda m: setattr(kept, "__dict__", {**vars(kept), "amount": 4.0})


def other_dict_of_the_model() -> Reading:
    return lambda m: m.factor, lambda m: setattr(m, "__dict__", {**vars(m), "factor": 3.0})


def other_bases() -> Reading:
    first, second = fresh(Magic), fresh(Magic)
    second.amount = 4.0  # type: ignore[attr-defined]
    kept = fresh(first)()
    return lambda m: kept.amount, lambda m: setattr(type(kept), "__bases__", (second,))


def magic_method() -> Reading:
    kept = fresh(Magic)()
    return lambda m: float(len(kept)), lambda m: setattr(type(kept), "__len__", lambda self: 3)


def by_getattr() -> Reading:
    kept = Magic()
    kept.table = {"deep": 1.0}  # type: ignore[attr-defined]
    return lambda m: kept.deep, lambda m: kept.table.update(deep=2.0)


def class_of_a_class() -> Reading:
    meta = type("OwnMeta", (Meta,), {})
    cls = meta("Own", (), {})
    return lambda m: cls.level, lambda m: setattr(meta, "level", 2.0)


def descriptor() -> Reading:
    held = Descriptor()
    cls = type("Holder", (), {"value": held})
    return lambda m: cls().value, lambda m: setattr(held, "value", 2.0)


def slot() -> Reading:
    kept = Slots()
    return lambda m: kept.both(), lambda m: setattr(kept, "value", 2.0)


def private_slot() -> Reading:
    kept = Slots()
    return lambda m: kept.both(), lambda m: kept.set_private()


def deep_object() -> Reading:
    kept = Plain(inner=Plain(inner=[Plain()]))
    return lambda m: kept.inner.inner[0].value, lambda m: setattr(kept.inner.inner[0], "value", 2.0)


def enum_attribute() -> Reading:
    red: Any = enum.Enum("Colour", "RED").RED  # type: ignore[attr-defined]
    return lambda m: float(getattr(red, "weight", 1.0)), lambda m: setattr(red, "weight", 2.0)


def item(make: Callable[[], Any], read: Callable[[Any], float], change: Callable[[Any], object]) -> Any:
    def place() -> Reading:
        held = make()
        return lambda m: read(held), lambda m: change(held)

    return place


def first(values: Any) -> float:
    return float(next(iter(values)))


def rotate_set(held: set[float]) -> None:
    held.remove(1.0)
    held.add(5.0)


def move_first_to_end(held: dict[str, float]) -> None:
    held["a"] = held.pop("a")


class OwnList(list[float]):
    scale = 1.0


class Shown(list[float]):
    """A list that shows something else than what is in it."""

    def __iter__(self) -> Iterator[float]:
        return (2 * value for value in super().__iter__())

    def __len__(self) -> int:
        return 0


def buffer_of(values: list[float]) -> array.array[float]:
    return array.array("d", values)


CONTAINERS: dict[str, Any] = {
    "list": item(lambda: [1.0, 2.0], lambda v: v[0], lambda v: v.__setitem__(0, 3.0)),
    "list order": item(lambda: [1.0, 2.0], lambda v: v[0], lambda v: v.reverse()),
    "list length": item(lambda: [1.0], sum, lambda v: v.append(1.0)),
    "empty list": item(list, lambda v: 1.0 + len(v), lambda v: v.append(1.0)),
    "attribute of a list": item(lambda: OwnList([1.0]), lambda v: v.scale, lambda v: setattr(v, "scale", 2.0)),
    "list that shows something else": item(lambda: Shown([1.0, 2.0]), sum, lambda v: v.__setitem__(0, 3.0)),
    "nested": item(lambda: {"a": [({"b": [1.0]},)]}, lambda v: v["a"][0][0]["b"][0],
                   lambda v: v["a"][0][0]["b"].__setitem__(0, 2.0)),
    "dict": item(lambda: {"a": 1.0}, lambda v: v["a"], lambda v: v.update(a=2.0)),
    "dict: another key": item(lambda: {"a": 1.0}, lambda v: v.get("b", 1.0), lambda v: v.update(b=2.0)),
    "dict: a key for another": item(lambda: {"a": 1.0}, lambda v: 1.0 + ("b" in v),
                                    lambda v: v.update(b=v.pop("a"))),
    "dict: 1 for True": item(lambda: {1: 1.0}, lambda v: 2.0 if next(iter(v)) is True else 1.0,
                             lambda v: (v.clear(), v.update({True: 1.0}))),
    "dict order": item(lambda: {"a": 1.0, "b": 2.0}, lambda v: first(v.values()), move_first_to_end),
    "ordered dict": item(lambda: collections.OrderedDict(a=1.0, b=2.0), lambda v: first(v.values()),
                         lambda v: v.move_to_end("a")),
    "default dict": item(lambda: collections.defaultdict(float, a=1.0), lambda v: 1.0 + len(v), lambda v: v["b"]),
    "counter": item(lambda: collections.Counter("aab"), lambda v: float(v["a"]), lambda v: v.update("a")),
    "chain map": item(lambda: collections.ChainMap({"a": 1.0}), lambda v: v["a"], lambda v: v.maps[0].update(a=2.0)),
    "set": item(lambda: {1.0}, lambda v: 1.0 + len(v), lambda v: v.add(2.0)),
    "set: as many": item(lambda: {1.0}, sum, rotate_set),
    "deque": item(lambda: collections.deque([1.0, 2.0]), lambda v: v[0], lambda v: v.rotate()),
    "mapping proxy": item(lambda: (d := {"a": 1.0}, types.MappingProxyType(d)), lambda v: v[1]["a"],
                          lambda v: v[0].update(a=2.0)),
    "dict view": item(lambda: (d := {"a": 1.0}, d.values()), lambda v: first(v[1]), lambda v: v[0].update(a=2.0)),
    "namespace": item(lambda: types.SimpleNamespace(a=1.0), lambda v: v.a, lambda v: setattr(v, "a", 2.0)),
    "-0.0": item(lambda: [0.0], lambda v: float(np.copysign(1.0, v[0])), lambda v: v.__setitem__(0, -0.0)),
    "NumPy": item(lambda: np.ones(3), lambda v: float(v[1]), lambda v: v.__setitem__(1, 2.0)),
    "NumPy view": item(lambda: (a := np.ones(9), a[::2]), lambda v: float(v[1][1]), lambda v: v[0].fill(2.0)),
    "NumPy of objects": item(lambda: np.array([[1.0], None], dtype=object), lambda v: v[0][0],
                             lambda v: v[0].__setitem__(0, 2.0)),
    "NumPy scalar": item(lambda: np.array(1.0), float, lambda v: v.fill(2.0)),
    "NumPy record": item(lambda: np.array([(1.0, 2)], dtype="f8,i8")[0], lambda v: float(v[0]),
                         lambda v: v.__setitem__(0, 2.0)),
    "large NumPy": item(lambda: np.ones(1 << 18), lambda v: float(v.sum()) / (1 << 18), lambda v: v.fill(2.0)),
    "array": item(lambda: buffer_of([1.0]), lambda v: v[0], lambda v: v.__setitem__(0, 2.0)),
    "bytearray": item(lambda: bytearray(b"\1"), lambda v: float(v[0]), lambda v: v.__setitem__(0, 2)),
    "memory view": item(lambda: (b := bytearray(b"\1"), memoryview(b)), lambda v: float(v[1][0]),
                        lambda v: v[0].__setitem__(0, 2)),
    "ctypes": item(lambda: ctypes.c_double(1.0), lambda v: v.value, lambda v: setattr(v, "value", 2.0)),
    "ctypes array": item(lambda: (ctypes.c_int * 2)(1, 2), lambda v: float(v[0]), lambda v: v.__setitem__(0, 3)),
    "context variable": item(lambda: contextvars.ContextVar("v", default=1.0), lambda v: v.get(), lambda v: v.set(2.0)),
    "of a thread": item(threading.local, lambda v: getattr(v, "x", 1.0), lambda v: setattr(v, "x", 2.0)),
    "weak reference": item(lambda: (p := Plain(), weakref.ref(p)), lambda v: v[1]().value,
                           lambda v: setattr(v[0], "value", 2.0)),
    "weak dict": item(lambda: (weakref.WeakValueDictionary(), [Plain()]), lambda v: 1.0 + len(v[0]),
                      lambda v: v[0].update(a=v[1][0])),
    "partial": item(lambda: functools.partial(dict, a=1.0), lambda v: v()["a"], lambda v: v.keywords.update(a=2.0)),
    "method of an object": item(lambda: (p := Plain(), p.__eq__), lambda v: v[1].__self__.value,
                                lambda v: setattr(v[0], "value", 2.0)),
    "generator of random numbers": item(lambda: random.Random(1), lambda v: v.getstate()[1][0] % 7 + 1.0,
                                        lambda v: v.seed(5)),
}  # fmt: skip

PLACES: dict[str, Callable[[], Reading]] = {
    name.replace("_", " "): place
    for name, place in {
        **{f.__name__: f for f in (
            attribute, new_attribute, shadowed_class_attribute, computed_name, changed_class_attribute,
            changed_base_class, deleted_attribute, other_class_of_an_object, other_bases,
            other_dict_of_an_object, other_dict_of_the_model, magic_method, by_getattr,
            class_of_a_class, descriptor, slot, private_slot, deep_object, enum_attribute,
        )},
        **CONTAINERS,
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("where", [in_the_model, in_the_loss])
@pytest.mark.parametrize("place", PLACES)
def test_a_value_that_is_changed(place: str, where: Callable[[Callable[[], Reading]], Case]) -> None:
    agrees(lambda: where(PLACES[place]))


# ---- what code runs -----------------------------------------------------------------------------------------------


def helper(value: float = 1.0, *, by: float = 1.0) -> float:
    return value * by


def other_helper(value: float = 3.0, *, by: float = 1.0) -> float:
    return value * by


def double(value: Tensor) -> Tensor:
    return value * 2


def copied(function: Any) -> Any:
    """A function of the test's own, so that a change of it ends with the test."""
    same = types.FunctionType(function.__code__, globals(), function.__name__, function.__defaults__)
    same.__kwdefaults__ = dict(function.__kwdefaults__ or {})
    return same


def of_a_function(change: Callable[[Any], object]) -> Callable[[], Reading]:
    def place() -> Reading:
        own = copied(helper)
        return lambda m: own() + getattr(own, "extra", 0.0), lambda m: change(own)

    return place


def disguised() -> Reading:
    """A function that carries the names of one of torch's, and reads a variable."""
    scale = [1.0]

    @functools.wraps(F.relu)
    def relu(x: Tensor) -> Tensor:
        return F.relu(x) * scale[0]

    return lambda m: float(relu(torch.ones(())).shape == ()) * scale[0], lambda m: scale.append(scale.pop() + 1)


def closure() -> Reading:
    value = 1.0

    def change(_: Any) -> None:
        nonlocal value
        value = 2.0

    return lambda m: value, change


def unset_closure() -> Reading:
    value = 1.0
    del value

    def change(_: Any) -> None:
        nonlocal value
        value = 2.0

    def read(_: Any) -> float:
        try:
            return value
        except NameError:
            return 1.0

    return read, change


def cached() -> Reading:
    scale = {"a": 1.0}

    @functools.lru_cache
    def read() -> float:
        return scale["a"]

    read()
    return lambda m: read(), lambda m: (scale.update(a=2.0), *map(operator.methodcaller("cache_clear"), [read]))


def cached_tensor() -> Reading:
    """What a capture puts into such a cache does not stay there."""
    scale = [1.0]

    @functools.lru_cache(maxsize=4)
    def read() -> Tensor:
        return torch.full((), scale[0])

    def change(_: Any) -> None:
        scale[0] = 2.0
        for cache in (read,):
            cache.cache_clear()
        assert type(read()) is Tensor

    return lambda m: read(), change


def single_dispatch() -> Reading:
    @functools.singledispatch
    def read(_: Any) -> float:
        return 1.0

    return lambda m: read(1), lambda m: read.register(int, lambda _: 2.0)


def attribute_getter() -> Reading:
    kept = Plain()
    read = operator.attrgetter("value")
    return lambda m: read(kept), lambda m: setattr(kept, "value", 2.0)


def static_method() -> Reading:
    cls: Any = type("Own", (), {"read": staticmethod(lambda: 1.0)})
    return lambda m: cls.read(), lambda m: setattr(cls, "read", staticmethod(lambda: 2.0))


def class_method() -> Reading:
    cls: Any = type("Own", (), {"read": classmethod(lambda c: c.value), "value": 1.0})
    return lambda m: cls.read(), lambda m: setattr(cls, "value", 2.0)


def property_replaced() -> Reading:
    cls: Any = type("Own", (), {"read": property(lambda self: 1.0)})
    kept = cls()
    return lambda m: kept.read, lambda m: setattr(cls, "read", property(lambda self: 2.0))


def names_that_decide(of: Callable[[Any], Any], change: Callable[[Any], object]) -> Callable[[], Reading]:
    """What a function and a class are called, and what is written at them."""

    def place() -> Reading:
        def helper(value: float) -> float:
            "one"
            return value

        class Own:
            kept = helper

        return lambda m: 2.0 if "wo" in str(of(Own)) and Own.kept(1.0) else 1.0, lambda m: change(Own)

    return place


NAMES: dict[str, Callable[[], Reading]] = {
    "name of a class": names_that_decide(lambda c: c.__name__, lambda c: setattr(c, "__name__", "Two")),
    "name of an object's class": names_that_decide(
        lambda c: type(c()).__name__, lambda c: setattr(c, "__name__", "Two")
    ),
    "qualified name of a class": names_that_decide(
        lambda c: c.__qualname__, lambda c: setattr(c, "__qualname__", "Two")
    ),
    "doc of a class": names_that_decide(lambda c: c.__doc__, lambda c: setattr(c, "__doc__", "two")),
    "name of a function": names_that_decide(lambda c: c.kept.__name__, lambda c: setattr(c.kept, "__name__", "two")),
    "doc of a function": names_that_decide(lambda c: c.kept.__doc__, lambda c: setattr(c.kept, "__doc__", "two")),
    "qualified name of a function": names_that_decide(
        lambda c: c.kept.__qualname__.rpartition(".")[2], lambda c: setattr(c.kept, "__qualname__", "two")
    ),
    "annotation of a function": names_that_decide(
        lambda c: c.kept.__annotations__, lambda c: c.kept.__annotations__.update(value="two")
    ),
    "annotations of a function": names_that_decide(
        lambda c: c.kept.__annotations__, lambda c: setattr(c.kept, "__annotations__", {"value": "two"})
    ),
    "module of a function": names_that_decide(
        lambda c: c.kept.__module__, lambda c: setattr(c.kept, "__module__", "two")
    ),
}


CODE: dict[str, Callable[[], Reading]] = {
    "defaults": of_a_function(lambda f: setattr(f, "__defaults__", (2.0,))),
    "keyword defaults": of_a_function(lambda f: setattr(f, "__kwdefaults__", {"by": 2.0})),
    "a keyword default": of_a_function(lambda f: f.__kwdefaults__.update(by=2.0)),
    "code": of_a_function(lambda f: setattr(f, "__code__", (lambda value=1.0, *, by=1.0: value + by).__code__)),
    **NAMES,
    "attribute of a function": of_a_function(lambda f: setattr(f, "extra", 1.0)),
    **{f.__name__.replace("_", " "): f for f in (
        disguised, closure, unset_closure, cached, cached_tensor, single_dispatch, attribute_getter, static_method,
        class_method, property_replaced,
    )},
}  # fmt: skip


@pytest.mark.parametrize("where", [in_the_model, in_the_loss])
@pytest.mark.parametrize("place", CODE)
def test_code_that_is_changed(place: str, where: Callable[[Callable[[], Reading]], Case]) -> None:
    agrees(lambda: where(CODE[place]))


@pytest.fixture
def undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What is patched within is patched back between the two runs too."""
    with monkeypatch.context() as patch:
        yield patch


PLAIN_RELU: Any = F.relu
PLAIN_TORCH_RELU: Any = torch.relu
OUTSIDE: dict[str, tuple[Callable[[Any], float], Callable[[pytest.MonkeyPatch], object]]] = {
    "global": (lambda m: SCALE, lambda p: p.setitem(globals(), "SCALE", 2.0)),
    "item of a global": (lambda m: TABLE["a"], lambda p: p.setitem(TABLE, "a", 2.0)),
    "global function": (lambda m: helper(), lambda p: p.setitem(globals(), "helper", other_helper)),
    "builtin": (lambda m: float(abs(-1.0)), lambda p: p.setattr(builtins, "abs", lambda v: 2.0)),
    "global before a builtin": (lambda m: float(round(1.2)), lambda p: p.setitem(globals(), "round", lambda v: 2.0)),
    "by globals()": (lambda m: globals()["".join(["SC", "ALE"])], lambda p: p.setitem(globals(), "SCALE", 2.0)),
    "own module": (lambda m: sys.modules[__name__].SCALE, lambda p: p.setitem(globals(), "SCALE", 2.0)),
    "environment": (lambda m: float(os.environ.get("SCALE", "1")), lambda p: p.setenv("SCALE", "2")),
    "getenv": (lambda m: float(os.getenv("SCALE") or 1), lambda p: p.setenv("SCALE", "2")),
    "arguments": (lambda m: float(len(sys.argv)), lambda p: p.setattr(sys, "argv", [*sys.argv, "more"])),
    "standard library": (lambda m: operator.index(1) * 1.0, lambda p: p.setattr(operator, "index", lambda v: 2)),
    "functional": (lambda m: float(F.relu is PLAIN_RELU), lambda p: p.setattr(F, "relu", double)),
    "torch": (lambda m: float(torch.relu is PLAIN_TORCH_RELU) + 1, lambda p: p.setattr(torch, "relu", double)),
    "used by a layer": (lambda m: 1.0, lambda p: p.setattr(F, "linear", lambda x, w, b: (x @ w.T) * 3 + b)),
    "forward of a class": (lambda m: 1.0, lambda p: p.setattr(nn.Linear, "forward", without_bias)),
    "call of a module": (lambda m: 1.0, lambda p: p.setattr(nn.Module, "_call_impl", halved)),
    "method of tensors": (lambda m: 1.0, lambda p: p.setattr(Tensor, "square", double)),
    "NumPy": (lambda m: float(np.sqrt(1.0)), lambda p: p.setattr(np, "sqrt", lambda v: 2.0)),
    "default type": (lambda m: float(torch.get_default_dtype().itemsize), lambda p: default_double()),
}


def default_double() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    RESTORE.append(functools.partial(torch.set_default_dtype, before))


RESTORE: list[Callable[[], object]] = []
_CALL: Any = nn.Module._call_impl


def without_bias(self: nn.Linear, x: Tensor) -> Tensor:
    return x @ self.weight.T


def halved(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _CALL(self, *args, **kwargs) * 0.5


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_outside_of_the_model(name: str) -> None:
    read, patch = OUTSIDE[name]
    patches: list[pytest.MonkeyPatch] = []

    def undo() -> None:
        while patches:
            patches.pop().undo()
        while RESTORE:
            RESTORE.pop()()

    def make() -> Case:
        undo()
        patches.append(pytest.MonkeyPatch())
        return in_the_model(lambda: (read, lambda m: patch(patches[-1])))

    try:
        agrees(make)
    finally:
        undo()


def test_a_file_that_is_written(tmp_path: Path) -> None:
    file = tmp_path / "scale.txt"

    def place() -> Reading:
        file.write_text("1.0")
        return lambda m: float(file.read_text()), lambda m: file.write_text("2.0")

    for where in (in_the_model, in_the_loss):
        agrees(lambda where=where: where(place))  # type: ignore[misc]


# ---- what the model is made of ------------------------------------------------------------------------------------


def mask(model: Net) -> None:
    prune.l1_unstructured(model.first, "weight", amount=0.5)


def weight_norm_of(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(module)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Scaled(nn.Parameter):
    scale = 3.0


class Third(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))

    def forward(self) -> Any:
        scale: Any = self.scale
        return scale * getattr(scale, "k", 1.0)


def parts(m: Any) -> Any:
    """What the model scales with."""
    return getattr(m.first.weight if "weight" in m.first._parameters else m, "scale", 1.0) * m.third()


def with_a_third(read: Callable[[Any], Any]) -> Any:
    model: Any = Net(read)
    model.third = Third()
    model.second.weight.register_hook(lambda g: g)
    return model


def hook_gradient(gradient: Tensor) -> Tensor:
    return gradient * 2


MODELS: dict[str, Callable[[Any], object]] = {
    "forward hook": lambda m: m.first.register_forward_hook(lambda _m, _a, out: out * 2),
    "forward pre-hook": lambda m: m.first.register_forward_pre_hook(lambda _m, args: (args[0] * 2,)),
    "backward hook": lambda m: m.first.register_full_backward_hook(lambda _m, gi, go: tuple(
        None if g is None else g * 2 for g in gi)),
    "backward pre-hook": lambda m: m.second.register_full_backward_pre_hook(lambda _m, go: tuple(g * 2 for g in go)),
    "hook of a parameter": lambda m: m.first.weight.register_hook(hook_gradient),
    "hook after accumulation": lambda m: m.first.weight.register_post_accumulate_grad_hook(lambda p: None),
    "forward of an instance": lambda m: setattr(
        m.second, "forward", lambda x: m.second.weight.sum() * x[:, :2] + m.second.bias),
    "method": lambda m: setattr(m, "read", lambda _: 2.0),
    "class of a module": lambda m: setattr(m.second, "__class__", type("Other", (nn.Linear,), {
        "forward": lambda self, x: F.linear(x, self.weight * 2, self.bias)})),
    "another module": lambda m: setattr(m, "first", Twice()),
    "module in a module": lambda m: m.first.add_module("more", Twice()),
    "parametrization": lambda m: parametrize.register_parametrization(m.first, "bias", Twice()),
    "pruning": mask,
    "weight norm by a hook": lambda m: weight_norm_of(m.first),
    "spectral norm by a hook": lambda m: nn.utils.spectral_norm(m.first),
    "weight norm": lambda m: nn.utils.parametrizations.weight_norm(m.second),
    "evaluation mode": lambda m: m.eval(),
    "frozen": lambda m: m.first.requires_grad_(False),
    "parameter for another": lambda m: setattr(m.first, "weight", nn.Parameter(torch.eye(3))),
    "data for other data": lambda m: setattr(m.first.weight, "data", torch.eye(3)),
    "shared data": lambda m: setattr(m.first.bias, "data", m.first.weight.data[0]),
    "attribute of a parameter": lambda m: setattr(m.first.weight, "scale", 3.0),
    "bias removed": lambda m: setattr(m.first, "bias", None),
    "other dict of parameters": lambda m: setattr(
        m.first, "_parameters", {"weight": nn.Parameter(torch.eye(3)), "bias": m.first.bias}),
    "other dict of buffers": lambda m: setattr(m.third, "_buffers", {"scale": torch.full((2,), 3.0)}),
    "other dict of buffers, of another type": lambda m: setattr(m.third, "_buffers", {"scale": torch.ones(1)}),
    "other dict of modules": lambda m: setattr(m, "_modules", {**m._modules, "first": Twice()}),
    "other dict of hooks": lambda m: setattr(m.first, "_forward_hooks", {0: lambda _m, _a, out: out * 2}),
    "other hooks of a parameter": lambda m: setattr(
        m.second.weight, "_backward_hooks", collections.OrderedDict({0: hook_gradient})),
    "class of a parameter": lambda m: setattr(m.first.weight, "__class__", Scaled),
    "attribute of a buffer": lambda m: setattr(m.third.scale, "k", 3.0),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_changed(name: str) -> None:
    def make() -> Case:
        torch.manual_seed(3)  # spectral norm draws
        model = with_a_third(parts)
        return Case(model, mean_square, lambda: MODELS[name](model))

    agrees(make)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_has_it_from_the_start(name: str) -> None:
    def make() -> Case:
        torch.manual_seed(3)  # spectral norm draws
        model = with_a_third(parts)
        MODELS[name](model)
        return Case(model, mean_square, lambda: None)

    assert agrees(make) == ("refused" if name == "hook after accumulation" else "same")


def test_hooks_of_all_modules() -> None:
    handles: list[Any] = []

    def make() -> Case:
        while handles:
            handles.pop().remove()
        return Case(
            Net(), mean_square,
            lambda: handles.append(nn.modules.module.register_module_forward_hook(lambda _m, _a, out: out * 1.5)),
        )  # fmt: skip

    try:
        agrees(make)
    finally:
        handles.pop().remove()


def test_parameters_in_another_order_in_the_optimizer() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = et.prepare(model, mean_square, optimizer, (X,))
    twin, theirs = Net(), Net()
    theirs.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for turn in range(3):
        if turn == 1:
            for one in (optimizer, plain):
                one.param_groups[0]["params"].reverse()
        plain.zero_grad()
        mean_square(theirs, X).backward()
        plain.step()
        step(X)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), theirs.parameters(), strict=True))
    assert len(list(twin.parameters())) == 4


def test_groups_of_the_optimizer_that_come_back_in_another_list() -> None:
    """The order is as it was when the first capture was made, and the list and its groups are others."""

    def exchange(optimizer: torch.optim.Optimizer, number: int) -> None:
        first, second = optimizer.param_groups
        if number == 1:
            first["params"], second["params"] = second["params"], first["params"]
        if number == 2:
            optimizer.param_groups = [second, first]

    trained: list[list[Tensor]] = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.3}]
        optimizer = torch.optim.SGD(groups)
        step = et.prepare(model, mean_square, optimizer, (X,), memory_format="preserve") if ours else None
        for number in range(4):
            exchange(optimizer, number)
            optimizer.zero_grad()
            if step is not None:
                step(X)
            else:
                mean_square(model, X).backward()
                optimizer.step()
        trained.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


class Mode(TorchFunctionMode):
    """Around a step: it scales what `relu` gives."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.seen = scale, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.scale if func is F.relu else result


class OtherMode(Mode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + self.scale if func is F.relu else result


AROUND: dict[str, list[Callable[[], Any]]] = {
    "another": [lambda: [Mode(1.0)], lambda: [Mode(3.0)]],
    "of another class": [lambda: [Mode(1.0)], lambda: [OtherMode(1.0)]],
    "in another order": [lambda: [Mode(2.0), OtherMode(2.0)], lambda: [OtherMode(2.0), Mode(2.0)]],
    "one more": [lambda: [Mode(2.0)], lambda: [Mode(2.0), Mode(2.0)]],
    "none": [lambda: [Mode(2.0)], list],
    "and a device": [lambda: [torch.device("cpu"), Mode(2.0)], lambda: [torch.device("cpu"), Mode(3.0)]],
    "the same again": [lambda: [Mode(2.0)], lambda: [Mode(2.0)], lambda: [Mode(2.0)], lambda: [Mode(3.0)]],
}


@pytest.mark.parametrize("name", AROUND)
def test_modes_around_a_step(name: str) -> None:
    losses: list[list[float]] = []
    for ours in (False, True):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step: Any = None
        losses.append([])
        for modes in AROUND[name]:
            with contextlib.ExitStack() as around:
                for mode in modes():
                    around.enter_context(mode)
                if ours:
                    step = step or et.prepare(model, mean_square, optimizer, (X,), memory_format="preserve")
                    losses[-1].append(float(step(X)))
                else:
                    optimizer.zero_grad()
                    value = mean_square(model, X)
                    value.backward()
                    optimizer.step()
                    losses[-1].append(float(value.detach()))
    assert losses[0] == losses[1]


def test_an_attribute_of_a_mode_around_a_step() -> None:
    mode = Mode(1.0)

    def change() -> None:
        mode.scale = 3.0

    def make() -> Case:
        mode.scale = 1.0
        return Case(Net(), mean_square, change)

    with mode:
        assert agrees(make) == "same"


def test_modes_that_are_entered_anew_make_no_captures() -> None:
    model = Net()
    with torch.device("cpu"), Mode(2.0):
        step = et.prepare(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.01), (X,))
    for _ in range(6):
        with torch.device("cpu"), Mode(2.0):
            step(X)
    assert step._captures == 1


# ---- what moves by itself -----------------------------------------------------------------------------------------


def counter(model: Any) -> float:
    model.calls = getattr(model, "calls", 0) + 1
    return float(model.calls)


def counter_with_a_threshold(model: Any) -> float:
    model.calls = model.__dict__.get("calls", 0) + 1
    return 1.0 if model.calls < 50 else 2.0


def counter_in_a_list(model: Any) -> float:
    model.__dict__.setdefault("seen", []).append(1)
    return float(len(model.seen))


COUNT = itertools.count()
ENDLESS = itertools.cycle([1.0, 2.0])
GENERATOR = (float(n) for n in range(10**6))
ITERATOR = iter([1.0] * 10**6)
OWN_RANDOM, OWN_NUMPY, OLD_NUMPY = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)


def seeded(_: Any) -> float:
    torch.manual_seed(1)
    return 1.0


def with_a_fork(_: Any) -> float:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return 1.0


def read_device(_: Any) -> float:
    with Path("/dev/urandom").open("rb") as device:
        return float(len(device.read(1)))


def set_state(_: Any) -> float:
    torch.set_rng_state(torch.Generator().manual_seed(5).get_state())
    return 1.0


MOVING: dict[str, Callable[[Any], float]] = {
    "counter": counter,
    "counter with a threshold": counter_with_a_threshold,
    "counter in a list": counter_in_a_list,
    "count": lambda m: float(next(COUNT)),
    "count, not used": lambda m: float(next(COUNT) >= 0),
    "cycle": lambda m: next(ENDLESS),
    "generator": lambda m: next(GENERATOR),
    "iterator": lambda m: next(ITERATOR),
    "random": lambda m: random.random(),
    "random of its own": lambda m: OWN_RANDOM.random(),
    "random decides": lambda m: 1.0 if random.random() < 2 else 2.0,
    "system's random": lambda m: random.SystemRandom().random(),
    "secrets": lambda m: float(secrets.randbelow(10)),
    "urandom": lambda m: 1.0 + os.urandom(1)[0] // 300,
    "uuid": lambda m: float(uuid.uuid4().int % 7),
    "/dev/urandom": read_device,
    "NumPy": lambda m: float(np.random.rand()),
    "NumPy of its own": lambda m: float(OWN_NUMPY.random()),
    "old NumPy of its own": lambda m: float(OLD_NUMPY.rand()),
    "NumPy's seed": lambda m: float(np.random.seed(1) is None),
    "time": lambda m: time.time() % 7,
    "coarse time": lambda m: float(time.time() > 0),
    "monotonic": lambda m: time.perf_counter() % 7,
    "date": lambda m: float(datetime.datetime.now().year > 0),
    "seed": seeded,
    "seed within a fork": with_a_fork,
    "state of torch's generator": set_state,
}


@pytest.mark.parametrize("where", [in_the_model, in_the_loss])
@pytest.mark.parametrize("name", MOVING)
def test_what_moves_by_itself_is_refused(name: str, where: Callable[[Callable[[], Reading]], Case]) -> None:
    case = where(lambda: (MOVING[name], lambda m: None))
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state(legacy=False))
    own = OWN_RANDOM.getstate(), repr(OWN_NUMPY.bit_generator.state)
    with pytest.raises(UserError):
        et.prepare(case.model, case.loss, torch.optim.SGD(case.model.parameters(), lr=0.1), (X,))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), repr(np.random.get_state(legacy=False))) == before[1:]
    assert (OWN_RANDOM.getstate(), repr(OWN_NUMPY.bit_generator.state)) == own
    assert not hasattr(case.model, "calls")
    assert not hasattr(case.model, "seen")


def test_backward_within_the_loss_is_refused() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = mean_square(model, x)
        value.backward(retain_graph=True)
        return value

    model = Net()
    with pytest.raises(UserError, match=r"backward\(\)"):
        et.prepare(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
    assert all(p.grad is None for p in model.parameters())


def test_a_counter_that_nothing_depends_on_is_allowed_and_restored() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        model.calls += 1
        model.log.append(tuple(x.shape))
        return mean_square(model, x)

    model: Any = Net()
    model.calls, model.log = 3, []
    et.prepare(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
    assert (model.calls, model.log) == (3, [])


# ---- the net below ------------------------------------------------------------------------------------------------


def run_until_refused(step: et.Step) -> None:
    for _ in range(8):
        step(X)


def test_what_no_object_shows_is_met_by_capturing_again() -> None:
    """How deep calls may nest is a variable of the interpreter's C code."""
    before = sys.getrecursionlimit()
    model = Net(lambda m: float(sys.getrecursionlimit()))
    step = et.prepare(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.0), (X,))
    try:
        step(X)
        sys.setrecursionlimit(before + 1)
        with pytest.raises(UserError, match=r"aten\.mul"):
            run_until_refused(step)
        weights = [p.clone() for p in model.parameters()]
        with pytest.raises(UserError):
            step(X)
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    finally:
        sys.setrecursionlimit(before)


def test_a_list_that_a_training_loop_keeps_does_not_make_each_step_a_capture() -> None:
    class Loop:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.number = model, 0
            self.losses: list[float] = []

        def loss(self, model: nn.Module, x: Tensor) -> Tensor:
            return mean_square(model, x)

    loop: Any = Loop(Net())
    step = et.prepare(loop.model, loop.loss, torch.optim.SGD(loop.model.parameters(), lr=0.01), (X,))
    captures = []
    for number in range(12):
        loop.losses.append(float(step(X)))
        loop.number = number
        captures.append(step._captures)
    assert captures[-1] == captures[3]


class Level:
    def __init__(self) -> None:
        self.level = 1.0
        self.kept_losses: list[int] = []


JOINED = "".join(["lev", "el"])
BY_ANY_NAME: dict[str, Callable[[], Callable[[Any], float]]] = {
    "hasattr": lambda: lambda c: 2.0 if hasattr(c, JOINED + "s") else 1.0,
    "attrgetter": lambda: operator.attrgetter(JOINED),
    "map": lambda: lambda c: next(map(getattr, [c], [JOINED])),
    "partial": lambda: lambda c: functools.partial(getattr)(c, JOINED),
    "object.__getattribute__": lambda: lambda c: object.__getattribute__(c, JOINED),
    "getattr_static": lambda: lambda c: inspect.getattr_static(c, JOINED),
    "format": lambda: lambda c: float(("{0." + JOINED + "}").format(c)),
    "__reduce_ex__": lambda: lambda c: c.__reduce_ex__(2)[2][JOINED],
    "pickle": lambda: lambda c: 1.0 + pickle.dumps(c)[-8] % 7 + len(pickle.dumps(c)),
    "copy": lambda: lambda c: copy.copy(c).__dict__[JOINED],
    "json": lambda: lambda c: float(json.dumps(c, default=vars).count("2.0") + 1),
    "getattr": lambda: lambda c: getattr(c, JOINED),
    "vars": lambda: lambda c: vars(c)[JOINED],
}


@pytest.mark.parametrize("name", BY_ANY_NAME)
def test_a_computed_name_after_a_change_that_makes_no_difference(name: str) -> None:
    losses: list[list[float]] = []
    for ours in (False, True):
        held, read = Level(), BY_ANY_NAME[name]()
        model: Any = Net(lambda m, held=held, read=read: read(held))  # type: ignore[misc]
        model.kept_losses = held.kept_losses = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step: Any = et.prepare(model, mean_square, optimizer, (X,), memory_format="preserve") if ours else None
        losses.append([])
        for number in range(5):
            if number == 3:
                held.level = held.levels = 2.0  # type: ignore[attr-defined]
            if not ours:
                optimizer.zero_grad()
                value = mean_square(model, X)
                value.backward()
                optimizer.step()
            losses[-1].append(float(step(X)) if ours else float(value.detach()))
            model.kept_losses.append(number)
    assert losses[0] == losses[1]


class Harmless(nn.Module):
    """A model whose training loop keeps all kinds of things on it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses, self.best, self.outputs = Net(), [0.0], 9.0, {"last": torch.ones(2)}
        self.tracker = types.SimpleNamespace(history=collections.deque([1]), inner=Plain())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y * getattr(self, "factor", 1.0) if hasattr(self, "factor") else y


def test_what_changes_each_step_and_makes_no_difference_is_ignored() -> None:
    model: Any = Harmless()
    step = et.prepare(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.01), (X,))
    captures = []
    for number in range(10):
        loss = step(X)
        model.losses.append(float(loss))
        model.best = min(model.best, number)
        model.outputs["last"] = loss
        model.outputs[f"step {number}"] = [loss]
        model.tracker.history.appendleft(loss)
        model.tracker.inner.more = {"loss": loss}
        captures.append(step._captures)
    assert captures[-1] == captures[1] == 2
    model.factor = 2.0
    before = [p.clone() for p in model.parameters()]
    assert float(step(X)) == float(value_of(model, before))


def value_of(model: nn.Module, parameters: list[Tensor]) -> Tensor:
    with torch.no_grad():
        for p, before in zip(model.parameters(), parameters, strict=True):
            p.copy_(before)
        return mean_square(model, X)
