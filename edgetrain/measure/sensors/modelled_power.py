"""Energy where no sensor tells it: modelled from CPU time, the clocks of the cores and a few watts.

    power = idle_w + core_w × Σ over busy cores (clock ÷ highest clock)^1.3

    W ▲           ·
      │       ·       ↕ core_w, for each core at work
      │   ·
      ├·  ↕ idle_w
      └──────────────▶ busy cores

In:  the sources of CPU time and clocks, and a `PowerModel`: `measure/power_model.py` finds the one of this machine.
Out: a source like any other, whose channels say `modelled` and how far off they may be.

The exponent is the median of EMDL'21, Table 3: power above idle of one, two and four cores, big and small, between
their lowest and highest clocks, grows with the clock to the power of 0.9 to 2.0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from edgetrain.measure.sensors import core_time
from edgetrain.measure.sensors.source import Channel, Source

NAME = "power model"
EXPONENT = 1.3


@dataclass(frozen=True)
class PowerModel:
    """
    core_w: what one busy core adds at its highest clock.
    plus_minus: the true power lies within this part of the modelled one, two times of three.
    source: where the watts come from, in words.
    """

    name: str
    idle_w: float
    core_w: float
    cores: int
    plus_minus: float
    source: str
    calibrated: bool = False

    @property
    def label(self) -> str:
        """What to write beside every number that was made with it."""
        return f"modelled{' (calibrated)' if self.calibrated else ''}, ±{100 * self.plus_minus:.0f} %"

    def watts(self, busy_cores: float, clock: float = 1.0) -> float:
        """clock: as a part of the highest one."""
        return self.idle_w + self.core_w * busy_cores * math.pow(clock, EXPONENT)


class ModelledPower:
    """Channels model_energy_j (the machine) and model_process_energy_j (what the process adds above idle).

    The first counts all cores by ticks of 10 ms, the second the process alone by nanoseconds.
    """

    def __init__(
        self,
        model: PowerModel,
        cores: Source | None,
        process: Source | None,
        clocks: Source | None,
        highest_hz: dict[str, float],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.model = NAME, model
        self._parts = [part for part in (cores, process, clocks) if part is not None]
        self._cores, self._process, self._clocks = cores, process, clocks
        self._highest_hz, self._now = highest_hz, now
        self._last: tuple[float, dict[str, float]] | None = None
        self._energy_j = self._process_j = 0.0
        self._last_process_s: float | None = None
        whole = Channel("model_energy_j", "J", True, "modelled", core_time.LEAST_WINDOW_S, model.plus_minus)
        part = Channel("model_process_energy_j", "J", True, "modelled", 0.0, model.plus_minus, part_of=whole.name)
        self.channels: tuple[Channel, ...] = (whole, part)

    def open(self) -> None:
        for part in self._parts:
            part.open()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def read(self) -> tuple[float | None, ...]:
        factors = self._factors()
        return self._machine(factors), self._own(factors)

    def _machine(self, factors: dict[str, float]) -> float | None:
        if self._cores is None:
            return None
        now, told = self._now(), dict(zip(self._cores.channels, self._cores.read(), strict=True))
        busy = {c.name[:-7]: s for c, s in told.items() if s is not None and c.name[3:-7].isdigit()}  # cpu3_time_s
        if not busy:
            return None
        if self._last is not None:
            then, before = self._last
            spent = sum((s - before.get(core, s)) * factors.get(core, 1.0) for core, s in busy.items())
            self._energy_j += self.model.idle_w * (now - then) + self.model.core_w * spent
        # A core that is off for a while goes on from its last value.
        self._last = now, {**(self._last[1] if self._last else {}), **busy}
        return self._energy_j

    def _own(self, factors: dict[str, float]) -> float | None:
        used_s = None if self._process is None else self._process.read()[0]
        if used_s is None:
            return None
        if self._last_process_s is not None:
            # Nobody tells on which core it ran; it is the busy one, and that has the highest clock.
            fastest = max(factors.values(), default=1.0)
            self._process_j += self.model.core_w * (used_s - self._last_process_s) * fastest
        self._last_process_s = used_s
        return self._process_j

    def _factors(self) -> dict[str, float]:
        """By core, what its clock does to its power; nothing where clocks are not told."""
        if self._clocks is None:
            return {}
        told = dict(zip((c.name[:-13] for c in self._clocks.channels), self._clocks.read(), strict=True))
        known = {core: (hz, self._highest_hz[core]) for core, hz in told.items() if hz and core in self._highest_hz}
        return {core: math.pow(min(1.0, hz / highest), EXPONENT) for core, (hz, highest) in known.items()}
