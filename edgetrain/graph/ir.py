"""The captured training step as plain data: storages, tensors, ops.

A `Graph` is what every other part reads: `verify` says which graphs are legal, planners schedule its ops,
`run/` executes them, `firmware/` prints them. It holds no torch tensor and no code, only numbers and names,
so it can be saved, read back equal, and planned on another machine.

    storage   a block of bytes:            parameter | buffer | state | input | constant | activation | gradient
    tensor    a typed, strided look at one storage (a view shares the storage of what it views)
    op        one kernel call: reads tensors, makes new ones, and sometimes writes a storage in place

Activations and gradients are in single-assignment form: each storage is written by the op that makes it, except for
the few that an op must change in place through a view; those ops name the storage in `writes`, as do ops that change
parameters, buffers and optimizer state. So what must come before what can be read off `Op.reads` and `Op.writes` alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from edgetrain import files, saved
from edgetrain.errors import UserError

SCHEMA = 1

Role = Literal["parameter", "buffer", "state", "input", "constant", "activation", "gradient"]
Phase = Literal["forward", "backward", "update"]
AtomSort = Literal["dtype", "memory_format", "layout", "device"]
Sort = Literal["parameter", "buffer", "optimizer", "state", "input", "external", "constant"]
SORTS: tuple[Sort, ...] = ("parameter", "buffer", "optimizer", "state", "input", "external", "constant")
ROLES: tuple[Role, ...] = ("parameter", "buffer", "state", "input", "constant", "activation", "gradient")
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")
# Roles whose bytes are there before the step starts and after it ends.
PERSISTENT: tuple[Role, ...] = ("parameter", "buffer", "state", "input", "constant")

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip

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
class Tensor:
    name: str
    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    offset: int = 0

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.n_elements * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


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
        """The tensors that it makes."""
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

    @property
    def loss(self) -> int:
        return self.outputs[0]

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The batch, in order. Only the tensors that the step reads are there."""
        found = [(int(s.path), t) for t, s in self.sources.items() if s.sort == "input"]
        return tuple(t for _, t in sorted(found))

    @cached_property
    def new_storages(self) -> tuple[tuple[int, ...], ...]:
        """For each op the storages that come to be when it runs."""
        return tuple(self._new_storages(op) for op in self.ops)

    @cached_property
    def made_by(self) -> Mapping[int, int]:
        """Tensor → the op that makes it; persistent tensors are not there."""
        return {t: number for number, op in enumerate(self.ops) for t in op.creates}

    @cached_property
    def touched(self) -> tuple[tuple[int, ...], ...]:
        """For each op the storages that it reads or makes and that do not last, each once."""
        passing = [None if self.storages[t.storage].role in PERSISTENT else t.storage for t in self.tensors]
        found = (dict.fromkeys(passing[t] for t in (*op.reads, *op.creates)) for op in self.ops)
        return tuple(tuple(s for s in touched if s is not None) for touched in found)

    def _new_storages(self, op: Op) -> tuple[int, ...]:
        if op.view:
            return ()
        read = {self.tensors[t].storage for t in op.reads}
        made = dict.fromkeys(self.tensors[t].storage for t in op.creates)
        return tuple(s for s in made if s not in read and self.storages[s].role not in PERSISTENT)

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

    def save(self, path: str | Path) -> None:
        """The graph and its key, by which `load` finds a file that was changed since."""
        files.write_text(path, json.dumps({**to_json(self), "key": self.key}))

    @staticmethod
    def load(path: str | Path) -> Graph:
        again = "make it again with `edgetrain graph MODEL --out FILE`"
        graph = saved.load(path, "graph file", _from_file, next_step=again)
        from edgetrain.graph.verify import broken_rules, unknown_kinds  # here, because verify reads this module

        broken = [*unknown_kinds(graph), *broken_rules(graph)]
        if broken:
            raise UserError(f"{path} holds no legal graph", received="; ".join(broken[:3]))
        return graph


def _from_file(data: Any) -> Graph:
    graph = from_json(data)
    if data["key"] != graph.key:
        raise ValueError(f"the content has key {graph.key}, expected {data['key']!r}")
    return graph


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


# ---- to a file and back ---------------------------------------------------------------------------------------


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
        "tensors": [[t.name, t.storage, t.shape, t.stride, t.dtype, t.offset] for t in graph.tensors],
        "ops": [_op_to_json(op) for op in graph.ops],
        "sources": {str(t): [s.sort, s.path] for t, s in graph.sources.items()},
        "outputs": list(graph.outputs),
        "gradients": {str(p): g for p, g in graph.gradients.items()},
        "constants": {str(t): base64.b64encode(v).decode() for t, v in graph.constants.items()},
        "unused": list(graph.unused),
    }


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
        raise ValueError(f"schema {data.get('edgetrain graph')!r}, expected {SCHEMA}")
    return Graph(
        storages=tuple(Storage(_int(n), role, str(device)) for n, role, device in data["storages"]),
        tensors=tuple(
            Tensor(str(name), _int(storage), _ints(shape), _ints(stride), str(dtype), _int(offset))
            for name, storage, shape, stride, dtype, offset in data["tensors"]
        ),
        ops=tuple(_op_from_json(op) for op in data["ops"]),
        sources={int(t): _source(sort, str(path)) for t, (sort, path) in data["sources"].items()},
        outputs=_ints(data["outputs"]),
        gradients={int(p): _int(g) for p, g in data["gradients"].items()},
        constants={int(t): base64.b64decode(v, validate=True) for t, v in data["constants"].items()},
        unused=tuple(str(name) for name in data["unused"]),
        about={str(k): str(v) for k, v in data["about"].items()},
    )
