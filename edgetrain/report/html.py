"""Run folders as one HTML page: self-contained, no scripts, nothing fetched.

In:  run folders (record.json, and metrics.jsonl or charts.json where a run wrote them). They may come from anywhere:
     all text is escaped, all numbers are checked. Out: one file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from edgetrain.errors import UserError
from edgetrain.measure.record import Record, RunFolder, Value, write_atomic
from edgetrain.report import memory
from edgetrain.report.style import STYLE

_COLOURS = ("#c0562b", "#1f6f8b", "#5b7f2b", "#7a4ea3")


@dataclass(frozen=True)
class Line:
    name: str
    values: tuple[float, ...]
    xs: tuple[float, ...]


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    x: str
    y: str
    lines: tuple[Line, ...]
    marks: tuple[tuple[str, float], ...] = field(default=())


def write_page(folders: Sequence[RunFolder], out: Path) -> Path:
    """Write the page and give its path back."""
    parts = [_section(folder) for folder in folders]
    title = "edgetrain: " + ", ".join(folder.path.name for folder in folders)
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    write_atomic(out, page.encode())
    return out


def _section(folder: RunFolder) -> str:
    record = folder.load()
    charts = [*_metric_charts(folder), *_saved_charts(folder)]
    return (
        f"<h1>{escape(folder.path.name)}</h1><p>{escape(record.status)}, {escape(record.created)}</p>"
        f"<p><code>{escape(' '.join(record.command))}</code></p>"
        + (_summary(record) if record.summary else "")
        + (memory.sections(memory.load(folder.path)) if (folder.path / memory.FILE).exists() else "")
        + "".join(_chart(chart) for chart in charts)
        + _machine(record)
    )


def _summary(record: Record) -> str:
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="number">{escape(_shown(value))}</td>'
        f'<td class="soft">{escape(value.origin)}</td></tr>'
        for name, value in record.summary.items()
    )
    return f"<h2>Results</h2><table><tr><th></th><th>value</th><th>where from</th></tr>{rows}</table>"


def _shown(value: Value) -> str:
    if value.value is None:
        return "—"
    if value.unit == "bytes" and isinstance(value.value, int | float):
        return f"{value.value / 1e6:,.2f} MB"
    if isinstance(value.value, float):
        return f"{value.value:,.4g} {value.unit}".strip()
    return f"{value.value} {value.unit}".strip()


def _machine(record: Record) -> str:
    machine, versions = record.machine, record.versions
    memory = f"{machine.memory_bytes / 1e9:.1f} GB" if machine.memory_bytes else "unknown memory"
    commit = f"commit {record.commit}" + (" with changes" if record.dirty else "") if record.commit else "no commit"
    return (
        f"<h2>Machine</h2><p>{escape(machine.cpu or 'unknown CPU')}, {machine.usable_cores} of {machine.cores} cores, "
        f"{memory}; edgetrain {escape(versions.edgetrain)}, torch {escape(versions.torch)}, "
        f"Python {escape(versions.python)}; {escape(commit)}</p>"
    )


# ---- charts ---------------------------------------------------------------------------------------------------


def _metric_charts(folder: RunFolder) -> Iterator[Chart]:
    """Loss and accuracy over steps, from the lines of metrics.jsonl."""
    if not folder.metrics_file.is_file():
        return
    events = []
    for number, text in enumerate(folder.metrics_file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            events.append(dict(json.loads(text)))
        except (ValueError, TypeError) as error:
            raise UserError(f"line {number} of {folder.metrics_file} is not a JSON object") from error
    losses = [_line("training", events, "train", "loss"), _line("test", events, "eval", "loss")]
    yield Chart("Loss", "", "step", "loss", tuple(line for line in losses if line.values))
    accuracy = _line("test", events, "eval", "accuracy")
    if len(accuracy.values) > 1:
        yield Chart("Accuracy", "", "step", "accuracy", (accuracy,))


def _line(name: str, events: list[dict[str, Any]], event: str, key: str) -> Line:
    points = [(e.get("step"), e.get(key)) for e in events if e.get("event") == event]
    good = [
        (float(x), float(y)) for x, y in points if x is not None and _is_number(x) and y is not None and _is_number(y)
    ]
    return Line(name, tuple(y for _, y in good), tuple(x for x, _ in good))


def _saved_charts(folder: RunFolder) -> Iterator[Chart]:
    file = folder.path / "charts.json"
    if not file.is_file():
        return
    try:
        for data in json.loads(file.read_text(encoding="utf-8")):
            lines = tuple(
                Line(str(line["name"]), _numbers(line["values"]), tuple(map(float, range(len(line["values"])))))
                for line in data["lines"]
            )
            marks = tuple((str(m["name"]), _numbers([m["value"]])[0]) for m in data.get("marks", []))
            yield Chart(str(data["title"]), str(data["note"]), str(data["x"]), str(data["y"]), lines, marks)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} holds no charts of edgetrain", received=f"{type(error).__name__}: {error}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    if not all(_is_number(v) for v in values):
        raise ValueError("a value is not a finite number")
    return tuple(float(v) for v in values)


def _chart(chart: Chart, width: int = 900, height: int = 300) -> str:
    """An SVG line chart. The left margin holds numbers, the bottom the x axis."""
    xs = [x for line in chart.lines for x in line.xs]
    ys = [y for line in chart.lines for y in line.values] + [value for _, value in chart.marks]
    if not xs:
        return ""
    left, top, right, bottom = 60, 12, width - 12, height - 40
    x_high, y_low, y_high = max(*xs, 1.0), min(0.0, *ys), max(*ys, 1e-12)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * x / x_high, bottom - (bottom - top) * (y - y_low) / (y_high - y_low)

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(chart.title)}">']
    for tick in range(5):
        value = y_low + (y_high - y_low) * tick / 4
        _, y = at(0, value)
        parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for number, line in enumerate(chart.lines):
        points = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in zip(line.xs, line.values, strict=True))
        dash = ' stroke-dasharray="6 4"' if number else ""  # so that lines that lie on each other both show
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{_COLOURS[number % 4]}" stroke-width="2"{dash}/>'
        )
    for name, value in chart.marks:
        _, y = at(0, value)
        parts.append(
            f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_COLOURS[3]}" stroke-width="1.5"/>'
        )
        parts.append(f'<text x="{right}" y="{y + 14:.1f}" text-anchor="end">{escape(name)}</text>')
    parts.append(f'<text x="{right}" y="{height - 18}" text-anchor="end">{escape(chart.x)} (to {x_high:g})</text>')
    for number, line in enumerate(chart.lines):
        x = left + 170 * number
        parts.append(f'<rect x="{x}" y="{height - 27}" width="14" height="4" fill="{_COLOURS[number % 4]}"/>')
        parts.append(f'<text x="{x + 20}" y="{height - 18}">{escape(line.name)}</text>')
    body = "".join(parts) + "</svg>"
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    return f"<h2>{escape(chart.title)} <span class='soft'>({escape(chart.y)})</span></h2>{note}{body}"
