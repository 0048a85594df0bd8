"""Summaries as HTML: the headline numbers as cards, all values with their origin, several runs side by side.

In: `Record`s. Out: HTML text, everything escaped. A value that is not there is shown as unavailable, never as 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from edgetrain.measure.record import Record, Value
from edgetrain.report.numbers import MISSING, interval, number, shown

_HEADLINES = ("s", "bytes", "J", "W", "1/s", "samples/s")  # one card a unit, in this order
_SUFFIX = re.compile(r"(?<!_per)_(s|j|w|c|hz)$")
_PARTS = re.compile("utilisation|ratio|overhead|delivered|differ|share")
_MOST_CARDS = 5
_MOST_TEXT = 300  # characters of a name or a text that a page shows


def clip(text: str, most: int = _MOST_TEXT) -> str:
    """Text that a page has room for."""
    return text if len(text) <= most else text[: most - 1] + "…"


def spoken(name: str) -> str:
    """A name of a summary in words: step_time_s → step time, peak_bytes → peak memory. The unit is with the value."""
    if " " in name:
        return clip(name)
    name = f"{name.removesuffix('_bytes')}_memory" if name.endswith("_bytes") else _SUFFIX.sub("", name)
    return clip(name.replace("_", " ").strip() or name)


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
    ordered = [chosen[unit] for unit in _HEADLINES if unit in chosen][:_MOST_CARDS]
    return f'<div class="cards">{"".join(_card(*one) for one in ordered)}</div>' if len(ordered) > 1 else ""


def _card(name: str, value: Value) -> str:
    told = interval(value)
    figure, _, unit = shown(value).partition(" ")
    return (
        f'<div class="card"><div class="what">{escape(spoken(name))}</div>'
        f'<div class="figure">{escape(figure)}<small> {escape(unit)}</small></div>'
        f'<div class="from">{tag(value.origin)}{f"<span>{escape(told)}</span>" if told else ""}</div></div>'
    )


def table(record: Record) -> str:
    """Every value of one run."""
    if not record.summary:
        return ""
    spread = any(value.low is not None for value in record.summary.values())
    rows = "".join(
        f"<tr><td>{escape(spoken(name))}</td>{_cells(in_percent(name, value), spread)}<td>{tag(value.origin)}</td></tr>"
        for name, value in record.summary.items()
    )
    head = '<th></th><th class="number">value</th>'
    head += ('<th class="number wide">95 % interval</th>' if spread else "") + "<th>where from</th>"
    return f"<h2>Results</h2>{_whole(head, rows)}"


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
    """One column a run; beside each number of a later run, how many times the first run's it is. Nothing for runs that
    have no value in common."""
    told = [name for _, record in runs for name in record.summary]
    names = list(dict.fromkeys(told))
    if len(names) == len(told):
        return ""
    head = "".join(
        f'<th class="number"><a href="#run-{place}">{escape(clip(name, 60))}</a></th>'
        + ('<th class="number">ratio</th>' if place else "")
        for place, (name, _) in enumerate(runs)
    )
    rows = "".join(
        f"<tr><td>{escape(spoken(name))}</td>{_across([_of(record, name) for _, record in runs])}</tr>"
        for name in names
    )
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
