"""Has anything changed that a capture read?

In:  the objects that a capture started from, and what ran meanwhile (`Observed`).
Out: `Watch.holds()`: True while every attribute, item, variable, class, function, array and iterator that the capture
     could read is what it was. It is asked before each step, so it compares identities, in C where it can:

         the same objects at the same places?  ──yes──▶ holds
                         │ no
                         ▼
         walk once more: does the trail differ?  ──no──▶ holds; from here on with the new objects

Plain values count by value, tensors by shape, type and layout: a step reads what they hold each time it runs. Of a
large NumPy array samples are compared.
"""

from __future__ import annotations

import os
import sys
import types
from abc import get_cache_token
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import optimizer as of_torch

from edgetrain.graph.capture.contents import content_of, layout_of, looks_of, state_of
from edgetrain.graph.capture.files import stamp
from edgetrain.graph.capture.objects import PLAIN, is_a, is_set, own_attribute, parts_of, target_of
from edgetrain.graph.capture.observe import Observed
from edgetrain.graph.capture.optimizers import own_hooks
from edgetrain.graph.capture.reach import Reach
from edgetrain.graph.capture.settings import function_modes
from edgetrain.native import same
from edgetrain.native.signals import raised_by_handler

Root = tuple[Any, str]
_MISSING = object()
WALKS = 5  # that another thread may spoil before it counts as a change
MAX_HARMLESS = 8  # captures of one step that a change led to and that were the same
_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}


class Watch:
    """roots: what the capture started from, each with its path.

    optimizer: its parameters count, and its settings do not: a step reads them each time it runs.
    ignored: paths of attributes and variables that have changed and made no difference, and that no code that ran
    names.
    harmless: how many changes made no difference; after `MAX_HARMLESS` nothing counts whose name stands in no code that
    ran.
    """

    def __init__(
        self,
        roots: Sequence[Root],
        observed: Observed,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        ignored: frozenset[str] = frozenset(),
        harmless: int = 0,
    ) -> None:
        self._roots, self._observed, self._optimizer = roots, observed, optimizer
        self._ignored, self._harmless = ignored, harmless
        reads_it = not observed.complete or not observed.names.isdisjoint(_ENVIRONMENT)
        self._environment: dict[bytes, bytes] | None = vars(os.environ)["_data"] if reads_it else None
        self._look()

    def after(self, before: Watch) -> Watch:
        """The same, after a change that made no difference: a list that a training loop keeps, for example. What has
        changed since `before` is ignored from here on, where no code that ran names it."""
        ignored = before._ignored
        if not self._observed.by_any_name:
            unnamed = before._unnamed | self._unnamed
            ignored |= {place for path in self._moved_since(before) if (place := _innermost(path, unnamed))}
        return Watch(self._roots, self._observed, self._optimizer, ignored=ignored, harmless=before._harmless + 1)

    def _moved_since(self, before: Watch) -> set[str]:
        """The paths at which something else stands."""
        then, now = before._by_path(), self._by_path()
        return {path for path in then.keys() | now.keys() if then.get(path) != now.get(path)}

    def _by_path(self) -> dict[str, list[Any]]:
        """The trail without the order and the numbers of what was met: one more at one place leaves all others."""
        entries: dict[str, list[Any]] = {}
        for path, *what in self._trail:
            met = what[0] == "met"
            entries.setdefault(path, []).append(("met", self._first_paths[what[1]]) if met else what)
        return entries

    def holds(self) -> bool:
        """Nothing that counts has changed since the capture."""
        return self._untouched() or not self.changes()

    def changes(self) -> list[str]:
        """The paths of what has changed. Where nothing has, the objects there are now are compared from here on."""
        for _ in range(WALKS):
            try:
                trail = self._walk().trail
                break
            except RuntimeError as error:  # another thread changes a container
                if raised_by_handler(error):
                    raise
        else:
            return ["an object that another thread changes"]
        different = [now[0] for now, was in zip(trail, self._trail, strict=False) if now != was]
        longer = max(trail, self._trail, key=len)[min(len(trail), len(self._trail)) :]
        different += [place[0] for place in longer]
        if not different:
            self._look()
        return list(dict.fromkeys(different))

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self._optimizer is None else self._optimizer.param_groups

    def _walk(self) -> Reach:
        reach = Reach(self._observed, narrow=self._harmless > MAX_HARMLESS, ignored=self._ignored)
        for value, path in self._roots:
            reach.add(value, path)
        for number, mode in enumerate(function_modes()):
            reach.add(mode, f"mode.{number}")
        for number, group in enumerate(self._groups):
            reach.add(group["params"], f"optimizer.{number}")
        if self._optimizer is not None:
            reach.add(type(self._optimizer), "optimizer")
            reach.trail.append(("optimizer.step", *self._calls(self._optimizer)))
            code = vars(sys.modules[type(self._optimizer).__module__])
            functions = [(name, id(f)) for name, f in code.items() if isinstance(f, types.FunctionType)]
            reach.trail.append(("optimizer", "code", functions))
        reach.add(torch.Tensor, "torch.Tensor")
        reach.add_scopes()
        reach.trail.extend(reach.weak_trail(reach.weak))
        reach.trail.extend((file, "file", stamp(file)) for file in self._observed.files)
        reach.trail.append(("the working folder", self._folder()))
        reach.trail.append(("os.environ", None if self._environment is None else dict(self._environment)))
        return reach

    def _folder(self) -> str | None:
        """Where files are read, or it is asked for, the working folder counts."""
        try:
            return os.getcwd() if self._observed.files or "getcwd" in self._observed.names else None
        except OSError:
            return None

    @staticmethod
    def _calls(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
        """What a captured step does not call, and refuses when it is captured."""
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        of_all = len(of_torch._global_optimizer_pre_hooks) + len(of_torch._global_optimizer_post_hooks)
        methods = [id(value) for value in vars(optimizer).values() if callable(value)]
        return methods, len(before), len(after), of_all - len(own_hooks)

    def _look(self) -> None:
        reach = self._walk()
        self._trail, self._alive, self._registered = reach.trail, reach.alive, get_cache_token()
        self._first_paths, self._unnamed = reach.first_paths, reach.unnamed
        self._at = self._folder()
        self._modes = function_modes()
        self._look_at_names(reach)
        self._look_at_objects(reach)
        self._look_at_weak(reach)

    def _look_at_weak(self, reach: Reach) -> None:
        """What nothing but weak references leads to: it is walked each time, and not kept alive here."""
        weak = [(ref, path) for ref, path in reach.weak if not reach.keeps(target_of(ref))]
        self._weak = weak, (reach if weak else None), reach.weak_trail(weak)

    def _weak_holds(self) -> bool:
        refs, reach, trail = self._weak
        return reach is None or reach.weak_trail(refs) == trail

    def _look_at_names(self, reach: Reach) -> None:
        shelves = {id(vars(module).get("_buffers")) for module in reach.modules.values()}
        places = {(id(d), key): d for d, keys, _ in (*reach.attributes, *reach.variables) for key in keys}
        items: list[tuple[Any, Any, Any]] = [(d, key, d[key]) for (n, key), d in places.items() if n not in shelves]
        items += [(group, "params", group["params"]) for group in self._groups]
        if self._optimizer is not None:
            items.append((vars(self._optimizer), "param_groups", self._optimizer.param_groups))
            code = vars(sys.modules[type(self._optimizer).__module__])
            items += [(code, name, f) for name, f in code.items() if isinstance(f, types.FunctionType)]
        items += [(c, key, value) for c in reach.classes for key, value in vars(c).items() if reach.runs(key, c)]
        sized: list[Any] = [d for d, _, _ in reach.attributes] + [d for d, _ in reach.absent]
        sized += [f.__dict__ for f in reach.functions]
        sizes: dict[int, tuple[Any, int]] = {id(d): (d, len(d)) for d in sized}
        sizes |= {id(c): (c, len(vars(c))) for c in reach.classes}
        sizes |= {id(c): (c, 0) for c, _ in reach.containers if _is_empty(c)}
        self._rows = _rows(items, sizes)
        self._places = same.Places(self._rows)
        self._buffers = [(d, key, layout_of(d[key])) for (n, key), d in places.items() if n in shelves]

    def _look_at_objects(self, reach: Reach) -> None:
        changing = [c for c, _ in reach.containers if not isinstance(c, tuple | frozenset)]
        shelves = [vars(m).get(name) for m in reach.modules.values() for name in ("_modules", "_parameters")]
        held = [(c, tuple(parts_of(c))) for c in (*changing, *(s for s in shelves if is_a(s, dict)), self._groups)]
        self._lists: list[same.ListRow] = [(c, parts) for c, parts in held if type(c) is list]
        self._dicts: list[same.DictRow] = [(c, parts) for c, parts in held if type(c) is dict]
        self._versions = same.no_versions(self._dicts)
        self._sets: list[same.SetRow] = [(c, parts) for c, parts in held if type(c) is set and parts]
        self._others = [(c, parts) for c, parts in held if type(c) not in (list, dict, set) and not _is_empty(c)]
        self._cells = [(c, c.cell_contents) for c, _ in reach.cells if is_set(c)]
        self._unset = [c for c, _ in reach.cells if not is_set(c)]
        self._functions = [(f, f.__code__, f.__defaults__, f.__kwdefaults__) for f in reach.functions]
        own = {id(owner): (owner, type(owner), held) for owner, held in reach.owners if _has(owner, held)}
        self._objects: list[same.ObjectRow] = [*({id(v): (v, type(v), None) for v in reach.objects} | own).values()]
        self._orders: list[same.OrderRow] = [(cls, cls.__mro__) for cls in reach.classes]
        self._slots = [(value, slot, own_attribute(value, slot, _MISSING)) for value, slot, _ in reach.slots]
        self._tensors = [(t, layout_of(t)) for t in reach.alive if is_a(t, torch.Tensor)]
        self._arrays = [(a, looks_of(a), content_of(a)) for a, _ in reach.arrays]
        self._states = [(value, state_of(value)) for value, _ in reach.stateful]
        self._outside = None if self._optimizer is None else self._calls(self._optimizer)
        self._variables = None if self._environment is None else dict(self._environment)

    def _untouched(self) -> bool:
        try:
            return (
                self._same_items()
                and same.lists(self._lists)
                and same.dicts(self._dicts, self._versions)
                and same.sets(self._sets)
                and all(len(now := parts_of(c)) == len(was) and all(map(is_, now, was)) for c, was in self._others)
                and not any(c.cell_contents is not v and _differs(c.cell_contents, v) for c, v in self._cells)
                and not any(map(is_set, self._unset))
                and same.functions(self._functions)
                and same.objects(self._objects)
                and same.orders(self._orders)
                and all(stamp(file) == was for file, was in self._observed.files.items())
                and all(own_attribute(value, slot, _MISSING) is was for value, slot, was in self._slots)
                and all(layout_of(t) == was for t, was in self._tensors)
                and all(layout_of(d[key]) == was for d, key, was in self._buffers)
                and all(looks_of(a) == looks and content_of(a) == was for a, looks, was in self._arrays)
                and all(state_of(value) == was for value, was in self._states)
                and (self._optimizer is None or self._calls(self._optimizer) == self._outside)
                and self._environment == self._variables
                and get_cache_token() == self._registered
                and self._folder() == self._at
                and (len(now := function_modes()) == len(self._modes) and all(map(is_, now, self._modes)))
                and self._weak_holds()
            )
        except (KeyError, IndexError, ValueError, RuntimeError) as error:
            # Something is gone, or changes at this moment.
            if raised_by_handler(error):
                raise
            return False

    def _same_items(self) -> bool:
        """Or equal plain values."""
        number = self._places.changed(0)
        while number >= 0:
            mapping, size, keys, objects = self._rows[number]
            held: Any = vars(mapping) if isinstance(mapping, type) else mapping
            if size is not None and len(held) != size:
                return False
            pairs = zip(keys, objects, strict=True)
            if any(held[key] is not then and _differs(held[key], then) for key, then in pairs):
                return False
            number = self._places.changed(number + 1)
        return True


def _rows(items: Iterable[tuple[Any, Any, Any]], sizes: Mapping[int, tuple[Any, int]]) -> list[same.PlaceRow]:
    """items: each a mapping or a class, a key, and what is there. sizes: by id, such a one and its number of items."""
    held: dict[int, tuple[Any, dict[Any, Any]]] = {number: (mapping, {}) for number, (mapping, _) in sizes.items()}
    for mapping, key, value in items:
        held.setdefault(id(mapping), (mapping, {}))[1][key] = value
    return [
        (mapping, sizes[number][1] if number in sizes else None, tuple(there), tuple(there.values()))
        for number, (mapping, there) in held.items()
    ]


def _innermost(path: str, places: set[str]) -> str | None:
    """The longest of the places that the path leads through."""
    while path not in places:
        path, _, rest = path.rpartition(".")
        if not rest or not path:
            return None
    return path


def _has(owner: Any, held: dict[str, Any]) -> bool:
    """As its own `__dict__`: a proxy shows that of another object."""
    try:
        return bool(same.objects([(owner, type(owner), held)]))
    except AttributeError:
        return False


def _is_empty(container: Any) -> bool:
    """And will show it by its length when it is not any more, which a subclass may not."""
    return type(container) in (set, deque, OrderedDict, defaultdict) and not container


def _differs(now: Any, then: Any) -> bool:
    return type(then) not in PLAIN or type(now) is not type(then) or repr(now) != repr(then)
