"""Work that Ctrl-C asks for a stop, at a moment that suits the work; the second Ctrl-C ends it as ever."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from edgetrain.native.surely import surely

T = TypeVar("T")


class Stop:
    requested = False


def stoppable(work: Callable[[Stop], T]) -> T:
    """Ctrl-C asks the work for a stop; the second one is as if this were not here."""
    stop, previous = Stop(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous in (signal.SIG_IGN, None):
        return work(stop)

    def ask(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        signal.signal(signal.SIGINT, previous)

    def asking() -> T:
        signal.signal(signal.SIGINT, ask)
        return work(stop)

    return surely(asking, lambda: _set_interrupt(previous))


def _set_interrupt(handler: Any) -> None:
    signal.signal(signal.SIGINT, handler)
