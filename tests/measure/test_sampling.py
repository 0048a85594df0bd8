"""The loop of the sampler on a clock of the test's own: ticks, pacing, and every bad day."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from edgetrain.measure.pacing import pace, slow_down
from edgetrain.measure.recorder import Recorder
from edgetrain.measure.samples import read_samples
from edgetrain.measure.samples_file import File, Summary, distinct, header
from edgetrain.measure.sampling import Task, record
from edgetrain.measure.sensors import process_time
from edgetrain.measure.sensors.source import Channel, Source
from edgetrain.measure.series import Notes, Paced, Series
from edgetrain.measure.ticks import Clock, Stop, Ticks
from tests.measure.fake_sources import Fake, FileNumber, Raises

MS, S = 10**6, 10**9
PERIOD = 10 * MS


class OwnClock(Clock):
    """Time passes where the test says so: in sleeps, and as `at` lets it. Ends the run at `end_ns`."""

    def __init__(self, end_ns: int, at: Callable[[OwnClock], None] = lambda clock: None) -> None:
        self.time, self.wall, self.cpu, self.end, self.at = S, 5 * S, 0, S + end_ns, at
        self.stop = Stop()

    def now_ns(self) -> int:
        return self.time

    def wall_ns(self) -> int:
        return self.time + self.wall

    def cpu_ns(self) -> int:
        return self.cpu

    def sleep_until(self, due_ns: int) -> None:
        self.time = max(self.time, due_ns)
        self.at(self)
        if self.time >= self.end:
            self.stop.reason = "asked"


def run(folder: Path, clock: OwnClock, *sources: Source | Paced) -> Summary:
    tasks = tuple(one if isinstance(one, Paced) else Paced(one) for one in sources)
    return record(Task(tasks, str(folder), PERIOD, 1, os.getpid(), in_c=False), clock.stop, clock, lambda: None)


def test_one_tick_a_slot_at_a_random_place_without_drift(tmp_path: Path) -> None:
    summary = run(tmp_path, OwnClock(20 * S), Fake())
    assert summary.ticks_due == summary.ticks_delivered == pytest.approx(2000, abs=10)
    assert (summary.lateness_max_s, summary.lateness_p95_s, summary.ended) == (0.0, 0.0, "asked")
    assert summary.keeps_up
    samples = read_samples(tmp_path)
    times = samples.series[0].before_ns - samples.started_ns
    assert (times // PERIOD == np.arange(len(times))).all()
    place = times % PERIOD
    assert 0 <= place.min() < 0.2 * MS
    assert 4.8 * MS < place.max() < 5 * MS


def test_missed_ticks_are_counted_and_not_caught_up(tmp_path: Path) -> None:
    def stall(clock: OwnClock) -> None:
        if clock.time - S > 100 * PERIOD and not stalls:
            stalls.append(clock.time)
            clock.time += 255 * MS

    stalls: list[int] = []
    summary = run(tmp_path, OwnClock(10 * S, stall), Fake())
    samples = read_samples(tmp_path)
    times = samples.series[0].before_ns - samples.started_ns
    assert summary.ticks_due is not None
    assert summary.ticks_delivered == len(times) == summary.ticks_due - 25
    assert (np.diff(times // PERIOD) >= 1).all()  # one a slot: no burst
    assert summary.lateness_max_s == pytest.approx(0.255)
    assert not summary.keeps_up
    assert "could not keep up" in summary.notes[0]


def test_late_ticks_are_said(tmp_path: Path) -> None:
    def late(clock: OwnClock) -> None:
        clock.time += draw.choice([0, 0, 0, 0, 3 * MS])

    draw = random.Random(0)
    summary = run(tmp_path, OwnClock(10 * S, late), Fake())
    assert summary.lateness_p50_s == pytest.approx(0, abs=2e-5)
    assert summary.lateness_max_s == 0.003
    assert summary.lateness_p95_s == pytest.approx(0.003)
    assert not summary.keeps_up
    assert any("late" in note for note in summary.notes)


def test_quantiles_of_lateness() -> None:
    ticks = Ticks()
    assert ticks.quantile_s(0.5) is None
    ticks.bins[:99], ticks.bins[-1], ticks.max_late_ns = [1] * 99, 1, 3 * S
    assert ticks.quantile_s(0.5) == pytest.approx(0.0005)
    assert ticks.quantile_s(0.99) == pytest.approx(0.00099)
    assert ticks.quantile_s(1.0) == 3.0


def test_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    source = Fake(units=("J", "W", "°C"))
    rows = iter([(0.1, 1e300, -0.0), (None, 2.0, 5), (float("inf"), 10**400, 7.0)])
    source.read = lambda: next(rows, (1.0, None, 3.0))  # type: ignore[method-assign]
    series = Series(0, Paced(source), 0.0, PERIOD)
    file = File(tmp_path / "samples.bin")
    file.write(header([series.source], PERIOD, 0, 0))
    notes = Notes()
    for _ in range(4):
        series.sample(OwnClock(S).now_ns, notes)
    block = series.block()
    assert block is not None
    file.write(block)
    file.close()
    nan = float("nan")
    expected = [[0.1, 1e300, -0.0], [nan, 2, 5], [nan, nan, 7], [1, nan, 3]]
    assert np.array_equal(read_samples(tmp_path).series[0].values, expected, equal_nan=True)
    assert notes.said == []
    assert series.block() is None


def test_a_source_that_disappears_and_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "number"
    file.write_text("7")

    def world(clock: OwnClock) -> None:
        there = not 2 * S < clock.time - S < 4 * S
        file.write_text("7") if there else file.unlink(missing_ok=True)

    summary = run(tmp_path, OwnClock(6 * S, world), FileNumber(file), Fake("other"))
    series, other = read_samples(tmp_path).series
    value = series.values[:, 0]
    gone = (series.before_ns - S > 2 * S) & (series.before_ns - S < 4 * S)
    assert np.isnan(value[gone]).all()
    assert (value[~gone] == 7).all()
    assert 10 <= gone.sum() <= 40  # asked again now and then, not at every tick
    assert (~gone).sum() > 380
    assert len(other.values) == summary.ticks_delivered
    assert [note for note in summary.notes if "file" in note] == [
        "The source file could not be read from some moment on (it gives nothing)."
    ]


def test_a_source_that_breaks_its_promise_stops_nothing(tmp_path: Path) -> None:
    wrong = Fake("wrong")
    wrong.read = lambda: (1.0, 2.0)  # type: ignore[method-assign]
    summary = run(tmp_path, OwnClock(2 * S), Raises("raises"), wrong, Fake())
    raises, two, good = read_samples(tmp_path).series
    assert np.isnan(raises.values).all()
    assert np.isnan(two.values).all()
    assert len(good.values) == summary.ticks_delivered
    assert "The source raises could not be read from the start (RuntimeError: no such luck)." in summary.notes
    assert any("2 values for 1 channels" in note for note in summary.notes)
    assert [one.failed for one in summary.sources][2] == 0


@pytest.mark.parametrize(("jump_s", "said"), [(-3600.0, "-3600.00 s"), (0.5, "+0.50 s"), (0.0005, None)])
def test_a_wall_clock_that_jumps_is_said(tmp_path: Path, jump_s: float, said: str | None) -> None:
    def jump(clock: OwnClock) -> None:
        if clock.time > 3 * S:
            clock.wall = 5 * S + round(jump_s * S)

    summary = run(tmp_path, OwnClock(5 * S, jump), Fake())
    assert summary.wall_offset_start_ns == 5 * S
    assert summary.wall_offset_end_ns == 5 * S + round(jump_s * S)
    assert (np.diff(read_samples(tmp_path).series[0].before_ns) > 0).all()
    notes = [note for note in summary.notes if "wall clock" in note]
    assert [said in note for note in notes] == [True] if said else notes == []


class FullAfter(File):
    """A disk with room for so many bytes; what fits of a write is written, as on a real one."""

    def __init__(self, path: Path, room: int, error: int) -> None:
        super().__init__(path)
        self.room, self.error = room, error

    def write(self, data: bytes | memoryview) -> None:
        if self.whole + len(data) > self.room:
            os.write(self.handle, data[: self.room - self.whole])
            raise OSError(self.error, os.strerror(self.error))
        super().write(data)


@pytest.mark.parametrize(("error", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EIO, "Input/output error")])
def test_a_full_disk_ends_the_recording_and_says_so(tmp_path: Path, error: int, said: str) -> None:
    clock, notes = OwnClock(60 * S), Notes()
    series = Series(0, Paced(Fake()), 0.0, PERIOD)
    file = FullAfter(tmp_path / "samples.bin", 10_000, error)
    file.write(header([series.source], PERIOD, clock.now_ns(), clock.wall_ns()))
    recorder = Recorder([series], file, clock, notes, PERIOD)
    assert recorder.run(clock.stop, [0.0, 0.9, 0.3]) == "disk"
    assert clock.time < 10 * S
    assert len(notes.said) == 1
    assert said in notes.said[0]
    samples = read_samples(tmp_path)
    assert samples.cut_off
    assert 300 < len(samples.series[0].values) <= 500


def test_a_failed_write_leaves_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = File(tmp_path / "file"), os.write
    file.write(b"whole")

    def half(handle: int, data: memoryview) -> int:
        if len(data) < 4:
            raise OSError(errno.ENOSPC, "full")
        return real(handle, data[:3])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="full"):
        file.write(b"broken")
    assert (tmp_path / "file").read_bytes() == b"whole"


def series_of(*costs_us: tuple[float, str], every: int | None = None) -> list[Series]:
    sources = [Fake(f"s{n}", (unit,)) for n, (_, unit) in enumerate(costs_us)]  # type: ignore[arg-type]
    return [Series(n, Paced(one, every), costs_us[n][0] * 1e-6, PERIOD) for n, one in enumerate(sources)]


def test_dear_sources_are_read_less_often() -> None:
    cheap = series_of((10, "W"), (9, "°C"))
    pace(cheap, PERIOD)
    assert [one.every for one in cheap] == [1, 1]
    dear = series_of((30, "W"), (400, "Hz"), (100, "°C"))
    pace(dear, PERIOD)
    assert dear[0].every == 1
    assert sum(one.cost_s / one.every for one in dear) <= 50e-6
    ours = series_of((25, "s"), (400, "B"))
    ours[0].source.name = process_time.NAME
    pace(ours, PERIOD)
    assert (ours[0].every, ours[1].every) == (1, 32)
    hopeless = series_of((50_000, "W"), (50_000, "B"))
    pace(hopeless, PERIOD)  # ends, though nothing helps
    assert [one.every for one in hopeless] == [64, 64]
    coarse = Fake("model", ("J",))
    coarse.channels = (Channel("a", "J", True, "modelled", least_window_s=0.2),)
    modelled = [Series(0, Paced(coarse), 300e-6, PERIOD)]
    assert modelled[0].every == 10
    pace(modelled, PERIOD)  # energy, but no op is told by it
    assert modelled[0].every == 32
    asked = series_of((500, "W"), every=3)
    pace(asked, PERIOD)
    assert asked[0].every == 3
    assert not slow_down(asked)


def test_a_sampler_that_takes_too_much_slows_its_dearest_source_down(tmp_path: Path) -> None:
    def work(clock: OwnClock) -> None:
        clock.cpu += 300_000 if clock.time < 4 * S else 50_000

    clock = OwnClock(10 * S, work)
    heat = Fake("heat", ("°C",))

    def read() -> tuple[float | None, ...]:
        clock.cpu += 9_000
        return (1.0,)

    heat.read = read  # type: ignore[method-assign]
    summary = run(tmp_path, clock, Fake("power", ("W",)), heat)
    assert [one.every for one in summary.sources] == [1, 2]  # and no further: then it is not the reads that take most


def test_a_counter_is_read_as_often_as_it_says_something_new() -> None:
    coarse = Fake("ticks of 10 ms", ("s",))
    coarse.channels = (Channel("a", "s", True, "measured", least_window_s=0.2),)
    assert Series(0, Paced(coarse), 0.0, PERIOD).every == 10
    assert Series(0, Paced(coarse, every=3), 0.0, PERIOD).every == 3
    assert Series(0, Paced(coarse), 0.0, S).every == 1


def test_a_sampler_that_took_too_much_says_so(tmp_path: Path) -> None:
    def work(clock: OwnClock) -> None:
        clock.cpu += 300_000

    summary = run(tmp_path, OwnClock(3 * S, work), Paced(Fake(), every=2))
    assert any("3.0% of one core" in note for note in summary.notes)
    assert summary.sources[0].every == 2
    assert summary.sources[0].reads == pytest.approx(150, abs=1)


def test_names_of_hardware_become_names_of_a_file(tmp_path: Path) -> None:
    strange = ["a/b\\c", "a_b_c", "", "x" * 500, "x" * 500, "naïve °C", "zero\0", "a_b_c"]
    assert distinct(strange)[:3] == ["a_b_c", "a_b_c#2", "_"]
    assert len(set(distinct(strange))) == len(strange)
    run(tmp_path, OwnClock(S), *(Fake(name) for name in strange))
    assert [one.name for one in read_samples(tmp_path).series] == distinct(strange)


def test_notes_do_not_grow_without_end() -> None:
    notes = Notes()
    for n in range(1000):
        notes.say(f"{n}")
        notes.say("again")
    assert len(notes.said) == 50
    assert notes.said.count("again") == 1


def test_the_summary_is_plain_data(tmp_path: Path) -> None:
    summary = run(tmp_path, OwnClock(S), Fake())
    assert json.loads(json.dumps(asdict(summary)))["ended"] == "asked"
