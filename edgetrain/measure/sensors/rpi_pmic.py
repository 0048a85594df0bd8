"""Power of a Raspberry Pi 5's rails, from its power management chip: `vcgencmd pmic_read_adc`.

         VDD_CORE_A current(7)=1.18240000A
         …
         VDD_CORE_V volt(15)=0.72140840V

Every rail has a line for its current and one for its voltage. Their sum, `pmic_power_w`, leaves out what does not pass
the chip (USB ports, HDMI, the losses of the converters): a plug meter shows more.
"""

from __future__ import annotations

import re
from pathlib import Path

from edgetrain.measure.sensors.gencmd import Firmware, fix
from edgetrain.measure.sensors.source import Channel, Found, missing, plain, readable, unreadable

NAME = "raspberry pmic"
GIVES = "power of a Raspberry Pi 5's rails"
RESOLUTION = "about 1 mA, a new value every few ms"
TOTAL = "pmic_power_w"
_LINE = re.compile(r"^\s*(\w+)_([AV]) (?:current|volt)\(\d+\)=(-?\d+(?:\.\d+)?)[AV]\s*$", re.MULTILINE)


class Pmic:
    def __init__(self, firmware: Firmware, rails: tuple[str, ...]) -> None:
        self.name, self._firmware, self._rails = NAME, firmware, rails
        parts = (Channel(f"rail_{plain(rail)}_power_w", "W", False, "derived", part_of=TOTAL) for rail in rails)
        self.channels: tuple[Channel, ...] = (*parts, Channel(TOTAL, "W", False, "derived"))

    def open(self) -> None:
        self._firmware.open()

    def read(self) -> tuple[float | None, ...]:
        values = parse(self._firmware.ask("pmic_read_adc"))
        watts = [values.get(rail) for rail in self._rails]
        known = [power for power in watts if power is not None]
        return *watts, sum(known) if known and len(known) == len(watts) else None

    def close(self) -> None:
        self._firmware.close()


def parse(said: str | None) -> dict[str, float]:
    """Watts by rail, for the rails with both a current and a voltage."""
    shown = {(rail, sort): float(value) for rail, sort, value in _LINE.findall(said or "")}
    return {
        rail: amps * shown[rail, "V"] for (rail, sort), amps in shown.items() if sort == "A" and (rail, "V") in shown
    }


def find(root: Path, firmware: Firmware | None = None) -> Found:
    firmware = firmware or Firmware(root / "dev/vcio")
    if firmware.device.exists() and (closed := fix(root)) is not None:
        return unreadable(NAME, GIVES, RESOLUTION, closed)
    rails = tuple(parse(firmware.ask("pmic_read_adc"))) if firmware.device.exists() else ()
    firmware.close()
    if not rails:
        return missing(NAME, GIVES, RESOLUTION)
    return readable(Pmic(firmware, rails), f"power of {len(rails)} rails and their sum", RESOLUTION)
