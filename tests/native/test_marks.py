"""Marks of a step: the C code and the Python code write down the same."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from edgetrain.native.marks import Marks, MarksInPython

BOTH = [Marks, MarksInPython]


def test_the_library_is_there() -> None:
    assert Marks is not MarksInPython


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 5000])
def test_places_and_times(kind: Any, count: int) -> None:
    marks, places = kind(), [(-1) ** n * n for n in range(count)]
    began = time.monotonic_ns()
    for place in places:
        marks.mark(place)
    ended = time.monotonic_ns()
    table = np.frombuffer(bytes(marks), dtype=np.int64)
    assert table[::2].tolist() == places
    times = [began, *table[1::2].tolist(), ended]
    assert times == sorted(times)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("place", ["a", None, 2**63])
def test_what_is_no_place(kind: Any, place: Any) -> None:
    marks = kind()
    with pytest.raises((TypeError, OverflowError)):
        marks.mark(place)
    assert bytes(marks) == b""
