"""Numbers, texts and containers that move each time a step runs: does the code decide by them?

A counter in `forward` (`self.calls += 1`) is harmless while nothing depends on it, and would be frozen where something
does (`if self.calls > 100`, `rates[self.calls]`). Which of the two cannot be seen from two captures that are the same.
So for those that follow, what the first has moved is replaced by one that counts on, and notes when anything else is
done with it. In a number's place stands an object that is none, for C code reads the inside of a number unseen.
"""

from __future__ import annotations

import dis
import json
import json.encoder
import operator
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from edgetrain.graph.capture.objects import is_a, joined

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
# What their code looks at, it writes down.
_SHOWING = {
    "json", "logging", "pprint", "reprlib", "string", "textwrap", "csv", "yaml", "tensorboard", "tensorboardX", "tqdm",
    "wandb", "mlflow", "loguru", "rich",
}  # fmt: skip
_READING = ("__getitem__", "get")
# Values that are replaced by others, and not changed.
FROZEN = (complex, bytes, tuple, frozenset, range, slice, Decimal, Fraction, date, time, timedelta, np.generic)
_PLAINLY = (bool, int, float, str, type(None), *FROZEN)
_MODULO, _BINARY = (6, 19), dis.opmap["BINARY_OP"]  # `%` and `%=`


class Number:
    """Stands in the place of a number. value: the number; paths: where it stood, or the numbers that it was computed
    from; used: where its use is noted."""

    def __init__(self, value: Any, paths: frozenset[str], used: set[str]) -> None:
        self.value, self.paths, self.used = value, paths, used

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    def __getattr__(self, name: str) -> Any:
        self.note(sys._getframe(1))
        return getattr(self.value, name)

    def note(self, user: types.FrameType) -> None:
        """It is used there."""
        if not _shows(user):
            self.used.update(self.paths)

    def __reduce_ex__(self, _: Any) -> Any:
        return type(self.value), (self.value,)

    def __copy__(self) -> Number:
        return self

    def __deepcopy__(self, _: Any) -> Number:
        return self

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, how: str) -> str:
        return format(self.value, how)

    def counted(self, result: Any, other: Any = None) -> Any:
        paths = self.paths | other.paths if type(other) is Number else self.paths
        if type(result) in (int, float):
            return Number(result, paths, self.used)
        self.used.update(paths)
        return result


def _shows(user: types.FrameType) -> bool:
    return user.f_globals.get("__name__", "").partition(".")[0] in _SHOWING


def plain(value: Any) -> Any:
    """The number itself."""
    return value.value if type(value) is Number else value


def _binary(name: str, *, counts: bool, reflected: bool) -> Callable[[Any, Any], Any]:
    function = getattr(operator, f"__{name}__")

    def apply(self: Number, other: Any) -> Any:
        pair = (plain(other), self.value) if reflected else (self.value, plain(other))
        if counts:
            return self.counted(function(*pair), other)
        for number in (self, other):
            if type(number) is Number:
                number.note(sys._getframe(1))
        return function(*pair)

    return apply


def _converting(name: str) -> Callable[..., Any]:
    def convert(self: Number, *others: Any) -> Any:
        if not (name in ("int", "float") and _makes_a_text(sys._getframe(1))):
            self.note(sys._getframe(1))
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
        user = sys._getframe(1)
        if not _is_inside(kind, user.f_globals.get("__name__", "")) and not _shows(user):
            self.used.add(self.path)
        return method(self, *others, **named)

    return use


def _is_inside(kind: type, module: str) -> bool:
    """We look for tensors in it; and a container's own methods in Python are noted themselves."""
    return module.startswith(_OWN) or (module == "collections" and kind in (Counter, OrderedDict))


def _reading(kind: type, name: str) -> Callable[..., Any]:
    """An item by its index or key: noted by itself where something stands in for it, or where it has not moved."""
    method = getattr(kind, name)

    def read(self: Any, *others: Any) -> Any:
        value = method(self, *others)
        noted = type(value) is Number or _stands_in(value) or self.has_not_moved(others[0], value)
        if not noted and not _shows(sys._getframe(1)):
            self.used.add(self.path)
        return value

    return read


def _has_not_moved(self: Any, key: Any, value: Any) -> bool:
    return self.before is not None and self.before.get(key, self) is value


def _class_of(kind: type) -> type:
    names = [n for n in dir(kind) if n not in _GROWING and callable(getattr(kind, n))]
    methods: dict[str, Any] = {name: _using(kind, name) for name in names}
    methods |= {name: _reading(kind, name) for name in _READING if name in methods and kind is not str}
    methods |= {
        "has_not_moved": _has_not_moved,
        "__reduce_ex__": _as_it_is,
        "__copy__": _copied,
        "__deepcopy__": _copied,
    }
    return type(f"noting_{kind.__name__}", (kind,), methods)


def _as_it_is(self: Any, _: Any) -> Any:
    """For who writes it to a file."""
    kind: Any = type(self).__base__
    content = _content(kind, self)
    if kind is defaultdict:
        return kind, (self.default_factory, content)
    return (kind, (content, self.maxlen)) if kind is deque else (kind, (content,))


def _copied(self: Any, *_: Any) -> Any:
    self.used.add(self.path)
    kind, parts = _as_it_is(self, 0)
    return kind(*parts)


def _longer(self: Any, more: str) -> Any:
    return noting(str.__add__(self, more), self.path, self.used)


_equip_numbers()
_KINDS: tuple[type, ...] = (str, list, deque, set, Counter, defaultdict, OrderedDict, dict)
_CONTAINERS: dict[type, Any] = {kind: _class_of(kind) for kind in _KINDS}
_CONTAINERS[str].__add__ = _longer


def _stands_in(value: Any) -> bool:
    kind: Any = type(value).__base__
    return kind in _CONTAINERS and type(value) is _CONTAINERS[kind]


def noting(value: Any, path: str, used: set[str], items: list[Any] | None = None) -> Any:
    """The same value, which notes its use; None where it cannot. items: what a container held before it moved."""
    value = plain(value)
    value = value.item() if is_a(value, np.integer | np.floating) else value
    if type(value) in (int, float):
        return Number(value, frozenset((path,)), used)
    if is_a(value, tuple):
        return _noting_tuple(value, path, used, items)
    kind: Any = type(value) if type(value) in _CONTAINERS else type(value).__base__
    if kind not in _CONTAINERS or type(value) not in (kind, _CONTAINERS[kind]):
        return None
    content = _content(kind, value)
    if kind is str:
        same = _CONTAINERS[str](content)
    else:
        same = _filled(kind, value, list(_noting_items(content, path, used, items)))
    same.path, same.used, same.original = path, used, value
    same.before = _pairs(items) if issubclass(kind, dict) and items is not None else None
    return same


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _filled(kind: Any, value: Any, items: list[Any]) -> Any:
    """A container of ours with these items, whatever methods its class has."""
    own = _CONTAINERS[kind]
    if kind is deque:
        return own(items, deque.maxlen.__get__(value))
    if not issubclass(kind, dict):
        return own(items)
    same = own.__new__(own)
    if kind is defaultdict:
        same.default_factory = value.default_factory
    put = OrderedDict.__setitem__ if kind is OrderedDict else dict.__setitem__
    for key, item in items:
        put(same, key, item)
    return same


def _noting_items(content: Any, path: str, used: set[str], items: list[Any] | None) -> Iterator[Any]:
    """Those that have moved are replaced, as far as they can be."""
    if isinstance(content, dict):
        before = {} if items is None else _pairs(items)
        for key, item in content.items():
            yield key, item if before.get(key, before) is item else _or_itself(item, joined(path, key), used)
    else:
        was = items or []
        for at, item in enumerate(content):
            same = at < len(was) and was[at] is item
            yield item if same else _or_itself(item, f"{path}.{at}", used)


def _or_itself(item: Any, path: str, used: set[str]) -> Any:
    same = noting(item, path, used) if type(plain(item)) in (int, float) else None
    return item if same is None else same


def _noting_tuple(value: tuple[Any, ...], path: str, used: set[str], items: list[Any] | None) -> Any:
    """Of as many items as before; a longer one cannot be replaced."""
    ours = type(value) is tuple or hasattr(type(value), "_fields")  # torch.Size and others of C code cannot be remade
    if not ours or items is None or len(items) != len(value):
        return None
    pairs = zip(value, items, strict=True)
    same = [now if now is was and not _growing(now) else noting(now, f"{path}.{at}", used)
            for at, (now, was) in enumerate(pairs)]  # fmt: skip
    if any(new is None and now is not None for new, now in zip(same, value, strict=True)):
        return None
    return _remade(value, same)


def _growing(value: Any) -> bool:
    return type(value) in (list, deque, set, dict)


def _remade(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """A tuple of the same class."""
    return tuple.__new__(type(value), items)


def _content(kind: Any, value: Any) -> Any:
    if kind is str:
        return str.__str__(value)
    return dict(dict.items(value)) if issubclass(kind, dict) else list(kind.__iter__(value))


def text_of(value: Any) -> str:
    """Another one for another value, whatever stands in for it."""
    value = plain(value)
    for kind, own in _CONTAINERS.items():
        if is_a(value, (kind, own)):
            items = _content(kind, value)
            return items if kind is str else repr([*map(_brief, _flat(items))])
    return _brief(value)


def _flat(items: Any) -> Iterable[Any]:
    return [part for item in items.items() for part in item] if isinstance(items, dict) else items


def _brief(value: Any) -> str:
    value = plain(value)
    if is_a(value, np.ndarray):
        return repr((value.shape, value.tobytes()))
    if is_a(value, tuple | frozenset):
        return repr((type(value), [*map(_brief, value)]))
    return repr(value) if is_a(value, _PLAINLY) else repr(id(value))


@dataclass(frozen=True)
class Place:
    """Where a value stands, and how to put another. items: what was in it, where it is a container that was there."""

    now: Any
    put: Callable[[Any], object]
    path: str
    items: list[Any] | None = None

    @property
    def is_blind(self) -> bool:
        """Nothing can stand in for it, and it is a value like a number: another one each time."""
        return is_a(self.now, FROZEN) and noting(self.now, "", set(), self.items) is None


def watch_values(places: Iterable[Place], used: set[str], at: Callable[[str], bool]) -> list[str]:
    """Replace what has moved, where `at` says so of its path; the paths of what is used come to stand in `used`.
    Returns the paths where something was replaced."""
    watched = []
    for place in places:
        if at(place.path) and (same := noting(place.now, place.path, used, place.items)) is not None:
            place.put(same)
            watched.append(place.path)
    return watched


@contextmanager
def shown_as_they_are() -> Iterator[None]:
    """Within the block what writes numbers down takes what stands in for them too, where it asks for their type."""
    patched: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (json.JSONEncoder, "default", _default_of),
        (json.encoder, "_make_iterencode", _iterating_by),
    ]
    if (module := sys.modules.get("yaml.representer")) is not None:
        patched.append((vars(module)["BaseRepresenter"], "represent_data", _represented_by))
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in patched]
    try:
        for owner, name, wrap in patched:
            setattr(owner, name, wrap(vars(owner)[name]))
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def _default_of(default: Any) -> Any:
    return lambda encoder, value: plain(value) if type(value) is Number else default(encoder, value)


def _iterating_by(make: Any) -> Any:
    """How json writes where C does not: its fifth argument writes a float."""

    def iterating(*arguments: Any, **named: Any) -> Any:
        of_float = arguments[4]
        arguments = (*arguments[:4], lambda value: of_float(plain(value)), *arguments[5:])
        return make(*arguments, **named, _intstr=lambda value: int.__repr__(plain(value)))

    return iterating


def _represented_by(represent: Any) -> Any:
    def represented(representer: Any, value: Any) -> Any:
        if _stands_in(value):
            kind, parts = _as_it_is(value, 0)
            value = kind(*parts)
        return represent(representer, plain(value))

    return represented


def unwatch_values(places: Iterable[Place]) -> None:
    """Put back what was replaced, as far as it has moved by now."""
    for place in places:
        now = place.now
        if type(now) is Number or _stands_in(now):
            place.put(_original(now))
        elif is_a(now, tuple) and any(type(item) is Number or _stands_in(item) for item in now):
            place.put(_remade(now, [*map(_original, now)]))


def _original(now: Any) -> Any:
    """What a value stands for, with what has become of it."""
    if not _stands_in(now):
        return plain(now)
    kind: Any = type(now).__base__
    content, original = _content(kind, now), now.original
    if kind is str:
        return content
    if kind is list:
        original[:] = [*map(plain, content)]
    elif issubclass(kind, dict):
        base: Any = OrderedDict if kind is OrderedDict else dict
        base.clear(original)
        base.update(original, {key: plain(item) for key, item in content.items()})
    else:
        original.clear()
        original.extend(map(plain, content)) if kind is deque else original.update(map(plain, content))
    return original
