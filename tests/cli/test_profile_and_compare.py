"""`edgetrain profile` and `edgetrain compare` as a user meets them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgetrain.cli import main
from edgetrain.cli.profile import _without
from edgetrain.measure.record import RunFolder, Value, new_record

WORDS = ("profile", "lenet", "--batch", "2", "--steps", "5", "--idle", "0", "--rounds", "0")


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["edgetrain", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    return code if isinstance(code, int) else 0


def test_a_profile_prints_its_tables_and_keeps_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *WORDS, "--threads", 1, "--out", tmp_path / "run") == 0
    said = capsys.readouterr().out
    for words in ("a step", "forward", "peak of tensors", "features.0", "aten.convolution", "run: "):
        assert words in said
    record = RunFolder(tmp_path / "run").load()
    assert record.status == "finished"
    assert record.summary["threads"].value == 1
    assert run(monkeypatch, "report", tmp_path / "run", "-o", tmp_path / "page.html") == 0
    assert run(monkeypatch, "compare", tmp_path / "run", tmp_path / "run") == 0
    assert "sensors that are read less often" in said
    assert run(monkeypatch, *WORDS, "--out", tmp_path / "run") == 1  # what was measured is not written over
    assert "holds a run already" in capsys.readouterr().err


def test_compare_tells_what_is_no_comparison_from_what_is_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "counts.json").write_text("{}")
    assert run(monkeypatch, "compare", tmp_path / "counts.json", tmp_path / "typo.json") == 2
    assert "typo.json" in capsys.readouterr().err
    assert run(monkeypatch, "compare", tmp_path / "counts.json", tmp_path) == 2
    assert "the other a run folder" in capsys.readouterr().err


def test_a_profile_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *WORDS, "--threads", 1, "--json", "--repeats", 2, "--out", tmp_path / "run") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["summary"]["repeats"]["value"] == 2
    assert told["summary"]["step_time_s"]["origin"] == "measured"
    assert (tmp_path / "run/repeat-2/record.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cores", "4000"), "cannot use those cores"),
        (("--cores", "x"), "numbers and ranges"),
        (("--device", "none"), "none"),
        (("--memory", "1kB"), "smallest"),
    ],
)
def test_wrong_use_is_explained(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run(monkeypatch, *WORDS, "--out", tmp_path / "run", *words) == 1
    assert said in capsys.readouterr().err


def test_options_for_the_repeats() -> None:
    words = ["profile", "lenet", "--out", "a", "--json", "--repeats=3", "--batch", "2", "--out=b"]
    assert _without(words, "--out", "--repeats", "--json") == ["profile", "lenet", "--batch", "2"]


def kept(folder: Path, **summary: Value) -> Path:
    RunFolder.create(folder).save(replace(new_record(["x"]), status="finished", summary=summary))
    return folder


def times(middle: float) -> Value:
    return Value(middle, "s", "measured", 0.99 * middle, 1.01 * middle)


@pytest.mark.parametrize(("second", "code", "said"), [(1.0, 0, "pass"), (1.05, 3, "inconclusive"), (1.5, 1, "fail")])
def test_the_exit_code_of_compare(
    second: float, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    a, b = kept(tmp_path / "a", step_time_s=times(1.0)), kept(tmp_path / "b", step_time_s=times(second))
    assert run(monkeypatch, "compare", a, b) == code
    assert said in capsys.readouterr().out
    assert run(monkeypatch, "compare", a, b, "--json") == code
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["verdict"] == said
    assert told["figures"][0]["name"] == "step_time_s"


def test_compare_says_what_else_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a = kept(tmp_path / "a", step_time_s=times(1.0), batch=Value(8, "1", "measured"))
    noisy = Value("noisy (steal 20 %)", "", "derived")
    b = kept(tmp_path / "b", step_time_s=times(1.0), batch=Value(16, "1", "measured"), noise=noisy)
    run(monkeypatch, "compare", a, b)
    said = capsys.readouterr().err
    assert "different batch sizes: 8 and 16" in said
    assert "in the second run the machine was noisy" in said


def test_compare_with_a_folder_that_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "compare", tmp_path, tmp_path) == 2
    assert "record.json" in capsys.readouterr().err
