"""One source as the sampler reads it: how often, and its rows that are not written yet.

In:  a source, with what one read of it costs. Out: blocks of rows for samples.bin (`samples_file.py`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgetrain.measure.sensors.source import Source

BLOCK = struct.Struct("<ii")  # the head of a block: source, rows
FLUSH_NS = 900_000_000  # a little less than whole runs of ticks in C take
MAX_EVERY = 32  # a source is read once in so many ticks at least
_RETRY_READS = 9  # a source that is gone is left alone for so many reads
_MAX_NOTES = 50


@dataclass(frozen=True)
class Paced:
    """A source, and how often it is read: every n-th tick, or as often as its cost allows."""

    source: Source
    every: int | None = None


@dataclass
class Notes:
    """Sentences, each said once and not too many of them."""

    said: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        if text not in self.said and len(self.said) < _MAX_NOTES:
            self.said.append(text)


def useful_every(source: Source, period_ns: int) -> int:
    """Every how many ticks a source says something new.

    A counter whose differences over less time are mostly rounding is read twice in that time.
    """
    window_s = min((channel.least_window_s for channel in source.channels), default=0.0)
    return max(1, min(round(window_s * 1e9 / period_ns / 2), MAX_EVERY))


class Series:
    """One source, and its rows that are not written yet.

    A tick meets cold caches: what `sample` does in the usual case is one line of calls that were looked up before.
    """

    def __init__(self, number: int, paced: Paced, cost_s: float, period_ns: int) -> None:
        self.number, self.source, self.cost_s = number, paced.source, cost_s
        self.every, self.free = paced.every or useful_every(paced.source, period_ns), paced.every is None
        self.row = struct.Struct(f"<qq{len(self.source.channels)}d")
        room = 2 * FLUSH_NS // (period_ns * self.every) + 2
        self.buffer, self.place = bytearray(BLOCK.size + room * self.row.size), BLOCK.size
        self.read, self.pack, self.size = self.source.read, self.row.pack_into, self.row.size
        self.reads = self.failed = self.wait = 0
        self.gone = False

    def is_due(self, slot: int) -> bool:
        """Not all of the slow ones in the same slot."""
        return (slot + self.number) % self.every == 0

    def sample(self, now_ns: Callable[[], int], notes: Notes) -> None:
        """Read once, with the time before and after."""
        if self.wait:
            self.wait -= 1
            return
        before = now_ns()
        try:
            values = self.read()
            after = now_ns()
            self.pack(self.buffer, self.place, before, after, *values)
            self.gone = False
        except (struct.error, OverflowError):  # a None among them: looked for only where it happens
            self._pack_known(before, after, values, notes)
        except Exception as error:  # whatever a source does, sampling goes on
            self._pack_nothing(before, now_ns(), f"{type(error).__name__}: {error}", notes)
        self.place += self.size
        self.reads += 1

    def _pack_known(self, before: int, after: int, values: Sequence[float | None], notes: Notes) -> None:
        count = len(self.source.channels)
        numbers = [_number(value) for value in values]
        if len(numbers) != count:
            self._pack_nothing(before, after, f"{len(numbers)} values for {count} channels", notes)
        elif all(map(math.isnan, numbers)):
            self._pack_nothing(before, after, "it gives nothing", notes)
        else:
            self.pack(self.buffer, self.place, before, after, *numbers)
            self.gone = False

    def _pack_nothing(self, before: int, after: int, why: str, notes: Notes) -> None:
        """The source is gone. That is said once, and it is tried again now and then."""
        self.pack(self.buffer, self.place, before, after, *[math.nan] * len(self.source.channels))
        if not self.gone:
            when = "from some moment on" if self.reads > self.failed else "from the start"
            notes.say(f"The source {self.source.name} could not be read {when} ({why[:200]}).")
        self.failed += 1
        self.gone, self.wait = True, _RETRY_READS

    def block(self) -> memoryview | None:
        """The rows so far as one block, and the buffer empty again."""
        end, self.place = self.place, BLOCK.size
        if end == BLOCK.size:
            return None
        BLOCK.pack_into(self.buffer, 0, self.number, (end - BLOCK.size) // self.size)
        return memoryview(self.buffer)[:end]


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan
