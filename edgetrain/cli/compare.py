"""`edgetrain compare`: is a run worse than another, or firmware slower? The exit code says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from edgetrain import ranges
from edgetrain.cli.options import numeric
from edgetrain.cli.output import Json, notes, print_json, readable, results
from edgetrain.errors import UserError
from edgetrain.measure.compare import EXIT_CODES, Compared, verdict
from edgetrain.measure.compare import compare as compare_records
from edgetrain.measure.counts import TOLERANCE, compare_counts, load_counts
from edgetrain.measure.record import Record, RunFolder
from edgetrain.report.numbers import shown

_STYLES = {"pass": "green", "fail": "red", "inconclusive": "yellow"}


def compare(
    first: Annotated[Path, typer.Argument(help="Run folder, or file of instruction counts, to compare with.")],
    second: Annotated[Path, typer.Argument(help="Run folder, or file of instruction counts, that is judged.")],
    tolerance: Annotated[
        float | None,
        numeric(
            ranges.TOLERANCE, "Allowed worsening, as a fraction; by default 0.05 (5 %) for runs and 0.02 for counts."
        ),
    ] = None,
    figure: Annotated[
        list[str] | None, typer.Option(help="Compare only this value, such as step_time_s; may be given several times.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare two runs: pass (exit code 0), fail (1) or inconclusive (3).

    Time, memory, CPU time and energy of a step are compared, where both runs have them, by the confidence intervals of
    their medians. Two files of instruction counts, as benchmarks/firmware.py writes them, are compared op by op.

    Example: edgetrain compare runs/profile-before runs/profile-after --tolerance 0.03
    """
    with _nothing_to_compare():
        _require_alike(first, second)
        if first.is_file() and second.is_file():
            allowed = TOLERANCE if tolerance is None else tolerance
            figures, different = _compared_counts(first, second, allowed, figure)
            changed = tuple(each for each in figures if each.verdict != "pass" or _has_changed(each, allowed))
        else:
            allowed = 0.05 if tolerance is None else tolerance
            a, b = RunFolder(first).load(), RunFolder(second).load()
            figures, different = compare_records(a, b, tolerance=allowed, names=tuple(figure or ())), _differences(a, b)
            changed = figures
    _tell(figures, changed, different, allowed, json=json)


@contextmanager
def _nothing_to_compare() -> Iterator[None]:
    """Exit code 2 where something cannot be read or compared: 1 says that the second is worse."""
    try:
        yield
    except UserError as error:
        notes.print(f"error: {readable(str(error))}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error


def _require_alike(first: Path, second: Path) -> None:
    missing = next((path for path in (first, second) if not path.exists()), None)
    if missing is not None:
        raise typer.BadParameter(f"there is no {missing}", param_hint="FIRST and SECOND")
    if first.is_file() != second.is_file():
        raise typer.BadParameter(
            f"one of {first} and {second} is a file of counts, the other a run folder", param_hint="FIRST and SECOND"
        )


def _compared_counts(
    first: Path, second: Path, tolerance: float, names: list[str] | None
) -> tuple[tuple[Compared, ...], list[str]]:
    a, b = load_counts(first), load_counts(second)
    figures = compare_counts(a, b, tolerance)
    unknown = sorted(set(names or ()) - {each.name for each in figures})
    if unknown:
        raise UserError(
            f"the files have no figure {unknown[0]}", expected=", ".join(each.name for each in figures)[:400]
        )
    different = [
        f"the files had a different {key}: {a.about.get(key)} and {b.about.get(key)}"
        for key in sorted({*a.about, *b.about})
        if a.about.get(key) != b.about.get(key)
    ]
    return tuple(each for each in figures if not names or each.name in names), different


def _has_changed(figure: Compared, tolerance: float) -> bool:
    """For better or worse: a whole file of counts that have not changed need not be shown."""
    return figure.ratio is not None and not 1 / (1 + tolerance) <= figure.ratio.value <= 1 + tolerance


def _tell(
    figures: tuple[Compared, ...], changed: tuple[Compared, ...], different: list[str], tolerance: float, *, json: bool
) -> None:
    whole = verdict(figures)
    for line in different:
        notes.print(f"note: {line}", markup=False, soft_wrap=True)
    if json:
        print_json({"verdict": whole, "tolerance": tolerance, "figures": [_as_data(each) for each in figures]})
    else:
        if changed:
            results.print(_table(changed))
        if len(changed) < len(figures):
            results.print(f"{len(figures) - len(changed)} of {len(figures)} figures have not changed by more")
        results.print(f"[{_STYLES[whole]}]{whole}[/] (worse by at most {100 * tolerance:g} % passes)")
    raise typer.Exit(EXIT_CODES[whole])


def _differences(a: Record, b: Record) -> list[str]:
    """What makes a comparison one of other things than code."""
    differences = []
    for words, ours, theirs in (
        ("processors", a.machine.cpu, b.machine.cpu),
        ("numbers of usable cores", a.machine.usable_cores, b.machine.usable_cores),
        ("numbers of threads", a.machine.torch_threads, b.machine.torch_threads),
        ("versions of PyTorch", a.versions.torch, b.versions.torch),
        ("batch sizes", _figure(a, "batch"), _figure(b, "batch")),
    ):
        if ours != theirs:
            differences.append(f"the runs had different {words}: {ours} and {theirs}")
    for name, record in (("first", a), ("second", b)):
        if str(_figure(record, "noise")).startswith("noisy"):
            differences.append(f"in the {name} run the machine was {_figure(record, 'noise')}")
        if record.status != "finished":
            differences.append(f"the {name} run is {record.status}")
    return differences


def _figure(record: Record, name: str) -> object:
    return record.summary[name].value if name in record.summary else None


def _table(figures: tuple[Compared, ...]) -> Table:
    table = Table("", box=None, header_style="bold", pad_edge=False)
    for name in ("first", "second", "ratio (95 %)"):
        table.add_column(name, justify="right")
    table.add_column("")
    for each in figures:
        said = f"[{_STYLES[each.verdict]}]{each.verdict}[/]" + (f", {each.why}" if each.why else "")
        table.add_row(each.name, shown(each.first), shown(each.second), _ratio(each), said)
    return table


def _ratio(figure: Compared) -> str:
    if figure.ratio is None:
        return "—"
    if figure.ratio.low == figure.ratio.high or figure.ratio.high == float("inf"):
        return f"{figure.ratio.value:.3f}"
    return f"{figure.ratio.value:.3f} ({figure.ratio.low:.3f} to {figure.ratio.high:.3f})"


def _as_data(figure: Compared) -> dict[str, object]:
    ratio = figure.ratio
    values = None if ratio is None else [ratio.value, _finite(ratio.low), _finite(ratio.high)]
    return {"name": figure.name, "first": figure.first.value, "second": figure.second.value, "unit": figure.first.unit,
            "ratio": values, "verdict": figure.verdict, "why": figure.why}  # fmt: skip


def _finite(value: float) -> float | None:
    return value if value != float("inf") else None
