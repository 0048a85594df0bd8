"""The captured training step as plain data: storages, tensors, ops.

A `Graph` is what every other part reads: `verify` says which graphs are legal, planners schedule its ops,
`run/` executes them, `firmware/` prints them. It holds no torch tensor and no code, only numbers and names,
so it can be saved, read back equal, and planned on another machine.

    storage   a block of bytes:            parameter | buffer | state | input | constant | activation | gradient
    tensor    a typed, strided look at one storage (a view shares the storage of what it views); of integers, also what
              a unit is worth
    op        one kernel call: reads tensors, creates new ones, and sometimes writes a storage in place

Activations and gradients are in single-assignment form: each storage is written by the op that creates it, except for
the few that an op must change in place through a view; those ops name the storage in `writes`, as do ops that change
parameters, buffers and optimizer state. So what must come before what can be read off `Op.reads` and `Op.writes` alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

SCHEMA = 2

Role = Literal["parameter", "buffer", "state", "input", "constant", "activation", "gradient"]
Phase = Literal["forward", "backward", "update"]
AtomSort = Literal["dtype", "memory_format", "layout", "device"]
Sort = Literal["parameter", "buffer", "optimizer", "state", "input", "external", "constant"]
SORTS: tuple[Sort, ...] = ("parameter", "buffer", "optimizer", "state", "input", "external", "constant")
ROLES: tuple[Role, ...] = ("parameter", "buffer", "state", "input", "constant", "activation", "gradient")
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")
# Roles whose bytes exist before the step starts and after it ends.
PERSISTENT: tuple[Role, ...] = ("parameter", "buffer", "state", "input", "constant")

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
BITS = "uint1"  # packed, eight to a byte; PyTorch holds their bytes as a uint8 vector (`Tensor.carrier`)
DTYPES = (*ITEM_BYTES, BITS)
# What an integer of a type that may carry scales can be: the first number, and the last.
INTEGERS = {"uint8": (0, 2**8 - 1), **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)}}

_KIND = re.compile(r"(?!__)\w+\.(?!__)\w+\.(?!__)\w+")  # a file may name those that `unknown_kinds` knows
_NAME = re.compile(r"[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor in the arguments of an op."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Atom:
    """A torch constant in the arguments of an op: `Atom("dtype", "float32")`."""

    sort: AtomSort
    name: str


Scalar = bool | int | float | complex | str | None
Value = Scalar | Ref | Atom | tuple["Value", ...]


@dataclass(frozen=True, slots=True)
class Storage:
    n_bytes: int
    role: Role
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Quantization:
    """What the integers of a tensor stand for: scale · (integer - zero point).

    axis: the dimension along which each index has a scale and a zero point of its own; None where the tensor has one.
    """

    scales: tuple[float, ...]
    zero_points: tuple[int, ...]
    axis: int | None = None

    def __str__(self) -> str:
        if self.axis is None:
            return f"scale {self.scales[0]:.6g}, zero point {self.zero_points[0]}"
        return f"{len(self.scales)} scales along axis {self.axis}"


@dataclass(frozen=True, slots=True)
class Tensor:
    """shape, stride, offset: in elements, those of packed bits too."""

    name: str
    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    offset: int = 0
    quantization: Quantization | None = None

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return bytes_of(self.n_elements, self.dtype)

    @property
    def dense(self) -> bool:
        """Its elements lie side by side, in whatever order of its dimensions."""
        step = 1
        for stride, n in sorted(zip(self.stride, self.shape, strict=True)):
            if n != 1 and stride != step:
                return self.n_elements == 0
            step *= n
        return True

    @property
    def end_bytes(self) -> int:
        """One past the last byte of its storage that it touches."""
        if 0 in self.shape:
            return 0
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return bytes_of(last + 1, self.dtype)

    @property
    def carrier(self) -> Tensor:
        """The tensor by which PyTorch holds it: itself, or the bytes of its packed bits."""
        if self.dtype != BITS:
            return self
        return Tensor(self.name, self.storage, (self.n_bytes,), (1,), "uint8", self.offset // 8)

    def __str__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        return text if self.quantization is None else f"{text} ({self.quantization})"


def bytes_of(n_elements: int, dtype: str) -> int:
    """What so many elements take when they lie side by side: whole bytes."""
    return -(-n_elements // 8) if dtype == BITS else n_elements * ITEM_BYTES[dtype]


@dataclass(frozen=True)
class Op:
    """One kernel call. `kind` is torch's own name of it (`aten.convolution.default`) or one of ours
    (`edgetrain.sgd.update`).

    outputs: tensor numbers; None for an output that nothing reads.
    writes:  storages that it changes in place (not those that it creates).
    view:    its outputs share the storage of an input; nothing is computed.
    """

    name: str
    kind: str
    args: tuple[Value, ...]
    kwargs: tuple[tuple[str, Value], ...]
    outputs: tuple[int | None, ...]
    phase: Phase
    module: str = ""
    writes: tuple[int, ...] = ()
    random: bool = False
    view: bool = False

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """The tensors among its arguments, each once, in order."""
        return tuple(dict.fromkeys(ref.tensor for ref in _refs((*self.args, *(v for _, v in self.kwargs)))))

    @cached_property
    def creates(self) -> tuple[int, ...]:
        """The tensors that it creates."""
        return tuple(t for t in self.outputs if t is not None)


@dataclass(frozen=True, slots=True)
class Source:
    """Where the value of a persistent tensor comes from when a step starts.

    sort: parameter, buffer (`path` in the model), optimizer (`path` is `group.index`), state (`path` is
    `group.index.key`), input (`path` is the position in the batch), external (found in the loss's closure or
    elsewhere), constant (made by the model's own code; the graph carries its value).
    """

    sort: Sort
    path: str


@dataclass(frozen=True)
class Graph:
    """One whole training step, or the prediction of a model, as data."""

    storages: tuple[Storage, ...]
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    sources: Mapping[int, Source]
    outputs: tuple[int, ...]
    gradients: Mapping[int, int] = field(default_factory=dict)  # trained parameter → its gradient
    constants: Mapping[int, bytes] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # parameters of the optimizer that the loss does not reach, accepted as frozen
    about: Mapping[str, str] = field(default_factory=dict)  # model, optimizer, versions
    # In graph/files.py: a graph that is loaded is verified, and the rules of `verify` are above this module.
    save: ClassVar[Callable[[Graph, str | Path], None]]
    load: ClassVar[Callable[[str | Path], Graph]]

    @property
    def loss(self) -> int:
        return self.outputs[0]

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The batch, in order. Only the tensors that the step reads are there."""
        by_position = [(int(s.path), t) for t, s in self.sources.items() if s.sort == "input"]
        return tuple(t for _, t in sorted(by_position))

    @cached_property
    def new_storages(self) -> tuple[tuple[int, ...], ...]:
        """For each op the storages that come to be when it runs."""
        return tuple(self._new_storages(op) for op in self.ops)

    @cached_property
    def made_by(self) -> Mapping[int, int]:
        """Tensor → the op that creates it; persistent tensors have none."""
        return {t: number for number, op in enumerate(self.ops) for t in op.creates}

    @cached_property
    def touched(self) -> tuple[tuple[int, ...], ...]:
        """For each op the storages that it reads or creates and that do not persist, each once."""
        passing = [None if self.storages[t.storage].role in PERSISTENT else t.storage for t in self.tensors]
        storages = (dict.fromkeys(passing[t] for t in (*op.reads, *op.creates)) for op in self.ops)
        return tuple(tuple(s for s in touched if s is not None) for touched in storages)

    def _new_storages(self, op: Op) -> tuple[int, ...]:
        if op.view:
            return ()
        read = {self.tensors[t].storage for t in op.reads}
        created = dict.fromkeys(self.tensors[t].storage for t in op.creates)
        return tuple(s for s in created if s not in read and self.storages[s].role not in PERSISTENT)

    @cached_property
    def key(self) -> str:
        """A short hash of the whole content. A plan made for one graph is refused for another."""
        return hashlib.sha256(json.dumps(to_json(self), sort_keys=True).encode()).hexdigest()[:16]

    def role(self, tensor: int) -> Role:
        return self.storages[self.tensors[tensor].storage].role

    def bytes_by_role(self) -> dict[Role, int]:
        totals: dict[Role, int] = dict.fromkeys(ROLES, 0)
        for storage in self.storages:
            totals[storage.role] += storage.n_bytes
        return totals


def _refs(value: Value) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _refs(item)


def replace_refs(value: Value, change: Mapping[int, int]) -> Value:
    """The same arguments over other tensors."""
    if isinstance(value, Ref):
        return Ref(change.get(value.tensor, value.tensor))
    if isinstance(value, tuple):
        return tuple(replace_refs(item, change) for item in value)
    return value


# ---- to JSON and back ---------------------------------------------------------------------------------------


def _value_to_json(value: Value) -> Any:
    if isinstance(value, Ref):
        return {"t": value.tensor}
    if isinstance(value, Atom):
        return {value.sort: value.name}
    if isinstance(value, tuple):
        return [_value_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    return value


def _value_from_json(data: Any) -> Value:
    if isinstance(data, list):
        return tuple(_value_from_json(item) for item in data)
    if isinstance(data, dict):
        ((sort, name),) = data.items()
        if sort == "t":
            return Ref(_int(name))
        if sort == "float":
            return one_nan(float(name))
        if sort == "complex":
            real, imaginary = name
            return complex(float(real), float(imaginary))
        if sort not in ("dtype", "memory_format", "layout", "device") or not re.fullmatch(r"[\w:]+", name):
            raise ValueError(f"unknown argument {data!r}")
        return Atom(sort, name)
    if not isinstance(data, bool | int | float | str | None):
        raise ValueError(f"unknown argument {data!r}")
    return data


def one_nan(value: float) -> float:
    """The same number, and every NaN the same object: Python then finds graphs that hold one equal to themselves."""
    return math.nan if math.isnan(value) else value


def _int(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"expected an integer, received {value!r}")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(_int(v) for v in values)


def _source(sort: Any, path: str) -> Source:
    if sort not in SORTS or (sort == "input" and not path.isdecimal()):
        raise ValueError(f"unknown source {sort!r} {path!r}")
    return Source(sort, path)


def to_json(graph: Graph) -> dict[str, Any]:
    """Plain lists and numbers; the inverse of `from_json`."""
    return {
        "edgetrain graph": SCHEMA,
        "about": dict(graph.about),
        "storages": [[s.n_bytes, s.role, s.device] for s in graph.storages],
        "tensors": [_tensor_to_json(tensor) for tensor in graph.tensors],
        "ops": [_op_to_json(op) for op in graph.ops],
        "sources": {str(t): [s.sort, s.path] for t, s in graph.sources.items()},
        "outputs": list(graph.outputs),
        "gradients": {str(p): g for p, g in graph.gradients.items()},
        "constants": {str(t): base64.b64encode(v).decode() for t, v in graph.constants.items()},
        "unused": list(graph.unused),
    }


def _tensor_to_json(tensor: Tensor) -> list[Any]:
    q = tensor.quantization
    units = None if q is None else [q.scales, q.zero_points, q.axis]
    return [tensor.name, tensor.storage, tensor.shape, tensor.stride, tensor.dtype, tensor.offset, units]


def _tensor_from_json(data: Any) -> Tensor:
    name, storage, shape, stride, dtype, offset, units = data
    place = (str(name), _int(storage), _ints(shape), _ints(stride), str(dtype), _int(offset))
    return Tensor(*place, None if units is None else _quantization(units))


def _quantization(data: Any) -> Quantization:
    scales, zero_points, axis = data
    if not all(type(scale) in (int, float) for scale in scales):
        raise ValueError(f"expected scales that are numbers, received {scales!r:.60}")
    return Quantization(tuple(map(float, scales)), _ints(zero_points), None if axis is None else _int(axis))


def _op_to_json(op: Op) -> list[Any]:
    kwargs = {key: _value_to_json(value) for key, value in op.kwargs}
    flags = ("r" if op.random else "") + ("v" if op.view else "")
    args = [_value_to_json(a) for a in op.args]
    return [op.name, op.kind, args, kwargs, list(op.outputs), op.phase, op.module, list(op.writes), flags]


def _op_from_json(data: Any) -> Op:
    name, kind, args, kwargs, outputs, phase, module, writes, flags = data
    if not _KIND.fullmatch(kind):
        raise ValueError(f"unknown op {kind!r}")
    if not _NAME.fullmatch(name) or not all(_NAME.fullmatch(key) for key in kwargs):
        raise ValueError(f"{name!r} or one of its keywords is no name")
    return Op(
        name=str(name),
        kind=kind,
        args=tuple(_value_from_json(a) for a in args),
        kwargs=tuple((str(key), _value_from_json(value)) for key, value in kwargs.items()),
        outputs=tuple(None if t is None else _int(t) for t in outputs),
        phase=phase,
        module=str(module),
        writes=_ints(writes),
        random="r" in flags,
        view="v" in flags,
    )


def from_json(data: Mapping[str, Any]) -> Graph:
    """A graph from what `to_json` gave. Raises ValueError, KeyError or TypeError on anything else."""
    if data.get("edgetrain graph") != SCHEMA:
        received = data.get("edgetrain graph")
        raise ValueError(f"the file has schema {received!r}, and this version of edgetrain reads schema {SCHEMA}")
    return Graph(
        storages=tuple(Storage(_int(n), role, str(device)) for n, role, device in data["storages"]),
        tensors=tuple(_tensor_from_json(tensor) for tensor in data["tensors"]),
        ops=tuple(_op_from_json(op) for op in data["ops"]),
        sources={int(t): _source(sort, str(path)) for t, (sort, path) in data["sources"].items()},
        outputs=_ints(data["outputs"]),
        gradients={int(p): _int(g) for p, g in data["gradients"].items()},
        constants={int(t): base64.b64decode(v, validate=True) for t, v in data["constants"].items()},
        unused=tuple(str(name) for name in data["unused"]),
        about={str(k): str(v) for k, v in data["about"].items()},
    )
