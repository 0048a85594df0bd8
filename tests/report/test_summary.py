"""Numbers as people read them, and summaries that hide nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgetrain.measure.record import Value, new_record
from edgetrain.report.numbers import between, interval, quantity, shown
from edgetrain.report.summary import cards, clip, in_percent, side_by_side, table
from edgetrain.report.words import GROUPS, grouped, label


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.1824, "s", "182 ms"), (12e-6, "s", "12 µs"), (0.0, "s", "0 s"), (3e-12, "s", "0.003 ns"),
        (75.0, "s", "75 s"),
        (1.5e-3, "J", "1.5 mJ"), (1536, "B", "1.54 kB"), (2.5e9, "bytes", "2.5 GB"), (1.5e9, "Hz", "1.5 GHz"),
        (0.9999e-3, "s", "1 ms"), (26.8e9, "1/s", "26.8 G/s"), (21.9, "1/s", "21.9 /s"), (0.31, "1", "0.31"),
        (7e9, "1", "7 G"), (-0.005, "s", "-5 ms"), (1.7e308, "s", "1.70×10³⁰⁸ s"), (51.0, "°C", "51 °C"),
    ],
)  # fmt: skip
def test_the_unit_has_the_size_that_suits(value: float, unit: str, expected: str) -> None:
    assert quantity(value, unit) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Value(None, "J", "unavailable"), "—"), (Value(True, "", "derived"), "yes"),
        (Value("rpi4", "", "derived"), "rpi4"),
        (Value(1234, "steps", "measured"), "1,234 steps"), (Value(0, "1", "measured"), "0"),
        (Value(10**299, "1", "measured"), "1.000×10²⁸⁷ T"), (Value(0.18243, "s", "measured"), "182.4 ms"),
    ],
)  # fmt: skip
def test_values_of_a_summary(value: Value, expected: str) -> None:
    assert shown(value) == expected


def test_an_interval_has_the_unit_of_its_value() -> None:
    assert interval(Value(0.9, "s", "measured", 0.8, 1.2)) == "800 to 1,200"  # of 900 ms
    assert interval(Value(0.9, "s", "measured")) == ""
    assert between(1.0, 2.0) == "1 to 2"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("step_time_s", "time of a step"), ("energy_per_step_j", "energy of a step"),
        ("peak_bytes", "peak of all tensors"), ("arena_bytes", "arena memory"), ("burst_s", "burst"),
        ("temp_cpu_c_most", "temp cpu, highest"), ("cpu0_frequency_hz_mean", "cpu0, mean"),
        ("utilisation_cpu12", "part of the time that core 12 is busy"), ("note_3", "note 3"),
        ("time of a step", "time of a step"), ("_", "_"),
    ],
)  # fmt: skip
def test_names_in_words(name: str, words: str) -> None:
    assert label(name) == words


def test_a_long_name_is_cut() -> None:
    record = replace(new_record(["x"]), summary={"x" * 999: Value(1, "1", "measured")})
    assert "x" * 299 + "…</td>" in table(record)


def test_values_stand_in_groups_and_none_is_left_out() -> None:
    names = ["noise", "my own", "peak_bytes", "step_time_s", "utilisation_cpu0", "utilisation", "temp_c_most", "note_1"]
    groups = dict(grouped(names))
    assert sorted(name for members in groups.values() for name in members) == sorted(names)
    assert groups["other"] == ["my own"]
    assert groups["processor"] == ["utilisation", "utilisation_cpu0", "temp_c_most"]
    assert groups["how sure it is"] == ["noise", "note_1"]
    assert list(groups) == ["other", "time", "memory", "processor", "how sure it is"]
    labels = [label for labels in GROUPS.values() for label in labels]
    assert len(set(labels)) == len(labels)
    summary = {name: Value(1, "1", "measured") for name in names}
    text = table(replace(new_record(["x"]), summary=summary))
    assert text.count('class="group"') == 4
    assert 'class="group"' not in table(replace(new_record(["x"]), summary={"my own": summary["my own"]}))


def test_parts_are_percents_and_other_ratios_are_not() -> None:
    part = in_percent("utilisation_cpu0", Value(0.25, "1", "derived", 0.2, 0.3))
    assert (part.value, part.unit, part.low, part.high) == (25.0, "%", 20.0, 30.0)
    for name, value in (
        ("time_over_inference", Value(3.0, "1", "derived")),
        ("utilisation", Value(None, "1", "unavailable")),
        ("utilisation", Value(True, "1", "derived")),
        ("utilisation", Value(10**9, "1", "derived")),
    ):
        assert in_percent(name, value) == value


def test_cards_are_the_first_value_of_each_unit() -> None:
    summary = {
        "steps": Value(3, "1", "measured"), "step_time_s": Value(0.2, "s", "measured", 0.1, 0.3),
        "forward_s": Value(0.1, "s", "measured"), "energy_j": Value(None, "J", "unavailable"),
        "peak_bytes": Value(5_000_000, "B", "derived"),
    }  # fmt: skip
    text = cards(replace(new_record(["x"]), summary=summary))
    assert text.count('class="card"') == 2
    assert "time of a step" in text
    assert "100 to 300" in text
    assert "forward" not in text
    assert "unavailable" in table(replace(new_record(["x"]), summary=summary))


def test_ratios_only_where_they_mean_something() -> None:
    first = {
        "t": Value(2.0, "s", "measured"),
        "zero": Value(0.0, "s", "measured"),
        "unit": Value(1.0, "s", "measured"),
        "w": Value("a", "", "derived"),
    }
    second = {
        "t": Value(3.0, "s", "measured"),
        "zero": Value(1.0, "s", "measured"),
        "unit": Value(1.0, "J", "measured"),
        "w": Value("b", "", "derived"),
    }
    record = new_record(["x"])
    text = side_by_side([("a", replace(record, summary=first)), ("b", replace(record, summary=second))])
    assert text.count("×") == 1
    assert "1.5×" in text
    assert side_by_side([("a", record)]) == ""
    other = {"peak": Value(1.0, "B", "measured")}
    assert side_by_side([("a", replace(record, summary=first)), ("b", replace(record, summary=other))]) == ""


def test_a_long_text_is_broken_into_lines_and_a_number_is_not() -> None:
    summary = {"noise": Value("noisy " * 20, "", "derived"), "t": Value(2.0, "s", "measured")}
    record = replace(new_record(["x"]), summary=summary)
    for text in (table(record), side_by_side([("a", record), ("b", record)])):
        assert '<td class="number words">noisy' in text
        assert '<td class="number">2 s' in text


def test_long_text_is_cut() -> None:
    assert clip("abc", 3) == "abc"
    assert clip("abcd", 3) == "ab…"
