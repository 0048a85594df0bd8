"""The memory that is available, as `memory.py` counts it, read at every sample from files that stay open.

/proc/meminfo takes the kernel longer than other files: on many cores a read costs 50 µs and more.
"""

from __future__ import annotations

from pathlib import Path

from edgetrain.machine import amount
from edgetrain.measure.sensors.groups import folders
from edgetrain.measure.sensors.memory import UNLIMITED, group_files
from edgetrain.measure.sensors.source import Channel, Files, Found, OpenFile, not_readable, readable, whole

NAME = "memory"
GIVES = "memory that the process can still take"
RESOLUTION = "1 kB"


class AvailableMemory(Files):
    """mem_available_bytes: the least that the machine and the process's control groups leave."""

    def __init__(self, path: Path, groups: list[tuple[Path, Path, Path, bytes]]) -> None:
        files = [OpenFile(path)]
        for limit, used, stat, _ in groups:
            files += [OpenFile(limit), OpenFile(used), OpenFile(stat)]
        super().__init__(NAME, (Channel("mem_available_bytes", "B", False, "measured"),), tuple(files))
        self._keys = tuple(group[3] for group in groups)

    def read(self) -> tuple[float | None, ...]:
        free, left = amount(self.files[0].read() or b"", b"MemAvailable:"), self._left_by_groups()
        if free is None or left is None:
            return (None,)
        return (float(max(0, min([free * 1024, *left]))),)

    def _left_by_groups(self) -> list[int] | None:
        """None where a group's files cannot be read any more: the machine's memory alone would be too much."""
        left = []
        for n, key in enumerate(self._keys):
            limit, used, stat = self.files[1 + 3 * n : 4 + 3 * n]
            contents = limit.read()
            most, taken = whole(contents), used.number()
            if contents is None or (most is None and contents.strip() != b"max") or taken is None:
                return None
            if most is not None and most < UNLIMITED:
                left.append(most - max(0, taken - (amount(stat.read() or b"", key) or 0)))
        return left


def find(root: Path, pid: int) -> Found:
    path = root / "proc/meminfo"
    bad = not_readable(NAME, GIVES, RESOLUTION, [path])
    if bad is not None:
        return bad
    groups = [group_files(folder, version) for folder, version in folders(root, "memory", pid)]
    return readable(AvailableMemory(path, [g for g in groups if g[0].exists()]), GIVES, RESOLUTION)
