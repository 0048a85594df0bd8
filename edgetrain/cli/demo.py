"""`edgetrain demo`: a small net on digits, plain PyTorch beside the captured step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from edgetrain.bench import demo as study
from edgetrain.cli.output import Json, notes, print_json, results
from edgetrain.measure.record import RunFolder, default_path
from edgetrain.plan.budget import show_bytes
from edgetrain.report.html import write_page


def demo(
    epochs: Annotated[int, typer.Option(help="Passes over the digits.", min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/demo-DATE-TIME.")] = None,
    json: Json = False,
) -> None:
    """Train a small net on digits twice, in plain PyTorch and as a captured step, and show both.

    Example: edgetrain demo
    """
    columns = (TextColumn("training both"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, console=notes) as progress:
        line = progress.add_task("")
        result = study.demo(
            out or default_path("demo"), epochs=epochs, on_step=lambda done, total: progress.update(
                line, completed=done, total=total
            ),
        )  # fmt: skip
    page = write_page([RunFolder(result.folder)], result.folder / "report.html")
    if json:
        print_json(dataclasses.asdict(result) | {"folder": str(result.folder), "report": str(page)})
        return
    results.print(_table(result))
    results.print(f"largest difference of the loss over {result.steps} steps: {result.largest_loss_difference:.2g}")
    results.print(f"report: {page.resolve()}", soft_wrap=True)


def _table(result: study.DemoResult) -> Table:
    title = f"{study.MODEL}, width {study.WIDTH}, {study.SIDE}×{study.SIDE}, batch {study.BATCH}, digits"
    table = Table("", "plain PyTorch", "edgetrain", "ratio", title=title, header_style="bold", title_justify="left")
    a, b = result.eager, result.step
    table.add_row("training loss at the end", f"{a.loss:.6f}", f"{b.loss:.6f}", "")
    table.add_row("test accuracy", f"{100 * a.accuracy:.1f} %", f"{100 * b.accuracy:.1f} %", "")
    table.add_row(
        "peak memory of a step",
        show_bytes(a.peak_bytes),
        show_bytes(b.peak_bytes),
        f"{b.peak_bytes / a.peak_bytes:.2f}",
    )
    table.add_row(
        "time of a step (median)", f"{1e3 * a.time_s:.1f} ms", f"{1e3 * b.time_s:.1f} ms", f"{b.time_s / a.time_s:.2f}"
    )
    return table
