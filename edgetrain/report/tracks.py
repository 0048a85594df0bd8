"""Samples as lines over time: counters become rates, each line knows what it is and where it came from.

In:  `Samples`. Out: `Track`s on the clock of the op timeline; `within` a span of time, `thinned` for a drawing.

    counter   12.0 J    12.4 J      13.0 J                gauge   51 °C      52 °C      51 °C
              ├─ 4.0 W ──┼── 6.0 W ──┤                             •──────────•──────────•
              a value holds from its time to the next (`holds`)    a value is true at its time

Promised: what was not there is NaN, and a gap in the line. A rate of a counter that was measured is derived.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgetrain.measure.record import Origin
from edgetrain.measure.samples import Samples, Series
from edgetrain.measure.sensors.source import Channel
from edgetrain.measure.windows import spaced

Quantity = Literal[
    "power", "utilisation", "process", "gpu", "memory", "available", "temperature", "frequency", "waiting",
    "voltage", "current", "other",
]  # fmt: skip
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TITLES: dict[Quantity, str] = {
    "power": "power",
    "utilisation": "cores busy",
    "process": "CPU in use",
    "gpu": "GPU busy",
    "memory": "memory",
    "available": "available memory",
    "temperature": "temperature",
    "frequency": "frequency",
    "waiting": "waiting",
    "voltage": "voltage",
    "current": "current",
    "other": "other",
}
_BY_UNIT: dict[str, Quantity] = {
    "J": "power", "W": "power", "B": "memory", "°C": "temperature", "Hz": "frequency", "V": "voltage", "A": "current",
}  # fmt: skip
_CORE = re.compile(r"cpu\d+")
_RATES = {"J": "W", "s": "1"}
_MEAN = "mean of all cores"
MAX_IN_A_LANE = 17


@dataclass(frozen=True)
class Track:
    """One line. at_ns: in order. values: one a time, NaN where there is none. source: its name and the channel's."""

    name: str
    source: str
    quantity: Quantity
    unit: str
    origin: Origin
    at_ns: Ints
    values: Floats
    holds: bool

    @property
    def is_main(self) -> bool:
        """Not one of many cores, of which the mean or the sum says more."""
        return self.name == _MEAN or not (self.quantity in ("utilisation", "process") and _CORE.search(self.name))


@dataclass(frozen=True)
class Thin:
    """A line for a drawing: for each bucket of time the middle of what lies in it, and its least and most."""

    at_ns: Ints
    mean: Floats
    least: Floats
    most: Floats


def tracks(samples: Samples) -> list[Track]:
    """All lines, those of one quantity together, the mean of the cores before the cores."""
    lines = [track for series in samples.series for track in _of_series(series)]
    cores = [track for track in lines if track.quantity == "utilisation"]
    if len(cores) > 1:
        lines.insert(lines.index(cores[0]), _mean(cores))
    order = list(TITLES)
    return sorted(lines, key=lambda track: order.index(track.quantity))


def _of_series(series: Series) -> list[Track]:
    lines = []
    for place, channel in enumerate(series.channels):
        values = series.values[:, place]
        if channel.kind == "unavailable" or not np.isfinite(values).any():
            continue
        lines.append(_track(series, channel, values))
    return lines


def _track(series: Series, channel: Channel, values: Floats) -> Track:
    unit, origin, at = channel.unit, channel.kind, series.at_ns
    if channel.counter:
        at, values = rate(at, values, channel.least_window_s)
        origin = "derived" if origin == "measured" else origin
    return Track(
        channel.label, f"{series.name}: {channel.name}", _quantity(channel),
        _RATES.get(unit, f"{unit}/s") if channel.counter else unit, origin, at, values, channel.counter,
    )  # fmt: skip


def _quantity(channel: Channel) -> Quantity:
    name = channel.name
    if channel.unit == "B" and "available" in name:
        return "available"
    if channel.unit in _BY_UNIT:
        return _BY_UNIT[channel.unit]
    if channel.unit == "s" and re.search("pressure|steal|wait", name):
        return "waiting"
    if channel.unit == "s" and re.fullmatch(r"cpu\d+_time_s", name):
        return "utilisation"
    if channel.unit == "s":
        return "process"
    return "gpu" if "utilisation" in name else "other"


def rate(at_ns: Ints, total: Floats, least_window_s: float = 0.0) -> tuple[Ints, Floats]:
    """Beginnings of windows and the rate in each, then the end of the last one with NaN.

    Readings nearer than `least_window_s` make one window together. Where a total fell it was set back: no rate.
    """
    known = np.isfinite(total)
    at_ns, total = at_ns[known], total[known]
    keep = spaced(at_ns, max(1, round(least_window_s * 1e9)))
    at_ns, total = at_ns[keep], total[keep]
    grown = np.diff(total)
    with np.errstate(over="ignore"):  # of numbers that no sensor gives
        rates = grown / np.maximum(np.diff(at_ns) * 1e-9, 1e-12)
    rates = np.where((grown >= 0) & np.isfinite(rates), rates, np.nan)
    return at_ns, np.append(rates, np.full(min(1, len(at_ns)), np.nan))


def _mean(cores: Sequence[Track]) -> Track:
    """Of all cores, at the times of the first: they are read together."""
    same = [track for track in cores if np.array_equal(track.at_ns, cores[0].at_ns)]
    values = np.stack([track.values for track in same])
    known = np.isfinite(values).all(axis=0)
    mean = np.where(known, np.where(known, values, 0.0).mean(axis=0), np.nan)
    source = ", ".join(track.source for track in (same[0], same[-1]))
    return Track(_MEAN, source, "utilisation", "1", "derived", same[0].at_ns, mean, True)


# For a drawing


def drawn(lines: Sequence[Track]) -> list[Track]:
    """Those that a lane has room for: the first of each quantity. A large machine has a hundred cores."""
    count: Counter[str] = Counter()
    kept = []
    for track in lines:
        count[track.quantity] += 1
        if count[track.quantity] <= MAX_IN_A_LANE:
            kept.append(track)
    return kept


def within(track: Track, begin_ns: int, end_ns: int) -> Track:
    """The part that shows in a span: with the reading before it and the one after it."""
    first = max(0, int(np.searchsorted(track.at_ns, begin_ns, side="right")) - 1)
    last = int(np.searchsorted(track.at_ns, end_ns, side="left")) + 1
    part = slice(first, last)
    return Track(
        track.name, track.source, track.quantity, track.unit, track.origin,
        track.at_ns[part], track.values[part], track.holds,
    )  # fmt: skip


def thinned(track: Track, most: int) -> Thin:
    """At most so many points; where there are more samples, the mean, least and most of each bucket of them."""
    n = len(track.values)
    if n <= most:
        return Thin(track.at_ns, track.values, track.values, track.values)
    bounds = np.linspace(0, n, most + 1).astype(np.int64)
    first, count = bounds[:-1], np.diff(bounds)
    finite = np.isfinite(track.values)
    known = np.add.reduceat(finite.astype(np.int64), first)
    total = np.add.reduceat(np.where(finite, track.values, 0.0), first)
    least = np.minimum.reduceat(np.where(finite, track.values, np.inf), first)
    most_ = np.maximum.reduceat(np.where(finite, track.values, -np.inf), first)
    nothing = known == 0
    mean = np.where(nothing, np.nan, total / np.maximum(known, 1))
    middle = first if track.holds else first + count // 2
    return Thin(track.at_ns[middle], mean, np.where(nothing, np.nan, least), np.where(nothing, np.nan, most_))
