"""The memory that is available to this process: of the machine, of its control groups, and how hard it is to get.

In:  /proc/meminfo, /proc/self/cgroup, the files of control groups (version 1 and 2), /proc/pressure/memory; all under a
     root folder.
Out: bytes. What cannot be read is left out; what is not known is None, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgetrain.machine import amount
from edgetrain.measure.sensors.groups import folders
from edgetrain.measure.sensors.source import text

UNLIMITED = 1 << 60  # version 1 writes a number of this size where there is no limit


@dataclass(frozen=True)
class Memory:
    """Memory that a process can have.

    available_bytes: what the process can still take: the minimum over the machine and its control groups. Cached files
        that can be dropped count as free.
    limit_bytes: the minimum of the machine's memory and the limits of the control groups.
    pressure: the part of the last ten seconds in which somebody waited for memory; None where the kernel does not say.
    """

    available_bytes: int
    limit_bytes: int
    pressure: float | None


def memory(root: str | Path = "/") -> Memory | None:
    """None where the system does not say."""
    root = Path(root)
    content = _content(root / "proc/meminfo")
    free, total = amount(content, b"MemAvailable:"), amount(content, b"MemTotal:")
    if free is None or total is None:
        return None
    available, limit = free * 1024, total * 1024
    for left, most in _groups(root):
        available, limit = min(available, left), min(limit, most)
    return Memory(max(0, available), limit, _pressure(root))


def _groups(root: Path) -> list[tuple[int, int]]:
    """For each control group with a limit, from this process up: what it leaves, and the limit."""
    amounts = []
    for folder, version in folders(root, "memory"):
        limit_file, used_file, stat_file, key = group_files(folder, version)
        limit, used = _number(limit_file), _number(used_file)
        if limit is None or used is None or limit >= UNLIMITED:
            continue
        amounts.append((limit - max(0, used - (amount(_content(stat_file), key) or 0)), limit))
    return amounts


def group_files(folder: Path, version: int) -> tuple[Path, Path, Path, bytes]:
    """Of a control group: the file of its limit, of what it uses, of its statistics, and the line there that can go."""
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    else:
        names = ("memory.max", "memory.current", "inactive_file")
    return folder / names[0], folder / names[1], folder / "memory.stat", names[2].encode()


def _number(path: Path) -> int | None:
    content = text(path) or ""
    return int(content) if content.isdigit() else None


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _pressure(root: Path) -> float | None:
    """From the line "some avg10=1.23 avg60=… avg300=… total=…", in percent there."""
    words = _content(root / "proc/pressure/memory").decode(errors="replace").split()
    return next((float(word[6:]) / 100 for word in words if word.startswith("avg10=")), None)
