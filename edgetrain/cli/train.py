"""`edgetrain train`: from a model and data to a trained model in a run folder."""

from __future__ import annotations

import dataclasses
import json as json_text
import math
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from edgetrain import ranges, zoo
from edgetrain.cli.micro_batches import ALLOW_INEXACT, MICRO_BATCHES, number_of_micro_batches
from edgetrain.cli.models_and_data import build_for, choose, load_data, told_of_batch
from edgetrain.cli.optimizers import MOMENTUM, make_optimizer, momentum_of
from edgetrain.cli.options import Batch, Optimizer, PlannerName, Threads, Width, choice, numeric
from edgetrain.cli.output import Json, notes, print_json, results, stopped, working
from edgetrain.errors import UserError
from edgetrain.files import write_text
from edgetrain.measure.record import RunFolder, default_path, removed_if_interrupted
from edgetrain.plan.budget import parse_bytes, show_bytes
from edgetrain.run.checkpoint import latest
from edgetrain.run.learning_rate import ScheduleKind
from edgetrain.run.step import prepare
from edgetrain.run.trainer import Progress as TrainProgress
from edgetrain.run.trainer import TrainConfig, Trainer, TrainResult, refuse_old_work
from edgetrain.run.weights import load_weights
from edgetrain.saved import read_object
from edgetrain.zoo.datasets import Data
from edgetrain.zoo.tasks import Task

WIDE, LONG_BAR, SHORT_BAR = 100, 24, 4  # columns of a terminal from which on the bar is a long one
# What a resumed run must share with the run that it continues.
_SAME = ("model", "data", "input_size", "width", "optimizer", "seed")


def train(
    model: Annotated[str, typer.Argument(help="A name from the zoo (`edgetrain models`), or file.py:function.")],
    data: Annotated[
        str, typer.Option(help="Data set: digits, a folder of images by class, idx or CIFAR-10 files, or a text file.")
    ] = "digits",
    epochs: Annotated[int, numeric(ranges.EPOCHS, "Passes over the training data.")] = 5,
    batch: Batch = 32,
    lr: Annotated[
        float, numeric(dataclasses.replace(ranges.LEARNING_RATE, above=True), "Highest learning rate of the run.")
    ] = 0.05,
    seed: Annotated[int, numeric(ranges.SEED, "Seed of initial weights, data order and dropout.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/train-DATE-TIME.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest complete checkpoint in --out.")
    ] = False,
    optimizer: Optimizer = "sgd",
    momentum: Annotated[float | None, numeric(ranges.MOMENTUM, f"Momentum of sgd; by default {MOMENTUM}.")] = None,
    weight_decay: Annotated[float, numeric(ranges.WEIGHT_DECAY, "Weight decay.")] = 1e-4,
    schedule: Annotated[str, choice(get_args(ScheduleKind), "Course of the learning rate over the run.")] = "cosine",
    warmup_steps: Annotated[int, numeric(ranges.STEPS_OR_NONE, "Steps over which the learning rate rises.")] = 0,
    weights: Annotated[Path | None, typer.Option(help="Start from these weights: safetensors or a state dict.")] = None,
    resize_head: Annotated[
        bool, typer.Option("--resize-head", help="Accept --weights of another number of classes.")
    ] = False,
    input_size: Annotated[int | None, numeric(ranges.SIDE, "Side in pixels that images are resized to.")] = None,
    width: Width = None,
    checkpoint_every: Annotated[
        int, numeric(ranges.STEPS_OR_NONE, "Steps between checkpoints; 0: one at the end only.")
    ] = 200,
    eval_every: Annotated[int, numeric(ranges.EPOCHS, "Epochs between evaluations.")] = 1,
    memory: Annotated[
        str | None,
        typer.Option(help="Budget for the tensors of a step, such as 300MB; auto follows the available memory."),
    ] = None,
    process_memory: Annotated[
        str | None, typer.Option(help="Budget for the resident memory of the whole process, such as 700MB.")
    ] = None,
    planner: PlannerName = "auto",
    micro_batches: Annotated[str | None, typer.Option(help=MICRO_BATCHES)] = None,
    allow_inexact: Annotated[bool, typer.Option("--allow-inexact", help=ALLOW_INEXACT)] = False,
    page_to: Annotated[Path | None, typer.Option(help="Folder on this device's storage to page tensors to.")] = None,
    threads: Threads = None,
    on: Annotated[str, choice(("cpu", "cuda"), "Where to train.")] = "cpu",
    json: Json = False,
) -> None:
    """Train a model, with evaluation, checkpoints and a run folder that can be resumed.

    Example: edgetrain train lenet --data digits --epochs 5 --out runs/first
    """
    given = {k: (str(v) if isinstance(v, Path) else v) for k, v in locals().items() if k not in ("json", "resume")}
    for amount in (memory, process_memory):
        if amount is not None and (amount != "auto" or amount is process_memory):
            parse_bytes(amount)
    momentum = momentum_of(optimizer, momentum)
    given["momentum"] = momentum if optimizer == "sgd" else None
    if resize_head and weights is None:
        raise typer.BadParameter("there is no head to resize without --weights", param_hint="--resize-head")
    budget = {
        "memory": memory, "process_memory": process_memory, "planner": planner, "page_to": page_to,
        "micro_batches": number_of_micro_batches(micro_batches, batch), "allow_inexact": allow_inexact,
    }  # fmt: skip
    asked, resume = resume, resume and _can_resume(out)
    if threads is not None:
        torch.set_num_threads(threads)
    config = TrainConfig(
        epochs=epochs, batch=batch, lr=lr, seed=seed, schedule=schedule, warmup_steps=warmup_steps,  # type: ignore[arg-type]
        eval_every=eval_every, checkpoint_every_steps=checkpoint_every,
    )  # fmt: skip
    place = _place(on)
    chosen = choose(model)
    loaded = load_data(chosen, data, input_size=input_size, seed=seed)
    torch.manual_seed(seed)
    net, task = build_for(chosen, loaded, width=width)
    if weights is not None and not resume:
        for message in load_weights(net, weights, resize_head=resize_head):
            notes.print(message)
    net.to(place)
    updates = make_optimizer(optimizer, net, model, lr=lr, momentum=momentum, weight_decay=weight_decay)
    folder = RunFolder(out or default_path("train"))
    try:
        with removed_if_interrupted(folder.path):
            RunFolder.create(folder.path, begun=True)
            with folder.locked():
                _take(folder, given, resume, asked)
            result = _run(folder, config, _Job(model, data, net, task, loaded, updates, place), budget, resume=resume)
        _tell(result, folder, given, json)
    except KeyboardInterrupt:
        raise stopped(_how_to_go_on(folder, given)) from None


def _can_resume(out: Path | None) -> bool:
    """Whether there is a checkpoint; a folder of something else is a mistake.

    A run that ended before its first checkpoint starts again, with or without a folder.
    """
    if out is None:
        newest = max(Path("runs").glob("train-*"), key=lambda path: path.name, default=None)
        raise UserError(
            "--resume needs the run folder",
            next_step=f"add --out DIR with the folder of the run to continue{f', such as {newest}' if newest else ''}",
        )
    folder = RunFolder(out)
    if not os.path.lexists(out):
        # What a run leaves that was ended before its first write, or stopped before anything came of it.
        notes.print(f"there is no folder {out} to resume from: starting from the beginning there", soft_wrap=True)
        return False
    if not folder.record_file.exists() and not folder.is_begun:
        raise UserError(
            f"there is no run to resume in {out}",
            next_step="check the folder after --out, or leave --resume out to start a new run there",
        )
    checkpoint, refused = latest(folder.checkpoints)
    if checkpoint is None and not refused:
        notes.print(f"no checkpoint to resume from in {out} yet: starting from the beginning", soft_wrap=True)
        return False
    if not folder.record_file.exists():
        notes.print(f"the record of the run in {out} is missing: resuming from its newest checkpoint", soft_wrap=True)
    return True


def _place(on: str) -> torch.device:
    if on == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no CUDA device here", received=f"torch {torch.__version__}", next_step="use --on cpu")
    return torch.device(on)


def _take(folder: RunFolder, given: dict[str, Any], resume: bool, asked: bool) -> None:
    """Write the settings into the folder, unless it holds another run. asked: to resume, if there is anything."""
    file = folder.path / "config.json"
    if not resume:
        refuse_old_work(folder)
        if file.exists() and not asked:
            notes.print(f"the run in {folder.path} has no checkpoint: starting from the beginning", soft_wrap=True)
    elif (before := _settings(file)) is not None:
        for key in _SAME:
            if before.get(key) != given[key]:
                raise UserError(
                    f"{folder.path} holds a run with another {key if key == 'model' else _option(key)}",
                    expected=f"{_said(before.get(key))}, as in the run so far",
                    received=_said(given[key]),
                    next_step="resume with the settings of that run, or start a new one in another folder",
                )
    given["out"] = str(folder.path)
    write_text(file, json_text.dumps(given, indent=2))


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _said(value: object) -> str:
    return "nothing" if value is None else str(value)


def _settings(file: Path) -> Mapping[str, object] | None:
    """Those of the run so far; None where they cannot be known any more."""
    try:
        return read_object(file).values
    except UserError as error:
        notes.print(f"the settings of the run so far are not known, those of this command hold: {error.what}")
        return None


@dataclass(frozen=True)
class _Job:
    """What is trained, on which data and where; `model` and `data_name` as the user named them."""

    model: str
    data_name: str
    net: nn.Module
    task: Task
    data: Data
    optimizer: torch.optim.Optimizer
    place: torch.device


def _run(folder: RunFolder, config: TrainConfig, job: _Job, budget: Mapping[str, Any], *, resume: bool) -> TrainResult:
    """budget: the options of `et.prepare` that say how a step is planned."""
    net, task, data, place = job.net, job.task, job.data, job.place
    net.train()
    zoo.require_room_for_batch(config.batch, data.shape)
    first = _to(data.train.batch(torch.arange(min(config.batch, len(data.train)))), place)
    if len(first[0]) < config.batch:
        first = _to(data.train.batch(torch.arange(config.batch) % len(data.train)), place)

    def make_step() -> Any:
        with told_of_batch(job.model, f"the data set {job.data_name}", first), working("capturing the step"):
            step = prepare(net, task.loss, job.optimizer, first, **budget)
        notes.print(f"step: {step.plan}")
        return step if place.type == "cpu" else lambda *batch: step(*_to(batch, place))

    def evaluate(model: nn.Module, *batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float, int]:
        batch = _to(batch, place)
        count = batch[1].numel()
        output = model(batch[0])
        correct = task.accuracy(output, *batch) if task.accuracy else math.nan
        return task.loss(lambda _: output, *batch) * count, correct, count

    with _bar(task) as watch:
        trainer = Trainer(config, folder, on_progress=watch)
        return trainer.run(
            net, job.optimizer, make_step, data.train, data.test, evaluate, resume=resume,
            metadata={"model": job.model},
        )  # fmt: skip


def _to(batch: tuple[torch.Tensor, ...], place: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(t.to(place) for t in batch)


@contextmanager
def _bar(task: Task) -> Iterator[Any]:
    """Draws `Progress` as a bar on standard error: loss, accuracy of the last evaluation, samples/s, memory.

    Where the budget moves, it shows the budget, the plan in use and the last switch in place of the memory.
    """
    columns = (
        TextColumn("epoch {task.fields[epoch]}"), BarColumn(bar_width=LONG_BAR if notes.width >= WIDE else SHORT_BAR),
        TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.fields[text]}"), TimeRemainingColumn(),
    )  # fmt: skip
    accuracy = ""
    progress = Progress(*columns, console=notes)
    line: TaskID = progress.add_task("", total=1, epoch="", text="starting")
    begun = False  # before the first step a spinner says what is being done

    def watch(p: TrainProgress) -> None:
        nonlocal accuracy, begun
        if not begun:
            begun = True
            progress.start()
        epoch = f"{min(p.epoch + 1, p.epochs)}/{p.epochs}"
        if p.phase == "train":
            text = fitting(shown(p, accuracy), room(notes.width, epoch))
            progress.update(line, completed=p.done, total=p.total, epoch=epoch, text=text)
        elif p.phase == "evaluate" and task.accuracy is not None and p.accuracy is not None and p.done == p.total:
            accuracy = f"accuracy {100 * p.accuracy:.2f} %"

    try:
        yield watch
    finally:
        if begun:
            progress.stop()


def room(width: int, epoch: str) -> int:
    """The columns that are left for text beside the epoch, the bar, the percentage and the time that remains."""
    return width - len(f"epoch {epoch} ") - (LONG_BAR if width >= WIDE else SHORT_BAR) - len(" 100 %  0:00:00 ")


def shown(p: TrainProgress, accuracy: str) -> list[str]:
    """What there is to show of training, the most important first."""
    texts = [f"loss {p.loss:.4f}"]
    if p.budget_bytes is not None and p.plan_bytes is not None:
        texts.append(f"plan {_of(p.plan_bytes, p.budget_bytes)}")
        if p.switches > 1:  # the first is the choice of a plan
            texts.append(f"switch {p.switches - 1} at {p.switched_at}")
    elif p.memory_bytes:
        texts.append(show_bytes(p.memory_bytes))
    rate = f"{p.samples_per_s:,.0f} samples/s" if p.samples_per_s else ""
    return [text for text in (*texts, accuracy, rate) if text]


def _of(part: int, whole: int) -> str:
    """ "212/300 MB": the unit once where it is the same."""
    number, _, unit = show_bytes(part).partition(" ")
    said = show_bytes(whole)
    return f"{number}/{said}" if said.endswith(f" {unit}") else f"{number} {unit}/{said}"


def fitting(texts: list[str], room: int) -> str:
    """As many as there is room for, in order; the first in any case."""
    line = texts[0]
    for text in texts[1:]:
        if len(line) + 2 + len(text) > room:
            break
        line += f"  {text}"
    return line


def _tell(result: TrainResult, folder: RunFolder, given: dict[str, Any], json: bool) -> None:
    for message in result.messages:
        notes.print(message)
    evaluation = result.evaluation
    if json:
        summary = dataclasses.asdict(result) | {"checkpoint": str(result.checkpoint), "run": str(folder.path)}
        print_json(summary)
    else:
        table = Table(box=None, show_header=False)
        table.add_row("status", result.status)
        table.add_row("steps", f"{result.step:,} ({result.samples:,} samples)")
        if result.loss is not None:
            table.add_row("training loss", f"{result.loss:.4f}")
        if evaluation is not None and evaluation.accuracy is not None:
            table.add_row("test accuracy", f"{100 * evaluation.accuracy:.2f} % of {evaluation.count:,}")
        if evaluation is not None and evaluation.loss is not None:
            table.add_row("test loss", f"{evaluation.loss:.4f}")
        table.add_row("run folder", str(folder.path))
        results.print(table)
    if result.status == "stopped":
        raise stopped(_how_to_go_on(folder, given))


def _how_to_go_on(folder: RunFolder, given: dict[str, Any]) -> str:
    if latest(folder.checkpoints)[0] is None:
        return "there is no checkpoint yet, so nothing to resume: give the same command to start again"
    return f"go on with:\n  {_resume_command(given)}"


def _resume_command(given: dict[str, Any]) -> str:
    words = ["edgetrain", "train", str(given["model"])]
    for key, value in given.items():
        if key in ("model", "weights", "resize_head") or value is None or value is False:
            continue
        words += [_option(key), *([] if value is True else [str(value)])]
    return shlex.join([*words, "--resume"])
