"""The files that are read, and the processes and connections that are started, while a step is captured.

In:  Python's audit events, for which a hook is installed at the first capture; it does nothing between captures.
Out: for each file that code opened to read it, what tells whether it has been written since.
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Stamp = tuple[int, ...] | None  # of a file that is not there: None

_CODE = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_STARTS = {
    "subprocess.Popen": "starts a process", "os.system": "starts a process", "os.fork": "starts a process",
    "socket.connect": "opens a connection",
}  # fmt: skip


class _Hook:
    """collecting: where to put what is seen; None between captures. A hook of Python's cannot be removed."""

    def __init__(self) -> None:
        self.installed = False
        self.collecting: Opened | None = None

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.collecting is not None:
            self.collecting.note(event, arguments)


_hook = _Hook()


class Opened:
    """files: what was read, each with its stamp. started: what a captured step would not start again, in words."""

    def __init__(self) -> None:
        self.files: dict[str, Stamp] = {}
        self.started: set[str] = set()
        self.paused = False
        self._thread = threading.get_ident()

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.paused or threading.get_ident() != self._thread:
            return
        if event in _STARTS:
            self.started.add(_STARTS[event])
        elif event in ("os.listdir", "os.scandir"):
            self.note_path(arguments[0] if arguments[0] is not None else ".")
        elif (event == "open" and _reads(*arguments)) or event == "sqlite3.connect":
            self.note_path(arguments[0])

    def note_path(self, path: object) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            file = os.path.abspath(os.fsdecode(path))
            if not file.startswith(_CODE) and not file.endswith((".py", ".pyc")):
                self.files.setdefault(file, stamp(file))


def stamp(file: str) -> Stamp:
    """Another one after each write."""
    try:
        at = os.stat(file)
    except OSError:
        return None
    return at.st_mtime_ns, at.st_ctime_ns, at.st_size, at.st_ino


def moves(file: str) -> bool:
    """It is no file with a content of its own, such as /dev/urandom or /proc/uptime."""
    try:
        at = os.stat(file)
    except OSError:
        return False
    return file.startswith("/proc/") or not (stat.S_ISREG(at.st_mode) or stat.S_ISDIR(at.st_mode))


def _reads(_path: object, mode: str | None, flags: int) -> bool:
    if mode is not None:
        return "r" in mode and "+" not in mode
    return flags & (os.O_WRONLY | os.O_RDWR) == 0


def stop_noting() -> None:
    """Where the end of a block was interrupted."""
    _hook.collecting = None


@contextmanager
def opened() -> Iterator[Opened]:
    """What is opened within the block."""
    if not _hook.installed:
        sys.addaudithook(_hook)
        _hook.installed = True
    before, files = _hook.collecting, Opened()
    try:
        _hook.collecting = files
        yield files
    finally:
        _hook.collecting = before
