"""What is in an object that has no parts to follow, as something that can be compared: a tensor's layout, an array's
numbers, how far an iterator or a file was read."""

from __future__ import annotations

import array
import contextlib
import ctypes
import hashlib
import io
import marshal
import mmap
import os
import queue
import random
import weakref
from collections import deque
from collections.abc import Iterator
from contextvars import Context, ContextVar
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from edgetrain.graph.capture.objects import C_DATA, MANY, PLAIN, held, parts_of, target_of

# Their state is not among what they hold.
_STATEFUL = (
    bytearray, array.array, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator,
    C_DATA, ContextVar, Context, mmap.mmap, np.void,
)  # fmt: skip
LARGE_BYTES = 1 << 20


def is_stateful(value: Any) -> bool:
    return (
        isinstance(value, (*_STATEFUL, weakref.ReferenceType))
        or type(value).__module__ in ("itertools", "_queue")
        or any("__next__" in base.__dict__ for base in type(value).__mro__)  # asked, a mock makes another mock
    )


def state_of(value: Any) -> Any:
    """What moves when such an object is used: something that can be compared."""
    if isinstance(value, weakref.ReferenceType):
        return id(target_of(value))
    if isinstance(value, torch.jit.ScriptModule):
        return repr(attributes_of_script(value))
    if isinstance(value, ContextVar):
        return id(value.get(None))
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, np.random.BitGenerator):
        return repr(value.state)
    if isinstance(value, Context):
        return [(id(variable), id(item)) for variable, item in value.items()]
    if isinstance(value, bytearray | array.array | C_DATA):
        return bytes(value) if size_of(value) <= LARGE_BYTES else _samples_of(value)
    if isinstance(value, np.void):
        return value.tobytes()
    if isinstance(value, queue.SimpleQueue):
        return value.qsize()
    if isinstance(value, mmap.mmap):
        return None if value.closed else value[:: 1 + len(value) // LARGE_BYTES * 256]
    if isinstance(value, io.IOBase):
        return _state_of_stream(value)
    return [id(item) for item in held(value)], list(_position(value))


def attributes_of_script(module: Any) -> dict[str, Any]:
    """Those that TorchScript keeps, but its tensors and what it cannot give to Python."""
    if "_concrete_type" not in vars(module):  # scripted and not loaded; or in the making
        return {}
    kept = {}
    for name in module._concrete_type.get_attributes():
        with contextlib.suppress(RuntimeError, AttributeError):
            value = module._c.getattr(name)
            if not isinstance(value, torch.Tensor | torch.ScriptObject):
                kept[name] = value
    return kept


def _state_of_stream(stream: Any) -> tuple[int, Any] | None:
    """How far it was read, and what is in it; None where nothing can be read from it."""
    if stream.closed or not stream.seekable() or not stream.readable():
        return None
    if isinstance(stream, io.StringIO | io.BytesIO):
        content: Any = stream.getvalue()
        return stream.tell(), content if len(content) <= LARGE_BYTES else len(content)
    if stream.writable():
        stream.flush()
    try:
        file = os.stat(stream.fileno())
    except (OSError, ValueError):  # no file of the system's
        return stream.tell(), None
    try:
        at = stream.tell()
    except OSError:  # its lines are being gone through
        at = -1
    return at, (file.st_mtime_ns, file.st_size)


def reads_on(stream: Any, then: Any) -> bool:
    """Something was read since; what was only written made it longer."""
    now = state_of(stream)
    return now is None or then is None or now[1] == then[1]


def _position(iterator: Any) -> Iterator[Any]:
    """How far an iterator of Python's own is, as plain values; those that do not say it hold what moves."""
    if type(iterator).__module__ not in ("builtins", "itertools", "collections"):
        return
    try:
        parts = [iterator.__reduce__()]
    except TypeError:  # a generator
        return
    while parts:
        part = parts.pop()
        if isinstance(part, tuple):
            parts.extend(part)
        elif isinstance(part, PLAIN):
            yield part


def size_of(value: Any) -> int:
    """The bytes of an object that holds nothing else."""
    if isinstance(value, C_DATA):
        return ctypes.sizeof(value)
    return len(value) * (value.itemsize if isinstance(value, array.array) else 1)


def _samples_of(value: Any) -> tuple[int, list[int]]:
    """Evenly spread words of an object with many bytes."""
    n_words = size_of(value) // 8
    return size_of(value), (ctypes.c_uint64 * n_words).from_buffer(value)[:: n_words // 4096]


def plain_content(container: Any) -> Any:
    """Another one for other values in it, or another order."""
    if len(container) < MANY:
        return repr(container)
    try:
        data = marshal.dumps(list(container) if type(container) is deque else container, 2)
    except ValueError:  # types of torch, slices
        data = repr(parts_of(container)).encode()
    return hashlib.blake2b(data).digest()


def layout_of(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    """Of a tensor all that a graph depends on but its values; where its memory begins comes last."""
    if tensor is None:
        return (None,)
    if tensor.layout is not torch.strided:
        return tensor.shape, tensor.layout, tensor.dtype, tensor.requires_grad, None
    if tensor.is_meta or isinstance(tensor, FakeTensor):  # of a capture that was not over
        return tensor.shape, tensor.stride(), tensor.dtype, None
    return (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad,
        id(tensor._backward_hooks), len(tensor.__dict__), id(tensor._post_accumulate_grad_hooks),
        tensor.data_ptr(),
    )  # fmt: skip


def looks_of(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Of an array all but its numbers."""
    return array.shape, array.strides, array.dtype, array.flags.writeable


def content_of(array: np.ndarray[Any, Any]) -> bytes:
    """What an array holds; of a large one evenly spread samples."""
    if array.dtype.hasobject:
        return repr([id(item) for item in array.ravel().tolist()]).encode()
    return (array if array.nbytes <= LARGE_BYTES else array.flat[:: array.size // 4096]).tobytes()
