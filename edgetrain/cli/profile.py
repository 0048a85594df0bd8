"""`edgetrain profile`: one training step of a model, measured op by op."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import rich.table
import typer

from edgetrain import ranges
from edgetrain.cli.live_view import LiveView
from edgetrain.cli.micro_batches import ALLOW_INEXACT, MICRO_BATCHES, number_of_micro_batches
from edgetrain.cli.models_and_data import build_alone, choose, told_of_batch
from edgetrain.cli.optimizers import make_optimizer
from edgetrain.cli.options import Batch, Classes, Optimizer, PlannerName, Side, Threads, Width, numeric
from edgetrain.cli.output import Json, notes, print_json, results, working
from edgetrain.errors import UserError
from edgetrain.measure.processor import parse_cores
from edgetrain.measure.profile import Profile, found_sources
from edgetrain.measure.profile import profile as measure_profile
from edgetrain.measure.protocol import Protocol
from edgetrain.measure.record import RunFolder, Value, default_path, removed_if_interrupted
from edgetrain.measure.repeats import combined
from edgetrain.report.numbers import interval, shown
from edgetrain.run.step import prepare

_OPS_SHOWN = 12
_ENOUGH_S = 1.0
# What the table shows first; the rest is in the record and in the report.
_SHOWN = (
    ("step_time_s", "a step"), ("samples_per_s", "samples a second"), ("forward_s", "  forward"),
    ("backward_s", "  backward"), ("update_s", "  update"), ("recomputed_s", "  recomputed"), ("paging_s", "  paging"),
    ("inference_time_s", "inference"), ("peak_bytes", "peak of tensors"), ("process_peak_bytes", "peak of the process"),
    ("cpu_s_per_step", "CPU seconds a step"), ("utilisation", "utilisation of the cores"),
    ("energy_per_step_j", "energy a step"), ("net_energy_per_step_j", "  above idle"), ("power_w", "power"),
    ("energy_note", "energy"),
    ("overhead_sampling", "sampling costs"), ("overhead_tracing", "sampling and tracing cost"),
    ("steady", "steady"), ("noise", "the machine was"),
)  # fmt: skip
_PARTS = ("utilisation", "overhead_sampling", "overhead_tracing")


def profile(
    model: Annotated[str, typer.Argument(help="A name from the zoo, or file.py:function.")],
    batch: Batch = 1,
    steps: Annotated[
        int | None,
        numeric(ranges.STEPS, "Steps to measure after the warm-up; by default at least 30, for at least 3 s."),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Budget for the tensors of a step, such as 300MB.")] = None,
    planner: PlannerName = "auto",
    page_to: Annotated[Path | None, typer.Option(help="Folder to page tensors to.")] = None,
    micro_batches: Annotated[str, typer.Option(help=MICRO_BATCHES)] = "1",
    allow_inexact: Annotated[bool, typer.Option("--allow-inexact", help=ALLOW_INEXACT)] = False,
    threads: Threads = None,
    cores: Annotated[str | None, typer.Option(help="Cores to run on, such as 0-2,4.")] = None,
    frequency: Annotated[
        float | None, numeric(ranges.MEGAHERTZ, "Clock in MHz to hold these cores at, where the system allows it.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device whose power figures model the energy, where no sensor measures it.")
    ] = None,
    repeats: Annotated[int, numeric(ranges.REPEATS, "Fresh processes to measure in.")] = 1,
    idle: Annotated[float, numeric(ranges.IDLE_SECONDS, "Seconds of idle time to measure as the baseline.")] = 3.0,
    period: Annotated[float, numeric(ranges.MILLISECONDS, "Milliseconds between samples.")] = 10.0,
    rounds: Annotated[
        int, numeric(ranges.ROUNDS, "Rounds of the test of what measuring itself costs; 0: no test.")
    ] = 12,
    optimizer: Optimizer = "sgd",
    input_size: Side = None,
    classes: Classes = None,
    width: Width = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/profile-DATE-TIME.")] = None,
    json: Json = False,
) -> None:
    """Measure one training step op by op: time, memory, CPU, energy and what measuring costs.

    Energy is measured where this machine has a sensor for it (`edgetrain doctor`), and modelled elsewhere; the results
    say which.

    Example: edgetrain profile mobilenet_v2 --batch 16
    """
    chosen = choose(model)
    parts = number_of_micro_batches(micro_batches, batch)
    used = None if cores is None else parse_cores(cores)
    folder = out or default_path("profile")
    if RunFolder(folder).record_file.exists():
        raise UserError(f"{folder} holds a run already", next_step="name another folder, or remove this one")
    with removed_if_interrupted(folder):
        net, task, example = build_alone(chosen, classes=classes, input_size=input_size, width=width, batch=batch)
        net.train()
        updates = make_optimizer(optimizer, net, model)
        with told_of_batch(model, "a random batch", example), working("capturing the step"):
            step = prepare(
                net, task.loss, updates, example, memory=memory, planner=planner, page_to=page_to,
                micro_batches=parts, allow_inexact=allow_inexact,
            )  # fmt: skip
        with LiveView(found_sources(device)) as view:
            profiled = measure_profile(
                step, example, steps=steps, out=folder, threads=threads, cores=used, device=device,
                frequency_hz=None if frequency is None else round(frequency * 1e6),
                protocol=Protocol(idle_s=idle, period_s=period / 1e3, rounds=rounds), on_progress=view.show,
            )  # fmt: skip
        summary = _repeated(folder, repeats) if repeats > 1 else profiled.summary
    words = {"model": model, "batch": batch, "plan": str(step.plan), "run": str(folder)}
    if json:
        print_json(words | {"summary": {name: vars(value) for name, value in summary.items()}})
        return
    _print(f"{model}, batch {batch}", summary, profiled)
    results.print(f"plan: {step.plan}", soft_wrap=True)
    results.print(f"run: {folder}  (edgetrain report {folder} draws it)", soft_wrap=True)


def _repeated(folder: Path, repeats: int) -> dict[str, Value]:
    """The same command in fresh processes, each in a folder of its own inside this one; all of them together."""
    folders = [folder]
    for number in range(2, repeats + 1):
        notes.print(f"repeat {number} of {repeats}, in a fresh process")
        inner = folder / f"repeat-{number}"
        command = [sys.executable, "-m", "edgetrain", *_without(sys.argv[1:], "--out", "--repeats", "--json")]
        command += ["--out", str(inner), "--json"]
        # In a group of its own: Ctrl-C goes to this process, which ends it.
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False, process_group=0)
        if done.returncode:
            raise UserError(f"repeat {number} failed with exit code {done.returncode}; what was measured is in {inner}")
        folders.append(inner)
    return combined(RunFolder(folder), [RunFolder(inner) for inner in folders[1:]])


def _without(arguments: list[str], *names: str) -> list[str]:
    """The arguments without these options and their values."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        if skip:
            skip = False
        elif word == "--json" or any(word.startswith(f"{name}=") for name in names):
            pass
        elif word in names:
            skip = True
        else:
            kept.append(word)
    return kept


# ---- on paper


def _print(title: str, summary: dict[str, Value], profiled: Profile) -> None:
    table = rich.table.Table("", "", "", title=title, title_style="bold", box=None, show_header=False, pad_edge=False)
    for name, words in _SHOWN:
        value = summary.get(name)
        if value is not None and value.value is None:
            note = summary.get("overhead_note") if name.startswith("overhead_") else None
            table.add_row(words, "unavailable" if note is None else shown(note), "", style="dim")
        elif value is not None and value.value != 0:
            value = _percent(value) if name in _PARTS else value
            table.add_row(words, shown(value), f"{interval(value)} {value.origin}".strip())
    results.print(table)
    span_s = profiled.measured.measured.time_s
    if span_s < _ENOUGH_S and any(value.value is None for value in summary.values()):
        steps = profiled.timeline.steps
        more = math.ceil(steps * _ENOUGH_S / span_s)
        results.print(
            f"{steps} steps took {span_s:.2g} s: sensors that are read less often may have measured nothing in that "
            f"time (--steps {more} gives them a second)", soft_wrap=True,
        )  # fmt: skip
    results.print()
    results.print(_ops(profiled))


def _percent(part: Value) -> Value:
    assert isinstance(part.value, int | float)
    low, high = (None if end is None else 100 * end for end in (part.low, part.high))
    return Value(100 * part.value, "%", part.origin, low, high)


def _ops(profiled: Profile) -> rich.table.Table:
    """The ops that take most of the time, those of one layer and phase together."""
    timeline = profiled.timeline
    middle = np.median(timeline.op_s, axis=0)
    taken: dict[tuple[str, str, str], float] = {}
    for op, seconds in zip(timeline.ops, middle, strict=True):
        key = (op.module or op.name, op.phase if op.why == "first" else op.why, op.shown_kind.replace(".default", ""))
        taken[key] = taken.get(key, 0.0) + float(seconds)
    whole = float(np.median(timeline.step_s))
    table = rich.table.Table("layer", "", "op", box=None, header_style="bold", pad_edge=False)
    table.add_column("time", justify="right")
    table.add_column("of the step", justify="right")
    largest = sorted(taken.items(), key=lambda each: -each[1])
    for (module, why, kind), seconds in largest[:_OPS_SHOWN]:
        table.add_row(module, why, kind, f"{1e3 * seconds:.2f} ms", f"{100 * seconds / whole:.1f} %")
    rest = sum(seconds for _, seconds in largest[_OPS_SHOWN:])
    if rest:
        count = len(largest) - _OPS_SHOWN
        table.add_row(f"{count} more", "", "", f"{1e3 * rest:.2f} ms", f"{100 * rest / whole:.1f} %", style="dim")
    return table
