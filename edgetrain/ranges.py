"""What a setting may be: one range for each, which commands and Python share, and one error for what lies outside.

In:  a value from outside, of any type. Out: the same value as a plain number, or a `UserError` with the range.
Promised: a number that is not finite is in no range; True is no number; what is shown of a value is short.
"""

from __future__ import annotations

import numbers
import os
import reprlib
from dataclasses import dataclass
from typing import Any

from edgetrain.errors import UserError

_DIGITS = 40  # of a value that are shown


@dataclass(frozen=True, slots=True)
class Range:
    """From `low` to `high`, both included; above: `low` itself is not. whole: whole numbers alone."""

    low: float
    high: float
    whole: bool = True
    above: bool = False

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        start = "above" if self.above else "from"
        end = "up to" if self.above else "to"
        return f"{kind} {start} {_number(self.low)} {end} {_number(self.high)}"

    def __contains__(self, value: object) -> bool:
        if type(value) is float and not self.whole:  # settings are looked at in every step
            return (self.low < value if self.above else self.low <= value) and value <= self.high
        kind = numbers.Integral if self.whole else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        plain: Any = value
        return bool((self.low < plain if self.above else self.low <= plain) and plain <= self.high)  # NaN is neither


# ---- the settings, by what they mean

SEED = Range(0, 2**63 - 1)
EPOCHS = Range(1, 1_000_000)
STEPS = Range(1, 10_000_000)
STEPS_OR_NONE = Range(0, 10_000_000)  # 0: never, or none
BATCH = Range(1, 10_000_000)
SIDE = Range(1, 65_536)
CLASSES = Range(1, 100_000_000)
CHANNELS = Range(1, 3)
WIDTH = Range(0, 1000, whole=False, above=True)
# More threads than cores take turns; PyTorch ends the process where the system has no more threads to give.
THREADS = Range(1, max(64, 4 * (os.cpu_count() or 1)))
LEARNING_RATE = Range(0, 1e6, whole=False)
MOMENTUM = Range(0, 1, whole=False)
WEIGHT_DECAY = Range(0, 1e6, whole=False)
SECONDS = Range(0, 1e7, whole=False, above=True)  # four months
IDLE_SECONDS = Range(0, 1e5, whole=False)
MILLISECONDS = Range(1, 1e6, whole=False)
MEGAHERTZ = Range(0, 1e6, whole=False, above=True)
WATTS = Range(0, 1e6, whole=False)
JOULES = Range(0, 1e12, whole=False, above=True)
REPEATS = Range(1, 1000)
ROUNDS = Range(0, 10_000)
TOLERANCE = Range(0, 1000, whole=False)
NORM = Range(0, 1e30, whole=False, above=True)
BYTES = Range(1, 10**18)


def whole(name: str, value: object, allowed: Range) -> int:
    """The value as an int; a `UserError` that names the setting where it is outside of the range."""
    return int(_inside(name, value, allowed))


def number(name: str, value: object, allowed: Range) -> float:
    """The value as a float; likewise."""
    return float(_inside(name, value, allowed))


def _inside(name: str, value: Any, allowed: Range) -> Any:
    if value not in allowed:
        raise UserError(f"invalid value for {name}", expected=str(allowed), received=shown(value))
    return value


def shown(value: object) -> str:
    """A value as it is printed in an error: short, whatever it is and however deep it is nested."""
    if isinstance(value, int) and abs(value) >= 10**_DIGITS:
        return f"a whole number of {value.bit_length():,} bits"
    return _SHORT.repr(value)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 2 * _DIGITS, 4 * _DIGITS, _DIGITS
