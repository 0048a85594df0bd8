"""How often the sampler reads each source: as often as it says something new and as its cost allows.

In:  the sources of one run with what a read of each costs. Out: `every` of each: every so many ticks.

Power and the CPU time of the process are what ops are told apart by: they are slowed down last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgetrain.measure.sensors import process_time
from edgetrain.measure.sensors.source import Source

if TYPE_CHECKING:
    from edgetrain.measure.sampling import Clock, Series

_READS_SHARE = 0.005  # of one core, for all reads together; waking up and writing take as much again
_OTHERS_SHARE = 0.001  # of it, for what does not tell ops apart
_FINE_S = 0.05  # a counter that needs longer windows does not tell ops apart
_CHEAP_S = 20e-6  # a read: to read such a source less often saves little
_TELLING_MAY = 8  # times what another source may take
_SLOWEST = 32  # a source is read once in so many ticks at least
_DEAR_S, _SLOWEST_DEAR = 1e-3, 64  # and one whose reads take longer than this, once in so many
_POWER = {"J", "W", "A", "V"}
_PAUSE_NS = 5_000_000


def pace(series: Sequence[Series], period_ns: int) -> None:
    """Read the dear ones less often, until the reads take no more than their share of a core."""
    others = [one for one in series if not _tells(one)]
    for part, most in ((others, _OTHERS_SHARE), (series, _READS_SHARE)):
        while share(part, period_ns) > most and slow_down(part):
            pass


def share(series: Sequence[Series], period_ns: int) -> float:
    """Of one core, that the reads take."""
    return sum(one.cost_s / one.every for one in series) / (period_ns * 1e-9)


def slow_down(series: Sequence[Series]) -> bool:
    """Read the source that takes most half as often. What ops are told apart by may take several times what others do,
    and is left alone where its reads are cheap. False: none is left."""
    open_ = [
        one for one in series if one.free and one.every < _slowest(one) and not (_tells(one) and one.cost_s < _CHEAP_S)
    ]
    if open_:
        dearest = max(open_, key=lambda one: one.cost_s / one.every / (_TELLING_MAY if _tells(one) else 1))
        dearest.every = min(2 * dearest.every, _slowest(dearest))
    return bool(open_)


def _slowest(one: Series) -> int:
    return _SLOWEST_DEAR if one.cost_s > _DEAR_S else _SLOWEST


def _tells(one: Series) -> bool:
    return _tells_ops(one.source)


def useful(source: Source, period_ns: int) -> int:
    """Every how many ticks a source says something new: a counter whose differences over less are mostly rounding is
    read twice in that time."""
    least_s = min((channel.least_window_s for channel in source.channels), default=0.0)
    return max(1, min(round(least_s * 1e9 / period_ns / 2), _SLOWEST))


def _tells_ops(source: Source) -> bool:
    """Power and the CPU time of the process: what ops are told apart by."""
    fine = [channel for channel in source.channels if channel.least_window_s <= _FINE_S]
    return source.name == process_time.NAME or any(channel.unit in _POWER for channel in fine)


def costs_s(sources: Sequence[Source], clock: Clock) -> list[float]:
    """CPU seconds of one read of each: the median of five, after one that opens. With pauses as between ticks, because
    caches that are warm would make reads look half as dear; in turns, because the first one finds them coldest."""
    taken: list[list[int]] = [[] for _ in sources]
    for turn in range(6):
        clock.sleep_until(clock.now_ns() + _PAUSE_NS)
        for n in range(len(sources)):
            place = (n + turn) % len(sources)
            before = clock.cpu_ns()
            with contextlib.suppress(Exception):  # said where it is sampled
                sources[place].read()
            taken[place].append(clock.cpu_ns() - before)
    return [sorted(costs[1:])[2] / 1e9 for costs in taken]
