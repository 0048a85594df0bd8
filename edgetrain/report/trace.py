"""A profile run as a trace that Perfetto and chrome://tracing open: ops as slices, and beside them what was sampled.

In:  `Run`s. Out: one JSON file of Chrome's trace events.

    steps     ├───────────── step 1 ─────────────┤├── step 2 …
                ├── forward ──┤├── backward ──┤            slices, strictly nested: step ⊃ phase ⊃ layer ⊃ op
                ├ layer ┤├ layer ┤…
                ├op┤├op┤
    power     ▁▁▅▅▅▇▇▇▅▅▅▅▅▅▅▂▂▂▂▂▂▂                       counters, on the same clock
    memory    ▃▃▃▄▅▆▇▇▆▅▄▃

Promised: slices of a track are nested strictly and begin and end in the order of the file; times never go back. An
interval that would reach out of its step, or into the op before it (a GPU's clock is laid on the processor's), is
clipped. A value that was not there has no event: the counter stays where it was, and is never 0 for want of a value.

Slices are pairs of begin and end, not begins with a length: whatever a viewer rounds, their order stays.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgetrain.files import write_atomic
from edgetrain.measure.timeline import OpRun, Timeline
from edgetrain.report.embedded import held_bytes
from edgetrain.report.run import Run
from edgetrain.report.summary import clip
from edgetrain.report.tracks import TITLES, Track

Event = dict[str, Any]
Timed = tuple[int, Event]  # ns from the beginning of the run

_THREAD = 1


def write_trace(runs: Sequence[Run], out: Path) -> Path:
    """One process of the trace for each run, each from its own beginning; whole or not at all."""
    head, tail = '{"displayTimeUnit":"ms","traceEvents":[\n', f'\n],"otherData":{_json(_about(runs))}}}\n'
    write_atomic(out, (part.encode(errors="replace") for part in itertools.chain([head], _lines(runs), [tail])))
    return out


def _lines(runs: Sequence[Run]) -> Iterator[str]:
    events = itertools.chain.from_iterable(trace_events(run, process) for process, run in enumerate(runs, start=1))
    for number, event in enumerate(events):
        yield (",\n" if number else "") + _json(event)


def _json(data: dict[str, Any]) -> str:
    """Letters as themselves: Perfetto shows an escape such as \\u00b0 as it stands."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)


def _about(runs: Sequence[Run]) -> dict[str, str]:
    """Values of this part of a trace are texts."""
    return {
        "command": clip("; ".join(" ".join(run.record.command) for run in runs)),
        "created": clip("; ".join(run.record.created for run in runs)),
        "notes": clip(" ".join(note for run in runs for note in run.notes), 2000),
    }


def trace_events(run: Run, process: int = 1) -> Iterator[Event]:
    """Names, then slices and counters in the order of time. `ts` is in µs from the first thing that was recorded."""
    yield from _names(run, process)
    zero = _zero(run)
    timed: list[Iterable[Timed]] = [_counter(track, zero) for track in run.tracks]
    if run.timeline is not None:
        timed += [_slices(run, run.timeline, zero), _held(run, run.timeline, zero)]
    for at, event in heapq.merge(*timed, key=lambda entry: entry[0]):
        yield {**event, "pid": process, "tid": _THREAD, "ts": at / 1000}


def _names(run: Run, process: int) -> Iterator[Event]:
    for kind, name in (("process_name", f"edgetrain: {clip(run.name)}"), ("thread_name", "steps")):
        yield {"ph": "M", "name": kind, "pid": process, "tid": _THREAD, "args": {"name": name}}


def _zero(run: Run) -> int:
    firsts = [int(track.at_ns[0]) for track in run.tracks if len(track.at_ns)]
    if run.timeline is not None and run.timeline.steps:
        firsts.append(int(min(run.timeline.step_ns[0, 0], run.timeline.begin_ns[0].min(initial=2**62))))
    return min(firsts, default=0)


# Slices


@dataclass(frozen=True)
class _Spot:
    """One op of one step, with its interval clipped."""

    op: OpRun
    begin: int
    end: int
    event: Event


def _slices(run: Run, timeline: Timeline, zero: int) -> Iterator[Timed]:
    begins = _op_begins(run, timeline)
    reached = 0
    for step in range(timeline.steps):
        begin, end = (int(at) - zero for at in timeline.step_ns[step])
        begin = max(begin, reached)
        reached = max(begin, end)
        yield begin, _begin(f"step {step + 1}", "step", {"step": step + 1})
        yield from _phases(_clipped(timeline, step, zero, begin, reached, begins))
        yield reached, {"ph": "E"}


def _clipped(
    timeline: Timeline, step: int, zero: int, begin: int, end: int, begins: Sequence[Event]
) -> list[_Spot]:  # fmt: skip
    """The ops of a step, none before the one before it has ended, none out of the step."""
    spots, reached = [], begin
    times = zip(timeline.begin_ns[step].tolist(), timeline.end_ns[step].tolist(), strict=True)
    for op, event, (first, last) in zip(timeline.ops, begins, times, strict=True):
        left = min(max(first - zero, reached), end)
        reached = min(max(last - zero, left), end)
        spots.append(_Spot(op, left, reached, event))
    return spots


def _phases(spots: Sequence[_Spot]) -> Iterator[Timed]:
    for (phase, part), group in itertools.groupby(spots, lambda spot: (spot.op.phase, spot.op.micro_batch)):
        inside = list(group)
        yield inside[0].begin, _begin(phase, "phase", {"micro_batch": part})
        for module, layer in itertools.groupby(inside, lambda spot: spot.op.module):
            yield from _layer(module, list(layer))
        yield inside[-1].end, {"ph": "E"}


def _layer(module: str, spots: Sequence[_Spot]) -> Iterator[Timed]:
    """An op that came from no module stands in its phase without a layer."""
    if module:
        yield spots[0].begin, _begin(clip(module), "layer", {})
    for spot in spots:
        yield spot.begin, spot.event
        yield spot.end, {"ph": "E"}
    if module:
        yield spots[-1].end, {"ph": "E"}


def _begin(name: str, category: str, details: dict[str, Any]) -> Event:
    return {"ph": "B", "name": name, "cat": category, "args": details}


def _op_begins(run: Run, timeline: Timeline) -> list[Event]:
    """The beginning of each op, with all that is known of it."""
    energy = run.energy
    owner = {place: group for group in energy.groups for place in group.ops} if energy is not None else {}
    events = []
    for place, op in enumerate(timeline.ops):
        details: dict[str, Any] = {
            "kind": clip(op.shown_kind), "layer": clip(op.module), "why": op.why, "flops": op.flops,
            "read_bytes": op.read_bytes, "written_bytes": op.written_bytes,
        }  # fmt: skip
        group = owner.get(place)
        if energy is not None and group is not None and group.amount is not None:
            details |= {"energy_j": group.amount, "energy_from": energy.origin}
            details |= {"energy_low_j": group.low} if group.low is not None else {}
            details |= {"energy_high_j": group.high} if group.high is not None else {}
            details |= {"energy_shared_by_ops": len(group.ops)} if len(group.ops) > 1 else {}
        events.append(_begin(clip(op.name), op.why, details))
    return events


# Counters


def _counter(track: Track, zero: int) -> Iterator[Timed]:
    unit, size = ("%", 100.0) if track.unit == "1" else (track.unit, 1.0)
    name = f"{TITLES[track.quantity]}: {clip(track.name, 80)} ({unit}, {track.origin})"
    for at, value in zip(track.at_ns.tolist(), track.values.tolist(), strict=True):
        if math.isfinite(value):
            yield at - zero, {"ph": "C", "name": name, "args": {unit: value * size}}


def _held(run: Run, timeline: Timeline, zero: int) -> Iterator[Timed]:
    """The bytes of tensors, wherever they change."""
    held = held_bytes(timeline, run.picture)
    if held is None:
        return
    last, reached = None, 0
    for begins in timeline.begin_ns.tolist():
        for at, value in zip(begins, held, strict=True):
            if value is not None and value != last:
                last, reached = value, max(reached, at - zero)
                yield reached, {"ph": "C", "name": "tensors held (B, derived)", "args": {"B": value}}
