"""`edgetrain models`: the zoo as a table."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.padding import Padding
from rich.table import Table

from edgetrain import zoo
from edgetrain.cli.models_and_data import by_sides
from edgetrain.cli.output import Json, print_json, results


def models(
    notes: Annotated[bool, typer.Option("--notes", help="Say where papers print other counts, and why.")] = False,
    json: Json = False,
) -> None:
    """List the models of the zoo with their parameters and multiply-adds.

    Counts are for one sample at the size shown.

    Example: edgetrain models
    """
    rows = [_row(entry) for entry in zoo.MODELS.values()]
    if json:
        print_json({"models": rows})
        return
    results.print(_table(rows))
    if notes:
        _print_notes(rows)
    else:
        results.print("Where papers print other counts, and why: edgetrain models --notes")


def _table(rows: list[dict[str, Any]]) -> Table:
    """Fits 80 columns and, with a line a model, 23 rows: the last column takes what the others leave."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("model", no_wrap=True)
    for heading in ("parameters", "multiply-\nadds"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("input", no_wrap=True)
    table.add_column("what it is")
    for row in rows:
        operations = f"{row['multiply_adds'] / 1e6:,.1f} M"
        table.add_row(row["name"], f"{row['parameters']:,}", operations, row["input"], row["summary"])
    return table


def _print_notes(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for note in row["published"]:
            if note["note"]:
                results.print(f"\n{row['name']}, {note['source']}")
                results.print(Padding(note["note"], (0, 0, 0, 2)), style="dim")


def _row(entry: zoo.ZooModel) -> dict[str, Any]:
    with torch.device("meta"):  # the largest would take half a gigabyte
        model = zoo.build(entry.name)
    counts = zoo.count(model, entry.example(1)[0])
    return {
        "name": entry.name,
        "parameters": counts.parameters,
        "multiply_adds": counts.multiply_adds,
        "input": by_sides(entry.input_shape()) if len(entry.shape) > 1 else f"{entry.input_size} tokens",
        "task": entry.task.name,
        "summary": entry.summary,
        "published": [
            {"source": p.source, "parameters": p.parameters, "multiply_adds": p.multiply_adds, "note": p.note}
            for p in entry.published
        ],
    }
