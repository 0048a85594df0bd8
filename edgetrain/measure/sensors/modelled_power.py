"""Energy where no sensor measures it: modelled from CPU time, the clocks of the cores and a few watts.

    power = idle_w + core_w × Σ over busy cores (clock ÷ highest clock)^1.3

    W ▲           ·
      │       ·       ↕ core_w, for each core at work
      │   ·
      ├·  ↕ idle_w
      └──────────────▶ busy cores

In:  the sources of CPU time and clocks, and a `PowerModel`: `measure/power_model.py` finds the one of this machine.
Out: two sources like any other, of the machine and of the process, whose channels say `modelled` and how far off they
     may be. They are two because cores are counted in ticks of 10 ms, and the process in nanoseconds at every sample.

The exponent is the median of EMDL'21, Table 3: power above idle of one, two and four cores, big and small, between
their lowest and highest clocks, grows with the clock to the power of 0.9 to 2.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgetrain.measure.sensors import core_time
from edgetrain.measure.sensors.source import Channel, Direct, Input, Source, SystemClock

NAME, PROCESS_NAME = "power model", "process power model"
ENERGY, PROCESS_ENERGY = "model_energy_j", "model_process_energy_j"
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


class Clocks:
    """What the clocks of the cores do to their power. highest_hz: by core."""

    def __init__(self, source: Source | None, highest_hz: dict[str, float]) -> None:
        self.source, self._highest_hz = source, highest_hz

    def factors(self) -> dict[str, float]:
        """By core; nothing where clocks are not known."""
        if self.source is None:
            return {}
        clocks = dict(zip((c.name[:-13] for c in self.source.channels), self.source.read(), strict=True))
        known = {core: (hz, self._highest_hz[core]) for core, hz in clocks.items() if hz and core in self._highest_hz}
        return {core: math.pow(min(1.0, hz / highest), EXPONENT) for core, (hz, highest) in known.items()}


class _Modelled:
    """A source that is made of others. own: what it reads besides."""

    channels: tuple[Channel, ...]

    def __init__(self, name: str, model: PowerModel, clocks: Clocks, part: Source, *own: Input) -> None:
        self.name, self.model, self._clocks, self._own = name, model, clocks, own
        self._parts = [each for each in (part, clocks.source) if each is not None]

    def open(self) -> None:
        for part in self._parts:
            part.open()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def inputs(self) -> tuple[Input, ...]:
        parts = [part.inputs() if isinstance(part, Direct) else () for part in self._parts]
        return (*self._own, *(each for inputs in parts for each in inputs)) if all(parts) else ()


class ModelledPower(_Modelled):
    """Channel model_energy_j, of the machine, by the ticks of 10 ms of its cores. clock: of seconds that pass."""

    def __init__(self, model: PowerModel, cores: Source, clocks: Clocks, clock: SystemClock) -> None:
        super().__init__(NAME, model, clocks, cores, clock)
        self._cores, self._clock = cores, clock
        self._last: tuple[float, dict[str, float]] | None = None
        self._energy_j = 0.0
        self.channels = (Channel(ENERGY, "J", True, "modelled", core_time.MIN_WINDOW_S, model.plus_minus),)

    def read(self) -> tuple[float | None, ...]:
        now, values = self._clock.read(), dict(zip(self._cores.channels, self._cores.read(), strict=True))
        busy = {c.name[:-7]: s for c, s in values.items() if s is not None and c.name[3:-7].isdigit()}  # cpu3_time_s
        if not busy or now is None:
            return (None,)
        if self._last is not None:
            (then, before), factors = self._last, self._clocks.factors()
            spent = sum((s - before.get(core, s)) * factors.get(core, 1.0) for core, s in busy.items())
            self._energy_j += self.model.idle_w * (now - then) + self.model.core_w * spent
        # A core that is off for a while goes on from its last value.
        self._last = now, {**(self._last[1] if self._last else {}), **busy}
        return (self._energy_j,)


class ModelledProcessPower(_Modelled):
    """Channel model_process_energy_j: what the process adds above idle, by its nanoseconds."""

    def __init__(self, model: PowerModel, process: Source, clocks: Clocks) -> None:
        super().__init__(PROCESS_NAME, model, clocks, process)
        self._process = process
        self._last_s: float | None = None
        self._energy_j = 0.0
        self.channels = (Channel(PROCESS_ENERGY, "J", True, "modelled", 0.0, model.plus_minus, part_of=ENERGY),)

    def read(self) -> tuple[float | None, ...]:
        used_s = self._process.read()[0]
        if used_s is None:
            return (None,)
        if self._last_s is not None:
            # It is not known on which core it ran; it is the busy one, and that has the highest clock.
            fastest = max(self._clocks.factors().values(), default=1.0)
            self._energy_j += self.model.core_w * (used_s - self._last_s) * fastest
        self._last_s = used_s
        return (self._energy_j,)
