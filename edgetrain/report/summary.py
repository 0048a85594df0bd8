"""Summaries as HTML: the headline numbers as cards, all values with their origin, several runs side by side.

In: `Record`s. Out: HTML text, everything escaped. A value that is not there is shown as unavailable, never as 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape

from edgetrain.measure.record import Record, Value
from edgetrain.report.numbers import MISSING, interval, number, shown
from edgetrain.report.words import OTHER, grouped, label

_HEADLINES = ("s", "bytes", "J", "W", "1/s", "samples/s")  # one card a unit, in this order
_PARTS = re.compile("utilisation|ratio|overhead|delivered|differ|share")
_MAX_CARDS = 5
_MAX_TEXT = 300  # characters of a name or a text that a page shows


def clip(text: str, most: int = _MAX_TEXT) -> str:
    """Text that a page has room for."""
    return text if len(text) <= most else text[: most - 1] + "…"


def in_percent(name: str, value: Value) -> Value:
    """What is a part of something, by its name, in percent."""
    part = value.value
    if value.unit != "1" or not _PARTS.search(name) or isinstance(part, bool | str | None) or abs(part) > 100:
        return value
    low, high = (None if end is None else 100 * end for end in (value.low, value.high))
    return Value(100 * part, "%", value.origin, low, high)


def tag(origin: str) -> str:
    return f'<span class="tag {escape(origin)}">{escape(origin)}</span>'


def cards(record: Record) -> str:
    """The first value of each of some units: what most people open a report for."""
    chosen: dict[str, tuple[str, Value]] = {}
    for name, value in record.summary.items():
        unit = "bytes" if value.unit == "B" else value.unit
        if unit in _HEADLINES and value.value is not None:
            chosen.setdefault(unit, (name, value))
    ordered = [chosen[unit] for unit in _HEADLINES if unit in chosen][:_MAX_CARDS]
    return (
        f'<div class="cards">{"".join(_card(name, value) for name, value in ordered)}</div>' if len(ordered) > 1 else ""
    )


def _card(name: str, value: Value) -> str:
    ends = interval(value)
    figure, _, unit = shown(value).partition(" ")
    return (
        f'<div class="card"><div class="what">{escape(clip(label(name)))}</div>'
        f'<div class="figure">{escape(figure)}<small> {escape(unit)}</small></div>'
        f'<div class="from">{tag(value.origin)}{f"<span>{escape(ends)}</span>" if ends else ""}</div></div>'
    )


def table(record: Record) -> str:
    """Every value of one run."""
    if not record.summary:
        return ""
    spread = any(value.low is not None for value in record.summary.values())
    rows = _in_groups(record.summary, lambda name: _row(name, record.summary[name], spread), 4 if spread else 3)
    head = '<th></th><th class="number">value</th>'
    head += ('<th class="number wide">95 % interval</th>' if spread else "") + "<th>where from</th>"
    return f"<h2>Results</h2>{_whole(head, rows)}"


def _row(name: str, value: Value, spread: bool) -> str:
    cells = _cells(in_percent(name, value), spread)
    return f"<tr><td>{escape(clip(label(name)))}</td>{cells}<td>{tag(value.origin)}</td></tr>"


def _in_groups(names: Iterable[str], row: Callable[[str], str], columns: int) -> str:
    """Rows under the headings of their groups; no headings where all are of one."""
    groups = grouped(names)
    heading = '<tr class="group"><th colspan="{}">{}</th></tr>'.format
    return "".join(
        (heading(columns, group) if len(groups) > 1 and group != OTHER else "") + "".join(map(row, members))
        for group, members in groups
    )


def _cells(value: Value, spread: bool) -> str:
    text = f'<td class="{_style(value)}">{escape(clip(shown(value)))}</td>'
    return text + (f'<td class="number soft wide">{escape(interval(value))}</td>' if spread else "")


def _style(value: Value) -> str:
    """Texts may be long and are broken into lines."""
    return "number soft" if value.value is None else "number words" if isinstance(value.value, str) else "number"


def _whole(head: str, rows: str) -> str:
    return (
        f'<div class="scroll"><table class="results"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


# Several runs


def side_by_side(runs: Sequence[tuple[str, Record]]) -> str:
    """One column a run; nothing for runs that have no value in common.

    Beside each number of a later run stands its ratio to the first run's.
    """
    written = [name for _, record in runs for name in record.summary]
    names = list(dict.fromkeys(written))
    if len(names) == len(written):
        return ""
    head = "".join(
        f'<th class="number"><a href="#run-{place}">{escape(clip(name, 60))}</a></th>'
        + ('<th class="number">ratio</th>' if place else "")
        for place, (name, _) in enumerate(runs)
    )

    def row(name: str) -> str:
        cells = _across([_of(record, name) for _, record in runs])
        return f"<tr><td>{escape(clip(label(name)))}</td>{cells}</tr>"

    rows = _in_groups(names, row, 2 * len(runs))
    note = "A ratio is a value over that of the first run. Whether a difference is more than noise is answered by"
    return (
        f'<section class="run"><h1>Side by side</h1><p>{note} <code>edgetrain compare</code>.</p>'
        f"{_whole(f'<th></th>{head}', rows)}</section>"
    )


def _of(record: Record, name: str) -> Value | None:
    return in_percent(name, record.summary[name]) if name in record.summary else None


def _across(values: Sequence[Value | None]) -> str:
    cells = []
    for place, value in enumerate(values):
        if value is None:
            cells.append(f'<td class="number soft">{MISSING}</td>')
        else:
            small = f'<span class="soft small">{escape(interval(value))}</span> {tag(value.origin)}'
            cells.append(f'<td class="{_style(value)}">{escape(clip(shown(value)))}<br>{small}</td>')
        if place:
            cells.append(f'<td class="number">{escape(_ratio(values[0], value))}</td>')
    return "".join(cells)


def _ratio(first: Value | None, other: Value | None) -> str:
    """A text of two numbers of the same unit; nothing where there is no sense in it."""
    if first is None or other is None or first.unit != other.unit:
        return ""
    a, b = first.value, other.value
    if isinstance(a, bool | str | None) or isinstance(b, bool | str | None) or a <= 0 or b < 0:
        return ""
    return f"{number(b / a)}×"
