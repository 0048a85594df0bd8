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
from edgetrain.report.memory import Axis
from edgetrain.report.style import STYLE

_COLOURS = ("#c0562b", "#1f6f8b", "#5b7f2b", "#7a4ea3")
_DASHES = ("", "10 6", "2 5", "6 4")  # so that lines that lie on each other all show


@dataclass(frozen=True)
class Line:
    name: str
    values: tuple[float, ...]
    xs: tuple[float, ...]


@dataclass(frozen=True)
class Chart:
    """Lines over x. marks: values of y that have a name."""

    title: str
    note: str
    x: str
    y: str
    lines: tuple[Line, ...]
    marks: tuple[tuple[str, float], ...] = field(default=())


@dataclass(frozen=True)
class Bars:
    """A bar for each name. marks: values that have a name, as lines across the bars."""

    title: str
    note: str
    y: str
    bars: tuple[tuple[str, float], ...]
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
    charts: list[Chart | Bars] = [*_metric_charts(folder), *_saved_charts(folder)]
    return (
        f"<h1>{escape(folder.path.name)}</h1><p>{escape(record.status)}, {escape(record.created)}</p>"
        f"<p><code>{escape(' '.join(record.command))}</code></p>"
        + (_summary(record) if record.summary else "")
        + (memory.sections(memory.load(folder.path)) if (folder.path / memory.FILE).exists() else "")
        + "".join(_bars(chart) if isinstance(chart, Bars) else _chart(chart) for chart in charts)
        + _machine(record)
    )


def _summary(record: Record) -> str:
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="number">{escape(_shown(value))}</td>'
        f'<td class="soft">{escape(value.origin)}</td></tr>'
        for name, value in record.summary.items()
    )
    head = '<tr><th></th><th class="number">value</th><th>where from</th></tr>'
    return f"<h2>Results</h2><table>{head}{rows}</table>"


def _shown(value: Value) -> str:
    if value.value is None:
        return "—"
    if value.unit == "bytes" and isinstance(value.value, int | float):
        return f"{value.value / 1e6:,.2f} MB"
    if isinstance(value.value, float):
        return f"{number(value.value, 4)} {value.unit}".strip()
    return f"{value.value} {value.unit}".strip()


def number(value: float, digits: int = 3) -> str:
    """At least so many digits, with commas, and never 1.6e+03 for 1,600."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) - 0.5 else f"{value:.{digits}g}"


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


def _saved_charts(folder: RunFolder) -> Iterator[Chart | Bars]:
    file = folder.path / "charts.json"
    if not file.is_file():
        return
    try:
        for data in json.loads(file.read_text(encoding="utf-8")):
            title, note, y = str(data["title"]), str(data["note"]), str(data["y"])
            marks = _named(data.get("marks", []))
            if "bars" in data:
                yield Bars(title, note, y, _named(data["bars"]), marks)
            else:
                yield Chart(title, note, str(data["x"]), y, tuple(map(_counted, data["lines"])), marks)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} holds no charts of edgetrain", received=f"{type(error).__name__}: {error}") from error


def _counted(line: dict[str, Any]) -> Line:
    """Values at 1, 2, 3 and so on."""
    values = _numbers(line["values"])
    return Line(str(line["name"]), values, tuple(map(float, range(1, len(values) + 1))))


def _named(entries: Sequence[dict[str, Any]]) -> tuple[tuple[str, float], ...]:
    return tuple((str(entry["name"]), _numbers([entry["value"]])[0]) for entry in entries)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    if not all(_is_number(v) for v in values):
        raise ValueError("a value is not a finite number")
    return tuple(float(v) for v in values)


def _chart(chart: Chart, width: int = 960, height: int = 320) -> str:
    """An SVG line chart: numbers on the left and below, the names of the lines at the bottom."""
    xs = [x for line in chart.lines for x in line.xs]
    ys = [y for line in chart.lines for y in line.values] + [value for _, value in chart.marks]
    if not xs:
        return ""
    x = Axis(min(xs), max(*xs, min(xs) + 1), 64, width - 16)
    y = Axis(min(0.0, *ys), max(*ys, 1e-12) * 1.08, height - 62, 12)  # room for a name above the highest line
    parts = [_opening(chart.title, width, height)]
    for tick in y.ticks(5):
        at = y.at(tick)
        parts.append(f'<line class="axis" x1="{x.begin}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{x.begin - 8}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in x.ticks(10):
        if tick == round(tick):
            parts.append(f'<text x="{x.at(tick):.1f}" y="{y.begin + 17}" text-anchor="middle">{tick:,.0f}</text>')
    dashed = _alike(chart.lines, y.high - y.low)
    for place, line in enumerate(chart.lines):
        points = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in zip(line.xs, line.values, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" {_stroke(place, dashed)}/>')
    for name, value in chart.marks:
        at = y.at(value)
        parts.append(f'<line class="budget" x1="{x.begin}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="told halo" x="{x.end - 4}" y="{at - 6:.1f}" text-anchor="end">{escape(name)}</text>'
        )
    parts.append(f'<text x="{x.end}" y="{height - 8}" text-anchor="end">{escape(chart.x)}</text>')
    left = x.begin
    for place, line in enumerate(chart.lines):
        parts.append(
            f'<line x1="{left}" x2="{left + 28}" y1="{height - 12}" y2="{height - 12}" {_stroke(place, dashed)}/>'
        )
        parts.append(f'<text x="{left + 34}" y="{height - 8}">{escape(line.name)}</text>')
        left += 64 + 6.5 * len(line.name)
    return _headed(chart, "".join(parts) + "</svg>")


def _bars(chart: Bars, width: int = 960) -> str:
    """Lying bars, each with its value at its end; room for the names on the left and for the marks' on top."""
    if not chart.bars:
        return ""
    values = [value for _, value in (*chart.bars, *chart.marks)]
    top, pitch = 26 if chart.marks else 6, 34
    height = top + pitch * len(chart.bars)
    x = Axis(min(0.0, *values), max(*values, 1e-12), 180, width - 110)
    parts = [_opening(chart.title, width, height)]
    for place, (name, value) in enumerate(chart.bars):
        at = top + pitch * place
        left, right = sorted((x.at(0), x.at(value)))
        parts.append(f'<text class="name" x="{x.begin - 10}" y="{at + 19}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect x="{left:.1f}" y="{at + 3}" width="{right - left:.1f}" height="24" '
            f'fill="{_COLOURS[place % len(_COLOURS)]}"/>'
        )
        told = f"{number(value)} {escape(chart.y)}"
        parts.append(f'<text class="name halo" x="{right + 8:.1f}" y="{at + 19}">{told}</text>')
    for name, value in chart.marks:
        across = f"{x.at(value):.1f}"
        parts.append(f'<line class="budget" x1="{across}" x2="{across}" y1="{top - 6}" y2="{height}"/>')
        parts.append(f'<text class="told" x="{across}" y="{top - 11}" text-anchor="middle">{escape(name)}</text>')
    return _headed(chart, "".join(parts) + "</svg>")


def _opening(title: str, width: int, height: int) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'


def _alike(lines: Sequence[Line], height: float) -> bool:
    """Do lines lie on each other, so that the last would hide the first?"""
    pairs = [zip(a.values, b.values, strict=False) for a in lines for b in lines if a is not b]
    return any(all(abs(a - b) < 0.02 * height for a, b in pair) for pair in pairs)


def _stroke(place: int, dashed: bool) -> str:
    colour, dash = _COLOURS[place % len(_COLOURS)], _DASHES[place % len(_DASHES)] if dashed else ""
    return f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _headed(chart: Chart | Bars, drawing: str) -> str:
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    return f"<h2>{escape(chart.title)} <span class='soft'>({escape(chart.y)})</span></h2>{note}{drawing}"
