"""Kernels that fail where a test says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from edgetrain.ops import update
from edgetrain.run.program import Program


class Fault(Exception):
    """What the tests raise inside a step."""


class Faults:
    """Stands around every kernel of a step's programs; raises at the k-th call of a step, before it or after it."""

    def __init__(self, *programs: Program) -> None:
        self.calls, self.at, self.after = 0, -1, False
        self.is_update: list[bool] = []
        for program in programs:
            table = program.run.__globals__
            for name in [name for name in table if re.fullmatch(r"f\d+", name)]:
                table[name] = self._around(table[name])

    def _around(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            number = self.calls
            self.calls += 1
            self.is_update.append(kernel in (update.sgd, update.adam))
            if number == self.at and not self.after:
                raise Fault
            result = kernel(*args, **kwargs)
            if number == self.at:
                raise Fault
            return result

        return guarded

    def arm(self, at: int, *, after: bool = False) -> None:
        self.calls, self.at, self.after = 0, at, after
        self.is_update.clear()

    def disarm(self) -> None:
        self.arm(-1)
