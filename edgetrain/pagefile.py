"""A file that memory is paged to: written and read back in the background, checksummed.

In:  a folder, and the bytes of each slot of the file. Out: `PageFile`, which one asks for transfers and waits for.

    caller        ── write(3) ── op ── op ── wait(3) ── free ── op ── read(3) ── op ── wait(3) ── op that reads it
    its thread        └─ copy, checksum, write ─┘                        └─ read, checksum, copy ─┘

- Transfers run one at a time, in the order in which they were asked for.
- The space of all slots is there before the first of them: a full disk is found when the file is made.
- The system's cache is passed by where the file system allows it: what is paged out takes no memory but for one buffer,
  `CHUNK_BYTES`.
- The file loses its name as soon as it is open, so nothing of it is left when the process ends, however it ends. One
  that a crash left in between is removed by the next to come.
- A transfer that fails, or gives back other bytes than were written, raises `PageFault` in the `wait` for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import queue
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgetrain.errors import UserError

CHUNK_BYTES = 1 << 20
ALIGNED_BYTES = 4096  # what direct transfers are counted in
PREFIX = "edgetrain-pages-"


class PageFault(Exception):
    """What was to be written or read back is not there, or not whole.

    at: where in its work the caller waited for it, if it says so.
    """

    def __init__(self, slot: int, why: str) -> None:
        super().__init__(why)
        self.slot, self.why = slot, why
        self.at: int | None = None


@dataclass(frozen=True)
class Calls:
    """The system calls that move bytes; tests put faults in their place."""

    write: Callable[[int, memoryview, int], int] = os.pwrite
    read: Callable[[int, memoryview, int], int] = lambda file, view, at: os.preadv(file, [view], at)


@dataclass
class Moved:
    """What was moved so far, and how long somebody waited for it."""

    out_bytes: int = 0
    in_bytes: int = 0
    waited_s: float = 0.0


class _Slot:
    """A place of the file. `ready` belongs to its last transfer, and is set when that is over."""

    def __init__(self, at: int, n_bytes: int) -> None:
        self.at, self.n_bytes = at, n_bytes
        self.checksum: int | None = None
        self.fault: str | None = None
        self.ready = threading.Event()
        self.ready.set()


class _Damaged(Exception):
    """Found here, not by the system."""


class PageFile:
    def __init__(self, folder: str | Path, slot_bytes: Sequence[int], *, calls: Calls | None = None) -> None:
        self.moved = Moved()
        self.n_bytes = 0
        self._slots: list[_Slot] = []
        for n_bytes in slot_bytes:
            self._slots.append(_Slot(self.n_bytes, n_bytes))
            self.n_bytes += _whole(n_bytes)
        self._mover = _Mover(_new_file(Path(folder), self.n_bytes), calls or Calls())
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._process = os.getpid()
        # Neither the thread nor a job knows this object, so that it goes, and the file with it, when nobody else does.
        thread = threading.Thread(
            target=_work, args=(self._jobs, self._mover.file), name="edgetrain pages", daemon=True
        )
        thread.start()
        self.close = weakref.finalize(self, _close, self._jobs, thread)

    def write(self, slot: int, address: int) -> None:
        """Begin to write the memory at the address, which must stay as it is until `wait`."""
        self._begin(self._slots[slot], address, self._mover.write)
        self.moved.out_bytes += self._slots[slot].n_bytes

    def read(self, slot: int, address: int) -> None:
        """Begin to read the slot into the memory at the address, which nobody may touch until `wait`."""
        self._begin(self._slots[slot], address, self._mover.read)
        self.moved.in_bytes += self._slots[slot].n_bytes

    def wait(self, slot: int) -> None:
        """Until the last transfer of the slot is over."""
        place = self._slots[slot]
        if not place.ready.is_set():
            begin = time.perf_counter()
            place.ready.wait()
            self.moved.waited_s += time.perf_counter() - begin
        if place.fault is not None:
            raise PageFault(slot, place.fault)

    def settle(self) -> set[int]:
        """Until no transfer is under way. Returns the slots whose last transfer failed; that is forgotten then."""
        if self._why_gone() is None:
            over = threading.Event()
            self._jobs.put(over.set)
            over.wait()
        failed = set()
        for slot, place in enumerate(self._slots):
            place.ready.set()  # of one that Ctrl-C kept from being asked for, too
            if place.fault is not None:
                failed.add(slot)
                place.fault = None
        return failed

    def _why_gone(self) -> str | None:
        if os.getpid() != self._process:
            return "the process was copied, and the page file stayed with the original"
        return None if self.close.alive else "the page file is closed"

    def _begin(self, place: _Slot, address: int, transfer: Callable[[_Slot, int], None]) -> None:
        place.fault = place.fault or self._why_gone()
        if place.fault is not None:
            return
        ready = place.ready = threading.Event()

        def job() -> None:
            try:
                if place.fault is None:  # nor has one failed that was asked for before
                    transfer(place, address)
            except _Damaged as damage:
                place.fault = str(damage)
            except OSError as error:
                place.fault = f"the system says: {error.strerror or error}"
            except Exception as error:  # whatever it is, the bytes are not where they should be
                place.fault = f"{type(error).__name__}: {error}"
            finally:
                ready.set()

        self._jobs.put(job)


class _Mover:
    """Moves bytes between memory and the file, by way of one buffer."""

    def __init__(self, file: int, calls: Calls) -> None:
        self.file, self._calls = file, calls
        self._buffer = mmap.mmap(-1, CHUNK_BYTES)  # whole pages, as direct transfers want them
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))

    def write(self, place: _Slot, address: int) -> None:
        place.checksum = None  # until all of it is there: what was there before must not pass for it
        checksum = 0
        for begin in range(0, place.n_bytes, CHUNK_BYTES):
            n_bytes = min(CHUNK_BYTES, place.n_bytes - begin)
            ctypes.memmove(self._address, address + begin, n_bytes)
            with memoryview(self._buffer) as view:
                checksum = zlib.crc32(view[:n_bytes], checksum)
                self._move(self._calls.write, view[: _whole(n_bytes)], place.at + begin)
        place.checksum = checksum

    def read(self, place: _Slot, address: int) -> None:
        checksum = 0
        for begin in range(0, place.n_bytes, CHUNK_BYTES):
            n_bytes = min(CHUNK_BYTES, place.n_bytes - begin)
            with memoryview(self._buffer) as view:
                self._move(self._calls.read, view[: _whole(n_bytes)], place.at + begin)
                checksum = zlib.crc32(view[:n_bytes], checksum)
            ctypes.memmove(address + begin, self._address, n_bytes)
        if checksum != place.checksum:
            raise _Damaged("other bytes came back from the page file than were written")

    def _move(self, call: Callable[[int, memoryview, int], int], view: memoryview, at: int) -> None:
        while view.nbytes:
            moved = call(self.file, view, at)
            if moved <= 0:
                raise _Damaged("the page file ends before it should")
            view, at = view[moved:], at + moved


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None], file: int) -> None:
    try:
        while (job := jobs.get()) is not None:
            job()
            del job  # or it would stay until the next one comes
    finally:
        os.close(file)


def _close(jobs: queue.SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():  # the garbage collector runs in any thread, in that one too
        thread.join()


def _whole(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _new_file(folder: Path, n_bytes: int) -> int:
    try:
        remove_left_over(folder)
        file, path = _create(folder)
    except OSError as error:
        raise UserError(
            f"no file can be made in {folder} to page to", received=error.strerror or str(error),
            next_step="page to a folder that exists and may be written to",
        ) from error  # fmt: skip
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.posix_fallocate(file, 0, n_bytes + ALIGNED_BYTES)
        _past_the_cache(file, n_bytes)
    except OSError as error:
        os.close(file)
        raise UserError(
            f"{folder} has no room for the {n_bytes / 1e6:.0f} MB that are paged there",
            received=error.strerror or str(error), next_step="make room, or page to another folder",
        ) from error  # fmt: skip
    return file


def _create(folder: Path) -> tuple[int, str]:
    """A new file, open and locked."""
    file, path = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except BaseException:
        os.close(file)
        os.unlink(path)
        raise
    return file, path


def _past_the_cache(file: int, at: int) -> None:
    """From now on directly to the device, if a first block of zeros goes there so."""
    plain = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, plain | os.O_DIRECT)
        with mmap.mmap(-1, ALIGNED_BYTES) as block:
            os.pwrite(file, block, at)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, plain)


def remove_left_over(folder: Path) -> None:
    """Remove files that an ended process left behind: it had created them, and not yet taken their names away.

    A process that still lives holds a lock.
    """
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(file)
