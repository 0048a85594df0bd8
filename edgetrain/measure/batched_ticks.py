"""The sampler's ticks in runs of up to 16: C sleeps and reads, Python comes after each run.

    ticks     x    x    x    x  · · ·  x     C (native/ticks.c): process clocks, files that hold one number
                                       └──▶  Python: makes rows of these, reads the other sources, writes

To wake Python costs more than all that it reads in a tick: its caches are cold each time. On two cores of a server this
way took half of the CPU time. Rows, slots, lateness and missed ticks mean what they mean in `sampling.Recorder.run`,
which does the same in Python where there is no compiler; a source that Python must read is read after the run in which
it is due.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from edgetrain.measure.sensors.source import Direct, Source
from edgetrain.native.ticks import NOTHING, Lane, Reading

if TYPE_CHECKING:
    from edgetrain.measure.sampling import Recorder, Series, Stop

LONGEST_RUN = 16  # ticks


def possible(series: Sequence[Series]) -> bool:
    """Every source that is read at each tick can be read in C."""
    return all(one.every > 1 or is_direct(one.source) for one in series)


def is_direct(source: Source) -> bool:
    return hasattr(source, "lanes") and hasattr(source, "of_numbers")


class BatchedTicks:
    """One run of ticks after the other, for a recorder."""

    def __init__(self, recorder: Recorder, library: ctypes.CDLL, offsets: Sequence[int]) -> None:
        self.recorder, self.library, self.offsets = recorder, library, offsets
        self.direct = [one for one in recorder.series if is_direct(one.source)]
        self.others = [one for one in recorder.series if not is_direct(one.source)]
        self.read_at = {one.number: -one.every for one in self.others}
        self.due, self.ends = (ctypes.c_int64 * LONGEST_RUN)(), (ctypes.c_int64 * LONGEST_RUN)()
        self.woke = (ctypes.c_int64 * LONGEST_RUN)()

    def run(self, stop: Stop, first_ns: int, slot: int) -> tuple[int, bool]:
        """A run of ticks from this slot on: the next slot, and whether it came to its end."""
        recorder, period_ns = self.recorder, self.recorder.period_ns
        count = min([LONGEST_RUN, *(max(1, one.every) for one in self.others)])
        for n in range(count):
            start = first_ns + (slot + n) * period_ns
            self.due[n], self.ends[n] = start + self.offsets[(slot + n) % len(self.offsets)], start + period_ns
        lanes, readings = self._lanes(count)
        came = self.library.et_ticks(
            ctypes.c_int64(slot), self.due, self.ends, count, lanes, len(lanes), self.woke, readings,
            ctypes.byref(stop.flag),
        )  # fmt: skip
        due, woke, told = self.due[:came], self.woke[:came], memoryview(readings).cast("B").cast("q").tolist()
        n = 0
        while n < came:
            passed = recorder.note(due[n], woke[n], first_ns, slot + n)
            if passed > slot + n:  # its slot is over
                n = passed - slot
                continue
            self._rows(slot + n, told, 3 * len(lanes) * n)
            n += 1
        self._read_others(slot + n)
        return slot + n, came == count

    def _lanes(self, count: int) -> tuple[ctypes.Array[Lane], ctypes.Array[Reading]]:
        """Anew for each run: a file that was gone may be open again."""
        lanes = [
            Lane(is_clock, handle, one.every)
            for one in self.direct
            for is_clock, handle in cast(Direct, one.source).lanes()
        ]
        return (Lane * len(lanes))(*lanes), (Reading * (len(lanes) * count))()

    def _rows(self, slot: int, told: list[int], place: int) -> None:
        """told: of each tick and lane the time before, the time after and the number, from `place` on of this tick."""
        for one in self.direct:
            end = place + 3 * len(one.source.channels)
            if slot % one.every == 0:
                numbers = [None if number == NOTHING else number for number in told[place + 2 : end : 3]]
                values = cast(Direct, one.source).of_numbers(numbers)
                one.take(told[place], told[end - 2], values, self.recorder.notes)
            place = end

    def _read_others(self, slot: int) -> None:
        for one in self.others:
            if slot - self.read_at[one.number] >= one.every:
                one.sample(self.recorder.clock.now_ns, self.recorder.notes)
                self.read_at[one.number] = slot
