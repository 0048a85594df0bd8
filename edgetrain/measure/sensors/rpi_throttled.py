"""Whether a Raspberry Pi holds itself back now: too little voltage, too warm.

/sys/devices/platform/soc/soc:firmware/get_throttled      50005        hexadecimal; vcgencmd says throttled=0x50005

bit 0  under-voltage            bit 16 … 19  the same, at any time since the start
bit 1  frequency capped
bit 2  throttled
bit 3  soft temperature limit
"""

from __future__ import annotations

from pathlib import Path

from edgetrain.measure.sensors.gencmd import Firmware, fix
from edgetrain.measure.sensors.source import Channel, Found, OpenFile, may_read, missing, readable, unreadable

NAME = "raspberry throttling"
GIVES = "under-voltage and throttling, now"
RESOLUTION = "yes or no"
_NAMES = ("under_voltage", "frequency_capped", "throttled", "temperature_limit")
_KNOWN = 0xF000F


class Throttled:
    """Channels of 1 (it is so now) and 0, and throttled_before: any of them since the start."""

    def __init__(self, file: OpenFile | None, firmware: Firmware) -> None:
        self.name, self._file, self._firmware = NAME, file, firmware
        names = (*_NAMES, "throttled_before")
        self.channels: tuple[Channel, ...] = tuple(Channel(name, "1", False, "measured") for name in names)

    def open(self) -> None:
        (self._file or self._firmware).open()

    def read(self) -> tuple[float | None, ...]:
        flags = parse(self._file.read()) if self._file else parse((self._firmware.ask("get_throttled") or "").encode())
        if flags is None:
            return (None,) * len(self.channels)
        now = tuple(float(flags >> bit & 1) for bit in range(len(_NAMES)))
        return *now, float(flags >> 16 != 0)

    def close(self) -> None:
        (self._file or self._firmware).close()


def parse(data: bytes | None) -> int | None:
    """The flags, from "50005" or "throttled=0x50005". Bits that nobody knows are no flags: None."""
    try:
        flags = int((data or b"").strip().removeprefix(b"throttled="), 16)
    except ValueError:
        return None
    return flags if flags >= 0 and flags & ~_KNOWN == 0 else None


def find(root: Path, firmware: Firmware | None = None) -> Found:
    firmware = firmware or Firmware(root / "dev/vcio")
    for path in sorted((root / "sys/devices/platform").glob("soc*/soc*firmware/get_throttled")):
        if may_read(path):
            return readable(Throttled(OpenFile(path), firmware), GIVES, RESOLUTION)
    if firmware.device.exists():
        if (closed := fix(root)) is not None:
            return unreadable(NAME, GIVES, RESOLUTION, closed)
        source = Throttled(None, firmware)
        known = source.read()[0] is not None
        source.close()
        if known:
            return readable(source, GIVES, RESOLUTION)
    return missing(NAME, GIVES, RESOLUTION)
