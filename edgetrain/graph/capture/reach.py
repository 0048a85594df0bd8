"""Everything that a model, a loss and an optimizer can read: a walk over Python objects.

In:  any objects, and, once a step has been captured, what ran meanwhile (`Observed`).
Out: `Reach`: the tensors and modules with the paths to them, every place where a program may put something else
     (attributes, items, variables, classes, functions), and the trail of what stands there.

Without `Observed` the walk goes into every function of the user's own. With it, only into functions that ran, those of
installed packages included; and of the attributes of packages only to those whose names stand in code that ran. A
narrow walk does so with the attributes of all objects.
"""

from __future__ import annotations

import abc
import builtins
import ctypes
import functools
import io
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from contextvars import Context, ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from edgetrain.graph.capture.contents import content_of, is_stateful, layout_of, looks_of, plain_content, state_of
from edgetrain.graph.capture.installed import installed
from edgetrain.graph.capture.objects import (
    C_DATA,
    PLAIN,
    PLAIN_TYPES,
    held,
    holds_many_plain,
    is_a,
    is_set,
    items_of,
    joined,
    max_length,
    own_attribute,
    parts_of,
    registered,
    slots_of,
    target_of,
)
from edgetrain.graph.capture.observe import ANY_MODULE, Observed, code_of, imported_by, names_in
from edgetrain.graph.capture.walk import Trail, Walk
from edgetrain.native.signals import raised_by_handler

# Nothing of the user's hangs on these.
_CLOSED = (
    types.WrapperDescriptorType, types.MethodDescriptorType, types.CodeType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.ClassMethodDescriptorType, np.ufunc, torch.Generator,
)  # fmt: skip
# What is followed among the variables of packages; of all else there it counts which object it is.
_OF_PACKAGES = (types.FunctionType, dict, list, set, deque, *PLAIN)
_WRAPPERS = (functools.partial, types.MethodType, staticmethod, classmethod, property)
_WRAPPED = ("__self__", "__func__", "func", "args", "keywords", "fget", "fset")
_CACHED = type(functools.lru_cache(len))
SHELVES = ("_parameters", "_buffers", "_modules")
_SCOPE_BY_ANY_NAME = {"globals", "eval", "exec", "__globals__", "f_globals"}
_HEAP_TYPE = 1 << 9  # of a class's flags: its attributes can be set
# What is not in their dict.
_OF_CLASSES = ("__name__", "__qualname__")
_OF_FUNCTIONS = (*_OF_CLASSES, "__doc__", "__annotations__", "__module__")
BUFFER_NAMES = "_non_persistent_buffers_set"  # beside the shelf of the buffers; restored, and read by no forward
_NOISE = {"_is_full_backward_hook", BUFFER_NAMES}  # of modules
_KINDS_OF_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)


class Reach(Walk):
    """
    tensors:    id → path, the first one found
    attributes: the `__dict__` of objects, modules and functions: (mapping, keys that count, path)
    variables:  the same of Python modules, whose other variables do not count
    absent:     (mapping, names that would count if they were there)
    """

    def __init__(self, observed: Observed | None = None, *, narrow: bool = False, ignored: Container[str] = ()) -> None:
        super().__init__(observed, narrow=narrow, ignored=ignored)
        self._storages: dict[int, int] = {}
        self._paths: set[str] = set()
        self._used: set[tuple[int, frozenset[str]]] = set()
        self._whole: set[int] = set()  # modules of which all variables that count were added
        self.tensors: dict[int, str] = {}
        self.modules: dict[str, nn.Module] = {}
        self.attributes: list[tuple[dict[str, Any], list[str], str]] = []
        self.owners: list[tuple[Any, dict[str, Any]]] = []  # objects, and their `__dict__`
        self.variables: list[tuple[dict[str, Any], list[str], str]] = []
        self.absent: list[tuple[dict[str, Any], Container[str]]] = []
        self.containers: list[tuple[Any, str]] = []
        self.cells: list[tuple[types.CellType, str]] = []
        self.classes: list[type] = []
        self.functions: list[types.FunctionType] = []
        self.slots: list[tuple[Any, str, str]] = []
        self.arrays: list[tuple[np.ndarray[Any, Any], str]] = []
        self.stateful: list[tuple[Any, str]] = []
        self.weak: list[tuple[Any, str]] = []  # weak references
        self.caches: list[Any] = []  # of functools.lru_cache
        self.objects: list[Any] = []  # whose class may be set

    def add_scopes(self) -> None:
        """The variables of the modules whose code ran."""
        seen = self._observed
        for module, names in seen.scopes.items() if seen else ():
            if module in sys.modules:
                self._add_variables(vars(sys.modules[module]), names)
                self._drain()
        if seen:
            self._add_imported(seen.modules, self._own_names)
            self._drain()

    def held(self) -> Iterator[Any]:
        """What stands now at each place that was found, and what new containers at these places hold."""
        pending = [value for value in self._places() if type(value) not in PLAIN_TYPES]
        new: dict[int, Any] = {}
        while pending:
            value = pending.pop()
            if id(value) not in self._numbers and id(value) not in new:
                new[id(value)] = value
                yield value
                if is_a(value, dict | list | tuple | deque | set | frozenset) and not holds_many_plain(value):
                    pending += parts_of(value)

    def _places(self) -> Iterator[Any]:
        for container, _ in self.containers:
            yield from () if holds_many_plain(container) else parts_of(container)
        yield from (own[key] for own, _, _ in self.attributes for key in tuple(own))
        yield from (scope.get(key) for scope, keys, _ in self.variables for key in keys)
        yield from (scope[name] for scope, names in self.absent for name in tuple(scope) if name in names)
        yield from (cell.cell_contents for cell, _ in self.cells if is_set(cell))
        yield from (own_attribute(value, slot) for value, slot, _ in self.slots)
        yield from (item for cls in self.classes for item in vars(cls).values())

    def _described(self, value: Any) -> tuple[Any, ...]:
        """Containers, objects and functions by their parts, which follow on the trail; all else by identity."""
        if isinstance(value, torch.Tensor):
            return "tensor", id(value), type(value), layout_of(value)[:-1], self._storage_of(value)
        if isinstance(value, np.ndarray):
            return "array", type(value), looks_of(value), content_of(value)
        if isinstance(value, types.FunctionType):
            return "function", id(value.__code__)
        if holds_many_plain(value) or (type(value) in (list, tuple) and set(map(type, value)) <= PLAIN_TYPES):
            return type(value), len(value), max_length(value), plain_content(value)
        if isinstance(value, dict | list | tuple | deque | set | frozenset):
            return type(value), len(parts_of(value)), max_length(value)
        if isinstance(value, (type, types.ModuleType, *_CLOSED)):
            return "one", id(value)
        if self._has_state(value):
            return type(value), state_of(value)
        by_parts = isinstance(value, _WRAPPERS) or type(value).__dictoffset__ or any(slots_of(type(value)))
        return type(value), None if by_parts and not self._narrow else id(value)

    def _storage_of(self, tensor: torch.Tensor) -> int:
        """Tensors that share memory have the same number."""
        return self._storages.setdefault(layout_of(tensor)[-1] or id(tensor), len(self._storages))

    def _visit(self, value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = self._path_of_its_own(path)
            self.objects.append(value)
            if type(value) not in _KINDS_OF_TENSORS:
                self._push(type(value), path)
            if value.__dict__ or self._observed is None:  # later their number shows, in its layout
                self._add_attributes(value, path)
            self._push(value._backward_hooks, f"{path}'s hooks")
        elif isinstance(value, nn.Module):
            self._visit_module(value, path)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, path)
        elif isinstance(value, type):
            self._visit_class(value, path)
        elif isinstance(value, types.ModuleType):
            self._visit_python_module(value, path)
        elif isinstance(value, dict | types.MappingProxyType | list | tuple | deque | set | frozenset):
            self._visit_container(value, path)
        elif isinstance(value, np.ndarray):
            self.arrays.append((value, path))
            if value.dtype.hasobject:
                self._push(value.ravel().tolist(), path)
            if type(value) is not np.ndarray:
                self._push(type(value), path)
                self._add_attributes(value, path)
        elif isinstance(value, types.BuiltinFunctionType):
            self._push(value.__self__, path)
        elif not isinstance(value, _CLOSED):
            self._visit_object(value, path)

    def _path_of_its_own(self, path: str) -> str:
        """Variables of two functions may have one name; a tensor is found again by its path, so no two share one."""
        own, number = path, 1
        while own in self._paths:
            number += 1
            own = f"{path}~{number}"
        self._paths.add(own)
        return own

    def _visit_module(self, module: nn.Module, path: str) -> None:
        self.modules[path] = module
        self.objects.append(module)
        own = vars(module)
        self._push(type(module), path)
        keys = [key for key in own if key not in SHELVES and key not in _NOISE]
        self._add_keys(own, keys, module, path, [shelf for shelf in SHELVES if shelf in own])
        for shelf in SHELVES:
            items = own.get(shelf)
            if not isinstance(items, dict):  # of TorchScript
                items = {}
            self._number(items, path)
            self.attributes.append((items, list(items), path))
            for name, item in items.items():
                self._push(item, f"{path}.{name}")
        if self._observed is None and isinstance(names := own.get(BUFFER_NAMES), set):
            self.containers.append((names, path))
        if isinstance(module, torch.jit.ScriptModule):
            self.stateful.append((module, path))
            self.trail.append((path, "script", state_of(module)))
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                self._push(tensor, f"{path}.{name}")

    def _add_keys(
        self, own: dict[str, Any], keys: Iterable[str], owner: Any, path: str, also: Sequence[str] = ()
    ) -> None:
        """also: keys where it counts which object stands there, and what is in it is added by the caller."""
        read = [key for key in keys if self._reads(key, owner, joined(path, key))]
        self.owners.append((owner, own))
        self.attributes.append((own, [*read, *also], path))
        for key in read:
            self._push(own[key], joined(path, key))

    def _add_attributes(self, value: Any, path: str) -> None:
        own = own_attribute(value, "__dict__")
        if isinstance(own, dict):
            self._add_keys(own, own, value, path)

    def _add_raw_attributes(self, value: Any, path: str) -> None:
        """Of an object that cannot be asked which class it is of."""
        try:
            own = own_attribute(value, "__dict__")
        except Exception as error:
            if raised_by_handler(error):
                raise
            return
        if type(own) is dict:
            read = [key for key in own if self._reads(key, value, joined(path, key))]
            self.attributes.append((own, read, path))
            for key in read:
                self._push(own[key], joined(path, key))

    def _visit_container(self, value: Any, path: str) -> None:
        self.containers.append((value, path))
        if holds_many_plain(value):
            return
        if isinstance(value, dict | types.MappingProxyType):
            for key, item in items_of(value):
                self._push(key, path)
                self._push(item, joined(path, key))
        elif type(value) not in (list, tuple) or not set(map(type, value)) <= PLAIN_TYPES:
            for position, item in enumerate(parts_of(value)):
                self._push(item, f"{path}.{position}")
        if isinstance(value, defaultdict):
            self.slots.append((value, "default_factory", path))
            self._push(value.default_factory, f"{path}.default_factory")
        if type(value).__module__ not in ("builtins", "collections"):
            self._push(type(value), path)
            self._add_attributes(value, path)

    def _visit_function(self, function: types.FunctionType, path: str) -> None:
        seen = self._observed
        if (function.__dict__ and seen) or not (seen or installed(function.__module__)):
            self._add_keys(function.__dict__, function.__dict__, function, path)
        self._add_slots(function, _OF_FUNCTIONS, path)
        if seen and code_of(function.__code__) not in seen.codes:
            return
        self.functions.append(function)
        self._add_cells(function, path)
        if not seen and installed(function.__module__):
            return  # its cells alone: a decorator of a package may stand around a function of the user's
        self._push(function.__defaults__, path)
        self._push(function.__kwdefaults__, path)
        self._add_variables(function.__globals__, names_in(function.__code__))
        if not seen:
            self._add_imported(imported_by(function.__code__, function.__globals__), names_in(function.__code__))

    def _add_slots(self, owner: types.FunctionType | type, names: Iterable[str], path: str) -> None:
        """What a function or a class of the user's is called, say, where her code reads it."""
        seen = self._observed
        for name in names if seen and not installed(owner.__module__) else ():
            if seen and name in seen.own_names:
                self.slots.append((owner, name, path))
                self._push(getattr(owner, name), f"{path}.{name}")

    def _add_cells(self, function: types.FunctionType, path: str) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.cells.append((cell, name))
            if is_set(cell):
                self._push(cell.cell_contents, name)

    def _add_variables(self, scope: dict[str, Any], names: Iterable[str]) -> None:
        """The globals among `names`; where there is none, the builtin of that name."""
        names = frozenset(names)
        if _reads_any_variable(names) and not installed(scope.get("__name__")):
            self._add_module(scope, names, "")
        self._add_named(scope, names, names, "")
        self._add_imported([name for name in names if name not in scope], names)
        elsewhere = [name for name in names if name not in scope and name in vars(builtins)]
        self.variables.append((vars(builtins), elsewhere, "builtins"))
        for name in sorted(elsewhere):
            self._push(vars(builtins)[name], f"builtins.{name}")

    def _add_imported(self, modules: Iterable[str], names: frozenset[str]) -> None:
        """Those of the user's own that are in Python's table of modules."""
        within = tuple(name.removesuffix(ANY_MODULE) for name in modules if name.endswith(ANY_MODULE))
        modules = {*modules, *(name for name in tuple(sys.modules) if within and f"{name}.".startswith(within))}
        imported = sorted(n for n in modules if isinstance(sys.modules.get(n), types.ModuleType) and not installed(n))
        for name in imported:
            self._add_module(vars(sys.modules[name]), names, f"{name}.")
        if imported:
            self.variables.append((sys.modules, imported, "sys.modules"))

    def _add_module(self, scope: dict[str, Any], names: frozenset[str], path: str) -> None:
        """The variables of a Python module that code names: of a package those called `names`; of the user's own all,
        as of his objects, for other code may read them where the module is handed on."""
        own = not installed(scope.get("__name__"))
        if own and self._observed is not None:
            names = self._own_names
        if (id(scope), names) in self._used:
            return
        self._used.add((id(scope), names))
        if own and id(scope) not in self._whole:
            self._whole.add(id(scope))
            more = [key for key in scope if not key.startswith("__") and key not in names and self._takes_any()]
            read = [key for key in more if f"{path}{key}" not in self._ignored]
            if self._observed is not None:
                self.unnamed.update(f"{path}{key}" for key in read)
            read += names & scope.keys()
            self._add_named(scope, read, names, path, AllBut(scope) if self._takes_any() else None)
        else:
            self._add_named(scope, names, names, path)

    def _add_named(
        self,
        scope: dict[str, Any],
        names: Iterable[str],
        deeper: frozenset[str],
        path: str,
        absent: Container[str] | None = None,
    ) -> None:
        """The variables called `names` of a Python module, and of the modules among them those called `deeper`."""
        here = sorted(name for name in names if name in scope)
        self.variables.append((scope, here, path.removesuffix(".")))
        self.absent.append((scope, frozenset(names) - set(here) if absent is None else absent))
        own = not installed(scope.get("__name__"))
        for name in here:
            value = scope[name]
            if not is_a(value, types.ModuleType):
                if own or (isinstance(value, _OF_PACKAGES) and value is not sys.modules):
                    self._push(value, f"{path}{name}")
                else:
                    self.trail.append((f"{path}{name}", "one", id(value)))
            elif name in deeper and (self._observed is not None or not installed(value.__name__)):
                self._add_module(vars(value), deeper, f"{path}{name}.")

    def _visit_class(self, cls: type, path: str) -> None:
        if not cls.__flags__ & _HEAP_TYPE:
            return
        self.classes.append(cls)
        for base in (*cls.__bases__, type(cls)):
            self._push(base, path)
        if isinstance(cls, abc.ABCMeta) and not installed(cls.__module__):
            self.trail.append((path, "registered", registered(cls)))
        if installed(cls.__module__) and self._observed is None:
            return
        self._add_slots(cls, _OF_CLASSES, path)
        for key, item in vars(cls).items():
            code = isinstance(item, types.FunctionType | staticmethod | classmethod | property)
            if code or self._counts(key, cls):
                self._push(item, f"{path}.{key}")

    def _visit_python_module(self, module: types.ModuleType, path: str) -> None:
        """Held by an object: all of a module of the user's own counts."""
        if not installed(module.__name__):
            self._add_module(vars(module), frozenset(), f"{path}.")

    def _visit_object(self, value: Any, path: str) -> None:
        if self._has_state(value):
            self.stateful.append((value, path))
        if isinstance(value, weakref.ReferenceType):  # recurrent layers hold their weights this way too
            if self._observed is None:
                self._push(target_of(value), path)
            else:
                self.weak.append((value, path))
            return
        if isinstance(value, _CACHED):
            self.caches.append(value)
            # What it keeps counts, but is not ours to restore: its parts belong together.
            self._push(value.__wrapped__ if self._observed is None else held(value), path)
        slots = list(slots_of(type(value)))
        self.objects.append(value)
        self._push(type(value), path)
        self._add_attributes(value, path)
        for slot in slots:
            if self._reads(slot, value, joined(path, slot)):
                self.slots.append((value, slot, path))
                self._push(own_attribute(value, slot), f"{path}.{slot}")
        if isinstance(value, _WRAPPERS):
            for name in _WRAPPED:
                self._push(getattr(value, name, None), path)
            if isinstance(value, functools.partial):
                self.slots += [(value, name, path) for name in ("func", "args", "keywords")]
        elif isinstance(value, BaseException):
            self.slots.append((value, "args", path))
            self._push(value.args, path)
        elif isinstance(value, ContextVar):
            self._push(value.get(None), path)
        elif isinstance(value, Context):
            for variable, item in value.items():
                self._push((variable, item), path)
        elif isinstance(value, C_DATA):
            self._push(value._objects, path)
            if isinstance(value, ctypes._Pointer) and value:
                self._push(value.contents, path)
        elif not slots and own_attribute(value, "__dict__") is None:
            for item in held(value):
                self._push(item, path)

    def _has_state(self, value: Any) -> bool:
        """Of files and texts in memory what is in them counts where code reads from such: a log is only written."""
        if isinstance(value, io.IOBase) and self._observed is not None and not self._observed.reads_streams:
            return False
        return is_stateful(value)

    def weak_trail(self, refs: Iterable[tuple[Any, str]]) -> Trail:
        """What hangs on objects that nothing but weak references leads to; they are not kept alive."""
        apart = Reach(self._observed, narrow=self._narrow, ignored=self._ignored)
        apart._numbers = dict(self._numbers)
        apart.weak += refs
        while apart.weak:
            ref, path = apart.weak.pop()
            apart.add(target_of(ref), path)
        return apart.trail


def reach_of(*roots: tuple[Any, str]) -> Reach:
    """What hangs on these objects, each with its path."""
    reach = Reach()
    for value, path in roots:
        reach.add(value, path)
    return reach


def _reads_any_variable(names: frozenset[str]) -> bool:
    """Of its own module, by names that stand nowhere in the code."""
    return not names.isdisjoint(_SCOPE_BY_ANY_NAME) or {"sys", "modules"} <= names


class AllBut:
    """Every name but those that are there, and those of Python's own."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def __contains__(self, name: object) -> bool:
        return name not in self._names and not str(name).startswith("__")
