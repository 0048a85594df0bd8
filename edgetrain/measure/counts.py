"""Instruction counts of firmware, kept in a file: read, and compared with older ones.

In:  two files that `benchmarks/firmware.py` wrote. Out: `Compared`, one a figure that is in either of them.

    lenet                                     instructions of a step
    lenet: features.0 conv2d.forward          of one op of it

Counts are exact: they have no spread, and any change is one of the code or of the compiler. What only one of the files
has cannot be judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgetrain.measure.compare import Compared, compare_values, require_tolerance
from edgetrain.measure.record import Value
from edgetrain.saved import load as load_saved

SCHEMA = 1
KEY = "edgetrain instruction counts"
TOLERANCE = 0.02


@dataclass(frozen=True)
class Counts:
    """about: what the counts depend on beside the code. instructions: by net, and by op of a net."""

    about: Mapping[str, str]
    instructions: Mapping[str, int]


def load_counts(file: Path) -> Counts:
    return load_saved(file, "file of instruction counts", _counts, next_step="write it with benchmarks/firmware.py")


def _counts(data: Any) -> Counts:
    if data[KEY] != SCHEMA:
        raise ValueError(f"schema {data[KEY]!r}, expected {SCHEMA}")
    instructions: dict[str, int] = {}
    for net, figures in data["nets"].items():
        instructions[net] = _count(figures["instructions"])
        instructions.update({f"{net}: {op}": _count(figure["instructions"]) for op, figure in figures["ops"].items()})
    return Counts({str(key): str(value) for key, value in data["about"].items()}, instructions)


def _count(value: Any) -> int:
    if type(value) is not int or value <= 0:
        raise ValueError(f"a count is {value!r}")
    return value


def compare_counts(first: Counts, second: Counts, tolerance: float = TOLERANCE) -> tuple[Compared, ...]:
    """In the order of the first file; what the second one alone has comes last."""
    require_tolerance(tolerance)
    names = [*first.instructions, *(name for name in second.instructions if name not in first.instructions)]
    return tuple(compare_values(name, _value(first, name), _value(second, name), tolerance) for name in names)


def _value(counts: Counts, name: str) -> Value:
    count = counts.instructions.get(name)
    return Value(count, "", "unavailable" if count is None else "measured")
