"""What this machine can measure of itself: one file a source, each under a root folder that tests replace.

`find` looks for all of them. `source.py` says what a source is.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

from edgetrain.measure.sensors import (
    android,
    available_memory,
    core_time,
    cpu_frequency,
    group_time,
    hwmon,
    ina3221,
    jetson_gpu,
    nvidia,
    power_supply,
    pressure,
    process_memory,
    process_time,
    rapl,
    rpi_pmic,
    rpi_throttled,
    thermal,
)
from edgetrain.measure.sensors.source import Channel, Finding, Found, Kind, Source, outermost

__all__ = ["Channel", "Finding", "Kind", "Source", "find", "gives_power", "outermost"]

_MAX_S = 0.2
_OF_THE_PROCESSOR = (rapl.NAME, ina3221.NAME, power_supply.NAME, rpi_pmic.NAME)


def find(
    root: Path = Path("/"), *, pid: int | None = None, reads: int = 5, phones: bool = False
) -> list[tuple[Finding, Source | None]]:
    """Every source: what was found of it, and the source itself where it can be read.

    pid: of the process to watch; this one unless given. reads: how often each is read to time it (fewer where it is
    slow). phones: ask adb too, which starts its server.
    """
    watched = os.getpid() if pid is None else pid
    sources = [
        process_time.find(root, watched),
        core_time.find(root),
        group_time.find(root, watched),
        process_memory.find(root, watched),
        available_memory.find(root, watched),
        pressure.find(root),
        rapl.find(root),
        hwmon.find(root),
        ina3221.find(root),
        power_supply.find(root),
        rpi_pmic.find(root),
        rpi_throttled.find(root),
        cpu_frequency.find(root),
        thermal.find(root),
        jetson_gpu.find(root),
        nvidia.find(root),
    ]
    if phones:
        sources.append(android.find())
    return [timed(*each, reads=reads) for each in _nested(sources)]


def _nested(sources: list[Found]) -> list[Found]:
    """Where a battery measures what the whole machine takes, the watts of its chips are in there already."""
    if not any(channel.name == power_supply.TOTAL for finding, _ in sources for channel in finding.channels):
        return sources
    nested = []
    for finding, source in sources:
        if source is not None and finding.name in (hwmon.NAME, nvidia.NAME):
            source.channels = tuple(_inside(channel) for channel in source.channels)
            finding = replace(finding, channels=source.channels)
        nested.append((finding, source))
    return nested


def _inside(channel: Channel) -> Channel:
    outer = channel.unit == "W" and channel.part_of is None
    return replace(channel, part_of=power_supply.TOTAL) if outer else channel


def timed(finding: Finding, source: Source | None, *, reads: int) -> Found:
    """The same with the median time of a read, over `reads` reads or as many as fit into a fifth of a second."""
    if source is None or reads < 1:
        return finding, source
    source.open()
    source.read()  # the first one opens what was not open
    taken: list[float] = []
    while len(taken) < reads and sum(taken) < _MAX_S:
        start = time.perf_counter()
        source.read()
        taken.append(time.perf_counter() - start)
    source.close()
    return replace(finding, read_s=statistics.median(taken)), source


def gives_power(sources: list[tuple[Finding, Source | None]]) -> bool:
    """Whether a sensor measures now what the processor takes, alone or with the whole machine.

    A GPU's own power is not that, nor is a battery's while the machine is on mains. Where no sensor does, energy is
    modelled (`measure/power_model.py`).
    """
    for finding, source in sources:
        if source is None or finding.name not in _OF_THE_PROCESSOR:
            continue
        source.open()
        readings = list(zip(source.channels, source.read(), strict=True))
        source.close()
        if any(value is not None and c.unit in ("W", "J") and c.part_of is None for c, value in readings):
            return True
    return False
