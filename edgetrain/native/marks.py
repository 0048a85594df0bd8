"""Places and the nanoseconds at which they were passed.

In C (marks.c), or in Python where edgetrain was installed without a compiler.

In:  a number for each place, as a step passes it.
Out: place, nanoseconds of CLOCK_MONOTONIC, place, nanoseconds, …, as int64s.
"""

from __future__ import annotations

import importlib
import time
from array import array
from typing import Any


class MarksInPython:
    def __init__(self) -> None:
        self._values = array("q")
        append, now = self._values.append, time.monotonic_ns

        def mark(place: int) -> None:  # hundreds of times a step: nothing but this
            append(place)
            append(now())

        self.mark = mark

    def __bytes__(self) -> bytes:
        return self._values.tobytes()


try:
    Marks: Any = importlib.import_module("edgetrain.native._marks").Marks
except ImportError:
    Marks = MarksInPython
