"""CPU time, memory, pressure, clocks and temperatures: the values of recorded machines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from edgetrain.measure.sensors import find
from edgetrain.measure.sensors.source import OpenFile
from tests.measure.sensors.trees import PID, files, lay, remove, source, values, write


def test_process_time_is_the_sum_of_its_threads_and_keeps_those_that_ended(tmp_path: Path) -> None:
    root = lay(tmp_path, "laptop")
    process = source(root, "process time")
    assert values(process) == {"process_time_s": pytest.approx(7.0), "process_wait_s": pytest.approx(0.15)}
    write(root, f"proc/{PID}/task/4250/schedstat", "1850000000 30000000 920\n")
    assert values(process)["process_time_s"] == pytest.approx(7.1)
    remove(root, f"proc/{PID}/task/4250/schedstat")
    (root / f"proc/{PID}/task/4250").rmdir()
    assert values(process)["process_time_s"] == pytest.approx(7.1)
    write(root, f"proc/{PID}/task/4260/schedstat", "500000000 0 9\n")
    assert values(process)["process_time_s"] == pytest.approx(7.6)


def test_core_time_leaves_idle_and_steal_out(tmp_path: Path) -> None:
    root = lay(tmp_path, "laptop")
    cores = source(root, "core time")
    found = values(cores)
    assert found["cpu0_time_s"] == pytest.approx((61700 + 110 + 22800 + 0 + 700) / 100)
    assert found["cpu_time_s"] == pytest.approx((123450 + 220 + 45670 + 890) / 100)
    assert found["steal_time_s"] == pytest.approx(0.12)
    assert {channel.least_window_s for channel in cores.channels} == {0.2}
    text = files("laptop")["proc/stat"]
    write(root, "proc/stat", text.replace("cpu1 ", "gone "))  # a core that was taken offline
    found = values(cores)
    assert found["cpu1_time_s"] is None
    assert found["cpu0_time_s"] is not None
    finding = next(finding for finding, _ in find(root, pid=PID) if finding.name == "core time")
    assert "10 ms" in finding.resolution
    assert "200 ms" in finding.resolution


def test_group_time_of_both_versions(tmp_path: Path) -> None:
    assert values(source(lay(tmp_path / "2", "laptop"), "group time")) == {"group_time_s": pytest.approx(7.312345)}
    found = values(source(lay(tmp_path / "1", "server"), "group time"))
    assert found == {
        "group_time_s": pytest.approx(63604.208544389),
        "group_cpu0_time_s": pytest.approx(28284.87341674),
        "group_cpu1_time_s": pytest.approx(35319.335127649),
    }


def test_memory_of_the_process_and_of_the_machine(tmp_path: Path) -> None:
    root = lay(tmp_path / "a", "laptop")
    found = values(source(root, "process memory"))
    assert found == {"process_resident_bytes": 409600 * 1024, "process_peak_bytes": 524288 * 1024}
    assert values(source(root, "memory")) == {"mem_available_bytes": 9874560 * 1024}
    group = lay(tmp_path / "b", "server")
    assert values(source(group, "memory")) == {"mem_available_bytes": 8589934592 - 3_000_000_000}
    write(root, f"proc/{PID}/status", "Name:\tpython3\nState:\tZ (zombie)\n")
    assert set(values(source(root, "process memory")).values()) == {None}


def test_pressure_is_seconds_waited(tmp_path: Path) -> None:
    root = lay(tmp_path, "laptop")
    found = values(source(root, "pressure"))
    assert found["pressure_cpu_s"] == pytest.approx(8533.317323)
    assert found["pressure_memory_s"] == pytest.approx(0.567742)
    assert found["pressure_io_s"] == pytest.approx(283.665045)


def test_a_kernel_without_pressure_says_what_it_needs(tmp_path: Path) -> None:
    finding = next(finding for finding, _ in find(lay(tmp_path, "server"), pid=PID) if finding.name == "pressure")
    assert not finding.found
    assert "psi=1" in (finding.fix or "")


def test_clocks_of_the_cores(tmp_path: Path) -> None:
    assert values(source(lay(tmp_path / "a", "laptop"), "cpu clock")) == {
        "cpu0_frequency_hz": 2_995_200_000,
        "cpu1_frequency_hz": 400_000_000,
    }
    # Denver cores of a TX2 may be off: the others keep their numbers.
    found = values(source(lay(tmp_path / "b", "jetson_tx2"), "cpu clock"))
    assert found == {"cpu0_frequency_hz": pytest.approx(2.0352e9), "cpu3_frequency_hz": pytest.approx(3.456e8)}


def test_temperatures_by_zone_and_none_for_a_sensor_that_is_off(tmp_path: Path) -> None:
    found = values(source(lay(tmp_path, "laptop"), "temperature"))
    assert found == {"temp_x86_pkg_temp_c": 53, "temp_acpitz_1_c": 25, "temp_acpitz_2_c": None}


def test_a_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    real = os.open

    def counted(path: Any, *rest: Any, **named: Any) -> int:
        opened.append(path)
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", counted)
    (tmp_path / "value").write_text("17\n")
    file = OpenFile(tmp_path / "value")
    assert [file.number() for _ in range(5)] == [17] * 5
    assert len(opened) == 1
    file.close()
    assert file.number() == 17
