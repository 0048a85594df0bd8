"""CPU time of the control group that a process is in: a container, a service, a login session.

version 1   cpuacct.usage          one number, ns;  cpuacct.usage_percpu: one a core, ns
version 2   cpu.stat               "usage_usec 123456\\nuser_usec …"
"""

from __future__ import annotations

from pathlib import Path

from edgetrain.measure.sensors.groups import folders
from edgetrain.measure.sensors.source import (
    Channel,
    Counter,
    Files,
    Found,
    OpenFile,
    digits,
    let_read,
    may_read,
    missing,
    readable,
    unreadable,
    whole,
    whole_numbers,
)

NAME = "group time"
GIVES = "CPU time of the control group"


class GroupTime(Files):
    """Channels group_time_s and, in version 1, group_cpu0_time_s, group_cpu1_time_s, …"""

    def __init__(self, usage: Path, per_core: Path | None) -> None:
        files = (OpenFile(usage),) if per_core is None else (OpenFile(usage), OpenFile(per_core))
        self._cores = 0 if per_core is None else len(_numbers(OpenFile(per_core).read()))
        names = ("group_time_s", *(f"group_cpu{n}_time_s" for n in range(self._cores)))
        super().__init__(
            NAME, tuple(Channel(name, "s", True, "measured", least_window_s=0.01) for name in names), files
        )
        self._totals = tuple(Counter() for _ in names)

    def read(self) -> tuple[float | None, ...]:
        shown: list[float | None] = [seconds(self.files[0].read())]
        if self._cores:
            cores = [n * 1e-9 for n in _numbers(self.files[1].read())]
            shown += cores if len(cores) == self._cores else [None] * self._cores
        return tuple(total.add(value) for total, value in zip(self._totals, shown, strict=True))


def seconds(data: bytes | None) -> float | None:
    """From either version's file."""
    number = whole(data)
    if number is not None:
        return number * 1e-9
    for line in (data or b"").split(b"\n"):
        words = line.split()
        if len(words) == 2 and words[0] == b"usage_usec":
            microseconds = digits(words[1])
            return None if microseconds is None else microseconds * 1e-6
    return None


def _numbers(data: bytes | None) -> list[int]:
    return whole_numbers((data or b"").split())


def find(root: Path, pid: int) -> Found:
    resolution = "1 ns (version 1) or 1 µs (version 2), up to date at ticks of 1 to 10 ms"
    for folder, version in folders(root, "cpuacct", pid):
        usage = folder / ("cpuacct.usage" if version == 1 else "cpu.stat")
        if not usage.exists():
            continue
        if not may_read(usage):
            return unreadable(NAME, GIVES, resolution, let_read(usage))
        if seconds(OpenFile(usage).read()) is None:
            continue
        per_core = folder / "cpuacct.usage_percpu"
        source = GroupTime(usage, per_core if version == 1 and per_core.exists() else None)
        more = " and of each core in it" if len(source.channels) > 1 else ""
        return readable(source, GIVES + more, "1 ns" if version == 1 else "1 µs")
    return missing(NAME, GIVES, resolution)
