"""A disk that is full: what was there before is intact, and nothing half written or empty is left behind."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from edgetrain import files
from edgetrain.cli import app
from edgetrain.errors import UserError

ROOM_BYTES = 16_384
BEFORE = b"what was there before"


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder on a disk that has room for no more than `ROOM_BYTES`, by all that Python writes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    plain = os.fsync

    def fsync(handle: int) -> None:
        if (
            str(folder) in os.readlink(f"/proc/self/fd/{handle}")
            and sum(map(len, everything(folder).values())) > ROOM_BYTES
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    write = Path.write_bytes

    def write_bytes(path: Path, data: bytes) -> int:
        if folder in path.parents and sum(map(len, everything(folder).values())) + len(data) > ROOM_BYTES:
            write(path, data[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    return folder


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """The same as a disk of its own, where this may be mounted."""
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(options, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "profile"
    words = ["profile", "lenet", "--steps", "30", "--idle", "0", "--rounds", "0", "--out", str(out)]
    assert CliRunner().invoke(app, words).exit_code == 0
    return out


Words = Callable[[str, Path], list[str]]
WRITING: dict[str, Words] = {
    "plan --save": lambda out, _: ["plan", "mobilenet_v2", "--input-size", "64", "--device", "rpi4", "--save", out],
    "graph --out": lambda out, _: ["graph", "mobilenet_v2", "--input-size", "64", "--out", out],
    "report": lambda out, run: ["report", str(run), "--out", out],
    "report --trace": lambda out, run: ["report", str(run), "--trace", out],
    "report --csv": lambda out, run: ["report", str(run), "--csv", out],
    "export": lambda out, _: ["export", "lenet", "--target", "linux-x86_64", "--out", out],
    "export below": lambda out, _: ["export", "lenet", "--target", "linux-x86_64", "--out", f"{out}/a/b/fw"],
}  # fmt: skip


@pytest.mark.parametrize("there", [False, True], ids=["new", "there before"])
@pytest.mark.parametrize("disk", ["full", "mounted"])
@pytest.mark.parametrize("command", WRITING)
def test_a_command_that_writes(
    command: str, disk: str, there: bool, profiled: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    folder = request.getfixturevalue(disk)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    out = folder / "out"
    (folder / "filler").write_bytes(bytes(ROOM_BYTES // 2))
    if there and command.startswith("export"):
        out.mkdir()
    elif there and command == "report --csv":
        out.mkdir()
        (out / "summary.csv").write_bytes(BEFORE)
        (out / "ops.csv").write_bytes(BEFORE)
    elif there:
        out.write_bytes(BEFORE)
    before, folders = everything(folder), {path for path in folder.rglob("*") if path.is_dir()}
    ended = CliRunner().invoke(app, WRITING[command](str(out), profiled))
    assert isinstance(ended.exception, UserError), repr(ended.exception)
    assert "disk is full" in str(ended.exception).lower()
    after = everything(folder)
    if command == "report --csv":  # of several files some may have had room, and each is whole
        assert {name for name in after if name.startswith(".")} == set()
        assert after.keys() >= before.keys()
        assert there or not out.exists()
    else:
        assert after == before
        assert {path for path in folder.rglob("*") if path.is_dir()} == folders


def test_a_run_whose_plan_could_not_be_saved_elsewhere_is_whole(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (full / "filler").write_bytes(bytes(ROOM_BYTES // 2))
    words = WRITING["plan --save"](str(full / "out"), tmp_path)
    assert isinstance(CliRunner().invoke(app, [*words, "--out", "mine"]).exception, UserError)
    assert (tmp_path / "mine" / "plan.html").exists()
    assert CliRunner().invoke(app, ["report", "mine"]).exit_code == 0


# ---- the one way in which files are written

FAILS: dict[str, tuple[Any, str]] = {
    "fsync": (os, "fsync"), "replace": (os, "replace"), "opening": (os, "open"),
}  # fmt: skip


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("where", FAILS)
def test_what_was_there_is_intact(where: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(BEFORE)

    def fails(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    module, name = FAILS[where]
    with monkeypatch.context() as patch:
        patch.setattr(module, name, fails)
        for path in (file, tmp_path / "new"):
            with pytest.raises(UserError, match="annot write"):
                files.write_atomic(path, b"x" * 1000)
    assert everything(tmp_path) == {"file": BEFORE}


def test_parts_that_end_in_an_error_or_ctrl_c_leave_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(BEFORE)
    for error in (ValueError, KeyboardInterrupt, MemoryError):

        def parts(error: type[BaseException] = error) -> Iterator[bytes]:
            yield b"x" * 100_000
            raise error

        with pytest.raises(error):
            files.write_atomic(file, parts())
        assert everything(tmp_path) == {"file": BEFORE}


def test_who_may_read_a_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(BEFORE)
    file.chmod(0o640)
    files.write_text(file, "new")
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127, "深" * 85])
def test_the_longest_names(name: str, tmp_path: Path) -> None:
    files.write_text(tmp_path / name, "text")
    assert everything(tmp_path) == {name: b"text"}


def test_a_cache_that_has_no_room_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fails)
    files.write_cache(tmp_path / "a" / "cache.json", "{}")
    assert not everything(tmp_path)
