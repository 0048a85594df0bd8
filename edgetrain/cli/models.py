"""`edgetrain models`: the zoo as a table."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from edgetrain import zoo
from edgetrain.cli.output import Json, print_json, results


def models(json: Json = False) -> None:
    """List the models of the zoo with their parameters and multiply-adds.

    Counts are for one sample at the size shown; a note tells where a paper prints another number and why.

    Example: edgetrain models
    """
    rows = [_row(entry) for entry in zoo.MODELS.values()]
    if json:
        print_json({"models": rows})
        return
    table = Table("model", "parameters", "multiply-adds", "input", "task", "", box=None, header_style="bold")
    for row in rows:
        table.add_row(
            row["name"], f"{row['parameters']:,}", f"{row['multiply_adds'] / 1e6:,.1f} M", row["input"], row["task"],
            row["summary"],
        )  # fmt: skip
    results.print(table)
    for row in rows:
        for note in row["published"]:
            if note["note"]:
                results.print(f"{row['name']}, {note['source']}: {note['note']}", style="dim")


def _row(entry: zoo.ZooModel) -> dict[str, Any]:
    counts = zoo.count(zoo.build(entry.name), entry.example(1)[0])
    size = entry.input_size
    return {
        "name": entry.name,
        "parameters": counts.parameters,
        "multiply_adds": counts.multiply_adds,
        "input": f"{entry.channels}×{size}×{size}" if entry.channels else f"{size} tokens",
        "task": entry.task.name,
        "summary": entry.summary,
        "published": [
            {"source": p.source, "parameters": p.parameters, "multiply_adds": p.multiply_adds, "note": p.note}
            for p in entry.published
        ],
    }
