"""Python objects, asked without running code of theirs: what they are, what they hold, where it stands."""

from __future__ import annotations

import abc
import ctypes
import gc
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range, slice,
    torch.dtype, torch.device, torch.memory_format, torch.layout,
)  # fmt: skip
PLAIN_TYPES = set(PLAIN)
C_DATA: Any = ctypes.c_int.__mro__[-2]  # what ctypes derives numbers, structures, arrays and pointers from
MANY = 1000  # items
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_OURS = __name__.partition(".")[0] + "."
_MODELS = _OURS + "zoo."


def is_a(value: Any, kinds: Any) -> bool:
    """Like isinstance, without asking the object: a proxy may say that it is something else, or raise."""
    return issubclass(type(value), kinds)


def own_attribute(value: Any, name: str, default: Any = None) -> Any:
    """What stands there, without asking a `__getattr__` or `__getattribute__` of the user's, which may raise anything
    (`__getattr__ = dict.__getitem__`) and may count."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return default


def max_length(container: Any) -> int | None:
    """Of a deque."""
    return deque.maxlen.__get__(container) if is_a(container, deque) else None


def is_ours(value: Any) -> bool:
    """An object of edgetrain's own, such as a step that a trainer keeps: nothing that a model reads hangs on it."""
    module = type(value).__module__
    return (
        isinstance(module, str)
        and module.startswith(_OURS)
        and not (module.startswith(_MODELS) or is_a(value, nn.Module | torch.Tensor))
    )


def counts_itself(cls: type, key: str) -> bool:
    """The number of the next hook: the hooks of a capture raise it too, and nothing depends on it."""
    return cls is RemovableHandle and key == "next_id"


def joined(path: str, key: Any) -> str:
    """The path of what stands at a key. The text of a key that is an object may be long in the making: a tensor's."""
    name = str(key) if type(key) in PLAIN_TYPES else type(key).__name__
    return f"{path}.{name}" if path else name


def items_of(mapping: Any) -> Iterable[tuple[Any, Any]]:
    """The items themselves, in their order, whatever a subclass shows."""
    if isinstance(mapping, OrderedDict):
        return OrderedDict.items(mapping)
    return dict.items(mapping) if isinstance(mapping, dict) else mapping.items()


def parts_of(container: Any) -> list[Any]:
    """What a container holds, in its order, whatever a subclass shows; of a mapping the keys and the items in turn."""
    if is_a(container, dict | types.MappingProxyType):
        return [part for item in items_of(container) for part in item]
    kind: Any = next(kind for kind in (list, tuple, deque, set, frozenset) if is_a(container, kind))
    return list(kind.__iter__(container))


def holds_many_plain(container: Any) -> bool:
    """A container of Python's own with so many numbers and texts that they count together: a vocabulary, a table."""
    if type(container) not in _CONTAINERS or len(container) < MANY:
        return False
    kinds = set(map(type, container))
    return (kinds | set(map(type, container.values())) if type(container) is dict else kinds) <= PLAIN_TYPES


def slots_of(cls: type) -> Iterator[str]:
    """The names that `__slots__` gives, as they are stored."""
    for base in cls.__mro__:
        names = base.__dict__.get("__slots__", ())
        for slot in (names,) if isinstance(names, str) else names:
            if slot not in ("__dict__", "__weakref__"):
                private = slot.startswith("__") and not slot.endswith("__")
                yield f"_{base.__name__.lstrip('_')}{slot}" if private else slot


def registered(cls: abc.ABCMeta) -> frozenset[int]:
    """The classes that were registered with an abstract one."""
    dump: Any = vars(abc)["_get_dump"]
    return frozenset(id(ref()) for ref in dump(cls)[0])


def target_of(ref: Any) -> Any:
    """The object itself, where a subclass gives something made from it."""
    return weakref.ref.__call__(ref)


def is_set(cell: types.CellType) -> bool:
    """A variable of an enclosing function has a value."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def held(value: Any) -> list[Any]:
    """What an object written in C holds: an iterator its list, a view its dict. Frames and modules are not followed."""
    return [item for item in gc.get_referents(value) if not isinstance(item, types.FrameType | types.ModuleType | type)]
