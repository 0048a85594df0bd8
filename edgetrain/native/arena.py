"""The arena allocator from Python: write down what PyTorch's CPU allocator is asked for, or serve it where planned.

In:  a block of code that runs on this thread, and, to serve it, a `Program`: what it will ask for, in order, and where.
Out: a `Recording` of what was asked for and given back.

The library `_arena` is built when the package is installed where PyTorch is (see setup.py); `missing()` says why it
cannot be used. Nothing here is needed to train: without it, steps take their memory from PyTorch's own allocator.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from edgetrain.errors import InternalError
from edgetrain.native.library import load


@dataclass
class Recording:
    """What one block of code asked of the allocator; filled in at its end.

    events: in order, each request as its bytes, each return as -1 - the number of its request.
    improvised: requests from the arena that got a place by best fit: there was no program, or the block did something
        else than it says.
    unused: entries of the program that were not asked for.
    height_bytes: of the arena, as far as it was used.
    """

    events: tuple[int, ...] = ()
    improvised: int = 0
    unused: int = 0
    most_bytes: int = 0
    held_bytes: int = 0
    height_bytes: int = 0


_MAX_OFFSET = 2**62
_turn = threading.RLock()  # one arena: steps of several threads take turns


def _new_turn() -> None:
    """In a copy of the process nobody else has the turn."""
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_new_turn)


class _Entry(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_int64), ("offset", ctypes.c_int64)]


class Program:
    """Where the requests of a block go: the bytes and the offset of each, in order."""

    def __init__(self, sizes: Sequence[int], offsets: Sequence[int]) -> None:
        entries = list(zip(sizes, offsets, strict=True))
        if any(not 0 <= offset <= _MAX_OFFSET for offset in offsets):
            raise InternalError("an offset in the arena is negative, or beyond every memory")
        self.height_bytes = max((size + offset for size, offset in entries), default=0)
        self._n = len(entries)
        self._entries = (_Entry * self._n)(*(_Entry(size, offset) for size, offset in entries))

    def __len__(self) -> int:
        return self._n


def available() -> bool:
    return missing() is None


@functools.cache
def missing() -> str | None:
    """Why the arena cannot be used here, or None."""
    library = load("arena")
    if isinstance(library, str):
        return library
    if not hasattr(library, "et_resident"):
        return "its library was built from an older edgetrain; install edgetrain again"
    for name in ("et_install", "et_reserve", "et_started"):
        getattr(library, name).restype = ctypes.c_bool
    library.et_stop.restype = library.et_touched.restype = library.et_resident.restype = ctypes.c_int64
    library.et_reserve.argtypes = library.et_trim.argtypes = [ctypes.c_int64]
    library.et_start.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool]
    if not library.et_install():
        return "PyTorch's allocator was replaced by one that cannot be wrapped"
    # Addresses for all the memory that this machine has; where the system refuses, for less.
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not any(library.et_reserve(part) for part in (size, size // 2, size // 4, size // 8)):
        return "the system gives this process no addresses for it (ulimit -v)"
    return None


def _library() -> ctypes.CDLL:
    why, library = missing(), load("arena")
    if why is not None or isinstance(library, str):
        raise InternalError(f"the arena was asked for, but {why}")
    return library


class Watch:
    """What this thread asks for from `begin` to `end`, written down; with a program or `from_arena`, served from there.

    `end` may be called at any time and again, where something interrupted `begin` or `end` itself.
    """

    def __init__(self, program: Program | None = None, *, from_arena: bool = False) -> None:
        self.recording = Recording()
        self._program, self._from_arena = program, from_arena
        self._begun = False

    def begin(self) -> None:
        library, program = _library(), self._program
        if _is_mine():
            raise InternalError("a step began within another")
        self._begun = True  # from before it is: Ctrl-C may come as soon as it has
        _turn.acquire()
        if library.et_started():  # by somebody who has not the turn any more
            library.et_stop((ctypes.c_int64 * 5)())
        entries = None if program is None else ctypes.addressof(program._entries)
        library.et_start(entries, 0 if program is None else len(program), self._from_arena)

    def end(self) -> None:
        if self._begun:
            _end(self.recording)
            self._begun = False

    def __enter__(self) -> Recording:
        try:
            self.begin()
        except BaseException:
            self.end()
            raise
        return self.recording

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        except BaseException:
            self.end()
            raise


def _is_mine() -> bool:
    """This thread has the turn."""
    return bool(_turn._is_owned())  # type: ignore[attr-defined]


def _end(recording: Recording) -> None:
    """Of whatever this thread watches; nothing where it watches nothing."""
    if not _is_mine():
        return
    library = _library()
    if library.et_started():
        counts = (ctypes.c_int64 * 5)()
        n_events = library.et_stop(counts)
        events = (ctypes.c_int64 * n_events)()
        library.et_events(events)
        recording.events = tuple(events)
        recording.improvised, recording.unused, recording.most_bytes, recording.held_bytes = counts[:4]
        recording.height_bytes = counts[4]
    while _is_mine():
        _turn.release()


def watching() -> bool:
    """Something of this thread is being watched."""
    return _is_mine()


def end_watch() -> None:
    """For whoever began nothing himself: end what was left behind by something that was interrupted."""
    _end(Recording())


def recorded() -> Watch:
    """Write down what this thread asks for in the block."""
    return Watch()


def served(program: Program | None) -> Watch:
    """Serve what this thread asks for in the block from the arena, by the program as far as it goes."""
    return Watch(program, from_arena=True)


def resident_bytes() -> int:
    """What the arena holds of the process's resident memory."""
    return int(_library().et_resident()) if available() else 0


def reached_bytes() -> int:
    """How far up the arena has been used since it was last trimmed; pages below may have been released."""
    return int(_library().et_touched()) if available() else 0


def release() -> None:
    """Release the pages of the arena that hold nothing; within a step also those of each block that is returned."""
    if available():
        _library().et_release()


def trim(n_bytes: int) -> None:
    """Hand the pages of the arena above `n_bytes` back to the system."""
    _library().et_trim(n_bytes)
