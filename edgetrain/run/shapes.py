"""The steps for the shapes of batches that were seen: a few of them, within a number and a size.

In:  a key (the shapes, and all else that a graph depends on) and what was captured, planned and compiled for it.
Out: the same again for the same key. The one that was not used for longest is dropped when there are too many or they
     take too much; all that it held is freed with it, the pages of the arena that only it needed included.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Hashable, Iterable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from edgetrain.graph.capture.watch import Watch
from edgetrain.run.adaptive import BudgetWatch
from edgetrain.run.binding import Binding
from edgetrain.run.paging import Pages
from edgetrain.run.pipeline import Variant

_PLAIN = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex, CodeType)
# What is not the variant's own, and what leads to nothing but that.
_OF_OTHERS = (type, nn.Module, torch.optim.Optimizer, torch.Tensor, Watch, Binding, BudgetWatch, Pages)
_ITEM_BYTES = 100  # of what a walk notes of one attribute


Key = tuple[Hashable, int]  # what is known of a batch before anything is captured, and the number of the capture


class Shapes:
    def __init__(self, max_shapes: int, max_bytes: int) -> None:
        self.max_shapes, self.max_bytes = max_shapes, max_bytes
        self._variants: dict[Key, Variant] = {}  # the one used last at the end
        self._bytes: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._variants)

    def items(self) -> Iterable[tuple[Key, Variant]]:
        return self._variants.items()

    def values(self) -> Iterable[Variant]:
        return self._variants.values()

    @property
    def last(self) -> tuple[Key, Variant] | None:
        """The one used last."""
        return next(reversed(self._variants.items()), None)

    @property
    def n_bytes(self) -> int:
        """What those that are kept take, as it was when each was last counted."""
        return sum(self._bytes.values())

    def keep(self, key: Key, variant: Variant) -> None:
        """Keep the variant as the one used last, and drop others until number and size are within their limits."""
        new = self._variants.pop(key, None) is not variant
        self._variants[key] = variant
        if new:  # the one before may have grown since: its first step has run, a trace, its gradients
            for counted in list(self._variants)[-2:]:
                self._bytes[counted] = size_of(self._variants[counted])
            self._drop()

    def forget(self, key: Key) -> None:
        """Drop the variant of this key."""
        self._variants.pop(key, None)
        self._bytes.pop(key, None)  # not there yet where Ctrl-C came in between

    def clear(self) -> None:
        self._variants.clear()
        self._bytes.clear()

    def _drop(self) -> None:
        dropped_bytes = 0  # of the arena
        while len(self._variants) > 1 and (len(self._variants) > self.max_shapes or self.n_bytes > self.max_bytes):
            oldest = next(iter(self._variants))
            self._bytes.pop(oldest, None)
            dropped_bytes = max(dropped_bytes, *(step.height_bytes for step in self._variants.pop(oldest).steps))
        largest = max((step for kept in self.values() for step in kept.steps), key=lambda step: step.height_bytes)
        if dropped_bytes > largest.height_bytes:
            largest.shrink()


def size_of(variant: Variant) -> int:
    """The bytes of the Python objects that the variant holds: graphs, plans, programs, and what they share."""
    watch = variant.captured.watch
    total = sum(sys.getsizeof(v) + _ITEM_BYTES * len(v) for v in vars(watch).values() if isinstance(v, list | dict))
    seen: set[int] = set()
    waiting: list[Any] = [*variant.steps, variant.captured.graph]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or not _own(value):
            continue
        seen.add(id(value))
        total += ctypes.sizeof(value) if isinstance(value, ctypes.Array) else sys.getsizeof(value)
        waiting += _parts(value)
    return total


def _own(value: object) -> bool:
    if isinstance(value, FunctionType):
        return _is_program(value.__code__)
    if isinstance(value, _OF_OTHERS):
        return False
    return isinstance(value, (*_PLAIN, ctypes.Array)) or type(value).__module__.startswith("edgetrain.")


def _is_program(code: CodeType) -> bool:
    return code.co_filename.startswith("<step of ")


def _parts(value: Any) -> list[Any]:
    if isinstance(value, CodeType):
        return [value.co_consts, value.co_names, value.co_varnames, value.co_linetable]
    return gc.get_referents(value)
