"""What a step may take, and amounts of memory as people write them: 300MB is 300·10⁶ bytes, 300MiB is 300·2²⁰."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from edgetrain.errors import UserError
from edgetrain.ranges import BYTES, JOULES, SECONDS, number, shown

_UNITS = {
    "b": 1, "": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
Objective = Literal["time", "energy"]
_LONGEST = 100  # an amount that is longer is none, cut off or not
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


@dataclass(frozen=True)
class Budget:
    """
    memory_bytes: bounds every byte of the step's tensors: parameters, buffers, optimizer state, inputs, activations,
        gradients, copies and the workspace of kernels.
    process_memory_bytes: bounds the resident memory of the process; what it holds already is taken off first.
    time_s, energy_j: bound what a step is predicted to take, by the costs; waiting for storage and idle power count.
    objective: what is to be least within all that: "time" or "energy".

    An amount of memory may be given as `parse_bytes` takes it, "300MB" too; what is kept is a number of bytes.
    """

    memory_bytes: int | None = None
    process_memory_bytes: int | None = None
    time_s: float | None = None
    energy_j: float | None = None
    objective: Objective = "time"

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "process_memory_bytes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(getattr(self, name)))  # frozen for everybody else
        for name, allowed in (("time_s", SECONDS), ("energy_j", JOULES)):
            if getattr(self, name) is not None:
                number(f"{name} of a budget", getattr(self, name), allowed)
        if self.objective not in get_args(Objective):
            raise UserError(
                "this is no objective of a plan", expected='"time" or "energy"', received=shown(self.objective)
            )


def parse_bytes(amount: int | float | str) -> int:
    """A whole number is a number of bytes, 9e6 too; a string is a number and a unit."""
    n_bytes: float = math.nan
    if isinstance(amount, int | float) and not isinstance(amount, bool) and amount == amount // 1:
        n_bytes = amount
    match = _AMOUNT.fullmatch(amount[:_LONGEST]) if isinstance(amount, str) else None
    if match is not None and match[2].lower() in _UNITS:
        n_bytes = float(match[1]) * _UNITS[match[2].lower()]
    if not (0 < n_bytes <= BYTES.high):
        raise UserError(
            "this is not an amount of memory", expected='a number of bytes, or a string such as "300MB" or "1.5GiB"',
            received=shown(amount),
        )  # fmt: skip
    return int(n_bytes)


def show_bytes(n_bytes: float) -> str:
    """Three digits and a decimal unit, the way that budgets are written."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n_bytes) >= size:
            value = n_bytes / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{n_bytes:.0f} B"
