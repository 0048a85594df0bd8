"""Busy time of every core, and time that a hypervisor gave to others (steal), from /proc/stat.

    cpu0 1495634 1041552 226315 1917456 7427 0 369 28981 0 0
         user    nice    system idle    iowait irq softirq steal guest guest_nice     in ticks of 10 ms

Busy is user + nice + system + irq + softirq (guests are in user already). A tick is 10 ms: a difference over less than
200 ms is mostly rounding, and the channels say so (`least_window_s`).
"""

from __future__ import annotations

import os
from pathlib import Path

from edgetrain.measure.sensors.source import (
    Channel,
    Counter,
    Files,
    Found,
    OpenFile,
    missing,
    not_readable,
    readable,
    whole_numbers,
)

NAME = "core time"
GIVES = "busy time of each core, steal"
MIN_WINDOW_S = 0.2


class CoreTime(Files):
    """Channels cpu_time_s (all cores), cpu0_time_s, cpu1_time_s, …, steal_time_s."""

    def __init__(self, path: Path, cores: tuple[str, ...], tick_s: float) -> None:
        names = (*(f"{core}_time_s" for core in cores), "steal_time_s")
        channels = tuple(Channel(name, "s", True, "measured", least_window_s=MIN_WINDOW_S) for name in names)
        super().__init__(NAME, channels, (OpenFile(path),))
        self._cores, self._tick_s = cores, tick_s
        self._totals = tuple(Counter() for _ in names)

    def read(self) -> tuple[float | None, ...]:
        rows = parse(self.files[0].read())
        shown = [rows.get(core, (None, None))[0] for core in self._cores]
        steal = rows.get("cpu", (None, None))[1]
        return tuple(
            total.add(None if ticks is None else ticks * self._tick_s)
            for total, ticks in zip(self._totals, (*shown, steal), strict=True)
        )


def parse(data: bytes | None) -> dict[str, tuple[int, int | None]]:
    """Busy and stolen ticks by core; "cpu" is all of them. What is no such line is left out."""
    ticks_by_core: dict[str, tuple[int, int | None]] = {}
    for line in (data or b"").split(b"\n"):
        if not line.startswith(b"cpu"):
            break
        name, *words = line.split()
        ticks = whole_numbers(words)
        if len(ticks) >= 7:
            ticks_by_core[name.decode(errors="replace")] = (
                sum(ticks[:3]) + sum(ticks[5:7]),
                ticks[7] if len(ticks) > 7 else None,
            )
    return ticks_by_core


def find(root: Path) -> Found:
    path = root / "proc/stat"
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    resolution = f"{tick_s * 1e3:.0f} ms ticks; use over 200 ms and more"
    bad = not_readable(NAME, GIVES, resolution, [path])
    if bad is not None:
        return bad
    cores = tuple(parse(OpenFile(path).read()))
    if not cores:
        return missing(NAME, GIVES, resolution)
    return readable(CoreTime(path, cores, tick_s), GIVES, resolution)
