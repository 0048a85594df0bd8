"""The command line as a user meets it: help, results, JSON, mistakes and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from edgetrain.cli.train import fitting, room, shown
from edgetrain.measure.record import SCHEMA, RunFolder, new_record
from edgetrain.run.trainer import Progress
from tests.cli.commands import Run, commands

COMMANDS = ("train", "plan", "export", "emulate", "graph", "models", "report", "demo")
OWN_MODEL = """
import torch
from torch import nn

def coloured(classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, classes))

def small(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

def broken(classes):
    return "no module"

def raising(classes):
    raise ValueError("not today")
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    return commands(capsys, monkeypatch)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(run: Run, command: str) -> None:
    ended = run(command, "--help")
    assert ended.code == 0
    assert f"Example: edgetrain {command}" in " ".join(ended.out.split())


def test_wrong_use_ends_with_2(run: Run) -> None:
    assert run("train").code == 2
    assert run("train", "lenet", "--batch", "many").code == 2
    assert run("no-such-command").code == 2
    for words in (("--optimizer", "magic"), ("--on", "tpu"), ("--schedule", "bogus")):
        ended = run("train", "lenet", *words)
        assert ended.code == 2
        assert words[0] in ended.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("train", "lnet"), "lenet"),
        (("train", "lenet", "--data", "nowhere/at/all"), "nowhere/at/all"),
        (("train", "lenet", "--memory", "much"), "not an amount of memory"),
        (("train", "lenet", "--on", "cuda"), "CUDA" if not torch.cuda.is_available() else ""),
        (("train", "lenet", "--resume"), "--out"),
        (("train", "own.py:coloured", "--batch", "16"), "data set digits"),
        (("train", "own.py:coloured", "--batch", "16"), "inputs of 16×1×8×8 float32 and labels of 16 int64"),
        (("graph", "own.py:small", "--input-size", "5"), "inputs of 1×3×5×5 float32"),
        (("graph", "own.py:small", "--inference"), "inputs of 1×3×224×224 float32"),
        (("train", "missing.py:build"), "missing.py"),
        (("train", "char_lstm", "--data", "digits"), "characters"),
        (("graph", "own.py"), "own.py:build"),
        (("graph", "own.py:nothing"), "small"),
        (("graph", "own.py:broken"), "returned no nn.Module"),
        (("graph", "own.py:raising"), "own.py:raising failed"),
        (("report", "nowhere"), "not a run folder"),
    ],
)
def test_a_mistake_is_explained_without_a_traceback(run: Run, words: tuple[str, ...], told: str) -> None:
    Path("own.py").write_text(OWN_MODEL)
    ended = run(*words)
    assert ended.code == 1
    assert told in " ".join(ended.err.split())
    assert "Traceback" not in ended.err
    assert "loss(model" not in ended.err
    assert ended.out == ""
    assert not Path("typo").exists()


def test_models_lists_the_zoo_as_json(run: Run) -> None:
    rows = {row["name"]: row for row in run("models", "--json").json["models"]}
    assert rows["mobilenet_v2"]["parameters"] == 3_504_872
    assert {"lenet", "resnet50", "bert_small"} <= set(rows)


def test_models_fit_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["edgetrain.cli.models"], "results", Console(highlight=False, width=80))
    shown = run("models").out
    assert "…" not in shown
    assert all(
        heading in shown for heading in ("model ", "parameters", "multiply-", "input", "61,100,840", "4,089.2 M")
    )
    assert len(shown.splitlines()) < 24
    assert "LeCun et al. 1998" not in shown
    assert "LeCun et al. 1998" in run("models", "--notes").out


def test_graph_prints_saves_and_reads_back(run: Run) -> None:
    shown = run("graph", "lenet", "--batch", "2")
    assert shown.code == 0
    assert all(phase in shown.out for phase in ("forward", "backward", "update"))
    run("graph", "lenet", "--batch", "2", "--out", "lenet.json")
    from edgetrain import Graph

    assert Graph.load("lenet.json").key in shown.out
    assert "update" not in run("graph", "lenet", "--inference").out


def test_train_and_resume_with_json_alone_on_stdout(run: Run) -> None:
    words = ("train", "lenet", "--data", "digits", "--batch", "50", "--out", "first", "--json")
    first = run(*words, "--epochs", "1")
    assert first.code == 0
    assert first.json["status"] == "finished"
    record = json.loads(Path("first/record.json").read_text())
    assert record["status"] == "finished"
    assert record["schema"] == SCHEMA
    assert {"versions", "machine", "commit", "command", "summary"} <= set(record)
    again = run(*words, "--epochs", "2", "--resume").json
    assert again["step"] == 60
    assert any("Resumed" in message for message in again["messages"])
    events = [json.loads(line)["event"] for line in Path("first/metrics.jsonl").read_text().splitlines()]
    assert events.count("train") == 60
    assert run("report", "first").code == 0
    assert "<svg" in Path("first/report.html").read_text()


def test_resume_refuses_another_model(run: Run) -> None:
    run("train", "lenet", "--epochs", "1", "--batch", "500", "--out", "first")
    ended = run("train", "autoencoder", "--epochs", "2", "--batch", "500", "--out", "first", "--resume")
    assert ended.code == 1
    assert "another model" in ended.err


def test_a_folder_with_a_run_is_left_as_it_is(run: Run) -> None:
    words = ("train", "lenet", "--epochs", "1", "--batch", "500", "--out", "first")
    run(*words)
    files = [Path("first") / name for name in ("record.json", "config.json", "metrics.jsonl")]
    before = [file.read_bytes() for file in files]
    ended = run("train", "autoencoder", "--epochs", "1", "--out", "first")
    assert ended.code == 1
    assert "--resume" in ended.err
    assert [file.read_bytes() for file in files] == before
    ended = run(*words, "--resume")
    assert ended.code == 0
    assert "is finished: nothing is left to train" in " ".join(ended.err.split())
    assert [file.read_bytes() for file in files] == before


def test_a_run_without_a_checkpoint_starts_again(run: Run) -> None:
    RunFolder.create("first").save(new_record(["edgetrain"]))
    ended = run("train", "lenet", "--epochs", "1", "--batch", "500", "--out", "first", "--resume")
    assert ended.code == 0
    assert "no checkpoint to resume from in first yet: starting from the beginning" in ended.err


def test_ctrl_c_before_the_first_step_leaves_nothing_behind(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        assert Path("first/record.json").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["edgetrain.cli.train"], "prepare", interrupted)
    words = ("train", "lenet", "--batch", "500", "--out", "first")
    ended = run(*words)
    assert ended.code == 130
    assert "stopped by Ctrl-C; there is no checkpoint yet, so nothing to resume" in ended.err
    assert not Path("first").exists()
    RunFolder.create("first").save(new_record(["edgetrain"]))
    assert run(*words).code == 130
    assert Path("first/record.json").exists()  # it was there before


def test_own_model_and_weights(run: Run) -> None:
    Path("own.py").write_text(OWN_MODEL)
    words = ("train", "own.py:small", "--data", "digits", "--epochs", "1", "--batch", "100", "--json")
    first = run(*words, "--out", "a").json
    weights = Path(first["checkpoint"]) / "tensors.safetensors"
    before = run(*words, "--out", "b", "--lr", "1e-9", "--weights", str(weights)).json
    assert before["evaluation"]["accuracy"] == pytest.approx(first["evaluation"]["accuracy"], abs=0.02)


def test_ctrl_c_stops_cleanly_and_the_command_it_prints_resumes(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "from edgetrain.cli import main; main()"]
    options = ["train", "lenet", "--epochs", "40", "--batch", "25", "--out", "run", "--threads", "1"]
    environment = {**os.environ, "COLUMNS": "400"}
    with subprocess.Popen(
        [*words, *options], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < 5:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped" in out
    assert "Traceback" not in err
    command = next(line.strip() for line in err.splitlines() if line.strip().startswith("edgetrain train"))
    resumed = subprocess.run(
        [*words, *command.replace("--epochs 40", "--epochs 2").split()[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "Resumed from step" in resumed.stderr


def test_the_progress_line_of_a_budget_that_moves_fits_80_columns() -> None:
    """The budget, the plan in use and the last switch; the rest where there is room."""
    seen = Progress(
        "train", 12345, 9, 100, 5, 10, 0.1, loss=2.30123, samples_per_s=123.4, memory_bytes=512_000_000,
        budget_bytes=300_400_000, plan_bytes=212_300_000, switches=8, switched_at=12340,
    )  # fmt: skip
    texts = shown(seen, "accuracy 91.25 %")
    narrow = "loss 2.3012  plan 212/300 MB  switch 7 at 12340"
    assert fitting(texts, room(80, "10/100")) == narrow
    assert fitting(texts, room(76, "10/100")) == "loss 2.3012  plan 212/300 MB"
    assert fitting(texts, 200).endswith("switch 7 at 12340  accuracy 91.25 %  123 samples/s")
    assert shown(replace(seen, budget_bytes=1_500_000_000), "")[1] == "plan 212 MB/1.5 GB"
    assert shown(replace(seen, budget_bytes=None), "")[1] == "512 MB"
    assert fitting(texts, 1) == "loss 2.3012"
