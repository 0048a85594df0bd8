"""How often the sampler reads each source: as often as it says something new and as its cost allows.

In:  the sources of one run with what a read of each costs. Out: `every` of each: every so many ticks.

Power and the CPU time of the process are what ops are told apart by: they are slowed down last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from edgetrain.measure.sensors import process_time
from edgetrain.measure.sensors.source import Source
from edgetrain.measure.series import MAX_EVERY, Series
from edgetrain.measure.ticks import Clock

_READS_SHARE = 0.005  # of one core, for all reads together; waking up and writing take as much again
_OTHERS_SHARE = 0.001  # of it, for what does not tell ops apart
_FINE_S = 0.05  # a counter that needs longer windows does not tell ops apart
_CHEAP_S = 20e-6  # a read: to read such a source less often saves little
_TELLING_FACTOR = 8  # a source that tells ops apart may take so many times what another may
_EXPENSIVE_S, _MAX_EVERY_EXPENSIVE = 1e-3, 64  # a source whose reads take longer is read less often still
_POWER = {"J", "W", "A", "V"}
_PAUSE_NS = 5_000_000


def pace(series: Sequence[Series], period_ns: int) -> None:
    """Read expensive sources less often, until the reads take no more than their share of a core."""
    others = [each for each in series if not _tells_ops_apart(each.source)]
    for part, limit in ((others, _OTHERS_SHARE), (series, _READS_SHARE)):
        while share(part, period_ns) > limit and slow_down(part):
            pass


def share(series: Sequence[Series], period_ns: int) -> float:
    """The part of one core that the reads take."""
    return sum(each.cost_s / each.every for each in series) / (period_ns * 1e-9)


def slow_down(series: Sequence[Series]) -> bool:
    """Read the source that costs most half as often. False: none can be slowed down.

    A source that tells ops apart may cost several times what others do, and is left alone where its reads are cheap.
    """
    candidates = [each for each in series if each.free and each.every < _max_every(each) and not _is_kept(each)]
    if candidates:
        slowest = max(candidates, key=_weighted_cost_s)
        slowest.every = min(2 * slowest.every, _max_every(slowest))
    return bool(candidates)


def _is_kept(series: Series) -> bool:
    return _tells_ops_apart(series.source) and series.cost_s < _CHEAP_S


def _weighted_cost_s(series: Series) -> float:
    return series.cost_s / series.every / (_TELLING_FACTOR if _tells_ops_apart(series.source) else 1)


def _max_every(series: Series) -> int:
    return _MAX_EVERY_EXPENSIVE if series.cost_s > _EXPENSIVE_S else MAX_EVERY


def _tells_ops_apart(source: Source) -> bool:
    """Power, and the CPU time of the process."""
    fine = [channel for channel in source.channels if channel.least_window_s <= _FINE_S]
    return source.name == process_time.NAME or any(channel.unit in _POWER for channel in fine)


def costs_s(sources: Sequence[Source], clock: Clock) -> list[float]:
    """CPU seconds of one read of each: the median of five, after one that opens.

    With pauses as between ticks, because caches that are warm would make reads look half as expensive; in turns,
    because the first one finds them coldest.
    """
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
