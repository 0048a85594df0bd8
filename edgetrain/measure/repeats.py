"""The same measurement in several fresh processes, taken together.

In:  run folders of one command, the first of which gets the summary of all.
Out: the summary of all, which becomes that of the first: medians, with intervals that know that processes differ
     (memory layout, code alignment and the state of the machine are drawn anew for each).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgetrain.measure.intervals import Interval, bootstrap_median
from edgetrain.measure.record import RunFolder, Value
from edgetrain.measure.timeline import load_timeline


def combined(first: RunFolder, others: Sequence[RunFolder]) -> dict[str, Value]:
    """Of all runs; written to the first one's record."""
    runs = [first, *others]
    summaries = [run.load().summary for run in runs]
    summary_of_all = {name: _together([summary.get(name) for summary in summaries]) for name in summaries[0]}
    timelines = [load_timeline(run.path) for run in runs]
    if all(timeline is not None and timeline.steps for timeline in timelines):
        steps = bootstrap_median([timeline.step_s.tolist() for timeline in timelines if timeline is not None])
        summary_of_all["step_time_s"] = _value(steps, summaries[0]["step_time_s"])
    summary_of_all["repeats"] = Value(len(runs), "1", "measured")
    first.save(replace(first.load(), summary=summary_of_all))
    return summary_of_all


def _together(values: Sequence[Value | None]) -> Value:
    """Numbers by their median; texts, and numbers that one of the runs could not have, as the first run has them."""
    first = values[0]
    assert first is not None
    numbers = [float(v.value) for v in values if v is not None and isinstance(v.value, int | float)]
    same = isinstance(first.value, bool) or all(v is not None and v.value == first.value for v in values)
    if same or len(numbers) < len(values):
        return first
    return _value(bootstrap_median([[number] for number in numbers]), first)


def _value(interval: Interval, like: Value) -> Value:
    return Value(interval.value, like.unit, like.origin, interval.low, interval.high)
