"""The sampler's ticks in runs of up to 0.25 s: C sleeps and reads, Python comes after each run.

    ticks     x    x    x    x  · · ·  x     C (native/ticks.c): clocks, and what files hold
                                       └──▶  Python: makes rows of these, reads the other sources, writes

To wake Python costs more than all that it reads in a tick: its caches are cold each time. Rows, slots, lateness and
missed ticks mean what they mean in `sampling.Recorder.run`, which does the same in Python where there is no compiler; a
source that Python must read (a driver's library) is read after the run in which it is due, and makes runs as short as
its period.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgetrain.measure.sensors.source import Direct, Input
from edgetrain.native.ticks import NOTHING, Lane, Reading

if TYPE_CHECKING:
    from edgetrain.measure.sampling import Recorder, Series, Stop

LONGEST_RUN_NS = 250_000_000
_TEXT_BYTES = 1 << 20  # what files may hold in one run; half of it must be free at each tick
_FIELDS = len(Reading._fields_)


def possible(series: Sequence[Series]) -> bool:
    """Every source that is read at each tick can be read in C."""
    return all(one.every > 1 or _inputs(one) for one in series)


class BatchedTicks:
    """One run of ticks after the other, for a recorder."""

    def __init__(self, recorder: Recorder, library: ctypes.CDLL, offsets: Sequence[int]) -> None:
        self.recorder, self.library, self.offsets = recorder, library, offsets
        self.direct = [(one, _inputs(one)) for one in recorder.series if _inputs(one)]
        self.others = [one for one in recorder.series if not _inputs(one)]
        self.read_at = {one.number: -one.every for one in self.others}
        longest = max(1, LONGEST_RUN_NS // recorder.period_ns)
        self.due, self.ends, self.woke = ((ctypes.c_int64 * longest)() for _ in range(3))
        self.n_lanes = sum(len(inputs) for _, inputs in self.direct)
        self.readings = (Reading * (self.n_lanes * longest))()
        self.text = ctypes.create_string_buffer(_TEXT_BYTES)

    def run(self, stop: Stop, first_ns: int, slot: int) -> tuple[int, bool]:
        """A run of ticks from this slot on: the next slot, and whether to go on."""
        recorder, period_ns = self.recorder, self.recorder.period_ns
        count = min([len(self.due), *(max(1, one.every) for one in self.others)])
        for n in range(count):
            start = first_ns + (slot + n) * period_ns
            self.due[n], self.ends[n] = start + self.offsets[(slot + n) % len(self.offsets)], start + period_ns
        came = self.library.et_sample_ticks(
            ctypes.c_int64(slot), self.due, self.ends, count, self._lanes(), self.n_lanes, self.woke, self.readings,
            self.text, ctypes.c_int64(_TEXT_BYTES), ctypes.byref(stop.flag),
        )  # fmt: skip
        due, woke = self.due[:came], self.woke[:came]
        delivered, n = [], 0
        while n < came:
            passed = recorder.note(due[n], woke[n], first_ns, slot + n)
            if passed == slot + n:
                delivered.append(n)
            n = max(n + 1, passed - slot)  # its slot is over
        self._rows(slot, delivered)
        self._read_others(slot + n)
        return slot + n, not stop.flag.value

    def _lanes(self) -> ctypes.Array[Lane]:
        """Anew for each run: a file that was gone may be open again."""
        return (Lane * self.n_lanes)(
            *(Lane(each.is_clock, each.handle, one.every, one.number) for one, inputs in self.direct for each in inputs)
        )

    def _rows(self, slot: int, ticks: Sequence[int]) -> None:
        """One of each source for each tick after this slot in which it was due."""
        told, text = memoryview(self.readings).cast("B").cast("q"), memoryview(self.text)
        lane = 0
        for one, inputs in self.direct:
            for tick in ticks:
                if (slot + tick + one.number) % one.every:
                    continue
                place = first = _FIELDS * (self.n_lanes * tick + lane)
                for each in inputs:
                    value, start = told[place + 2], told[place + 3]
                    shown = value if each.is_clock else bytes(text[start : start + value])
                    each.tell(None if value == NOTHING else shown)
                    place += _FIELDS
                times = itertools.chain((told[first],), itertools.repeat(told[place - 3]))
                one.sample(times.__next__, self.recorder.notes)
            lane += len(inputs)

    def _read_others(self, slot: int) -> None:
        for one in self.others:
            if slot - self.read_at[one.number] >= one.every:
                one.sample(self.recorder.clock.now_ns, self.recorder.notes)
                self.read_at[one.number] = slot


def _inputs(one: Series) -> Sequence[Input]:
    return one.source.inputs() if isinstance(one.source, Direct) else ()
