"""Temperatures of the kernel's thermal zones: /sys/class/thermal/thermal_zone*/temp, in m°C, with their `type`.

A zone that is switched off refuses to be read, or shows something no silicon has (−274 °C): both are None.
"""

from __future__ import annotations

from collections import Counter as Count
from pathlib import Path

from edgetrain.measure.sensors.source import Channel, Found, Number, Numbers, not_readable, plain, readable, text

NAME = "temperature"
GIVES = "temperature of each zone"
RESOLUTION = "1 m°C written, often 1 °C meant"


def find(root: Path) -> Found:
    zones = sorted((root / "sys/class/thermal").glob("thermal_zone*"), key=lambda zone: (len(zone.name), zone.name))
    zones = [zone for zone in zones if (zone / "temp").exists()]
    bad = not_readable(NAME, GIVES, RESOLUTION, [zone / "temp" for zone in zones])
    if bad is not None:
        return bad
    names = [plain(text(zone / "type") or zone.name) for zone in zones]
    twice = {name for name, times in Count(names).items() if times > 1}
    numbers = [
        Number(
            _channel(f"{name}_{zone.name[12:]}" if name in twice else name), zone / "temp", 1e-3, least=-60, most=200
        )
        for zone, name in zip(zones, names, strict=True)
    ]
    return readable(Numbers(NAME, numbers), "temperature of " + ", ".join(names), RESOLUTION)


def _channel(name: str) -> Channel:
    return Channel(f"temp_{name}_c", "°C", False, "measured")
