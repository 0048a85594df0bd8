"""What code may have changed while it was captured, restored.

In:  everything that model, loss and optimizer can reach (`Reach`), before their code runs.
Out: `Before.restore()` puts back attributes, items, variables, arrays, generators of random numbers and gradients, and
     `Before.moved()` names those that are not what they were. What code does outside of the process (prints, files) is
     not undone.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import operator
import os
import random
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from io import IOBase
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from edgetrain.graph.capture.contents import LARGE_BYTES, attributes_of_script, content_of, reads_on, size_of, state_of
from edgetrain.graph.capture.counters import Place, text_of
from edgetrain.graph.capture.objects import (
    C_DATA,
    PLAIN,
    counts_itself,
    holds_many_plain,
    is_a,
    is_set,
    items_of,
    joined,
    own_attribute,
    parts_of,
    slots_of,
)
from edgetrain.graph.capture.observe import Observed
from edgetrain.graph.capture.reach import Reach
from edgetrain.graph.capture.recording import place_in_memory

_MISSING = object()


class Before:
    """Of the variables of Python modules those are restored that functions name."""

    def __init__(self, reach: Reach) -> None:
        self._alive = reach.alive
        self._objects = [(d, dict(d), path) for d, _, path in reach.attributes]
        self._variables = [(d, {key: d[key] for key in keys}, path) for d, keys, path in reach.variables]
        self._absent = reach.absent
        self._containers = [(c, parts_of(c), path) for c, path in reach.containers if isinstance(c, _CHANGING)]
        self._cells = [(c, c.cell_contents if is_set(c) else _MISSING, path) for c, path in reach.cells]
        self._classes = [(c, _attributes_of(c)) for c in reach.classes]
        self._slots = [(value, slot, own_attribute(value, slot, _MISSING), path) for value, slot, path in reach.slots]
        self._functions = [(f, f.__defaults__, f.__kwdefaults__) for f in reach.functions]
        self._arrays = [(a, a.copy(), path) for a, path in reach.arrays if _can_be_kept(a)]
        self._large = [(a, content_of(a), path) for a, path in reach.arrays if a.nbytes > LARGE_BYTES]
        self._states = [(value, state_of(value), _put_back(value), path) for value, path in reach.stateful]
        tensors = [t for t in reach.alive if is_a(t, torch.Tensor)]
        leaves = [t for t in tensors if t.is_leaf]
        self._tensors = [(t, t.requires_grad, t.grad) for t in leaves]
        real = [t for t in tensors if t.layout is torch.strided and not t.is_nested and not is_a(t, FakeTensor)]
        self._data = [(t, type(t), t.detach()) for t in real]
        self.memory = {id(t): (reach.tensors[id(t)], place_in_memory(t)) for t in real}
        self._hooks = [(t, t._backward_hooks) for t in leaves]
        self._owners = reach.owners
        self._types = [(value, type(value)) for value in reach.objects if not is_a(value, torch.Tensor)]
        generators = (value for value in reach.alive if is_a(value, torch.Generator))
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self.tensors = reach.tensors
        self._environment, self._folder = dict(os.environ), _folder()
        self._caches = [(cache, _entries(cache)) for cache in reach.caches]

    def clear_caches(self) -> None:
        """What functools.lru_cache kept meanwhile are tensors of the capture, as likely as not. What was there before
        stays: it may be the one object that other code changes."""
        for cache, before in self._caches:
            entries = _entries(cache)
            if entries is not None and before is not None:
                for key in [key for key in entries if key not in before]:
                    del _entries_of(cache)[key]
            elif any(is_a(held, FakeTensor) for held in _within(cache)):
                cache.cache_clear()

    def moved(self) -> Iterator[tuple[str, Any]]:
        """What is not what it was: its path, and what stands there now."""
        for own, values, path in (*self._objects, *self._variables):
            moved = [key for key in values if _is_other(own.get(key, _MISSING), values[key])]
            yield from ((joined(path, key), own.get(key)) for key in moved)
        for own, values, path in self._objects:
            yield from ((joined(path, key), own[key]) for key in own if key not in values)
        for scope, names in self._absent:
            yield from ((name, scope[name]) for name in tuple(scope) if name in names)
        for container, items, path in self._containers:
            now_items = parts_of(container)
            if not _same_items(now_items, items) and (
                len(now_items) != len(items) or any(map(_is_other, now_items, items))
            ):
                yield path, container
        for cell, was, path in self._cells:
            now = cell.cell_contents if is_set(cell) else _MISSING
            if _is_other(now, was):
                yield path, now
        for cls, attributes in self._classes:
            moved = [key for key, now in _attributes_of(cls).items() if now is not attributes.get(key)]
            yield from ((f"{cls.__name__}.{key}", vars(cls)[key]) for key in moved)
        for value, slot, was, path in self._slots:
            if _is_other(own_attribute(value, slot, _MISSING), was):
                yield joined(path, slot), own_attribute(value, slot)
        for function, defaults, named in self._functions:
            if function.__defaults__ is not defaults or function.__kwdefaults__ is not named:
                yield function.__name__, (function.__defaults__, function.__kwdefaults__)
        yield from ((path, values) for values, kept, path in self._arrays if values.tobytes() != kept.tobytes())
        yield from ((path, content_of(values)) for values, kept, path in self._large if content_of(values) != kept)

    def places(self) -> Iterator[Place]:
        """Where something has moved."""
        before = {id(c): items for c, items, _ in self._containers}
        changed = {id(c) for c, items, _ in self._containers if not _same_items(parts_of(c), items)}

        def moved(now: Any, was: Any) -> bool:
            inside = is_a(now, tuple) and any(id(item) in changed for item in now)
            return now is not was or id(now) in changed or inside

        there = {*map(id, self._alive)}
        for place in self._all_places(moved):
            was = before.get(id(place.now))
            yield place if was is None else replace(place, items=was)
            yield from _places_of_new(place, there)

    def _all_places(self, moved: Callable[[Any, Any], bool]) -> Iterator[Place]:
        for own, values, path in self._objects:
            for key in [key for key in own if moved(own[key], values.get(key, _MISSING))]:
                put = partial(operator.setitem, own, key)
                yield Place(own[key], put, joined(path, key), _tuple_items(values.get(key)))
        for scope, values, path in self._variables:
            for key in [key for key in values if key in scope and moved(scope[key], values[key])]:
                put = partial(operator.setitem, scope, key)
                yield Place(scope[key], put, joined(path, key), _tuple_items(values[key]))
        for scope, names in self._absent:
            for name in [name for name in scope if name in names]:
                yield Place(scope[name], partial(operator.setitem, scope, name), name)
        for container, items, path in self._containers:
            if not holds_many_plain(container) or not _same_items(parts_of(container), items):
                yield from _places_in(container, items, path, moved)
        for cell, was, path in self._cells:
            if is_set(cell) and moved(cell.cell_contents, was):
                put = partial(setattr, cell, "cell_contents")
                yield Place(cell.cell_contents, put, path, _tuple_items(was))
        for cls, attributes in self._classes:
            for key in [k for k, now in _attributes_of(cls).items() if moved(now, attributes.get(k, _MISSING))]:
                yield Place(vars(cls)[key], partial(type.__setattr__, cls, key), f"{cls.__name__}.{key}")
        for value, slot, was, path in self._slots:
            now = own_attribute(value, slot, _MISSING)
            if now is not _MISSING and moved(now, was) and not is_a(value, partial):
                yield Place(now, partial(object.__setattr__, value, slot), joined(path, slot), _tuple_items(was))
        for function, was, _ in self._functions:
            if function.__defaults__ is not None and moved(function.__defaults__, was):
                put = partial(setattr, function, "__defaults__")
                yield Place(function.__defaults__, put, function.__name__, _tuple_items(was))

    def fingerprint(self) -> dict[str, str]:
        """What has moved, by path, as texts to be compared with those of another time."""
        texts: dict[str, list[str]] = {}
        for path, now in self.moved():
            texts.setdefault(path, []).append(text_of(now))
        for place in self.places():
            texts.setdefault(place.path, []).append(text_of(place.now))
        if dict(os.environ) != self._environment:
            texts["os.environ"] = [repr(dict(os.environ))]
        return {path: repr(all_texts) for path, all_texts in texts.items()}

    def unseen(self) -> list[str]:
        """The paths of arrays, dates, tuples and their like that are not what they were: whether they are used cannot
        be seen."""
        new = [place.path for place in self.places() if is_a(place.now, np.ndarray) or place.is_blind]
        new += [path for values, kept, path in self._arrays if values.tobytes() != kept.tobytes()]
        return new + [path for values, kept, path in self._large if content_of(values) != kept]

    def moved_by_use(self, seen: Observed) -> list[str]:
        """The iterators, generators and files that are further on than they were; a file that was only written (a log)
        is none of them."""
        moved = [(value, state, path) for value, state, _, path in self._states if state_of(value) != state]
        return [
            p
            for value, state, p in moved
            if not isinstance(value, IOBase) or seen.reads_streams or reads_on(value, state)
        ]

    def with_other_gradients(self) -> list[str]:
        """The tensors that were given a gradient."""
        return [self.tensors[id(t)] for t, _, grad in self._tensors if t.grad is not grad and t.grad is not None]

    def with_other_memory(self) -> list[str]:
        """The tensors that stand for other memory than they did (`.data = …`, swap_tensors)."""
        return [self.memory[id(t)][0] for t, kind, _ in self._data if self._is_exchanged(t, kind)]

    def _is_exchanged(self, tensor: torch.Tensor, kind: type) -> bool:
        return type(tensor) is not kind or place_in_memory(tensor) != self.memory[id(tensor)][1]

    def restore(self, seen: Observed | None = None, touched: set[int] | None = None) -> None:
        """May be called again where something interrupted it.

        seen: what ran: attributes that it does not name are left alone, for another thread may work with them.
        touched: the containers that it can have reached.
        """
        self.clear_caches()
        everything = seen is None or not seen.complete or seen.by_any_name
        for own, values, _ in self._objects:
            keys = [key for key in {**values, **own} if own.get(key, _MISSING) is not values.get(key, _MISSING)]
            named = keys if seen is None or everything or id(own) in (touched or ()) else seen.names.intersection(keys)
            if len(named) == len(keys):
                _fill(own, parts_of(values))
                continue
            for key in named:
                if key in values:
                    own[key] = values[key]
                else:
                    del own[key]
        for scope, values, _ in self._variables:
            moved = {key: value for key, value in values.items() if scope.get(key, _MISSING) is not value}
            scope.update({k: value for k, value in moved.items() if seen is None or everything or k in seen.names})
        for scope, names in self._absent:
            for name in [name for name in scope if name in names]:
                if seen is None or everything or name in seen.names:
                    del scope[name]
        for container, items, _ in self._containers:
            if everything or touched is None or id(container) in touched:
                _fill(container, items)
        for cell, was, _ in self._cells:
            if was is not _MISSING:
                cell.cell_contents = was
            elif is_set(cell):
                del cell.cell_contents
        self._restore_objects()

    def _restore_objects(self) -> None:
        for cls, attributes in self._classes:
            for key in [key for key, value in attributes.items() if vars(cls).get(key, _MISSING) is not value]:
                type.__setattr__(cls, key, attributes[key])
            for key in [key for key in _attributes_of(cls) if key not in attributes]:
                type.__delattr__(cls, key)
        for value, slot, was, _ in self._slots:
            if own_attribute(value, slot, _MISSING) is not was:
                _put_slot(value, slot, was)
        for function, defaults, named in self._functions:
            if function.__defaults__ is not defaults:
                function.__defaults__ = defaults
            if function.__kwdefaults__ is not named:
                function.__kwdefaults__ = named
        for owner, own in self._owners:
            if owner.__dict__ is not own:
                owner.__dict__ = own
        for value, kind in self._types:
            if type(value) is not kind:
                object.__setattr__(value, "__class__", kind)
        for generator, state_then in self._generators:
            if not torch.equal(generator.get_state(), state_then):
                generator.set_state(state_then)
        for values, kept, _ in self._arrays:
            if not values.flags.writeable:
                values.setflags(write=True)  # as it was
            values[...] = kept
        for value, state, put_back, _ in self._states:
            if put_back is not None and state_of(value) != state:
                put_back()
        for tensor, kind, data in self._data:
            if type(tensor) is not kind:  # swapped with a fake one
                torch._C._swap_tensor_impl(tensor, data.detach())
                tensor.__class__ = kind
                if all(owner is not tensor for owner, _ in self._owners):
                    tensor.__dict__ = {}
            elif self._is_exchanged(tensor, kind):
                tensor.data = data
        for tensor, requires_grad, grad in self._tensors:
            if tensor.grad is not grad:
                tensor.grad = grad
            if tensor.requires_grad != requires_grad and tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
        for tensor, hooks in self._hooks:
            if tensor._backward_hooks is not hooks:
                tensor._backward_hooks = hooks
        if self._folder is not None and _folder() != self._folder:
            os.chdir(self._folder)
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)


_CHANGING = (list, dict, set, deque)
_LEFT_ALONE = (
    torch.Tensor, torch.nn.Module, types.FunctionType, types.ModuleType, np.ndarray, partial, RemovableHandle,
    *_CHANGING,
)  # fmt: skip


def _attributes_of(cls: type) -> dict[str, Any]:
    return {key: value for key, value in vars(cls).items() if not counts_itself(cls, key)}


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _tuple_items(was: Any) -> list[Any] | None:
    return list(was) if is_a(was, tuple) else None


def _places_of_new(place: Place, there: set[int], deep: int = 3) -> Iterator[Place]:
    """The attributes of an object that came in the place of another."""
    value = place.now
    if id(value) in there or not deep or is_a(value, (type, *_LEFT_ALONE)):
        return
    own = own_attribute(value, "__dict__")
    names = list(own) if isinstance(own, dict) else list(slots_of(type(value)))
    for name in names:
        if (now := own_attribute(value, name, _MISSING)) is not _MISSING:
            put = partial(object.__setattr__, value, name)
            inner = Place(now, put, joined(place.path, name))
            yield inner
            yield from _places_of_new(inner, there, deep - 1)


def _places_in(container: Any, items: list[Any], path: str, moved: Callable[[Any, Any], bool]) -> Iterator[Place]:
    if isinstance(container, dict):
        before = dict(zip(items[::2], items[1::2], strict=True))
        for key in [key for key, now in items_of(container) if moved(now, before.get(key, _MISSING))]:
            yield Place(dict.__getitem__(container, key), partial(dict.__setitem__, container, key), joined(path, key))
    elif isinstance(container, list):
        for at, now in enumerate(parts_of(container)):
            if moved(now, items[at] if at < len(items) else _MISSING):
                yield Place(now, partial(list.__setitem__, container, at), f"{path}.{at}")


def _entries_of(cache: Any) -> Any:
    """The dict within an unbounded functools.lru_cache; None where it is bounded: its entries are in a list too."""
    if cache.cache_parameters()["maxsize"] is not None:
        return None
    return next((d for d in gc.get_referents(cache) if type(d) is dict and d is not vars(cache)), None)


def _entries(cache: Any) -> dict[Any, Any] | None:
    entries = _entries_of(cache)
    return None if entries is None else dict(entries)


def _within(cache: Any, deep: int = 4) -> Iterator[Any]:
    """What a cache keeps, and the containers among it."""
    for held in gc.get_referents(cache):
        yield held
        if deep and isinstance(held, dict | list | tuple):
            yield from _within(held, deep - 1)


def _put_slot(value: Any, slot: str, was: Any) -> None:
    if isinstance(value, partial):  # its attributes are set together
        now = {"func": value.func, "args": value.args, "keywords": value.keywords, slot: was}
        state = now["func"], now["args"], now["keywords"], vars(value)
        operator.methodcaller("__setstate__", state)(value)
    elif was is _MISSING:
        object.__delattr__(value, slot)
    else:
        object.__setattr__(value, slot, was)


def _same_items(now: list[Any], was: list[Any]) -> bool:
    return len(now) == len(was) and all(map(operator.is_, now, was))


def _is_other(now: Any, was: Any) -> bool:
    return now is not was and not (is_a(was, PLAIN) and type(now) is type(was) and repr(now) == repr(was))


def _can_be_kept(values: np.ndarray[Any, Any]) -> bool:
    return bool(values.flags.writeable) and values.nbytes <= LARGE_BYTES


def _fill(container: Any, items: list[Any]) -> None:
    """The same items in the same order again, whatever methods a subclass has."""
    if _same_items(parts_of(container), items):
        return
    if isinstance(container, list):
        list.__setitem__(container, slice(None), items)
    elif isinstance(container, dict):
        kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)
        kind.update(container, zip(items[::2], items[1::2], strict=True))
    elif isinstance(container, deque):
        deque.clear(container)
        deque.extend(container, items)
    else:
        set.clear(container)
        set.update(container, items)


def _put_back(value: Any) -> Callable[[], object] | None:
    """A function that puts an object's state back as it is now; None where that cannot be done."""
    if isinstance(value, random.Random):
        state = value.getstate()
        return lambda: value.setstate(state)
    if isinstance(value, np.random.Generator | np.random.BitGenerator):
        bits: Any = value.bit_generator if isinstance(value, np.random.Generator) else value
        bit_state = bits.state
        return lambda: setattr(bits, "state", bit_state)
    if isinstance(value, torch.jit.ScriptModule):
        kept = attributes_of_script(value)
        return lambda: [value._c.setattr(name, was) for name, was in kept.items()]
    if isinstance(value, np.random.RandomState):
        old = value.get_state(legacy=False)
        return lambda: value.set_state(old)
    if isinstance(value, ContextVar):
        content = value.get(_MISSING)
        return None if content is _MISSING else lambda: value.set(content)
    if isinstance(value, bytearray | array | C_DATA) and size_of(value) > LARGE_BYTES:
        return None
    if isinstance(value, bytearray | array):
        buffer: Any = value
        copied = buffer[:]
        return lambda: buffer.__setitem__(slice(None), copied)
    if isinstance(value, C_DATA):
        raw = bytes(value)
        return lambda: ctypes.memmove(ctypes.addressof(value), raw, len(raw))
    if isinstance(value, mmap.mmap):
        memory: Any = value
        held = memory[:] if len(memory) <= LARGE_BYTES else None
        return None if held is None else lambda: memory.__setitem__(slice(None), held)
    return _put_back_stream(value) if isinstance(value, IOBase) and state_of(value) is not None else None


def _put_back_stream(stream: Any) -> Callable[[], object]:
    at, content = stream.tell(), state_of(stream)[1]

    def put_back() -> None:
        if isinstance(content, str | bytes) and stream.getvalue() != content:
            stream.seek(0)
            stream.truncate()
            stream.write(content)
        stream.seek(at)

    return put_back
