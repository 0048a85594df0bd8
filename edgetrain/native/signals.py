"""Signals that Python code handles, held back where a handler that raises would do harm; and told apart afterwards.

In:  a piece of work during which Ctrl-C, an alarm or another signal may come.
Out: its handler has run, at the latest when the work is over, and what it raised has come through.

A handler runs between any two bytecodes of the main thread. What it raises goes up through whatever runs there: code
that catches errors of another kind, or a C++ function of PyTorch that may not throw, which ends the process.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
import traceback
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def raised_by_handler(error: BaseException) -> bool:
    """The error was raised by the handler of a signal, and not by the code that it interrupted."""
    codes = {HeldSignals.call.__code__, *(_code_of(signal.getsignal(number)) for number in _SIGNALS)}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> CodeType | None:
    """The code that runs first when the handler is called; None of one written in C."""
    while isinstance(handler, functools.partial | MethodType):
        handler = handler.func if isinstance(handler, functools.partial) else handler.__func__
    function = handler if isinstance(handler, FunctionType) else vars(type(handler)).get("__call__")
    return function.__code__ if isinstance(function, FunctionType) else None


class HeldSignals:
    """Holds the signals that Python code handles, Ctrl-C among them, from `start` to `release`: a handler may raise.

    Those that were held come with `deliver` or `release`. All of it may be called again where something interrupted it.

    Python runs handlers in the main thread only, so elsewhere there is nothing to hold.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._came: list[int] = []

    def comes_through(self, frame: FrameType | None) -> bool:
        """Whether a signal that came in this frame is handled at once."""
        return False

    def start(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) and number not in self._before:
                self._before[number] = handler
                signal.signal(number, self._note)

    def deliver(self) -> None:
        """Handle what has come, here."""
        while self._came and threading.current_thread() is threading.main_thread():
            self.call(self._came.pop(0), sys._getframe(1))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.comes_through(frame) and callable(self._before.get(number)):
            self.call(number, frame)
        else:
            self._came.append(number)

    def call(self, number: int, frame: FrameType | None) -> None:
        """The handler that was there before."""
        try:
            self._before[number](number, frame)
        finally:
            self._take_again(number)

    def _take_again(self, number: int) -> None:
        """A handler may have put another in its place, for the time after."""
        now = signal.getsignal(number)
        if now != self._note:
            self._before[number] = now
            signal.signal(number, self._note)

    def release(self) -> None:
        """Hold no longer; what has come is handled now."""
        for number, handler in list(self._before.items()):
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
            self._before.pop(number, None)
        while self._came:
            number = self._came.pop(0)
            try:
                signal.raise_signal(number)
            finally:
                self.release()  # the others, where this one raised
