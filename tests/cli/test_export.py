"""`edgetrain export` and `edgetrain emulate` as a user meets them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from edgetrain.firmware import kernels
from tests.cli.commands import Run, commands
from tests.helpers.keyword_files import write_keywords

NETS = """
from torch import nn

def small(classes):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, classes),
    )

def odd(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.GELU(), nn.Linear(16, classes))

def wide(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2000), nn.ReLU(), nn.Linear(2000, classes))
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(NETS)
    return commands(capsys, monkeypatch)


def words(net: str, target: str, *more: object) -> tuple[object, ...]:
    return ("export", f"own.py:{net}", "--target", target, "--data", "digits", "--batch", 4, "--out", "fw", *more)


def test_export_checks_itself_and_emulate_trains(run: Run) -> None:
    code, out, err = run(*words("small", "linux-x86_64", "--check", 2, "--momentum", 0.9, "--json"))
    assert code == 0, err
    said: dict[str, Any] = json.loads(out)
    assert said["wrong"] == []
    assert said["checked"] >= 8
    code, out, err = run("emulate", "fw", "--data", "digits", "--steps", 30, "--json")
    assert code == 0, err
    trained = json.loads(out)
    assert trained["arena_used_bytes"] == trained["arena_planned_bytes"] == said["arena_bytes"]
    assert sum(trained["losses"][-5:]) < sum(trained["losses"][:5])
    code, out, _ = run("emulate", "fw", "--data", "digits", "--steps", 2)
    assert code == 0
    assert "2 steps on linux-x86_64" in out
    assert "the fast program ran" in out
    code, out, _ = run("emulate", "fw", "--data", "digits", "--steps", 2, "--scalar", "--json")
    assert code == 0
    assert json.loads(out)["program"] == "scalar"
    assert json.loads(out)["losses"] == pytest.approx(trained["losses"][:2], rel=1e-5)
    assert run("emulate", "fw", "--data", "digits", "--scalar", "--threads", 2)[0] == 1


def test_a_run_goes_on_from_its_flash(run: Run) -> None:
    code, out, err = run(*words("small", "linux-x86_64", "--keep-every", 2, "--json"))
    assert code == 0, err
    assert json.loads(out)["kept_bytes"] == 2 * 4096
    go = ("emulate", "fw", "--data", "digits", "--flash", "flash.bin", "--steps")
    code, out, err = run(*go, 3, "--json")
    assert code == 0, err
    first = json.loads(out)
    code, out, _ = run(*go, 5, "--json")
    rest = json.loads(out)
    assert (rest["steps_before"], rest["steps"]) == (3, 2)
    whole = json.loads(run("emulate", "fw", "--data", "digits", "--steps", 5, "--json")[1])
    assert first["losses"] + rest["losses"] == whole["losses"]
    assert "went on from step 5" in run(*go, 5)[1]


def test_a_wrong_kernel_ends_with_an_exit_code(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted = shutil.copytree(kernels.FOLDER, tmp_path / "kernels")
    source = planted / "max_pool2d.c"
    assert "+= *dy++;" in source.read_text()
    source.write_text(source.read_text().replace("+= *dy++;", "+= *dy++ * 1.0001f;"))
    monkeypatch.setattr(kernels, "FOLDER", planted)
    code, _, err = run(*words("small", "linux-x86_64", "--check", 1))
    assert code == 1
    assert "tensors of the firmware are wrong" in err
    assert "gradient 0.weight" in err


def test_what_cannot_be_exported_is_said_before_anything_is_written(run: Run) -> None:
    code, _, err = run(*words("odd", "nrf52840"))
    assert code == 1
    assert "no kernel for aten.gelu.default" in err
    assert "module 2" in err
    code, _, err = run(*words("wide", "mkr1000"))
    assert code == 1
    assert "what would help, each by itself" in err
    code, _, err = run(*words("small", "z80"))
    assert code == 1
    assert "nrf52840" in err
    code, _, err = run("emulate", "nowhere", "--data", "digits")
    assert code == 1
    assert "Traceback" not in err
    assert not Path("fw").exists()


def exported(name: str, target: str, *more: object) -> tuple[object, ...]:
    return ("export", name, "--target", target, "--batch", 2, "--out", "fw", *more)


def test_keywords_train_a_ds_cnn(run: Run) -> None:
    folder = write_keywords(Path("keywords"))
    all_of_them = ("--width", 0.25, "--data", folder, "--batch", 18)
    code, out, err = run(*exported("ds_cnn", "linux-x86_64", *all_of_them))
    assert code == 0, err
    assert "edgetrain emulate fw --data keywords" in out
    code, out, err = run("emulate", "fw", "--data", folder, "--steps", 5, "--scalar", "--json")
    assert code == 0, err
    losses = json.loads(out)["losses"]
    assert losses[4] < losses[0]
    assert losses[0] == pytest.approx(math.log(3), rel=0.2)  # as many classes as the data has
    code, _, err = run("emulate", "fw", "--data", "digits")
    assert code == 1
    assert "expected: inputs of 1×49×10" in err
    assert "received: inputs of 1×8×8" in err


@pytest.mark.parametrize(
    ("net", "options"),
    [
        ("autoencoder", ("--input-size", 8)),
        ("minilearn_cifar", ("--width", 0.25)),
        ("minilearn_har", ()),
    ],
)
def test_nets_of_firmware_train_by_name_on_a_random_batch(run: Run, net: str, options: tuple[object, ...]) -> None:
    code, out, err = run(*exported(net, "linux-x86_64", *options))
    assert code == 0, err
    assert "edgetrain emulate fw\n" in out
    code, out, err = run("emulate", "fw", "--steps", 10, "--scalar", "--json")
    assert code == 0, err
    losses = json.loads(out)["losses"]
    assert losses[-1] < losses[0]
    _, other, _ = run("emulate", "fw", "--steps", 1, "--scalar", "--seed", 1, "--json")
    assert json.loads(other)["losses"][0] != losses[0]


@pytest.mark.parametrize(
    ("net", "data", "said"),
    [
        ("ds_cnn", "digits", ("expected: inputs of 1×49×10", "received: inputs of 1×8×8", "give keywords as MFCCs")),
        ("minilearn_har", "digits", ("expected: inputs of 90×3×1", "no data set here has that shape")),
        ("minilearn_kws", "keywords", ("expected: inputs of 1×62×12", "received: inputs of 1×49×10")),
        ("lenet", "keywords", ("lenet cannot be run on keywords", "`edgetrain models`")),
        ("minilearn_cifar", "keywords", ("cannot be resized", "such as ds_cnn")),
    ],
)
def test_data_of_another_shape_is_refused_with_a_way_out(run: Run, net: str, data: str, said: tuple[str, ...]) -> None:
    write_keywords(Path("keywords"))
    code, _, err = run(*exported(net, "linux-x86_64", "--data", data))
    assert code == 1
    assert all(text in " ".join(err.split()) for text in said), err
    assert "Traceback" not in err
    assert not Path("fw").exists()


@pytest.mark.skipif(shutil.which("qemu-system-arm") is None, reason="qemu-system-arm is not installed")
def test_a_board_is_emulated_and_a_failure_has_its_code(run: Run) -> None:
    assert run(*words("small", "nrf52840"))[0] == 0
    code, out, err = run("emulate", "fw", "--data", "digits", "--steps", 2, "--json")
    assert code == 0, err
    said = json.loads(out)
    assert said["arena_used_bytes"] == said["arena_planned_bytes"] == said["sections"][".arena"]
    assert said["instructions"] == sum(said["instructions_by_function"].values())
    assert "instructions" in run("emulate", "fw", "--data", "digits", "--steps", 1)[1]
    model = Path("fw/model.c")
    broken = "    step_number += 1;\n    *(volatile float *)0x20040000u = 1.0f;"
    model.write_text(model.read_text().replace("    step_number += 1;", broken))
    code, out, _ = run("emulate", "fw", "--data", "digits", "--steps", 2, "--json")
    assert code == 1
    assert json.loads(out)["failed"] == 5


def test_the_limit_that_is_met_first_is_the_one_that_is_told(run: Run) -> None:
    code, _, err = run(*words("wide", "nrf52840", "--memory", "2MB"))
    assert code == 1
    assert "nRF52840 has 262144 (RAM)" in err
    assert "still too many" in err
    _, _, err = run(*words("wide", "nrf52840", "--memory", "100kB"))
    assert "the budget is 100000 bytes" in err


@pytest.mark.parametrize("folder", ["own.py/fw", "/proc/fw"])
def test_a_folder_that_cannot_be_made_is_said(run: Run, folder: str) -> None:
    code, _, err = run("export", "own.py:small", "--target", "linux-x86_64", "--data", "digits", "--out", folder)
    assert code == 1
    assert "cannot be" in err or "cannot write" in err
    assert not err.startswith("Traceback")
