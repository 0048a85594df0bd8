"""Ctrl-C on the command line: one message and exit code 130, from the first import to the end of the process.

    starting   imports, options     the process leaves at once: nothing has begun
    working    a command            KeyboardInterrupt; a second one within a second is the same press
    ending     the command is over  ignored

Only the standard library is imported here, and this module before all others. A process that is not the command, or
that was started with SIGINT ignored, is left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, TypeVar

from edgetrain.native.surely import surely

T = TypeVar("T")
START_AGAIN = "nothing new to resume from: give the same command to start again"
_SAME_PRESS_S = 1.0
_AGAIN_S = 0.01


def starting() -> None:
    """Called by the package, before it imports anything: from here on Ctrl-C shows no traceback of an import."""
    if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _is_command() -> bool:
    program = (getattr(sys, "argv", None) or [""])[0]
    if program == "-m":  # while Python looks for `python -m edgetrain`
        return "edgetrain" in sys.orig_argv or "-medgetrain" in sys.orig_argv
    return os.path.basename(program) == "edgetrain" and os.path.isfile(program)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    os.write(2, f"stopped by Ctrl-C; {START_AGAIN}\n".encode())
    os._exit(130)


class _Working:
    """Raises KeyboardInterrupt, once for each press."""

    def __init__(self) -> None:
        self.last_s: float | None = None
        self.usual = sys.unraisablehook

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.last_s is None or now - self.last_s > _SAME_PRESS_S:
            self.last_s = now
            raise KeyboardInterrupt

    def unraisable(self, event: Any) -> None:
        """Python drops what is raised in a destructor or a callback: the interrupt comes again, a moment later."""
        if event.exc_type is not KeyboardInterrupt:
            self.usual(event)
            return
        self.last_s = None
        again = threading.Timer(_AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        again.daemon = True
        again.start()


def interruptible(work: Callable[[], T]) -> T:
    """What `work` returns. Ctrl-C raises KeyboardInterrupt in it, and does nothing any more when it is over."""
    if signal.getsignal(signal.SIGINT) is not _leave:
        return work()
    working = _Working()

    def begin() -> T:
        sys.unraisablehook = working.unraisable
        signal.signal(signal.SIGINT, working)
        return work()

    return surely(begin, over)


@contextlib.contextmanager
def not_for_children() -> Iterator[None]:
    """What is started in the block never sees Ctrl-C: it is this process that ends it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def over() -> None:
    """What remains is to say how it ended."""
    if signal.getsignal(signal.SIGINT) is _leave or isinstance(signal.getsignal(signal.SIGINT), _Working):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
