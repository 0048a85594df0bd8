"""What the page's script draws, as plain data: one step in full, and the whole run thinned out.

In:  `Run`. Out: a dictionary for JSON, and `as_script`, which no text in it can break out of.

    step   the step whose time is nearest to the median: every op with its times over all steps, its energy, the bytes
           held; the samples of that step
    run    every step as a span; every line of samples in at most 600 buckets (mean, least, most)

Columns, not rows, and texts by their number: a step of 1,000 ops takes about 150 kB. Times are µs in a step and
s in a run, from its beginning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import numpy as np

from edgetrain.graph.ir import PHASES
from edgetrain.measure.attributed import Attributed
from edgetrain.measure.picture import Picture
from edgetrain.measure.timeline import Timeline, Why
from edgetrain.report.breakdown import CATEGORIES, category_of
from edgetrain.report.run import Run
from edgetrain.report.summary import clip
from edgetrain.report.tracks import TITLES, Track, drawn, thinned, within
from edgetrain.report.words import CHANNELS

MAX_OPS = 20_000
MAX_POINTS = 600
MAX_STEPS = 2_000


def as_script(data: object) -> str:
    """JSON for a <script type="application/json">: no text in it can end the element or open another."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def data(run: Run) -> dict[str, Any]:
    return {"name": clip(run.name), "step": _step(run), "run": _whole(run)}


# One step


def _step(run: Run) -> dict[str, Any] | None:
    timeline, number = run.timeline, run.typical_step
    if timeline is None or number is None:
        return None
    begin, end = (int(at) for at in timeline.step_ns[number])
    places = drawn_ops(timeline, number)
    texts = _Texts()
    op = _ops(timeline, number, places, texts)
    op["held"] = [None] * len(places)
    held = held_bytes(timeline, run.picture)
    if held is not None:
        op["held"] = [held[place] for place in places]
    op["group"] = [-1] * len(places)
    if run.energy is not None:
        owner = {place: n for n, group in enumerate(run.energy.groups) for place in group.ops}
        op["group"] = [owner.get(place, -1) for place in places]
    return {
        "number": number,
        "steps": timeline.steps,
        "span": max(end - begin, 1) / 1e3,
        "categories": CATEGORIES,
        "phases": PHASES,
        "whys": get_args(Why),
        "texts": texts.all,
        "op": op,
        "energy": None if run.energy is None else _groups(run.energy, timeline),
        "tracks": [_points(track, begin, end) for track in drawn(run.tracks)],
    }


def drawn_ops(timeline: Timeline, number: int) -> list[int]:
    """All ops of a step, or the longest where there are too many to draw."""
    if len(timeline.ops) <= MAX_OPS:
        return list(range(len(timeline.ops)))
    longest = np.argsort(timeline.begin_ns[number] - timeline.end_ns[number], kind="stable")[:MAX_OPS]
    return sorted(longest.tolist())


class _Texts:
    """Texts by their number."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._known: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._known:
            self._known[text] = len(self.all)
            self.all.append(clip(text))
        return self._known[text]


def _ops(timeline: Timeline, number: int, places: Sequence[int], texts: _Texts) -> dict[str, list[Any]]:
    ops = [timeline.ops[place] for place in places]
    first = timeline.step_ns[number, 0]
    low, middle, high = np.quantile(timeline.op_s[:, places] * 1e6, (0.05, 0.5, 0.95), axis=0)
    return {
        "place": list(places),
        "name": [texts.number(op.name) for op in ops],
        "kind": [texts.number(op.shown_kind) for op in ops],
        "module": [texts.number(op.module) for op in ops],
        "phase": [PHASES.index(op.phase) for op in ops],
        "why": [get_args(Why).index(op.why) for op in ops],
        "part": [op.micro_batch for op in ops],
        "category": [CATEGORIES.index(category_of(op)) for op in ops],
        "begin": _short((timeline.begin_ns[number, places] - first) / 1e3, 9),
        "time": _short((timeline.end_ns[number, places] - timeline.begin_ns[number, places]) / 1e3, 9),
        "middle": _short(middle),
        "low": _short(low),
        "high": _short(high),
        "flops": [op.flops for op in ops],
        "read": [op.read_bytes for op in ops],
        "written": [op.written_bytes for op in ops],
    }


def held_bytes(timeline: Timeline, picture: Picture | None) -> list[int | None] | None:
    """The bytes held while each op runs, from the curve over the same ops; a wait holds what the op before it did."""
    names = [op.name for op in timeline.ops if op.why != "paged"]
    curves = picture.curves if picture is not None else ()
    curve = next((curve for curve in curves if [i.op for i in curve.instants] == names), None)
    if curve is None:
        return None
    held: list[int | None] = []
    instants = iter(curve.instants)
    for op in timeline.ops:
        held.append((held[-1] if held else None) if op.why == "paged" else next(instants).held_bytes)
    return held


def _groups(energy: Attributed, timeline: Timeline) -> dict[str, Any]:
    """Joules of a step, and the power that they are over the time of the ops."""
    mean_s = timeline.op_s.mean(axis=0)
    times = [float(mean_s[list(group.ops)].sum()) for group in energy.groups]

    def power(amounts: Iterable[float | None]) -> list[float | None]:
        values = (a / t if a is not None and t > 0 else math.nan for a, t in zip(amounts, times, strict=True))
        return _short(list(values))

    amounts, lows, highs = ([getattr(g, name) for g in energy.groups] for name in ("amount", "low", "high"))
    return {
        "origin": energy.origin,
        "source": clip(energy.source),
        "count": [len(group.ops) for group in energy.groups],
        "amount": _short(amounts),
        "low": _short(lows),
        "high": _short(highs),
        "power": power(amounts),
        "power_low": power(lows),
        "power_high": power(highs),
    }


def _points(track: Track, begin_ns: int, end_ns: int) -> dict[str, Any]:
    part = within(track, begin_ns, end_ns)
    thin = thinned(part, 2 * MAX_POINTS)
    return {**_about(track), "at": _short((thin.at_ns - begin_ns) / 1e3, 9), "mean": _short(thin.mean)}


# The whole run


def _whole(run: Run) -> dict[str, Any] | None:
    """From the first thing that was recorded to the last."""
    spans = [(int(track.at_ns[0]), int(track.at_ns[-1])) for track in run.tracks if len(track.at_ns)]
    steps = run.timeline.step_ns if run.timeline is not None else np.empty((0, 2), dtype=np.int64)
    if len(steps):
        spans.append((int(steps[0, 0]), int(steps[-1, 1])))
    if not spans or not run.tracks:
        return None
    begin, end = min(first for first, _ in spans), max(last for _, last in spans)
    each = max(1, math.ceil(len(steps) / MAX_STEPS))
    return {
        "span": max(end - begin, 1) / 1e9,
        "each": each,
        "begin": _short((steps[::each, 0] - begin) / 1e9, 9),
        "end": _short((steps[:, 1][each - 1 :: each] - begin) / 1e9, 9),
        "tracks": [_thin(track, begin) for track in drawn(run.tracks)],
    }


def _thin(track: Track, begin_ns: int) -> dict[str, Any]:
    thin = thinned(track, MAX_POINTS)
    data = {**_about(track), "at": _short((thin.at_ns - begin_ns) / 1e9, 7), "mean": _short(thin.mean)}
    if thin.least is not thin.mean:
        data |= {"least": _short(thin.least), "most": _short(thin.most)}
    return data


def _about(track: Track) -> dict[str, Any]:
    return {
        "name": clip(CHANNELS.get(track.name, track.name), 60),
        "source": clip(track.source),
        "quantity": track.quantity,
        "title": TITLES[track.quantity],
        "unit": track.unit,
        "origin": track.origin,
        "holds": track.holds,
        "main": track.is_main,
    }


def _short(values: Any, digits: int = 4) -> list[float | None]:
    """So many digits of each; None for what is not there."""
    known = np.asarray([math.nan if value is None else value for value in values], dtype=np.float64)
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in known.tolist()]
