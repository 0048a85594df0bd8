"""Power, energy and temperatures of the chips that the kernel's hwmon knows.

    /sys/class/hwmon/hwmon2/name            amdgpu, coretemp, fam15h_power, …
                            power1_input    µW now;  power1_average: µW over the chip's own window
                            energy1_input   µJ, a counter
                            temp1_input     m°C
                            power1_label …  what it is of

INA3221 rails have a file of their own (`ina3221.py`), batteries too (`power_supply.py`): they are left out here.
"""

from __future__ import annotations

import re
from collections import Counter as Count
from pathlib import Path

from edgetrain.measure.sensors.source import (
    Channel,
    Found,
    Number,
    Numbers,
    let_read,
    may_read,
    missing,
    not_readable,
    plain,
    readable,
    text,
)

NAME = "hwmon"
GIVES = "power, energy and temperature by chip"
RESOLUTION = "by chip: 1 µW or more, 1 m°C"
_FILE = re.compile(r"(power\d+_(?:input|average)|energy\d+_input|temp\d+_input)")
_ELSEWHERE = re.compile(r"ina3221|BAT|battery|ucsi|AC\d*$|usb", re.IGNORECASE)


def find(root: Path) -> Found:
    files = _files(root / "sys/class/hwmon")
    bad = not_readable(NAME, GIVES, RESOLUTION, files)
    if bad is not None:
        return bad
    closed = [file for file in files if not may_read(file)]
    numbers = _numbers([file for file in files if file not in closed])
    if not numbers:
        return missing(NAME, GIVES, RESOLUTION)
    return readable(Numbers(NAME, numbers), _summary(numbers), RESOLUTION, let_read(*closed) if closed else None)


def _files(folder: Path) -> list[Path]:
    chips = sorted(folder.glob("hwmon*"), key=lambda chip: int(re.sub(r"\D", "", chip.name) or 0))
    chips = [chip for chip in chips if not _ELSEWHERE.match(text(chip / "name") or "")]
    files = [file for chip in chips for file in sorted(chip.iterdir()) if _FILE.fullmatch(file.name)]
    # Where a chip gives power both ways, the value of the moment is taken.
    return [f for f in files if not (f.name.endswith("_average") and f.with_name(_input(f.name)) in files)]


def _input(name: str) -> str:
    return name.replace("_average", "_input")


def _numbers(files: list[Path]) -> list[Number]:
    named = [(file, _name(file)) for file in files]
    twice = {name for name, times in Count(name for _, name in named).items() if times > 1}
    return [_number(file, f"{name}_{file.parent.name}" if name in twice else name) for file, name in named]


def _name(file: Path) -> str:
    label = text(file.with_name(re.sub(r"_(input|average)$", "_label", file.name)))
    chip = text(file.parent / "name") or file.parent.name
    return plain(f"hwmon {chip} {label or file.name.split('_')[0]}")


def _number(file: Path, name: str) -> Number:
    if file.name.startswith("power"):
        return Number(Channel(f"{name}_power_w", "W", False, "measured"), file, 1e-6)
    if file.name.startswith("energy"):
        return Number(Channel(f"{name}_energy_j", "J", True, "measured"), file, 1e-6)
    return Number(Channel(f"{name}_c", "°C", False, "measured"), file, 1e-3, least=-60, most=200)


def _summary(numbers: list[Number]) -> str:
    counts = Count(number.channel.unit for number in numbers)
    words = {"W": "power", "J": "energy", "°C": "temperature"}
    return ", ".join(f"{words[unit]} ×{n}" for unit, n in counts.items())
