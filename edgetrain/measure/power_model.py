"""Which watts energy is modelled with, where no sensor measures it (`sensors/modelled_power.py`).

what the user read off a plug meter here      `edgetrain calibrate`        ±15 %
else a device file                            by the board's name          ±20 % and more, as the file says
else averages of servers                      any other PC                 ±50 %
else nothing: energy is missing, never 0
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

from edgetrain.devices.device import Device, load
from edgetrain.errors import UserError
from edgetrain.measure import calibration
from edgetrain.measure.sensors import Finding, Source, core_time, cpu_frequency, gives_power, process_time, timed
from edgetrain.measure.sensors.modelled_power import NAME, Clocks, ModelledPower, ModelledProcessPower, PowerModel
from edgetrain.measure.sensors.source import Found, OpenFile, SystemClock, missing, readable, text, unreadable

_HOW = "edgetrain calibrate, with a plug meter"

# Cloud Carbon Footprint's averages over SPECpower results, W a hardware thread of a server: at rest, at full load.
_SERVER_IDLE_W, _SERVER_FULL_W, _SERVER_PLUS_MINUS = 0.74, 3.5, 0.5
# What /proc/device-tree/model begins with → the device file.
_BOARDS = {
    "Raspberry Pi 4": "rpi4",
    "Raspberry Pi 3": "rpi3",
    "Raspberry Pi Model B": "rpi1",
    "quill": "jetson_tx2",
    "NVIDIA Jetson TX2": "jetson_tx2",
}


# ---- which model


def model_of(device: Device) -> PowerModel:
    """From a device file: its idle power and its processor's, as if all of it were taken by equal cores."""
    cpus = [p for p in (device.processor, *device.processors.values()) if p.kind == "cpu" and p.power_w is not None]
    if not cpus or device.idle_w is None:
        raise UserError(
            f"the device file of {device.name} has no power to model energy with",
            expected="power.idle_w and the power_w of a processor of kind cpu",
            next_step=f"add them, or calibrate on the device itself: {_HOW}",
        )
    full, idle = cpus[0].power_w, device.idle_w
    assert full is not None
    off = math.hypot(full.value * full.plus_minus, idle.value * idle.plus_minus) / (full.value + idle.value)
    per_core = full.value / cpus[0].cores
    return PowerModel(device.name, idle.value, per_core, cpus[0].cores, off, f"device file {device.key}")


def model_here(root: Path = Path("/"), device: str | Path | None = None) -> PowerModel | None:
    """The power model of this machine; None where nothing is known of it.

    What the user calibrated here comes first, then the device given or recognised, then averages of servers.
    """
    if device is not None:
        return model_of(load(device))
    machine = calibration.machine(root)
    kept = calibration.load(machine)
    if kept is not None:
        return from_calibration(kept)
    board = text(root / "proc/device-tree/model") or ""
    key = next((key for start, key in _BOARDS.items() if board.startswith(start)), None)
    if key is not None:
        return model_of(load(key))
    return _server(machine) if machine.cores and machine.x86 else None


def from_calibration(kept: calibration.Calibration) -> PowerModel:
    said = f"plug meter, {kept.made[:10]}: {kept.idle_read_w:g} W idle, {kept.busy_read_w:g} W busy"
    cores = kept.machine.cores
    return PowerModel(kept.machine.cpu, kept.idle_w, kept.core_w, cores, calibration.PLUS_MINUS, said, calibrated=True)


def _server(machine: calibration.Machine) -> PowerModel:
    idle = _SERVER_IDLE_W * machine.cores
    core = _SERVER_FULL_W - _SERVER_IDLE_W
    said = "averages of servers (Cloud Carbon Footprint, from SPECpower)"
    return PowerModel(machine.cpu, idle, core, machine.cores, _SERVER_PLUS_MINUS, said)


# ---- the model as a source


def find_model(
    root: Path = Path("/"), *, pid: int, device: str | Path | None = None, clock: SystemClock | None = None
) -> list[Found]:
    """The model as sources of this machine: of all of it, and of a process."""
    gives, resolution = "energy, modelled from CPU time", "10 ms ticks; use over 200 ms and more"
    try:
        model = model_here(root, device)
    except UserError as error:
        if device is not None:
            raise
        return [unreadable(NAME, gives, resolution, error.next_step or error.what)]  # a damaged calibration
    if model is None:
        return [missing(NAME, gives, resolution, _HOW)]
    cores, process, highest = core_time.find(root)[1], process_time.find(root, pid)[1], _highest(root)
    words = f"{model.label}: {model.idle_w:.3g} W idle, {model.core_w:.3g} W a core ({model.source})"
    fix = None if model.calibrated else _HOW
    sources: list[Found] = []
    if cores is not None:
        clocks = Clocks(cpu_frequency.find(root)[1], highest)
        source = ModelledPower(model, cores, clocks, clock or SystemClock(time.CLOCK_MONOTONIC))
        sources.append(readable(source, f"energy of the machine, {words}", resolution, fix))
    if process is not None:
        clocks = Clocks(cpu_frequency.find(root)[1], highest)
        own = ModelledProcessPower(model, process, clocks)
        sources.append(readable(own, f"energy that the process adds, {words}", "1 ns of CPU time"))
    return sources or [missing(NAME, gives, resolution)]


def _highest(root: Path) -> dict[str, float]:
    """By core, its highest clock in Hz."""
    clocks_khz = {
        path.parent.parent.name: OpenFile(path).number()
        for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/cpuinfo_max_freq")
    }
    return {core: khz * 1e3 for core, khz in clocks_khz.items() if khz}


def with_model(
    sources: list[tuple[Finding, Source | None]],
    root: Path = Path("/"),
    *,
    pid: int,
    device: str | Path | None = None,
    reads: int = 5,
) -> list[tuple[Finding, Source | None]]:
    """The sources with the model among them, where no sensor measures the processor's power, or a device is given."""
    if device is None and gives_power(sources):
        finding, _ = missing(NAME, "not needed: a sensor measures power here", "")
        return [*sources, (replace(finding, fix=None), None)]
    return [*sources, *(timed(*each, reads=reads) for each in find_model(root, pid=pid, device=device))]
