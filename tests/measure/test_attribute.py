"""Energy of ops from windows that are longer than the ops: against truth that is known."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgetrain.errors import UserError
from edgetrain.measure.attribute import Attribution, attribute
from edgetrain.measure.sampler import Sampler
from edgetrain.measure.samples import read_samples
from edgetrain.measure.sensors import find
from edgetrain.measure.windows import IDLE, Ops, Windows, counted, gauged
from tests.measure.synthetic import MS, Truth, truth

SEEDS = range(20)


def errors(case: Truth, found: Attribution) -> list[float]:
    """By how much each op's energy is off, as a part; of a merged one, the energy of all that it is merged with."""
    return [abs(amount / energy - 1) for amount, _, _, energy in told(case, found)]


def told(case: Truth, found: Attribution) -> list[tuple[float, float, float, float]]:
    rows = []
    for name in case.ops.names:
        share = found.share(name)
        if share.amount is not None and IDLE not in share.names:
            assert share.amount_low is not None
            assert share.amount_high is not None
            energy = sum(case.energy[case.ops.names.index(other)] for other in share.names)
            rows.append((share.amount, share.amount_low, share.amount_high, float(energy)))
    return rows


def covered(case: Truth) -> float:
    return float(np.mean([low <= energy <= high for _, low, high, energy in told(case, attribute_of(case))]))


def attribute_of(case: Truth) -> Attribution:
    return attribute(case.ops, case.windows)


def smeared(case: Truth) -> list[float]:
    """What giving each op the mean of its windows would be off by."""
    level = case.windows.amount / ((case.windows.end_ns - case.windows.start_ns) * 1e-9)
    place = np.searchsorted(case.windows.start_ns, (case.ops.start_ns + case.ops.end_ns) // 2, side="right") - 1
    energy = level[place.clip(0)] * case.ops.lengths_s
    found = np.bincount(case.ops.op, energy)
    return list(np.abs(found / case.energy - 1))


@pytest.mark.parametrize("window_ms", [(10.0, 10.0), (5.0, 10.0), (2.0, 10.0)])
def test_twenty_ops_of_less_than_a_window(window_ms: tuple[float, float]) -> None:
    cases = [truth(seed, window_ms=window_ms) for seed in SEEDS]
    found = [attribute_of(case) for case in cases]
    off = [errors(case, one) for case, one in zip(cases, found, strict=True)]
    assert np.median([np.median(one) for one in off]) <= 0.03
    assert np.median([np.quantile(one, 0.9) for one in off]) <= 0.10
    # Hardly any op had to be merged for that; and the mean of windows is nowhere near.
    assert np.mean([sum(len(share.names) > 1 for share in one.shares) for one in found]) <= 1
    assert np.median([np.median(smeared(case)) for case in cases]) > 0.10


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"window_ms": (5.0, 15.0)},
        {"jitter": 0.0},
        {"gap_ms": 5.0},
        {"wander": 0.1},
        {"steps": 10},
        {"window_ms": (180.0, 220.0)},
        {"step_ms": 80.0},
        {"count": 60, "lengths_ms": (0.02, 2.0)},
    ],
    ids=str,
)
def test_intervals_hold_the_truth(how: dict[str, Any]) -> None:
    assert np.mean([covered(truth(seed, **how)) for seed in SEEDS]) >= 0.88


def test_intervals_are_not_wider_than_they_must_be() -> None:
    """Where an op stands alone its interval is about four times as wide as its usual error (1.35 standard errors)."""
    width, off = [], []
    for seed in SEEDS:
        for amount, low, high, energy in told(case := truth(seed), attribute_of(case)):
            width.append((high - low) / energy)
            off.append(abs(amount / energy - 1))
    assert 3 < np.median(width) / np.median(off) < 10


def test_without_noise_the_levels_come_out() -> None:
    case = truth(3, noise=0.0, window_ms=(5.0, 10.0))
    found = attribute_of(case)
    assert [share.names for share in found.shares] == [(name,) for name in case.ops.names]
    assert np.allclose([share.level or 0.0 for share in found.shares], case.level, rtol=1e-4)
    assert found.noise < 1e-4
    assert found.explained == pytest.approx(found.total, rel=1e-6)


def test_gaps_have_a_level_of_their_own() -> None:
    found = attribute_of(truth(1, gap_ms=6.0))
    assert found.idle is not None
    assert found.idle.names == (IDLE,)
    assert found.idle.level == pytest.approx(1.0, abs=0.4)
    assert found.idle.time_s == pytest.approx(0.6, rel=0.02)
    assert attribute_of(truth(1)).idle is None


def test_a_step_that_fits_the_windows_leaves_ops_that_cannot_be_told_apart() -> None:
    for seed in range(5):
        case = truth(seed, step_ms=80.0)
        found = attribute_of(case)
        assert 3 <= len(found.shares) <= 12  # eight kinds of window for twenty ops
        assert sorted(name for share in found.shares for name in share.names) == sorted(case.ops.names)
        # At random places of the sampler's ticks, the same step is told apart op by op.
        assert len(attribute_of(truth(seed, step_ms=80.0, window_ms=(5.0, 15.0))).shares) >= 18


def pair(first_ms: float, second_ms: float, levels: tuple[float, float], *, parallel: bool = False) -> Truth:
    """Two ops that are always together, between two others that take turns with them."""
    draw = np.random.default_rng(5)
    lengths = np.tile([6.0, first_ms, second_ms, 9.0], (200, 1))
    lengths[:, [0, 3]] *= draw.uniform(0.7, 1.3, (200, 2))
    if parallel:
        lengths[:, 2] = 0.0
    ends = np.cumsum((lengths * MS).round().astype(np.int64).ravel()).reshape(200, 4)
    starts = np.concatenate([[0], ends.ravel()[:-1]]).reshape(200, 4)
    if parallel:
        starts[:, 2], ends[:, 2] = starts[:, 1], ends[:, 1]
    level = np.array([3.0, *levels, 5.0])
    edges = np.arange(0, int(ends.max()), 10 * MS)
    amount = np.zeros(len(edges) - 1)
    for op in range(4):
        seconds = np.maximum(np.minimum(edges[1:, None], ends[:, op]) - np.maximum(edges[:-1, None], starts[:, op]), 0)
        amount += seconds.sum(axis=1) * 1e-9 * level[op]
    amount *= 1 + 0.03 * draw.standard_normal(len(amount))
    names = tuple("abcd")
    ops = Ops(names, np.tile(np.arange(4), 200), starts.ravel(), ends.ravel())
    return Truth(ops, Windows(edges[:-1], edges[1:], amount), level, ((ends - starts) * 1e-9 * level).sum(axis=0))


@pytest.mark.parametrize("levels", [(2.0, 8.0), (8.0, 2.0)])
def test_ops_that_run_at_the_same_time_are_merged(levels: tuple[float, float]) -> None:
    case = pair(4.0, 4.0, levels, parallel=True)
    found = attribute_of(case)
    assert sorted(share.names for share in found.shares) == [("a",), ("b", "c"), ("d",)]
    amount, low, high, energy = told(case, found)[1]
    assert amount == pytest.approx(energy, rel=0.03)
    assert low < energy < high
    assert (high - low) / energy < 0.1  # the sum is known well, though its parts are not


def test_an_op_too_short_to_be_seen_joins_its_neighbour() -> None:
    case = pair(4.0, 0.01, (2.0, 8.0))
    found = attribute_of(case)
    assert len(found.share("c").names) == 2
    assert found.share("a").names == ("a",)
    assert max(errors(case, found)) < 0.03
    apart = attribute_of(pair(4.0, 2.0, (2.0, 8.0)))
    assert all(len(share.names) == 1 for share in apart.shares)


def test_windows_longer_than_steps() -> None:
    cases = [
        truth(seed, count=3, steps=400, lengths_ms=(2.0, 8.0), window_ms=(40.0, 80.0), jitter=0.3) for seed in SEEDS
    ]
    found = [attribute_of(case) for case in cases]
    for one in found:
        assert one.explained == pytest.approx(one.total, rel=0.01)
    assert np.mean([len(one.shares) for one in found]) > 1.5  # most can be told apart all the same
    assert np.median([np.median(errors(case, one)) for case, one in zip(cases, found, strict=True)]) < 0.1
    assert np.mean([covered(case) for case in cases]) >= 0.88


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 12),
    st.integers(1, 40),
    st.floats(0.0, 0.3),
    st.floats(1.0, 100.0),
    st.floats(0.0, 10.0),
)
@example(seed=0, count=9, steps=4, noise=0.0, window=93.0, gap=0.0)  # one window: both ways explain it
def test_whatever_comes_in(seed: int, count: int, steps: int, noise: float, window: float, gap: float) -> None:
    case = truth(seed, count=count, steps=steps, noise=noise, window_ms=(window / 2, window), gap_ms=gap)
    found = attribute_of(case)
    # Each op once; nothing below 0; intervals hold their value; all that was spent is spent by somebody.
    assert sorted(name for share in found.shares for name in share.names if name != IDLE) == sorted(case.ops.names)
    for share in found.shares:
        if share.level is not None:
            assert share.level_low is not None
            assert share.level_high is not None
            assert 0 <= share.level_low <= share.level <= share.level_high
    if found.windows > 4 * count:
        assert found.explained == pytest.approx(found.total, rel=0.02 + 4 * noise / found.windows**0.5)
    # The order changes nothing.
    order = np.random.default_rng(seed).permutation(len(case.ops.op))
    names = np.random.default_rng(seed + 1).permutation(count)
    place = np.argsort(names)
    ops = Ops(
        tuple(case.ops.names[n] for n in names),
        place[case.ops.op][order],
        case.ops.start_ns[order],
        case.ops.end_ns[order],
    )
    again = attribute(ops, case.windows)
    for name in case.ops.names:
        assert sorted(again.share(name).names) == sorted(found.share(name).names)
        assert again.share(name).level == found.share(name).level or again.share(name).level == pytest.approx(
            found.share(name).level or 0.0, rel=1e-6
        )


def test_an_op_that_no_window_met_has_no_figure() -> None:
    case = truth(2)
    late = int(case.ops.end_ns.max()) + MS
    ops = Ops(
        (*case.ops.names, "late", "never"),
        np.append(case.ops.op, 20),
        np.append(case.ops.start_ns, late),
        np.append(case.ops.end_ns, late + MS),
    )
    found = attribute(ops, case.windows)
    for name, time_s in (("late", 0.001), ("never", 0.0)):
        share = found.share(name)
        assert (share.names, share.time_s) == ((name,), time_s)
        assert (share.level, share.amount, share.amount_low, share.amount_high) == (None,) * 4
    assert found.share("op0") == attribute_of(case).share("op0")
    empty = np.empty(0, dtype=np.int64)
    nothing = attribute(case.ops, Windows(empty, empty, np.empty(0)))
    assert all(share.level is None for share in nothing.shares)
    assert len(nothing.shares) == 20
    with pytest.raises(UserError, match="op99"):
        nothing.share("op99")


def test_instances_that_had_to_wait_take_no_more() -> None:
    """Ops that take the same joules each time, though half of them are held up to four times as long."""
    draw = np.random.default_rng(0)
    energy = np.array([0.01, 0.05, 0.02, 0.08])
    lengths = np.array([3.0, 4.0, 6.0, 2.0]) * np.where(draw.random((300, 4)) < 0.5, draw.uniform(1, 4, (300, 4)), 1.0)
    ends = np.cumsum((lengths * MS).round().astype(np.int64).ravel())
    ops = Ops(tuple("abcd"), np.tile(np.arange(4), 300), np.concatenate([[0], ends[:-1]]), ends)
    edges = np.arange(0, int(ends[-1]), 10 * MS)
    meter = np.interp(edges, np.concatenate([[0], ends]), np.concatenate([[0.0], np.cumsum(np.tile(energy, 300))]))
    windows = Windows(edges[:-1], edges[1:], np.diff(meter) * (1 + 0.03 * draw.standard_normal(len(edges) - 1)))
    found = attribute(ops, windows)
    assert found.constant == "amount"
    assert [(share.amount or 0.0) / 300 for share in found.shares] == pytest.approx(list(energy), rel=0.05)
    assert attribute_of(truth(0, jitter=0.3)).constant == "level"


def test_levels_are_not_negative_where_noise_would_make_them_so() -> None:
    case = truth(4, noise=0.2)
    level = np.where(np.arange(20) % 2, 0.0, case.level)
    quiet = replace(case, windows=replace(case.windows, amount=_amount(case, level, 0.2)))
    found = attribute_of(quiet)
    assert min(share.level or 0.0 for share in found.shares) >= 0
    total = level @ np.bincount(case.ops.op, case.ops.lengths_s)
    assert sum(share.amount or 0.0 for share in found.shares) == pytest.approx(total, rel=0.05)


def _amount(case: Truth, level: Any, noise: float) -> Any:
    ends = case.ops.end_ns
    spent = np.concatenate([[0.0], np.cumsum(level[case.ops.op] * case.ops.lengths_s)])
    edges = np.append(case.windows.start_ns, case.windows.end_ns[-1])
    amount = np.diff(np.interp(edges, np.concatenate([[0], ends]), spent))
    return amount * (1 + noise * np.random.default_rng(0).standard_normal(len(amount)))


# Windows from samples


def times(*at_ms: float) -> Any:
    return np.array([round(at * MS) for at in at_ms], dtype=np.int64)


def test_windows_of_a_counter() -> None:
    total = np.array([1.0, 2.0, np.nan, 5.0, 4.0, 4.5])  # missing once, set back once
    found = counted(times(0, 10, 20, 30, 40, 50), total)
    assert found.start_ns.tolist() == times(0, 10, 40).tolist()
    assert found.end_ns.tolist() == times(10, 30, 50).tolist()
    assert found.amount.tolist() == [1.0, 3.0, 0.5]
    coarse = counted(times(0, 10, 20, 30, 40, 50), np.arange(6.0), least_window_s=0.02)
    assert coarse.amount.tolist() == [2.0, 2.0]


def test_windows_of_a_gauge() -> None:
    level = np.array([9.0, 2.0, np.nan, 4.0])
    found = gauged(times(0, 10, 20, 30), level)
    assert found.start_ns.tolist() == times(0, 10).tolist()
    assert found.amount.tolist() == pytest.approx([0.02, 0.08])


def test_from_a_real_process_to_its_ops(tmp_path: Path) -> None:
    """CPU time tells the op that computes from the one that sleeps: two processes, one clock. The ops are long enough
    that it does so on a machine where others compute too."""
    starts: list[int] = []
    clock = next(source for finding, source in find() if finding.name == "process time")
    assert clock is not None
    with Sampler([clock], tmp_path) as sampler:
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            starts.append(time.monotonic_ns())
            end = time.monotonic() + random.uniform(0.015, 0.045)
            while time.monotonic() < end:
                pass
            starts.append(time.monotonic_ns())
            time.sleep(random.uniform(0.015, 0.045))
    assert sampler.summary.ended == "asked"
    edges = np.array(starts, dtype=np.int64)
    ops = Ops(("computes", "sleeps"), np.arange(len(edges) - 1) % 2, edges[:-1], edges[1:])
    series = read_samples(tmp_path).source("process time")
    found = attribute(ops, counted(series.at_ns, series.column("process_time_s")[1]))
    computes, sleeps = found.share("computes"), found.share("sleeps")
    assert "sleeps" not in computes.names
    assert sleeps.level is not None
    assert computes.level is not None
    assert sleeps.level < 0.6 * computes.level
    spent = time.process_time()
    assert found.total == pytest.approx(found.explained, rel=0.1)
    assert computes.amount is not None
    assert 0.05 < computes.amount < spent


def test_ops_from_a_gauge() -> None:
    """A sensor that averages since the last reading."""
    case = truth(7, noise=0.0, window_ms=(5.0, 15.0), steps=200)
    edges = np.append(case.windows.start_ns, case.windows.end_ns[-1])
    spent = np.concatenate([[0.0], np.cumsum(case.level[case.ops.op] * case.ops.lengths_s)])
    back = np.concatenate([[0], np.diff(edges)])
    meter = np.concatenate([[0], case.ops.end_ns])
    with np.errstate(invalid="ignore"):
        level = (np.interp(edges, meter, spent) - np.interp(edges - back, meter, spent)) / (back * 1e-9)
    level *= 1 + 0.03 * np.random.default_rng(0).standard_normal(len(level))
    found = attribute(case.ops, gauged(edges, level))
    assert np.median(errors(case, found)) < 0.03


@pytest.mark.parametrize(
    "make",
    [
        lambda: Ops(("a",), np.array([0, 0]), times(0), times(1)),
        lambda: Ops(("a",), np.array([1]), times(0), times(1)),
        lambda: Ops(("a", "a"), np.array([1]), times(0), times(1)),
        lambda: Ops((IDLE,), np.array([0]), times(0), times(1)),
        lambda: Ops(("a",), np.array([-1]), times(0), times(1)),
        lambda: Ops(("a",), np.array([0]), times(2), times(1)),
        lambda: Windows(times(0, 1), times(1), np.array([1.0])),
        lambda: Windows(times(5, 0), times(6, 1), np.ones(2)),
        lambda: Windows(times(0), times(0), np.ones(1)),
        lambda: Windows(times(0), times(1), np.array([np.nan])),
    ],
)
def test_what_cannot_be_is_refused(make: Any) -> None:
    with pytest.raises(UserError):
        make()
