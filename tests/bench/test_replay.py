"""Recordings are read by the sources of a machine; EMDL'21's power traces give the published power and explain the
published energy."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest

from benchmarks import phone_energy
from benchmarks.replay import read_clocks, read_trace, replay
from edgetrain.errors import UserError
from edgetrain.measure.sensors.recording import Recording

HEADER = ",stamp,processPid,VIRT,RES,SHR,cpuUsage,battery_current,battery_voltage,usb_current,usb_voltage\n"
ROWS = (
    "1,1618289703681,nan,nan,nan,nan,nan,-1953,4379627,176145,5036418\n"
    "2,1618289704181,of,1.5G,66M,5.6M,210,-500000,4000000,480000,5000000\n"
    "3,1618289704681,of,1.5G,67M,5.6M,nan,nan,4000000,480000,5000000\n"
)
needs_data = [
    pytest.mark.data,
    pytest.mark.skipif("EDGETRAIN_DATA" not in os.environ, reason="EDGETRAIN_DATA does not name the data folder"),
]


def data() -> Path:
    return Path(os.environ["EDGETRAIN_DATA"]) / "emdl21-phones"


def trace(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_trace_is_read_as_a_phone_would_be(tmp_path: Path) -> None:
    found = read_trace(trace(tmp_path / "processed_data_X.csv", HEADER + ROWS))
    assert list(found.cpu) == [None, 2.1, None]
    assert list(found.resident_bytes) == [None, 66 * 2**20, 67 * 2**20]
    assert list(found.virtual_bytes) == [None, 1.5 * 2**30, 1.5 * 2**30]
    played = replay(found.recording)
    assert played.times_s == (0.0, 0.5, 1.0)
    usb, battery, both = (played.column(f"{of}_power_w") for of in ("usb", "battery", "supply"))
    assert usb == pytest.approx((0.176145 * 5.036418, 2.4, 2.4))
    assert battery[:2] == pytest.approx((0.001953 * 4.379627, 2.0))
    assert battery[2] is None
    assert both[1] == pytest.approx(4.4)
    assert both[2] is None  # a part that is missing makes the sum missing, not smaller
    kinds = {channel.name: channel.kind for channel in played.channels}
    assert (kinds["usb_power_w"], kinds["usb_current_a"]) == ("derived", "measured")
    with pytest.raises(UserError, match="has no gpu_power_w"):
        played.column("gpu_power_w")


def test_a_file_that_appears_late_is_read_from_then_on() -> None:
    path = "sys/class/thermal/thermal_zone0/temp"
    played = replay(Recording("late", (0.0, 1.0), {path: (None, "41000")}, {path.replace("temp", "type"): "soc"}))
    assert played.column("temp_soc_c") == (None, 41.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no trace"),
        ("a,b\n1,2\n", "no trace"),
        (HEADER + ROWS.replace("-500000", "much"), "battery_current is no number"),
        (HEADER + ROWS.replace("1.5G", "1.5X"), "VIRT is no number"),
        (HEADER + ROWS.replace("480000", "inf"), "usb_current is no number"),
        (HEADER + ROWS.replace("1618289704681", "1618289703000"), "wrong order"),
        (HEADER + ROWS.replace("1618289704681", "nan"), "without a time"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_trace(trace(tmp_path / "x.csv", text))


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


@pytest.fixture(scope="module")
def found() -> list[phone_energy.Energy]:
    return [energy for net in phone_energy.NETS for energy in phone_energy.energies(data(), net)]


class TestPublished:
    pytestmark = needs_data

    def test_gross_power_is_the_published_one(self, found: list[phone_energy.Energy]) -> None:
        assert len(found) == len(phone_energy.NETS) * len(phone_energy.BATCHES)
        for energy in found:
            assert abs(energy.gross_off) <= 0.01, energy.published
            assert energy.samples >= 5

    def test_the_published_joules_are_usb_power_above_an_idle_that_is_not_published(
        self, found: list[phone_energy.Energy]
    ) -> None:
        found = [energy for energy in found if energy.published.net in ("Alexnet", "Squeezenet")]
        implied = [energy.implied_idle_w for energy in found]
        assert statistics.median(implied) == pytest.approx(0.37, abs=0.02)
        assert all(energy.idle_usb_w > 0.45 for energy in found)  # what the traces show before training is more
        battery = statistics.median(energy.mean_battery_w for energy in found)
        assert 0.9 < battery < 1.6
        assert all(energy.net_j > energy.published.net_j for energy in found)

    def test_the_clocks_are_of_an_idle_phone(self) -> None:
        played = replay(read_clocks(data() / "freq_temperature.csv"))
        big = [hz for core in (4, 5, 6) for hz in played.column(f"cpu{core}_frequency_hz") if hz is not None]
        assert statistics.median(big) == 710_400_000  # the lowest clock of the big cores
        warmth = [degrees for degrees in played.column("battery_temperature_c") if degrees is not None]
        assert 20 < min(warmth) <= max(warmth) < 40

    def test_a_trace_without_power_has_none(self) -> None:
        found = read_trace(data() / "XIAOMI/Lenet/processed_data_Lenet.csv")
        assert found.recording.files == {}
        assert replay(found.recording).channels == ()
