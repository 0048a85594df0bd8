"""Sources for the tests of the sampler: plain Python, loaded in the sampler's process too."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from edgetrain.measure.sensors.source import Channel, Unit


class Fake:
    """Gives what `values` gives."""

    def __init__(self, name: str = "fake", units: Sequence[Unit] = ("J",)) -> None:
        self.name = name
        self.channels = tuple(Channel(f"{name}{n}", unit, unit == "J", "measured") for n, unit in enumerate(units))
        self.opened = 0

    def open(self) -> None:
        self.opened += 1

    def read(self) -> tuple[float | None, ...]:
        return tuple(float(n) for n in range(len(self.channels)))

    def close(self) -> None:
        self.opened -= 1


class Watts(Fake):
    """A meter of a constant power: joules since the machine started."""

    def __init__(self, watts: float) -> None:
        super().__init__("meter")
        self.watts = watts

    def read(self) -> tuple[float | None, ...]:
        return (time.monotonic_ns() * 1e-9 * self.watts,)


class FileNumber(Fake):
    """The number in a file; nothing where there is none."""

    def __init__(self, path: Path) -> None:
        super().__init__("file")
        self.path = path

    def read(self) -> tuple[float | None, ...]:
        try:
            return (float(self.path.read_text()),)
        except (OSError, ValueError):
            return (None,)


class Raises(Fake):
    """Breaks what sources promise."""

    def read(self) -> tuple[float | None, ...]:
        raise RuntimeError("no such luck")


class Loaded(Fake):
    """1 where PyTorch or NumPy is loaded in the process that reads."""

    def read(self) -> tuple[float | None, ...]:
        return (float("torch" in sys.modules or "numpy" in sys.modules),)


class Sticks(Fake):
    """Does not come back once the file is there."""

    def __init__(self, path: Path) -> None:
        super().__init__("sticks")
        self.path = path

    def read(self) -> tuple[float | None, ...]:
        while self.path.exists():
            time.sleep(0.01)
        return (1.0,)


class Prints(Fake):
    """Writes to the output of its process, as libraries do."""

    def read(self) -> tuple[float | None, ...]:
        os.write(1, b'{"summary": {}}\n')
        return (1.0,)
