"""Do the same objects stand at the same places?

In C (same.c), or in Python where edgetrain was installed without a compiler.

In:  rows that were written down once, and are asked about before each step.
Out: whether the same objects, and not only equal ones, are there.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Sized
from itertools import chain
from operator import is_
from typing import Any

_MISSING = object()
# A mapping, or a class; how many items it has, if that counts; keys, and the objects there. Without keys any container.
PlaceRow = tuple[Sized | type, int | None, tuple[Any, ...], tuple[Any, ...]]
ObjectRow = tuple[Any, type, dict[str, Any] | None]  # an object, its class, its __dict__ if that counts
OrderRow = tuple[type, tuple[type, ...]]  # a class, and its bases in their order
ListRow = tuple[list[Any], tuple[Any, ...]]  # what it held
SetRow = tuple[set[Any], tuple[Any, ...]]  # the same
DictRow = tuple[dict[Any, Any], tuple[Any, ...]]  # each key and its value in turn
FunctionRow = tuple[types.FunctionType, types.CodeType, Any, Any]  # its code, defaults, defaults by name


class PlacesInPython:
    """rows: what stood where. A mapping that is a class is what it holds."""

    def __init__(self, rows: list[PlaceRow]) -> None:
        self._rows = rows

    def changed(self, first: int) -> int:
        """The number of the first row, from `first` on, that is not so now; -1: no such row."""
        for number in range(first, len(self._rows)):
            mapping, size, keys, objects = self._rows[number]
            held: Any = vars(mapping) if isinstance(mapping, type) else mapping
            if size is not None and len(held) != size:
                return number
            if not all(_at(held, key) is then for key, then in zip(keys, objects, strict=True)):
                return number
        return -1


def _at(mapping: Any, key: Any) -> Any:
    try:
        return mapping[key]
    except KeyError:
        return _MISSING


def functions_in_python(rows: list[FunctionRow]) -> bool:
    """Whether each function has its code and its defaults."""
    return all(
        f.__code__ is code and f.__defaults__ is given and f.__kwdefaults__ is named for f, code, given, named in rows
    )


def objects_in_python(rows: list[ObjectRow]) -> bool:
    """Whether each object has its class and its __dict__."""
    return all(type(value) is kind and (own is None or value.__dict__ is own) for value, kind, own in rows)


def orders_in_python(rows: list[OrderRow]) -> bool:
    """Whether each class has its bases in their order."""
    return all(cls.__mro__ is order for cls, order in rows)


def lists_in_python(rows: list[ListRow]) -> bool:
    """Whether each list holds the same objects in the same order."""
    return all(len(now) == len(then) and all(map(is_, now, then)) for now, then in rows)


def sets_in_python(rows: list[SetRow]) -> bool:
    """Whether each set holds the same objects in the same order."""
    return all(len(now) == len(then) and all(map(is_, now, then)) for now, then in rows)


def dicts_in_python(rows: list[DictRow], _: bytearray) -> bool:
    """Whether each dict holds the same keys and values in the same order."""
    return all(
        2 * len(now) == len(then) and all(map(is_, chain.from_iterable(now.items()), then)) for now, then in rows
    )


def no_versions(rows: list[DictRow]) -> bytearray:
    """What `dicts` keeps of each row, before the first time: where a dict was not written to, nothing in it is read."""
    return bytearray(8 * len(rows))


try:
    _library: Any = importlib.import_module("edgetrain.native._same")
    Places, functions, objects, orders = _library.Places, _library.functions, _library.objects, _library.orders
    lists, sets, dicts = _library.lists, _library.sets, _library.dicts
except ImportError:
    Places, functions, objects, orders = PlacesInPython, functions_in_python, objects_in_python, orders_in_python
    lists, sets, dicts = lists_in_python, sets_in_python, dicts_in_python
