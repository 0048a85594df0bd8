"""`edgetrain report`: run folders as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgetrain.cli.output import Json, print_json, results
from edgetrain.errors import UserError
from edgetrain.measure.record import RunFolder
from edgetrain.report.html import write_page


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, as written by other commands.")],
    out: Annotated[Path | None, typer.Option(help="The page; by default report.html in the first folder.")] = None,
    json: Json = False,
) -> None:
    """Write one self-contained HTML page about one or more runs. Nothing is run.

    Example: edgetrain report runs/first
    """
    folders = [RunFolder(path) for path in runs]
    for folder in folders:
        if not folder.record_file.is_file():
            raise UserError(f"{folder.path} is no run folder", expected="a folder with record.json in it")
    page = write_page(folders, out or folders[0].path / "report.html")
    if json:
        print_json({"report": str(page)})
    else:
        results.print(str(page), soft_wrap=True)
