"""The memory that is available to this process: of the machine, of its control groups, and how hard it is to get.

In:  /proc/meminfo, /proc/self/cgroup, the files of control groups (version 1 and 2), /proc/pressure/memory; all under a
     root folder.
Out: bytes. What cannot be read is left out; what nobody tells is None, never 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 writes a number of this size where there is no limit


@dataclass(frozen=True)
class Memory:
    """
    available_bytes: what the process can still take: the least that the machine and its control groups leave. Cached
        files that can be dropped count as free.
    limit_bytes: the least of the machine's memory and the limits of the control groups.
    pressure: the part of the last ten seconds in which somebody waited for memory; None where the kernel does not say.
    """

    available_bytes: int
    limit_bytes: int
    pressure: float | None


def memory(root: str | Path = "/") -> Memory | None:
    """None where the system does not tell."""
    root = Path(root)
    found = _meminfo(root)
    if "MemAvailable" not in found or "MemTotal" not in found:
        return None
    available, limit = found["MemAvailable"], found["MemTotal"]
    for left, most in _groups(root):
        available, limit = min(available, left), min(limit, most)
    return Memory(max(0, available), limit, _pressure(root))


def _meminfo(root: Path) -> dict[str, int]:
    rows = (line.replace(":", "").split() for line in (_text(f"{root}/proc/meminfo") or "").splitlines())
    return {row[0]: int(row[1]) * 1024 for row in rows if len(row) > 1 and row[1].isdigit()}


def _groups(root: Path) -> list[tuple[int, int]]:
    """For each control group with a limit, from this process up: what it leaves, and the limit."""
    found = []
    for folder, version in _folders(root, _text(f"{root}/proc/self/cgroup") or ""):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used = _number(f"{folder}/{names[0]}"), _number(f"{folder}/{names[1]}")
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        found.append((limit - max(0, used - _stat(f"{folder}/memory.stat", names[2])), limit))
    return found


@functools.lru_cache(maxsize=4)  # it is asked many times a second
def _folders(root: Path, told: str) -> tuple[tuple[Path, int], ...]:
    """The folders of the groups that /proc/self/cgroup tells of, and their version."""
    found = []
    for line in told.splitlines():
        number, controllers, path = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
        if version == 2 and (root / "sys/fs/cgroup/unified").is_dir():
            top = root / "sys/fs/cgroup/unified"
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [(top.joinpath(*parts[:n]), version) for n in range(len(parts), -1, -1)]
    return tuple(found)


def _text(path: str) -> str | None:
    try:
        with open(path) as file:  # a Path takes longer to make than the file to read
            return file.read()
    except OSError:
        return None


def _number(path: str) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.isdigit() else None


def _stat(path: str, name: str) -> int:
    rows = (line.split() for line in (_text(path) or "").splitlines())
    return next((int(row[1]) for row in rows if row[0] == name), 0)


def _pressure(root: Path) -> float | None:
    """From the line "some avg10=1.23 avg60=… avg300=… total=…", in percent there."""
    words = (_text(f"{root}/proc/pressure/memory") or "").split()
    return next((float(word[6:]) / 100 for word in words if word.startswith("avg10=")), None)
