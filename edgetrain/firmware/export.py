"""`et.export`: a planned training step as a C project that builds, runs and is emulated.

In:  a lowered graph (`et.lower_for_firmware`), its plan, the model and the optimizer that it was captured from, and a
     target. Out: a folder

    model.c, model.h     the step: train_step, predict
    kernels/             the kernels that they call, and no others
    weights.bin          first values; weights.S puts them into the program
    main.c, board/       a program that trains on batches from a file, and what it asks of its machine
    checkpoint.c         where copies are kept in flash: two, of which one is always whole
    Makefile, README.md, project.json

Everything that can be wrong is found before anything is written. The folder is put in its place when it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edgetrain.arguments import checked
from edgetrain.errors import UserError
from edgetrain.files import checked_path, explained, refuse_link
from edgetrain.firmware import board_files
from edgetrain.firmware.arena import Arena, arena_of
from edgetrain.firmware.emit import Called, Lasting, Part, emit, has_bends, labels_of, lasting_tensors
from edgetrain.firmware.fit import infeasible, require_flash
from edgetrain.firmware.kernels import files_of
from edgetrain.firmware.lower import is_lowered, lower_for_firmware
from edgetrain.firmware.lowering import WORD_BYTES
from edgetrain.firmware.target import Kept, Placed, Target, keep, load_target, place
from edgetrain.graph.capture import optimizers
from edgetrain.graph.capture.training import capture_inference
from edgetrain.graph.ir import Graph, Source
from edgetrain.ops import update
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.plan import Plan
from edgetrain.plan.validate import validate
from edgetrain.ranges import STEPS, shown

SCHEMA = 3
# The most that the optimizer's settings take for each group, and what else of a run a copy holds beside its tensors.
_SETTINGS_BYTES, _RUN_BYTES = 64, 8


@dataclass(frozen=True)
class Project:
    """What was written. Bytes are predicted from the plan; a build measures them.

    ram_bytes: what lasts, the batch and the arena; the stack and the program's own few variables come on top.
    frozen_bytes: weights that the step does not change, which lie in flash.
    kept_bytes:   what two copies of all that changes take of flash, in whole pages; 0 where none are kept.
    """

    folder: Path
    target: str
    plan_peak_bytes: int
    arena_bytes: int
    arena_live_bytes: int
    lasting_bytes: int
    frozen_bytes: int
    weights_bytes: int
    kept_bytes: int = 0

    @property
    def ram_bytes(self) -> int:
        return self.arena_bytes + self.lasting_bytes


@checked()
def export(
    graph: Graph,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    target: str | Path | Target,
    out: str | Path,
    predict: bool = True,
    keep_every: int | None = None,
) -> Project:
    """Write the C project of a planned step.

    predict:    with a function that gives the model's results, in eval mode, for a batch of the same size.
    keep_every: steps between two copies in flash of all that the run changes. There are two of them, one of which is
                whole whenever the power is lost, and the program goes on from the newest. None: it starts afresh.
    """
    if keep_every is not None and keep_every not in STEPS:
        raise UserError("keep_every is wrong", expected=f"steps: {STEPS}", received=shown(keep_every))
    chosen = load_target(target)
    folder = require_new_folder(Path(out))
    _require_lowered(graph)
    validate(graph, plan)
    _require_plan(plan)
    program = _program(graph, plan, model, optimizer, chosen, predict=predict, keep_every=keep_every)
    step, lasting, weights, kept = program.step, program.lasting, program.weights, program.kept
    project = replace(program.project, folder=folder)
    groups = [update.settings(optimizers.kind_of(optimizer), group) for group in optimizer.param_groups]
    emitted = emit(
        step, program.predicting, lasting, groups, kind=optimizers.kind_of(optimizer), fresh=not optimizer.state,
        keep_every=keep_every or 0,
    )  # fmt: skip
    model_key = zlib.crc32(weights, zlib.crc32(emitted.source.encode()))
    files: dict[str, str | bytes] = {
        "model.c": emitted.source,
        "model.h": emitted.header,
        "weights.bin": weights,
        "project.json": json.dumps(_described(project, chosen, step, lasting, emitted.calls, keep_every or 0), indent=1)
        + "\n",
        "README.md": _readme(project, chosen, step),
        **{f"kernels/{name}": path.read_text() for name, path in files_of(emitted.kernels).items()},
        **board_files.files(chosen, program.placed, emitted.kernels, kept, model_key),
    }
    _write(folder, files)
    return project


@dataclass(frozen=True)
class _Program:
    """All of a project but its text. project: without a folder."""

    project: Project
    step: Part
    predicting: Part | None
    lasting: list[Lasting]
    weights: bytes
    kept: Kept | None
    placed: Placed | None


def _program(
    graph: Graph,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    target: Target,
    *,
    predict: bool,
    keep_every: int | None,
) -> _Program:
    step = Part(graph, plan, arena_of(graph, plan))
    predicting = prediction(graph, model) if predict else None
    lasting, weights = _with_values(lasting_tensors(graph), graph, model, optimizer)
    copy_bytes = None if keep_every is None else _copy_bytes(lasting, optimizer)
    kept = None if copy_bytes is None else keep(target, copy_bytes)
    project = _project(target, step, predicting, lasting, weights, kept)
    placed = _require_room(target, project, graph, lasting, copy_bytes)
    return _Program(project, step, predicting, lasting, weights, kept, placed)


def project_of(
    graph: Graph,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    target: Target,
    keep_every: int | None = None,
) -> Project:
    """What `export` would write of a planned step, with its bytes; `Infeasible` where it would be. Nothing is
    written."""
    return _program(graph, plan, model, optimizer, target, predict=True, keep_every=keep_every).project


# ---- what is asked for


def require_new_folder(folder: Path) -> Path:
    """A folder that is not there yet, or empty, and that can be made."""
    checked_path(folder, "folder")
    if folder.is_symlink():
        refuse_link(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already", next_step="remove it, or give another folder")
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"{folder} cannot be made: nothing can be written in {above}", next_step="give another folder")
    return folder


def _require_lowered(graph: Graph) -> None:
    if not is_lowered(graph):
        raise UserError(
            "this graph is of PyTorch's ops, which firmware has no kernels for",
            expected="a graph from et.lower_for_firmware, and a plan for that one",
            next_step="graph = et.lower_for_firmware(graph, model), then plan it with updates='final'",
        )
    if not graph.inputs:
        raise UserError("this step reads no batch", expected="a loss that reads at least one tensor of the batch")


def _require_plan(plan: Plan) -> None:
    if plan.updates != "final" or any(plan.workspace_bytes.get(way) for way in plan.workspace_bytes):
        raise UserError(
            "this plan counts memory that firmware does not use", expected='a plan with updates="final"',
            received=f'updates="{plan.updates}"', next_step='et.plan(graph, costs, budget, updates="final")',
        )  # fmt: skip


def prediction(graph: Graph, model: nn.Module) -> Part:
    """The model's own results for the first tensor of a batch."""
    shape = graph.tensors[graph.inputs[0]].shape
    with torch.no_grad():
        captured = capture_inference(model, (torch.zeros(shape),))
    lowered = lower_for_firmware(captured, model)
    plan = keep_all(lowered, updates="final")
    return Part(lowered, plan, arena_of(lowered, plan))


# ---- first values


def _with_values(
    lasting: list[Lasting], graph: Graph, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[list[Lasting], bytes]:
    """The tensors with their places in weights.bin, and its content. Zeros are not kept."""
    found, content = [], bytearray()
    for item in lasting:
        if item.role == "input":
            found.append(item)
            continue
        value = in_memory(_value(graph, item, model, optimizer), graph, item.tensor)
        if not any(value) and item.changes:
            found.append(item)
            continue
        content += b"\0" * (-len(content) % 8)
        found.append(replace(item, offset=len(content)))
        content += value
    return found, bytes(content)


def _value(graph: Graph, item: Lasting, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    tensor, source = graph.tensors[item.tensor], graph.sources[item.tensor]
    try:
        value = _found(source, model, optimizer)
    except (AttributeError, IndexError, KeyError) as error:
        raise _other(item.name) from error
    if value is None:
        return torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
    if tuple(value.shape) != tensor.shape or str(value.dtype) != f"torch.{tensor.dtype}":
        raise _other(item.name)
    return value


def _found(source: Source, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    if source.sort == "parameter":
        return model.get_parameter(source.path)
    if source.sort == "buffer":
        return model.get_buffer(source.path)
    group, index, *key = source.path.split(".")
    parameter = optimizer.param_groups[int(group)]["params"][int(index)]
    if source.sort == "optimizer":
        return torch.as_tensor(parameter)
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    found = state.get(key[0])
    return None if found is None else torch.as_tensor(found)


def _other(name: str) -> UserError:
    return UserError(
        f"{name} is not in this model or optimizer as the graph has it",
        expected="the model and the optimizer that the graph was captured from",
    )


def in_memory(value: torch.Tensor, graph: Graph, t: int) -> bytes:
    """A tensor's bytes as firmware has them: images and filters with their channels innermost."""
    tensor = graph.tensors[t]
    value = value.detach().to("cpu", getattr(torch, tensor.dtype))
    if len(tensor.shape) == 4:
        value = value.permute(0, 2, 3, 1)
    return value.contiguous().numpy().tobytes()


def from_memory(data: bytes, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """The inverse of `in_memory`."""
    flat = torch.from_numpy(np.frombuffer(data, dtype=dtype).copy())
    if len(shape) != 4:
        return flat.reshape(tuple(shape))
    B, C, H, W = shape
    return flat.reshape(B, H, W, C).permute(0, 3, 1, 2).contiguous()


# ---- does it fit?


def _copy_bytes(lasting: list[Lasting], optimizer: torch.optim.Optimizer) -> int:
    """What a copy in flash holds: every tensor that changes but the batch, settings, seed and step."""
    tensors = sum(item.n_bytes for item in lasting if item.changes and item.role != "input")
    return tensors + _SETTINGS_BYTES * len(optimizer.param_groups) + _RUN_BYTES


def _project(
    target: Target,
    step: Part,
    predicting: Part | None,
    lasting: list[Lasting],
    weights: bytes,
    kept: Kept | None,
) -> Project:
    arenas: list[Arena] = [step.arena] + ([predicting.arena] if predicting is not None else [])
    return Project(
        folder=Path(),
        target=target.name,
        plan_peak_bytes=step.plan.peak_bytes,
        arena_bytes=max(max(arena.height_bytes for arena in arenas), WORD_BYTES),
        arena_live_bytes=step.arena.live_bytes,
        lasting_bytes=sum(item.n_bytes for item in lasting if item.changes),
        frozen_bytes=sum(item.n_bytes for item in lasting if not item.changes),
        weights_bytes=len(weights),
        kept_bytes=0 if kept is None else kept.n_bytes,
    )


def _require_room(
    target: Target, project: Project, graph: Graph, lasting: list[Lasting], copy_bytes: int | None
) -> Placed | None:
    """Where things lie; Infeasible where they do not fit. Linux gives what it has."""
    if not target.is_board:
        return None
    state_bytes = sum(item.n_bytes for item in lasting if item.role == "state" and item.offset is not None)
    require_flash(graph, target, weights_bytes=project.weights_bytes, copy_bytes=copy_bytes, state_bytes=state_bytes)
    placed = place(target, arena_bytes=project.arena_bytes, rest_bytes=project.lasting_bytes)
    if placed is not None:
        return placed
    raise infeasible(graph, target, project.ram_bytes, None)


# ---- files


def _described(
    project: Project, target: Target, step: Part, lasting: list[Lasting], calls: Sequence[Called], keep_every: int
) -> dict[str, Any]:
    """What build, emulate and the comparison with PyTorch need to know."""
    graph = step.graph
    classes = {labels: below for labels, _, below in labels_of(graph)}

    def tensor(item: Lasting) -> dict[str, Any]:
        found = graph.tensors[item.tensor]
        described = {"name": item.name, "shape": list(found.shape), "dtype": found.dtype, "role": item.role}
        source = graph.sources[item.tensor]
        labels = {"below": classes[item.tensor]} if item.tensor in classes else {}
        return described | labels | ({"position": int(source.path)} if source.sort == "input" else {})

    parameter_of = {g: graph.tensors[p].name for p, g in graph.gradients.items()}
    made = [t for op in step.plan.order for t in graph.ops[op].creates]
    shown = [parameter_of[t] for t in made if t in parameter_of]
    return {
        "edgetrain firmware": SCHEMA,
        "target": target.name,
        "model": graph.about.get("model", ""),
        "graph_key": graph.key,
        "planner": step.plan.planner,
        "plan_peak_bytes": project.plan_peak_bytes,
        "arena_bytes": project.arena_bytes,
        "arena_live_bytes": project.arena_live_bytes,
        "lasting_bytes": project.lasting_bytes,
        "frozen_bytes": project.frozen_bytes,
        "weights_bytes": project.weights_bytes,
        "kept_bytes": project.kept_bytes,
        "keep_every": keep_every,
        "compiler": target.firmware.compiler,
        "emulator": list(target.firmware.emulator),
        "is_board": target.is_board,
        "inputs": [tensor(item) for item in lasting if item.role == "input"],
        "tensors": [tensor(item) for item in lasting if item.changes and item.role != "input"],
        "gradients": shown,
        "sides": _sides(step),
        "calls": [asdict(call) for call in calls],
    }


def _sides(step: Part) -> list[dict[str, Any]]:
    """What a debug build tells of functions with bends, in its order. call: of those functions, as the model does."""
    graph = step.graph
    calls = [n for n, op in enumerate(graph.ops) if has_bends(op)]
    told = [op for op in dict.fromkeys(step.plan.order) if op in calls]
    return [{"call": calls.index(op), "shape": list(graph.tensors[graph.ops[op].creates[0]].shape)} for op in told]


_KEPT = """
It keeps two copies in flash of all that it changes (checkpoint.c), and starts from the newest that is whole: flash.bin
in the emulator and on Linux. On the board that takes a driver, board/flash_board.c, which does what board/flash.h says.
"""


def _readme(project: Project, target: Target, step: Part) -> str:
    graph, plan = step.graph, step.plan
    kept = "" if not project.kept_bytes else _KEPT
    batch = ", ".join(f"{graph.tensors[t]}" for t in graph.inputs)
    return f"""# A training step of {graph.about.get("model", "a model")} for {target.device.name}

Batch: {batch} (images as [B, H, W, C]). Optimizer: {graph.about.get("optimizer", "")}.
Plan: {plan.planner}, {len(plan.order)} ops, {len(plan.recomputed)} of them computed again.

| bytes | |
|---|---|
| the plan's peak | {project.plan_peak_bytes} |
| arena | {project.arena_bytes} ({project.arena_live_bytes} of them alive at the peak) |
| weights, state and batch in RAM | {project.lasting_bytes} |
| weights that are not trained, in flash | {project.frozen_bytes} |
| first values, in flash | {project.weights_bytes} |
| two copies of what changes, in flash | {project.kept_bytes} |

    make            build/firmware
    make debug      the same, which writes every gradient to shown.bin, and sides of ReLUs to sides.bin
    make sanitize   with the address and undefined-behaviour sanitizers (Linux)
    make fast       build/firmware_fast: vectors, and all cores (Linux); FIRMWARE_THREADS=2 for so many threads

The program reads batches.bin in the present folder, trains, and writes losses.bin, trained.bin and report.bin: main.c
says how they look. In a program of your own: fill the inputs that model.h names, call model_init once and train_step
for each batch.
{kept}"""


def _write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Whole, or not at all."""
    half = folder.parent / f".{folder.name[:50]}.half"
    new = [above for above in folder.absolute().parents if not above.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if half.is_symlink():
            half.unlink()
        shutil.rmtree(half, ignore_errors=True)
        for name, content in files.items():
            path = half / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        half.replace(folder)  # which is empty, if it is there: that was checked
    except BaseException as error:
        shutil.rmtree(half, ignore_errors=True)
        with contextlib.suppress(OSError):  # not there
            for above in new:
                above.rmdir()
        if not isinstance(error, OSError):
            raise
        with explained(folder):
            raise
