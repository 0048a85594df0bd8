"""The folder of a page file: which one is taken, what is left in it, what a crash leaves."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import edgetrain.pagefile as pagefile
from edgetrain.errors import UserError
from edgetrain.pagefile import PREFIX, PageFault, PageFile
from tests.helpers.pages import address, around, data, got, open_files, put

# ---- the folder


@pytest.mark.parametrize("sort", ["missing", "a file", "a link to nowhere"])
def test_a_folder_that_is_none_is_refused(tmp_path: Path, sort: str) -> None:
    folder = tmp_path / "pages"
    if sort == "a file":
        folder.write_text("")
    elif sort == "a link to nowhere":
        folder.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no file can be made in") as told:
        PageFile(folder, [1])
    assert "folder that exists" in str(told.value)


def in_child(code: str, *arguments: object, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD + textwrap.dedent(code), *map(str, arguments)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert expect is None or done.returncode == expect, done.stdout + done.stderr
    return done


# Without the rest of the package, which takes seconds to load.
_CHILD = f"""
import ctypes, os, signal, sys, threading, time, types
from pathlib import Path
sys.modules["edgetrain"] = types.ModuleType("edgetrain")
sys.modules["edgetrain"].__path__ = [{str(Path(pagefile.__file__).parent)!r}]
from edgetrain.errors import UserError
from edgetrain.pagefile import Calls, PageFault, PageFile, PREFIX
folder = Path(sys.argv[1])
memory = ctypes.create_string_buffer(b"x" * (1 << 20), 1 << 20)
at = ctypes.addressof(memory)
"""


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    folder.mkdir()
    tmp_path.chmod(0o755)
    folder.chmod(0o555)
    told = in_child(
        """
        if os.getuid() == 0:  # to whom everything is allowed
            os.chdir(folder)
            os.setuid(65534)
            folder = Path(".")
        try:
            PageFile(folder, [1])
        except UserError as error:
            print(error)
        """,
        folder,
    )
    assert "no file can be made" in told.stdout
    assert "Permission denied" in told.stdout


def test_a_disk_without_room_is_found_before_anything_is_written(tmp_path: Path) -> None:
    """A limit on the size of files is the one that every machine can set on itself."""
    told = in_child(
        """
        import resource
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        for n_bytes in (1 << 21, 1 << 60):
            try:
                PageFile(folder, [n_bytes])
            except UserError as error:
                print(error)
        small = PageFile(folder, [1 << 19])
        small.write(0, at); small.wait(0); small.read(0, at); small.wait(0)
        print("small fits", os.listdir(folder), len(os.listdir("/proc/self/fd")))
        """,
        tmp_path,
    )
    assert told.stdout.count("has no room for the") == 2
    assert told.stdout.count("make room, or page to another folder") == 2
    assert "small fits []" in told.stdout


def test_a_file_system_that_is_full_is_found_before_anything_is_written(tmp_path: Path) -> None:
    """A file system of its own of 1 MB, where one may be mounted; in a space of mounts that ends with the child."""
    told = in_child(
        """
        libc = ctypes.CDLL(None, use_errno=True)
        NEWUSER, NEWNS = 0x10000000, 0x00020000
        apart = libc.unshare(NEWNS) == 0 or libc.unshare(NEWUSER | NEWNS) == 0
        PRIVATE, RECURSIVE = 1 << 18, 1 << 14
        libc.mount(b"none", b"/", None, PRIVATE | RECURSIVE, None)
        if not apart or libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=1m"):
            print("cannot mount")
            raise SystemExit
        try:
            PageFile(folder, [1 << 21])
        except UserError as error:
            print(error)
        pages = PageFile(folder, [1 << 19])
        (folder / "other").write_bytes(b"x" * (1 << 18))
        try:
            (folder / "more").write_bytes(b"x" * (1 << 19))
        except OSError as error:
            print("full:", error.strerror)
        memory[:5] = b"ABCDE"
        pages.write(0, at); pages.wait(0)
        memory[:5] = b"....."
        pages.read(0, at); pages.wait(0)
        print("came back", memory[:5])
        """,
        tmp_path,
    )
    if "cannot mount" in told.stdout:
        return  # the limit on sizes stands for it above
    assert "has no room for the 2 MB" in told.stdout
    assert "No space left" in told.stdout
    assert "came back b'ABCDE'" in told.stdout


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    before = open_files(tmp_path)
    pages = PageFile(tmp_path, [100_000])
    assert list(tmp_path.iterdir()) == []  # from the first moment on
    put(pages, 0, data(100_000))
    assert open_files(tmp_path) == before + 1
    pages.close()
    assert open_files(tmp_path) == before
    assert list(tmp_path.iterdir()) == []
    in_child("pages = PageFile(folder, [1 << 20]); pages.write(0, at)", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_that_nobody_needs_any_more_goes_with_its_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    pages = PageFile(tmp_path, [4096])
    put(pages, 0, data(4096))  # whose last job must not keep it
    gone = weakref.ref(pages)
    del pages
    gc.collect()
    assert gone() is None
    assert set(threading.enumerate()) <= before
    assert open_files(tmp_path) == 0


def test_one_that_is_let_go_of_with_transfers_under_way_ends_them_first(tmp_path: Path) -> None:
    gate, ended = threading.Event(), []

    def write(file: int, view: memoryview, at: int) -> int:
        gate.wait(10)
        ended.append(os.pwrite(file, view, at))
        return ended[-1]

    pages = PageFile(tmp_path, [4096], calls=around(write))
    values = data(4096)
    pages.write(0, address(values))
    threading.Timer(0.05, gate.set).start()
    del pages
    assert ended == [4096]
    assert open_files(tmp_path) == 0


def test_the_garbage_collector_may_find_it_in_its_own_thread(tmp_path: Path) -> None:
    told = in_child(
        """
        import gc
        gc.disable()
        def write(file, view, at):
            gc.collect()  # here, in the thread of the file
            return os.pwrite(file, view, at)
        pages = PageFile(folder, [4096], calls=Calls(write=write))
        loop = [pages]
        loop.append(loop)
        thread = next(t for t in threading.enumerate() if t.name == "edgetrain pages")
        pages.write(0, at)
        del pages, loop
        thread.join(20)
        print("ended", not thread.is_alive(), sum(PREFIX in os.readlink(f"/proc/self/fd/{n}")
              for n in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{n}")))
        """,
        tmp_path,
    )
    assert "ended True 0" in told.stdout
    assert told.stderr == ""


def test_a_process_can_end_with_transfers_under_way(tmp_path: Path) -> None:
    """Normally, by an exception, and from a thread that still waits."""
    slow = """
        def write(file, view, at):
            time.sleep(0.1)
            return os.pwrite(file, view, at)
        pages = PageFile(folder, [4096] * 3, calls=Calls(write=write))
        for slot in range(3):
            pages.write(slot, at)
        """
    for end, expect in (
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("threading.Thread(target=pages.wait, args=(2,), daemon=True).start()", 0),
    ):
        done = in_child(textwrap.dedent(slow) + end, tmp_path, expect=expect)
        assert done.stderr == ""


def test_nothing_is_left_by_a_process_that_is_killed(tmp_path: Path) -> None:
    code = """
        pages = PageFile(folder, [1 << 20] * 4)
        pages.write(0, at)
        print("writes", flush=True)
        while True:
            for slot in range(4):
                pages.write(slot, at)
            pages.settle()
        """
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD + textwrap.dedent(code), str(tmp_path)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"writes\n"
        time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert list(tmp_path.iterdir()) == []


def test_what_a_crash_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    """A process that ends between making its file and taking the name away leaves it, not locked."""
    in_child(
        """
        import edgetrain.pagefile as pagefile
        pagefile.os.unlink = lambda path: os.kill(os.getpid(), signal.SIGKILL)
        PageFile(folder, [4096])
        """,
        tmp_path, expect=-signal.SIGKILL,
    )  # fmt: skip
    left = list(tmp_path.iterdir())
    assert len(left) == 1
    assert left[0].name.startswith(PREFIX)
    (tmp_path / "mine").write_text("not a page file")
    (tmp_path / f"{PREFIX}folder").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / f"{PREFIX}pipe")
    locked = tmp_path / f"{PREFIX}locked"
    with open(locked, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        PageFile(tmp_path, [1]).close()
        assert locked.exists()
    assert not left[0].exists()
    assert (tmp_path / "mine").read_text() == "not a page file"
    assert (tmp_path / f"{PREFIX}link").is_symlink()
    assert (tmp_path / f"{PREFIX}folder").is_dir()
    PageFile(tmp_path, [1]).close()
    assert not locked.exists()


def test_several_at_once_in_one_folder(tmp_path: Path) -> None:
    files = [PageFile(tmp_path, [5000]) for _ in range(5)]
    for seed, pages in enumerate(files):
        put(pages, 0, data(5000, seed))
    assert all(np.array_equal(got(pages, 0, 5000), data(5000, seed)) for seed, pages in enumerate(files))


def test_one_that_is_closed_says_so(tmp_path: Path) -> None:
    pages = PageFile(tmp_path, [4096])
    put(pages, 0, data(4096))
    pages.close()
    with pytest.raises(PageFault, match="closed"):
        got(pages, 0, 4096)
    assert pages.settle() == {0}


def test_a_transfer_that_was_not_asked_for_to_the_end_is_not_waited_for(tmp_path: Path) -> None:
    """Ctrl-C may come in the middle of asking."""
    pages = PageFile(tmp_path, [4096])
    values = data(4096)

    def interrupted(job: object) -> None:
        raise KeyboardInterrupt

    jobs, pages._jobs = pages._jobs, type("Jobs", (), {"put": staticmethod(interrupted)})()
    with pytest.raises(KeyboardInterrupt):
        pages.write(0, address(values))
    pages._jobs = jobs
    pages.settle()
    put(pages, 0, values)
    assert np.array_equal(got(pages, 0, 4096), values)
