"""NVIDIA GPUs through NVML, the driver's own library (libnvidia-ml), called directly: nothing to install.

    gpu0_energy_j        a counter of mJ since the driver was loaded (Volta and later)
    gpu0_power_w         averaged by the board over its own window
    gpu0_utilisation     the part of the last 1/6 to 1 s in which a kernel ran
    gpu0_memory_bytes, gpu0_temperature_c, gpu0_frequency_hz

and the same of gpu1, gpu2, … What a card does not support is left out. A read asks the board: on an H200 it took 3 ms,
so that a sampler reads it less often than files.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgetrain.measure.sensors.source import Channel, Counter, Found, Unit, missing, readable, unreadable

NAME = "nvidia"
GIVES = "energy, power, load, memory, temperature, clock of NVIDIA GPUs"
RESOLUTION = "energy 1 mJ, a new value every 20 to 100 ms; load 1 %"
_TEMPERATURE_OF_GPU, _CLOCK_OF_SM = 0, 1
_NO_PERMISSION, _NOT_LOADED = 4, 9  # NVML_ERROR_NO_PERMISSION, NVML_ERROR_DRIVER_NOT_LOADED


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


# name, unit, counter, NVML's function, its arguments before the last, what the last points to, its field, to our unit
_Query = tuple[str, Unit, bool, str, tuple[int, ...], Callable[[], Any], str, float]
_QUERIES: tuple[_Query, ...] = (
    ("energy_j", "J", True, "nvmlDeviceGetTotalEnergyConsumption", (), ctypes.c_ulonglong, "value", 1e-3),
    ("power_w", "W", False, "nvmlDeviceGetPowerUsage", (), ctypes.c_uint, "value", 1e-3),
    ("utilisation", "1", False, "nvmlDeviceGetUtilizationRates", (), _Utilisation, "gpu", 1e-2),
    ("memory_bytes", "B", False, "nvmlDeviceGetMemoryInfo", (), _Memory, "used", 1.0),
    ("temperature_c", "°C", False, "nvmlDeviceGetTemperature", (_TEMPERATURE_OF_GPU,), ctypes.c_uint, "value", 1.0),
    ("frequency_hz", "Hz", False, "nvmlDeviceGetClockInfo", (_CLOCK_OF_SM,), ctypes.c_uint, "value", 1e6),
)


class Nvidia:
    """The GPUs that NVML shows. load: gives the library, as ctypes loads it.

    It can be sent to another process, where it loads the library anew.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self.name, self._load, self._library = NAME, load, load()
        self._handles: list[ctypes.c_void_p] = []
        self._open = False
        self.error = self._start()
        queries = [
            (n, query) for n in range(len(self._handles)) for query in _QUERIES if self._ask(n, query) is not None
        ]
        self.channels: tuple[Channel, ...] = tuple(_channel(n, query) for n, query in queries)
        self._calls = [(n, query, Counter() if query[2] else None) for n, query in queries]

    def _start(self) -> int:
        """Handles hold until NVML is shut down, so they are taken anew at each start."""
        self._library = self._library or self._load()
        error = int(self._library.nvmlInit_v2()) if self._library is not None else _NOT_LOADED
        self._open = error == 0
        count = ctypes.c_uint()
        if not self._open or self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return error
        self._handles = [ctypes.c_void_p() for _ in range(count.value)]
        for n, handle in enumerate(self._handles):
            self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(n), ctypes.byref(handle))
        return error

    def _ask(self, n: int, query: _Query) -> float | None:
        function = getattr(self._library, query[3], None)
        if function is None or n >= len(self._handles):
            return None
        result = query[5]()
        if function(self._handles[n], *query[4], ctypes.byref(result)) != 0:
            return None
        return float(getattr(result, query[6]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_library": None, "_handles": [], "_open": False}

    def open(self) -> None:
        if not self._open:
            self._start()

    def read(self) -> tuple[float | None, ...]:
        self.open()
        return tuple(self._value(n, query, counter) for n, query, counter in self._calls)

    def _value(self, n: int, query: _Query, counter: Counter | None) -> float | None:
        shown = self._ask(n, query) if self._open else None
        total = shown if counter is None else counter.add(shown)
        return None if total is None else total * query[7]

    def close(self) -> None:
        if self._open:
            self._library.nvmlShutdown()
            self._open = False


def _channel(n: int, query: _Query) -> Channel:
    return Channel(f"gpu{n}_{query[0]}", query[1], query[2], "measured")


def _load() -> Any:
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None


def find(root: Path, load: Callable[[], Any] = _load) -> Found:
    """Under another root than / there is no library to call, unless `load` brings one."""
    if (root != Path("/") and load is _load) or load() is None:
        card = (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidiactl").exists()
        return missing(NAME, GIVES, RESOLUTION, "install libnvidia-ml of the driver's version" if card else None)
    source = Nvidia(load)
    if source.error == _NO_PERMISSION:
        return unreadable(NAME, GIVES, RESOLUTION, "sudo chmod a+rw /dev/nvidiactl /dev/nvidia[0-9]*")
    source.close()
    if not source.channels:
        fix = "sudo modprobe nvidia" if source.error == _NOT_LOADED else None
        return missing(NAME, GIVES, RESOLUTION, fix)
    return readable(source, ", ".join(channel.name for channel in source.channels), RESOLUTION)
