"""The page file gives back what was written, or says that it does not: bad disks, full disks, kills, and bytes that
somebody changed in the file itself."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import edgetrain.pagefile as pagefile
from edgetrain.errors import UserError
from edgetrain.pagefile import ALIGNED_BYTES, CHUNK_BYTES, PREFIX, Calls, PageFault, PageFile

SIZES = (0, 1, 4095, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17)
Bytes = NDArray[np.uint8]
Call = Callable[[int, memoryview, int], int]
REAL = Calls()


def data(n_bytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)


def address(values: Bytes) -> int:
    return int(values.ctypes.data)


def put(pages: PageFile, slot: int, values: Bytes) -> None:
    pages.write(slot, address(values))
    pages.wait(slot)


def got(pages: PageFile, slot: int, n_bytes: int) -> Bytes:
    values = np.full(n_bytes, 0xAA, dtype=np.uint8)
    pages.read(slot, address(values))
    pages.wait(slot)
    return values


def around(write: Call = REAL.write, read: Call = REAL.read) -> Calls:
    return Calls(write, read)


@contextmanager
def descriptor(folder: Path) -> Iterator[Path]:
    """The open file that has no name any more, by its number among those of this process."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:  # the one that lists them
            continue
        if target.startswith(f"{folder}/{PREFIX}") and target.endswith("(deleted)"):
            yield link
            return
    raise AssertionError("the page file is not open")


def open_files(folder: Path) -> int:
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(os.readlink(link))
        except OSError:
            continue
    return sum(target.startswith(f"{folder}/") for target in targets)


# ---- what comes back


def test_any_size_comes_back(tmp_path: Path) -> None:
    pages = PageFile(tmp_path, SIZES)
    written = [data(n_bytes, seed) for seed, n_bytes in enumerate(SIZES)]
    for slot, values in enumerate(written):
        pages.write(slot, address(values))  # all of them under way at once
    assert pages.settle() == set()
    for slot in random.Random(0).sample(range(len(SIZES)), len(SIZES)):
        assert np.array_equal(got(pages, slot, SIZES[slot]), written[slot])
    assert (pages.moved.out_bytes, pages.moved.in_bytes) == (sum(SIZES), sum(SIZES))


def test_nothing_is_written_beside_the_memory_that_is_given(tmp_path: Path) -> None:
    pages = PageFile(tmp_path, [5000])
    values = data(5000)
    put(pages, 0, values)
    room = np.full(5000 + 8192, 0x55, dtype=np.uint8)
    pages.read(0, address(room) + 4096)
    pages.wait(0)
    assert np.array_equal(room[4096:9096], values)
    assert (room[:4096] == 0x55).all()
    assert (room[9096:] == 0x55).all()


def test_many_slots_do_not_touch_each_other(tmp_path: Path) -> None:
    draw = random.Random(1)
    sizes = [draw.choice((0, 1, 100, 4096, 5000, 12288)) for _ in range(200)]
    pages = PageFile(tmp_path, sizes)
    content = [data(n, seed) for seed, n in enumerate(sizes)]
    for slot in draw.sample(range(200), 200):
        pages.write(slot, address(content[slot]))
    for round_ in range(3):
        slot = draw.randrange(200)  # one of them anew
        content[slot] = data(sizes[slot], 1000 + round_)
        pages.write(slot, address(content[slot]))
        pages.wait(slot)
    assert all(np.array_equal(got(pages, slot, n), content[slot]) for slot, n in enumerate(sizes))


def test_a_slot_can_be_written_again_and_read_twice(tmp_path: Path) -> None:
    pages = PageFile(tmp_path, [7000])
    for seed in range(3):
        put(pages, 0, data(7000, seed))
        assert np.array_equal(got(pages, 0, 7000), data(7000, seed))
        assert np.array_equal(got(pages, 0, 7000), data(7000, seed))


def test_transfers_run_in_the_order_of_asking(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    first = threading.Event()

    def write(file: int, view: memoryview, at: int) -> int:
        first.wait(10)
        seen.append(("write", at))
        return os.pwrite(file, view, at)

    def read(file: int, view: memoryview, at: int) -> int:
        seen.append(("read", at))
        return REAL.read(file, view, at)

    pages = PageFile(tmp_path, [4096] * 4, calls=around(write, read))
    values = [data(4096, n) for n in range(4)]
    back = np.zeros(4096, dtype=np.uint8)
    for slot in (2, 0, 3):
        pages.write(slot, address(values[slot]))
    pages.read(2, address(back))
    pages.write(1, address(values[1]))
    assert seen == []
    first.set()
    pages.settle()
    asked = [("write", 2), ("write", 0), ("write", 3), ("read", 2), ("write", 1)]
    assert seen == [(what, slot * 4096) for what, slot in asked]
    assert np.array_equal(back, values[2])


def test_wait_is_for_the_last_of_several_transfers_of_a_slot(tmp_path: Path) -> None:
    gates = [threading.Event(), threading.Event()]
    ended: list[int] = []

    def write(file: int, view: memoryview, at: int) -> int:
        gates[len(ended)].wait(10)
        ended.append(1)
        return os.pwrite(file, view, at)

    pages = PageFile(tmp_path, [4096], calls=around(write))
    old, new = data(4096, 0), data(4096, 1)
    pages.write(0, address(old))
    pages.write(0, address(new))
    gates[0].set()
    waiting = threading.Thread(target=pages.wait, args=(0,))
    waiting.start()
    while not ended:
        time.sleep(0.001)
    waiting.join(0.05)
    assert waiting.is_alive()  # the first is over, the second is not
    gates[1].set()
    waiting.join(10)
    assert not waiting.is_alive()
    assert np.array_equal(got(pages, 0, 4096), new)


def test_a_slow_disk_only_costs_time(tmp_path: Path) -> None:
    def slow(call: Call) -> Call:
        def later(file: int, view: memoryview, at: int) -> int:
            time.sleep(0.01)
            return call(file, view, at)

        return later

    pages = PageFile(tmp_path, [9000] * 3, calls=around(slow(REAL.write), slow(REAL.read)))
    values = [data(9000, n) for n in range(3)]
    for slot in range(3):
        pages.write(slot, address(values[slot]))
    pages.wait(2)
    assert pages.moved.waited_s > 0
    assert all(np.array_equal(got(pages, slot, 9000), values[slot]) for slot in range(3))


def test_short_writes_and_reads_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may move fewer bytes than it was asked to: by whole blocks when direct, by any number otherwise."""
    draw = random.Random(0)

    def short(call: Call, step: int) -> Call:
        def some(file: int, view: memoryview, at: int) -> int:
            least = min(step, view.nbytes)
            n = draw.randrange(least, view.nbytes + 1, step)
            return call(file, view[:n], at)

        return some

    for step in (ALIGNED_BYTES, 1):
        if step == 1:
            monkeypatch.setattr(pagefile, "_past_the_cache", lambda file, at: None)
        n_bytes = CHUNK_BYTES + 5 * 4096 + 3
        pages = PageFile(tmp_path, [n_bytes], calls=around(short(REAL.write, step), short(REAL.read, step)))
        put(pages, 0, data(n_bytes))
        assert np.array_equal(got(pages, 0, n_bytes), data(n_bytes))


def test_it_works_where_the_cache_cannot_be_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without direct transfers: refused when asked for, or when first used."""
    real_fcntl, real_pwrite = fcntl.fcntl, os.pwrite

    def refuse(file: int, command: int, given: int = 0) -> int:
        if command == fcntl.F_SETFL and given & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(file, command, given)

    def refuse_first(file: int, block: object, at: int) -> int:
        if real_fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_pwrite(file, block, at)  # type: ignore[arg-type]

    for place, name, fake in ((fcntl, "fcntl", refuse), (os, "pwrite", refuse_first)):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, fake)
            pages = PageFile(tmp_path, [CHUNK_BYTES + 1, 3])
        with descriptor(tmp_path) as link:
            assert not fcntl.fcntl(int(link.name), fcntl.F_GETFL) & os.O_DIRECT
        put(pages, 0, data(CHUNK_BYTES + 1))
        assert np.array_equal(got(pages, 0, CHUNK_BYTES + 1), data(CHUNK_BYTES + 1))
        pages.close()


# ---- what does not come back


@pytest.mark.parametrize("at", [0, 4999, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 8191])
def test_a_flipped_bit_is_found(tmp_path: Path, at: int) -> None:
    sizes = [CHUNK_BYTES + 8192, 4096]
    pages = PageFile(tmp_path, sizes)
    for slot, n_bytes in enumerate(sizes):
        put(pages, slot, data(n_bytes, slot))
    with descriptor(tmp_path) as link, open(link, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
        file.flush()
        os.fsync(file.fileno())
    with pytest.raises(PageFault, match=r"^other bytes came back") as found:
        got(pages, 0, sizes[0])
    assert found.value.slot == 0
    assert np.array_equal(got(pages, 1, 4096), data(4096, 1))  # the others are as they were


def test_a_truncated_file_is_found(tmp_path: Path) -> None:
    pages = PageFile(tmp_path, [8192, 8192])
    put(pages, 0, data(8192, 0))
    put(pages, 1, data(8192, 1))
    with descriptor(tmp_path) as link:
        os.truncate(link, 8192 + 4096)
    assert np.array_equal(got(pages, 0, 8192), data(8192, 0))
    with pytest.raises(PageFault, match=r"^the page file ends before it should"):
        got(pages, 1, 8192)


def test_what_was_never_written_is_not_read(tmp_path: Path) -> None:
    pages = PageFile(tmp_path, [4096, 0])
    for slot, n_bytes in enumerate((4096, 0)):
        with pytest.raises(PageFault):
            got(pages, slot, n_bytes)


class FailsAt:
    """Calls whose k-th fails."""

    def __init__(self, k: int, error: BaseException) -> None:
        self.calls, self.k, self.error = 0, k, error

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.k:
            raise self.error

    def write(self, file: int, view: memoryview, at: int) -> int:
        self._count()
        return os.pwrite(file, view, at)

    def read(self, file: int, view: memoryview, at: int) -> int:
        self._count()
        return REAL.read(file, view, at)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError("none left")])
def test_an_error_at_any_call_is_told_where_it_is_waited_for_and_nowhere_else(tmp_path: Path, error: Exception) -> None:
    sizes = [2 * CHUNK_BYTES, 100, 4096]
    n_calls = 8  # 2 + 1 + 1 to write, as many to read
    owner = [0, 0, 1, 2, 0, 0, 1, 2]
    for k in range(1, n_calls + 1):
        fails = FailsAt(k, error)
        pages = PageFile(tmp_path, sizes, calls=Calls(fails.write, fails.read))
        told = []
        for slot, n_bytes in enumerate(sizes):
            try:
                put(pages, slot, data(n_bytes, slot))
            except PageFault as fault:
                told.append((fault.slot, "write"))
        for slot, n_bytes in enumerate(sizes):
            try:
                assert np.array_equal(got(pages, slot, n_bytes), data(n_bytes, slot))
            except PageFault as fault:
                told.append((fault.slot, "read"))
                why = fault.why
        bad = owner[k - 1]
        assert told == ([(bad, "write"), (bad, "read")] if k <= 4 else [(bad, "read")])
        assert str(error.args[-1]) in why
        assert pages.settle() == {bad}
        assert pages.settle() == set()  # forgotten
        put(pages, bad, data(sizes[bad], 9))  # and the slot is as good as new
        assert np.array_equal(got(pages, bad, sizes[bad]), data(sizes[bad], 9))
        pages.close()


def test_what_the_system_says_is_told_apart_from_what_was_found_here(tmp_path: Path) -> None:
    fails = FailsAt(1, OSError(errno.ENOSPC, "No space left on device"))
    pages = PageFile(tmp_path, [10], calls=Calls(fails.write, fails.read))
    with pytest.raises(PageFault, match=r"^the system says: No space left on device$"):
        put(pages, 0, data(10))
    pages = PageFile(tmp_path, [10], calls=around(write=lambda file, view, at: 0))
    with pytest.raises(PageFault, match=r"^the page file ends"):
        put(pages, 0, data(10))


def test_what_a_failed_write_did_not_replace_is_not_read_for_it(tmp_path: Path) -> None:
    """The page of the step before is still there, whole; it is not what was to be written."""
    broken = False

    def write(file: int, view: memoryview, at: int) -> int:
        if broken:
            raise OSError(errno.EIO, "Input/output error")
        return REAL.write(file, view, at)

    pages = PageFile(tmp_path, [1000], calls=around(write=write))
    put(pages, 0, data(1000, seed=1))
    broken = True
    values = data(1000, seed=2)
    pages.write(0, address(values))
    assert pages.settle() == {0}
    with pytest.raises(PageFault, match="other bytes"):
        got(pages, 0, 1000)


def test_settle_waits_for_all_of_them(tmp_path: Path) -> None:
    gate = threading.Event()

    def write(file: int, view: memoryview, at: int) -> int:
        gate.wait(10)
        if at == 4096:
            raise OSError(errno.EIO, "Input/output error")
        return os.pwrite(file, view, at)

    pages = PageFile(tmp_path, [4096] * 3, calls=around(write))
    values = data(4096)
    for slot in range(3):
        pages.write(slot, address(values))
    found: list[set[int]] = []
    waiting = threading.Thread(target=lambda: found.append(pages.settle()))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    gate.set()
    waiting.join(10)
    assert found == [{1}]


def test_a_copy_of_the_process_has_no_page_file(tmp_path: Path) -> None:
    """Its thread is not there, and the file would be shared: nobody may wait for it."""
    pages = PageFile(tmp_path, [4096])
    put(pages, 0, data(4096))
    pid = os.fork()
    if pid == 0:
        try:
            got(pages, 0, 4096)
        except PageFault as fault:
            os._exit(7 if "copied" in fault.why else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert np.array_equal(got(pages, 0, 4096), data(4096))


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
