"""What a run does now, in one line of the terminal: step, loss, memory, power, temperature.

In:  `Progress` after each step, and sensors of this machine, opened here a second time.
Out: a line on standard error that changes in place; nothing where standard error is no terminal.

Sensors are read at most twice a second, between steps, so the view costs nothing that is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.live import Live
from rich.text import Text

from edgetrain.cli.output import notes
from edgetrain.measure.protocol import Progress
from edgetrain.measure.sensors.source import Channel, Source, outermost
from edgetrain.plan.budget import show_bytes

MIN_PAUSE_S = 0.5
_BAR = 6  # so that all of the line fits into 80 columns


class LiveView:
    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._live = Live(console=notes, refresh_per_second=8, transient=True)
        self._read_at = 0.0
        self._joules: dict[str, tuple[float, float]] = {}  # by channel: when, how much
        self._told: tuple[str, ...] = ()

    def __enter__(self) -> LiveView:
        if notes.is_terminal:
            for source in self._sources:
                source.open()
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if notes.is_terminal:
            self._live.stop()
            for source in self._sources:
                source.close()

    def show(self, progress: Progress) -> None:
        if not notes.is_terminal:
            return
        if time.monotonic() - self._read_at >= MIN_PAUSE_S:
            self._read_at, self._told = time.monotonic(), self._readings()
        self._live.update(Text("  ".join(self.parts(progress)), overflow="ellipsis", no_wrap=True))

    def parts(self, progress: Progress) -> list[str]:
        done = round(_BAR * progress.step / max(progress.steps, 1))
        shown = [f"{progress.stage:9}", "━" * done + "╌" * (_BAR - done), f"{progress.step}/{progress.steps}"]
        if progress.time_s is not None:
            shown.append(f"{1e3 * progress.time_s:.0f} ms")
        if progress.loss is not None:
            shown.append(f"loss {progress.loss:.4g}")
        return [*shown, *self._told]

    def _readings(self) -> tuple[str, ...]:
        readings = [(channel, value) for source in self._sources for channel, value in _read(source)]
        power = self._power(readings)
        heat = [value for channel, value in readings if channel.unit == "°C"]
        memory = next((value for channel, value in readings if channel.name == "process_resident_bytes"), None)
        return (
            *((show_bytes(int(memory)),) if memory is not None else ()),
            *((power,) if power is not None else ()),
            *((f"{max(heat):.0f} °C",) if heat else ()),
        )

    def _power(self, readings: Sequence[tuple[Channel, float]]) -> str | None:
        """Watts, from gauges or from what counters of joules grew by since the last look."""
        watts, modelled = 0.0, False
        known = False
        for unit in ("W", "J"):
            for channel in outermost([channel for channel, _ in readings], "W" if unit == "W" else "J"):
                value = next(value for other, value in readings if other is channel)
                reading = value if unit == "W" else self._grown(channel, value)
                if reading is not None:
                    watts, known, modelled = watts + reading, True, modelled or channel.kind == "modelled"
            if known:
                return f"{watts:.3g} W{' (modelled)' if modelled else ''}"
        return None

    def _grown(self, channel: Channel, joules: float) -> float | None:
        now = time.monotonic()
        before = self._joules.get(channel.name)
        self._joules[channel.name] = now, joules
        return None if before is None or now <= before[0] else (joules - before[1]) / (now - before[0])


def _read(source: Source) -> list[tuple[Channel, float]]:
    values = source.read()
    return [(channel, value) for channel, value in zip(source.channels, values, strict=True) if value is not None]
