"""Micro-batches on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from edgetrain.plan.micro_batches import MicroPlan
from tests.cli.commands import Ended, Run, commands

OWN = """
from torch import nn

def deep(classes):
    layers = [nn.Flatten(), nn.Linear(64, 32)]
    for _ in range(4):
        layers += [nn.GELU(), nn.Linear(32, 32)]
    return nn.Sequential(*layers, nn.Linear(32, classes))

def coloured(classes):
    body = [nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh()]
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(32, classes))

def coloured_and_noisy(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.Dropout(0.2), nn.GELU(), nn.Linear(32, classes))

def noisy(classes):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, classes))
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    run = commands(capsys, monkeypatch)

    def go(*words: object) -> Ended:
        ended = run(*words)
        return ended._replace(err=ended.told)

    return go


def losses(folder: str) -> list[Any]:
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "train"]


def test_training_in_uneven_micro_batches_follows_that_in_whole_ones(run: Run) -> None:
    words = ("train", "own.py:deep", "--epochs", 1, "--batch", 250)
    assert run(*words, "--out", "whole")[0] == 0
    code, _, err = run(*words, "--out", "parts", "--micro-batches", 4)
    assert code == 0
    assert "4 micro-batches of 62 to 63 samples" in err
    assert losses("parts") == pytest.approx(losses("whole"), rel=1e-4)


def test_what_is_no_number_or_other_numbers_is_refused(run: Run) -> None:
    assert run("train", "own.py:deep", "--micro-batches", "few")[0] == 2
    assert run("plan", "own.py:deep", "--sweep", 3, "--micro-batches", 2)[0] == 2
    code, _, err = run("train", "own.py:noisy", "--epochs", 1, "--micro-batches", 2, "--out", "noisy")
    assert code == 1
    assert "--allow-inexact" in err
    words = ("train", "own.py:noisy", "--epochs", 1, "--batch", 500, "--micro-batches", 2, "--out", "other")
    code, _, err = run(*words, "--allow-inexact")
    assert code == 0
    assert "other numbers than plain training" in err


def test_a_plan_in_micro_batches(run: Run) -> None:
    words = ("plan", "own.py:coloured", "--batch", 256, "--input-size", 4, "--planner", "fast", "--json")
    whole = json.loads(run(*words, "--memory", "1GB")[1])
    code, out, _ = run(*words, "--memory", "1GB", "--micro-batches", 8, "--out", "eight")
    told = json.loads(out)["micro_batches"]
    assert code == 0
    assert told["sizes"] == [32] * 8
    assert told["exact"] == "rounding"
    assert told["peak_bytes"] < told["whole_batch"]["peak_bytes"] == whole["keep_all"]["peak_bytes"]
    saved = MicroPlan.load("eight/plan.json")
    assert (saved.peak_bytes, saved.sizes) == (told["peak_bytes"], (32,) * 8)
    budget = told["peak_bytes"] + 1000
    found = json.loads(run(*words, "--memory", budget, "--micro-batches", "auto")[1])
    peak = found.get("micro_batches", found["plan"])["peak_bytes"]
    assert peak <= budget


def test_a_plan_in_micro_batches_for_a_device_is_drawn(run: Run) -> None:
    words = ("plan", "own.py:coloured", "--batch", 64, "--input-size", 4, "--planner", "fast", "--device", "rpi4")
    code, out, _ = run(*words, "--memory", "1GB", "--micro-batches", 3)
    assert code == 0
    assert "3 micro-batches of 21 to 22" in out
    assert "modelled for" in out


def smallest_told(err: str) -> int:
    found = re.search(r"known to work is .*? \((\d+) bytes\)", err)
    assert found is not None
    return int(found[1])


def test_sage_shrinks_the_micro_batch_by_itself(run: Run) -> None:
    words = ("plan", "own.py:coloured", "--batch", 256, "--input-size", 4, "--planner", "sage", "--json")
    whole = json.loads(run(*words, "--memory", "1GB")[1])
    assert "micro_batches" not in whole
    lasting = sum(whole["lasting_bytes"].values())
    code, _, err = run(*words, "--memory", lasting, "--micro-batches", 1)
    assert code == 1
    smallest = smallest_told(err)
    budget = lasting + round(0.8 * (smallest - lasting))
    code, out, _ = run(*words, "--memory", budget, "--out", "fewer")
    told = json.loads(out)["micro_batches"]
    assert code == 0
    assert len(told["sizes"]) >= 2
    assert told["peak_bytes"] <= budget
    assert f"{len(told['sizes'])} micro-batches of" in Path("fewer/plan.html").read_text()
    assert run(*words, "--sweep", "0.9,1")[0] == 0  # of whole batches
    code, _, err = run("plan", "own.py:coloured_and_noisy", *words[2:], "--memory", lasting)
    assert code == 1
    assert "would do with --allow-inexact" in err


def test_training_by_sage_says_how_many_micro_batches_it_takes(run: Run) -> None:
    words = ("train", "own.py:deep", "--epochs", 1, "--batch", 500, "--planner", "sage")
    code, _, err = run(*words, "--memory", 60_000, "--micro-batches", 1, "--out", "whole")
    assert code == 1
    smallest = smallest_told(err)
    code, _, err = run(*words, "--memory", round(0.9 * smallest), "--out", "fewer")
    assert code == 0
    assert "2 micro-batches of 250 samples" in err
