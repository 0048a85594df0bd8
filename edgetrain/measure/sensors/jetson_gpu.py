"""Load and clock of a Jetson's GPU, which NVML does not know on most of them.

/sys/devices/gpu.0/load                          parts of a thousand           (TX2, Nano, Xavier)
/sys/devices/platform/17000000.gpu/load          the same                      (Orin)
…/devfreq/17000000.gpu/cur_freq                  Hz
"""

from __future__ import annotations

from pathlib import Path

from edgetrain.measure.sensors.source import Channel, Found, Number, Numbers, may_read, not_readable, readable

NAME = "jetson gpu"
GIVES = "load and clock of the GPU"
RESOLUTION = "0.1 %, averaged by the driver"
_PLACES = (
    "sys/devices/gpu.0/load",
    "sys/devices/platform/gpu.0/load",
    "sys/devices/platform/*.g[pva]*/load",  # 17000000.gpu, 17000000.gp10b, 17000000.gv11b, 17000000.ga10b
    "sys/devices/platform/bus@0/*.g[pva]*/load",
)


def find(root: Path) -> Found:
    loads = [path for place in _PLACES for path in sorted(root.glob(place))][:1]  # one GPU under several names
    bad = not_readable(NAME, GIVES, RESOLUTION, loads)
    if bad is not None:
        return bad
    numbers = [Number(Channel("gpu_utilisation", "1", False, "measured"), loads[0], 1e-3, least=0, most=1)]
    for clock in sorted(loads[0].parent.glob("devfreq/*/cur_freq"))[:1]:
        if may_read(clock):
            numbers.append(Number(Channel("gpu_frequency_hz", "Hz", False, "measured"), clock, 1.0))
    return readable(Numbers(NAME, numbers), GIVES if len(numbers) > 1 else "load of the GPU", RESOLUTION)
