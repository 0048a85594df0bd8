"""Everything that a captured graph depends on, as one hash; and where the tensors that it reads were found.

In:  any Python object: a loss function, a model, settings.
Out: `Walk.digest` of bytecode, closures, globals in use, attributes, shapes and training flags, or None with
     `Walk.reason` where something was met that cannot be hashed; and the paths of the tensors and modules on the way.

Tensors are hashed by shape, type and layout, never by value: a step reads their values each time it runs. Code of
installed packages is hashed by name and version, all other code by its bytecode. Whatever is not understood turns the
hash off, for a stale graph would train wrongly in silence.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib.metadata
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range)
_TORCH_PLAIN = (torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size)
_INSTALLED = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_CLASS_NOISE = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__"}
_MODULE_NOISE = {"_is_full_backward_hook", "_non_persistent_buffers_set"}


class Walk:
    """Walks objects depth first and hashes what it meets. One walk may be given several roots, in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # what was seen is kept, so that no identity is used twice
        self.reason: str | None = None
        self.tensors: dict[int, str] = {}  # id → path, the first one found
        self.modules: dict[str, nn.Module] = {}
        self.containers: list[Any] = []  # the lists, dicts, sets and attributes of objects on the way
        # What a program may set to something else between steps: where each value stands, and what it was.
        self.settings: list[tuple[Any, Any, Any]] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.lengths: list[tuple[Any, int]] = []
        self.slots: list[tuple[Any, str, Any]] = []
        self._paths: set[str] = set()

    @property
    def digest(self) -> str | None:
        return None if self.reason else self._hash.hexdigest()[:32]

    def add(self, value: Any, path: str) -> None:
        if isinstance(value, (*_PLAIN, *_TORCH_PLAIN)):
            self._put(type(value).__name__, repr(value))
        elif id(value) in self._seen:
            self._put("again", self._seen[id(value)])
        else:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
            self._add_new(value, path)

    def _put(self, *words: object) -> None:
        self._hash.update(repr(words).encode())

    def _add_new(self, value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = self._path_of_its_own(path)
            shape = (tuple(value.shape), value.stride() if value.layout == torch.strided else None)
            self._put("tensor", *shape, value.dtype, value.device, value.requires_grad, type(value).__name__)
        elif isinstance(value, nn.Module):
            self._add_module(value, path)
        elif isinstance(value, np.ndarray):
            self._put("array", value.shape, value.dtype.str, hashlib.sha256(value.tobytes()).hexdigest())
        elif isinstance(value, dict | types.MappingProxyType | list | tuple | deque):
            self._add_container(value, path)
        elif isinstance(value, set | frozenset):
            self.containers.append(value)
            self.lengths.append((value, len(value)))
            self._add_set(value, path)
        else:
            self._add_code_or_object(value, path)

    def _path_of_its_own(self, path: str) -> str:
        """Variables of two functions may have one name; a tensor is found again by its path, so no two share one."""
        own, number = path, 1
        while own in self._paths:
            number += 1
            own = f"{path}~{number}"
        self._paths.add(own)
        return own

    def _add_container(self, value: Any, path: str) -> None:
        self._put("container", type(value).__qualname__, len(value))
        items = enumerate(value) if isinstance(value, list | tuple | deque) else value.items()
        for key, item in items:
            if isinstance(value, list | dict | deque):
                self._watch(value, key, item)
            self.add(key, path)
            self.add(item, f"{path}.{key}")
        if isinstance(value, list | dict | deque):
            self.containers.append(value)
            self.lengths.append((value, len(value)))
        if type(value).__module__ not in ("builtins", "collections"):
            self._put("subclass")
            self.add(type(value), path)
            self._add_attributes(value, path)

    def _add_set(self, value: Iterable[Any], path: str) -> None:
        items = sorted(value, key=repr)
        self._put("set", len(items))
        if all(isinstance(item, _PLAIN) for item in items):
            self._put(items)
        else:
            self._refuse(path, value)  # the order of other items is not the same in another process

    def _add_code_or_object(self, value: Any, path: str) -> None:
        if isinstance(value, functools.partial):
            self._put("partial")
            self.add((value.func, value.args, value.keywords), path)
        elif isinstance(value, types.MethodType):
            self._put("method")
            self.add(value.__self__, path)
            self.add(value.__func__, path)
        elif isinstance(value, types.ModuleType):
            self._add_python_module(value, path)
        elif isinstance(value, enum.Enum):
            self._put("enum", type(value).__qualname__, value.name)
            self.add(value.value, path)
        elif isinstance(value, types.FunctionType):
            self._add_function(value, path)
        elif isinstance(value, type):
            self._add_class(value, path)
        elif isinstance(value, staticmethod | classmethod):
            self.add(value.__func__, path)
        elif isinstance(value, property | functools.cached_property):
            parts = (value.func,) if isinstance(value, functools.cached_property) else (value.fget, value.fset)
            self.add(parts, path)
        elif isinstance(value, types.BuiltinFunctionType | types.WrapperDescriptorType | types.MethodDescriptorType):
            self._put("builtin", getattr(value, "__module__", ""), value.__qualname__)
        elif isinstance(value, types.CodeType):
            self._add_bytecode(value, path)
        elif isinstance(value, weakref.ReferenceType):  # recurrent layers hold their weights this way too
            self._put("reference")
            self.add(value(), path)
        else:
            self._add_instance(value, path)

    def _add_module(self, module: nn.Module, path: str) -> None:
        self.modules[path] = module
        self._put("module", module.training)
        self.add(type(module), path)
        for key, item in vars(module).items():
            if key not in _MODULE_NOISE:
                self._put(key)
                nested = key in ("_parameters", "_buffers", "_modules")
                if nested:
                    for name, part in item.items():
                        self._put(name)
                        if key != "_buffers":  # a step reads buffers anew; `Step` looks at their shapes
                            self._watch(item, name, part)
                        self.add(part, f"{path}.{name}")
                else:
                    self._watch(vars(module), key, item)
                    self.add(item, f"{path}.{key}")

    def _watch(self, where: Any, key: Any, value: Any) -> None:
        self.settings.append((where, key, value))

    def changed(self) -> bool:
        """Has an attribute, closure variable, global or item been set to something else, or added, since the walk?"""
        try:
            return (
                any(where[key] is not value and _differs(where[key], value) for where, key, value in self.settings)
                or any(
                    cell.cell_contents is not value and _differs(cell.cell_contents, value)
                    for cell, value in self.cells
                )
                or any(len(container) != number for container, number in self.lengths)
                or any(
                    (now := getattr(value, slot, None)) is not was and _differs(now, was)
                    for value, slot, was in self.slots
                )
            )
        except (KeyError, IndexError, ValueError):  # it is gone; a cell that was emptied gives the last of these
            return True

    def _add_function(self, function: types.FunctionType, path: str) -> None:
        package = _installed(function.__module__)
        if package:
            self._put("function", function.__module__, function.__qualname__, package)
            if function.__closure__:
                self._add_cells(function, path)
            return
        self._put("function", function.__qualname__)
        self.add(function.__code__, path)
        self.add((function.__defaults__, function.__kwdefaults__), path)
        self._add_cells(function, path)
        self._add_used(function.__globals__, _names_in_use(function.__code__), "", frozenset())

    def _add_used(self, where: dict[str, Any], names: list[str], path: str, inside: frozenset[int]) -> None:
        """The globals among `names`; of the user's own modules, what is used of them under these names."""
        for name in names:
            if name not in where:
                continue
            value = where[name]
            self._put(name)
            self._watch(where, name, value)
            if not isinstance(value, types.ModuleType) or _installed(value.__name__):
                self.add(value, f"{path}{name}")
            elif id(value) not in inside:
                self._alive.append(value)
                self._add_used(vars(value), names, f"{path}{name}.", inside | {id(value)})

    def _add_cells(self, function: types.FunctionType, path: str) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._put("cell", name)
            try:
                value = cell.cell_contents
            except ValueError:
                self._put("empty cell")
                continue
            self.cells.append((cell, value))
            self.add(value, name)

    def _add_bytecode(self, code: types.CodeType, path: str) -> None:
        self._put("code", code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags)
        for constant in code.co_consts:
            self.add(constant, path)

    def _add_class(self, cls: type, path: str) -> None:
        package = _installed(cls.__module__)
        self._put("class", cls.__module__, cls.__qualname__, package)
        if package:
            return
        for base in cls.__bases__:
            self.add(base, path)
        for key, item in vars(cls).items():
            if key not in _CLASS_NOISE and not isinstance(
                item, types.GetSetDescriptorType | types.MemberDescriptorType
            ):
                self._put(key)
                if not isinstance(item, types.FunctionType):
                    self._watch(vars(cls), key, item)
                self.add(item, f"{path}.{key}")

    def _add_python_module(self, module: types.ModuleType, path: str) -> None:
        package = _installed(module.__name__)
        self._put("python module", module.__name__, package)
        if not package:
            self._refuse(path, module)  # which parts of it are used cannot be told

    def _add_instance(self, value: Any, path: str) -> None:
        attributes = getattr(value, "__dict__", None)
        slots = [s for c in type(value).__mro__ for s in c.__dict__.get("__slots__", ()) if isinstance(s, str)]
        if (not isinstance(attributes, Mapping) and not slots) or callable(getattr(value, "__next__", None)):
            self._refuse(path, value)
            return
        self._put("object")
        self.add(type(value), path)
        self._add_attributes(value, path)
        for slot in slots:
            if slot not in ("__dict__", "__weakref__"):
                self.slots.append((value, slot, getattr(value, slot, None)))
                self.add(getattr(value, slot, None), f"{path}.{slot}")

    def _add_attributes(self, value: Any, path: str) -> None:
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            return
        self.containers.append(attributes)
        for key, item in attributes.items():
            self._put(key)
            self._watch(attributes, key, item)
            self.add(item, f"{path}.{key}")

    def _refuse(self, path: str, value: Any) -> None:
        self.reason = self.reason or f"{path} is a {type(value).__module__}.{type(value).__qualname__}"


def _differs(now: Any, then: Any) -> bool:
    return not isinstance(then, _PLAIN) or type(now) is not type(then) or bool(now != then)


def _names_in_use(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names_in_use(constant)
    return sorted(set(names))


@functools.cache
def _installed(module_name: str | None) -> str:
    """`name version` of the installed package that a module belongs to; empty for the user's own code."""
    top = (module_name or "").partition(".")[0]
    module = sys.modules.get(top)
    if module is None or top == "__main__":
        return ""
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return f"python {sys.version}"
    file = getattr(module, "__file__", None)
    if file is None or not file.startswith(_INSTALLED):
        return ""
    version = getattr(module, "__version__", None)
    try:
        return f"{top} {version or importlib.metadata.version(top)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def surroundings() -> str:
    """What a capture depends on beside its arguments: versions, and the code of this package."""
    own = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        own.update(file.read_bytes())
    return f"torch {torch.__version__} python {sys.version} graph {own.hexdigest()}"


def settings() -> tuple[object, ...]:
    """Global switches of torch that change which kernels a model calls."""
    backends = torch.backends
    return (
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        backends.mkldnn.enabled,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
    )
