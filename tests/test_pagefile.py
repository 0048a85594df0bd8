"""The page file gives back what was written, or says that it does not: bad disks, full disks, kills, and bytes that
somebody changed in the file itself."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import edgetrain.pagefile as pagefile
from edgetrain.pagefile import ALIGNED_BYTES, CHUNK_BYTES, Calls, PageFault, PageFile
from tests.helpers.pages import REAL, SIZES, Call, address, around, data, descriptor, got, put

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
