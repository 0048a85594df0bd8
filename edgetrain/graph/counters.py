"""Numbers that move each time a step runs: does the code decide by them?

A counter in `forward` (`self.calls += 1`) is harmless while nothing depends on it, and would be frozen where something
does (`if self.calls > 100`). Which of the two cannot be seen from two captures that are the same. So for the second one
each number that the first has moved is replaced by one that counts on, and notes when anything else is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

_COUNTING = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "pow", "neg", "abs")
_SHOWING = {"__repr__", "__str__", "__format__", "__new__", "__class__", "__init_subclass__", "__subclasshook__"}
_KEPT = {
    "__init__", "__getattribute__", "__setattr__", "__delattr__", "__doc__", "__dir__", "__reduce__", "__reduce_ex__",
    "__getnewargs__", "__getstate__", "__sizeof__", "__getformat__",
}  # fmt: skip


class _Noting:
    """path: of the number. used: where its use is noted."""

    path: str
    used: set[str]


def _counting(kind: type, name: str) -> Callable[..., Any]:
    plain = getattr(kind, name)

    def count(self: Any, *others: Any) -> Any:
        result = plain(self, *others)
        return noting(result, self.path, self.used) if type(result) in (int, float) else result

    return count


def _using(kind: type, name: str) -> Callable[..., Any]:
    plain = getattr(kind, name)

    def use(self: Any, *others: Any) -> Any:
        self.used.add(self.path)
        return plain(self, *others)

    return use


def _class_of(kind: type) -> type:
    methods: dict[str, Any] = {
        f"__{name}__": _counting(kind, f"__{name}__") for name in _COUNTING if hasattr(kind, f"__{name}__")
    }
    for name in dir(kind):
        if name.startswith("__") and callable(getattr(kind, name)) and name not in methods.keys() | _SHOWING | _KEPT:
            methods[name] = _using(kind, name)
    return type(f"noting_{kind.__name__}", (kind, _Noting), methods)


_INT, _FLOAT = _class_of(int), _class_of(float)


def noting(value: float, path: str, used: set[str]) -> Any:
    """The same number, which notes its use."""
    number: Any = (_INT if isinstance(value, int) else _FLOAT)(value)
    number.path, number.used = path, used
    return number


@dataclass(frozen=True)
class Place:
    """Where a plain value stands: the value that was there, the one that is, and how to put another."""

    was: Any
    now: Any
    put: Callable[[Any], object]
    path: str


def watch_numbers(places: Iterable[Place]) -> set[str]:
    """Replace the numbers that have moved; the paths of those that are used come to stand in the result."""
    used: set[str] = set()
    for place in places:
        if type(place.now) in (int, float) and repr(place.was) != repr(place.now):
            place.put(noting(place.now, place.path, used))
    return used
