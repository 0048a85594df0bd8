"""What flows out of a battery and in by a plug: /sys/class/power_supply (laptops, phones).

    battery/type          Battery                     usb/type          USB
    battery/status        Discharging, Charging, …    usb/online        1
    battery/current_now   µA, with a sign             usb/current_now   µA   (older: input_current_now)
    battery/voltage_now   µV                          usb/voltage_now   µV
    battery/temp          0.1 °C
    battery/power_now     µW, on some laptops in place of current_now

    what the machine takes  =  out of the battery  +  in by every plug       `supply_power_w`

Power out of a battery is positive here, into it negative. Drivers do not agree on the sign of current_now: the kernel's
rule is negative for discharging; ACPI batteries show no sign; some phones do the opposite. The status decides which it
is, the first time it says Discharging. Nor do all agree on µA: no machine that runs this program lives on less than
10 mA, so that a smaller number while it is Discharging is in mA. A plug whose power nobody measures (a laptop's mains)
leaves the sum unknown, which is None and not the battery's part of it. Phones show one battery and one plug under more
names (bms, main, pc_port): what is neither battery nor plug is left out, and a measured plug speaks for the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgetrain.measure.sensors.source import (
    Channel,
    Files,
    Found,
    Kind,
    OpenFile,
    let_read,
    may_read,
    missing,
    not_readable,
    plain,
    readable,
    text,
    whole,
)

NAME = "power supply"
GIVES = "power out of the battery and in by the plug"
RESOLUTION = "by gauge: 0.2 to 1 s and some mA"
TOTAL = "supply_power_w"
_MIN_UA = 10_000
_BATTERIES = ("Battery", "UPS")


@dataclass
class _Supply:
    """One folder of power_supply, with what has been learned of its driver."""

    name: str
    battery: bool
    status: OpenFile | None
    online: OpenFile | None
    power: OpenFile | None
    current: OpenFile | None
    voltage: OpenFile | None
    temperature: OpenFile | None
    kernel_sign: bool | None = None  # None: not known yet
    micro: bool = False  # a current that can only be in µA was seen

    @property
    def measured(self) -> bool:
        return self.power is not None or (self.current is not None and self.voltage is not None)

    def files(self) -> list[OpenFile]:
        every = (self.status, self.online, self.power, self.current, self.voltage, self.temperature)
        return [file for file in every if file is not None]

    def channels(self) -> list[Channel]:
        channels = []
        if self.measured:
            kind: Kind = "derived" if self.power is None else "measured"
            channels.append(Channel(f"{self.name}_power_w", "W", False, kind, part_of=TOTAL))
        if self.current is not None:
            channels.append(Channel(f"{self.name}_current_a", "A", False, "measured"))
        if self.voltage is not None:
            channels.append(Channel(f"{self.name}_voltage_v", "V", False, "measured"))
        if self.temperature is not None:
            channels.append(Channel(f"{self.name}_temperature_c", "°C", False, "measured"))
        return channels

    def read(self) -> list[float | None]:
        status = None if self.status is None else (self.status.read() or b"").strip()
        current, voltage = self._amperes(status), self._volts()
        values: list[float | None] = []
        if self.measured:
            values.append(self._watts(status, current, voltage))
        values += [value for file, value in ((self.current, current), (self.voltage, voltage)) if file is not None]
        if self.temperature is not None:
            tenths = self.temperature.number()
            values.append(None if tenths is None else tenths / 10)
        return values

    def _watts(self, status: bytes | None, current: float | None, voltage: float | None) -> float | None:
        if self.power is not None:
            shown = self.power.number()
            return None if shown is None else self._signed(shown * 1e-6, status)
        return None if current is None or voltage is None else current * voltage

    def _volts(self) -> float | None:
        shown = None if self.voltage is None else self.voltage.number()
        if shown is None or shown <= 0:
            return None
        return shown * (1e-6 if shown >= 100_000 else 1e-3)  # 0.1 V in µV, 100 V in mV

    def _amperes(self, status: bytes | None) -> float | None:
        shown = None if self.current is None else self.current.number()
        if shown is None:
            return None
        self.micro = self.micro or abs(shown) >= _MIN_UA
        milli = self.battery and status == b"Discharging" and not self.micro and shown != 0
        return self._signed(shown * (1e-3 if milli else 1e-6), status)

    def _signed(self, shown: float, status: bytes | None) -> float:
        """Out of a battery, or in by a plug: positive."""
        if not self.battery:
            return abs(shown)
        if status == b"Discharging" and shown != 0:
            self.kernel_sign = shown < 0
        if self.kernel_sign is not False:
            return -shown  # not known yet: the kernel's rule
        if status == b"Discharging":
            return abs(shown)
        return -abs(shown) if status == b"Charging" else shown


class PowerSupply(Files):
    def __init__(self, supplies: list[_Supply]) -> None:
        channels = [channel for supply in supplies for channel in supply.channels()]
        total = (Channel(TOTAL, "W", False, "derived"),) if any(supply.measured for supply in supplies) else ()
        files = tuple(file for supply in supplies for file in supply.files())
        super().__init__(NAME, (*channels, *total), files)
        self._supplies = supplies

    def read(self) -> tuple[float | None, ...]:
        rows = [supply.read() for supply in self._supplies]
        values = [value for each in rows for value in each]
        if len(values) == len(self.channels):
            return tuple(values)
        parts = [each[0] for supply, each in zip(self._supplies, rows, strict=True) if supply.measured]
        known = [part for part in parts if part is not None]
        return *values, sum(known) if len(known) == len(parts) and not self._hidden() else None

    def _hidden(self) -> bool:
        """Something flows in that nobody measures."""
        plugs = [supply for supply in self._supplies if not supply.battery]
        if any(plug.measured for plug in plugs):
            return False
        return any(plug.online is None or plug.online.number() != 0 for plug in plugs)


def find(root: Path) -> Found:
    every = sorted(path for path in (root / "sys/class/power_supply").glob("*") if path.is_dir())
    folders = [folder for folder in every if _counts(folder)]
    wanted = [path for folder in folders for path in _amounts(folder)]
    bad = not_readable(NAME, GIVES, RESOLUTION, wanted)
    if bad is not None:
        return bad
    closed = [path for path in wanted if not may_read(path)]
    supplies = [_supply(folder) for folder in folders]
    if not any(supply.channels() for supply in supplies):
        return missing(NAME, GIVES, RESOLUTION)
    measured = ", ".join(supply.name for supply in supplies if supply.measured)
    gives = f"power of {measured}, and of the machine" if measured else "no power; what else the battery reports"
    return readable(PowerSupply(supplies), gives, RESOLUTION, let_read(*closed) if closed else None)


def _counts(folder: Path) -> bool:
    """A battery or a plug of this machine. The type of a phone's plug may be Unknown while nothing is in it."""
    if text(folder / "scope") == "Device":  # a mouse's battery
        return False
    kind = text(folder / "type") or ""
    return kind in _BATTERIES or kind.startswith(("USB", "Mains", "Wireless")) or folder.name in ("usb", "ac", "AC")


def _amounts(folder: Path) -> list[Path]:
    names = ("power_now", "current_now", "input_current_now", "voltage_now", "temp")
    return [folder / name for name in names if (folder / name).exists()]


def _supply(folder: Path) -> _Supply:
    def file(*names: str) -> OpenFile | None:
        files = (folder / name for name in names)
        return next((OpenFile(path) for path in files if path.exists() and may_read(path)), None)

    power = file("power_now")
    if power is not None and whole(power.read()) is None:
        power = None
    return _Supply(
        name=plain(folder.name),
        battery=text(folder / "type") in _BATTERIES,
        status=file("status"),
        online=file("online"),
        power=power,
        current=file("current_now", "input_current_now"),
        voltage=file("voltage_now"),
        temperature=file("temp"),
    )
