"""A phone on a cable: a small sampler runs there by itself, adb only brings it and collects.

    this machine                               phone
    adb push android_sampler.sh      ───▶      /data/local/tmp/edgetrain/
    adb shell "sh … > samples.tsv &" ───▶      reads its files every 100 ms, writes a line with the phone's own time
         …                                       (nothing crosses the cable meanwhile)
    adb shell cat samples.tsv        ◀───      all lines at once

What it writes are the files' contents as they are. They are read here by the sources that read this machine's files
(`recording.py`), so that a phone has no parser of its own. Channels are named as here, with phone_ in front.

On the cable a phone charges. `phone_supply_power_w` is what it takes in all, from the plug and the battery; adb over
Wi-Fi (`adb tcpip 5555`) lets it run from the battery alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from edgetrain.errors import UserError
from edgetrain.measure.sensors import core_time, cpu_frequency, power_supply, recording, thermal
from edgetrain.measure.sensors.recording import Recording, Stage
from edgetrain.measure.sensors.source import Channel, Found, Source, missing, readable, unreadable

NAME = "android"
GIVES = "battery, plug, clocks and temperatures of a phone"
RESOLUTION = "100 ms on the phone, 10 ms and finer in time"
SCRIPT = Path(__file__).with_name("android_sampler.sh")
FOLDER = "/data/local/tmp/edgetrain"
_FIXES = {
    "unauthorized": "allow USB debugging in the dialog on the phone's screen",
    "offline": "adb reconnect",
    "no permissions": "sudo usermod -aG plugdev $USER, log in again, adb kill-server",
}


@dataclass(frozen=True)
class Phone:
    """One that adb can reach. root: tests give a folder of theirs."""

    serial: str
    adb: str = "adb"
    root: str = "/"

    def run(self, *words: str, timeout_s: float = 20.0) -> str:
        """What adb prints; a failure is a UserError with adb's own words."""
        try:
            done = subprocess.run(
                [self.adb, "-s", self.serial, *words],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                errors="replace",
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"adb does not answer for phone {self.serial}", received=str(error)[:200]) from error
        if done.returncode != 0:
            raise UserError(
                f"adb failed on phone {self.serial}",
                received=(done.stderr or done.stdout).strip()[:200] or f"exit code {done.returncode}",
                next_step="look at `adb devices`; the phone must be unlocked and allow USB debugging",
            )
        return done.stdout

    def push(self) -> None:
        self.run("shell", f"mkdir -p {FOLDER}")
        self.run("push", str(SCRIPT), f"{FOLDER}/{SCRIPT.name}")

    def once(self) -> Recording:
        """One sample now. The script must have been pushed."""
        return recording.parse(self.run("shell", f"sh {FOLDER}/{SCRIPT.name} {self.root} 0 1"), f"phone {self.serial}")

    def start(self, *, period_s: float, count: int, pid: int | None = None) -> None:
        """Sample on the phone from now on, `count` times at most, so that a lost cable does not leave it running."""
        self.push()
        task = f"sh {FOLDER}/{SCRIPT.name} {self.root} {period_s:g} {count} {'' if pid is None else pid}".strip()
        self.run("shell", f"nohup {task} > {FOLDER}/samples.tsv 2> /dev/null & echo $! > {FOLDER}/pid")

    def collect(self) -> Recording:
        """What has been sampled until now."""
        return recording.parse(self.run("shell", f"cat {FOLDER}/samples.tsv", timeout_s=120), f"phone {self.serial}")

    def stop(self) -> None:
        """End the sampler and remove what was put on the phone."""
        with contextlib.suppress(UserError):
            self.run("shell", f"kill $(cat {FOLDER}/pid) 2> /dev/null; rm -r {FOLDER}")


def phones(adb: str = "adb") -> dict[str, str]:
    """State by serial number, as `adb devices` reports: device (ready), unauthorized, offline, no permissions."""
    try:
        done = subprocess.run([adb, "devices"], capture_output=True, text=True, timeout=20, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = [line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line]
    return {serial: state.strip() for serial, state in rows}


class Android:
    """A phone as a source: one sample a read. For watching a phone at leisure; to measure, use `Phone.start`."""

    def __init__(self, phone: Phone) -> None:
        self.name, self._phone = NAME, phone
        self._folder = tempfile.TemporaryDirectory(prefix="edgetrain-phone-")
        self._show()
        self._sources = sources_under(Path(self._folder.name))
        self.channels: tuple[Channel, ...] = tuple(_named(c) for source in self._sources for c in source.channels)

    def __reduce__(self) -> tuple[object, ...]:
        return Android, (self._phone,)

    def _show(self) -> None:
        sample = self._phone.once()
        if sample.times_s:
            Stage(Path(self._folder.name), sample).show(0)

    def open(self) -> None:
        for source in self._sources:
            source.open()

    def read(self) -> tuple[float | None, ...]:
        try:
            self._show()
        except UserError:  # unplugged, or asleep
            return (None,) * len(self.channels)
        return tuple(value for source in self._sources for value in source.read())

    def close(self) -> None:
        for source in self._sources:
            source.close()


def sources_under(root: Path) -> list[Source]:
    """The sources that find something in the folder where a phone's sample is shown."""
    sources = (power_supply.find(root), cpu_frequency.find(root), thermal.find(root), core_time.find(root))
    return [source for _, source in sources if source is not None]


def _named(channel: Channel) -> Channel:
    inside = None if channel.part_of is None else f"phone_{channel.part_of}"
    return dataclasses.replace(channel, name=f"phone_{channel.name}", part_of=inside)


def find(adb: str | None = None, root: str = "/") -> Found:
    """The first phone that is ready. adb starts its server if there is none."""
    program = adb or shutil.which("adb")
    if program is None:
        return missing(NAME, GIVES, RESOLUTION, "to measure phones: sudo apt install adb")
    states = phones(program)
    ready = [serial for serial, state in states.items() if state == "device"]
    if ready:
        try:
            phone = Phone(ready[0], program, root)
            phone.push()
            return readable(Android(phone), f"{GIVES} ({ready[0]})", RESOLUTION)
        except UserError as error:
            return unreadable(NAME, GIVES, RESOLUTION, error.received or error.what)
    if not states:
        return missing(NAME, GIVES, RESOLUTION, "to measure a phone: plug it in and allow USB debugging")
    state = next(iter(states.values()))
    return unreadable(NAME, GIVES, RESOLUTION, next((fix for key, fix in _FIXES.items() if key in state), state))
