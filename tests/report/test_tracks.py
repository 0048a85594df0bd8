"""Lines from samples: rates of counters, gaps where nothing was there, buckets that keep the extremes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from edgetrain.measure.record import RunFolder
from edgetrain.measure.samples import Samples, Series
from edgetrain.measure.sensors.source import Channel
from edgetrain.report.run import load_run
from edgetrain.report.tracks import MAX_IN_A_LANE, Track, drawn, rate, thinned, tracks, within

AT = np.array([0, 10, 20, 30], dtype=np.int64) * 1_000_000


def series(name: str, channel: Channel, *values: float) -> Series:
    at = AT[: len(values)]
    return Series(name, (channel,), at, at, np.array(values)[:, None])


def samples(*found: Series) -> Samples:
    return Samples(10_000_000, 0, 0, found, False)


def test_a_counter_becomes_a_rate_that_holds_and_a_gauge_stays() -> None:
    energy = series("rapl", Channel("package_energy_j", "J", True, "measured"), 1.0, 1.04, 1.10, 1.10)
    warm = series("thermal", Channel("temp_cpu_c", "°C", False, "measured"), 50, math.nan, 52, 53)
    power, temperature = tracks(samples(warm, energy))
    assert (power.name, power.quantity, power.unit, power.origin, power.holds) == (
        "package",
        "power",
        "W",
        "derived",
        True,
    )
    assert power.values[:3].tolist() == pytest.approx([4.0, 6.0, 0.0])
    assert np.isnan(power.values[3])
    assert (temperature.quantity, temperature.origin, temperature.holds) == ("temperature", "measured", False)
    assert np.isnan(temperature.values[1])


def test_a_counter_that_fell_has_no_rate_there_and_one_that_was_missed_spans_the_gap() -> None:
    _, values = rate(AT, np.array([5.0, 5.1, 0.0, 0.1]))
    assert values.tolist()[:1] == pytest.approx([10.0])
    assert np.isnan(values[1])
    at, values = rate(AT, np.array([0.0, math.nan, 0.2, 0.3]))
    assert at.tolist() == [0, 20_000_000, 30_000_000]
    assert values[:2].tolist() == pytest.approx([10.0, 10.0])


def test_windows_are_as_long_as_the_counter_needs() -> None:
    at, values = rate(AT, np.array([0.0, 0.0, 0.02, 0.02]), least_window_s=0.02)
    assert at.tolist() == [0, 20_000_000]
    assert values[:1].tolist() == pytest.approx([1.0])


def test_what_is_modelled_stays_modelled_and_nothing_is_no_line() -> None:
    modelled = series("model", Channel("cpu_energy_j", "J", True, "modelled"), 0.0, 1.0)
    gone = series("gone", Channel("gpu_utilisation", "1", False, "measured"), math.nan, math.nan)
    never = series("never", Channel("rail_power_w", "W", False, "unavailable"), 0.0, 0.0)
    assert [track.origin for track in tracks(samples(modelled, gone, never))] == ["modelled"]


@pytest.mark.parametrize(
    ("name", "unit", "counter", "quantity"),
    [
        ("cpu3_time_s", "s", True, "utilisation"), ("process_time_s", "s", True, "process"),
        ("process_wait_s", "s", True, "waiting"), ("pressure_memory_s", "s", True, "waiting"),
        ("steal_time_s", "s", True, "waiting"), ("gpu0_utilisation", "1", False, "gpu"),
        ("mem_available_bytes", "B", False, "available"), ("process_resident_bytes", "B", False, "memory"),
        ("cpu0_frequency_hz", "Hz", False, "frequency"), ("battery_current_a", "A", False, "current"),
        ("under_voltage", "1", False, "other"),
    ],
)  # fmt: skip
def test_each_channel_has_its_lane(name: str, unit: str, counter: bool, quantity: str) -> None:
    channel = Channel(name, unit, counter, "measured")  # type: ignore[arg-type]
    assert tracks(samples(series("a", channel, 0.0, 1.0)))[0].quantity == quantity


def test_the_mean_of_the_cores_comes_first(kept_profile: RunFolder) -> None:
    cores = [track for track in load_run(kept_profile).tracks if track.quantity == "utilisation"]
    assert [track.name for track in cores] == ["mean of all cores", "cpu0", "cpu1", "cpu2", "cpu3"]
    assert cores[0].values[:-1] == pytest.approx(np.mean([core.values[:-1] for core in cores[1:]], axis=0))
    assert 0.02 < np.max(cores[0].values[:-1]) < (0.97 + 0.12 + 0.08 + 0.05) / 4 + 1e-6


def test_a_hundred_cores_leave_room_for_the_rest() -> None:
    cores = [series(f"s{n}", Channel(f"cpu{n}_time_s", "s", True, "measured"), 0.0, 0.001 * n) for n in range(100)]
    memory = series("m", Channel("process_resident_bytes", "B", False, "measured"), 1.0, 2.0)
    found = drawn(tracks(samples(*cores, memory)))
    assert [track.quantity for track in found] == ["utilisation"] * MAX_IN_A_LANE + ["memory"]
    assert [track.name for track in found if track.is_main] == ["mean of all cores", "process resident"]


def line(values: list[float], holds: bool = False) -> Track:
    at = np.arange(len(values), dtype=np.int64) * 10
    return Track("a", "a", "power", "W", "measured", at, np.array(values), holds)


def test_buckets_keep_the_least_and_the_most() -> None:
    values = [float(n % 10) for n in range(1000)]
    values[500] = 99.0
    thin = thinned(line(values), 100)
    assert len(thin.at_ns) == 100
    assert (thin.most.max(), thin.least.min()) == (99.0, 0.0)
    assert thin.mean[0] == 4.5
    few = thinned(line(values), 1000)
    assert few.mean.tolist() == values


def test_a_bucket_of_nothing_is_nothing() -> None:
    thin = thinned(line([1.0] * 10 + [math.nan] * 10), 4)
    assert thin.mean[:2].tolist() == [1.0, 1.0]
    assert np.isnan(thin.mean[2:]).all()
    assert np.isnan(thin.most[2:]).all()


def test_a_part_has_a_reading_on_either_side() -> None:
    part = within(line([0.0, 1.0, 2.0, 3.0, 4.0]), 15, 25)
    assert part.at_ns.tolist() == [10, 20, 30]
    assert within(replace(line([1.0]), at_ns=np.array([5])), 100, 200).at_ns.tolist() == [5]
