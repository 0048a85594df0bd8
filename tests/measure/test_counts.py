"""Files of instruction counts, compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from edgetrain.cli import main
from edgetrain.errors import UserError
from edgetrain.measure.counts import KEY, compare_counts, load_counts

OPS = {"0 conv2d.forward": 1000, "0 conv2d.backward_weight": 3000}


def write(file: Path, changed: dict[str, int] | None = None, compiler: str = "gcc 12") -> Path:
    changed = changed or {}
    ops = {name: {"instructions": changed.get(name.split(".")[-1], count)} for name, count in OPS.items()}
    data: dict[str, Any] = {KEY: 1, "about": {"compiler": compiler}, "nets": {}}
    data["nets"]["lenet"] = {"instructions": changed.get("step", 5000), "ops": ops}
    file.write_text(json.dumps(data))
    return file


@pytest.mark.parametrize(
    ("changed", "verdicts"),
    [
        ({}, ["pass", "pass", "pass"]),
        ({"forward": 1020}, ["pass", "pass", "pass"]),
        ({"forward": 1021}, ["pass", "fail", "pass"]),
        ({"step": 5101, "forward": 900}, ["fail", "pass", "pass"]),
    ],
)
def test_more_than_two_percent_worse_fails(changed: dict[str, int], verdicts: list[str], tmp_path: Path) -> None:
    old, new = load_counts(write(tmp_path / "old")), load_counts(write(tmp_path / "new", changed))
    assert [one.verdict for one in compare_counts(old, new)] == verdicts


def compare(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["edgetrain", "compare", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_shows_what_has_changed_and_ends_with_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write(tmp_path / "old.json")
    assert compare(monkeypatch, old, old) == 0
    assert "3 of 3 figures have not changed" in capsys.readouterr().out
    slower = write(tmp_path / "slower.json", {"forward": 1021, "backward_weight": 2000}, "gcc 13")
    assert compare(monkeypatch, old, slower) == 1
    said = capsys.readouterr()
    assert "lenet: 0 conv2d.forward" in said.out
    assert "lenet: 0 conv2d.backward_weight" in said.out  # better, and shown too
    assert "1 of 3 figures have not changed" in said.out
    assert "different compiler" in said.err
    assert compare(monkeypatch, old, slower, "--tolerance", "0.03") == 0
    assert compare(monkeypatch, old, slower, "--figure", "lenet") == 0
    assert compare(monkeypatch, old, slower, "--figure", "alexnet") == 2


def test_what_one_file_alone_has_is_inconclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = write(tmp_path / "old.json"), tmp_path / "new.json"
    data = json.loads(old.read_text())
    del data["nets"]["lenet"]["ops"]["0 conv2d.forward"]
    new.write_text(json.dumps(data))
    assert compare(monkeypatch, old, new) == 3
    assert compare(monkeypatch, new, old) == 3


@pytest.mark.parametrize("wrong", [{}, {KEY: 2}, {KEY: 1, "about": {}, "nets": {"a": {"instructions": -1, "ops": {}}}}])
def test_another_file_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(json.dumps(wrong))
    with pytest.raises(UserError, match="not a file of instruction counts"):
        load_counts(file)
