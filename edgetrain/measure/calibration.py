"""A machine's watts, read off a plug meter by its user: idle, and with every core at work.

    meter ▲ W         ┌───────────  busy_read_w, with busy_cores (measured) at work
          │           │
          │ ──────────┘             idle_read_w, with idle_cores (measured) at work: never quite 0
          └──────────────────▶ s
            idle        every core multiplies matrices

    core_w = (busy_read_w − idle_read_w) ÷ (busy_cores − idle_cores)
    idle_w = idle_read_w − core_w × idle_cores

Kept in `$EDGETRAIN_CONFIG/power.json`, else `$XDG_CONFIG_HOME/edgetrain/power.json`, else under ~/.config, with the
machine it is of: on another one (a home folder that is shared) it is not used.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from edgetrain.errors import UserError
from edgetrain.files import write_text
from edgetrain.interrupts import not_for_children
from edgetrain.machine import processor_name, usable_cores
from edgetrain.measure.sensors import core_time
from edgetrain.measure.sensors.source import text
from edgetrain.saved import load as load_saved

# A plug meter is good to 2 %; work that is no matrix product takes some 10 % more or less than one; the supply's losses
# are no straight line.
PLUS_MINUS = 0.15
_MIN_DIFFERENCE = 0.5  # of a core: with less between idle and busy, noise decides
_WORK = """
import os
import numpy
parent = os.getppid()
a = numpy.random.default_rng(0).random((192, 192), dtype=numpy.float32)
while os.getppid() == parent:
    numpy.matmul(a, a)
"""


@dataclass(frozen=True)
class Machine:
    """What a calibration holds for."""

    cpu: str
    cores: int
    x86: bool


@dataclass(frozen=True)
class Calibration:
    """made: UTC, ISO 8601. idle_cores, busy_cores: how many cores were at work on average while the meter was read."""

    machine: Machine
    made: str
    idle_read_w: float
    busy_read_w: float
    idle_cores: float
    busy_cores: float

    @property
    def core_w(self) -> float:
        return (self.busy_read_w - self.idle_read_w) / (self.busy_cores - self.idle_cores)

    @property
    def idle_w(self) -> float:
        return self.idle_read_w - self.core_w * self.idle_cores


def machine(root: Path = Path("/")) -> Machine:
    """The machine whose files lie under a root."""
    info = text(root / "proc/cpuinfo") or ""
    stat = (text(root / "proc/stat") or "").encode()
    cores = len([core for core in core_time.parse(stat) if core != "cpu"])
    x86 = "GenuineIntel" in info or "AuthenticAMD" in info
    return Machine(processor_name(root) or platform.machine(), cores, x86)


# ---- to a file and back


def file() -> Path:
    chosen = os.environ.get("EDGETRAIN_CONFIG")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "edgetrain"
    return base / "power.json"


def save(calibration: Calibration) -> Path:
    path = file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {path.parent}: {error.strerror or error}") from error
    write_text(path, json.dumps(asdict(calibration), indent=2) + "\n")
    return path


def load(of: Machine) -> Calibration | None:
    """The one that was kept for this machine; None where there is none. A damaged file is a UserError."""
    path = file()
    if not path.exists():
        return None
    kept = load_saved(path, "calibration", _calibration, next_step=f"remove it and calibrate again: {path}")
    return kept if kept.machine == of else None


def _calibration(data: Any) -> Calibration:
    of = data["machine"]
    calibration = Calibration(
        Machine(str(of["cpu"]), int(of["cores"]), bool(of["x86"])),
        str(data["made"]),
        *(float(data[name]) for name in ("idle_read_w", "busy_read_w", "idle_cores", "busy_cores")),
    )
    try:
        return checked(calibration)
    except UserError as error:  # a file that was edited; the caller names it
        raise ValueError(str(error)) from error


def checked(calibration: Calibration) -> Calibration:
    """The same if it makes sense; else a UserError that says what does not."""
    numbers = (calibration.idle_read_w, calibration.busy_read_w, calibration.idle_cores, calibration.busy_cores)
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise UserError(
            "a calibration holds a number that cannot be", expected="numbers, 0 or more", received=str(numbers)
        )
    if calibration.busy_cores - calibration.idle_cores < _MIN_DIFFERENCE:
        raise UserError(
            "the machine was as busy idle as under load",
            expected=f"at least {_MIN_DIFFERENCE} more busy cores under load",
            received=f"{calibration.idle_cores:.2f} idle, {calibration.busy_cores:.2f} under load",
            next_step="end other programs and calibrate again",
        )
    if calibration.busy_read_w <= calibration.idle_read_w or calibration.idle_w <= 0:
        raise UserError(
            "these watts do not fit a machine",
            expected="more under load than idle, and more than 0 idle",
            received=f"{calibration.idle_read_w:g} W idle, {calibration.busy_read_w:g} W under load",
            next_step="read the meter again, when its value has settled",
        )
    return calibration


# ---- making one


def calibrate(
    ask: Callable[[str], float], *, idle_s: float, busy_s: float, root: Path = Path("/"), cores: int | None = None
) -> Calibration:
    """Leave the machine idle, then put every core to work, and ask for the meter's watts at the end of each.

    ask: "idle" or "busy" → the watts read. cores: how many are put to work; all that this process may use, or fewer.
    """
    idle_w, idle_cores = _watched("idle", ask, idle_s, root)
    with _at_work(cores or usable_cores()):
        busy_w, busy_cores = _watched("busy", ask, busy_s, root)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return checked(Calibration(machine(root), created, idle_w, busy_w, idle_cores, busy_cores))


def _watched(phase: str, ask: Callable[[str], float], duration_s: float, root: Path) -> tuple[float, float]:
    """The watts read, and how many cores were busy until they were."""
    before, start = _busy_s(root), time.monotonic()
    time.sleep(duration_s)
    watts = ask(phase)
    after, end = _busy_s(root), time.monotonic()
    return watts, (after - before) / (end - start)


def _busy_s(root: Path) -> float:
    _, source = core_time.find(root)
    busy_s = None if source is None else source.read()[0]
    if source is not None:
        source.close()
    if busy_s is None:
        raise UserError(f"{root / 'proc/stat'} does not say how busy the cores are", next_step="calibrate on Linux")
    return busy_s


@contextlib.contextmanager
def _at_work(cores: int) -> Iterator[None]:
    """That many processes multiply matrices while the block runs."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(cores):
            with not_for_children():
                workers.append(subprocess.Popen([sys.executable, "-c", _WORK], env=environment))
        yield
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()
