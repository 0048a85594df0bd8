"""`et.export`: a planned training step as a C project that builds, runs and is emulated.

In:  a lowered graph (`et.lower_for_firmware`), its plan, the model and the optimizer that it was captured from, and a
     target. Out: a folder

    model.c, model.h     the step: train_step, predict
    kernels/             the kernels that they call, and no others
    weights.bin          initial values; weights.S puts them into the program
    main.c, board/       a program that trains on batches from a file, and its board
    checkpoint.c         with checkpoints in flash: two slots, of which one is always complete
    Makefile, README.md, project.json

Every check comes before anything is written. The folder appears when it is complete.
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

import torch
from torch import nn

from edgetrain.arguments import checked
from edgetrain.errors import UserError
from edgetrain.files import checked_path, explained, refuse_link
from edgetrain.firmware import board_files
from edgetrain.firmware.emit import emit
from edgetrain.firmware.emit_calls import Called
from edgetrain.firmware.fit import infeasible, require_flash
from edgetrain.firmware.kernels import files_of
from edgetrain.firmware.lower import is_lowered, lower_for_firmware
from edgetrain.firmware.lowering import WORD_BYTES
from edgetrain.firmware.program import (
    Function,
    Persistent,
    Program,
    function_of,
    has_bends,
    labels_of,
    persistent_tensors,
)
from edgetrain.firmware.target import Kept, Placed, Target, keep, load_target, place
from edgetrain.firmware.values import with_values
from edgetrain.graph.capture import optimizers
from edgetrain.graph.capture.training import capture_inference
from edgetrain.graph.ir import Graph
from edgetrain.ops import update
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.plan import Plan
from edgetrain.plan.validate import validate
from edgetrain.ranges import STEPS, shown

SCHEMA = 3
# What a checkpoint holds beside tensors: at most so much for the settings of a group, and for step and seed.
_SETTINGS_BYTES, _RUN_BYTES = 64, 8


@dataclass(frozen=True)
class Project:
    """What was written. Bytes are predicted from the plan; a build measures them.

    ram_bytes:    persistent tensors, the batch and the arena, without the stack and the program's few variables.
    frozen_bytes: weights that the step does not change, which lie in flash.
    kept_bytes:   flash of two checkpoints, in whole pages; 0 if there are none.
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

    predict:    with a function for the model's outputs, in eval mode, for a batch of the same size.
    keep_every: steps between two checkpoints in flash of all that the run changes. One of two slots is complete
                whenever the power is lost, and the program goes on from the newest. None: no checkpoints.
    """
    if keep_every is not None and keep_every not in STEPS:
        raise UserError("keep_every is wrong", expected=f"steps: {STEPS}", received=shown(keep_every))
    chosen, folder = load_target(target), require_new_folder(Path(out))
    _require_lowered(graph)
    validate(graph, plan)
    _require_plan(plan)
    assembled = assemble(graph, plan, model, optimizer, chosen, predict=predict, keep_every=keep_every)
    return write_project(assembled, folder)


@dataclass(frozen=True)
class Assembled:
    """A project before it is printed. project: without a folder."""

    project: Project
    target: Target
    program: Program
    weights: bytes
    kept: Kept | None
    placed: Placed | None


def assemble(
    graph: Graph,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    target: Target,
    *,
    predict: bool = True,
    keep_every: int | None = None,
) -> Assembled:
    """What `export` would write, with its bytes; `Infeasible` if it does not fit. Nothing is written."""
    step = function_of(graph, plan)
    predicting = prediction(graph, model) if predict else None
    persistent, weights = with_values(persistent_tensors(graph), graph, model, optimizer)
    kind = optimizers.kind_of(optimizer)
    groups = [update.settings(kind, group) for group in optimizer.param_groups]
    program = Program(step, predicting, persistent, groups, kind, not optimizer.state, keep_every or 0)
    copy_bytes = None if keep_every is None else _copy_bytes(program)
    kept = None if copy_bytes is None else keep(target, copy_bytes)
    project = _project(target, program, weights, kept)
    placed = _require_room(target, project, program, copy_bytes)
    return Assembled(project, target, program, weights, kept, placed)


def write_project(assembled: Assembled, folder: Path) -> Project:
    """Write it to a folder that `require_new_folder` has accepted."""
    target, program, weights = assembled.target, assembled.program, assembled.weights
    project = replace(assembled.project, folder=folder)
    emitted = emit(program)
    model_key = zlib.crc32(weights, zlib.crc32(emitted.source.encode()))
    files: dict[str, str | bytes] = {
        "model.c": emitted.source,
        "model.h": emitted.header,
        "weights.bin": weights,
        "project.json": json.dumps(_described(project, target, program, emitted.calls), indent=1) + "\n",
        "README.md": _readme(project, target, program.step),
        **{f"kernels/{name}": path.read_text() for name, path in files_of(emitted.kernels).items()},
        **board_files.files(target, assembled.placed, emitted.kernels, assembled.kept, model_key),
    }
    _write(folder, files)
    return project


# ---- arguments


def require_new_folder(folder: Path) -> Path:
    """A folder that does not exist or is empty, and can be created."""
    checked_path(folder, "folder")
    if folder.is_symlink():
        refuse_link(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists", next_step="remove it, or give another folder")
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"{folder} cannot be created: {above} is not writable", next_step="give another folder")
    return folder


def _require_lowered(graph: Graph) -> None:
    if not is_lowered(graph):
        raise UserError(
            "this graph has PyTorch's ops, for which firmware has no kernels",
            expected="a graph from et.lower_for_firmware, and its plan",
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


def prediction(graph: Graph, model: nn.Module) -> Function:
    """The model's outputs for the first tensor of a batch."""
    shape = graph.tensors[graph.inputs[0]].shape
    with torch.no_grad():
        captured = capture_inference(model, (torch.zeros(shape),))
    lowered = lower_for_firmware(captured, model)
    return function_of(lowered, keep_all(lowered, updates="final"))


# ---- does it fit?


def _copy_bytes(program: Program) -> int:
    """Of a checkpoint: trained tensors and state, settings, seed and step."""
    return sum(item.n_bytes for item in program.trained) + _SETTINGS_BYTES * len(program.groups) + _RUN_BYTES


def _project(target: Target, program: Program, weights: bytes, kept: Kept | None) -> Project:
    step, persistent = program.step, program.persistent
    arenas = [function.arena for function in (step, program.predict) if function is not None]
    return Project(
        folder=Path(),
        target=target.name,
        plan_peak_bytes=step.plan.peak_bytes,
        arena_bytes=max(max(arena.height_bytes for arena in arenas), WORD_BYTES),
        arena_live_bytes=step.arena.live_bytes,
        lasting_bytes=sum(item.n_bytes for item in persistent if item.changes),
        frozen_bytes=sum(item.n_bytes for item in persistent if not item.changes),
        weights_bytes=len(weights),
        kept_bytes=0 if kept is None else kept.n_bytes,
    )


def _require_room(target: Target, project: Project, program: Program, copy_bytes: int | None) -> Placed | None:
    """Where RAM is placed; Infeasible if it does not fit. Linux has no regions."""
    if not target.is_board:
        return None
    graph = program.step.graph
    state_bytes = sum(item.n_bytes for item in program.persistent if item.role == "state" and item.offset is not None)
    require_flash(graph, target, weights_bytes=project.weights_bytes, copy_bytes=copy_bytes, state_bytes=state_bytes)
    placed = place(target, arena_bytes=project.arena_bytes, rest_bytes=project.lasting_bytes)
    if placed is not None:
        return placed
    raise infeasible(graph, target, project.ram_bytes, None)


# ---- files


def _described(project: Project, target: Target, program: Program, calls: Sequence[Called]) -> dict[str, Any]:
    """What build, emulate and the comparison with PyTorch read."""
    step, graph = program.step, program.step.graph
    classes = {labels: below for labels, _, below in labels_of(graph)}

    def tensor(item: Persistent) -> dict[str, Any]:
        shape, dtype = graph.tensors[item.tensor].shape, graph.tensors[item.tensor].dtype
        described = {"name": item.name, "shape": list(shape), "dtype": dtype, "role": item.role}
        source = graph.sources[item.tensor]
        labels = {"below": classes[item.tensor]} if item.tensor in classes else {}
        return described | labels | ({"position": int(source.path)} if source.sort == "input" else {})

    parameter_of = {g: graph.tensors[p].name for p, g in graph.gradients.items()}
    created = [t for op in step.plan.order for t in graph.ops[op].creates]
    gradients = [parameter_of[t] for t in created if t in parameter_of]
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
        "keep_every": program.keep_every,
        "compiler": target.firmware.compiler,
        "emulator": list(target.firmware.emulator),
        "is_board": target.is_board,
        "inputs": [tensor(item) for item in program.inputs],
        "tensors": [tensor(item) for item in program.trained],
        "gradients": gradients,
        "sides": _sides(step),
        "calls": [asdict(call) for call in calls],
    }


def _sides(step: Function) -> list[dict[str, Any]]:
    """The functions with bends, in the order in which a debug build reports them. call: their order in the model."""
    graph = step.graph
    calls = [n for n, op in enumerate(graph.ops) if has_bends(op)]
    reported = [op for op in dict.fromkeys(step.plan.order) if op in calls]
    return [{"call": calls.index(op), "shape": list(graph.tensors[graph.ops[op].creates[0]].shape)} for op in reported]


_CHECKPOINTS = """
It saves checkpoints to two slots in flash (checkpoint.c), and starts from the newest complete one: flash.bin in the
emulator and on Linux. The board needs a driver, board/flash_board.c, with the functions of board/flash.h.
"""


def _readme(project: Project, target: Target, step: Function) -> str:
    graph, plan = step.graph, step.plan
    checkpoints = _CHECKPOINTS if project.kept_bytes else ""
    batch = ", ".join(f"{graph.tensors[t]}" for t in graph.inputs)
    return f"""# A training step of {graph.about.get("model", "a model")} for {target.device.name}

Batch: {batch} (images as [B, H, W, C]). Optimizer: {graph.about.get("optimizer", "")}.
Plan: {plan.planner}, {len(plan.order)} ops, {len(plan.recomputed)} of them recomputed.

| bytes | |
|---|---|
| the plan's peak | {project.plan_peak_bytes} |
| arena | {project.arena_bytes} ({project.arena_live_bytes} of them live at the peak) |
| weights, state and batch in RAM | {project.lasting_bytes} |
| frozen weights, in flash | {project.frozen_bytes} |
| initial values, in flash | {project.weights_bytes} |
| two checkpoints, in flash | {project.kept_bytes} |

    make            build/firmware
    make debug      the same; it writes every gradient to shown.bin, and sides of ReLUs to sides.bin
    make sanitize   with the address and undefined-behaviour sanitizers (Linux)
    make fast       build/firmware_fast: vectors, all cores (Linux); FIRMWARE_THREADS=2 sets the number of threads

The program reads batches.bin in the working directory, trains, and writes losses.bin, trained.bin and report.bin;
main.c describes these files. In a program of your own: call model_init once; then for each batch fill the inputs of
model.h and call train_step.
{checkpoints}"""


def _write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """All files, or none."""
    partial = folder.parent / f".{folder.name[:50]}.half"
    new = [above for above in folder.absolute().parents if not above.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if partial.is_symlink():
            partial.unlink()
        shutil.rmtree(partial, ignore_errors=True)
        for name, content in files.items():
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(folder)  # which is empty if it exists: that was checked
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):  # it does not exist
            for above in new:
                above.rmdir()
        if not isinstance(error, OSError):
            raise
        with explained(folder):
            raise
