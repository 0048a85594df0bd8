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
    Lasting,
    Program,
    function_of,
    has_bends,
    labels_of,
    lasting_tensors,
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
    chosen, folder = load_target(target), require_new_folder(Path(out))
    _require_lowered(graph)
    validate(graph, plan)
    _require_plan(plan)
    assembled = assemble(graph, plan, model, optimizer, chosen, predict=predict, keep_every=keep_every)
    return write_project(assembled, folder)


@dataclass(frozen=True)
class Assembled:
    """All of a project but its text. project: without a folder."""

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
    """What `export` would write, with its bytes; `Infeasible` where it would be. Nothing is written."""
    step = function_of(graph, plan)
    predicting = prediction(graph, model) if predict else None
    lasting, weights = with_values(lasting_tensors(graph), graph, model, optimizer)
    kind = optimizers.kind_of(optimizer)
    groups = [update.settings(kind, group) for group in optimizer.param_groups]
    program = Program(step, predicting, lasting, groups, kind, not optimizer.state, keep_every or 0)
    copy_bytes = None if keep_every is None else _copy_bytes(program)
    kept = None if copy_bytes is None else keep(target, copy_bytes)
    project = _project(target, program, weights, kept)
    placed = _require_room(target, project, program, copy_bytes)
    return Assembled(project, target, program, weights, kept, placed)


def write_project(assembled: Assembled, folder: Path) -> Project:
    """Write it to a folder that `require_new_folder` has seen."""
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


def prediction(graph: Graph, model: nn.Module) -> Function:
    """The model's own results for the first tensor of a batch."""
    shape = graph.tensors[graph.inputs[0]].shape
    with torch.no_grad():
        captured = capture_inference(model, (torch.zeros(shape),))
    lowered = lower_for_firmware(captured, model)
    return function_of(lowered, keep_all(lowered, updates="final"))


# ---- does it fit?


def _copy_bytes(program: Program) -> int:
    """What a copy in flash holds: every tensor that changes but the batch, settings, seed and step."""
    return sum(item.n_bytes for item in program.trained) + _SETTINGS_BYTES * len(program.groups) + _RUN_BYTES


def _project(target: Target, program: Program, weights: bytes, kept: Kept | None) -> Project:
    step, lasting = program.step, program.lasting
    arenas = [function.arena for function in (step, program.predict) if function is not None]
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


def _require_room(target: Target, project: Project, program: Program, copy_bytes: int | None) -> Placed | None:
    """Where things lie; Infeasible where they do not fit. Linux gives what it has."""
    if not target.is_board:
        return None
    graph = program.step.graph
    state_bytes = sum(item.n_bytes for item in program.lasting if item.role == "state" and item.offset is not None)
    require_flash(graph, target, weights_bytes=project.weights_bytes, copy_bytes=copy_bytes, state_bytes=state_bytes)
    placed = place(target, arena_bytes=project.arena_bytes, rest_bytes=project.lasting_bytes)
    if placed is not None:
        return placed
    raise infeasible(graph, target, project.ram_bytes, None)


# ---- files


def _described(project: Project, target: Target, program: Program, calls: Sequence[Called]) -> dict[str, Any]:
    """What build, emulate and the comparison with PyTorch need to know."""
    step, graph = program.step, program.step.graph
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
        "keep_every": program.keep_every,
        "compiler": target.firmware.compiler,
        "emulator": list(target.firmware.emulator),
        "is_board": target.is_board,
        "inputs": [tensor(item) for item in program.inputs],
        "tensors": [tensor(item) for item in program.trained],
        "gradients": shown,
        "sides": _sides(step),
        "calls": [asdict(call) for call in calls],
    }


def _sides(step: Function) -> list[dict[str, Any]]:
    """What a debug build tells of functions with bends, in its order. call: of those functions, as the model does."""
    graph = step.graph
    calls = [n for n, op in enumerate(graph.ops) if has_bends(op)]
    told = [op for op in dict.fromkeys(step.plan.order) if op in calls]
    return [{"call": calls.index(op), "shape": list(graph.tensors[graph.ops[op].creates[0]].shape)} for op in told]


_KEPT = """
It keeps two copies in flash of all that it changes (checkpoint.c), and starts from the newest that is whole: flash.bin
in the emulator and on Linux. On the board that takes a driver, board/flash_board.c, which does what board/flash.h says.
"""


def _readme(project: Project, target: Target, step: Function) -> str:
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
