"""A lowered graph and its plan as C: `model.c` and `model.h`.

In:  a `Program`: a graph of a training step, its plan and arena, and, where the model predicts too, those of the
     prediction. Out: the text of the two files, the kernels that they call, and the calls of the step.

    model.h     BATCH, the inputs, the optimizer's settings, train_step, predict, the table of tensors
    model.c     persistent tensors (weights in RAM if they are trained, in flash if not), the arena with its map,
                shapes, then the step: one call an op, in the order of the plan

Nothing is allocated and nothing recurses: every address is known when the program is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from edgetrain.errors import UserError
from edgetrain.firmware.emit_calls import Called, CallWriter, Names, comment, storage_names, wrapped
from edgetrain.firmware.emit_header import header
from edgetrain.firmware.lowering import WORD_BYTES
from edgetrain.firmware.program import Function, Program, labels_of
from edgetrain.ops.c import CSource, Scene, number
from edgetrain.ops.update import Settings
from edgetrain.plan.plan import Compute

_SHAPE_TYPES = {"conv2d_shape", "pool2d_shape", "group_norm_shape"}  # the names of shapes without a module
_SGD = ("learning_rate", "momentum", "dampening", "weight_decay", "nesterov", "maximize")


@dataclass(frozen=True)
class Emitted:
    source: str
    header: str
    kernels: tuple[CSource, ...]
    calls: tuple[Called, ...]


def emit(program: Program) -> Emitted:
    graph = program.step.graph
    persistent = {graph.tensors[item.tensor].storage: item.c_name for item in program.persistent}
    names = Names(graph, persistent)
    scene = Scene(graph, names, program.batch, program.fresh)
    scene.taken |= {item.c_name for item in program.persistent} | _SHAPE_TYPES
    calls = CallWriter(scene)
    functions = [*_train_step(program.step, names, calls), ""]
    if program.predict is not None:
        functions += [*_predict(program, program.predict, calls), ""]
    sources = sorted({program.update, *calls.sources}, key=lambda source: source.file)
    lines = [*_top(program, sources), *_values(program, scene), *_arena(program), *_shapes(scene), *functions]
    text = "\n".join([*lines, *_tables(program)]) + "\n" + _FUNCTIONS
    return Emitted(text, header(program, scene), tuple(sources), tuple(calls.called))


def _top(program: Program, sources: Iterable[CSource]) -> Iterator[str]:
    about, plan = program.step.graph.about, program.step.plan
    model, optimizer = comment(about.get("model", "a model")), comment(about.get("optimizer", program.kind))
    yield f"/* One training step of {model} on a batch of {program.batch}, updated by {optimizer}."
    yield f" * Planned by {plan.planner}: {len(plan.order)} ops, {len(plan.recomputed)} of them recomputed."
    yield " *"
    yield " * Images are [B, H, W, C], filters [K, R, S, C]. A name d_x is the gradient of x. */"
    yield '#include "model.h"'
    yield ""
    yield "#include <math.h>"
    yield "#include <stddef.h>"
    yield "#include <string.h>"
    yield ""
    yield from (f'#include "kernels/{source.file}.h"' for source in sources)
    yield ""


def _values(program: Program, scene: Scene) -> Iterator[str]:
    yield "/* The batch. */"
    yield from (f"{item.c_type} {item.c_name}[{scene.count(item.n_elements)}];" for item in program.inputs)
    yield ""
    yield "/* Changed by a step: in RAM. */"
    yield from (f"static {item.c_type} {item.c_name}[{item.n_elements}];" for item in program.trained)
    frozen = [item for item in program.persistent if not item.changes]
    if frozen:
        yield ""
        yield "/* Frozen: in flash, where weights.S places them. */"
        for item in frozen:
            yield (
                f"static const {item.c_type} *const {item.c_name} = "
                f"(const {item.c_type} *)(const void *)(model_weights + {item.offset});"
            )
    yield ""
    yield f"{program.update.file}_settings settings[{len(program.groups)}] = {{"
    yield from (f"    {_settings(program.kind, group)}," for group in program.groups)
    yield "};"
    yield "uint32_t model_seed = 0;"
    yield "uint32_t step_number = 0; /* the current step; the first is 1 */"
    yield ""


def _settings(kind: str, group: Settings) -> str:
    if kind == "sgd":
        rates = [number(v) for v in (group.lr, group.momentum, group.dampening, group.weight_decay)]
        flags = [str(int(group.nesterov)), str(int(group.maximize))]
        return "{" + ", ".join(f".{key} = {v}" for key, v in zip(_SGD, rates + flags, strict=True)) + "}"
    fields = {
        "learning_rate": repr(group.lr), "beta1": repr(group.beta1), "beta2": repr(group.beta2),
        "eps": number(group.eps), "weight_decay": number(group.weight_decay),
        "decoupled": str(int(group.decoupled)), "maximize": str(int(group.maximize)),
    }  # fmt: skip
    return "{" + ", ".join(f".{key} = {value}" for key, value in fields.items()) + "}"


def _arena(program: Program) -> Iterator[str]:
    functions = [("train_step", program.step)]
    functions += [("predict", program.predict)] if program.predict is not None else []
    height = max(function.arena.height_bytes for _, function in functions)
    yield f"/* The arena: {height} bytes, of which {program.step.arena.live_bytes} are live at the peak of train_step."
    for name, function in functions:
        yield " *"
        yield f" * {name}:  offset     bytes   ops          tensor"
        yield from _map(function)
    yield " */"
    yield f'__attribute__((section(".bss.arena"))) static float arena[{max(height // WORD_BYTES, 1)}];'
    yield ""


def _map(function: Function) -> Iterator[str]:
    names = storage_names(function.graph)
    ops = [isinstance(action, Compute) for action in function.plan.schedule]
    before = [sum(ops[:at]) for at in range(len(ops) + 1)]
    for life in sorted(function.arena.lives, key=lambda life: (life.offset, life.start)):
        n_bytes = function.graph.storages[life.storage].n_bytes
        lives = f"{before[life.start] + 1}..{before[life.end]}"
        yield f" *   {life.offset:>14} {n_bytes:>9}   {lives:<12} {names[life.storage]}"


def _shapes(scene: Scene) -> Iterator[str]:
    for text, name in scene.shapes.items():
        struct, _, fields = text.partition(" ")
        yield from wrapped(f"static const {struct} {name} = {fields};")
    yield ""


def _train_step(step: Function, names: Names, calls: CallWriter) -> Iterator[str]:
    yield "int train_step(float *loss_value)"
    yield "{"
    for labels, samples, classes in labels_of(step.graph):
        yield f"    if (!labels_in_range({names(labels)}, {calls.scene.count(samples)}, {classes})) {{"
        yield "        return MODEL_BAD_LABEL;"
        yield "    }"
    yield "    step_number += 1;"
    yield from calls.lines(step, names, training=True)
    yield f"    *loss_value = *{names(step.graph.outputs[0])};"
    yield "    return MODEL_OK;"
    yield "}"


def _predict(program: Program, predict: Function, calls: CallWriter) -> Iterator[str]:
    by_name = {item.name: item.c_name for item in program.persistent}
    persistent = {}
    for t in predict.graph.sources:
        name = predict.graph.tensors[t].name
        if name not in by_name:
            raise UserError(
                f"the prediction of this model reads {name}, which its training step does not have",
                next_step="export the step alone, from Python: predict=False",
            )
        persistent[predict.graph.tensors[t].storage] = by_name[name]
    names = Names(predict.graph, persistent)
    yield "const float *predict(void)"
    yield "{"
    yield from calls.lines(predict, names, training=False)
    yield f"    return {names(predict.graph.outputs[0])};"
    yield "}"


def _tables(program: Program) -> Iterator[str]:
    yield "const model_tensor model_tensors[MODEL_TENSORS] = {"
    for item in program.trained:
        first = "NULL" if item.offset is None else f"model_weights + {item.offset}"
        yield f'    {{"{comment(item.name)}", {item.c_name}, sizeof {item.c_name}, {first}}},'
    yield "};"
    yield ""
    yield "const model_input model_inputs[MODEL_INPUTS] = {"
    yield from (f"    {{{item.c_name}, sizeof {item.c_name}}}," for item in program.inputs)
    yield "};"


_FUNCTIONS = """
void model_init(void)
{
    step_number = 0;
    for (int i = 0; i < MODEL_TENSORS; i++) {
        const model_tensor *tensor = &model_tensors[i];
        if (tensor->first_value == NULL) {
            memset(tensor->data, 0, tensor->n_bytes);
        } else {
            memcpy(tensor->data, tensor->first_value, tensor->n_bytes);
        }
    }
}

void model_arena(void **data, uint32_t *n_bytes)
{
    *data = arena;
    *n_bytes = sizeof arena;
}
"""
