"""A profile run as HTML: the timeline of a step and of the run, phases, layers, kinds of op, ops.

In:  `Run`. Out: `sections`, HTML text with everything escaped, and `script`, which draws the two timelines from the
     data beside it (`embedded.py`, `script/`). Tables and bars need no script; it only sorts and folds them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from edgetrain.measure.sensors.modelled_power import PROCESS_ENERGY
from edgetrain.measure.timeline import OpRun, Timeline
from edgetrain.report import embedded
from edgetrain.report.breakdown import (
    CATEGORIES,
    Energy,
    Row,
    between_ops_s,
    by_kind,
    by_layer,
    by_op,
    by_phase,
    category_of,
)
from edgetrain.report.numbers import MISSING, between, number, quantity, scale
from edgetrain.report.run import Run
from edgetrain.report.summary import clip
from edgetrain.report.tracks import drawn

_SCRIPT = Path(__file__).with_name("script")
_FILES = ("numbers", "helpers", "lanes", "models", "tips", "view", "tables", "start")  # each uses those before it
MAX_ROWS = 5_000  # of a table; the rest is in the CSV
SHORT = 15  # rows that a table shows until it is unfolded


def script(runs: Sequence[Run]) -> str:
    """The data of all runs, and the script."""
    data = embedded.as_script({"runs": [embedded.data(run) for run in runs]})
    return f'<script type="application/json" id="data">{data}</script><script>{_code()}</script>'


def policy() -> str:
    """What the page may do: run this one script, and nothing else; no request to anywhere."""
    digest = base64.b64encode(hashlib.sha256(_code().encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _code() -> str:
    """All files as one script whose names are its own."""
    parts = [(_SCRIPT / f"{name}.js").read_text(encoding="utf-8") for name in _FILES]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def sections(run: Run, number_: int) -> str:
    """All that is special to a profile run. number_: of the run on its page."""
    parts = []
    if run.timeline is not None and run.typical_step is not None:
        parts += [_step(run, run.timeline, number_), _phases(run, run.timeline)]
    if run.tracks:
        parts.append(_whole(run, number_))
    if run.timeline is not None and run.timeline.steps:
        parts.append(_breakdown(run, run.timeline, number_))
    return "".join(parts)


# The timelines


def _step(run: Run, timeline: Timeline, number_: int) -> str:
    step = run.typical_step or 0
    time = quantity(float(timeline.step_s[step]), "s", 4)
    note = f"Step {step + 1} of {timeline.steps}, the one nearest to the median: {time}, {len(timeline.ops):,} ops."
    if timeline.left_out:
        note += f" {timeline.left_out} steps whose plan changed in their middle are left out."
    if len(timeline.ops) > embedded.MAX_OPS:
        note += f" The {embedded.MAX_OPS:,} longest ops are drawn."
    return f"<h2>One step, op by op</h2><p>{escape(note)}</p>{_view(number_, 'step')}{_legend(timeline)}"


def _whole(run: Run, number_: int) -> str:
    sources = len({track.source.partition(":")[0] for track in run.tracks})
    period = f" every {run.samples.period_ns / 1e6:g} ms" if run.samples is not None else ""
    note = f"{sources} sources, sampled{period}. Shaded: from minimum to maximum, where samples are too dense to draw."
    left = len(run.tracks) - len(drawn(run.tracks))
    note += f" {left} more lines are only in the CSV and the trace." if left else ""
    return f"<h2>The whole run</h2><p>{escape(note)}</p>{_view(number_, 'run')}"


def _view(number_: int, which: str) -> str:
    """An empty place; the script fills it."""
    return (
        f'<div class="view" data-run="{number_}" data-view="{which}">'
        "<noscript>This drawing needs JavaScript. The tables below do not.</noscript></div>"
    )


def _legend(timeline: Timeline) -> str:
    """The colours of the ops, with each one's part of the time."""
    times = timeline.op_s.mean(axis=0)
    total = max(float(timeline.step_s.mean()), 1e-12)
    sums = np.zeros(len(CATEGORIES))
    for op, time_s in zip(timeline.ops, times, strict=True):
        sums[CATEGORIES.index(category_of(op))] += time_s
    entries = [
        f'<li><i class="c{place}"></i>{CATEGORIES[place]} '
        f'<span class="soft">{_percent(sums[place] / total)}</span></li>'
        for place in np.argsort(-sums)
        if sums[place] > 0
    ]
    if any(op.why == "recomputed" for op in timeline.ops):
        entries.append('<li><i class="recomputed-mark"></i>recomputed</li>')
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.01 else "under 1 %"


# Phases


def _phases(run: Run, timeline: Timeline) -> str:
    rows = by_phase(timeline, run.energy)
    gap_s = between_ops_s(timeline)
    total = sum(row.time_s for row in rows) + gap_s
    if total <= 0:
        return ""
    pieces, notes = [], []
    for row in rows:
        recomputed = row.recomputed_s / total
        pieces.append(_piece(f"p-{row.name}", row.name, (row.time_s - row.recomputed_s) / total))
        pieces.append(_piece(f"p-{row.name} recomputed-piece", "recomputed", recomputed))
        notes.append(_phase_note(row, total))
    pieces.append(_piece("p-gap", "between ops", gap_s / total))
    notes.append(
        f'<li><i class="p-gap"></i><b>between ops</b> {quantity(gap_s, "s")} · {100 * gap_s / total:.0f} %</li>'
    )
    return f'<h2>Phases</h2><div class="phases">{"".join(pieces)}</div><ul class="legend">{"".join(notes)}</ul>'


def _piece(style: str, name: str, part: float) -> str:
    if part <= 0:
        return ""
    label = name if part > 0.1 else ""
    return f'<span class="{style}" style="flex-grow:{part:.5f}" title="{name}: {100 * part:.1f} %">{label}</span>'


def _phase_note(row: Row, total: float) -> str:
    words = f"{quantity(row.time_s, 's')} · {100 * row.time_s / total:.0f} %"
    words += f", of it {quantity(row.recomputed_s, 's')} recomputed" if row.recomputed_s > 0 else ""
    if row.energy is not None:
        words += f" · {quantity(row.energy.amount_j, 'J')}"
    return f'<li><i class="p-{row.name}"></i><b>{row.name}</b> {words}</li>'


# Tables


def _breakdown(run: Run, timeline: Timeline, number_: int) -> str:
    energy = run.energy
    tables = (
        ("layers", "Layer", by_layer(timeline, energy)),
        ("kinds", "Kind of op", by_kind(timeline, energy)),
        ("ops", "Op", by_op(timeline, energy)),
    )
    note = "Time: median over steps. "
    if energy is not None:
        own = energy.source == PROCESS_ENERGY
        whole = "what this process takes above idle" if own else f"what the machine takes ({clip(energy.source, 80)})"
        note += (
            f"Energy: mean over steps with its 95 % interval, {energy.origin}: {whole}, attributed to ops; the rest is "
            "spent between ops. ≈ marks ops that the samples cannot tell apart: their sum is split by time. "
        )
    tabs = "".join(
        f'<button type="button" data-tab="{which}" aria-pressed="{"false" if place else "true"}">'
        f"{which.capitalize()} <span>{len(rows):,}</span></button>"
        for place, (which, _, rows) in enumerate(tables)
    )
    inner = "".join(_table(which, title, rows, timeline, energy is not None) for which, title, rows in tables)
    return (
        f'<h2>Where the time goes</h2><p>{escape(note)}</p><div class="breakdown" data-run="{number_}">'
        f'<div class="tabs">{tabs}</div>{inner}</div>'
    )


Column = tuple[str, Callable[[Row], float | None], Callable[[Row], str]]


def _columns(energy: bool, longest: float) -> list[Column]:
    """longest: the largest share, which has the longest bar."""
    columns: list[Column] = [
        ("time", lambda row: row.time_s, lambda row: _with_interval(row.time_s, row.low_s, row.high_s, "s")),
        ("share", lambda row: row.share, lambda row: _share(row.share, longest)),
        ("recomputed", lambda row: row.recomputed_s or None, lambda row: _maybe(row.recomputed_s or None, "s")),
    ]
    if energy:
        columns.append(("energy", lambda row: row.energy.amount_j if row.energy else None, _energy))
    return [
        *columns,
        ("FLOP", lambda row: row.flops or None, lambda row: _maybe(row.flops or None, "FLOP")),
        ("FLOP/s", lambda row: row.flops_per_s, lambda row: _maybe(row.flops_per_s, "FLOP/s")),
        ("bytes", lambda row: row.n_bytes or None, lambda row: _maybe(row.n_bytes or None, "B")),
        ("bytes/s", lambda row: row.bytes_per_s, lambda row: _maybe(row.bytes_per_s, "B/s")),
    ]


def _table(which: str, title: str, rows: Sequence[Row], timeline: Timeline, energy: bool) -> str:
    longest = max((row.share for row in rows), default=0.0)
    columns = [c for c in _columns(energy, longest) if c[0] != "recomputed" or any(row.recomputed_s for row in rows)]
    head = "".join(_head(name, "descending" if name == "time" else "none", "number") for name, _, _ in columns)
    body = "".join(_row(row, columns, timeline, which) for row in rows[:MAX_ROWS])
    more = (
        f'<button type="button" class="more" data-all="{min(len(rows), MAX_ROWS):,}">'
        f"show all {min(len(rows), MAX_ROWS):,}</button>"
        if len(rows) > SHORT
        else ""
    )
    if len(rows) > MAX_ROWS:
        more += f'<p class="small">{len(rows) - MAX_ROWS:,} shorter ones are only in the CSV.</p>'
    return (
        f'<div class="tab" data-tab="{which}"><div class="scroll"><table class="data short"><thead><tr>'
        f"{_head(title, 'none')}{head}</tr></thead><tbody>{body}</tbody></table></div>{more}</div>"
    )


def _head(name: str, sort: str, style: str = "") -> str:
    return f'<th class="{style}" aria-sort="{sort}"><button type="button">{name}</button></th>'


def _row(row: Row, columns: Sequence[Column], timeline: Timeline, which: str) -> str:
    cells = []
    for name, key, text in columns:
        value = key(row)
        sort = f' data-v="{value:.9g}"' if value is not None else ""
        cells.append(f'<td class="number {name.replace("/", "-")}"{sort}>{text(row)}</td>')
    if which == "ops":
        place, name = row.places[0], escape(clip(row.name, 80))
        first = f'<td><button type="button" class="find" data-place="{place}">{name}</button><br>'
        first += f'<span class="soft small">{escape(_about(timeline.ops[place]))}</span></td>'
    else:
        first = f'<td>{escape(clip(row.name, 80))} <span class="soft small">{_times(row)}</span></td>'
    return f"<tr>{first}{''.join(cells)}</tr>"


def _times(row: Row) -> str:
    return f"{len(row.places)} op" + ("s" if len(row.places) > 1 else "")


def _about(op: OpRun) -> str:
    words = [op.module, op.phase, "" if op.why == "first" else op.why]
    words += [f"micro-batch {op.micro_batch + 1}"] if op.micro_batch else []
    return clip(" · ".join(word for word in words if word), 120)


def _share(share: float, longest: float) -> str:
    wide = 6 * share / longest if longest > 0 else 0
    return f'<span class="bar" style="width:{wide:.2f}rem"></span>{number(100 * share, 2 if share < 0.1 else 3)} %'


def _maybe(value: float | None, unit: str) -> str:
    return escape(quantity(value, unit)) if value is not None else f'<span class="soft">{MISSING}</span>'


def _energy(row: Row) -> str:
    energy: Energy | None = row.energy
    if energy is None:
        return '<span class="soft" title="no figure: no sample met it">—</span>'
    sign = "≈ " if energy.merged else ""
    return sign + _with_interval(energy.amount_j, energy.low_j, energy.high_j, "J")


def _with_interval(value: float, low: float | None, high: float | None, unit: str) -> str:
    size = scale(value, unit)[1]
    text = quantity(value, unit)
    if low is None and high is None:
        return escape(text)
    ends = between(low, high, size) if low is not None and high is not None else f"from {number((low or 0) / size)}"
    return f'{escape(text)}<br><span class="soft small">{escape(ends)}</span>'
