"""How long somebody had to wait for a core, for memory or for storage: /proc/pressure (PSI).

    some avg10=0.00 avg60=0.00 avg300=0.00 total=8533317323        µs in which at least one thread waited
    full …                                                         µs in which all did

The totals are counters: their difference over a run, as a part of its time, says how noisy the machine was.
"""

from __future__ import annotations

from pathlib import Path

from edgetrain.measure.sensors.source import (
    Channel,
    Counter,
    Files,
    Found,
    OpenFile,
    digits,
    missing,
    not_readable,
    readable,
)

NAME = "pressure"
GIVES = "time that was lost waiting for a core, memory, storage"
RESOLUTION = "1 µs"
_KINDS = ("cpu", "memory", "io")


class Pressure(Files):
    """Channels pressure_cpu_s, pressure_memory_s, pressure_io_s."""

    def __init__(self, folder: Path, kinds: tuple[str, ...]) -> None:
        channels = tuple(Channel(f"pressure_{kind}_s", "s", True, "measured") for kind in kinds)
        super().__init__(NAME, channels, tuple(OpenFile(folder / kind) for kind in kinds))
        self._totals = tuple(Counter() for _ in kinds)

    def read(self) -> tuple[float | None, ...]:
        return tuple(total.add(parse(file.read())) for total, file in zip(self._totals, self.files, strict=True))


def parse(data: bytes | None) -> float | None:
    """Seconds in which somebody waited."""
    words = (data or b"").split(b"\n", 1)[0].split()
    if not words or words[0] != b"some":
        return None
    total = digits(next((word[6:] for word in words if word.startswith(b"total=")), b""))
    return None if total is None else total * 1e-6


def find(root: Path) -> Found:
    folder = root / "proc/pressure"
    fix = "a kernel that was started with psi=1 (CONFIG_PSI)"
    bad = not_readable(NAME, GIVES, RESOLUTION, [folder / kind for kind in _KINDS], fix)
    if bad is not None:
        return bad
    # A kernel with PSI off has the files and refuses their reads (EOPNOTSUPP).
    kinds = tuple(kind for kind in _KINDS if parse(OpenFile(folder / kind).read()) is not None)
    if not kinds:
        return missing(NAME, GIVES, RESOLUTION, fix)
    return readable(Pressure(folder, kinds), GIVES, RESOLUTION)
