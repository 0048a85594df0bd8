"""`edgetrain devices` and `edgetrain plan --device` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgetrain.cli.devices import _amount, _binary
from edgetrain.costs.table import Costs
from edgetrain.devices.device import FOLDER, load, names
from tests.cli.commands import Run, commands, told


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return commands(capsys, monkeypatch)


def test_the_table_has_every_device_and_fits_80_columns(run: Run) -> None:
    code, out, _ = run("devices")
    assert code == 0
    lines = out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert {line.split()[0] for line in lines[1 : 1 + len(names())]} == set(names())
    assert "edgetrain devices NAME" in out


def test_one_device_shows_every_number_with_its_source(run: Run) -> None:
    code, out, _ = run("devices", "rpi4")
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())
    device = load("rpi4")
    column = told("".join(line[46:].strip() + " " for line in out.splitlines()))
    for name, quantity in device.quantities():
        assert name in out
        assert quantity.source.split(";")[0].split(":")[0] in column, name
        if quantity.plus_minus:
            assert f"{100 * quantity.plus_minus:.0f} %" in out
    for words in ("19.2 GFLOP/s", "45.5 MB/s", "5.1 µs", "2 GFLOP/s", "120 MFLOP/s", "contradicts itself", "4 GiB"):
        assert words in told(out)


def test_json_is_the_whole_device(run: Run) -> None:
    _, out, _ = run("devices", "--json")
    rows = json.loads(out)["devices"]
    assert {row["name"] for row in rows} == set(names())
    _, out, _ = run("devices", "nrf52840", "--json")
    device = json.loads(out)["device"]
    assert device["memory"]["ram"][0]["n_bytes"]["value"] == 262_144
    assert device["processors"]["cpu"]["dense_flop_s"]["source"].startswith("POET")


def test_a_device_that_is_not_there_is_one_message(run: Run) -> None:
    for words in (("devices", "rpi5"), ("plan", "lenet", "--memory", "1MB", "--device", "rpi5")):
        code, out, err = run(*words)
        assert (code, out) == (1, "")
        assert "there is no device named 'rpi5'" in err
        assert "did you mean" in err
    Path("own.toml").write_text("name = 3")
    code, _, err = run("devices", "own.toml")
    assert code == 1
    assert "own.toml" in err
    assert "Traceback" not in err


def test_help_has_an_example(run: Run) -> None:
    assert "Example: edgetrain devices rpi4" in told(run("devices", "--help")[1])
    assert "--device rpi4" in told(run("plan", "--help")[1])


def test_a_plan_for_a_device_says_that_its_times_are_modelled(run: Run) -> None:
    given = ("--batch", 4, "--memory", "800kB", "--device", "meizu_16t", "--planner", "recompute-only")
    code, out, err = run("plan", "lenet", *given, "--out", "first")
    assert code == 0, err
    text = told(out)
    for words in (
        "times modelled for Meizu 16T", "not measured",
        "about 68 % confidence", "time of a step, modelled for Meizu 16T",
        "energy above idle, modelled for Meizu 16T", "time, modelled for Meizu 16T", "RAM of Meizu 16T 6.44 GB",
        "MNN (2021) alone would hold",
    ):  # fmt: skip
        assert words in text, words
    assert "predicted" not in text
    assert text.count(" ms") > 0
    page = Path("first/plan.html").read_text()
    assert page.count("modelled for Meizu 16T") >= 3
    assert Costs.load("first/costs.json").origin == "modelled"
    summary = json.loads(Path("first/record.json").read_text())["summary"]
    assert (summary["time"]["origin"], summary["peak"]["origin"]) == ("modelled", "derived")


def test_a_plan_for_a_device_as_json(run: Run) -> None:
    words = ("plan", "lenet", "--width", 0.5, "--batch", 4, "--memory", "1MB", "--json")
    found: dict[str, Any] = json.loads(run(*words, "--device", FOLDER / "nrf52840.toml")[1])
    assert found["costs"]["origin"] == "modelled"
    assert (found["costs"]["device_key"], found["costs"]["ram_bytes"]) == ("nrf52840", 262_144)
    assert found["costs"]["library_bytes"] is None
    assert found["costs"]["uncertainty"] == pytest.approx(0.4, rel=0.01)
    assert found["plan"]["energy_j"] == pytest.approx(0.011 * found["plan"]["time_s"])
    assert found["firmware"]["ram_bytes"] == found["firmware"]["arena_bytes"] + found["firmware"]["lasting_bytes"]
    faster = json.loads(run(*words, "--device", "rpi4")[1])
    assert faster["plan"]["time_s"] < found["plan"]["time_s"] / 20


def test_a_plan_that_a_device_has_no_room_for_is_a_failure(run: Run) -> None:
    for words in (("nrf52840",), ("nrf52840", "--runtime", "library"), ("nrf52840", "--sweep", "1.0,0.9")):
        code, _, err = run("plan", "lenet", "--batch", 16, "--device", *words)
        assert code == 1, words
        assert "Traceback" not in err


def test_a_bound_on_the_process_is_refused_for_another_device(run: Run) -> None:
    code, out, err = run("plan", "lenet", "--process-memory", "1GB", "--device", "rpi4")
    assert (code, out) == (2, "")
    assert "--process-memory" in err


def test_amounts_are_short() -> None:
    assert (_amount(1.92e10, "FLOP/s"), _amount(1.5e-6, "s"), _amount(0, "W")) == ("19.2 GFLOP/s", "1.5 µs", "0 W")
    assert (_amount(2.66e11, ""), _amount(3e-8, "s"), _amount(950, "B/s")) == ("266 G", "30 ns", "950 B/s")
    assert (_binary(2**32), _binary(320 * 1024), _binary(512)) == ("4 GiB", "320 KiB", "512 B")
