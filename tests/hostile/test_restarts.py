"""A training run killed at any instant goes on, or starts over, by the same command with `--resume`; and says which.

The run folder is copied at every call of the run that changes the disk: each copy is what a kill there leaves.
`EDGETRAIN_EXAMPLES` asks for more of them.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgetrain.cli import main

PLACES = max(1, int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 20)
WORDS = ("train", "lenet", "--batch", "500", "--epochs", "3", "--checkpoint-every", "4", "--weight-decay", "0.01")
CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
SPOILT = [
    (name, how)
    for name in ("record.json", "config.json", "metrics.jsonl")
    for how in ("missing", "cut", "empty", "of a stranger")
]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def go(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["edgetrain", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return code if isinstance(code, int) else 0, " ".join(capsys.readouterr().err.split())

    return go


def copies(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folder of a run as it was before and after each of its calls that change the disk."""
    found: list[Path] = []

    def copied() -> None:
        if Path("first").exists():
            found.append(Path(f"killed-{len(found)}"))
            shutil.copytree("first", found[-1])

    def copying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            mine = not any("killed-" in str(arg) or "cache" in str(arg) for arg in args)
            with monkeypatch.context() as patch:
                for name, original in originals.items():
                    patch.setattr(os, name, original)
                if mine:
                    copied()
                result = real(*args, **kwargs)
                if mine:
                    copied()
            return result

        return call

    originals = {name: getattr(os, name) for name in CALLS}
    with pytest.MonkeyPatch.context() as patch:
        for name, real in originals.items():
            patch.setattr(os, name, copying(real))
        code, _ = run(*WORDS, "--out", "first")
    assert code == 0
    return found


def ends(folder: str | Path) -> tuple[bytes, list[int]]:
    """The last checkpoint's tensors, and the steps in the metrics."""
    (last,) = sorted(Path(folder, "checkpoints").glob("step-*"))[-1:]
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return (last / "tensors.safetensors").read_bytes(), [line["step"] for line in lines if line["event"] == "train"]


@pytest.mark.usefixtures("one_cache")
def test_a_run_killed_at_any_write_goes_on_by_the_same_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = copies(run, monkeypatch)
    assert len(killed) > 40
    right, draw = ends("first"), random.Random(5)
    sparse = [folder for folder in killed if not (folder / "record.json").exists()]
    assert any((folder / "config.json").exists() for folder in sparse)
    assert any(not any(folder.iterdir()) for folder in sparse)
    picked = [sparse[0], sparse[-1], *draw.sample(killed, min(PLACES, len(killed)))]
    ways = set()
    for folder in dict.fromkeys(picked):
        held = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        code, told = run(*WORDS, "--out", folder, "--resume")
        assert code == 0, (held, told)
        ways |= {word for word in ("starting from the beginning", "Resumed from step", "is finished") if word in told}
        assert any(word in told for word in ways), (held, told)
        assert ends(folder) == right, held
    assert "starting from the beginning" in ways


@pytest.mark.usefixtures("one_cache")
@pytest.mark.parametrize(("name", "spoilt"), SPOILT if PLACES > 3 else SPOILT[::5])
def test_a_file_of_the_run_is_gone_or_spoilt(run: Run, name: str, spoilt: str) -> None:
    words = [*WORDS[:-4], "--checkpoint-every", "4"]
    assert run(*words, "--out", "run")[0] == 0
    right, file = ends("run"), Path("run", name)
    newest = sorted(Path("run/checkpoints").glob("step-*"))[-1]
    shutil.rmtree(newest)
    if spoilt == "missing":
        file.unlink()
    else:
        file.write_bytes({"cut": file.read_bytes()[:-30], "empty": b"", "of a stranger": b'{"a": 1}\n'}[spoilt])
    code, told = run(*words, "--out", "run", "--resume")
    stranger = name == "config.json" and spoilt == "of a stranger"
    assert code == stranger, told  # its settings are not those of the command
    if stranger:
        assert "another model" in told
    else:
        assert "Resumed from step" in told
        assert ends("run")[0] == right[0]


@pytest.mark.usefixtures("one_cache")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=repr)
@pytest.mark.parametrize("instant", ["load_data", "prepare", "write_text", "fsync", "mkdir"])
def test_a_run_that_ended_before_it_left_anything_starts_over(
    run: Run, instant: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train", "lenet", "--batch", "500", "--epochs", "1", "--out", "runs/early")

    def end(*args: Any, **kwargs: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        if instant in ("fsync", "mkdir"):
            patch.setattr(os, instant, end)
        else:
            patch.setattr(sys.modules["edgetrain.cli.train"], instant, end)
        assert run(*words)[0] != 0
    code, told = run(*words, "--resume")
    assert code == 0, told
    assert "starting from the beginning" in told
    assert "runs/early" in told
    assert "is finished" in run(*words, "--resume")[1]


def test_a_link_that_leads_nowhere_is_no_place_to_start_over(run: Run) -> None:
    Path("early").symlink_to("nowhere")
    code, told = run("train", "lenet", "--epochs", "1", "--out", "early", "--resume")
    assert (code, Path("nowhere").exists()) == (1, False), told


def test_without_resume_it_is_said_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("train", "lenet", "--batch", "500", "--epochs", "1", "--out", "run")
    Path("run").mkdir()
    Path("run/config.json").write_text('{"model": "lenet"}')
    code, told = run(*words)
    assert code == 0
    assert "has no checkpoint: starting from the beginning" in told
    code, told = run(*words)
    assert code == 1
    assert "--resume" in told
    assert "another folder" in told


@pytest.mark.parametrize("strange", ["cat.jpg", "model.safetensors", "config.json", "checkpoints.zip"])
def test_a_folder_of_somebody_else_is_left_alone(run: Run, strange: str) -> None:
    Path("theirs").mkdir()
    Path("theirs", strange).write_text('{"architectures": []}')
    for more in ((), ("--resume",)):
        code, told = run("train", "lenet", "--epochs", "1", "--out", "theirs", *more)
        assert code == 1
        assert "next step" in told
        assert [path.name for path in Path("theirs").iterdir()] == [strange]
