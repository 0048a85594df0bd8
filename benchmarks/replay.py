"""Recordings read by the sources that read a machine: the same files, the same parsers, moment by moment.

    Recording ──▶ Stage: files under a folder ──▶ find(folder): sources ──▶ Played: a row of values a moment

In:  a `Recording`: from a phone's sampler (`sensors/android.py`), or a published trace.
Out: `Played`, with the channels that the sources gave it and what they say of themselves (measured, derived).

The traces of EMDL'21 ("Towards Ubiquitous Learning", emdl21-phones) hold current in µA, voltage in µV, temperature in
0.1 °C, frequency in kHz and time in ms: what Android's files show.
"""

from __future__ import annotations

import csv
import itertools
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgetrain.errors import UserError
from edgetrain.files import require_regular
from edgetrain.measure.sensors import Channel, find
from edgetrain.measure.sensors.recording import Recording, Stage

_SUPPLY = "sys/class/power_supply"
_POWER = {
    "battery_current": f"{_SUPPLY}/battery/current_now",
    "battery_voltage": f"{_SUPPLY}/battery/voltage_now",
    "usb_current": f"{_SUPPLY}/usb/current_now",
    "usb_voltage": f"{_SUPPLY}/usb/voltage_now",
    "temperature": f"{_SUPPLY}/battery/temp",
}
_TYPES = {f"{_SUPPLY}/battery/type": "Battery", f"{_SUPPLY}/usb/type": "USB"}
_SIZES = {"K": 2**10, "M": 2**20, "G": 2**30}
_NOBODY = 2**22 + 1  # above every process number: a recording has no process of this machine


@dataclass(frozen=True)
class Played:
    """One row a moment, one value a channel."""

    times_s: tuple[float, ...]
    channels: tuple[Channel, ...]
    rows: tuple[tuple[float | None, ...], ...]

    def column(self, name: str) -> tuple[float | None, ...]:
        """The values of one channel."""
        names = [channel.name for channel in self.channels]
        if name not in names:
            raise UserError(f"the recording has no {name}", expected="one of " + ", ".join(names))
        n = names.index(name)
        return tuple(row[n] for row in self.rows)


def replay(recording: Recording) -> Played:
    """Put each moment's files down and let the sources read them."""
    with tempfile.TemporaryDirectory(prefix="edgetrain-replay-", dir=_in_memory()) as folder:
        root = Path(folder)
        # Sources are looked for where every file is there, also one that the recording has later on only.
        first = {path: (next((c for c in held if c is not None), None),) for path, held in recording.files.items()}
        Stage(root, Recording(recording.name, (0.0,), first, recording.constant)).show(0)
        sources = [source for _, source in find(root, pid=_NOBODY, reads=0) if source is not None]
        stage, rows = Stage(root, recording), []
        for n in range(len(recording.times_s)):
            stage.show(n)
            rows.append(tuple(value for source in sources for value in source.read()))
        for source in sources:
            source.close()
    channels = tuple(channel for source in sources for channel in source.channels)
    return Played(recording.times_s, channels, tuple(rows))


def _in_memory() -> str | None:
    """Where files cost no disk; None where there is no such place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


# ---- traces of EMDL'21


@dataclass(frozen=True)
class Trace:
    """One of their traces: what can be replayed, and what `top` told of the training process beside it.

    cpu: busy cores. virtual_bytes, resident_bytes: of the process. None while there is no such process.
    """

    recording: Recording
    cpu: tuple[float | None, ...]
    virtual_bytes: tuple[float | None, ...]
    resident_bytes: tuple[float | None, ...]


def read_trace(path: Path) -> Trace:
    """A processed_data_*.csv."""
    table = _Table(path, ("stamp", "VIRT", "RES", "cpuUsage"))
    files = {file: table.texts(column) for column, file in _POWER.items() if column in table.columns}
    recording = Recording(path.stem, table.seconds(), files, _TYPES if files else {})
    cpu = tuple(None if value is None else value / 100 for value in table.numbers("cpuUsage"))
    return Trace(recording, cpu, table.sizes("VIRT"), table.sizes("RES"))


def read_clocks(path: Path) -> Recording:
    """freq_temperature.csv: the battery's temperature and the clock of each core."""
    table = _Table(path, ("stamp", "temperature", "cpu0"))
    cores = [column for column in table.columns if column.startswith("cpu") and column[3:].isdigit()]
    files = {f"sys/devices/system/cpu/{core}/cpufreq/scaling_cur_freq": table.texts(core) for core in cores}
    files[_POWER["temperature"]] = table.texts("temperature")
    return Recording(path.stem, table.seconds(), files, {f"{_SUPPLY}/battery/type": "Battery"})


class _Table:
    """A CSV file of theirs, checked: the columns that are needed, numbers where numbers should be, nan for nothing."""

    def __init__(self, path: Path, needed: Sequence[str]) -> None:
        self.path = path
        try:
            with open(require_regular(path, "trace"), newline="", encoding="utf-8") as file:
                self._rows = list(csv.DictReader(file))
        except (OSError, UserError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{path} cannot be read as a trace", received=str(error)[:200]) from error
        self.columns = tuple(self._rows[0]) if self._rows else ()
        absent = [name for name in needed if name not in self.columns]
        if absent:
            raise UserError(
                f"{path} is no trace of EMDL'21", expected=f"columns {', '.join(needed)}", received=str(absent)
            )

    def texts(self, column: str) -> tuple[str | None, ...]:
        """As a kernel would have written them: whole numbers."""
        numbers = self.numbers(column)
        return tuple(None if number is None else str(round(number)) for number in numbers)

    def numbers(self, column: str) -> tuple[float | None, ...]:
        return tuple(self._number(row[column], column, 1.0) for row in self._rows)

    def sizes(self, column: str) -> tuple[float | None, ...]:
        """ "66M", "1.6G"."""
        found = []
        for row in self._rows:
            text = row[column] or ""
            factor = _SIZES.get(text[-1:], 1)
            found.append(self._number(text[:-1] if factor > 1 else text, column, factor))
        return tuple(found)

    def seconds(self) -> tuple[float, ...]:
        stamps = [stamp for stamp in self.numbers("stamp") if stamp is not None]
        rising = all(a <= b for a, b in itertools.pairwise(stamps))
        if len(stamps) != len(self._rows) or not rising:
            raise UserError(f"{self.path} has moments without a time, or in the wrong order")
        return tuple((stamp - stamps[0]) / 1e3 for stamp in stamps)

    def _number(self, text: str | None, column: str, factor: float) -> float | None:
        if text is None or text in ("", "nan"):
            return None
        try:
            number = float(text) * factor
        except ValueError as error:
            raise UserError(f"{self.path}: {column} is no number", received=repr(text[:40])) from error
        if not math.isfinite(number):
            raise UserError(f"{self.path}: {column} is no number", received=repr(text[:40]))
        return number
