"""`edgetrain report`: run folders as one HTML page, a trace for Perfetto, CSV files, or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from edgetrain.cli.output import Json, print_json, results
from edgetrain.errors import UserError
from edgetrain.files import real
from edgetrain.measure.record import RunFolder
from edgetrain.report.html import write_page
from edgetrain.report.run import load_run
from edgetrain.report.tables import CSV, as_json, write_csv
from edgetrain.report.trace import write_trace


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, as written by other commands.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="HTML file to write; by default report.html in the first folder.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write CSV files of summary, ops, times and samples to this folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Write one self-contained HTML page about one or more runs, side by side. Nothing is run.

    With --trace or --csv the page is written only if --out names it. --json prints what the page shows.

    Example: edgetrain report runs/first runs/second -o report.html
    """
    folders = [_folder(path) for path in runs]
    page = out or (folders[0].path / "report.html" if trace is None and csv is None else None)
    _refuse_overwriting(folders, {"--out": page, "--trace": trace, "--csv": csv})
    written: dict[str, Any] = {}
    if page is not None:
        written["report"] = str(write_page(folders, page))
    if trace is not None or csv is not None or json:
        loaded = [load_run(folder) for folder in folders]
    if trace is not None:
        if not any(run.is_profile for run in loaded):
            raise UserError(
                "there is no op timeline and there are no samples for a trace",
                next_step="record a run with `edgetrain profile`",
            )
        written["trace"] = str(write_trace(loaded, trace))
    if csv is not None:
        written["csv"] = [str(path) for path in write_csv(loaded, csv)]
    if json:
        print_json(written | {"runs": [as_json(run) for run in loaded]})
        return
    for paths in written.values():
        for path in [paths] if isinstance(paths, str) else paths:
            results.print(path, soft_wrap=True, markup=False)


def _refuse_overwriting(folders: Sequence[RunFolder], asked: Mapping[str, Path | None]) -> None:
    """Wrong use where two of the files would be one, or one of them a file of a run."""
    option_of: dict[Path, str] = {}
    for option, path in asked.items():
        for file in [] if path is None else [path / name for name in CSV] if option == "--csv" else [path]:
            other = option_of.setdefault(real(file), option)
            if other != option:
                raise typer.BadParameter(f"{other} writes {file} too", param_hint=option)
    if asked["--csv"] is not None and real(asked["--csv"]) in option_of:
        raise typer.BadParameter(f"{option_of[real(asked['--csv'])]} writes this file", param_hint="--csv")
    for folder in folders:
        record = folder.load()
        for name in (folder.record_file.name, *record.files.values()):
            option = option_of.get(real(folder.path / name), "")
            if option and not name.endswith(".html"):
                raise typer.BadParameter(f"{folder.path / name} belongs to the run itself", param_hint=option)


def _folder(path: Path) -> RunFolder:
    folder = RunFolder(path)
    if not folder.record_file.is_file():
        raise UserError(f"{path} is not a run folder", expected="a folder that holds a record.json")
    return folder
