"""A lowered graph and its plan as C: `model.c` and `model.h`.

In:  a lowered graph of a training step, its plan and arena, and, where a model predicts too, those of the prediction.
Out: the text of the two files, the kernels that they call, and the tensors that need a value at the start.

    model.h     BATCH, the inputs, the optimizer's settings, train_step, predict, the table of tensors
    model.c     what lasts (weights in RAM where they are trained, in flash where they are not), the arena with its map,
                shapes, then the step: one call an op, in the order of the plan

Nothing is allocated and nothing recurses: every address is known when the program is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from edgetrain.errors import UserError
from edgetrain.firmware.arena import Arena
from edgetrain.firmware.kernels import kernel_of
from edgetrain.firmware.lowering import WORD_BYTES
from edgetrain.graph.ir import PERSISTENT, Graph, Op, Value
from edgetrain.ops.c import CSource, Scene, identifier, number
from edgetrain.ops.entry import entry_of, work
from edgetrain.ops.replay import replay
from edgetrain.ops.update import Settings
from edgetrain.ops.update import kind_of as optimizer_kind
from edgetrain.ops.work import PRODUCTS
from edgetrain.plan.plan import Compute, Free, Plan

C_TYPES = {"float32": "float", "int32": "int32_t", "int64": "int64_t", "uint8": "uint8_t", "uint1": "uint8_t"}
_SHAPE_TYPES = {"conv2d_shape", "pool2d_shape", "group_norm_shape"}  # a pool without a module would be named so
_SGD = ("learning_rate", "momentum", "dampening", "weight_decay", "nesterov", "maximize")


@dataclass(frozen=True)
class Part:
    """One function of the model: a graph, its plan, and where its tensors lie."""

    graph: Graph
    plan: Plan
    arena: Arena


@dataclass(frozen=True)
class Lasting:
    """A tensor that is there from step to step. changes: the step writes it, so it lies in RAM.

    offset: of its first value in weights.bin; None where it starts as zeros.
    """

    tensor: int
    name: str
    c_name: str
    c_type: str
    n_elements: int
    n_bytes: int
    role: str
    changes: bool
    offset: int | None = None


@dataclass(frozen=True)
class Called:
    """A call of train_step: the op that it is of, and the multiply-adds of that op (0 where it is no product)."""

    op: str
    kind: str
    module: str
    function: str
    multiply_adds: int


@dataclass(frozen=True)
class Emitted:
    source: str
    header: str
    kernels: tuple[CSource, ...]
    calls: tuple[Called, ...]


@dataclass
class _Names:
    """C names: each tensor of the graph that lasts, and each storage that is there now."""

    graph: Graph
    lasting: Mapping[int, str]  # by storage
    now: dict[int, str] = field(default_factory=dict)

    def __call__(self, t: int) -> str:
        storage = self.graph.tensors[t].storage
        return self.lasting[storage] if storage in self.lasting else self.now[storage]


def lasting_tensors(graph: Graph) -> list[Lasting]:
    """What lasts, in the order of the graph, each with a C name of its own."""
    written = {s for op in graph.ops for s in op.writes}
    read = {graph.tensors[t].storage for op in graph.ops for t in op.reads}
    taken: set[str] = set()
    found = []
    for t in sorted(graph.sources):
        tensor = graph.tensors[t]
        role = graph.role(t)
        if role != "input" and tensor.storage not in read:
            continue
        c_name = _free_name(identifier(tensor.name), taken)
        found.append(
            Lasting(
                t,
                tensor.name,
                c_name,
                C_TYPES[tensor.dtype],
                max(tensor.carrier.n_elements, 1),
                tensor.n_bytes,
                role,
                role == "input" or tensor.storage in written,
            )
        )
    return found


def labels_of(graph: Graph) -> Iterator[tuple[int, int, int]]:
    """(tensor, samples, classes) of the labels that the step reads: each lies in [0, classes)."""
    for op in graph.ops:
        kernel = entry_of(op.kind).c
        if kernel is not None and kernel.labels is not None:
            yield kernel.labels(graph, op)


def _free_name(name: str, taken: set[str]) -> str:
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    taken.add(found)
    return found


def emit(
    step: Part,
    predict: Part | None,
    lasting: list[Lasting],
    groups: list[Settings],
    *,
    kind: str,
    fresh: bool,
    keep_every: int = 0,
) -> Emitted:
    """kind: of the optimizer, sgd, adam or adamw. fresh: the optimizer has no state yet. keep_every: steps between two
    copies in flash; 0 keeps none."""
    return _Emitter(step, predict, lasting, groups, kind, fresh, keep_every).run()


class _Emitter:
    def __init__(
        self,
        step: Part,
        predict: Part | None,
        lasting: list[Lasting],
        groups: list[Settings],
        kind: str,
        fresh: bool,
        keep_every: int,
    ) -> None:
        self.keep_every = keep_every
        self.step, self.predict, self.lasting, self.groups, self.kind = step, predict, lasting, groups, kind
        self.optimizer = _update_source(kind).file
        graph = step.graph
        self.batch = graph.tensors[graph.inputs[0]].shape[0] if graph.tensors[graph.inputs[0]].shape else 1
        self.c_name = {graph.tensors[item.tensor].storage: item.c_name for item in lasting}
        self.scene = Scene(graph, _Names(graph, self.c_name), self.batch, fresh)
        self.scene.taken |= {item.c_name for item in lasting} | _SHAPE_TYPES
        self.sources = {_update_source(kind)}
        self.called: list[Called] = []

    def run(self) -> Emitted:
        body = self._function(self.step, "train_step")
        predicting = [] if self.predict is None else self._predict(self.predict)
        lines = [
            *self._top(),
            *self._values(),
            *self._arena(),
            *self._shapes(),
            *_section(body),
            *_section(predicting),
            *self._table(),
        ]
        sources = tuple(sorted(self.sources, key=lambda source: source.file))
        return Emitted("\n".join(lines) + "\n", self._header(), sources, tuple(self.called))

    # ---- the parts of model.c

    def _top(self) -> Iterator[str]:
        about, plan = self.step.graph.about, self.step.plan
        model, optimizer = _comment(about.get("model", "a model")), _comment(about.get("optimizer", self.kind))
        yield f"/* One training step of {model} on a batch of {self.batch}, updated by {optimizer}."
        yield f" * Planned by {plan.planner}: {len(plan.order)} ops, {len(plan.recomputed)} of them computed again."
        yield " *"
        yield " * Images are [B, H, W, C], filters [K, R, S, C]. A name d_x is the gradient of x. */"
        yield '#include "model.h"'
        yield ""
        yield "#include <math.h>"
        yield "#include <stddef.h>"
        yield "#include <string.h>"
        yield ""
        yield from (f'#include "kernels/{name}.h"' for name in sorted(source.file for source in self.sources))
        yield ""

    def _values(self) -> Iterator[str]:
        yield "/* The batch. */"
        yield from (
            f"{item.c_type} {item.c_name}[{self._count(item)}];" for item in self.lasting if item.role == "input"
        )
        yield ""
        yield "/* What a step changes: in RAM. */"
        yield from (
            f"static {item.c_type} {item.c_name}[{item.n_elements}];"
            for item in self.lasting
            if item.changes and item.role != "input"
        )
        frozen = [item for item in self.lasting if not item.changes]
        if frozen:
            yield ""
            yield "/* What it does not change: in flash, where weights.S puts it. */"
            for item in frozen:
                yield (
                    f"static const {item.c_type} *const {item.c_name} = "
                    f"(const {item.c_type} *)(const void *)(model_weights + {item.offset});"
                )
        yield ""
        yield f"{self.optimizer}_settings settings[{len(self.groups)}] = {{"
        yield from (f"    {self._settings(given)}," for given in self.groups)
        yield "};"
        yield "uint32_t model_seed = 0;"
        yield "uint32_t step_number = 0; /* of the step that runs: the first is 1 */"
        yield ""

    def _count(self, item: Lasting) -> str:
        return self.scene.count(item.n_elements)

    def _settings(self, given: Settings) -> str:
        if self.kind == "sgd":
            rates = [number(v) for v in (given.lr, given.momentum, given.dampening, given.weight_decay)]
            flags = [str(int(given.nesterov)), str(int(given.maximize))]
            return "{" + ", ".join(f".{key} = {v}" for key, v in zip(_SGD, rates + flags, strict=True)) + "}"
        fields = {
            "learning_rate": repr(given.lr), "beta1": repr(given.beta1), "beta2": repr(given.beta2),
            "eps": number(given.eps), "weight_decay": number(given.weight_decay),
            "decoupled": str(int(given.decoupled)), "maximize": str(int(given.maximize)),
        }  # fmt: skip
        return "{" + ", ".join(f".{key} = {value}" for key, value in fields.items()) + "}"

    def _arena(self) -> Iterator[str]:
        parts = [("train_step", self.step)] + ([("predict", self.predict)] if self.predict is not None else [])
        height = max(part.arena.height_bytes for _, part in parts)
        yield f"/* The arena: {height} bytes, of which train_step holds {self.step.arena.live_bytes} at its peak."
        for name, part in parts:
            yield " *"
            yield f" * {name}:  offset     bytes   ops          tensor"
            yield from self._map(part)
        yield " */"
        yield f'__attribute__((section(".bss.arena"))) static float arena[{max(height // WORD_BYTES, 1)}];'
        yield ""

    def _map(self, part: Part) -> Iterator[str]:
        names = _storage_names(part.graph)
        ops = [isinstance(action, Compute) for action in part.plan.schedule]
        before = [sum(ops[:at]) for at in range(len(ops) + 1)]
        for life in sorted(part.arena.lives, key=lambda life: (life.offset, life.start)):
            n_bytes = part.graph.storages[life.storage].n_bytes
            lives = f"{before[life.start] + 1}..{before[life.end]}"
            yield f" *   {life.offset:>14} {n_bytes:>9}   {lives:<12} {names[life.storage]}"

    def _shapes(self) -> Iterator[str]:
        for text, name in self.scene.shapes.items():
            struct, _, fields = text.partition(" ")
            yield from _wrapped(f"static const {struct} {name} = {fields};")
        yield ""

    def _predict(self, part: Part) -> list[str]:
        by_name = {item.name: item.c_name for item in self.lasting}
        lasting = {}
        for t in part.graph.sources:
            name = part.graph.tensors[t].name
            if name not in by_name:
                raise UserError(
                    f"the prediction of this model reads {name}, which its training step does not know",
                    next_step="export the step alone, from Python: predict=False",
                )
            lasting[part.graph.tensors[t].storage] = by_name[name]
        self.scene.graph, self.scene.name = part.graph, _Names(part.graph, lasting)
        return self._function(part, "predict")

    def _function(self, part: Part, name: str) -> list[str]:
        training = name == "train_step"
        lines = list(self._calls(part, training))
        names = self.scene.name
        result = names(part.graph.outputs[0])
        if not training:
            return ["const float *predict(void)", "{", *lines, f"    return {result};", "}"]
        first = ["int train_step(float *loss_value)", "{", *self._check_labels(part.graph), "    step_number += 1;"]
        return [*first, *lines, f"    *loss_value = *{result};", "    return MODEL_OK;", "}"]

    def _check_labels(self, graph: Graph) -> Iterator[str]:
        for labels, samples, classes in labels_of(graph):
            yield f"    if (!labels_in_range({self.scene.name(labels)}, {self.scene.count(samples)}, {classes})) {{"
            yield "        return MODEL_BAD_LABEL;"
            yield "    }"

    def _calls(self, part: Part, training: bool) -> Iterator[str]:
        graph, names = part.graph, self.scene.name
        assert isinstance(names, _Names)
        lives = {(life.storage, life.start): life for life in part.arena.lives}
        labels = _storage_names(graph)
        done: set[int] = set()
        seen: set[str] = set(self.scene.taken)
        module, phase = None, ""
        for at, action in enumerate(part.plan.schedule):
            if isinstance(action, Free):
                names.now.pop(action.storage)
                continue
            assert isinstance(action, Compute)
            op = graph.ops[action.op]
            again = action.op in done
            done.add(action.op)
            if op.view:
                yield from self._shown(graph, op, training)
                continue
            if (op.module, op.phase) != (module, phase):
                module, phase = op.module, op.phase
                yield ""
                yield f"    /* {_comment(op.module) or 'loss'}, {op.phase}{' again' if again else ''} */"
            for storage in graph.new_storages[action.op]:
                life = lives[storage, at]
                over = None if life.over is None else names.now[life.over]
                c_name = names.now[storage] = _free_name(labels[storage] + ("_again" if again else ""), seen)
                yield f"    {self._declaration(graph, storage, c_name, life.offset, over)}"
            run = _again(op) if again else op
            kernel = kernel_of(run)
            self.sources.add(kernel.source)
            for call in kernel.call(self.scene, run):
                if training:
                    self.called.append(_called(graph, op, call, again))
                yield from _wrapped(f"    {call}")
            if action.into is not None:
                names.now.pop(action.into)
            yield from self._shown(graph, op, training)
            if training and not again:
                yield from self._sides(op)

    def _shown(self, graph: Graph, op: Op, training: bool) -> Iterator[str]:
        """A debug build tells of the gradients that the op makes."""
        for p, g in graph.gradients.items() if training else ():
            if g in op.creates:
                name, n_bytes = _comment(graph.tensors[p].name), graph.tensors[g].n_bytes
                yield f'    show_tensor("{name}", {self.scene.name(g)}, {n_bytes});'

    def _sides(self, op: Op) -> Iterator[str]:
        """And of the sides of its bends on which the op's results lie, or of the places that a max pool chose."""
        if not has_bends(op):
            return
        n = self.scene.elements(op.creates[0])
        if kernel_of(op).chooses:
            yield f"    show_places({self.scene.name(op.creates[1])}, {n});"
        else:
            low, high = map(number, _limits(op))
            yield f"    show_sides({self.scene.name(op.creates[0])}, {n}, {low}, {high});"

    def _declaration(self, graph: Graph, storage: int, name: str, offset: int, over: str | None) -> str:
        dtype = next(t.dtype for t in graph.tensors if t.storage == storage)
        c_type = C_TYPES[dtype]
        place = f"arena + {offset // WORD_BYTES}"
        if c_type != "float":
            return f"{c_type} *const {name} = ({c_type} *)({place});"
        return f"float *const {name} = {over or place};" + (f" /* over {over} */" if over else "")

    def _table(self) -> Iterator[str]:
        changing = [item for item in self.lasting if item.changes and item.role != "input"]
        yield "const model_tensor model_tensors[MODEL_TENSORS] = {"
        for item in changing:
            first = "NULL" if item.offset is None else f"model_weights + {item.offset}"
            yield f'    {{"{_comment(item.name)}", {item.c_name}, sizeof {item.c_name}, {first}}},'
        yield "};"
        yield ""
        yield "const model_input model_inputs[MODEL_INPUTS] = {"
        yield from (f"    {{{i.c_name}, sizeof {i.c_name}}}," for i in self.lasting if i.role == "input")
        yield "};"
        yield ""
        yield "void model_init(void)"
        yield "{"
        yield "    step_number = 0;"
        yield "    for (int i = 0; i < MODEL_TENSORS; i++) {"
        yield "        const model_tensor *tensor = &model_tensors[i];"
        yield "        if (tensor->first_value == NULL) {"
        yield "            memset(tensor->data, 0, tensor->n_bytes);"
        yield "        } else {"
        yield "            memcpy(tensor->data, tensor->first_value, tensor->n_bytes);"
        yield "        }"
        yield "    }"
        yield "}"
        yield ""
        yield "void model_arena(void **data, uint32_t *n_bytes)"
        yield "{"
        yield "    *data = arena;"
        yield "    *n_bytes = sizeof arena;"
        yield "}"

    # ---- model.h

    def _header(self) -> str:
        inputs = [item for item in self.lasting if item.role == "input"]
        changing = sum(item.changes and item.role != "input" for item in self.lasting)
        lines = [
            "#ifndef MODEL_H", "#define MODEL_H", "", "#include <stdint.h>", "",
            f'#include "kernels/{self.optimizer}.h"', "",
            f"enum {{ BATCH = {self.batch}, MODEL_TENSORS = {changing}, MODEL_INPUTS = {len(inputs)} }};",
            f"enum {{ MODEL_BATCH_BYTES = {sum(item.n_bytes for item in inputs)} }};",
            "enum { MODEL_OK = 0, MODEL_BAD_LABEL = 1 };",
            f"#define MODEL_PREDICTS {int(self.predict is not None)}",
            "/* Steps between two copies in flash (checkpoint.h); 0: none are kept. */",
            f"#define MODEL_KEEPS_EVERY {self.keep_every}", "",
            "/* The batch: to be filled before train_step and predict. */",
            *(f"extern {item.c_type} {item.c_name}[{self._count(item)}];" for item in inputs),
            "typedef struct {", "    void *data;", "    uint32_t n_bytes;", "} model_input;",
            "extern const model_input model_inputs[MODEL_INPUTS];", "",
            "/* The optimizer's settings, one for each of its groups, and the seed of dropout: may be changed. */",
            f"extern {self.optimizer}_settings settings[{len(self.groups)}];",
            "extern uint32_t model_seed;",
            "/* Steps done; while one runs, its own is counted. */",
            "extern uint32_t step_number;", "",
            "/* Gives everything that a step changes its first value. To be called first. */",
            "void model_init(void);",
            "/* One step on the batch: forward, backward, update.",
            " * MODEL_BAD_LABEL: a label is no class, and nothing has changed. */",
            "int train_step(float *loss_value);",
        ]  # fmt: skip
        if self.predict is not None:
            result = self.predict.graph.tensors[self.predict.graph.outputs[0]]
            lines += [
                f"/* The model's results for the batch, {list(result.shape)}: there until the next call. */",
                f"enum {{ MODEL_RESULTS = {result.n_elements} }};",
                "const float *predict(void);",
            ]
        lines += [
            "", "/* Everything that a step changes, by its name in the model. */",
            "typedef struct {", "    const char *name;", "    void *data;", "    uint32_t n_bytes;",
            "    const unsigned char *first_value; /* NULL: zeros */", "} model_tensor;",
            "extern const model_tensor model_tensors[MODEL_TENSORS];",
            "extern const unsigned char model_weights[];",
            "void model_arena(void **data, uint32_t *n_bytes);", "",
            "/* A debug build (make debug) tells of each gradient as soon as it is there; and, where gradients jump,",
            " * which way each number went: its side of the bends of a ReLU, the place that a max pool chose. */",
            "#ifdef DEBUG_TENSORS",
            "void show_tensor(const char *name, const void *data, uint32_t n_bytes);",
            "void show_sides(const float *y, uint32_t n, float low, float high);",
            "void show_places(const uint8_t *where, uint32_t n);",
            "#else", "#define show_tensor(name, data, n_bytes) ((void)0)",
            "#define show_sides(y, n, low, high) ((void)0)", "#define show_places(where, n) ((void)0)", "#endif", "",
            "#endif",
        ]  # fmt: skip
        return "\n".join(lines) + "\n"


def has_bends(op: Op) -> bool:
    """Does its gradient jump? Then a debug build tells which way each number went."""
    kernel = entry_of(op.kind).c
    return kernel is not None and (kernel.chooses or _limits(op) != (-math.inf, math.inf))


def _limits(op: Op) -> tuple[Value, ...]:
    """Between which a result is what comes in."""
    bends = kernel_of(op).bends
    return (-math.inf, math.inf) if bends is None else bends(op)


def _called(graph: Graph, op: Op, call: str, again: bool) -> Called:
    done = work(graph, op)
    products = done.flops // 2 if done.kind in PRODUCTS else 0
    return Called(op.name + (" again" if again else ""), op.kind, op.module, call.partition("(")[0], products)


def _update_source(optimizer: str) -> CSource:
    kernel = entry_of(optimizer_kind(optimizer)).c
    assert kernel is not None
    return kernel.source


def _again(op: Op) -> Op:
    found = replay(op)
    assert found is not None  # the validator has seen that it can run again
    return found


def _wrapped(line: str) -> list[str]:
    """A line of C in lines of at most 120 characters, broken between arguments; the others stand further in."""
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


def _section(lines: list[str]) -> list[str]:
    return [*lines, ""] if lines else []


def _storage_names(graph: Graph) -> dict[int, str]:
    """A C name for each storage that does not last: that of its parameter's gradient, or of its first tensor."""
    names: dict[int, str] = {}
    for tensor in graph.tensors:
        if graph.storages[tensor.storage].role not in PERSISTENT:
            names.setdefault(tensor.storage, identifier(tensor.name))
    for p, g in graph.gradients.items():
        names[graph.tensors[g].storage] = f"d_{identifier(graph.tensors[p].name)}"
    return names


def _comment(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._-[]" else "_" for c in text)
