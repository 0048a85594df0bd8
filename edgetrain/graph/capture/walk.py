"""A walk over Python objects, depth first: what was met, in order, and which names count.

In:  objects, and what ran meanwhile (`Observed`), where that is known. Out: the trail. `Reach` says what is visited.

Without `Observed` all attributes of objects of the user's own count. With it, of those of packages only the ones whose
names stand in code that ran; in a narrow walk that holds for all objects.
"""

from __future__ import annotations

import abc
import functools
import types
from collections.abc import Container
from typing import Any

from torch import nn

from edgetrain.graph.capture.installed import installed
from edgetrain.graph.capture.objects import PLAIN_TYPES, counts_itself, is_a, is_ours
from edgetrain.graph.capture.observe import Observed
from edgetrain.native.signals import raised_by_handler

Trail = list[tuple[Any, ...]]
_CLASS_NOISE = {"__annotations__", "__dict__", "__weakref__", "__doc__", "__module__", "__slots__"}


class Walk(abc.ABC):
    """
    trail:       what was met, in order: (path, its sort, what tells it from another of that sort)
    alive:       what was met is kept, so that no identity is used twice
    first_paths: of each of these
    unnamed:     paths of attributes and variables whose names stand in no code that ran
    ignored:     such paths that do not count
    """

    def __init__(self, observed: Observed | None = None, *, narrow: bool = False, ignored: Container[str] = ()) -> None:
        self._observed = observed if observed is not None and observed.complete else None
        self._narrow = narrow and self._observed is not None
        self._ignored = ignored
        self._pending: list[tuple[Any, str]] = []
        self._numbers: dict[int, int] = {}
        self._names_of_class: dict[type, frozenset[str]] = {}
        self.alive: list[Any] = []
        self.first_paths: list[str] = []
        self.trail: Trail = []
        self.unnamed: set[str] = set()

    @abc.abstractmethod
    def _described(self, value: Any) -> tuple[Any, ...]:
        """What tells an object from another one on the trail, without its parts."""

    @abc.abstractmethod
    def _visit(self, value: Any, path: str) -> None:
        """Note the object, and push its parts."""

    @abc.abstractmethod
    def _add_raw_attributes(self, value: Any, path: str) -> None:
        """Push what an object holds that cannot be asked which class it is of."""

    def add(self, value: Any, path: str) -> None:
        """Walk everything that hangs on `value`, depth first, in the order in which it was written down."""
        self._pending.append((value, path))
        self._drain()

    def _drain(self) -> None:
        pending = self._pending
        while pending:
            value, path = pending.pop()
            if type(value) in PLAIN_TYPES:
                self.trail.append((path, type(value), repr(value) if isinstance(value, float | complex) else value))
            elif id(value) in self._numbers:
                self.trail.append((path, "met", self._numbers[id(value)]))
            else:
                self._number(value, path)
                begin = len(pending)
                self._look_at(value, path)
                pending[begin:] = pending[begin:][::-1]

    def _look_at(self, value: Any, path: str) -> None:
        """Of a proxy, or another object that raises when it is looked at, its own attributes count."""
        try:
            if is_ours(value):
                self.trail.append((path, "one", id(value)))
                return
            self.trail.append((path, *self._described(value)))
            self._visit(value, path)
        except Exception as error:
            if raised_by_handler(error):
                raise
            if isinstance(error, RuntimeError) and "during iteration" in str(error):  # another thread changes it
                raise
            self.trail.append((path, type(value), id(value)))
            self._add_raw_attributes(value, path)

    def _number(self, value: Any, path: str) -> None:
        self._numbers[id(value)] = len(self.alive)
        self.alive.append(value)
        self.first_paths.append(path)

    def _push(self, value: Any, path: str) -> None:
        self._pending.append((value, path))

    def _counts(self, name: Any, owner: Any) -> bool:
        """Is an attribute of that name read? Of objects of the user's own all are, unless the walk is narrow."""
        if self._is_named(name, owner):
            return True
        named = owner if is_a(owner, type | types.FunctionType) else type(owner)
        return (is_a(owner, nn.Module) or not installed(named.__module__)) and self._takes_all(name)

    def _is_named(self, name: Any, owner: Any) -> bool:
        """In code that ran: in the user's own, where the owner is no module of torch and of no package."""
        seen = self._observed
        if seen is None:
            return True
        named = owner if is_a(owner, type | types.FunctionType) else type(owner)
        return name in (seen.names if is_a(owner, nn.Module) or installed(named.__module__) else seen.own_names)

    def _reads(self, name: Any, owner: Any, path: str) -> bool:
        """The same as `_counts`, of one that stands at a path."""
        if not self._counts(name, owner) or path in self._ignored:
            return False
        if self._observed is not None and name not in self._names_for(type(owner)):
            self.unnamed.add(path)
        return True

    def _names_for(self, cls: type) -> frozenset[str]:
        """Those in the code that works with objects of a class: the user's own, and that of the packages it is of."""
        if cls not in self._names_of_class:
            seen = self._observed or Observed()
            of_packages = [seen.scopes.get(base.__module__, set()) for base in cls.__mro__]
            names = seen.names if installed(cls.__module__) else seen.own_names.union(*of_packages)
            self._names_of_class[cls] = frozenset(names)
        return self._names_of_class[cls]

    def runs(self, name: str, cls: type) -> bool:
        """Is an attribute of a class read by its name, or by an operator?"""
        if counts_itself(cls, name):
            return False
        return (name.startswith("__") and name not in _CLASS_NOISE) or self._counts(name, cls)

    def _takes_all(self, name: Any) -> bool:
        assert self._observed is not None
        return name not in _CLASS_NOISE and (not self._narrow or self._observed.by_any_name)

    def _takes_any(self) -> bool:
        return self._observed is None or not self._narrow or self._observed.by_any_name

    @functools.cached_property
    def _own_names(self) -> frozenset[str]:
        return frozenset(self._observed.own_names if self._observed else ())

    def keeps(self, value: Any) -> bool:
        """It was met, or is None."""
        return value is None or id(value) in self._numbers
