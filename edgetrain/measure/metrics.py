"""What the samples say of a span of time: CPU seconds, utilisation, memory, energy, temperature, and how quiet it was.

In:  `Samples`, and a span of the same clock.
Out: numbers of that span. What no sensor measured is None.

A counter (CPU time, energy) is read off at both ends of the span, between two readings by a straight line; where the
readings begin a little later or end a little earlier, what they miss is taken to be like the rest. A gauge (power,
temperature) is averaged over time. Energy comes from every source that measures it; which of them speaks for the
machine:

    a sensor of the whole device     battery, board input, PMIC         alone
    sensors of its parts             CPU package + memory + GPU         added up, none of them twice (`part_of`)
    no sensor                        the power model                    and everything made of it says "modelled"
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgetrain.measure.samples import Floats, Samples, Series, Times
from edgetrain.measure.sensors.source import Channel, Kind, outermost

WHOLE_DEVICE = ("power supply", "ina3221", "raspberry pmic")
Verdict = Literal["quiet", "noisy", "unknown"]

# Above these parts of a core, or of the time, somebody else was at work.
MAX_OTHERS, MAX_STEAL, MAX_PRESSURE = 0.10, 0.02, 0.05

MIN_COVERED = 0.8  # of a span, by readings


@dataclass(frozen=True)
class Span:
    begin_ns: int
    end_ns: int

    @property
    def time_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True)
class Energy:
    """What one source says. plus_minus: how far off it may be, as a part of it; None where nobody says."""

    source: str
    kind: Kind
    energy_j: float
    plus_minus: float | None = None


@dataclass(frozen=True)
class Quiet:
    """Was anything else at work? others: cores that other processes kept busy in the mean."""

    verdict: Verdict
    others: float | None
    steal: float | None
    pressure: float | None

    def __str__(self) -> str:
        if self.verdict == "unknown":
            return "unknown: this machine does not say what else ran"
        parts = [
            f"{name} {100 * part:.1f} %"
            for name, part in (("other processes", self.others), ("steal", self.steal), ("pressure", self.pressure))
            if part is not None
        ]
        return f"{self.verdict} ({', '.join(parts)})"


def growth(samples: Samples, name: str, span: Span) -> float | None:
    """By how much a counter grew."""
    for series, channel in channels(samples):
        if channel.name == name and channel.counter:
            return _growth(*_column(series, channel), span)
    return None


def mean(samples: Samples, name: str, span: Span) -> float | None:
    """The mean of a gauge over time."""
    for series, channel in channels(samples):
        if channel.name == name and not channel.counter:
            return _mean(*_column(series, channel), span)
    return None


def most(samples: Samples, name: str, span: Span) -> float | None:
    """The highest reading of a gauge."""
    for series, channel in channels(samples):
        if channel.name == name:
            at, values = _column(series, channel)
            inside = values[(at >= span.begin_ns) & (at <= span.end_ns)]
            return float(inside.max()) if len(inside) else None
    return None


def utilisation(samples: Samples, span: Span) -> dict[str, float]:
    """The part of the time that each core was busy, by its name: cpu0, cpu1, …"""
    parts = {}
    for _, channel in channels(samples):
        core = channel.name.removesuffix("_time_s")
        if channel.counter and core.startswith("cpu") and core[3:].isdigit():
            busy_s = growth(samples, channel.name, span)
            if busy_s is not None and span.time_s > 0:
                parts[core] = min(busy_s / span.time_s, 1.0)
    return parts


def energies(samples: Samples, span: Span) -> list[Energy]:
    """One for each source that measures power or energy."""
    return [energy for series in samples.series if (energy := _energy(series, span)) is not None]


def chosen(energies: Sequence[Energy]) -> Energy | None:
    """The energy of the machine; see the module's docstring."""
    measured = [energy for energy in energies if energy.kind != "modelled"]
    whole = [energy for energy in measured if energy.source in WHOLE_DEVICE]
    if whole:
        return whole[0]
    if measured:
        kind: Kind = "measured" if all(energy.kind == "measured" for energy in measured) else "derived"
        return Energy(" + ".join(e.source for e in measured), kind, sum(e.energy_j for e in measured))
    return energies[0] if energies else None


def quiet(samples: Samples, span: Span) -> Quiet:
    """Load of others, steal and pressure."""
    cores = utilisation(samples, span)
    own = growth(samples, "process_time_s", span)
    others = None if not cores or own is None else max(sum(cores.values()) - own / span.time_s, 0.0)
    stolen = growth(samples, "steal_time_s", span)
    steal = None if stolen is None else stolen / span.time_s
    waits = [growth(samples, f"pressure_{what}_s", span) for what in ("memory", "io")]
    known_waits = [wait / span.time_s for wait in waits if wait is not None]
    pressure = max(known_waits) if known_waits else None
    limits = ((others, MAX_OTHERS), (steal, MAX_STEAL), (pressure, MAX_PRESSURE))
    known = [part <= limit for part, limit in limits if part is not None]
    verdict: Verdict = "unknown" if not known else "quiet" if all(known) else "noisy"
    return Quiet(verdict, others, steal, pressure)


def channels(samples: Samples) -> Iterator[tuple[Series, Channel]]:
    for series in samples.series:
        for channel in series.channels:
            yield series, channel


def _column(series: Series, channel: Channel) -> tuple[Times, Floats]:
    """The readings that there are."""
    _, values = series.column(channel.name)
    known = np.isfinite(values)
    return series.at_ns[known], values[known]


def _growth(at: Times, total: Floats, span: Span) -> float | None:
    overlap = _overlap(at, span)
    if overlap is None:
        return None
    ends = np.interp([overlap.begin_ns, overlap.end_ns], at, total)
    return float(ends[1] - ends[0]) * span.time_s / overlap.time_s


def _mean(at: Times, values: Floats, span: Span) -> float | None:
    overlap = _overlap(at, span)
    if overlap is None:
        return None
    inside = (at > overlap.begin_ns) & (at < overlap.end_ns)
    places = np.concatenate([[overlap.begin_ns], at[inside], [overlap.end_ns]]).astype(float)
    levels = np.interp(places, at, values)
    return float(np.sum((levels[1:] + levels[:-1]) / 2 * np.diff(places)) / (overlap.end_ns - overlap.begin_ns))


def _overlap(at: Times, span: Span) -> Span | None:
    """The part of the span that the readings reach over: most of it, or None."""
    if len(at) < 2:
        return None
    overlap = Span(max(int(at[0]), span.begin_ns), min(int(at[-1]), span.end_ns))
    return overlap if overlap.time_s > 0 and overlap.time_s >= MIN_COVERED * span.time_s else None


def _energy(series: Series, span: Span) -> Energy | None:
    """Counters of joules where there are any, else power over time."""
    for unit in ("J", "W"):
        outer = outermost(series.channels, "J" if unit == "J" else "W")
        amounts = [
            _growth(*_column(series, c), span) if c.counter else _over_time(_mean(*_column(series, c), span), span)
            for c in outer
        ]
        known = [(c, amount) for c, amount in zip(outer, amounts, strict=True) if amount is not None]
        if known:
            kinds = {channel.kind for channel, _ in known}
            kind: Kind = kinds.pop() if len(kinds) == 1 else "derived"
            off = [c.plus_minus for c, _ in known if c.plus_minus is not None]
            return Energy(series.name, kind, sum(amount for _, amount in known), max(off) if off else None)
    return None


def _over_time(level: float | None, span: Span) -> float | None:
    return None if level is None else level * span.time_s
