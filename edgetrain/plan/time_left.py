"""The time for planning, shared by all plans of one call. What is done between plans, such as capturing and measuring,
does not count.

    plan_time_s  ├── plan ──┤── plan ──┤─ plan ─┤ left: each plan may take a part of what is left
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class TimeLeft:
    """part: of what is left, for the next plan."""

    left_s: float
    part: float = 1.0

    @contextmanager
    def planning(self) -> Iterator[float]:
        """The seconds that one plan may take."""
        begin = time.monotonic()
        try:
            yield self.part * self.left_s
        finally:
            self.left_s = max(0.0, self.left_s - (time.monotonic() - begin))
