"""What must be done at the end of a piece of work, done whatever ends it and at whatever instant.

In:  a function that works, and one that ends the work: puts back what was changed, closes what was opened.
Out: what the first returns or raises, after the second has run to its end.

Ctrl-C, or an exception that another thread sends, is raised between any two bytecodes, those of a `finally` and of a
context manager's exit too. So `end` is called again where it was interrupted itself, and must bear it: called twice it
does what it does once.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def surely(work: Callable[[], T], end: Callable[[], None]) -> T:
    """What `work` returns, after `end`."""
    try:
        try:
            result = work()
            end()
            return result
        except BaseException:
            end()
            raise
    except BaseException:
        end()  # what came may have come in the line above, or in the middle of that `end`
        raise


def at_once(calls: Iterable[Callable[[], object]]) -> None:
    """Make the calls, in order, without a bytecode between them: of kernels, nothing interrupts them then."""
    deque(map(operator.call, calls), maxlen=0)
