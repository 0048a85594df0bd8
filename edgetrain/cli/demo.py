"""`edgetrain demo`: MobileNetV2 inside a memory budget, plain PyTorch beside it."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from edgetrain import ranges
from edgetrain.bench import demo as study
from edgetrain.cli.options import Batch, numeric
from edgetrain.cli.output import Json, notes, print_json, results
from edgetrain.measure.record import RunFolder, default_path
from edgetrain.plan.budget import parse_bytes
from edgetrain.report.html import write_page


def demo(
    memory: Annotated[str, typer.Option(help="Budget for the tensors of a step.")] = "300MB",
    steps: Annotated[int, numeric(replace(ranges.STEPS, low=2), "Training steps of each contender.")] = 8,
    batch: Batch = 16,
    input_size: Annotated[int, numeric(replace(ranges.SIDE, low=32), "Side of the images in pixels.")] = 224,
    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/demo-DATE-TIME.")] = None,
    json: Json = False,
) -> None:
    """Train MobileNetV2 with plain PyTorch and inside a memory budget, in turns, and compare the two.

    Example: edgetrain demo --memory 250MB
    """
    parse_bytes(memory)
    settings = study.Settings(memory=memory, side=input_size, batch=batch, steps=steps)
    with Progress(
        TextColumn("{task.description:28}"), BarColumn(), TimeElapsedColumn(), console=notes, transient=True
    ) as progress:
        line = progress.add_task("")

        def on_turn(what: str, done: int, total: int) -> None:
            progress.update(line, description=what, completed=done, total=total)

        result = study.demo(out or default_path("demo"), settings, on_turn)
    page = write_page([RunFolder(result.folder), RunFolder(result.profile)], result.folder / "report.html")
    if json:
        sides = {name: dataclasses.asdict(side) for name, side in result.sides.items()}
        print_json(
            {
                "sides": sides,
                "exact": result.exact,
                "plan": result.plan,
                "folder": str(result.folder),
                "profile": str(result.profile),
                "report": str(page),
            }
        )
        return
    results.print(_table(result))
    for name in (study.PLAIN, study.CHANNELS_LAST):
        part, time = result.ratios(name)
        results.print(f"edgetrain takes {part:.2f} of the memory and {time:.2f} of the time of {name}")
    for note in (study.about_memory(result), study.about_loss(result), study.about_exact(result)):
        results.print(f"\n{note}", style="dim", markup=False)
    results.print(f"\nplan: {result.plan}", markup=False)
    results.print(f"report: {page.resolve()}", markup=False, soft_wrap=True)


def _table(result: study.DemoResult) -> Table:
    s = result.settings
    title = f"{study.MODEL}, {s.side}×{s.side}, batch {s.batch}, {s.steps} steps on digits"
    table = Table(title=title, header_style="bold", title_justify="left")
    table.add_column("")
    for heading in ("loss, first → last", "process grew by", "time of a step"):
        table.add_column(heading, justify="right")
    for name, side in result.sides.items():
        table.add_row(
            name,
            f"{side.losses[0]:.3f} → {side.losses[-1]:.3f}",
            f"{side.growth_bytes / 1e6:,.0f} MB",
            f"{1e3 * side.time_s:,.0f} ms",
        )
    return table
