"""Numbers as people read them: three or four digits and a unit of the right size.

In: a number and its SI unit. Out: text without markup, such as "182 ms", "1.6 MB", "2.34×10⁸¹".
"""

from __future__ import annotations

import math

from edgetrain.measure.record import Value

MISSING = "—"

_LARGE = 1e15  # above that a number has more digits than anybody reads
_SMALL = 1e-12
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SCALES: dict[str, tuple[tuple[str, float], ...]] = {
    "s": (("s", 1), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)),
    "J": (("kJ", 1e3), ("J", 1), ("mJ", 1e-3), ("µJ", 1e-6)),
    "W": (("kW", 1e3), ("W", 1), ("mW", 1e-3)),
    "B": (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)),
    "B/s": (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1)),
    "Hz": (("GHz", 1e9), ("MHz", 1e6), ("kHz", 1e3), ("Hz", 1)),
    "1/s": (("T/s", 1e12), ("G/s", 1e9), ("M/s", 1e6), ("/s", 1)),
    "FLOP": (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3), ("FLOP", 1)),
    "FLOP/s": (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6), ("kFLOP/s", 1e3), ("FLOP/s", 1)),
}
_SAME = {"bytes": "B", "1": ""}
_COUNTS: tuple[tuple[str, float], ...] = (("T", 1e12), ("G", 1e9))  # of what has no unit and is too long to read


def number(value: float, digits: int = 3) -> str:
    """At least so many digits, with commas, and never 1.6e+03 for 1,600."""
    size = abs(value)
    if size >= _LARGE or 0 < size < _SMALL:
        digit, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{digit}×10{str(int(power)).translate(_RAISED)}"
    if size >= 10 ** (digits - 1) - 0.5:
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    if "e" in text:
        text = f"{value:.{digits - 1 - math.floor(math.log10(size))}f}"
    return text


def quantity(value: float, unit: str, digits: int = 3) -> str:
    """The number in the size of its unit that suits it."""
    name, size = scale(value, unit)
    return f"{number(value / size, digits)} {name}".rstrip()


def scale(value: float, unit: str) -> tuple[str, float]:
    """The name and the size of the unit that suits a number."""
    unit = _SAME.get(unit, unit)
    sizes = _SCALES.get(unit, ((unit, 1.0),) if unit else (*_COUNTS, ("", 1.0)))
    zero = next((entry for entry in sizes if entry[1] == 1), sizes[-1])
    return next((entry for entry in sizes if abs(value) >= 0.9995 * entry[1]), zero if value == 0 else sizes[-1])


def shown(value: Value) -> str:
    """A value of a summary. One that is not there is a dash, never 0."""
    if value.value is None:
        return MISSING
    if isinstance(value.value, bool):
        return "yes" if value.value else "no"
    if isinstance(value.value, str):
        return f"{value.value} {value.unit}".strip()
    unit = _SAME.get(value.unit, value.unit)
    if isinstance(value.value, int) and unit not in _SCALES and abs(value.value) < (_LARGE if unit else _COUNTS[-1][1]):
        return f"{value.value:,} {unit}".strip()
    return quantity(value.value, value.unit, 4)


def interval(value: Value) -> str:
    """ "180 to 185", in the unit that the value is shown in; nothing where no interval is known."""
    if value.low is None or value.high is None or isinstance(value.value, str) or value.value is None:
        return ""
    return between(value.low, value.high, scale(value.value, value.unit)[1])


def between(low: float, high: float, size: float = 1.0, digits: int = 3) -> str:
    return f"{number(low / size, digits)} to {number(high / size, digits)}"
