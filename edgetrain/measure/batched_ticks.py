"""The sampler's ticks in runs of up to 0.25 s: C sleeps and reads, Python comes after each run.

    ticks     x    x    x    x  · · ·  x     C (native/ticks.c): clocks, and what files hold
                                       └──▶  Python: makes rows of these, reads the other sources, writes

To wake Python costs more than all that it reads in a tick: its caches are cold each time. Rows, slots, lateness and
missed ticks mean what they mean in `recorder.Recorder`, which does the same in Python where there is no compiler; a
source that Python must read (a driver's library) is read after the run in which it is due, and makes runs as short as
its period.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

from edgetrain.measure.sensors.source import Direct, Input
from edgetrain.measure.series import Notes, Series
from edgetrain.measure.ticks import Clock, Stop, Ticks
from edgetrain.native.ticks import NOTHING, Lane, Reading

MAX_RUN_NS = 250_000_000
_TEXT_BYTES = 1 << 20  # what files may hold in one run; half of it must be free at each tick
_FIELDS = len(Reading._fields_)


def possible(series: Sequence[Series]) -> bool:
    """Every source that is read at each tick can be read in C."""
    return all(each.every > 1 or _inputs(each) for each in series)


class BatchedTicks:
    """One run of ticks after the other. offsets: from the start of a slot to its tick, over and over."""

    def __init__(
        self, series: Sequence[Series], library: ctypes.CDLL, offsets: Sequence[int], period_ns: int, ticks: Ticks
    ) -> None:
        self.library, self.offsets, self.period_ns, self.ticks = library, offsets, period_ns, ticks
        self.direct = [(each, _inputs(each)) for each in series if _inputs(each)]
        self.others = [each for each in series if not _inputs(each)]
        self.read_at = {each.number: -each.every for each in self.others}
        max_ticks = max(1, MAX_RUN_NS // period_ns)
        self.due, self.ends, self.woke = ((ctypes.c_int64 * max_ticks)() for _ in range(3))
        self.n_lanes = sum(len(inputs) for _, inputs in self.direct)
        self.readings = (Reading * (self.n_lanes * max_ticks))()
        self.text = ctypes.create_string_buffer(_TEXT_BYTES)

    def run(self, stop: Stop, clock: Clock, notes: Notes, first_ns: int, slot: int) -> tuple[int, bool]:
        """A run of ticks from this slot on: the next slot, and whether to go on."""
        count = min([len(self.due), *(max(1, each.every) for each in self.others)])
        for n in range(count):
            start = first_ns + (slot + n) * self.period_ns
            self.due[n], self.ends[n] = start + self.offsets[(slot + n) % len(self.offsets)], start + self.period_ns
        n_woken = self.library.et_sample_ticks(
            ctypes.c_int64(slot), self.due, self.ends, count, self._lanes(), self.n_lanes, self.woke, self.readings,
            self.text, ctypes.c_int64(_TEXT_BYTES), ctypes.byref(stop.flag),
        )  # fmt: skip
        due, woke = self.due[:n_woken], self.woke[:n_woken]
        delivered, n = [], 0
        while n < n_woken:
            woke_slot = self.ticks.note(due[n], woke[n], first_ns, slot + n, self.period_ns)
            if woke_slot == slot + n:
                delivered.append(n)
            n = max(n + 1, woke_slot - slot)  # a slot that is over is passed
        self._make_rows(slot, delivered, notes)
        self._read_others(slot + n, clock, notes)
        return slot + n, not stop.flag.value

    def _lanes(self) -> ctypes.Array[Lane]:
        """Anew for each run: a file that was gone may be open again."""
        return (Lane * self.n_lanes)(
            *(
                Lane(each.is_clock, each.handle, series.every, series.number)
                for series, inputs in self.direct
                for each in inputs
            )
        )

    def _make_rows(self, slot: int, ticks: Sequence[int], notes: Notes) -> None:
        """One of each source for each tick after this slot in which it was due."""
        readings, text = memoryview(self.readings).cast("B").cast("q"), memoryview(self.text)
        lane = 0
        for series, inputs in self.direct:
            for tick in ticks:
                if not series.is_due(slot + tick):
                    continue
                place = first = _FIELDS * (self.n_lanes * tick + lane)
                for each in inputs:
                    value, start = readings[place + 2], readings[place + 3]
                    content = value if each.is_clock else bytes(text[start : start + value])
                    each.preset(None if value == NOTHING else content)
                    place += _FIELDS
                times = itertools.chain((readings[first],), itertools.repeat(readings[place - 3]))
                series.sample(times.__next__, notes)
            lane += len(inputs)

    def _read_others(self, slot: int, clock: Clock, notes: Notes) -> None:
        for series in self.others:
            if slot - self.read_at[series.number] >= series.every:
                series.sample(clock.now_ns, notes)
                self.read_at[series.number] = slot


def _inputs(series: Series) -> Sequence[Input]:
    return series.source.inputs() if isinstance(series.source, Direct) else ()
