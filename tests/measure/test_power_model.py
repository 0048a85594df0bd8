"""Energy that is modelled: the watts it is made of, the source that gives it, and a plug meter that makes it better."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgetrain.devices.device import FOLDER, load
from edgetrain.errors import UserError
from edgetrain.measure import calibration, power_model
from edgetrain.measure.calibration import Calibration, Machine
from edgetrain.measure.power_model import find_model, model_here, model_of, with_model
from edgetrain.measure.sensors import find
from edgetrain.measure.sensors.source import SystemClock

PID = 4242
INTEL = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Core(TM) i5-1135G7\n"


def write(root: Path, path: str, content: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content)


def stat(root: Path, *busy_s: float) -> None:
    """/proc/stat of cores that have been busy for so long."""
    rows = [f"cpu{n} {round(s * 100)} 0 0 1000 0 0 0 0 0 0" for n, s in enumerate(busy_s)]
    write(root, "proc/stat", "\n".join([f"cpu  {round(sum(busy_s) * 100)} 0 0 9000 0 0 0 0 0 0", *rows]) + "\n")


def schedstat(root: Path, run_s: float) -> None:
    write(root, f"proc/{PID}/task/{PID}/schedstat", f"{round(run_s * 1e9)} 0 1\n")


@pytest.fixture
def pi(tmp_path: Path) -> Path:
    """A Raspberry Pi 4 with two of its cores."""
    write(tmp_path, "proc/device-tree/model", "Raspberry Pi 4 Model B Rev 1.4\0")
    stat(tmp_path, 10.0, 20.0)
    schedstat(tmp_path, 5.0)
    return tmp_path


class Clock(SystemClock):
    """Shows what a test puts into it."""

    def __init__(self) -> None:
        super().__init__(0)
        self.now = 100.0

    def read(self) -> float | None:
        return self.now


class Both:
    """The sources of the machine and of the process, read one after the other."""

    def __init__(self, root: Path, clock: Clock | None = None) -> None:
        found = find_model(root, pid=PID, clock=clock)
        self.findings = [finding for finding, _ in found]
        self.sources = [source for _, source in found if source is not None]
        assert len(self.sources) == 2
        self.channels = [channel for source in self.sources for channel in source.channels]
        for source in self.sources:
            source.open()

    def read(self) -> tuple[float | None, ...]:
        return tuple(value for source in self.sources for value in source.read())


# ---- the watts


def test_a_device_file_gives_the_watts_and_their_uncertainty() -> None:
    model = model_of(load("rpi4"))
    assert (model.idle_w, model.core_w, model.cores) == (2.7, 0.75, 4)
    assert model.watts(4) == pytest.approx(5.7)
    assert model.watts(4, clock=0.5) == pytest.approx(2.7 + 3 * 0.5**1.3)
    assert model.plus_minus == pytest.approx((0.9**2 + 0.81**2) ** 0.5 / 5.7)
    assert model.label == "modelled, ±21 %"
    assert model_of(load("jetson_tx2")).cores == 4  # its CPU, although it trains on the GPU


def test_a_device_without_power_is_refused(tmp_path: Path) -> None:
    text = (FOLDER / "rpi4.toml").read_text()
    start = text.index("[power]")
    path = tmp_path / "own.toml"
    path.write_text(text[:start] + text[text.index("[library]") :])
    with pytest.raises(UserError, match="has no power to model"):
        model_here(tmp_path, path)


def test_which_watts_are_used(pi: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = model_here(pi)
    assert found is not None
    assert found.source == "device file rpi4"
    pc = tmp_path_factory.mktemp("pc")
    write(pc, "proc/cpuinfo", INTEL)
    stat(pc, 1.0, 1.0, 1.0, 1.0)
    server = model_here(pc)
    assert server is not None
    assert server.watts(0) == pytest.approx(4 * 0.74)
    assert server.watts(4) == pytest.approx(4 * 3.5)
    assert server.plus_minus == 0.5
    unknown = tmp_path_factory.mktemp("unknown")
    write(unknown, "proc/device-tree/model", "Some Other Board\0")
    stat(unknown, 1.0)
    assert model_here(unknown) is None
    ((finding, source),) = find_model(unknown, pid=PID)
    assert (finding.found, source) == (False, None)
    assert "edgetrain calibrate" in (finding.fix or "")


# ---- the source


def test_energy_is_idle_power_and_busy_cores(pi: Path) -> None:
    clock = Clock()
    source = Both(pi, clock)
    assert all("modelled, ±21 %" in finding.gives for finding in source.findings)
    assert [channel.name for channel in source.channels] == ["model_energy_j", "model_process_energy_j"]
    for channel in source.channels:
        assert (channel.kind, channel.counter, channel.unit) == ("modelled", True, "J")
        assert channel.plus_minus == pytest.approx(0.2124, abs=1e-3)
    assert source.channels[1].part_of == "model_energy_j"
    assert source.read() == (0.0, 0.0)
    clock.now += 10
    stat(pi, 20.0, 25.0)
    schedstat(pi, 12.0)
    assert source.read() == pytest.approx((2.7 * 10 + 0.75 * 15, 0.75 * 7))


def test_the_model_can_be_sent_to_another_process(pi: Path) -> None:
    for source in Both(pi).sources:
        source.close()
        there = pickle.loads(pickle.dumps(source))
        there.open()
        assert there.read() == (0.0,)
        there.close()


def test_slow_clocks_take_less(pi: Path) -> None:
    for core, khz in (("cpu0", 750_000), ("cpu1", 1_500_000)):
        write(pi, f"sys/devices/system/cpu/{core}/cpufreq/scaling_cur_freq", f"{khz}\n")
        write(pi, f"sys/devices/system/cpu/{core}/cpufreq/cpuinfo_max_freq", "1500000\n")
    clock = Clock()
    source = Both(pi, clock)
    source.read()
    clock.now += 1
    stat(pi, 11.0, 21.0)
    assert source.read()[0] == pytest.approx(2.7 + 0.75 * (0.5**1.3 + 1))


def test_what_is_not_told_is_missing_and_counted_when_it_comes_back(pi: Path) -> None:
    clock = Clock()
    source = Both(pi, clock)
    source.read()
    write(pi, "proc/stat", "")
    write(pi, f"proc/{PID}/task/{PID}/schedstat", "")
    clock.now += 5
    assert source.read() == (None, None)
    clock.now += 5
    stat(pi, 12.0, 20.0)
    schedstat(pi, 6.0)
    assert source.read() == pytest.approx((2.7 * 10 + 0.75 * 2, 0.75))


def test_the_model_steps_back_where_a_sensor_tells_power(pi: Path) -> None:
    alone = with_model(find(pi, pid=PID, reads=0), pi, pid=PID, reads=1)
    assert alone[-1][1] is not None
    assert alone[-1][0].read_s is not None
    write(pi, "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3/in1_label", "VDD_IN\n")
    write(pi, "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3/in1_input", "5072\n")
    write(pi, "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3/curr1_input", "1240\n")
    found = find(pi, pid=PID, reads=0)
    finding, source = with_model(found, pi, pid=PID)[-1]
    assert (finding.name, source) == ("power model", None)
    assert "not needed" in finding.gives
    assert with_model(found, pi, pid=PID, device="rpi4")[-1][1] is not None  # unless one asks for it


# ---- calibration

HERE = Machine("Raspberry Pi 4 Model B Rev 1.4", 2, False)
READ = Calibration(HERE, "2026-01-31T12:00:00+00:00", 3.0, 6.0, 0.1, 2.1)


def test_two_readings_give_idle_and_a_core() -> None:
    assert READ.core_w == pytest.approx(1.5)
    assert READ.idle_w == pytest.approx(2.85)
    model = power_model.from_calibration(READ)
    assert model.watts(0.1) == pytest.approx(3.0)
    assert model.watts(2.1) == pytest.approx(6.0)
    assert model.label == "modelled (calibrated), ±15 %"


def test_a_calibration_is_kept_and_used_on_its_machine_alone(pi: Path) -> None:
    assert calibration.load(HERE) is None
    path = calibration.save(READ)
    assert path == Path(os.environ["EDGETRAIN_CONFIG"]) / "power.json"
    assert calibration.load(HERE) == READ
    assert calibration.load(replace(HERE, cores=8)) is None
    model = model_here(pi)
    assert model is not None
    assert model.calibrated
    assert model.plus_minus < model_of(load("rpi4")).plus_minus
    finding, _ = find_model(pi, pid=PID)[0]
    assert "modelled (calibrated)" in finding.gives
    assert finding.fix is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"busy_read_w": 2.0}, "do not fit a machine"),
        ({"idle_read_w": 0.0}, "do not fit a machine"),
        ({"idle_cores": 1.9}, "as busy idle as under load"),
        ({"busy_cores": float("nan")}, "cannot be"),
        ({"idle_read_w": -1.0}, "cannot be"),
    ],
)
def test_readings_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        calibration.checked(replace(READ, **change))


@pytest.mark.parametrize("content", ["", "[]", '{"machine": 3}', "NaN"])
def test_a_damaged_calibration_says_which_file(pi: Path, content: str) -> None:
    path = calibration.save(READ)
    path.write_text(content)
    with pytest.raises(UserError, match=r"power\.json"):
        calibration.load(HERE)
    ((finding, source),) = find_model(pi, pid=PID)
    assert (finding.found, finding.readable, source) == (True, False, None)
    assert str(path) in (finding.fix or "")


def test_an_edited_calibration_is_checked() -> None:
    path = calibration.save(READ)
    path.write_text(json.dumps({**json.loads(path.read_text()), "busy_read_w": 1.0}))
    with pytest.raises(UserError, match=r"power\.json"):
        calibration.load(HERE)


def test_calibrating_puts_the_cores_to_work_and_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real(*words, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    phases: list[str] = []

    def ask(phase: str) -> float:
        phases.append(phase)
        return {"idle": 20.0, "busy": 30.0}[phase]

    monkeypatch.setattr(calibration, "checked", lambda made: made)  # other programs may have all cores all the time
    made = calibration.calibrate(ask, idle_s=0.05, busy_s=0.2, cores=2)
    assert len(started) == 2
    assert all(worker.returncode is not None for worker in started)
    assert phases == ["idle", "busy"]
    assert (made.idle_read_w, made.busy_read_w) == (20, 30)
    assert made.busy_cores > 0.2
    assert made.machine == calibration.machine()


def test_a_root_without_cores_cannot_be_calibrated(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="how busy"):
        calibration.calibrate(lambda _: 1.0, idle_s=0.01, busy_s=0.01, root=tmp_path, cores=1)
