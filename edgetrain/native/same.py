"""Do the same objects stand at the same places? In C (same.c), or in Python where edgetrain was installed without a
compiler.

In:  rows that were written down once, and are asked about before each step.
Out: whether the same objects, and not only equal ones, are there.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping
from typing import Any

ItemRow = tuple[Mapping[Any, Any], Any, Any]  # a mapping, a key, the object
FunctionRow = tuple[types.FunctionType, types.CodeType, Any, Any]  # its code, defaults, defaults by name


def items_in_python(rows: list[ItemRow], first: int) -> int:
    """The place of the first row, from `first` on, whose mapping has another object or none there; -1: no such row."""
    for place in range(first, len(rows)):
        mapping, key, then = rows[place]
        try:
            same = mapping[key] is then
        except KeyError:
            same = False
        if not same:
            return place
    return -1


def functions_in_python(rows: list[FunctionRow]) -> bool:
    """Whether each function has its code and its defaults."""
    return all(
        f.__code__ is code and f.__defaults__ is given and f.__kwdefaults__ is named for f, code, given, named in rows
    )


try:
    _library: Any = importlib.import_module("edgetrain.native._same")
    items, functions = _library.items, _library.functions
except ImportError:
    items, functions = items_in_python, functions_in_python
