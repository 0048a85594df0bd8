"""`edgetrain doctor` and `edgetrain calibrate` as a user meets them."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgetrain.errors import UserError
from edgetrain.measure import calibration
from edgetrain.measure.calibration import Calibration
from edgetrain.measure.sensors.source import missing
from tests.cli.commands import Run, commands, told
from tests.measure.sensors.trees import closer, lay, write


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(importlib.import_module("edgetrain.cli.doctor"), "_WINDOW_S", 0.02)
    monkeypatch.setattr("edgetrain.measure.sensors.android.find", lambda: pytest.fail("adb was asked"))
    return commands(capsys, monkeypatch)


def machine(root: Path, name: str) -> Path:
    """A recorded machine whose process is this one."""
    lay(root, name)
    own = root / f"proc/{os.getpid()}"
    if (root / "proc/4242").is_dir():
        (root / "proc/4242").rename(own)
    if (own / "task/4242").is_dir():
        (own / "task/4242").rename(own / f"task/{os.getpid()}")
    return root


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgetrain.cli.output.results.width", 200)


def test_the_table_fits_80_columns(run: Run, tmp_path: Path) -> None:
    code, out, err = run("doctor", "--root", machine(tmp_path / "m", "laptop"))
    assert (code, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "process time" in out


@pytest.mark.usefixtures("wide")
def test_every_sensor_is_listed(run: Run, tmp_path: Path) -> None:
    text = told(run("doctor", "--root", machine(tmp_path / "m", "laptop"))[1])
    for words in (
        "rapl yes energy of the processor: package_0, package_0_core", "about 61 µJ", "process time yes",
        "power supply yes", "now: supply 14.7 W", "hwmon yes", "cpu0 3.00 GHz", "acpitz 1 25 °C", "10 ms ticks",
        "power model no not needed", "nvidia no", "jetson gpu no", "process resident 419 MB",
    ):  # fmt: skip
        assert words in text, words
    assert text.count("µs") >= 8  # what a read costs


def test_the_first_line_is_this_machine(run: Run, tmp_path: Path) -> None:
    first = run("doctor", "--root", machine(tmp_path / "m", "rpi5"))[1].splitlines()[0]
    assert "core" in first
    assert "Linux" in first or sys.platform != "linux"


def test_a_closed_sensor_comes_with_its_command_in_one_piece(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path / "m", "server")

    closer(monkeypatch)(*root.glob("sys/class/powercap/*/energy_uj"))
    code, out, _ = run("doctor", "--root", root)
    assert code == 0
    assert "rapl closed" in told(out)
    folder = f"{root}/sys/class/powercap"
    files = " ".join(f"{folder}/intel-rapl:{n}/energy_uj" for n in ("0", "0:0", "1", "1:0"))
    assert f"sudo chmod a+r {files}" in out  # not broken over lines


def test_json_is_everything(run: Run, tmp_path: Path) -> None:
    code, out, err = run("doctor", "--root", machine(tmp_path / "m", "jetson_tx2"), "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["machine"]["cores"]
    sources = {source["name"]: source for source in found["sources"]}
    rails = {channel["name"]: channel for channel in sources["ina3221"]["channels"]}
    assert rails["rail_VDD_IN_power_w"]["value"] == pytest.approx(8.944)
    assert rails["rail_VDD_SYS_GPU_power_w"]["part_of"] == "rail_VDD_IN_power_w"
    assert rails["rail_VDD_IN_power_w"]["kind"] == "measured"
    assert sources["ina3221"]["read_s"] > 0
    assert (sources["rapl"]["found"], sources["rapl"]["channels"], sources["rapl"]["read_s"]) == (False, [], None)


def test_a_value_that_is_not_to_be_had_is_unavailable(run: Run, tmp_path: Path) -> None:
    root = machine(tmp_path / "m", "laptop")
    write(root, "sys/class/power_supply/AC/online", "1\n")
    sources = {source["name"]: source for source in json.loads(run("doctor", "--root", root, "--json")[1])["sources"]}
    channels = {channel["name"]: channel for channel in sources["power supply"]["channels"]}
    assert channels["supply_power_w"] | {"unit": "W"} == channels["supply_power_w"]
    assert (channels["supply_power_w"]["value"], channels["supply_power_w"]["kind"]) == (None, "unavailable")


@pytest.mark.usefixtures("wide")
def test_energy_that_is_modelled_says_so(run: Run, tmp_path: Path) -> None:
    root = machine(tmp_path / "m", "rpi5")
    write(root, "proc/stat", "cpu  100 0 0 900 0 0 0 0 0 0\ncpu0 100 0 0 900 0 0 0 0 0 0\n")
    text = told(run("doctor", "--root", root)[1])
    assert "power model no energy, modelled from CPU time" in text  # nobody gave watts for a Pi 5
    assert "edgetrain calibrate" in text
    text = told(run("doctor", "--root", root, "--device", "rpi4")[1])
    assert "power model yes energy of the machine, modelled, ±21 %: 2.7 W idle, 0.75 W a core" in text
    assert re.search(r"now: model \d+(\.\d+)? W", text)
    code, _, err = run("doctor", "--root", root, "--device", "rpi9")
    assert code == 1
    assert "no device named 'rpi9'" in err


def test_doctor_runs_on_this_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "edgetrain.measure.sensors.android.find", lambda: missing("android", "phones", "", "plug it in")
    )
    code, out, _ = run("doctor")
    assert code == 0
    assert "process time" in out
    assert "android: plug it in" in told(out)


# ---- calibrate


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is 0.1 cores busy idle and 2.1 at work, whatever else runs here."""

    def calibrate(ask: Callable[[str], float], **_: object) -> Calibration:
        made = Calibration(calibration.machine(), "2026-01-31T12:00:00+00:00", ask("idle"), ask("busy"), 0.1, 2.1)
        return calibration.checked(made)

    monkeypatch.setattr(calibration, "calibrate", calibrate)


@pytest.mark.usefixtures("measured")
def test_a_calibration_is_kept_and_shown(run: Run) -> None:
    code, out, err = run("calibrate", "--idle-watts", 3, "--busy-watts", 6)
    assert code == 0
    assert "2.85 W idle and 1.5 W a busy core, modelled (calibrated), ±15 %" in out
    assert "watch the meter" in err
    kept = calibration.load(calibration.machine())
    assert kept is not None
    assert (kept.idle_read_w, kept.busy_read_w) == (3, 6)
    code, out, _ = run("calibrate", "--idle-watts", 3, "--busy-watts", 6, "--json")
    found = json.loads(out)
    assert found["model"]["calibrated"]
    assert found["file"] == str(calibration.file())


@pytest.mark.usefixtures("measured")
def test_watts_that_nobody_gives_are_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["3.0", "6.0"])
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    assert run("calibrate")[0] == 0
    kept = calibration.load(calibration.machine())
    assert kept is not None
    assert kept.busy_read_w == 6


@pytest.mark.usefixtures("measured")
def test_mistakes_are_one_message(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("calibrate", "--idle-watts", 6, "--busy-watts", 3)
    assert (code, out) == (1, "")
    assert "do not fit a machine" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, _, err = run("calibrate", "--idle-watts", 6)
    assert code == 1
    assert "--busy-watts" in err
    assert run("calibrate", "--idle-watts", -1)[0] == 2
    with pytest.raises(UserError):
        calibration.checked(Calibration(calibration.machine(), "", 1, 1, 0, 1))


def test_help_has_an_example(run: Run) -> None:
    assert "Example: edgetrain doctor" in told(run("doctor", "--help")[1])
    assert "Example: edgetrain calibrate" in told(run("calibrate", "--help")[1])
