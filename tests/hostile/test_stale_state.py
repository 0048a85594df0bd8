"""More places where a value may stand, and more of what moves by itself: what only C code holds or reads.

Cases come by class as in `test_stale_graphs.py`, whose programs run here: in plain PyTorch and through `et.prepare`.
"""

from __future__ import annotations

import abc
import array
import collections
import contextlib
import contextvars
import copy
import cProfile
import csv
import ctypes
import datetime
import email.utils
import enum
import functools
import gc
import heapq
import io
import json
import logging
import mmap
import os
import pickle
import pprint
import queue
import random
import resource
import sqlite3
import string
import struct
import sys
import tempfile
import threading
import time
import timeit
import types
import uuid
import weakref
from collections.abc import Callable
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

import edgetrain as et
from edgetrain.errors import UserError
from edgetrain.graph.capture import observe
from tests.hostile.test_stale_graphs import Case, Net, Plain, Reading, X, agrees, in_the_model, item, mean_square

ELSEWHERE: list[Any] = []  # named by no code that is captured


def only_weakly_held() -> Reading:
    held = [Plain()]
    reference = weakref.ref(held[0])
    return lambda m: 1.0 if reference() is None else 2.0, lambda m: held.clear()


def changed_behind_a_weak_reference() -> Reading:
    ELSEWHERE.append(kept := Plain())
    reference: Any = weakref.ref(kept)
    return lambda m: reference().value, lambda m: setattr(reference(), "value", 2.0)


def registered_class() -> Reading:
    class Abstract(abc.ABC):  # noqa: B024
        pass

    kept = Plain()
    return lambda m: 2.0 if isinstance(kept, Abstract) else 1.0, lambda m: Abstract.register(Plain)


def method_by_type() -> Reading:
    class Dispatching:
        @functools.singledispatchmethod
        def value(self, _: Any) -> float:
            return 1.0

    kept, method = Dispatching(), vars(Dispatching)["value"]
    return lambda m: kept.value(1), lambda m: method.register(int, lambda self, _: 2.0)


def imported_module_replaced() -> Reading:
    def module(value: float) -> Any:
        made: Any = types.ModuleType("replaced_module")
        made.VALUE = value
        return made

    sys.modules["replaced_module"] = module(1.0)

    def read(_: Any) -> float:
        import replaced_module  # type: ignore[import-not-found]

        return float(replaced_module.VALUE)

    return read, lambda m: sys.modules.update(replaced_module=module(2.0))


def mapped() -> Any:
    memory = mmap.mmap(-1, 8)
    memory[0] = 1
    return memory


def read_all(stream: Any) -> float:
    value = float(stream.read())
    stream.seek(0)
    return value


def rewrite(stream: Any, content: Any) -> None:
    stream.seek(0)
    stream.write(content)
    stream.seek(0)


def filled_queue(length: int) -> Any:
    made: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(length):
        made.put(number)
    return made


def kept_by_a_cache() -> Any:
    """The one object of its kind: what a capture cleared would be made anew."""
    the_one = functools.lru_cache(None)(Plain)
    the_one().value = 5.0
    return the_one


def database() -> Reading:
    file = Path(tempfile.mkdtemp()) / "data"
    ours = sqlite3.connect(file)
    ours.executescript("create table t (v); insert into t values (1.0)")

    def read(_: Any) -> float:
        with sqlite3.connect(file) as theirs:
            return float(theirs.execute("select v from t").fetchone()[0])

    return read, lambda m: ours.executescript("update t set v = 2.0")


def open_file() -> Reading:
    file = Path(tempfile.mkdtemp()) / "scale"
    file.write_text("1.0")
    held = file.open()
    return lambda m: read_all(held), lambda m: file.write_text("2.0")


class Lazy:
    """A proxy whose object is not there yet: all that it is asked raises."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"{name}: nothing is there yet")


class OwnList(list[float]):
    def __iter__(self) -> Any:
        raise ValueError("not to be gone through")


LAZY = Lazy()


def beside_a_proxy() -> Reading:
    held: dict[str, Any] = {"k": 1.0, "proxy": LAZY, "list": OwnList([1.0])}
    return lambda m: held["k"] if LAZY is held["proxy"] else 0.0, lambda m: held.update(k=2.0)


def answers_all_by_itself() -> Reading:
    class Kind:
        pass

    held: Any = Kind()
    held.k = 1.0
    return lambda m: held.k, lambda m: setattr(Kind, "__getattribute__", lambda *_: 2.0)


class ByItems(dict[str, Any]):
    """As configurations are: what is no item is a KeyError."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class ListByItems(list[Any]):
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class SlotsByItems:
    __slots__ = ("items", "unset")

    def __init__(self, **items: Any) -> None:
        self.items = items

    def __getattr__(self, name: str) -> Any:
        return self.items[name]


class AllByItems:
    """Not even `__dict__` and `__class__` are those of the object."""

    def __init__(self, **items: Any) -> None:
        object.__setattr__(self, "items", items)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "items")[name]

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "items")[name] = value


def slot_that_is_set_late() -> Reading:
    """A path keeps its text in a slot once it was asked for it."""
    file = Path(tempfile.mkdtemp()) / "file"
    return lambda m: 2.0 if file.is_file() else 1.0, lambda m: file.touch()


def mocked() -> Reading:
    held = mock.MagicMock()
    held.k = 1.0
    return lambda m: held.k, lambda m: setattr(held, "k", 2.0)


def in_a_context_variable() -> Any:
    variable: Any = contextvars.ContextVar("variable")
    variable.set([1.0])
    return variable


PLACES: dict[str, Any] = {
    "flags of an array": item(lambda: np.ones(3), lambda v: 1.0 + v.flags.writeable, lambda v: v.setflags(write=False)),
    "strides": item(lambda: [np.ones((2, 3))], lambda v: 1.0 + v[0].flags.c_contiguous,
                    lambda v: v.__setitem__(0, np.asfortranarray(v[0]))),
    "attribute of an array": item(lambda: np.ones(2).view(type("Own", (np.ndarray,), {})),
                                  lambda v: getattr(v, "k", 1.0), lambda v: setattr(v, "k", 2.0)),
    "length of a deque": item(lambda: {"d": collections.deque([1.0], maxlen=2)}, lambda v: v["d"].maxlen,
                              lambda v: v.update(d=collections.deque([1.0], maxlen=3))),
    "factory": item(lambda: collections.defaultdict(lambda: 1.0), lambda v: v.default_factory(),
                    lambda v: setattr(v, "default_factory", lambda: 2.0)),
    "pointer": item(lambda: ctypes.pointer(ctypes.c_double(1.0)), lambda v: v[0], lambda v: v.__setitem__(0, 2.0)),
    "object of ctypes": item(lambda: ctypes.py_object([1.0]), lambda v: v.value[0],
                             lambda v: v.value.__setitem__(0, 2.0)),
    "in a context variable": item(in_a_context_variable, lambda v: v.get()[0], lambda v: v.get().__setitem__(0, 2.0)),
    "arguments of an exception": item(lambda: ValueError(1.0), lambda v: v.args[0],
                                      lambda v: setattr(v, "args", (2.0,))),
    "state of a partial": item(lambda: functools.partial(lambda a: a, 1.0), lambda v: v(),
                               lambda v: v.__setstate__((v.func, (2.0,), {}, {}))),
    "mapped memory": item(mapped, lambda v: float(v[0]), lambda v: v.__setitem__(0, 2)),
    "view of mapped memory": item(lambda: memoryview(mapped()), lambda v: float(v[0]), lambda v: v.__setitem__(0, 2)),
    "text in memory": item(lambda: io.StringIO("1.0"), lambda v: float(v.getvalue()), lambda v: rewrite(v, "2.0")),
    "bytes in memory": item(lambda: io.BytesIO(b"1.0"), read_all, lambda v: rewrite(v, b"2.0")),
    "queue of C": item(lambda: filled_queue(1), lambda v: float(v.qsize()), lambda v: v.put(1)),
    "object kept by a cache": item(kept_by_a_cache, lambda v: v().value, lambda v: setattr(v(), "value", 2.0)),
    "number in a long list": item(lambda: [1.0] * 2000, lambda v: v[1500], lambda v: v.__setitem__(1500, 2.0)),
    "object in a long list": item(lambda: [*range(2000), Plain()], lambda v: v[-1].value,
                                  lambda v: setattr(v[-1], "value", 2.0)),
    "kind of a number in a long list": item(lambda: [0] * 2000, lambda v: 1.0 + isinstance(v[1], bool),
                                            lambda v: v.__setitem__(1, False)),
    "entry of a long dict": item(lambda: {str(n): 1.0 for n in range(2000)}, lambda v: v["7"],
                                 lambda v: v.update({"7": 2.0})),
    "order of a long dict": item(lambda: dict.fromkeys(range(2000), 1.0), lambda v: 1.0 + (next(iter(v)) == 1),
                                 lambda v: v.__setitem__(0, v.pop(0))),
    "long set": item(lambda: {*range(2000)}, lambda v: 1.0 + (7 not in v), lambda v: (v.remove(7), v.add(-7))),
    "long deque": item(lambda: collections.deque([1.0] * 2000), lambda v: v[5], lambda v: v.__setitem__(5, 2.0)),
    "many bytes": item(lambda: bytearray(b"\1") * 3_000_000, lambda v: float(v[0]), lambda v: v.__setitem__(0, 2)),
    "array of many bytes": item(lambda: array.array("d", [1.0]) * 500_000, lambda v: v[0],
                                lambda v: v.__setitem__(0, 2.0)),
    "items as attributes": item(lambda: ByItems(k=1.0), lambda v: v.k, lambda v: setattr(v, "k", 2.0)),
    "items as attributes, within": item(lambda: ByItems(a=ByItems(k=1.0)), lambda v: v.a.k,
                                        lambda v: setattr(v.a, "k", 2.0)),
    "list that refuses attributes": item(lambda: ListByItems([1.0]), lambda v: v[0], lambda v: v.__setitem__(0, 2.0)),
    "slot that refuses attributes": item(lambda: SlotsByItems(k=1.0), lambda v: v.k,
                                         lambda v: v.items.__setitem__("k", 2.0)),
    "items as all attributes": item(lambda: AllByItems(k=1.0), lambda v: v.k, lambda v: setattr(v, "k", 2.0)),
    "database": database,
    "open file": open_file,
    **{f.__name__.replace("_", " "): f for f in (
        only_weakly_held, changed_behind_a_weak_reference, registered_class, method_by_type, imported_module_replaced,
        beside_a_proxy, answers_all_by_itself, slot_that_is_set_late, mocked,
    )},
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_value_that_is_changed(place: str) -> None:
    assert agrees(lambda: in_the_model(PLACES[place])) == "same"


@pytest.mark.parametrize("name", ["square", "__mul__", "mean"])
def test_a_method_of_tensors(name: str) -> None:
    patches: list[pytest.MonkeyPatch] = []

    def make() -> Case:
        while patches:
            patches.pop().undo()
        patches.append(pytest.MonkeyPatch())
        double: Any = lambda x, *others: x + x  # noqa: E731
        case = in_the_model(lambda: (lambda m: 1.5, lambda m: None))

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            return mean_square(model, x).sum()

        return Case(case.model, loss, lambda: patches[-1].setattr(Tensor, name, double))

    try:
        agrees(make)
    finally:
        patches.pop().undo()


def test_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("one", "1.0"), ("two", "2.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scale.txt").write_text(value)

    def place() -> Reading:
        monkeypatch.chdir(tmp_path / "one")
        return lambda m: float(Path("scale.txt").read_text()), lambda m: monkeypatch.chdir(tmp_path / "two")

    assert agrees(lambda: in_the_model(place)) == "same"


# ---- what moves by itself -----------------------------------------------------------------------------------------

RATES = [1.0] * 60 + [2.0] * 60
Phase = enum.Enum("Phase", "A B C D")


def calls(model: Any) -> int:
    model.calls = getattr(model, "calls", 0) + 1
    return int(model.calls)


def grown(model: Any, kind: type) -> Any:
    container = model.__dict__.setdefault("seen", kind())
    (container.append if kind is not set else container.add)(len(container) if kind is set else 1)
    return container


def rotated(model: Any) -> float:
    values = model.__dict__.setdefault("values", [1.0] * 50 + [2.0])
    values.append(values.pop(0))
    return float(values[0])


def phase(model: Any) -> float:
    after = {Phase.A: Phase.B, Phase.B: Phase.C, Phase.C: Phase.D, Phase.D: Phase.A}
    model.phase = after[model.__dict__.get("phase", Phase.A)]
    return 2.0 if model.phase is Phase.D else 1.0


def counted_by_numpy(model: Any) -> float:
    model.__dict__.setdefault("array", np.zeros(1))[0] += 1
    return 1.0 if model.array[0] < 50 else 2.0


def text(model: Any) -> float:
    model.text = model.__dict__.get("text", "") + "x"
    return 1.0 if len(model.text) < 50 else 2.0


def after(count: Any) -> float:
    return 1.0 if count < 50 else 2.0


def replaced(name: str, first: Any, more: Callable[[Any], Any], size: Callable[[Any], Any]) -> Callable[[Any], float]:
    """An attribute that is another value each time."""

    def read(model: Any) -> float:
        setattr(model, name, more(model.__dict__.get(name, first)))
        return after(size(getattr(model, name)))

    return read


class Pair(NamedTuple):
    number: int = 0


def counted_in(make: Callable[[], Any]) -> Callable[[Any], float]:
    def read(model: Any) -> float:
        counts = model.__dict__.setdefault("counts", make())
        counts["n"] = counts.get("n", 0) + 1
        return after(counts["n"])

    return read


def attribute_of_a_function(_: Any) -> float:
    attribute_of_a_function.n = getattr(attribute_of_a_function, "n", 0) + 1  # type: ignore[attr-defined]
    return after(attribute_of_a_function.n)  # type: ignore[attr-defined]


def default(_: Any, seen: list[int] = []) -> float:  # noqa: B006
    seen.append(1)
    return after(len(seen))


def defaults(_: Any, count: int = 0) -> float:
    defaults.__defaults__ = (count + 1,)
    return after(count)


PARTIAL: Any = functools.partial(after, count=0)
QUEUE, MEMORY, HEAP = filled_queue(100), mapped(), list(range(100))


def of_a_partial(_: Any) -> float:
    PARTIAL.keywords["count"] += 1
    return float(PARTIAL())


def memory(_: Any) -> float:
    MEMORY[0] += 1
    return after(MEMORY[0])


def in_itself(model: Any) -> float:
    """Such a list has no end for who walks through it."""
    values = model.__dict__.setdefault("values", [])
    values.append(values)
    return after(len(values))


COUNT_FILE = Path(tempfile.mkdtemp()) / "count"


def counted_in_a_file(_: Any) -> float:
    count = int(COUNT_FILE.read_text()) if COUNT_FILE.exists() else 0
    COUNT_FILE.write_text(str(count + 1))
    return after(count)


def environment(_: Any) -> float:
    os.environ["CALLS"] = str(int(os.environ.get("CALLS", "0")) + 1)
    return RATES[int(os.environ["CALLS"])]


def put_back_after(get: Callable[[], Any], put: Callable[[Any], object], draw: Callable[[], float]) -> Any:
    """Draws a number and puts the state of the generator back, so that nothing has moved."""

    def read(_: Any) -> float:
        state = get()
        value = draw()
        put(state)
        return 1.0 + value

    return read


def extended(model: Any, container: Any) -> Any:
    container = model.__dict__.setdefault("seen", container)
    if hasattr(container, "append"):
        container.append(1)
    else:
        container[len(container)] = 1
    return container


MOVING: dict[str, Callable[[Any], float]] = {
    "index": lambda m: RATES[calls(m)],
    "slice": lambda m: 1.0 + len(RATES[60 : calls(m)]),
    "range": lambda m: 1.0 + len(range(60, calls(m))),
    "number of a step in a product": lambda m: 1.0 + 0.0 * float(0.1 * calls(m) > 6),
    "length of a list": lambda m: 1.0 if len(grown(m, list)) < 50 else 2.0,
    "length of a deque": lambda m: 1.0 if len(grown(m, collections.deque)) < 50 else 2.0,
    "length of a set": lambda m: 1.0 if len(grown(m, set)) < 50 else 2.0,
    "rotated": rotated,
    "phase": phase,
    "NumPy": counted_by_numpy,
    "text": text,
    "environment": environment,
    "a number in a Counter": counted_in(collections.Counter),
    "a number in a defaultdict": counted_in(lambda: collections.defaultdict(int)),
    "length of an OrderedDict": lambda m: after(len(extended(m, collections.OrderedDict()))),
    "length of a UserList": lambda m: after(len(extended(m, collections.UserList()))),
    "Decimal": replaced("d", Decimal(0), lambda v: v + 1, lambda v: v),
    "Fraction": replaced("d", Fraction(0), lambda v: v + 1, lambda v: v),
    "complex": replaced("d", 0j, lambda v: v + 1, lambda v: v.real),
    "bytes": replaced("d", b"", lambda v: v + b"x", len),
    "tuple": replaced("d", (), lambda v: (*v, 1), len),
    "frozen set": replaced("d", frozenset(), lambda v: v | {len(v)}, len),
    "a range for another": replaced("d", range(0), lambda v: range(len(v) + 1), len),
    "date": replaced("d", date(2020, 1, 1), lambda v: v + timedelta(1), lambda v: v.toordinal() - 737425),
    "named tuple": replaced("d", Pair(), lambda v: v._replace(number=v.number + 1), lambda v: v.number),
    "an object for another": replaced("d", Plain(0), lambda v: Plain(v.value + 1), lambda v: v.value),
    "a list for another": replaced("d", [0], lambda v: [v[0] + 1], lambda v: v[0]),
    "queue of C": lambda m: after(QUEUE.get()),
    "heap": lambda m: after(heapq.heappop(HEAP)),
    **{
        f.__name__.replace("_", " "): f
        for f in (
            attribute_of_a_function,
            default,
            defaults,
            of_a_partial,
            memory,
            in_itself,
            counted_in_a_file,
        )
    },
    "usage": lambda m: 1.0 + 0 * resource.getrusage(resource.RUSAGE_SELF).ru_utime,
    "clock of NumPy": lambda m: 1.0 + 0 * int(np.datetime64("now").astype(int)),
    "uuid with the time": lambda m: 1.0 + 0 * uuid.uuid1().time,
    "random, put back": put_back_after(random.getstate, random.setstate, random.random),
    "NumPy, put back": put_back_after(np.random.get_state, np.random.set_state, np.random.rand),
    "torch's seed": lambda m: 1.0 + 0 * torch.initial_seed(),
    "seed of a generator": lambda m: 1.0 + 0 * torch.default_generator.initial_seed(),
    "generator without a seed": lambda m: 1.0 if random.Random().random() < 2 else 2.0,
}


def with_a_log(show: Callable[[Any, Any], object]) -> Callable[[Any], float]:
    """What counts is shown, by code that may take nothing but a number, and then decides."""

    def read(model: Any) -> float:
        model.calls = getattr(model, "calls", 0) + 1
        show(model, model.calls)
        return after(model.calls)

    return read


class OwnEncoder(json.JSONEncoder):
    def default(self, o: Any) -> Any:
        return o.tolist() if isinstance(o, np.ndarray) else super().default(o)


def no_number_but_an_int(value: Any) -> None:
    assert type(value) is int


def or_nothing(value: Any) -> None:
    with contextlib.suppress(TypeError):
        datetime.timedelta(value)


SHOWS: dict[str, Callable[[Any, Any], object]] = {
    "json": lambda m, n: json.dumps({"step": n, "more": [n, {"k": n}]}),
    "json of a stats dict": lambda m, n: json.dumps(m.__dict__.setdefault("stats", {}) | {"n": n}),
    "json of an attribute's dict": lambda m, n: (m.__dict__.setdefault("stats", {"n": 0}).update(n=n),
                                                 json.dumps(m.stats)),
    "json of a list": lambda m, n: (m.__dict__.setdefault("log", []).append(n), json.dumps(m.log, indent=1)),
    "json by an own encoder": lambda m, n: json.dumps([n], cls=OwnEncoder),
    "json to a file": lambda m, n: json.dump(n, io.StringIO()),
    "pickle": lambda m, n: pickle.dumps({"n": n}),
    "pickle of a list": lambda m, n: (m.__dict__.setdefault("log", []).append(n), pickle.dumps(m.log)),
    "yaml": lambda m, n: yaml.safe_dump({"n": n}),
    "yaml, of any object": lambda m, n: yaml.dump([n]),
    "pprint": lambda m, n: pprint.pformat({"n": n}),
    "csv": lambda m, n: csv.writer(io.StringIO()).writerow([n, f"{n:03d}"]),
    "format": lambda m, n: (f"{n:>5d} {n!r}", "{:d} {}".format(n, n), "%d of %s" % (n, n), str(n)),  # noqa: UP031,UP032
    "template": lambda m, n: string.Template("step $n").substitute(n=n),
    "a copy": lambda m, n: copy.deepcopy({"n": n}),
    "log": lambda m, n: logging.getLogger("of a test").error("%d %s", n, n),
}  # fmt: skip
TAKES_NUMBERS_ONLY: dict[str, Callable[[Any, Any], object]] = {
    "assert": lambda m, n: no_number_but_an_int(n),
    "type": lambda m, n: {int: 1}[type(n)],
    "a date": lambda m, n: datetime.timedelta(n),
    "a date, or nothing": lambda m, n: or_nothing(n),
    "a struct": lambda m, n: struct.pack("q", n),
    "a tensor": lambda m, n: torch.zeros(2, dtype=torch.int64).fill_(n),
}


@pytest.mark.parametrize("name", [*SHOWS, *TAKES_NUMBERS_ONLY])
def test_a_counter_that_is_shown_and_decides_is_refused(name: str) -> None:
    model = Net(with_a_log({**SHOWS, **TAKES_NUMBERS_ONLY}[name]))
    with pytest.raises(UserError, match=r"calls|not the same"):
        et.prepare(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
    assert not hasattr(model, "calls")


@pytest.mark.parametrize("name", SHOWS)
def test_a_counter_that_is_only_shown_is_allowed(name: str) -> None:
    model = Net(lambda m: shown_only(m, SHOWS[name]))
    step = et.prepare(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
    step(X)
    assert not hasattr(model, "calls")


def shown_only(model: Any, show: Callable[[Any, Any], object]) -> float:
    model.calls = getattr(model, "calls", 0) + 1
    show(model, model.calls)
    return 1.0


def settles_and_shows(model: Any) -> float:
    model.kind = 7
    no_number_but_an_int(model.kind)
    return shown_only(model, SHOWS["json"])


def test_what_refuses_one_number_leaves_the_others_watched() -> None:
    def read(model: Any) -> float:
        model.kind = type(model.__dict__.get("kind", 1))(7)  # settles
        no_number_but_an_int(model.kind)
        model.calls = getattr(model, "calls", 0) + 1
        return after(model.calls)

    model = Net(read)
    with pytest.raises(UserError, match=r"decides by model\.calls"):
        et.prepare(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
    model = Net(settles_and_shows)
    et.prepare(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), (X,))(X)


def on_a_tensor(name: str) -> Callable[[Any], float]:
    def read(model: Any) -> float:
        tensor = model.get_parameter("first.weight") if name == "parameter" else TENSORS[name]
        tensor.calls = getattr(tensor, "calls", 0) + 1
        return after(tensor.calls)

    return read


TENSORS: dict[str, Any] = {"tensor": torch.ones(2), "nothing": torch.ones(0)}
MOVING |= {f"attribute of a {name}": on_a_tensor(name) for name in ("parameter", *TENSORS)}


@pytest.mark.parametrize("name", ["parameter", *TENSORS])
def test_an_attribute_of_a_tensor_is_restored(name: str) -> None:
    model = Net(on_a_tensor(name))
    with pytest.raises(UserError):
        et.prepare(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
    assert not hasattr(model.first.weight, "calls")
    assert not any(vars(tensor) for tensor in TENSORS.values())


@pytest.mark.parametrize("name", MOVING)
def test_what_moves_by_itself_is_refused(name: str) -> None:
    case = in_the_model(lambda: (MOVING[name], lambda m: None))
    there = set(vars(case.model))
    with pytest.raises(UserError):
        et.prepare(case.model, case.loss, torch.optim.SGD(case.model.parameters(), lr=0.1), (X,))
    assert set(vars(case.model)) == there
    assert "CALLS" not in os.environ


def settles(model: Any) -> float:
    if not hasattr(model, "built"):
        model.built, model.sizes = 1, []
    if not model.sizes:
        model.sizes.append(3)
    model.largest = max(getattr(model, "largest", 0), 6)
    return float(model.built * len(model.sizes))


def shows(model: Any) -> float:
    model.calls = getattr(model, "calls", 0) + 1
    model.__dict__.setdefault("log", []).append(f"step {model.calls}, " + "%d" % model.calls)  # noqa: UP031
    model.average = 0.9 * getattr(model, "average", 0.0) + 0.5
    return 1.0


@pytest.mark.parametrize("read", [settles, shows])
def test_what_settles_or_is_only_shown_is_allowed(read: Callable[[Any], float]) -> None:
    model = Net(read)
    there = set(vars(model))
    et.prepare(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
    assert set(vars(model)) == there


class Garbage:
    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.time()


def test_what_finalizers_of_garbage_do_is_not_of_the_step() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        gc.collect()
        return mean_square(model, x)

    model = Net()
    enabled = gc.isenabled()
    gc.disable()
    try:
        Garbage()
        et.prepare(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
    finally:
        if enabled:
            gc.enable()


COLLECTIONS = [0]


def note_collection(phase: str, _info: object) -> None:
    COLLECTIONS[0] += 1


def test_callbacks_of_the_garbage_collector_are_not_of_the_step() -> None:
    """Test frameworks and monitors have such; what they count is no part of the model or the loss."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        gc.collect()
        return mean_square(model, x)

    gc.callbacks.append(note_collection)
    try:
        model = Net()
        step = et.prepare(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
        compiled = step.compiled(X)
        for _ in range(3):
            gc.collect()
            step(X)
        assert COLLECTIONS[0] > 6
        assert step.compiled(X) is compiled
    finally:
        gc.callbacks.remove(note_collection)


def test_a_parameter_that_an_optimizer_holds_twice_is_refused() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = et.prepare(model, mean_square, optimizer, (X,))
    optimizer.param_groups[0]["params"].append(model.first.weight)
    with pytest.raises(UserError, match="twice"):
        step(X)


def test_a_loss_that_changes_the_optimizer_is_refused() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        optimizer.param_groups[0]["lr"] *= 0.9
        return mean_square(net, x)

    with pytest.raises(UserError, match="optimizer"):
        et.prepare(model, loss, optimizer, (X,))
    assert optimizer.param_groups[0]["lr"] == 0.1


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("of a test", default=1.0)
UNSET: contextvars.ContextVar[float] = contextvars.ContextVar("without a value")


class Other(nn.Linear):
    pass


def meddle(model: Any, held: dict[str, Any]) -> float:
    """Changes what is there to be changed, and fails."""
    VARIABLE.set(2.0)
    UNSET.set(2.0)
    model.first.__class__ = Other
    model.second.weight.register_hook(lambda g: g)
    model.register_buffer("more", None, persistent=False)
    held["generator"].manual_seed(3)
    held["array"] += 1
    held["array"].setflags(write=False)
    held["default"].__defaults__ = (2,)
    held["partial"].keywords["a"] = 2
    held["list"].append(1)
    os.chdir("/")
    raise ValueError("in the middle")


def test_what_a_failing_step_has_changed_is_restored() -> None:
    held: dict[str, Any] = {
        "generator": torch.Generator().manual_seed(1), "array": np.ones(3), "default": lambda a=1: a,
        "partial": functools.partial(dict, a=1), "list": [],
    }  # fmt: skip
    model = Net(lambda m: meddle(m, held))
    state, folder, there = held["generator"].get_state(), Path.cwd(), {**vars(model)}
    with pytest.raises(UserError, match="seeds a generator"):
        et.prepare(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
    assert (VARIABLE.get(), UNSET.get(None)) == (1.0, None)
    assert type(model.first) is nn.Linear
    assert not model.second.weight._backward_hooks
    assert vars(model) == there
    assert "more" not in model._non_persistent_buffers_set
    assert torch.equal(held["generator"].get_state(), state)
    assert held["array"].flags.writeable
    assert held["array"].tolist() == [1.0, 1.0, 1.0]
    assert (held["default"](), held["partial"](), held["list"]) == (1, {"a": 1}, [])
    assert Path.cwd() == folder


# ---- beside a profiler, and by the code of packages -----------------------------------------------------------------


class Counting:
    calls = 0

    def __call__(self, *_: Any) -> None:
        Counting.calls += 1


@pytest.mark.parametrize("kind", ["cProfile", "a function", "an object"])
def test_a_profiler_is_put_aside(kind: str) -> None:
    kinds: dict[str, Any] = {"cProfile": cProfile.Profile, "an object": Counting}
    profiler: Any = kinds[kind]() if kind != "a function" else lambda *_: None
    refused, plain = Net(lambda m: 1.0 + 0 * time.time()), Net()
    if kind == "cProfile":
        profiler.enable()
    else:
        sys.setprofile(profiler)
    running = sys.getprofile()
    try:
        with pytest.raises(UserError, match="clock"):
            et.prepare(refused, mean_square, torch.optim.SGD(refused.parameters(), lr=0.1), (X,))
        assert sys.getprofile() is running
        et.prepare(plain, mean_square, torch.optim.SGD(plain.parameters(), lr=0.1), (X,))(X)
        assert sys.getprofile() is running
    finally:
        if kind == "cProfile":
            profiler.disable()
            assert any("prepare" in str(entry.code) for entry in profiler.getstats())
        else:
            sys.setprofile(None)


def test_a_profiler_that_cannot_be_put_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_put_aside", lambda _: None)
    monkeypatch.setattr(observe, "_warned", [])
    model = Net()
    with pytest.warns(observe.ProfilerWarning, match="clocks"):
        step = et.prepare(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
    step(X)
    model.factor = 5.0  # type: ignore[misc]
    step(X)


def progress(_: Any) -> None:
    for _number in tqdm(range(3), file=io.StringIO()):
        pass
    bar = tqdm(total=3, file=io.StringIO())
    bar.update(1)
    bar.close()


BY_PACKAGES: dict[str, tuple[Callable[[Any], object], bool]] = {
    "timeit": (lambda m: timeit.timeit("1", number=1), True),
    "timer of timeit": (lambda m: timeit.default_timer(), True),
    "local time of a letter": (lambda m: email.utils.localtime(), True),
    "progress": (progress, False),
    "a log": (lambda m: logging.getLogger("of a test").error("now"), False),
    "a queue": (lambda m: filled(queue.Queue()).get(timeout=1), False),
    "an event": (lambda m: threading.Event().wait(0.001), False),
}


def filled(held: Any) -> Any:
    held.put(None)
    return held


@pytest.mark.parametrize("name", BY_PACKAGES)
def test_a_clock_that_a_package_reads(name: str) -> None:
    read, refused = BY_PACKAGES[name]
    model = Net(lambda m: (read(m), 1.0)[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if refused:
        with pytest.raises(UserError, match="clock"):
            et.prepare(model, mean_square, optimizer, (X,))
    else:
        et.prepare(model, mean_square, optimizer, (X,))(X)


# ---- TorchScript ----------------------------------------------------------------------------------------------------


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale, self.flag, self.rates = 2.0, True, [1.0, 2.0]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale * self.rates[0]
        result: Tensor = y if self.flag else -y * 2
        return result


def scripted(where: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    inner: Any = torch.jit.script(Scripted())
    if where == "loaded":
        file = io.BytesIO()
        torch.jit.save(inner, file)
        file.seek(0)
        inner = torch.jit.load(file)
    model: nn.Module = nn.Sequential(inner) if where == "submodule" else inner
    for _ in range(2):  # TorchScript compiles itself for what it has met
        mean_square(model, X).backward()
    model.zero_grad()
    return model, inner


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("where", ["model", "submodule", "loaded"])
@pytest.mark.parametrize(("name", "value"), [("scale", 3.0), ("flag", False), ("rates", [5.0])])
def test_an_attribute_of_a_scripted_module(where: str, name: str, value: Any) -> None:
    def make() -> Case:
        model, inner = scripted(where)
        return Case(model, mean_square, lambda: setattr(inner, name, value))

    assert agrees(make) == "same"


# ---- other memory for a tensor ------------------------------------------------------------------------------------


class Net3(Net):
    """Beside its parameters a buffer, a plain tensor, one in a list, and one that is no leaf."""

    buffer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.ones(2))
        self.plain, self.held = torch.ones(2), [torch.ones(2)]
        self.computed = torch.ones(2, requires_grad=True) * 2

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) * self.buffer * self.plain
        return y


OTHER = torch.full((3, 3), 0.5)


def on_the_way(change: Callable[[Any], object], undo: Callable[[Any], object] = lambda m: None) -> Any:
    def loss(model: Any, x: Tensor) -> Tensor:
        change(model)
        value = mean_square(model, x)
        undo(model)
        return value

    return loss


def there_and_back(other: Callable[[Tensor], Tensor]) -> Any:
    def loss(model: Any, x: Tensor) -> Tensor:
        kept, model.first.weight.data = model.first.weight.data, other(model.first.weight)
        value = mean_square(model, x)
        model.first.weight.data = kept
        return value

    return loss


def data(name: str, new: Callable[[Tensor], Tensor] = lambda t: t * 0.5) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        *owners, last = name.split(".")
        for owner in owners:
            model = model[int(owner)] if owner.isdigit() else getattr(model, owner)
        tensor = model[int(last)] if last.isdigit() else getattr(model, last)
        tensor.data = new(tensor.data)

    return change


def swap(model: Any) -> None:
    torch.utils.swap_tensors(model.first.weight, nn.Parameter(model.first.weight.detach() * 0.5))


def clamp_all(model: Any) -> None:
    for p in model.parameters():
        p.data = p.data.clamp(-0.1, 0.1)


def set_memory(model: Any) -> None:
    with torch.no_grad():
        model.first.weight.set_(OTHER)


def from_a_vector(model: Any) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


def in_a_hook(model: Any) -> None:
    model.first.weight.register_hook(lambda g: data("first.weight")(model))


EXCHANGED: dict[str, tuple[Any, str]] = {
    "all, before": (on_the_way(clamp_all), "model.first.weight"),
    "a parameter, before": (on_the_way(data("first.weight")), "model.first.weight"),
    "a parameter, after": (on_the_way(lambda m: None, data("second.bias")), "model.second.bias"),
    "a real tensor": (on_the_way(data("first.weight", lambda t: OTHER)), "model.first.weight"),
    "there and back": (there_and_back(lambda t: t * 0.5), "model.first.weight"),
    "there and back, real": (there_and_back(lambda t: OTHER), "model.first.weight"),
    "a buffer": (on_the_way(data("buffer")), "model.buffer"),
    "a plain tensor": (on_the_way(data("plain")), "model.plain"),
    "one in a list, that nothing reads": (on_the_way(data("held.0")), "model.held.0"),
    "no leaf": (on_the_way(data("computed")), "model.computed"),
    "another one's": (on_the_way(lambda m: setattr(m.plain, "data", m.buffer)), "model.plain"),
    "swapped, before": (on_the_way(swap), "model.first.weight"),
    "swapped": (on_the_way(lambda m: torch.utils.swap_tensors(m.plain, m.held[0])), "model.plain"),
    "set_": (on_the_way(set_memory), "model.first.weight"),
    "from a vector": (on_the_way(from_a_vector), "model.first.weight"),
    "in a hook": (on_the_way(in_a_hook), "model.first.weight"),
}


def looks(model: nn.Module) -> list[Any]:
    tensors: list[Any] = [*model.parameters(), *model.buffers(), model.plain, *model.held, model.computed]  # type: ignore[misc]
    return [
        (
            type(t),
            t.data_ptr(),
            t.requires_grad,
            t.is_leaf,
            vars(t),
            t._backward_hooks,
            t.tolist(),
            t.is_leaf and t.grad,
        )
        for t in tensors
    ]


@pytest.mark.parametrize("name", EXCHANGED)
def test_other_memory_for_a_tensor_is_refused_by_its_name(name: str) -> None:
    loss, path = EXCHANGED[name]
    model = Net3()
    before, kept = looks(model), OTHER.clone()
    with pytest.raises(UserError) as caught:
        et.prepare(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
    assert path in str(caught.value)
    assert "copy_(" in str(caught.value)
    assert looks(model) == before
    assert torch.equal(OTHER, kept)
    step = et.prepare(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
    expected = mean_square(model, X).item()
    assert float(step(X)) == expected


def copied_in_place(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.clamp(-0.1, 0.1))


def clamped_in_place(model: Any) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("change", [copied_in_place, clamped_in_place, nn.Module.float, lambda m: m.to("cpu")])
def test_what_is_written_into_a_tensor_takes_part(change: Callable[[Any], object]) -> None:
    assert agrees(lambda: Case(Net3(), on_the_way(change), lambda: None), steps=2) == "same"


# ---- the state of torch's generator -------------------------------------------------------------------------------


def dropped(model: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(model(x), 0.5)


def same_mask(model: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = dropped(model, x)
    torch.set_rng_state(state)
    return (first - 2 * dropped(model, x)).square().mean()


def same_mask_by_the_generator(model: Any, x: Tensor) -> Tensor:
    state = torch.default_generator.get_state()
    first = dropped(model, x)
    torch.default_generator.set_state(state)
    return (first - 2 * dropped(model, x)).square().mean()


def forked(model: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        first = dropped(model, x)
    return (first - 2 * dropped(model, x)).square().mean()


def forked_last(model: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return dropped(model, x).square().mean()


def masks_in_a_hook(model: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    y = dropped(model, x)
    y.register_hook(lambda g: torch.set_rng_state(state))
    return y.square().mean()


@pytest.mark.parametrize("loss", [same_mask, same_mask_by_the_generator, forked, forked_last, masks_in_a_hook])
def test_random_numbers_that_are_drawn_again_are_refused(loss: Any) -> None:
    model = Net()
    state = torch.get_rng_state()
    with pytest.raises(UserError, match="random"):
        et.prepare(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), (X,))
    assert torch.equal(torch.get_rng_state(), state)


def forked_without_random_numbers(model: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        y = model(x)
    return torch.nn.functional.dropout(y, 0.3).square().mean()


def checkpointed(model: Any, x: Tensor) -> Tensor:
    y = torch.utils.checkpoint.checkpoint(model.first, x, use_reentrant=False)
    return torch.nn.functional.dropout(model.second(y), 0.3).square().mean()


@pytest.mark.parametrize("loss", [forked_without_random_numbers, checkpointed])
def test_a_state_that_is_put_back_where_nothing_was_drawn_does_no_harm(loss: Any) -> None:
    results = []
    for prepared in (False, True):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = et.prepare(model, loss, optimizer, (X,), memory_format="preserve") if prepared else None
        values = []
        for seed in range(3):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            value = step(X) if step else loss(model, X)
            if not step:
                value.backward()
                optimizer.step()
            values.append((float(value.detach()), torch.get_rng_state().tolist()))
        results.append(values)
    assert results[0] == results[1]
