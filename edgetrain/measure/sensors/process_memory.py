"""Memory of one process: resident now, and the most that it ever was, from /proc/<pid>/status (VmRSS, VmHWM).

The kernel gathers the pages of a thread in batches (64 pages at most a core), so a reading may be some 100 kB behind.
"""

from __future__ import annotations

from pathlib import Path

from edgetrain.machine import amount
from edgetrain.measure.sensors.source import Channel, Files, Found, OpenFile, not_readable, readable

NAME = "process memory"
GIVES = "resident memory of the process, its peak"
RESOLUTION = "1 kB, up to 64 pages a core behind"
_KEYS = (b"VmRSS:", b"VmHWM:")


class ProcessMemory(Files):
    def __init__(self, path: Path) -> None:
        names = ("process_resident_bytes", "process_peak_bytes")
        super().__init__(NAME, tuple(Channel(name, "B", False, "measured") for name in names), (OpenFile(path),))

    def read(self) -> tuple[float | None, ...]:
        return parse(self.files[0].read())


def parse(data: bytes | None) -> tuple[float | None, float | None]:
    """Bytes resident and at the peak; None for a process that has ended (a zombie has no such lines)."""
    kilobytes = (amount(data or b"", key) for key in _KEYS)
    resident, peak = (None if number is None else number * 1024.0 for number in kilobytes)
    return resident, peak


def find(root: Path, pid: int) -> Found:
    path = root / "proc" / str(pid) / "status"
    bad = not_readable(NAME, GIVES, RESOLUTION, [path])
    if bad is not None:
        return bad
    return readable(ProcessMemory(path), GIVES, RESOLUTION)
