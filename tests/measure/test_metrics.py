"""What samples say of a span: counters between readings, gauges over time, energy counted once, noise told."""

from __future__ import annotations

import numpy as np
import pytest

from edgetrain.measure.metrics import Energy, Span, chosen, energies, growth, mean, most, quiet, utilisation
from edgetrain.measure.samples import Samples, Series
from edgetrain.measure.sensors.source import Channel, Unit

S = 1_000_000_000


def series(name: str, channels: list[Channel], at_s: list[float], rows: list[list[float]]) -> Series:
    at = np.array([round(S * t) for t in at_s], dtype=np.int64)
    return Series(name, tuple(channels), at, at, np.array(rows, dtype=float).reshape(len(at), len(channels)))


def samples(*found: Series) -> Samples:
    return Samples(10_000_000, 0, 0, found, False)


def counter(name: str, unit: Unit = "s", part_of: str | None = None) -> Channel:
    return Channel(name, unit, True, "measured", part_of=part_of)


def gauge(name: str, unit: Unit) -> Channel:
    return Channel(name, unit, False, "measured")


TIMES = [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_counter_is_read_off_between_its_readings() -> None:
    made = samples(series("a", [counter("x")], TIMES, [[0], [1], [3], [3], [7]]))
    assert growth(made, "x", Span(0, 4 * S)) == 7
    assert growth(made, "x", Span(S // 2, 3 * S + S // 2)) == pytest.approx(4.5)
    assert growth(made, "y", Span(0, 4 * S)) is None


def test_readings_that_miss_most_of_the_span_tell_nothing() -> None:
    made = samples(series("a", [counter("x"), gauge("w", "W")], TIMES, [[0, 1]] * 5))
    assert growth(made, "x", Span(0, 40 * S)) is None
    assert mean(made, "w", Span(0, 40 * S)) is None


def test_readings_that_were_not_there_are_passed_over() -> None:
    made = samples(series("a", [counter("x")], TIMES, [[0], [np.nan], [2], [np.nan], [4]]))
    assert growth(made, "x", Span(0, 4 * S)) == 4
    nothing = samples(series("a", [counter("x")], TIMES, [[np.nan]] * 5))
    assert growth(nothing, "x", Span(0, 4 * S)) is None


def test_a_gauge_is_averaged_over_time_not_over_readings() -> None:
    made = samples(series("a", [gauge("w", "W")], [0.0, 0.1, 0.2, 2.0, 4.0], [[10], [10], [10], [0], [0]]))
    found = mean(made, "w", Span(0, 4 * S))
    assert found == pytest.approx((10 * 0.2 + 5 * 1.8) / 4)
    assert most(made, "w", Span(S, 4 * S)) == 0


def test_cores_by_name_and_no_other_counter() -> None:
    channels = [counter("cpu_time_s"), counter("cpu0_time_s"), counter("cpu1_time_s"), counter("steal_time_s")]
    made = samples(series("core time", channels, TIMES, [[n, n, n / 2, 0] for n in range(5)]))
    assert utilisation(made, Span(0, 4 * S)) == {"cpu0": 1.0, "cpu1": 0.5}


def test_no_joule_is_counted_twice() -> None:
    parts = [counter("package_j", "J"), counter("core_j", "J", "package_j"), counter("dram_j", "J")]
    made = samples(series("rapl", parts, TIMES, [[10.0 * n, 6.0 * n, 2.0 * n] for n in range(5)]))
    assert energies(made, Span(0, 4 * S)) == [Energy("rapl", "measured", 48.0)]


def test_power_over_time_where_no_counter_is() -> None:
    made = samples(series("power supply", [gauge("supply_power_w", "W")], TIMES, [[5.0]] * 5))
    assert energies(made, Span(S, 3 * S)) == [Energy("power supply", "measured", 10.0)]


def test_who_speaks_for_the_machine() -> None:
    package, gpu = Energy("rapl", "measured", 10.0), Energy("nvidia", "measured", 30.0)
    battery, model = Energy("power supply", "derived", 70.0), Energy("power model", "modelled", 5.0, 0.5)
    assert chosen([]) is None
    assert chosen([model]) == model
    assert chosen([package, gpu, model]) == Energy("rapl + nvidia", "measured", 40.0)
    assert chosen([package, gpu, battery]) == battery


def noise(own: float, cores: tuple[float, float], steal: float, pressure: float) -> str:
    channels = [
        counter(n) for n in ("cpu0_time_s", "cpu1_time_s", "steal_time_s", "process_time_s", "pressure_memory_s")
    ]
    rows = [[n * cores[0], n * cores[1], n * steal, n * own, n * pressure] for n in range(5)]
    return quiet(samples(series("all", channels, TIMES, rows)), Span(0, 4 * S)).verdict


def test_noise_is_told() -> None:
    assert noise(1.0, (0.5, 0.52), 0, 0) == "quiet"
    assert noise(1.0, (1.0, 0.5), 0, 0) == "noisy"
    assert noise(1.0, (0.5, 0.5), 0.1, 0) == "noisy"
    assert noise(1.0, (0.5, 0.5), 0, 0.2) == "noisy"
    assert quiet(samples(), Span(0, S)).verdict == "unknown"
