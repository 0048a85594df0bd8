"""All sources of one sampling run, read tick by tick and written once a second.

In:  the sources (`series.py`), and where their blocks go. Out: why the recording ended.

Promised: no error of a source or of the disk reaches the training; each is said in the notes. What was written before
the disk was full can be read.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edgetrain.measure.batched_ticks import BatchedTicks, possible
from edgetrain.measure.pacing import share, slow_down
from edgetrain.measure.series import FLUSH_NS, Notes, Series
from edgetrain.measure.ticks import Clock, Stop, Ticks

MAX_CORE_SHARE = 0.015  # of one core, promised for a quiet machine
_SMALL_SHARE = 0.0005  # reads that take no more than this are not what makes a sampler expensive
_JUMP_NS = 20_000_000  # a clock that is only adjusted gains 0.5 ms a second at most


class Out(Protocol):
    """Where blocks go."""

    def write(self, data: bytes | memoryview) -> None: ...


@dataclass
class Recorder:
    """All sources of one run, and the file that they are written to."""

    series: Sequence[Series]
    out: Out
    clock: Clock
    notes: Notes
    period_ns: int
    ticks: Ticks = field(default_factory=Ticks)
    offset_ns: int = 0
    flushed_ns: int = 0
    flushed_cpu_ns: int = 0

    def run(self, stop: Stop, places: Sequence[float], library: ctypes.CDLL | None = None) -> str:
        """Sample until `stop` says so; the reason.

        places: where in the first half of their slots ticks lie, 0 to 1, over and over. library: reads in C what it
        can.
        """
        offsets = [int(place * self.period_ns / 2) for place in places]
        first = self.clock.now_ns()
        self.flushed_ns, self.flushed_cpu_ns = first, self.clock.cpu_ns()
        self.offset_ns = self.clock.wall_ns() - first
        batches = None
        if library is not None and possible(self.series):
            batches = BatchedTicks(self.series, library, offsets, self.period_ns, self.ticks)
        slot = 0
        while True:
            if batches is not None:
                slot, going_on = batches.run(stop, self.clock, self.notes, first, slot)
            else:
                slot, going_on = self._tick(stop, first, slot, offsets[slot % len(offsets)])
            if not going_on or stop.reason is not None:
                self.ticks.due = slot
                return (stop.reason or "asked") if self._flush() else "disk"
            if self.clock.now_ns() - self.flushed_ns >= FLUSH_NS:
                stop.look()
                if not self._flush():
                    return "disk"

    def _tick(self, stop: Stop, first: int, slot: int, offset: int) -> tuple[int, bool]:
        """One tick in Python: the next slot, and whether to go on."""
        due = first + slot * self.period_ns + offset
        self.clock.sleep_until(due)
        woke = self.clock.now_ns()
        if stop.reason is not None:
            return slot, False
        woke_slot = self.ticks.note(due, woke, first, slot, self.period_ns)
        if woke_slot > slot:  # its slot is over
            return woke_slot, True
        for series in self.series:
            if series.is_due(slot):
                series.sample(self.clock.now_ns, self.notes)
        return slot + 1, True

    def _flush(self) -> bool:
        """Write the rows so far, and look whether all is well. False: the disk takes no more."""
        now, cpu = self.clock.now_ns(), self.clock.cpu_ns()
        self._watch_the_wall_clock(now)
        passed, spent = now - self.flushed_ns, cpu - self.flushed_cpu_ns
        expensive = passed >= FLUSH_NS and spent > MAX_CORE_SHARE * passed
        if expensive and share(self.series, self.period_ns) > _SMALL_SHARE:
            slow_down(self.series)
        self.flushed_ns, self.flushed_cpu_ns = now, cpu
        try:
            for series in self.series:
                block = series.block()
                if block is not None:
                    self.out.write(block)
        except OSError as error:
            self.notes.say(f"Recording stopped: {disk_words(error)} What was recorded before can be read.")
            return False
        return True

    def _watch_the_wall_clock(self, now_ns: int) -> None:
        offset = self.clock.wall_ns() - now_ns
        jump, self.offset_ns = offset - self.offset_ns, offset
        if abs(jump) > _JUMP_NS:
            self.notes.say(
                f"The wall clock jumped by {jump / 1e9:+.2f} s (it was set, or the machine slept); times in the "
                "samples are of the monotonic clock and are right."
            )


def disk_words(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "the disk is full." if full else f"the samples cannot be written ({error.strerror or error})."
