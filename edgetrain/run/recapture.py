"""The net below the comparison of Python's objects: now and then a step is captured again, and must be the same.

In:  how many steps have been made, and the capture in use.
Out: a UserError that names the first op that differs. After 2, 4, 8, … steps; but not before all of it takes at most
     `FREE_S`, or `MAX_SHARE` of the time since the first step.
"""

from __future__ import annotations

import time

from edgetrain.errors import UserError
from edgetrain.graph.capture import predicted_layouts
from edgetrain.graph.capture.training import Captured

FREE_S = 0.5
MAX_SHARE = 0.01
SLOWER = 1.5  # than any before it the next capture may be
RECORDED_TWICE = 2  # is a step when it is captured first


class Recapture:
    def __init__(self) -> None:
        self._begin_s = time.perf_counter()
        self.spent_s = 0.0
        self._slowest_s = 0.0
        self._next = 2
        self.paused = False

    def require_same(self, captured: Captured, steps: int) -> None:
        """Refuse a step that would be captured otherwise by now; `steps` have been made."""
        if self.paused or steps < self._next:
            return
        begin_s = time.perf_counter()
        slowest_s = self._slowest_s or captured.took_s / RECORDED_TWICE
        if self.spent_s + SLOWER * slowest_s > max(FREE_S, MAX_SHARE * (begin_s - self._begin_s)):
            return
        # What was learnt from kernels meanwhile makes another graph of the same step.
        difference = captured.difference() if captured.layouts == predicted_layouts.learned() else None
        if difference is not None:
            raise UserError(
                f"the model or the loss has changed in a way that no look at its objects shows, within {steps} steps",
                expected="the ops that were captured",
                received=difference,
                next_step="call et.prepare again after such a change, or keep what changes in attributes and variables",
            )
        took_s = time.perf_counter() - begin_s
        self._slowest_s = max(self._slowest_s, took_s)
        self.spent_s += took_s
        while self._next <= steps:
            self._next *= 2
