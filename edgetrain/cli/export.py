"""`edgetrain export`: a training step as a C project for a board."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from edgetrain import ranges
from edgetrain.cli.models_and_data import build_alone, build_for, choose, load_data, told_of_batch
from edgetrain.cli.optimizers import make_optimizer, momentum_of
from edgetrain.cli.options import Batch, Optimizer, Side, Width, numeric
from edgetrain.cli.output import Json, notes, print_json, results, working
from edgetrain.errors import UserError
from edgetrain.firmware import parity
from edgetrain.firmware.build import Variant, load_project
from edgetrain.firmware.export import Project, require_new_folder, write_project
from edgetrain.firmware.planned import MOMENTUM, firmware_step
from edgetrain.firmware.target import load_target
from edgetrain.measure.sensors.room import require_room
from edgetrain.plan.budget import parse_bytes
from edgetrain.plan.plan import Plan
from edgetrain.run.activity import doing
from edgetrain.zoo.tasks import Task

Example = tuple[torch.Tensor, ...]


def export(
    model: Annotated[str, typer.Argument(help="A name from the zoo, or file.py:function.")],
    target: Annotated[
        str, typer.Option(help="Board: nrf52840, stm32f746, linux-x86_64, … or the path of a device file.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the project, new or empty.")],
    data: Annotated[str | None, typer.Option(help="Data set whose classes and input shape the model takes.")] = None,
    batch: Batch = 1,
    memory: Annotated[
        str | None, typer.Option(help="RAM for the step, such as 200kB; by default all that the board has.")
    ] = None,
    optimizer: Optimizer = "sgd",
    lr: Annotated[float, numeric(ranges.LEARNING_RATE, "Learning rate.")] = 0.01,
    momentum: Annotated[
        float | None, numeric(ranges.MOMENTUM, "Momentum of sgd; by default 0, which needs no memory.")
    ] = None,
    classes: Annotated[int | None, numeric(ranges.CLASSES, "Number of classes, without --data.")] = None,
    input_size: Side = None,
    width: Width = None,
    seed: Annotated[int, numeric(ranges.SEED, "Seed of the initial weights.")] = 0,
    keep_every: Annotated[
        int | None,
        numeric(
            ranges.STEPS, "Steps between copies of the weights in flash: power loss costs at most this many steps."
        ),
    ] = None,
    check: Annotated[
        int,
        numeric(
            ranges.ROUNDS,
            "Run so many steps, in the emulator for a microcontroller, and compare every tensor with PyTorch.",
        ),
    ] = 0,
    json: Json = False,
) -> None:
    """Write a training step as a C project that builds for a board and runs in its emulator.

    Example: edgetrain export lenet --target linux-x86_64 --batch 8 --out fw

    Example: edgetrain export lenet --width 0.5 --target nrf52840 --batch 2 --out fw --check 3

    Example: edgetrain export ds_cnn --width 0.5 --data KEYWORDS --target stm32f746 --batch 1 --out fw
    """
    momentum = momentum_of(optimizer, momentum, MOMENTUM)
    if data is not None and classes is not None:
        raise typer.BadParameter("the data says how many there are; leave one of the two out", param_hint="--classes")
    chosen_target = load_target(target)
    folder = require_new_folder(out)
    torch.manual_seed(seed)
    net, task, example = _model(model, data, batch, classes, input_size, width, seed)
    net.train()
    if check:
        _require_checkable(net, example, check)
    updates = make_optimizer(optimizer, net, model, lr=lr, momentum=momentum)
    with working("capturing the step"):
        with told_of_batch(model, "a random batch" if data is None else data, example):
            step = firmware_step(net, task.loss, updates, example, chosen_target)
        doing(f"planning for {chosen_target.device.name}")
        plan = step.plan(None if memory is None else parse_bytes(memory))
        doing(f"writing {out}")
        project = write_project(step.assemble(plan, keep_every=keep_every), folder)
        doing("comparing every tensor with PyTorch")
        checked = _checked(project, net, task, updates, example, check) if check else []
    wrong = [row for row in checked if not row.right]
    if json:
        print_json(_as_json(project, plan, checked))
    else:
        results.print(_as_text(project, plan, checked, data), markup=False, soft_wrap=True)
    if wrong:
        notes.print(f"error: {parity.WrongNumbers(wrong)}", markup=False, soft_wrap=True)
        raise typer.Exit(1)


def _model(
    model: str,
    data: str | None,
    batch: int,
    classes: int | None,
    input_size: int | None,
    width: float | None,
    seed: int,
) -> tuple[nn.Module, Task, Example]:
    chosen = choose(model)
    if data is None:
        return build_alone(chosen, classes=classes, input_size=input_size, width=width, batch=batch)
    dataset = load_data(chosen, data, input_size=input_size, seed=seed)
    if batch > len(dataset.train):
        raise UserError(f"{data} has {len(dataset.train)} samples to train on", received=f"a batch of {batch}")
    net, task = build_for(chosen, dataset, width=width)
    return net, task, dataset.train.batch(torch.arange(batch))


def _require_checkable(net: nn.Module, example: Example, steps: int) -> None:
    """Before anything is written."""
    if any(isinstance(module, nn.Dropout) and module.p for module in net.modules()):
        raise UserError("a model with dropout draws other masks in firmware than in PyTorch, and cannot be checked")
    # A debug build reports the gradients of every step, which are all held in memory.
    each = sum(t.nbytes for t in (*example, *net.parameters()))
    require_room(f"a check over {steps:,} steps", steps * each, next_step="check fewer steps")


def _checked(
    project: Project, net: nn.Module, task: Task, updates: torch.optim.Optimizer, example: Example, steps: int
) -> list[parity.Row]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(steps):
        order = torch.randperm(len(example[0]), generator=generator)
        noise = torch.randn(example[0].shape, generator=generator)
        batches.append((example[0][order] + 0.1 * noise, *(t[order] for t in example[1:])))
    variants: tuple[Variant, ...] = ("debug",) if load_project(project.folder)["is_board"] else ("debug", "fast_debug")
    return [
        row
        for variant in variants
        for row in parity.compare(project.folder, net, task.loss, updates, batches, variant=variant)[1]
    ]


def _as_json(project: Project, plan: Plan, rows: list[parity.Row]) -> dict[str, Any]:
    worst = max((row.error / row.allowed for row in rows if row.allowed), default=None)
    return {
        "folder": str(project.folder),
        "target": project.target,
        "planner": plan.planner,
        "ops": len(plan.order),
        "recomputed": len(plan.recomputed),
        "plan_peak_bytes": project.plan_peak_bytes,
        "arena_bytes": project.arena_bytes,
        "lasting_bytes": project.lasting_bytes,
        "frozen_bytes": project.frozen_bytes,
        "weights_bytes": project.weights_bytes,
        "kept_bytes": project.kept_bytes,
        "checked": len(rows),
        "wrong": [str(row) for row in rows if not row.right],
        "worst_part_of_allowed": worst,
    }


def _as_text(project: Project, plan: Plan, rows: list[parity.Row], data: str | None) -> str:
    lines = [
        f"{project.folder}: {len(plan.order)} ops for {project.target}, {len(plan.recomputed)} of them computed again",
        f"RAM {project.ram_bytes} bytes: arena {project.arena_bytes}, weights, state and batch {project.lasting_bytes}",
        f"flash: first values {project.weights_bytes} bytes, and the code",
    ]
    if project.kept_bytes:
        lines[-1] += f"; two copies of what is trained {project.kept_bytes} bytes"
    if rows:
        right = sum(row.right for row in rows)
        lines.append(f"{right} of {len(rows)} tensors are within 4 × PyTorch's own error of float64")
    emulate = ["edgetrain", "emulate", str(project.folder), *([] if data is None else ["--data", data])]
    return "\n".join([*lines, f"next: {shlex.join(['make', '-C', str(project.folder)])}, or {shlex.join(emulate)}"])
