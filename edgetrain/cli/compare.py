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
            found, different = _compared_counts(first, second, allowed, figure)
            changed = tuple(one for one in found if one.verdict != "pass" or _has_changed(one, allowed))
        else:
            allowed = 0.05 if tolerance is None else tolerance
            a, b = RunFolder(first).load(), RunFolder(second).load()
            found, different = compare_records(a, b, tolerance=allowed, names=tuple(figure or ())), _differences(a, b)
            changed = found
    _tell(found, changed, different, allowed, json=json)


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
    found = compare_counts(a, b, tolerance)
    unknown = sorted(set(names or ()) - {one.name for one in found})
    if unknown:
        raise UserError(f"the files have no figure {unknown[0]}", expected=", ".join(one.name for one in found)[:400])
    different = [
        f"the files had a different {key}: {a.about.get(key)} and {b.about.get(key)}"
        for key in sorted({*a.about, *b.about})
        if a.about.get(key) != b.about.get(key)
    ]
    return tuple(one for one in found if not names or one.name in names), different


def _has_changed(one: Compared, tolerance: float) -> bool:
    """For better or worse: a whole file of counts that have not changed need not be shown."""
    return one.ratio is not None and not 1 / (1 + tolerance) <= one.ratio.value <= 1 + tolerance


def _tell(
    found: tuple[Compared, ...], changed: tuple[Compared, ...], different: list[str], tolerance: float, *, json: bool
) -> None:
    whole = verdict(found)
    for line in different:
        notes.print(f"note: {line}", markup=False, soft_wrap=True)
    if json:
        print_json({"verdict": whole, "tolerance": tolerance, "figures": [_told(one) for one in found]})
    else:
        if changed:
            results.print(_table(changed))
        if len(changed) < len(found):
            results.print(f"{len(found) - len(changed)} of {len(found)} figures have not changed by more")
        results.print(f"[{_STYLES[whole]}]{whole}[/] (worse by at most {100 * tolerance:g} % passes)")
    raise typer.Exit(EXIT_CODES[whole])


def _differences(a: Record, b: Record) -> list[str]:
    """What makes a comparison one of other things than code."""
    found = []
    for words, ours, theirs in (
        ("processors", a.machine.cpu, b.machine.cpu),
        ("numbers of usable cores", a.machine.usable_cores, b.machine.usable_cores),
        ("numbers of threads", a.machine.torch_threads, b.machine.torch_threads),
        ("versions of PyTorch", a.versions.torch, b.versions.torch),
        ("batch sizes", _figure(a, "batch"), _figure(b, "batch")),
    ):
        if ours != theirs:
            found.append(f"the runs had different {words}: {ours} and {theirs}")
    for name, record in (("first", a), ("second", b)):
        if str(_figure(record, "noise")).startswith("noisy"):
            found.append(f"in the {name} run the machine was {_figure(record, 'noise')}")
        if record.status != "finished":
            found.append(f"the {name} run is {record.status}")
    return found


def _figure(record: Record, name: str) -> object:
    return record.summary[name].value if name in record.summary else None


def _table(found: tuple[Compared, ...]) -> Table:
    table = Table("", box=None, header_style="bold", pad_edge=False)
    for name in ("first", "second", "ratio (95 %)"):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in found:
        said = f"[{_STYLES[one.verdict]}]{one.verdict}[/]" + (f", {one.why}" if one.why else "")
        table.add_row(one.name, shown(one.first), shown(one.second), _ratio(one), said)
    return table


def _ratio(one: Compared) -> str:
    if one.ratio is None:
        return "—"
    if one.ratio.low == one.ratio.high or one.ratio.high == float("inf"):
        return f"{one.ratio.value:.3f}"
    return f"{one.ratio.value:.3f} ({one.ratio.low:.3f} to {one.ratio.high:.3f})"


def _told(one: Compared) -> dict[str, object]:
    ratio = None if one.ratio is None else [one.ratio.value, *(_finite(n) for n in (one.ratio.low, one.ratio.high))]
    return {"name": one.name, "first": one.first.value, "second": one.second.value, "unit": one.first.unit,
            "ratio": ratio, "verdict": one.verdict, "why": one.why}  # fmt: skip


def _finite(value: float) -> float | None:
    return value if value != float("inf") else None
