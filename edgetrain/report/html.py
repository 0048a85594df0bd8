"""Run folders as one HTML page: self-contained, nothing fetched, no script but the one that draws profile runs.

In:  run folders (record.json, and what else a run wrote: metrics.jsonl, charts.json, memory.json, the timeline and
     samples of a profile). They may come from anywhere: all text is escaped, all numbers are checked. Out: one file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from edgetrain.errors import UserError
from edgetrain.files import read, write_text
from edgetrain.measure.picture import Picture
from edgetrain.measure.record import Record, RunFolder
from edgetrain.report import memory, profile, summary
from edgetrain.report.memory import Axis
from edgetrain.report.numbers import number, quantity
from edgetrain.report.run import Run, load_run
from edgetrain.report.style import STYLE
from edgetrain.report.summary import clip
from edgetrain.saved import load as load_saved

_COLOURS = ("#c0562b", "#1f6f8b", "#5b7f2b", "#7a4ea3")
_BARS_PERCENT = 82.0  # of the width; the rest is for the value at the end of the longest
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


@dataclass(frozen=True)
class Figures:
    """What matters most, in large type. figures: what it is, the number, and what it comes from."""

    title: str
    figures: tuple[tuple[str, str, str], ...]


def write_page(folders: Sequence[RunFolder], out: Path) -> Path:
    """Write the page and give its path back."""
    runs = [load_run(folder) for folder in folders]
    title = "edgetrain: " + ", ".join(run.name for run in runs)
    body = summary.side_by_side([(run.name, run.record) for run in runs])
    body += "".join(_section(run, number) for number, run in enumerate(runs))
    write_text(out, _page(clip(title), body, [run for run in runs if run.is_profile], runs))
    return out


def _page(title: str, body: str, profiles: Sequence[Run], runs: Sequence[Run]) -> str:
    policy = profile.policy() if profiles else "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{body}"
        f"{profile.script(runs) if profiles else ''}</body></html>\n"
    )


def _section(run: Run, number: int) -> str:
    folder, record = run.folder, run.record
    charts = [*_metric_charts(folder), *_saved_charts(folder)]
    pictures = "".join(map(_drawn, charts))
    if run.picture is not None:
        pictures = _memory(run.picture, run.is_profile) + pictures
    if run.is_profile:
        pictures = profile.sections(run, number) + pictures
    headlines = "" if any(isinstance(chart, Figures) for chart in charts) else summary.cards(record)
    return (
        f'<section class="run" id="run-{number}">'
        f"<h1>{escape(clip(run.name))}</h1><p><span class='status {record.status}'>{record.status}</span> "
        f"{escape(_when(record.created))} · <code>{escape(clip(' '.join(record.command), 2000))}</code></p>"
        f"{_notes(run)}{headlines}{pictures}{summary.table(record)}{_machine(record)}</section>"
    )


def _drawn(chart: Chart | Bars | Figures) -> str:
    if isinstance(chart, Figures):
        return _figures(chart)
    return _bars(chart) if isinstance(chart, Bars) else _chart(chart)


def _memory(picture: Picture, is_profile: bool) -> str:
    """A picture of its own has a heading; in a profile it is one part of many."""
    return memory.drawings(picture) if is_profile else memory.sections(picture)


def _notes(run: Run) -> str:
    entries = "".join(f"<li>{escape(clip(note, 1000))}</li>" for note in run.notes[:50])
    return f'<ul class="notes">{entries}</ul>' if entries else ""


def _when(created: str) -> str:
    """2026-01-31T23:59:59+00:00 as people write it; any other text as it is."""
    try:
        return f"{datetime.fromisoformat(created).astimezone(UTC):%d %b %Y, %H:%M} UTC"
    except (ValueError, OverflowError):
        return clip(created)


def _machine(record: Record) -> str:
    machine, versions = record.machine, record.versions
    memory = quantity(machine.memory_bytes, "B") if machine.memory_bytes else "unknown memory"
    commit = f"commit {record.commit}" + (" with changes" if record.dirty else "") if record.commit else "no commit"
    threads = f"{_count(machine.torch_threads)} thread{'' if machine.torch_threads == 1 else 's'}"
    words = (
        f"{clip(machine.cpu or 'unknown CPU')}, {_count(machine.usable_cores)} of {_count(machine.cores)} cores, "
        f"{threads}, {memory}, {clip(machine.os)}; edgetrain {clip(versions.edgetrain)}, "
        f"torch {clip(versions.torch)}, Python {clip(versions.python)}; {clip(commit)}"
    )
    return f"<h2>Machine</h2><p>{escape(words)}</p>"


def _count(value: int | None) -> str:
    return "unknown" if value is None else number(value)


# ---- charts ---------------------------------------------------------------------------------------------------


def _metric_charts(folder: RunFolder) -> Iterator[Chart]:
    """Loss and accuracy over steps, from the lines of metrics.jsonl."""
    if not os.path.lexists(folder.metrics_file):
        return
    events = []
    lines = read(folder.metrics_file).decode(errors="replace").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # cut off while it was written
    for place, text in enumerate(lines, start=1):
        try:
            events.append(dict(json.loads(text)))
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"line {place} of {folder.metrics_file} is not a JSON object") from error
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


def _saved_charts(folder: RunFolder) -> Sequence[Chart | Bars | Figures]:
    file = folder.path / "charts.json"
    return (
        load_saved(file, "file of charts", lambda data: [_saved_chart(entry) for entry in data])
        if os.path.lexists(file)
        else ()
    )


def _saved_chart(data: dict[str, Any]) -> Chart | Bars | Figures:
    title = str(data["title"])
    if "figures" in data:
        entries = data["figures"]
        return Figures(title, tuple((str(e["name"]), str(e["value"]), str(e["note"])) for e in entries))
    note, y, marks = str(data["note"]), str(data["y"]), _named(data.get("marks", []))
    if "bars" in data:
        return Bars(title, note, y, _named(data["bars"]), marks)
    return Chart(title, note, str(data["x"]), y, tuple(map(_counted, data["lines"])), marks)


def _counted(line: dict[str, Any]) -> Line:
    """Values at 1, 2, 3 and so on."""
    values = _numbers(line["values"])
    return Line(str(line["name"]), values, tuple(map(float, range(1, len(values) + 1))))


def _named(entries: Sequence[dict[str, Any]]) -> tuple[tuple[str, float], ...]:
    return tuple((str(entry["name"]), _numbers([entry["value"]])[0]) for entry in entries)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and -1e300 <= value <= 1e300  # what a drawing can still compute with


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    if not all(_is_number(v) for v in values):
        raise ValueError("a value is not a finite number")
    return tuple(float(v) for v in values)


def _figures(chart: Figures) -> str:
    cards = "".join(
        f'<div class="card"><div class="what">{escape(name)}</div><div class="figure">{escape(value)}</div>'
        f'<div class="from">{escape(note)}</div></div>'
        for name, value, note in chart.figures
    )
    return f'<h2>{escape(chart.title)}</h2><div class="cards lead">{cards}</div>'


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
            f'<text class="mark-name halo" x="{x.end - 4}" y="{at - 6:.1f}" text-anchor="end">{escape(name)}</text>'
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


def _bars(chart: Bars) -> str:
    """Horizontal bars, each with its value at its end; the names of marks stand above.

    No SVG: text keeps its size on a phone, where names stand above their bars.
    """
    if not chart.bars:
        return ""
    values = [value for _, value in (*chart.bars, *chart.marks)]
    x = Axis(min(0.0, *values), max(*values, 1e-12), 0, _BARS_PERCENT)
    lines = "".join(f'<i class="mark" style="left:{x.at(value):.2f}%"></i>' for _, value in chart.marks)
    rows = []
    if chart.marks:
        names = "".join(f'<em style="left:{x.at(value):.2f}%">{escape(name)}</em>' for name, value in chart.marks)
        rows.append(f'<span></span><span class="track above">{names}</span>')
    for place, (name, value) in enumerate(chart.bars):
        left, right = sorted((x.at(0), x.at(value)))
        bar = f"left:{left:.2f}%;width:{right - left:.2f}%;background:{_COLOURS[place % len(_COLOURS)]}"
        amount = f"{number(value)} {escape(chart.y)}"
        rows.append(
            f'<span class="of">{escape(name)}</span><span class="track"><i style="{bar}"></i>{lines}'
            f'<b style="left:{right:.2f}%">{amount}</b></span>'
        )
    return _headed(chart, f'<div class="bars">{"".join(rows)}</div>')


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
    unit = "" if chart.y.lower() in chart.title.lower() else f" <span class='soft'>({escape(chart.y)})</span>"
    heading = f"<h2>{escape(chart.title)}{unit}</h2>"
    return f'{heading}{note}<div class="scroll">{drawing}</div>'
