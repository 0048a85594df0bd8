"""Pass, fail or inconclusive: as intervals lie to what is allowed."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from edgetrain.errors import UserError
from edgetrain.measure.compare import compare, verdict
from edgetrain.measure.intervals import median_interval
from edgetrain.measure.record import Record, Value, new_record

NONE = new_record(["test"])


def record(**summary: Value) -> Record:
    return replace(NONE, status="finished", summary=summary)


def seconds(value: float, off: float = 0.01) -> Value:
    return Value(value, "s", "measured", value * (1 - off), value * (1 + off))


@pytest.mark.parametrize(
    ("second", "expected"),
    [(1.0, "pass"), (0.5, "pass"), (1.03, "pass"), (1.05, "inconclusive"), (1.06, "inconclusive"), (1.1, "fail")],
)
def test_less_is_better(second: float, expected: str) -> None:
    (found,) = compare(record(step_time_s=seconds(1.0)), record(step_time_s=seconds(second)))
    assert found.verdict == expected
    assert found.ratio is not None
    assert found.ratio.low < second < found.ratio.high


@pytest.mark.parametrize(
    ("second", "expected"), [(100.0, "pass"), (200.0, "pass"), (50.0, "fail"), (95.0, "inconclusive")]
)
def test_more_is_better(second: float, expected: str) -> None:
    names = ("samples_per_s",)
    (found,) = compare(
        record(samples_per_s=seconds(100.0)), record(samples_per_s=seconds(second)), names=names
    )  # fmt: skip
    assert found.verdict == expected


@pytest.mark.parametrize(("second", "expected"), [(1000, "pass"), (1049, "pass"), (1051, "fail"), (900, "pass")])
def test_counts_have_no_spread(second: int, expected: str) -> None:
    (found,) = compare(
        record(peak_bytes=Value(1000, "B", "measured")), record(peak_bytes=Value(second, "B", "measured"))
    )
    assert found.verdict == expected


def test_no_tolerance_means_no_more() -> None:
    one, other = Value(1000, "1", "measured"), Value(1001, "1", "measured")
    (found,) = compare(record(instructions=one), record(instructions=other), tolerance=0)
    assert found.verdict == "fail"


def test_what_nobody_knows_the_spread_of() -> None:
    first, second = record(step_time_s=Value(1.0, "s", "measured")), record(step_time_s=Value(2.0, "s", "measured"))
    (found,) = compare(first, second)
    assert (found.verdict, found.why) == ("inconclusive", "its spread is not known")
    assert compare(first, first)[0].verdict == "pass"


def test_modelled_and_measured_do_not_compare() -> None:
    first = record(energy_per_step_j=replace(seconds(1.0), unit="J", origin="modelled"))
    second = record(energy_per_step_j=replace(seconds(3.0), unit="J", origin="derived"))
    assert compare(first, second)[0].verdict == "inconclusive"


def test_missing_is_not_zero() -> None:
    first, second = record(a=Value(None, "J", "unavailable")), record(a=Value(0.0, "J", "measured"))
    assert compare(first, second, names=("a",))[0].verdict == "inconclusive"
    with pytest.raises(UserError, match="in common"):
        compare(first, second)


def test_one_that_fails_is_enough() -> None:
    slow, large = seconds(2.0), Value(10, "B", "measured")
    found = compare(record(step_time_s=seconds(1.0), peak_bytes=large), record(step_time_s=slow, peak_bytes=large))
    assert {one.verdict for one in found} == {"pass", "fail"}
    assert verdict(found) == "fail"
    assert verdict(found[1:]) == "pass"


def test_a_figure_that_is_not_there() -> None:
    with pytest.raises(UserError, match="no figure speed"):
        compare(record(step_time_s=seconds(1)), record(step_time_s=seconds(1)), names=("speed",))


def test_a_tolerance_that_cannot_be() -> None:
    with pytest.raises(UserError, match="tolerance"):
        compare(record(step_time_s=seconds(1)), record(step_time_s=seconds(1)), tolerance=math.nan)


def test_the_same_code_rarely_fails_and_slower_code_rarely_passes() -> None:
    """Two runs of 50 noisy steps each: with 5 % allowed, equal ones never fail, and 12 % slower ones never pass."""
    draw = random.Random(0)

    def run(base: float) -> Record:
        found = median_interval([base * draw.gauss(1, 0.05) for _ in range(50)])
        return record(step_time_s=Value(found.value, "s", "measured", found.low, found.high))

    same = [compare(run(1.0), run(1.0))[0].verdict for _ in range(200)]
    slower = [compare(run(1.0), run(1.12))[0].verdict for _ in range(200)]
    assert same.count("fail") == 0
    assert same.count("pass") > 150
    assert slower.count("pass") == 0
    assert slower.count("fail") > 150
