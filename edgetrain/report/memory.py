"""The bytes that a step holds, and what less of them costs in time: drawn from plain data, as SVG, as text, as a page.

In:  `Picture` (`measure/picture.py`): curves of bytes over the ops of a step, points of memory against time, tables.
Out: `curves_svg`, `frontier_svg` and `write_page` (self-contained, no scripts, all text escaped); `blocks`, the same
     curve in block characters for a terminal. Nothing is run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from edgetrain.files import write_text
from edgetrain.measure.picture import Curve, Frontier, Picture, Point, Table, load
from edgetrain.measure.record import Record, RunFolder
from edgetrain.plan.budget import show_bytes
from edgetrain.report.style import STYLE

_WIDTH, _LEFT, _RIGHT = 960, 64, 16
_OFF_CHART = 1.3  # a budget above this much of the highest peak is not drawn: the curves would be flat
_EIGHTHS = " ▁▂▃▄▅▆▇█"


# ---- the page -------------------------------------------------------------------------------------------------


def write_page(folder: RunFolder, out: Path) -> Path:
    """Write the page about the picture and the record in the folder, and give its path back."""
    picture = load(folder.path)
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(picture.title)}</title><style>{STYLE}</style></head><body>"
        f"{sections(picture)}{_made_by(folder.load())}</body></html>\n"
    )
    write_text(out, page)
    return out


def sections(picture: Picture) -> str:
    """The picture as HTML: heading, drawings, tables."""
    return f"<h1>{escape(picture.title)}</h1><p>{escape(picture.note)}</p>{drawings(picture)}"


def drawings(picture: Picture) -> str:
    """The same without a heading, as a part of another page."""
    parts = []
    if picture.curves:
        parts.append(
            "<h2>Memory over a step</h2><p>The bytes held while each op runs. Point at an op for its name.</p>"
        )
        parts.append(f'<div class="scroll">{curves_svg(picture.curves, picture.budget_bytes)}</div>')
    if picture.frontier is not None and picture.frontier_table is not None:
        parts.append(_html_table(picture.frontier_table, frontier_svg(picture.frontier)))
    parts += [_html_table(table) for table in picture.tables]
    return "".join(parts)


def _html_table(table: Table, drawing: str = "") -> str:
    def row(cells: Sequence[str]) -> str:
        styles = [' class="in"' if not n and cell.startswith(" ") else "" for n, cell in enumerate(cells)]
        inner = (f"<td{style}>{escape(cell)}</td>" for style, cell in zip(styles, cells, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    title = f"<h2>{escape(table.title)}</h2>" if table.title else ""
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    first = f"<tr>{head}</tr>" if any(table.header) else ""
    drawing = f'<div class="scroll">{drawing}</div>' if drawing else ""
    rows = "".join(map(row, table.rows))
    return f'{title}{note}{drawing}<div class="scroll"><table>{first}{rows}</table></div>'


def _made_by(record: Record) -> str:
    machine, versions = record.machine, record.versions
    commit = f"commit {record.commit}" + (" with changes" if record.dirty else "") if record.commit else "no commit"
    return (
        f"<h2>Made by</h2><p><code>{escape(' '.join(record.command))}</code><br>{escape(record.created)} on "
        f"{escape(machine.cpu or 'an unknown CPU')}, {machine.torch_threads} threads; edgetrain "
        f"{escape(versions.edgetrain)}, torch {escape(versions.torch)}; {escape(commit)}</p>"
    )


# ---- drawings -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """From values to places on the page, with the rounded values at which to put ticks."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        return self.begin + (self.end - self.begin) * (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _unit(most_bytes: float) -> tuple[str, float]:
    return next(
        ((name, size) for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if most_bytes >= 2 * size), ("B", 1)
    )


def top_bytes(curves: Sequence[Curve], budget_bytes: int | None) -> int:
    """The scale that all curves share: the highest peak, and the budget where it is near."""
    most = max(curve.peak.held_bytes for curve in curves)
    return max(most, budget_bytes) if budget_bytes is not None and budget_bytes <= _OFF_CHART * most else most


def curves_svg(curves: Sequence[Curve], budget_bytes: int | None, *, panel: int = 210) -> str:
    """One panel a curve, one above the other, on the same scales."""
    top, gap = 30, 84
    height = len(curves) * (panel + gap) + 12
    most = top_bytes(curves, budget_bytes) * 1.1  # room for the budget's name above its line
    longest = max(len(curve.instants) for curve in curves)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="bytes held over the ops of a step">']
    for number, curve in enumerate(curves):
        begin = top + number * (panel + gap)
        x = Axis(0, longest, _LEFT, _WIDTH - _RIGHT)
        y = Axis(0, max(most, 1), begin + panel, begin)
        parts += _panel(
            curve, x, y, budget_bytes if budget_bytes is not None and budget_bytes <= most else None, number
        )
    recomputed = any(instant.again for curve in curves for instant in curve.instants)
    over = budget_bytes is not None and any(curve.peak.held_bytes > budget_bytes for curve in curves)
    parts += _legend(height - 8, recomputed=recomputed, over=over)
    return "".join(parts) + "</svg>"


def _panel(curve: Curve, x: Axis, y: Axis, budget: int | None, number: int) -> Iterator[str]:
    peak = curve.peak
    where = peak.op + (f" of {peak.module}" if peak.module else "")
    yield f'<text class="name" x="{_LEFT}" y="{y.end - 12}">{escape(curve.name)}: peak {show_bytes(peak.held_bytes)}'
    yield f'<tspan class="soft" dx="8" font-size="12" fill="var(--soft)">at {escape(where)}</tspan></text>'
    for place, (name, begin, end) in enumerate(curve.spans):
        left, wide = x.at(begin), x.at(end) - x.at(begin)
        if place % 2 == 0:
            yield f'<rect class="shade" x="{left:.1f}" y="{y.end}" width="{wide:.1f}" height="{y.begin - y.end}"/>'
        if wide > 7 * len(name) + 30:
            yield f'<text x="{left + 6:.1f}" y="{y.begin + 32}">{name}</text>'
        if begin:
            for top, bottom in ((y.end, y.begin), (y.begin + 22, y.begin + 36)):  # not through the ticks
                yield f'<line class="axis" x1="{left:.1f}" x2="{left:.1f}" y1="{top}" y2="{bottom}"/>'
    yield from _bytes_axis(y)
    for tick in x.ticks(8):
        yield f'<text x="{x.at(tick):.1f}" y="{y.begin + 16}" text-anchor="middle">{tick:,.0f}</text>'
    yield f'<text x="{x.end}" y="{y.begin + 32}" text-anchor="end">ops</text>'
    yield from _areas(curve, x, y, budget, number)
    if budget is not None:
        at = y.at(budget)
        yield f'<line class="budget" x1="{_LEFT}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="mark-name halo" x="{x.end - 4}" y="{at - 5:.1f}" text-anchor="end">'
        yield f"budget {show_bytes(budget)}</text>"
    at_peak = x.at(curve.instants.index(peak) + 0.5)
    yield f'<circle class="peak" cx="{at_peak:.1f}" cy="{y.at(peak.held_bytes):.1f}" r="3"/>'
    yield from _hits(curve, x, y)


def _bytes_axis(y: Axis) -> Iterator[str]:
    name, size = _unit(y.high)
    for tick in Axis(0, y.high / size, 0, 1).ticks(5):
        at = y.at(tick * size)
        label = f"{tick:g} {name}" if tick else "0"
        yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'


def _areas(curve: Curve, x: Axis, y: Axis, budget: int | None, number: int) -> Iterator[str]:
    """What is held, with recomputed ops and all that is above the budget in colours of their own."""
    steps = "".join(f"V{y.at(i.held_bytes):.1f}H{x.at(n + 1):.1f}" for n, i in enumerate(curve.instants))
    end = x.at(len(curve.instants))
    outline = f"M{x.at(0):.1f} {y.begin}{steps}V{y.begin}Z"
    yield f'<path class="held" d="{outline}"/>'
    recomputed = "".join(
        f"M{x.at(n):.1f} {y.begin}V{y.at(i.held_bytes):.1f}H{x.at(n + 1):.1f}V{y.begin}Z"
        for n, i in enumerate(curve.instants)
        if i.again
    )
    if recomputed:
        yield f'<path class="recomputed" d="{recomputed}"/>'
    low = y.at(min(curve.lasting_bytes, y.high))
    yield f'<rect class="lasting" x="{_LEFT}" y="{low:.1f}" width="{end - _LEFT:.1f}" height="{y.begin - low:.1f}"/>'
    if budget is not None and curve.peak.held_bytes > budget:
        yield f'<clipPath id="over{number}"><rect x="0" y="0" width="{_WIDTH}" height="{y.at(budget):.1f}"/></clipPath>'
        yield f'<path class="over" clip-path="url(#over{number})" d="{outline}"/>'


def _hits(curve: Curve, x: Axis, y: Axis) -> Iterator[str]:
    """Places to point at: an op each, or the largest of those that share a pixel."""
    n = len(curve.instants)
    places = min(n, int(x.at(n) - x.at(0)))
    for place in range(places):
        begin, end = place * n // places, (place + 1) * n // places
        instant = max(curve.instants[begin:end], key=lambda i: i.held_bytes)
        words = [instant.op, instant.module, instant.phase + (", recomputed" if instant.again else "")]
        title = " · ".join(word for word in words if word) + f"\n{show_bytes(instant.held_bytes)}"
        yield (
            f'<rect class="hit" x="{x.at(begin):.1f}" y="{y.end}" width="{x.at(end) - x.at(begin):.1f}" '
            f'height="{y.begin - y.end}"><title>{escape(title)}</title></rect>'
        )


def _legend(at: float, *, recomputed: bool, over: bool) -> Iterator[str]:
    entries = [("lasting", "parameters, state, buffers, inputs"), ("held", "activations, gradients, workspace")]
    entries += [("recomputed", "while an op is recomputed")] if recomputed else []
    entries += [("over", "above the budget")] if over else []
    left = _LEFT
    for style, name in entries:
        yield f'<rect class="{style}" x="{left}" y="{at - 10}" width="14" height="10"/>'
        yield f'<text x="{left + 20}" y="{at}">{name}</text>'
        left += 44 + 6 * len(name) + 10


def frontier_svg(frontier: Frontier, *, height: int = 360) -> str:
    """Extra time over memory, with what is infeasible shaded."""
    good = sorted((p for p in frontier.points if p.extra is not None), key=lambda p: p.memory_bytes)
    amounts = [p.memory_bytes for p in frontier.points]
    bounds = [n for n in (frontier.smallest_bytes, frontier.bound_bytes) if n is not None]
    if not amounts:
        return ""
    low, high = min([*amounts, *bounds]), max([*amounts, *bounds])
    room = max((high - low) * 0.06, high * 0.01, 1)
    x = Axis(max(0, low - room), high + room, _LEFT, _WIDTH - _RIGHT)
    y = Axis(0, max([0.01, *(p.extra or 0 for p in good)]) * 1.12, height - 62, 14)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="time against memory">']
    parts += _impossible(frontier, x, y)
    for tick in y.ticks(6):
        at = y.at(tick)
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/>')
        label = f"+{100 * tick:g} %" if tick else "0"
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    name, size = _unit(x.high)
    for tick in Axis(x.low / size, x.high / size, 0, 1).ticks(8):
        parts.append(
            f'<text x="{x.at(tick * size):.1f}" y="{y.begin + 17}" text-anchor="middle">{tick:g} {name}</text>'
        )
    parts += _front(good, x, y)
    for point in frontier.points:
        if point.extra is None:
            at = x.at(point.memory_bytes)
            cross = f"M{at - 4:.1f} {y.begin - 4:.1f}l8 8m0 -8l-8 8"
            words = f"{show_bytes(point.memory_bytes)}, {100 * point.part:.0f} % of keep-all's: no plan found"
            parts.append(f'<path class="no" d="{cross}"><title>{escape(words)}</title></path>')
    parts += _frontier_legend(frontier, good, height - 10)
    return "".join(parts) + "</svg>"


def _impossible(frontier: Frontier, x: Axis, y: Axis) -> Iterator[str]:
    """Shades what is below the smallest budget that works, and a line where the proof begins."""
    if frontier.smallest_bytes is not None:
        wide = x.at(frontier.smallest_bytes) - x.begin
        yield f'<rect class="shade" x="{x.begin}" y="{y.end}" width="{wide:.1f}" height="{y.begin - y.end}">'
        yield f"<title>no plan was found below {show_bytes(frontier.smallest_bytes)}</title></rect>"
    if frontier.bound_bytes is not None:
        at = x.at(frontier.bound_bytes)
        yield f'<line class="budget" x1="{at:.1f}" x2="{at:.1f}" y1="{y.end}" y2="{y.begin}">'
        yield f"<title>no schedule at all fits below {show_bytes(frontier.bound_bytes)}</title></line>"


def _front(good: Sequence[Point], x: Axis, y: Axis) -> Iterator[str]:
    def path(values: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x.at(a):.1f},{y.at(max(0.0, b)):.1f}" for a, b in values)

    least = _least(good)
    if len(least) > 1:
        yield f'<polyline class="below" points="{path(least)}"/>'
    yield f'<polyline class="front" points="{path([(p.memory_bytes, p.extra or 0) for p in good])}"/>'
    for p in good:
        words = f"{show_bytes(p.memory_bytes)}, {100 * p.part:.0f} % of keep-all's: {100 * (p.extra or 0):+.1f} % time"
        words += f", {p.recomputed} ops recomputed" if p.recomputed else ""
        words += f", within {100 * p.gap:.1f} % of the best" if p.gap is not None else ""
        words += f" ({p.planner})" if p.planner else ""
        at = f'cx="{x.at(p.memory_bytes):.1f}" cy="{y.at(p.extra or 0):.1f}"'
        yield f'<circle class="held" {at} r="5"><title>{escape(words)}</title></circle>'


def _least(good: Sequence[Point]) -> list[tuple[float, float]]:
    """Memory and the extra time below which no plan can be, where more is proven than that keep-all takes no longer."""
    least = [(p.memory_bytes, (1 + (p.extra or 0)) * (1 - p.gap) - 1) for p in good if p.gap is not None]
    return [(n_bytes, extra) for n_bytes, extra in least if extra > 0]


def _frontier_legend(frontier: Frontier, good: Sequence[Point], at: float) -> Iterator[str]:
    entries = [("front", "extra time of the plan")]
    entries += [("below", "proven least of its class")] if len(_least(good)) > 1 else []
    if frontier.smallest_bytes is not None:
        entries.append(("shade", f"no plan found (below {show_bytes(frontier.smallest_bytes)})"))
    if frontier.bound_bytes is not None:
        entries.append(("budget", f"none possible (below {show_bytes(frontier.bound_bytes)})"))
    left = _LEFT
    for style, name in entries:
        if style == "shade":
            mark = f'<rect class="shade" stroke="var(--line)" x="{left}" y="{at - 11}" width="22" height="12"/>'
        else:
            mark = f'<line class="{style}" x1="{left}" x2="{left + 22}" y1="{at - 4}" y2="{at - 4}"/>'
        yield f'{mark}<text x="{left + 28}" y="{at}">{name}</text>'
        left += 52 + 6 * len(name) + 10


# ---- in a terminal --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of text of a chart; `above`: it is wholly above the budget."""

    label: str
    text: str
    above: bool = False


def blocks(
    curve: Curve, budget_bytes: int | None, *, top: int, longest: int, width: int, height: int = 6
) -> tuple[Row, ...]:
    """The curve in block characters, from the top row to the bottom, then a row that names the phases.

    A column shows the most that is held over its ops. top, longest: the bytes and ops at the ends of the scales, so
    that charts below each other can be compared.
    """
    n = len(curve.instants)
    columns = max(1, min(width, round(width * n / longest)))
    held = [i.held_bytes for i in curve.instants]
    most = [max(held[c * n // columns : max((c + 1) * n // columns, c * n // columns + 1)]) for c in range(columns)]
    levels = [math.ceil(8 * height * value / top) for value in most]
    line = None
    if budget_bytes is not None and budget_bytes <= top:
        line = min(height - 1, math.ceil(height * budget_bytes / top) - 1)
    rows = []
    for place in range(height - 1, -1, -1):
        empty = "╌" if place == line else " "
        cells = [_EIGHTHS[max(0, min(8, level - 8 * place))] for level in levels]
        text = "".join(cell if cell != " " else empty for cell in cells) + empty * (width - columns)
        label = show_bytes(top) if place == height - 1 else "0" if place == 0 else ""
        if place == line and budget_bytes is not None:
            label = show_bytes(budget_bytes)
        rows.append(Row(label, text.rstrip(), line is not None and place > line))
    return (*rows, Row("", _ruler(curve, columns)))


def _ruler(curve: Curve, columns: int) -> str:
    n = len(curve.instants)
    text = ""
    for name, begin, end in curve.spans:
        wide = round(columns * end / n) - round(columns * begin / n)
        text += ("└ " + name + " ").ljust(wide, "─")[: max(0, wide)] if wide > len(name) + 3 else "└".ljust(wide, "─")
    return text
