"""RAPL, hwmon, INA3221 rails, a Jetson's GPU, batteries and plugs: the values of recorded machines."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgetrain.measure.sensors import Finding, find, gives_power
from tests.measure.sensors.trees import PID, closer, lay, source, values, write

RANGE_UJ = 262143328850


def finding(root: Path, name: str) -> Finding:
    return next(finding for finding, _ in find(root, pid=PID, reads=0) if finding.name == name)


# ---- RAPL


def test_rapl_goes_round(tmp_path: Path) -> None:
    root = lay(tmp_path, "laptop")
    rapl = source(root, "rapl")
    before = values(rapl)["rapl_package_0_energy_j"]
    write(root, "sys/class/powercap/intel-rapl:0/energy_uj", "4971150\n")
    after = values(rapl)["rapl_package_0_energy_j"]
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(5.0, abs=1e-4)


def test_rapl_knows_what_is_inside_what(tmp_path: Path) -> None:
    channels = {channel.name: channel for channel in source(lay(tmp_path, "laptop"), "rapl").channels}
    assert {name: channel.part_of for name, channel in channels.items()} == {
        "rapl_package_0_energy_j": "rapl_psys_energy_j",
        "rapl_package_0_core_energy_j": "rapl_package_0_energy_j",
        "rapl_package_0_uncore_energy_j": "rapl_package_0_energy_j",
        "rapl_psys_energy_j": None,
    }
    assert all(channel.counter and channel.unit == "J" for channel in channels.values())


def test_rapl_that_only_root_may_read_says_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = lay(tmp_path, "laptop")
    close = closer(monkeypatch)
    domains = [root / f"sys/class/powercap/intel-rapl:{n}/energy_uj" for n in ("0", "0:0", "0:1", "1")]
    close(*domains)
    found = finding(root, "rapl")
    assert (found.found, found.readable) == (True, False)
    assert found.fix == "sudo chmod a+r " + " ".join(map(str, domains))


def test_rapl_of_which_a_part_is_closed_gives_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = lay(tmp_path, "laptop")
    close = closer(monkeypatch)
    psys = root / "sys/class/powercap/intel-rapl:1/energy_uj"
    close(psys)
    found = finding(root, "rapl")
    assert found.readable
    assert found.fix == f"sudo chmod a+r {psys}"
    assert found.channels[0].part_of is None  # nothing that can be read holds the package now


def test_rapl_without_its_range_is_left_out(tmp_path: Path) -> None:
    root = lay(tmp_path, "server")
    write(root, "sys/class/powercap/intel-rapl:1/max_energy_range_uj", "0\n")
    assert "rapl_package_1_energy_j" not in values(source(root, "rapl"))


# ---- hwmon, rails, GPU


def test_hwmon_by_chip_and_label(tmp_path: Path) -> None:
    found = values(source(lay(tmp_path / "a", "laptop"), "hwmon"))
    assert found == {
        "hwmon_nvme_Composite_c": 38.85,
        "hwmon_coretemp_Package_id_0_c": 52,
        "hwmon_coretemp_Core_0_c": 51,
        "hwmon_amdgpu_slowPPT_power_w": 35,
    }
    assert values(source(lay(tmp_path / "b", "server"), "hwmon")) == {
        "hwmon_amd_energy_Esocket0_energy_j": pytest.approx(123.456789)
    }


def test_rails_of_a_tx2(tmp_path: Path) -> None:
    rails = source(lay(tmp_path, "jetson_tx2"), "ina3221")
    assert values(rails) == {
        "rail_VDD_SYS_GPU_power_w": pytest.approx(3.285),
        "rail_VDD_SYS_SOC_power_w": pytest.approx(1.069),
        "rail_VDD_4V0_WIFI_power_w": 0,
        "rail_VDD_IN_power_w": pytest.approx(8.944),
        "rail_VDD_SYS_CPU_power_w": pytest.approx(1.681),
        "rail_VDD_SYS_DDR_power_w": pytest.approx(1.585),
    }
    assert {channel.part_of for channel in rails.channels} == {None, "rail_VDD_IN_power_w"}
    assert {channel.kind for channel in rails.channels} == {"measured"}


def test_rails_of_an_orin(tmp_path: Path) -> None:
    root = lay(tmp_path, "jetson_orin")
    rails = source(root, "ina3221")
    assert values(rails) == {
        "rail_VDD_IN_power_w": pytest.approx(5.072 * 1.240),
        "rail_VDD_CPU_GPU_CV_power_w": pytest.approx(5.072 * 0.328),
        "rail_VDD_SOC_power_w": pytest.approx(5.064 * 0.296),
    }
    assert {channel.kind for channel in rails.channels} == {"derived"}
    write(root, "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3/curr1_input", "")
    assert values(rails)["rail_VDD_IN_power_w"] is None  # a voltage alone is no power
    assert not finding(root, "hwmon").found  # the same rails, not counted a second time


def test_gpu_of_a_jetson(tmp_path: Path) -> None:
    found = values(source(lay(tmp_path / "a", "jetson_tx2"), "jetson gpu"))
    assert found == {"gpu_utilisation": pytest.approx(0.873), "gpu_frequency_hz": 1_300_500_000}
    found = values(source(lay(tmp_path / "b", "jetson_orin"), "jetson gpu"))
    assert found == {"gpu_utilisation": pytest.approx(0.12), "gpu_frequency_hz": 306_000_000}


# ---- batteries and plugs

BATTERY = "sys/class/power_supply/BAT0/"


def test_a_laptop_on_its_battery(tmp_path: Path) -> None:
    found = values(source(lay(tmp_path, "laptop"), "power supply"))
    assert found["BAT0_power_w"] == pytest.approx(1.25 * 11.8)
    assert found["supply_power_w"] == pytest.approx(1.25 * 11.8)
    assert not any("hidpp" in name for name in found)  # a mouse


def test_on_mains_nobody_knows_what_the_machine_takes(tmp_path: Path) -> None:
    root = lay(tmp_path, "laptop")
    supply = source(root, "power supply")
    supply.read()
    write(root, "sys/class/power_supply/AC/online", "1\n")
    write(root, BATTERY + "status", "Charging\n")
    found = values(supply)
    assert found["BAT0_power_w"] == pytest.approx(-1.25 * 11.8)  # into the battery
    assert found["supply_power_w"] is None


@pytest.mark.parametrize(
    ("status", "shown", "amperes"),
    [
        ("Discharging", "-1250000", 1.25),  # the kernel's rule
        ("Discharging", "1250000", 1.25),  # ACPI, and phones that turn it round
        ("Charging", "1250000", -1.25),
        ("Discharging", "850", 0.85),  # mA
        ("Discharging", "-850", 0.85),
        ("Full", "-488", 0.000488),  # µA: it lives on the plug
    ],
)
def test_signs_and_units_of_a_battery(tmp_path: Path, status: str, shown: str, amperes: float) -> None:
    root = lay(tmp_path, "laptop")
    write(root, BATTERY + "status", status + "\n")
    write(root, BATTERY + "current_now", shown + "\n")
    assert values(source(root, "power supply"))["BAT0_current_a"] == pytest.approx(amperes)


def test_what_a_driver_means_by_its_sign_is_remembered(tmp_path: Path) -> None:
    root = lay(tmp_path, "laptop")
    supply = source(root, "power supply")

    def amperes(status: str, shown: int) -> float | None:
        write(root, BATTERY + "status", status + "\n")
        write(root, BATTERY + "current_now", f"{shown}\n")
        return values(supply)["BAT0_current_a"]

    assert amperes("Discharging", 900_000) == pytest.approx(0.9)
    assert amperes("Charging", -500_000) == pytest.approx(-0.5)  # turned round: negative is into it
    assert amperes("Discharging", -900_000) == pytest.approx(0.9)
    assert amperes("Charging", -300_000) == pytest.approx(0.3)  # the kernel's rule: drained although plugged in
    assert amperes("Discharging", -2_000) == pytest.approx(0.002)  # µA for sure by now


def test_a_battery_in_watts_and_one_in_millivolts(tmp_path: Path) -> None:
    root = lay(tmp_path, "laptop")
    write(root, BATTERY + "power_now", "14750000\n")
    supply = source(root, "power supply")
    assert values(supply)["BAT0_power_w"] == pytest.approx(14.75)
    assert supply.channels[0].kind == "measured"
    write(root, BATTERY + "voltage_now", "11800\n")
    assert values(supply)["BAT0_voltage_v"] == pytest.approx(11.8)


def test_a_phone_takes_from_the_plug_and_from_the_battery(tmp_path: Path) -> None:
    supply = source(lay(tmp_path, "phone"), "power supply")
    found = values(supply)
    assert found["battery_power_w"] == pytest.approx(0.240722 * 4.315174)
    assert found["usb_power_w"] == pytest.approx(0.483670 * 4.849566)
    assert found["supply_power_w"] == pytest.approx(0.240722 * 4.315174 + 0.483670 * 4.849566)
    assert found["battery_temperature_c"] == pytest.approx(31.2)
    assert not any(name.startswith(("bms", "main")) for name in found)  # the same battery, under other names
    assert {c.part_of for c in supply.channels if c.unit == "W"} == {None, "supply_power_w"}


def test_which_machines_have_a_power_sensor(tmp_path: Path) -> None:
    def told(name: str) -> bool:
        return gives_power(find(lay(tmp_path / name, name), pid=PID, reads=0))

    assert [told(name) for name in ("laptop", "server", "jetson_tx2", "phone", "rpi5")] == [
        True,
        True,
        True,
        True,
        False,
    ]


def test_a_battery_on_mains_is_no_power_sensor(tmp_path: Path) -> None:
    root = lay(tmp_path, "laptop")
    shutil.rmtree(root / "sys/class/powercap")
    assert gives_power(find(root, pid=PID, reads=0))
    write(root, "sys/class/power_supply/AC/online", "1\n")
    assert not gives_power(find(root, pid=PID, reads=0))
