"""Power of a Jetson's rails: INA3221 monitors, three rails a chip.

    TX2, Xavier (L4T 32)   /sys/bus/i2c/drivers/ina3221x/0-0041/iio:device1/rail_name_0        VDD_IN
                                                                           in_power0_input    mW
    Orin (L4T 35, 36)      /sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3/in1_label          VDD_IN
                                                                           in1_input           mV
                                                                           curr1_input         mA

Where a rail feeds the whole board (VDD_IN and its kin), the others are parts of it.
"""

from __future__ import annotations

from pathlib import Path

from edgetrain.measure.sensors.source import (
    Channel,
    Files,
    Found,
    OpenFile,
    let_read,
    may_read,
    missing,
    not_readable,
    plain,
    readable,
    text,
)

NAME = "ina3221"
GIVES = "power of the board's rails"
RESOLUTION = "about 1 mW by 5 to 40 mA steps; the chip averages over some 10 ms"
_INPUTS = ("VDD_MUX", "VDD_IN", "POM_5V_IN")  # of a developer kit, of a module, of a Nano
_DRIVERS = "sys/bus/i2c/drivers"


Rail = tuple[str, tuple[Path, ...]]


class Rails(Files):
    """A rail is one file in mW, or two in mV and mA."""

    def __init__(self, rails: list[Rail]) -> None:
        whole = next((name for wanted in _INPUTS for name, _ in rails if name == wanted), None)
        channels = tuple(_channel(name, files, whole) for name, files in rails)
        super().__init__(NAME, channels, tuple(OpenFile(path) for _, files in rails for path in files))
        self._sizes = tuple(len(files) for _, files in rails)

    def read(self) -> tuple[float | None, ...]:
        numbers = [file.number() for file in self.files]
        values, at = [], 0
        for size in self._sizes:
            values.append(watts(*numbers[at : at + size]))
            at += size
        return tuple(values)


def watts(*shown: int | None) -> float | None:
    """From mW, or from mV and mA."""
    if any(number is None for number in shown):
        return None
    first, *rest = (float(number) for number in shown if number is not None)
    return first * 1e-3 if not rest else first * rest[0] * 1e-6


def _channel(name: str, files: tuple[Path, ...], whole: str | None) -> Channel:
    inside = None if whole is None or name == whole else f"rail_{plain(whole)}_power_w"
    return Channel(
        f"rail_{plain(name)}_power_w", "W", False, "measured" if len(files) == 1 else "derived", part_of=inside
    )


def find(root: Path) -> Found:
    rails = _tx2(root / _DRIVERS / "ina3221x") + _orin(root / _DRIVERS / "ina3221")
    files = [path for _, paths in rails for path in paths]
    bad = not_readable(NAME, GIVES, RESOLUTION, files)
    if bad is not None:
        return bad
    closed = [file for file in files if not may_read(file)]
    rails = [(name, paths) for name, paths in rails if not any(path in closed for path in paths)]
    if not rails:
        return missing(NAME, GIVES, RESOLUTION)
    gives = GIVES + ": " + ", ".join(name for name, _ in rails)
    return readable(Rails(rails), gives, RESOLUTION, let_read(*closed) if closed else None)


def _tx2(driver: Path) -> list[Rail]:
    rails: list[Rail] = []
    for file in sorted(driver.glob("*/iio:device*/in_power*_input")):
        name = text(file.with_name(f"rail_name_{file.name[8:-6]}"))
        if _connected(name):
            rails.append((name or "", (file,)))
    return rails


def _orin(driver: Path) -> list[Rail]:
    rails: list[Rail] = []
    for label in sorted(driver.glob("*/hwmon/hwmon*/in*_label")):
        name, number = text(label), label.name[2:-6]
        pair = label.with_name(f"in{number}_input"), label.with_name(f"curr{number}_input")
        # in4 … in6 are the shunts' own voltages and in7 is their sum: no current stands beside them.
        if _connected(name) and all(path.exists() for path in pair):
            rails.append((name or "", pair))
    return rails


def _connected(name: str | None) -> bool:
    return name is not None and name != "NC"
