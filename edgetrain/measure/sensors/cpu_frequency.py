"""The clock of every core now: /sys/devices/system/cpu/cpu*/cpufreq/scaling_cur_freq, in kHz."""

from __future__ import annotations

import re
from pathlib import Path

from edgetrain.measure.sensors.source import Channel, Found, Number, Numbers, not_readable, readable

NAME = "cpu clock"
GIVES = "frequency of each core"
RESOLUTION = "1 kHz; what the kernel chose, or measured over its last tick"


def find(root: Path) -> Found:
    files = {
        int(path.name[3:]): path / "cpufreq/scaling_cur_freq"
        for path in (root / "sys/devices/system/cpu").glob("cpu*")
        if re.fullmatch(r"cpu\d+", path.name) and (path / "cpufreq/scaling_cur_freq").exists()
    }
    bad = not_readable(NAME, GIVES, RESOLUTION, list(files.values()))
    if bad is not None:
        return bad
    numbers = [
        Number(Channel(f"cpu{core}_frequency_hz", "Hz", False, "measured"), path, 1e3, least=1.0)
        for core, path in sorted(files.items())
    ]
    return readable(Numbers(NAME, numbers), f"{GIVES} ({len(numbers)})", RESOLUTION)
