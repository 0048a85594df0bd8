"""Run folders and records: written whole, read back equal, never trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from edgetrain.errors import UserError
from edgetrain.measure import record as records
from edgetrain.measure.record import Record, RunFolder, Value, default_path, new_record


@pytest.fixture(scope="module")
def record() -> Record:
    return new_record(["edgetrain", "train", "lenet"], metrics="metrics.jsonl")


SUMMARY = {
    "time_s": Value(0.1 + 0.2, "s", "measured"),
    "steps": Value(3, "steps", "derived"),
    "power_w": Value(2.5, "W", "modelled", 1.9, 3.1),
    "energy_j": Value(None, "J", "unavailable"),
    "device": Value("rpi4", "", "modelled"),
}


def test_round_trip_is_equal(tmp_path: Path, record: Record) -> None:
    folder = RunFolder.create(tmp_path / "run")
    full = replace(record, summary=SUMMARY, status="finished", notes=("It was warm.",))
    folder.save(full)
    assert folder.load() == full
    assert type(folder.load().summary["steps"].value) is int
    assert sorted(path.name for path in folder.path.iterdir()) == ["record.json"]


def test_a_record_describes_this_machine(record: Record) -> None:
    assert record.versions.python == sys.version.split()[0]
    assert record.machine.usable_cores == len(os.sched_getaffinity(0))
    assert record.machine.memory_bytes is not None
    assert record.machine.memory_bytes > 1e6
    assert record.created.endswith("+00:00")
    assert datetime.fromisoformat(record.created).tzinfo is not None


def test_the_commit_is_that_of_the_checkout_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(records.__file__).parent, capture_output=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    commit, dirty = records._commit()
    assert commit == (head.stdout.decode().strip() or None)
    assert dirty in (True, False) if commit else dirty is None


def test_no_git_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert records._commit() == (None, None)


def test_a_package_inside_a_foreign_checkout_has_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    module = tmp_path / "venv" / "edgetrain" / "measure" / "record.py"
    module.parent.mkdir(parents=True)
    module.with_name("errors.py").touch()
    monkeypatch.setattr(records, "__file__", str(module))
    assert records._commit() == (None, None)


def test_unavailable_is_never_a_number() -> None:
    with pytest.raises(UserError, match="unavailable"):
        Value(0, "J", "unavailable")
    with pytest.raises(UserError, match="unavailable"):
        Value(None, "J", "measured")
    with pytest.raises(UserError, match="finite"):
        Value(float("nan"), "J", "measured")


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [(1.0, 0.0, None), (1.0, None, 2.0), (1.0, 2.0, 3.0), (1.0, 0.0, float("inf")), ("a", 0.0, 1.0), (True, 0.0, 1.0)],
)
def test_an_interval_holds_its_value(value: float | str, low: float | None, high: float | None) -> None:
    with pytest.raises(UserError, match="interval"):
        Value(value, "J", "measured", low, high)
    with pytest.raises(UserError, match="interval"):
        Value(None, "J", "unavailable", 0.0, 1.0)


def test_a_record_without_intervals_is_of_schema_1_and_read(tmp_path: Path, record: Record) -> None:
    old = {"a": {"value": 1.5, "unit": "s", "origin": "measured"}}
    folder = _altered(tmp_path, record, schema=1, summary=old)
    data = json.loads(folder.record_file.read_text())
    del data["notes"]
    folder.record_file.write_text(json.dumps(data))
    assert folder.load() == replace(record, summary={"a": Value(1.5, "s", "measured")})


def test_create_takes_new_empty_and_run_folders_only(tmp_path: Path, record: Record) -> None:
    RunFolder.create(tmp_path / "a" / "b").save(record)
    assert RunFolder.create(tmp_path / "a" / "b").load() == record
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / ".tmp-record.json").touch()  # by a process that was killed in its first write
    RunFolder.create(tmp_path / "left")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(UserError, match="not a run folder") as caught:
        RunFolder.create(tmp_path / "photos")
    assert "cat.jpg" in str(caught.value)
    with pytest.raises(UserError, match=r"cat\.jpg"):
        RunFolder.create(tmp_path / "photos" / "cat.jpg")


def test_default_paths_never_meet(tmp_path: Path) -> None:
    now = datetime(2026, 1, 31, 23, 59, 58)
    first = default_path("train", root=tmp_path, now=now)
    assert first.name == "train-20260131-235958"
    first.mkdir()
    assert default_path("train", root=tmp_path, now=now).name == "train-20260131-235958-2"
    assert default_path("plan").parent == Path("runs")


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "C:\\x", "c:x", "\\\\host\\x", "", ".", "a\0"])
def test_file_names_stay_inside(tmp_path: Path, record: Record, name: str) -> None:
    with pytest.raises(UserError, match="leaves its folder"):
        replace(record, files={"trace": name})
    folder = _altered(tmp_path, record, files={"trace": name})
    with pytest.raises(UserError, match=r"record\.json: field 'files\.trace'"):
        folder.load()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"schema": 3}, "newer version"),
        ({"schema": 0}, "another version"),
        ({"schema": 10**4000}, "'schema'"),
        ({"schema": "1"}, "'schema'"),
        ({"schema": True}, "'schema'"),
        ({"created": None}, "'created'"),
        ({"command": "train"}, "'command'"),
        ({"command": [1]}, "'command'"),
        ({"notes": [1]}, "'notes'"),
        ({"status": "done"}, "'status'"),
        ({"dirty": 0}, "'dirty'"),
        ({"machine": []}, "'machine'"),
        ({"machine": {"cpu": 1}}, "'machine.cpu'"),
        ({"versions": {}}, "'versions.edgetrain'"),
        ({"summary": {"a": 1}}, "'summary.a'"),
        ({"summary": {"a": {"value": [], "unit": "", "origin": "measured"}}}, "'summary.a.value'"),
        ({"summary": {"a": {"value": 0, "unit": "", "origin": "unavailable"}}}, "'summary.a.value'"),
        ({"summary": {"a": {"value": 0, "unit": "", "origin": "guessed"}}}, "'summary.a.origin'"),
        ({"summary": {"a": {"value": 0, "unit": 1, "origin": "measured"}}}, "'summary.a.unit'"),
        ({"summary": {"a": {"value": 10**400, "unit": "", "origin": "measured"}}}, "'summary.a.value'"),
        ({"summary": {"a": {"value": 1, "unit": "", "origin": "measured", "low": "0", "high": 2}}}, "'summary.a.low'"),
        ({"summary": {"a": {"value": 1, "unit": "", "origin": "measured", "low": 2, "high": 3}}}, "'summary.a.value'"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, record: Record, change: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as caught:
        _altered(tmp_path, record, **change).load()
    assert "record.json" in str(caught.value)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"\xff", b'{"schema": NaN}', b"[" * 100_000, b'{"schema": ' + b"9" * 5000 + b"}"]
)
def test_a_damaged_file_is_named(tmp_path: Path, data: bytes) -> None:
    folder = RunFolder.create(tmp_path)
    folder.record_file.write_bytes(data)
    with pytest.raises(UserError, match=r"record\.json"):
        folder.load()


def test_a_number_too_large_is_refused(tmp_path: Path, record: Record) -> None:
    folder = _altered(tmp_path, record, summary={"a": {"value": 1.5, "unit": "", "origin": "measured"}})
    folder.record_file.write_text(folder.record_file.read_text().replace("1.5", "1e999"))
    with pytest.raises(UserError, match=r"'summary\.a\.value'"):
        folder.load()


def test_a_missing_record_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        RunFolder(tmp_path).load()


def test_a_write_that_fails_leaves_the_old_record(
    tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path)
    folder.save(record)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="disk is full") as caught:
        folder.save(replace(record, status="finished"))
    assert "bytes free" in str(caught.value)
    assert folder.load() == record
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with folder.locked(), pytest.raises(UserError, match="another process"), folder.locked():
        pass
    with folder.locked():
        pass


def _altered(path: Path, record: Record, **changes: Any) -> RunFolder:
    """A run folder whose record has these fields, written without any check."""
    folder = RunFolder.create(path / "altered")
    folder.save(record)
    folder.record_file.write_text(json.dumps({**json.loads(folder.record_file.read_text()), **changes}))
    return folder
