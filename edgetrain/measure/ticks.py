"""The ticks of a sampler: when they are due, which came and how late, and what ends them.

    slot       0            1            2            3
          |──x─────────|─────x──────|x───────────|···          x: a tick, at a random place in the first half
             └─ due          └─ due                            of its slot of 10 ms

The places are random so that a step whose length is a multiple of the period is not always met at the same ops. Slots
hang on the start, so nothing drifts. A slot that is over before its tick came is missed: counted, never caught up.
"""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass, field

_BIN_NS, _BINS = 10_000, 10_000  # lateness in bins of 10 µs up to 100 ms
_BINNED_NS = _BIN_NS * _BINS


class Clock:
    """The clocks of this machine; tests have their own."""

    now_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)
    cpu_ns = staticmethod(time.process_time_ns)

    def sleep_until(self, due_ns: int) -> None:
        left = due_ns - time.monotonic_ns()
        if left > 0:
            time.sleep(left / 1e9)


@dataclass
class Stop:
    """Why to stop; None: go on.

    parent: the process to end with. The pipe to it shows its end, but a copy of the parent may hold that open; so it is
    looked for, too.
    """

    reason: str | None = None
    parent: int | None = None
    flag: ctypes.c_int = field(default_factory=ctypes.c_int)  # the same for C

    def say(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.flag.value = 1

    def look(self) -> None:
        if self.parent is not None and self.reason is None and os.getppid() != self.parent:
            self.say("parent ended")


@dataclass
class Ticks:
    """Which ticks came, and how late. The lateness of every one is kept in bins, so that a day takes no more room."""

    due: int = 0
    delivered: int = 0
    max_late_ns: int = 0
    bins: list[int] = field(default_factory=lambda: [0] * (_BINS + 1))

    def note(self, due_ns: int, woke_ns: int, first_ns: int, slot: int, period_ns: int) -> int:
        """Count the tick of a slot, and how late it came: the slot in which it did.

        A tick whose slot is over is not delivered. first_ns: the start of slot 0.
        """
        late = woke_ns - due_ns if woke_ns > due_ns else 0  # a sleep is rounded to a nanosecond or two
        self.bins[late // _BIN_NS if late < _BINNED_NS else _BINS] += 1
        if late > self.max_late_ns:
            self.max_late_ns = late
        woke_slot = max(slot, (woke_ns - first_ns) // period_ns)
        if woke_slot == slot:
            self.delivered += 1
            self.due = slot + 1
        return woke_slot

    def quantile_s(self, part: float) -> float | None:
        """The upper end of the bin that holds it."""
        left = part * sum(self.bins)
        for place, count in enumerate(self.bins):
            left -= count
            if count and left <= 0:
                return min((place + 1) * _BIN_NS, self.max_late_ns) / 1e9 if place < _BINS else self.max_late_ns / 1e9
        return None
