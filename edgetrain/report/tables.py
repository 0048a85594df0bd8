"""Runs as tables for other programs: CSV files, and one JSON object.

In:  `Run`s. Out: `write_csv`, a folder of files with the run's name in each row:

    summary.csv    every value of the summary, with its interval and origin
    ops.csv        every op: what it is, its time over the steps, its energy
    times.csv      every op of every step: when it began and ended
    samples.csv    every reading, as it was recorded

and `as_json`, the summary and the breakdowns of a run. Times in ns are of one monotonic clock in all files.
What is not known is an empty cell, or null; never 0.
"""

from __future__ import annotations

import csv
import io
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from edgetrain.files import explained, write_text
from edgetrain.report.breakdown import Row, between_ops_s, by_kind, by_layer, by_op, by_phase
from edgetrain.report.run import Run
from edgetrain.report.tracks import Track

CSV = ("summary.csv", "ops.csv", "times.csv", "samples.csv")
SUMMARY = ("run", "name", "value", "unit", "origin", "low", "high")
OPS = (
    "run", "place", "name", "kind", "module", "phase", "why", "micro_batch", "median_s", "p5_s", "p95_s", "flops",
    "read_bytes", "written_bytes", "energy_j", "energy_low_j", "energy_high_j", "energy_origin", "energy_merged",
)  # fmt: skip
TIMES = ("run", "step", "place", "begin_ns", "end_ns")
SAMPLES = ("run", "source", "channel", "unit", "origin", "counter", "before_ns", "after_ns", "value")


def write_csv(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write the files, into a new folder or one that is there, and give their paths back."""
    new = not folder.exists()
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        return list(_written(runs, folder))
    except BaseException:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _written(runs: Sequence[Run], folder: Path) -> Iterator[Path]:
    tables = ((SUMMARY, _summary), (OPS, _ops), (TIMES, _times), (SAMPLES, _samples))
    for name, (header, rows) in zip(CSV, tables, strict=True):
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        for run in runs:
            writer.writerows([_cell(run.name), *map(_cell, row)] for row in rows(run))
        write_text(folder / name, text.getvalue())
        yield folder / name


def _cell(value: object) -> object:
    """As a spreadsheet may open it: a text that it would take for a formula begins with an apostrophe."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


def _summary(run: Run) -> Iterator[Iterable[object]]:
    for name, value in run.record.summary.items():
        yield name, value.value, value.unit, value.origin, value.low, value.high


def _ops(run: Run) -> Iterator[Iterable[object]]:
    if run.timeline is None:
        return
    for row in sorted(by_op(run.timeline, run.energy), key=lambda row: row.places):
        op, energy = run.timeline.ops[row.places[0]], row.energy
        yield (
            row.places[0], op.name, op.shown_kind, op.module, op.phase, op.why, op.micro_batch, row.time_s, row.low_s,
            row.high_s, op.flops, op.read_bytes, op.written_bytes,
            *((energy.amount_j, energy.low_j, energy.high_j, energy.origin, energy.merged) if energy else (None,) * 5),
        )  # fmt: skip


def _times(run: Run) -> Iterator[Iterable[object]]:
    if run.timeline is None:
        return
    pairs = zip(run.timeline.begin_ns.tolist(), run.timeline.end_ns.tolist(), strict=True)
    for step, (begins, ends) in enumerate(pairs):
        for place, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            yield step, place, begin, end


def _samples(run: Run) -> Iterator[Iterable[object]]:
    for series in run.samples.series if run.samples is not None else ():
        times = list(zip(series.before_ns.tolist(), series.after_ns.tolist(), strict=True))
        for place, channel in enumerate(series.channels):
            about = (series.name, channel.name, channel.unit, channel.kind, channel.counter)
            for (before, after), value in zip(times, series.values[:, place].tolist(), strict=True):
                yield *about, before, after, value


# JSON


def as_json(run: Run) -> dict[str, Any]:
    """What the page shows of a run, as plain data."""
    timeline, energy = run.timeline, run.energy
    data: dict[str, Any] = {
        "run": run.name,
        "folder": str(run.folder.path),
        "record": asdict(run.record),
        "notes": list(run.notes),
        "tracks": [_track(track) for track in run.tracks],
    }
    if timeline is not None and timeline.steps:
        data |= {
            "steps": timeline.steps,
            "step_s": float(np.median(timeline.step_s)),
            "between_ops_s": between_ops_s(timeline),
            "phases": [_row(row) for row in by_phase(timeline, energy)],
            "layers": [_row(row) for row in by_layer(timeline, energy)],
            "kinds": [_row(row) for row in by_kind(timeline, energy)],
            "ops": [asdict(timeline.ops[row.places[0]]) | _row(row) for row in by_op(timeline, energy)],
        }
    return data


def _row(row: Row) -> dict[str, Any]:
    data = asdict(row)
    return data | {"flops_per_s": row.flops_per_s, "bytes_per_s": row.bytes_per_s}


def _track(track: Track) -> dict[str, Any]:
    known = track.values[np.isfinite(track.values)]
    figures = {}
    if len(known):
        mean = float((known / len(known)).sum())  # a sum of hostile numbers would not be finite
        figures = {"mean": mean, "least": float(known.min()), "most": float(known.max())}
    about = {"name": track.name, "source": track.source, "quantity": track.quantity, "unit": track.unit}
    return {**about, "origin": track.origin, "samples": len(known), **figures}
