"""`edgetrain plan`: what a training step takes under a budget of memory, before it runs once.

In:  a model and a budget, a plan file, or a list of budgets to try (`--sweep`).
Out: tables and drawings in the terminal; a run folder with the plan, the costs that it was made with and one page.

The step is captured as `et.prepare` captures it, so a plan holds for the step that training runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import rich.table
import torch
import typer
from rich.text import Text
from torch import nn

from edgetrain import ranges
from edgetrain.cli.micro_batches import ALLOW_INEXACT, MICRO_BATCHES, number_of_micro_batches
from edgetrain.cli.models_and_data import build_alone, choose, told_of_batch
from edgetrain.cli.optimizers import MOMENTUM, make_optimizer, momentum_of
from edgetrain.cli.options import Batch, Classes, Optimizer, PlannerName, Side, Width, choice, numeric, written
from edgetrain.cli.output import Json, notes, print_json, results, working
from edgetrain.cli.plan_firmware import RUNTIMES, device_of, target_of
from edgetrain.cli.plan_in_micro_batches import Micro, in_micro_batches
from edgetrain.cli.plan_study import Study, costs_of
from edgetrain.costs.table import Costs
from edgetrain.devices.device import Device
from edgetrain.errors import Infeasible, InternalError, UserError
from edgetrain.firmware.planned import MOMENTUM as FIRMWARE_MOMENTUM
from edgetrain.firmware.planned import FirmwareStep, firmware_step
from edgetrain.firmware.target import Target
from edgetrain.graph.capture.refusals import ExampleRefused
from edgetrain.graph.ir import Graph
from edgetrain.measure.picture import Curve, Frontier, Picture, Table
from edgetrain.measure.picture import save as save_picture
from edgetrain.measure.record import RunFolder, Value, default_path, new_record, removed_if_interrupted
from edgetrain.plan.budget import Budget, Objective, parse_bytes, show_bytes
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.micro_batches import MicroPlan
from edgetrain.plan.plan import Plan
from edgetrain.plan.planner import Planner
from edgetrain.plan.planners.keep_all import KEEP_ALL
from edgetrain.plan.process import in_process, left_for_tensors
from edgetrain.plan.registry import named
from edgetrain.plan.unmeasured import refuse_impossible
from edgetrain.plan.validate import validate
from edgetrain.ranges import shown
from edgetrain.report.memory import blocks, top_bytes, write_page
from edgetrain.run.activity import doing
from edgetrain.run.making import StepMaker
from edgetrain.run.options import Options
from edgetrain.run.step import Step

_MAX_POINTS = 50
_MODULES_SHOWN = 12


def plan(
    model: Annotated[str, typer.Argument(help="A name from the zoo, or file.py:function.")],
    memory: Annotated[str | None, typer.Option(help="Budget for the step's tensors, such as 300MB.")] = None,
    process_memory: Annotated[
        str | None, typer.Option(help="Budget for the process's resident memory, such as 700MB.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="Try many budgets: a number of points, or parts of keep-all's activations as 0.3,0.5,0.8."),
    ] = None,
    batch: Batch = 1,
    device: Annotated[
        str | None,
        typer.Option(help="Model the costs for this device (`edgetrain devices`) instead of measuring them here."),
    ] = None,
    runtime: Annotated[
        str | None,
        choice(
            RUNTIMES,
            "What trains on the device: firmware, as `edgetrain export` writes it, or library, such as PyTorch; "
            "by default firmware wherever there is some.",
        ),
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="Tensors may be paged to the device's storage, by its library.")
    ] = False,
    page_to: Annotated[
        Path | None, typer.Option(help="Folder on this machine's storage that tensors may be paged to; it is measured.")
    ] = None,
    objective: Annotated[str, choice(get_args(Objective), "What is to be least.")] = "time",
    most_time: Annotated[float | None, numeric(ranges.SECONDS, "Seconds that a step may take.")] = None,
    most_energy: Annotated[float | None, numeric(ranges.JOULES, "Joules that a step may take.")] = None,
    planner: PlannerName = "auto",
    time_limit: Annotated[float, numeric(ranges.SECONDS, "Seconds for the search, of all plans together.")] = 10.0,
    micro_batches: Annotated[str | None, typer.Option(help=MICRO_BATCHES)] = None,
    allow_inexact: Annotated[bool, typer.Option("--allow-inexact", help=ALLOW_INEXACT)] = False,
    optimizer: Optimizer = "sgd",
    momentum: Annotated[
        float | None, numeric(ranges.MOMENTUM, "Momentum of sgd; by default 0.9, and 0 for firmware.")
    ] = None,
    input_size: Side = None,
    classes: Classes = None,
    width: Width = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/plan-DATE-TIME.")] = None,
    save: Annotated[Path | None, typer.Option(help="Save the plan to this file too.")] = None,
    load: Annotated[Path | None, typer.Option(help="Show the plan in this file instead of making one.")] = None,
    json: Json = False,
) -> None:
    """Plan a training step inside a budget of memory, and show what it holds, recomputes and costs.

    Times are predicted from ops that are measured on this machine or, with --device, modelled for another one.

    Example: edgetrain plan mobilenet_v2 --batch 16 --memory 300MB

    Example: edgetrain plan mobilenet_v2 --batch 16 --memory 300MB --device rpi4
    """
    chosen = choose(model)
    target = None if device is None else device_of(device)
    momentum_of(optimizer, momentum)
    memory_bytes = _amount(memory, "--memory")
    process_bytes = _amount(process_memory, "--process-memory")
    _check_device(target, process_bytes, page=page, page_to=page_to, runtime=runtime)
    limits = Budget(time_s=most_time, energy_j=most_energy, objective=objective)  # type: ignore[arg-type]
    parts = _parts(sweep)
    given = {"--memory": memory, "--process-memory": process_memory, "--load": load, "--save": save}
    _check_sweep({option for option, value in given.items() if value is not None}, parts, planner, target)
    asked = number_of_micro_batches(micro_batches, batch)
    _check_whole(micro_batches, parts, load)
    planning = named(planner)
    pages, count = page or planning.wants_store, 1 if parts else planning.number_of(asked)
    firm = None if target is None else target_of(target, runtime, pages=pages, micro_batches=count != 1)
    loaded = Plan.load(load) if load is not None else None
    with removed_if_interrupted(out) if out is not None else nullcontext(), working("capturing the step"):
        folder = RunFolder.create(out) if out is not None else None
        net, task, example = build_alone(chosen, classes=classes, input_size=input_size, width=width, batch=batch)
        net.train()
        training = _Training(model, net, task.loss, example, optimizer, momentum)
        firmware = None if firm is None else _firmware(firm, training, required=runtime == "firmware")
        step = _step(training, apart=process_bytes is not None) if firmware is None else None
        source = step or firmware
        assert source is not None
        graph = source.graph
        if loaded is not None:
            _refuse_other(graph, loaded, load)
        # Firmware knows what its target has, region by region; any other plan fits into the RAM of its device.
        ram_bytes = None if target is None or firmware is not None else target.memory.ram_bytes
        left, budget, bound = _budget(graph, memory_bytes, process_bytes, ram_bytes)
        with _of_process(bound, left):
            if step is not None and target is None and budget is not None and not (loaded or parts) and count == 1:
                _refuse_impossible(step, budget, planning, page=page_to is not None)
            plain = keep_all(graph, updates="final", exact="rounding") if step is None else step.plan
            costs = costs_of(graph, target, page_to, pages) if firmware is None else firmware.costs
            study = Study(graph, costs, plain, planning, time_limit, target, limits, firmware)
            selected, micro = None, None
            if count != 1:
                assert step is not None  # firmware takes no micro-batches
                study, selected, micro = in_micro_batches(study, step, example, budget, count, allow_inexact)
            elif loaded is not None:
                selected = study.judged(loaded, budget)
            elif not parts:
                selected = study.plan(budget if bound is None or budget is None else max(1, budget))
        frontier = study.frontier(parts) if parts else None
        shown, data = _told(study, f"{model}, batch {batch}, {optimizer}", selected, budget, frontier, micro)
        data = {"model": model, "batch": batch, "optimizer": optimizer, **data}
        folder = folder or RunFolder.create(default_path("plan"))
        drawn = _keep(folder, study.costs, selected, shown, data, save, whole=None if micro is None else micro.plan)
    if json:
        print_json(data | {"run": str(folder.path), "page": str(drawn)})
    else:
        _print(shown)
        results.print(f"page: {drawn}", soft_wrap=True)
    if frontier is not None:
        _require_fit(frontier, parts, target)


def _require_fit(frontier: Frontier, asked: Sequence[float], target: Device | None) -> None:
    """Exit code 1 where nothing of a sweep fits."""
    if not _any_fits(frontier, asked, target):
        room = "" if target is None else f" into the {show_bytes(target.memory.ram_bytes)} of {target.name}"
        notes.print(f"error: no plan of this sweep fits{room or ' its budget'}", soft_wrap=True, markup=False)
        raise typer.Exit(1)


def _any_fits(frontier: Frontier, asked: Sequence[float], device: Device | None) -> bool:
    """Beside the points that were asked for there may be one for the smallest budget."""
    return any(
        point.part in asked
        and point.extra is not None
        and (device is None or point.memory_bytes <= device.memory.ram_bytes)
        for point in frontier.points
    )


# ---- the step that is planned


@dataclass(frozen=True)
class _Training:
    """What is trained: a model by this name, on batches like the example."""

    name: str
    net: nn.Module
    loss: Callable[..., torch.Tensor]
    example: tuple[Any, ...]
    optimizer: str
    momentum: float | None

    def updates(self, default_momentum: float = MOMENTUM) -> torch.optim.Optimizer:
        momentum = momentum_of(self.optimizer, self.momentum, default_momentum)
        return make_optimizer(self.optimizer, self.net, self.name, momentum=momentum)


def _step(training: _Training, *, apart: bool) -> Step:
    """The step as `et.prepare` captures it."""
    updates = training.updates()
    with told_of_batch(training.name, "a random batch", training.example):
        step = Step(StepMaker(training.net, training.loss, updates, Options(apart=apart, runs=False)))
        step.of_shape(*training.example)
        return step


def _firmware(target: Target, training: _Training, *, required: bool) -> FirmwareStep | None:
    """The step as firmware runs it. None where firmware has no kernels for it and the board has another library."""
    updates = training.updates(FIRMWARE_MOMENTUM)
    with told_of_batch(training.name, "a random batch", training.example):
        try:
            return firmware_step(training.net, training.loss, updates, training.example, target)
        except ExampleRefused:
            raise
        except UserError as error:
            if target.is_board or required:
                raise
            notes.print(f"planned for {target.device.library.name}, since firmware cannot train it: {error.what}")
            return None


# ---- from words to numbers


class _NoBudget(typer.BadParameter):
    """Wrong use that no single option is to blame for."""

    def format_message(self) -> str:
        return str(self.message)


def _check_device(
    target: Device | None, process_bytes: int | None, *, page: bool, page_to: Path | None, runtime: str | None
) -> None:
    """Options that are for a device alone, or for this machine alone."""
    if target is not None and process_bytes is not None:
        raise typer.BadParameter(
            "what a process holds beside its tensors is known for this machine alone; give --memory with --device",
            param_hint="--process-memory",
        )
    if target is not None and page_to is not None:
        raise typer.BadParameter("a device has storage of its own; give --page", param_hint="--page-to")
    if target is None and (page or runtime is not None):
        words = "--page" if page else "--runtime"
        raise typer.BadParameter("it is for a device; give --device", param_hint=words)


def _budget(
    graph: Graph, memory_bytes: int | None, process_bytes: int | None, ram_bytes: int | None
) -> tuple[int | None, int | None, int | None]:
    """What a bound on the process leaves for tensors; the budget; the bound on the process, where it decides."""
    left = None if process_bytes is None else left_for_tensors(graph, process_bytes)
    budget = min((n for n in (left, memory_bytes, ram_bytes) if n is not None), default=None)
    return left, budget, process_bytes if left is not None and budget == left else None


def _check_whole(micro_batches: str | None, parts: Sequence[float], load: Path | None) -> None:
    if micro_batches not in (None, "1") and (parts or load is not None):
        raise typer.BadParameter("a sweep, or a plan that is loaded, is of whole batches", param_hint="--micro-batches")


def _check_sweep(given: set[str], parts: Sequence[float], planner: str, target: Device | None) -> None:
    """given: options of a single plan that were given. A sweep is of many; without one there must be a budget."""
    for option in ("--memory", "--process-memory", "--load", "--save"):
        if parts and option in given:
            words = f"a sweep is of many plans, {option} of one: give one of the two"
            raise typer.BadParameter(words, param_hint="--sweep")
    bounded = given & {"--memory", "--process-memory", "--load"} or planner == KEEP_ALL.name or target is not None
    if not bounded and not parts:
        raise _NoBudget("a budget is missing: give --memory, --process-memory or --sweep, or a plan with --load")
    if "--load" in given and planner != "auto":
        raise typer.BadParameter("a plan that is loaded needs no planner", param_hint="--planner")


def _amount(words: str | None, option: str) -> int | None:
    try:
        return None if words is None else parse_bytes(words)
    except UserError as error:
        raise typer.BadParameter(f"{error.received} is not {error.expected}", param_hint=option) from error


def _parts(sweep: str | None) -> tuple[float, ...]:
    """The parts of keep-all's activations to try, largest first: given, or as many as asked for up to the whole."""
    if sweep is None:
        return ()
    try:
        if sweep.isascii() and sweep.isdecimal():
            number = int(sweep)
            if not 2 <= number <= _MAX_POINTS:
                raise ValueError
            parts = tuple(n / number for n in range(number, 0, -1))
        else:
            parts = tuple(sorted({written(word.strip(), float) for word in sweep.split(",")}, reverse=True))
        if not all(0 < part <= 1 for part in parts) or len(parts) > _MAX_POINTS:
            raise ValueError
    except ValueError as error:
        wanted = f"a number of points from 2 to {_MAX_POINTS}, or parts above 0 and up to 1, such as 0.3,0.5,0.8"
        raise typer.BadParameter(f"{shown(sweep)} is not {wanted}", param_hint="--sweep") from error
    return parts


def _refuse_other(graph: Graph, loaded: Plan, file: Path | None) -> None:
    try:
        validate(graph, loaded)
    except InternalError as error:  # a file may hold anything: this is not a defect of ours
        raise UserError(f"{file} holds no legal plan", received=str(error).splitlines()[0]) from error


def _refuse_impossible(step: Step, budget: int, planner: Planner, *, page: bool) -> None:
    """Before anything is measured."""
    doing(f"planning within {show_bytes(budget)}")
    refuse_impossible(step.graph, budget, planner=planner, updates=step.plan.updates, page=page)


@contextmanager
def _of_process(process_bytes: int | None, left: int | None) -> Iterator[None]:
    """An Infeasible speaks of the process where its bound is the budget."""
    try:
        yield
    except Infeasible as answer:
        if process_bytes is None or left is None:
            raise
        raise in_process(answer, left, process_bytes) from None


# ---- what is kept and printed


def _told(
    study: Study, title: str, selected: Plan | None, budget: int | None, frontier: Frontier | None, micro: Micro | None
) -> tuple[Picture, dict[str, Any]]:
    """What is drawn, and the same as data."""
    shown = study.picture(title, selected, budget, frontier)
    data = study.told(selected, budget, frontier)
    if micro is not None:
        shown = replace(
            shown, title=f"{title}: the last of {len(micro.plan.sizes)} micro-batches",
            tables=(micro.table(study), *shown.tables),
        )  # fmt: skip
        data["micro_batches"] = micro.told()
    return shown, data


def _keep(
    folder: RunFolder, costs: Costs, plan: Plan | None, shown: Picture, data: dict[str, Any], to: Path | None,
    *, whole: MicroPlan | None = None,
) -> Path:  # fmt: skip
    """whole: the step in micro-batches of which `made` is the last."""
    files = {"memory": "memory.json", "costs": "costs.json", "page": "plan.html"}
    costs.save(folder.path / files["costs"])
    if plan is not None:
        files["plan"] = "plan.json"
        (whole or plan).save(folder.path / files["plan"])
    save_picture(shown, folder.path)
    times: Literal["derived", "modelled"] = "modelled" if costs.origin == "modelled" else "derived"
    summary = {"keep-all peak": Value(data["keep_all"]["peak_bytes"], "bytes", "derived")}
    summary["keep-all time"] = Value(data["keep_all"]["time_s"], "s", times)
    if plan is not None:
        step = whole or plan
        summary |= {"peak": Value(step.peak_bytes, "bytes", "derived"), "time": Value(step.time_s, "s", times)}
        summary["recomputed ops"] = Value(data["plan"]["recomputed_ops"], "", "derived")
    folder.save(replace(new_record(sys.argv, **files), status="finished", summary=summary))
    page = write_page(folder, folder.path / files["page"])
    if plan is not None and to is not None:
        (whole or plan).save(to)
        notes.print(f"saved to {to}", soft_wrap=True, markup=False)
    return page


def _print(shown: Picture) -> None:
    results.print(f"{shown.title}: {shown.note}", style="bold", soft_wrap=True)
    for table in shown.tables:
        _print_table(table, most=_MODULES_SHOWN)
    if shown.tables:
        _print_curves(shown.curves, shown.budget_bytes)
    if shown.frontier_table is not None:
        _print_table(shown.frontier_table)


def _print_table(table: Table, most: int | None = None) -> None:
    drawn = rich.table.Table(
        *table.header, box=None, show_header=any(table.header), header_style="bold", pad_edge=False
    )
    for row in table.rows[:most]:
        drawn.add_row(*map(Text, row))
    results.print()
    if table.title:
        results.print(table.title, style="bold")
    results.print(drawn)
    hidden = len(table.rows) - len(table.rows[:most])
    if hidden:
        results.print(f"and {hidden} more modules, on the page")
    if table.note:
        results.print(table.note, soft_wrap=True)


def _print_curves(curves: Sequence[Curve], budget_bytes: int | None) -> None:
    top = top_bytes(curves, budget_bytes)
    longest = max(len(curve.instants) for curve in curves)
    for curve in curves:
        results.print(f"\n{curve.name}: bytes held over {len(curve.instants)} ops", style="bold")
        for row in blocks(curve, budget_bytes, top=top, longest=longest, width=max(20, results.width - 10)):
            results.print(
                Text(f"{row.label:>8} ") + Text(row.text, style="red" if row.above else "cyan"), soft_wrap=True
            )
