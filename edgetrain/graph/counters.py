"""Numbers, texts and containers that move each time a step runs: does the code decide by them?

A counter in `forward` (`self.calls += 1`) is harmless while nothing depends on it, and would be frozen where something
does (`if self.calls > 100`, `rates[self.calls]`). Which of the two cannot be seen from two captures that are the same.
So for those that follow, what the first has moved is replaced by one that counts on, and notes when anything else is
done with it. In a number's place stands an object that is none, for C code reads the inside of a number unseen.
"""

from __future__ import annotations

import dis
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

_COUNTING = ("add", "sub", "mul", "truediv", "pow")
_USING = ("floordiv", "mod", "lshift", "rshift", "and", "or", "xor")
_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")
_CONVERTING = ("index", "int", "float", "bool", "hash", "round", "trunc", "floor", "ceil", "invert", "divmod")
# What a container does where nothing depends on what it holds.
_GROWING = {
    "append", "appendleft", "extend", "extendleft", "insert", "add", "update", "__iadd__", "__setitem__", "__init__",
    "__new__", "__class__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__setattr__", "__delattr__",
    "__dir__", "__reduce__", "__reduce_ex__", "__getstate__", "__sizeof__", "__class_getitem__", "__repr__", "__str__",
    "__format__",
}  # fmt: skip
_OWN = __name__.partition(".")[0] + "."
_MODULO, _BINARY = (6, 19), dis.opmap["BINARY_OP"]  # `%` and `%=`


class Number:
    """Stands in the place of a number. value: the number; path: where it stood; used: where its use is noted."""

    def __init__(self, value: Any, path: str, used: set[str]) -> None:
        self.value, self.path, self.used = value, path, used

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    def __getattr__(self, name: str) -> Any:
        self.used.add(self.path)
        return getattr(self.value, name)

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, how: str) -> str:
        return format(self.value, how)

    def counted(self, result: Any) -> Any:
        if type(result) in (int, float):
            return Number(result, self.path, self.used)
        self.used.add(self.path)
        return result


def plain(value: Any) -> Any:
    """The number itself."""
    return value.value if type(value) is Number else value


def _binary(name: str, *, counts: bool, reflected: bool) -> Callable[[Any, Any], Any]:
    function = getattr(operator, f"__{name}__")

    def apply(self: Number, other: Any) -> Any:
        if not counts:
            self.used.add(self.path)
        if type(other) is Number and other.path != self.path:
            other.used.add(other.path)
        pair = (plain(other), self.value) if reflected else (self.value, plain(other))
        return self.counted(function(*pair)) if counts else function(*pair)

    return apply


def _converting(name: str) -> Callable[..., Any]:
    def convert(self: Number, *others: Any) -> Any:
        if not (name in ("int", "float") and _makes_a_text(sys._getframe(1))):
            self.used.add(self.path)
        return getattr(self.value, f"__{name}__")(*map(plain, others))

    return convert


def _makes_a_text(frame: types.FrameType) -> bool:
    """`"%d" % number`"""
    code = frame.f_code.co_code
    return code[frame.f_lasti] == _BINARY and code[frame.f_lasti + 1] in _MODULO


def _equip_numbers() -> None:
    for name in (*_COUNTING, *_USING):
        setattr(Number, f"__{name}__", _binary(name, counts=name in _COUNTING, reflected=False))
        setattr(Number, f"__r{name}__", _binary(name, counts=name in _COUNTING, reflected=True))
    for name in _COMPARING:
        setattr(Number, f"__{name}__", _binary(name, counts=False, reflected=False))
    for name in _CONVERTING:
        setattr(Number, f"__{name}__", _converting(name))
    for name in ("neg", "pos", "abs"):
        function = getattr(operator, f"__{name}__")
        setattr(Number, f"__{name}__", lambda self, function=function: self.counted(function(self.value)))


def _using(kind: type, name: str) -> Callable[..., Any]:
    method = getattr(kind, name)

    def use(self: Any, *others: Any, **named: Any) -> Any:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith(_OWN):  # we look for tensors in it
            self.used.add(self.path)
        return method(self, *others, **named)

    return use


def _class_of(kind: type) -> type:
    names = [n for n in dir(kind) if n not in _GROWING and callable(getattr(kind, n))]
    return type(f"noting_{kind.__name__}", (kind,), {name: _using(kind, name) for name in names})


def _longer(self: Any, more: str) -> Any:
    return noting(str.__add__(self, more), self.path, self.used)


_equip_numbers()
_CONTAINERS: dict[type, Any] = {kind: _class_of(kind) for kind in (str, list, deque, set, dict)}
_CONTAINERS[str].__add__ = _longer


def noting(value: Any, path: str, used: set[str]) -> Any:
    """The same value, which notes its use; None where it cannot."""
    value = plain(value)
    value = value.item() if isinstance(value, np.integer | np.floating) else value
    if type(value) in (int, float):
        return Number(value, path, used)
    kind = type(value) if type(value) in _CONTAINERS else type(value).__base__
    if kind not in _CONTAINERS or type(value) not in (kind, _CONTAINERS[kind]):
        return None
    own = _CONTAINERS[kind]
    same = own(deque.__iter__(value), deque.maxlen.__get__(value)) if kind is deque else own(_content(kind, value))
    same.path, same.used, same.original = path, used, value
    return same


def _content(kind: Any, value: Any) -> Any:
    if kind is str:
        return str.__str__(value)
    return dict(kind.items(value)) if kind is dict else list(kind.__iter__(value))


def text_of(value: Any) -> str:
    """Another one for another value, whatever stands in for it."""
    value = plain(value)
    for kind, own in _CONTAINERS.items():
        if isinstance(value, (kind, own)):
            items = _content(kind, value)
            return items if kind is str else repr([*map(_brief, _flat(items))])
    return _brief(value)


def _flat(items: Any) -> Iterable[Any]:
    return [part for item in items.items() for part in item] if isinstance(items, dict) else items


def _brief(value: Any) -> str:
    value = plain(value)
    if isinstance(value, np.ndarray):
        return repr((value.shape, value.tobytes()))
    plainly = isinstance(value, bool | int | float | complex | str | bytes | tuple | np.generic | None)
    return repr(value) if plainly else repr(id(value))


@dataclass(frozen=True)
class Place:
    """Where a value stands, and how to put another."""

    now: Any
    put: Callable[[Any], object]
    path: str


def watch_values(places: Iterable[Place]) -> set[str]:
    """Replace what has moved; the paths of what is used come to stand in the result."""
    used: set[str] = set()
    for place in places:
        if (same := noting(place.now, place.path, used)) is not None:
            place.put(same)
    return used


def unwatch_values(places: Iterable[Place]) -> None:
    """Put back what was replaced, as far as it has moved by now."""
    for place in places:
        kind = type(place.now).__base__
        if type(place.now) is Number:
            place.put(place.now.value)
        elif kind in _CONTAINERS and type(place.now) is _CONTAINERS[kind]:
            original, content = place.now.original, _content(kind, place.now)
            place.put(content if kind is str else original)
            if kind is list:
                original[:] = content
            elif kind is not str:
                original.clear()
                original.extend(content) if kind is deque else original.update(content)
