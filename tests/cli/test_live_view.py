"""The line that a profile shows while it runs: what is known is there, what is not is left out, and it fits."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from edgetrain.cli import live_view
from edgetrain.cli.live_view import LiveView
from edgetrain.measure.protocol import Progress
from edgetrain.measure.sensors.source import Channel


class Readings:
    """A source that shows one value a channel."""

    def __init__(self, shown: dict[Channel, float | None]) -> None:
        self.name, self.channels, self._shown = "fake", tuple(shown), shown
        self.opened = 0

    def open(self) -> None:
        self.opened += 1

    def read(self) -> tuple[float | None, ...]:
        return tuple(self._shown.values())

    def close(self) -> None:
        self.opened -= 1


def gauges(watts: float | None) -> Readings:
    return Readings(
        {
            Channel("process_resident_bytes", "B", False, "measured"): 358e6,
            Channel("power_w", "W", False, "modelled"): watts,
            Channel("rail_w", "W", False, "modelled", part_of="power_w"): 1.0,
            Channel("temp_c", "°C", False, "measured"): 51.0,
        }
    )


def shown(monkeypatch: pytest.MonkeyPatch, source: Readings, *, terminal: bool = True) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80)
    monkeypatch.setattr(live_view, "notes", console)
    with LiveView([source]) as view:
        view.show(Progress("measuring", 30, 60, loss=0.25, time_s=0.0123))
    assert source.opened == 0
    return out.getvalue()


def test_step_loss_memory_power_and_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown(monkeypatch, gauges(4.4))
    for part in ("measuring", "30/60", "12 ms", "loss 0.25", "358 MB", "4.4 W (modelled)", "51 °C"):
        assert part in said


def test_what_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown(monkeypatch, gauges(None))
    assert " W" not in said
    assert "358 MB" in said


def test_nothing_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, gauges(4.4), terminal=False) == ""
