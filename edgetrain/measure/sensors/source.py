"""What every sensor looks like from outside, and the open file that most of them read.

    find(root) ──▶ [(Finding, Source | None), …]        edgetrain/measure/sensors/__init__.py
                       │           │
              what doctor shows    open() · read() · read() · … · close()
                                            │
                                            └─ one value a channel, in the order of `channels`

Promised by every source: `read` never raises because of what a file holds or because it is gone; what is not to be had
now is None, never 0; what comes back later is read again. A counter only grows: wraparound is taken out, and where the
hardware starts again from 0 (a suspended laptop, a sensor that was unplugged) it goes on from its last value. A closed
source can be pickled, to be read in a process of its own, and needs neither PyTorch nor NumPy there.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

Kind = Literal["measured", "derived", "modelled", "unavailable"]
Unit = Literal["s", "J", "W", "B", "°C", "Hz", "V", "A", "1"]

_MAX_BYTES = 1 << 16  # more than any file that is read here; /proc/stat of 256 cores is 25 kB


@dataclass(frozen=True)
class Channel:
    """One value that a source gives.

    counter: a total that only grows (energy, CPU time), unwrapped: differences mean something; else a gauge.
    least_window_s: a counter's difference over less time than this is mostly rounding; 0 where any window will do.
    plus_minus: how far off a value may be, as a part of it, two times of three; None where nobody says.
    part_of: the channel that has this one in it already (a package holds its cores, a board's input its rails). Power
        and energy of a machine are the sum over the channels that are part of none: see `outermost`.
    """

    name: str
    unit: Unit
    counter: bool
    kind: Kind
    least_window_s: float = 0.0
    plus_minus: float | None = None
    part_of: str | None = None

    @property
    def label(self) -> str:
        """The name in words, without the unit that a value is shown with."""
        return _UNIT.sub("", self.name).replace("_", " ").strip() or self.name


_UNIT = re.compile(r"_(time_s|energy_j|power_w|frequency_hz|temperature_c|voltage_v|current_a|bytes|utilisation|c|s)$")


def outermost(channels: Iterable[Channel], unit: Unit) -> tuple[Channel, ...]:
    """Those of a unit, "W" or "J", that can be added up without counting anything twice."""
    return tuple(channel for channel in channels if channel.unit == unit and channel.part_of is None)


class Source(Protocol):
    """One sensor, or several that are read together."""

    name: str
    channels: tuple[Channel, ...]

    def open(self) -> None:
        """Open the files, and keep them open. What is missing is tried again at each read."""

    def read(self) -> tuple[float | None, ...]:
        """One value a channel; None where it is not to be had now."""

    def close(self) -> None:
        """Close the files; a second time does nothing."""


class Input(Protocol):
    """A file or a clock that a source reads: C can read it in the place of Python (`measure/batched_ticks.py`)."""

    is_clock: bool

    @property
    def handle(self) -> int:
        """The number of the clock, or of the open file; -1 where there is none now."""

    def preset(self, shown: bytes | int | None) -> None:
        """From now on a read gives this: what the file held, or the clock's nanoseconds; None where it showed none."""


@runtime_checkable
class Direct(Source, Protocol):
    """A source that reads nothing but these inputs: once they are preset, a `read` of it makes no system call."""

    def inputs(self) -> Sequence[Input]:
        """In the order in which they are to be read; none where this source must read for itself."""


@dataclass(frozen=True)
class Finding:
    """What was found of one source.

    found: it is there. readable: this user may read it. fix: the command that makes it readable, or what to install.
    resolution: how fine the values are, in words. gives: what it measures on this machine, in words.
    read_s: what one read takes here (median); None where it was not read.
    """

    name: str
    found: bool
    readable: bool
    fix: str | None
    resolution: str
    gives: str
    read_s: float | None
    channels: tuple[Channel, ...]


Found = tuple[Finding, Source | None]


def missing(name: str, gives: str, resolution: str, fix: str | None = None) -> Found:
    """A source that this machine does not have; fix: what would give it, where something would."""
    return Finding(name, False, False, fix, resolution, gives, None, ()), None


def unreadable(name: str, gives: str, resolution: str, fix: str) -> Found:
    return Finding(name, True, False, fix, resolution, gives, None, ()), None


def readable(source: Source, gives: str, resolution: str, fix: str | None = None) -> Found:
    """fix: what would let it measure more, where a part of it is closed to this user."""
    return Finding(source.name, True, True, fix, resolution, gives, None, source.channels), source


def not_readable(name: str, gives: str, resolution: str, paths: Sequence[Path], fix: str | None = None) -> Found | None:
    """What to report of a source none of whose files can be read; None where one can. fix: as in `missing`."""
    existing = [path for path in paths if path.exists()]
    if not existing:
        return missing(name, gives, resolution, fix)
    if any(may_read(path) for path in existing):
        return None
    return unreadable(name, gives, resolution, let_read(*existing))


def let_read(*paths: Path) -> str:
    """The command after which everybody may read these files."""
    return "sudo chmod a+r " + " ".join(str(path) for path in paths)


def plain(label: str) -> str:
    """A label as it can stand in a channel's name: letters, digits and _."""
    return re.sub(r"[^0-9A-Za-z]+", "_", label).strip("_") or "unnamed"


# ---- files and clocks


class OpenFile:
    """A small file of /proc or /sys that is kept open: one system call a read.

    A device that goes away makes reads fail for good on the old descriptor (ENODEV, ESRCH) while the path may come back
    to life: after a failure the path is opened again.
    """

    is_clock = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = -1
        self._preset: bytes | None = None
        self._is_preset = False

    def open(self) -> None:
        self._is_preset = False
        self._open()

    def _open(self) -> None:
        if self._handle < 0:
            with contextlib.suppress(OSError):
                self._handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def read(self) -> bytes | None:
        """What the file holds now; None where it cannot be read or is empty."""
        if self._is_preset:
            return self._preset
        data = self._read()
        if not data and self._handle >= 0:
            self.close()
            data = self._read()
        return data or None

    def _read(self) -> bytes:
        self._open()
        if self._handle < 0:
            return b""
        try:
            return os.pread(self._handle, _MAX_BYTES, 0)
        except OSError:
            return b""

    @property
    def handle(self) -> int:
        """Of the open file; -1 where it cannot be opened."""
        self._open()
        return self._handle

    def preset(self, shown: bytes | int | None) -> None:
        self._preset, self._is_preset = shown if isinstance(shown, bytes) and shown else None, True
        if self._preset is None:
            self.close()  # to be opened again

    def __del__(self) -> None:
        self.close()  # a source that nobody closed keeps no file open

    def number(self) -> int | None:
        """The whole number that the file holds and nothing else."""
        return whole(self.read())

    def close(self) -> None:
        if self._handle >= 0:
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = -1


class SystemClock:
    """A clock of this machine by its number, in seconds."""

    is_clock = True

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._preset: int | None = None
        self._is_preset = False

    def read(self) -> float | None:
        """None where there is no such clock any more: the process has ended."""
        if self._is_preset:
            return None if self._preset is None else self._preset * 1e-9
        try:
            return time.clock_gettime(self.handle)
        except OSError:
            return None

    def preset(self, shown: bytes | int | None) -> None:
        self._preset, self._is_preset = shown if isinstance(shown, int) else None, True


class Files:
    """The part of a source that is the same for all of them: files that are opened and closed together."""

    def __init__(self, name: str, channels: tuple[Channel, ...], files: tuple[OpenFile, ...]) -> None:
        self.name, self.channels, self.files = name, channels, files

    def open(self) -> None:
        for file in self.files:
            file.open()

    def inputs(self) -> Sequence[Input]:
        return self.files

    def close(self) -> None:
        for file in self.files:
            file.close()


@dataclass(frozen=True)
class Number:
    """A file that holds one whole number, and what the number means.

    factor: from the file's unit to the channel's. range_: where a counter starts again from 0, in the file's unit.
    least, most: outside of these, in the channel's unit, the sensor is not connected.
    """

    channel: Channel
    path: Path
    factor: float
    range_: int | None = None
    least: float = -math.inf
    most: float = math.inf


class Numbers(Files):
    """One whole number a file, one channel a file."""

    def __init__(self, name: str, numbers: Sequence[Number]) -> None:
        super().__init__(name, tuple(n.channel for n in numbers), tuple(OpenFile(n.path) for n in numbers))
        self._numbers = tuple(numbers)
        self._counters = tuple(Counter(n.range_) if n.channel.counter else None for n in numbers)

    def read(self) -> tuple[float | None, ...]:
        return tuple(
            _value(file.number(), number, counter)
            for file, number, counter in zip(self.files, self._numbers, self._counters, strict=True)
        )


def _value(shown: int | None, number: Number, counter: Counter | None) -> float | None:
    reading: float | None = shown if counter is None else counter.add(shown)
    if reading is None:
        return None
    value = reading * number.factor
    return value if number.least <= value <= number.most else None


def whole(data: bytes | None) -> int | None:
    """The whole number in a file's content; None where it holds anything else."""
    if data is None or len(data) > 24:  # 2**64 has 20 digits
        return None
    try:
        return int(data)
    except ValueError:
        return None


def digits(word: bytes) -> int | None:
    """The number that a word of digits is; None for any other word, and for numbers that no kernel writes."""
    return int(word) if len(word) <= 20 and word.isdigit() else None


def whole_numbers(words: Sequence[bytes]) -> list[int]:
    """Those that words of digits are; none where one of them is no such word. A long row is checked at once."""
    together = b"".join(words)
    if not together.isdigit() or max(map(len, words)) > 20:
        return []
    return [int(word) for word in words]


def text(path: Path) -> str | None:
    """The content of a small file that does not change; None where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip("\0 \n") or None
    except OSError:
        return None


def may_read(path: Path) -> bool:
    """Try it: the mode alone does not say (ACLs, kernels that refuse at the read)."""
    try:
        with open(path, "rb", buffering=0) as file:
            file.read(1)
    except PermissionError:
        return False
    except OSError:
        return True  # there, and not for want of a permission: it may answer later (a GPU that sleeps)
    return True


# ---- counters


class Counter:
    """From what the hardware shows to a total that only grows, from what it showed first.

        shown    90 ──▶ 97 ──▶ 4            range 100: it went round once
        total    90     97    104

    Without a range, or where going round would be absurd (more than half of the range between two reads), the hardware
    has started again: the total goes on from where it was, and what was spent between is lost, not invented.
    """

    def __init__(self, range_: int | None = None) -> None:
        self._range = range_
        self._last: float | None = None
        self._total = 0.0

    def add(self, shown: float | None) -> float | None:
        """The total now; None where nothing was shown, or what cannot be."""
        if shown is None or shown < 0 or (self._range is not None and shown > self._range):
            return None
        self._total += shown if self._last is None else self._step(shown - self._last)
        self._last = shown
        return self._total

    def _step(self, step: float) -> float:
        if step >= 0:
            return step
        if self._range is None or step + self._range > self._range / 2:
            return 0.0
        return step + self._range
