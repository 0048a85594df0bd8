"""The bodies of train_step and predict: one call an op, in the order of the plan.

In:  a function of the program, and the `Scene` that its calls are written with.
Out: lines of C; the kernels that they call, and each call with its op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from edgetrain.firmware.kernels import kernel_of
from edgetrain.firmware.lowering import WORD_BYTES
from edgetrain.firmware.program import C_TYPES, Function, bounds_of, has_bends
from edgetrain.graph.ir import PERSISTENT, Graph, Op
from edgetrain.names import take_free_name
from edgetrain.ops.c import CSource, Scene, identifier, number
from edgetrain.ops.entry import work
from edgetrain.ops.replay import replay
from edgetrain.ops.work import PRODUCTS
from edgetrain.plan.plan import Compute, Free


@dataclass(frozen=True)
class Called:
    """A call of train_step: its op, and the multiply-adds of that op (0 if it is no product)."""

    op: str
    kind: str
    module: str
    function: str
    multiply_adds: int


@dataclass
class Names:
    """C names: of each persistent storage, and of each live one."""

    graph: Graph
    persistent: Mapping[int, str]  # by storage
    live: dict[int, str] = field(default_factory=dict)

    def __call__(self, t: int) -> str:
        storage = self.graph.tensors[t].storage
        return self.persistent[storage] if storage in self.persistent else self.live[storage]


class CallWriter:
    """Writes one function after the other. sources: the kernels that are called. called: the calls of train_step."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.sources: set[CSource] = set()
        self.called: list[Called] = []

    def lines(self, function: Function, names: Names, *, training: bool) -> Iterator[str]:
        """training: it is train_step, whose debug build reports gradients."""
        graph = function.graph
        self.scene.graph, self.scene.name = graph, names
        lives = {(life.storage, life.start): life for life in function.arena.lives}
        labels = storage_names(graph)
        done: set[int] = set()
        seen: set[str] = set(self.scene.taken)
        module, phase = None, ""
        for at, action in enumerate(function.plan.schedule):
            if isinstance(action, Free):
                names.live.pop(action.storage)
                continue
            assert isinstance(action, Compute)
            op = graph.ops[action.op]
            recomputed = action.op in done
            done.add(action.op)
            if op.view:
                yield from self._shown(op, training)
                continue
            if (op.module, op.phase) != (module, phase):
                module, phase = op.module, op.phase
                yield ""
                yield f"    /* {comment(op.module) or 'loss'}, {op.phase}{', recomputed' if recomputed else ''} */"
            for storage in graph.new_storages[action.op]:
                life = lives[storage, at]
                over = None if life.over is None else names.live[life.over]
                c_name = names.live[storage] = take_free_name(labels[storage] + ("_again" if recomputed else ""), seen)
                yield f"    {_declaration(graph, storage, c_name, life.offset, over)}"
            yield from self._calls(op, recomputed, training)
            if action.into is not None:
                names.live.pop(action.into)
            yield from self._shown(op, training)
            if training and not recomputed:
                yield from self._sides(op)

    def _calls(self, op: Op, recomputed: bool, training: bool) -> Iterator[str]:
        run = replay(op) if recomputed else op
        assert run is not None  # the validator has checked it
        kernel = kernel_of(run)
        self.sources.add(kernel.source)
        for call in kernel.call(self.scene, run):
            if training:
                self.called.append(_called(self.scene.graph, op, call, recomputed))
            yield from wrapped(f"    {call}")

    def _shown(self, op: Op, training: bool) -> Iterator[str]:
        """A debug build reports the gradients that the op computes."""
        graph = self.scene.graph
        for p, g in graph.gradients.items() if training else ():
            if g in op.creates:
                name, n_bytes = comment(graph.tensors[p].name), graph.tensors[g].n_bytes
                yield f'    show_tensor("{name}", {self.scene.name(g)}, {n_bytes});'

    def _sides(self, op: Op) -> Iterator[str]:
        """It reports, too, on which side of a clamp's bounds each result lies, or the argmax of a max pool."""
        if not has_bends(op):
            return
        n = self.scene.elements(op.creates[0])
        if kernel_of(op).chooses:
            yield f"    show_places({self.scene.name(op.creates[1])}, {n});"
        else:
            low, high = map(number, bounds_of(op))
            yield f"    show_sides({self.scene.name(op.creates[0])}, {n}, {low}, {high});"


def _called(graph: Graph, op: Op, call: str, recomputed: bool) -> Called:
    cost = work(graph, op)
    multiply_adds = cost.flops // 2 if cost.kind in PRODUCTS else 0
    return Called(op.name + (" again" if recomputed else ""), op.kind, op.module, call.partition("(")[0], multiply_adds)


def _declaration(graph: Graph, storage: int, name: str, offset: int, over: str | None) -> str:
    dtype = next(t.dtype for t in graph.tensors if t.storage == storage)
    c_type = C_TYPES[dtype]
    place = f"arena + {offset // WORD_BYTES}"
    if c_type != "float":
        return f"{c_type} *const {name} = ({c_type} *)({place});"
    return f"float *const {name} = {over or place};" + (f" /* over {over} */" if over else "")


def storage_names(graph: Graph) -> dict[int, str]:
    """A C name for each storage that is not persistent: after its parameter, or after its first tensor."""
    names: dict[int, str] = {}
    for tensor in graph.tensors:
        if graph.storages[tensor.storage].role not in PERSISTENT:
            names.setdefault(tensor.storage, identifier(tensor.name))
    for p, g in graph.gradients.items():
        names[graph.tensors[g].storage] = f"d_{identifier(graph.tensors[p].name)}"
    return names


def wrapped(line: str) -> list[str]:
    """A line of C in lines of at most 120 characters, broken between arguments and indented."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    lines = [""]
    for part in line.split(", "):
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(joined) < 119 or not lines[-1]:
            lines[-1] = joined
        else:
            lines[-1] += ","
            lines.append(indent + part)
    return lines


def comment(text: str) -> str:
    """A name without what could end a comment or a string of C."""
    return "".join(c if c.isalnum() or c in "._-[]" else "_" for c in text)
