"""Ticks in C: the same rows as in Python, files that go and come back, a stop that does not wait."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from edgetrain.measure import batched_ticks
from edgetrain.measure.batched_ticks import MAX_RUN_NS, possible
from edgetrain.measure.power_model import with_model
from edgetrain.measure.samples import read_samples
from edgetrain.measure.samples_file import Summary
from edgetrain.measure.sampling import Task, record
from edgetrain.measure.sensors import find
from edgetrain.measure.sensors.process_time import ProcessClock
from edgetrain.measure.sensors.source import Channel, Direct, Files, Number, Numbers, OpenFile, Source
from edgetrain.measure.series import Paced, Series
from edgetrain.measure.ticks import Clock, Stop
from edgetrain.native.ticks import load
from tests.measure.fake_sources import Fake

PERIOD_NS = 5_000_000


def number(path: Path, name: str = "n") -> Number:
    return Number(Channel(name, "W", False, "measured"), path, 0.5)


def sample(folder: Path, seconds: float, *sources: Source, in_c: bool = True) -> tuple[Summary, Stop]:
    stop = Stop()
    threading.Timer(seconds, stop.say, ["asked"]).start()
    task = Task(tuple(Paced(one, 1) for one in sources), str(folder), PERIOD_NS, 1, os.getpid(), in_c)
    return record(task, stop, Clock(), lambda: None), stop


def test_the_library_is_built() -> None:
    assert load() is not None


@pytest.mark.parametrize("in_c", [True, False])
def test_every_tick_has_a_row_of_each_source(tmp_path: Path, in_c: bool) -> None:
    (tmp_path / "a").write_text("7\n")
    (tmp_path / "b").write_text("-12")
    files = Numbers("files", [number(tmp_path / "a", "a"), number(tmp_path / "b", "b")])
    summary, _ = sample(tmp_path, 0.6, ProcessClock(os.getpid()), files, in_c=in_c)
    samples = read_samples(tmp_path)
    clock, read = samples.source("process time"), samples.source("files")
    assert len(clock.values) == len(read.values) == summary.ticks_delivered
    assert summary.ticks_due == pytest.approx(120, abs=MAX_RUN_NS // PERIOD_NS)
    assert (read.values == [3.5, -6.0]).all()
    assert (np.diff(clock.values[:, 0]) >= 0).all()
    assert (clock.before_ns <= clock.after_ns).all()
    assert np.median(np.diff(clock.before_ns)) == pytest.approx(PERIOD_NS, rel=0.2)  # a tick a slot


def test_the_clock_is_the_process_s(tmp_path: Path) -> None:
    before = time.process_time()
    sample(tmp_path, 0.2, ProcessClock(os.getpid()))
    values = read_samples(tmp_path).source("process time").values
    assert before <= values[0, 0] <= values[-1, 0] <= time.process_time()


def test_a_file_that_goes_and_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "power"
    file.write_text("10")

    def meanwhile() -> None:
        time.sleep(0.3)
        file.write_text("ten")  # what the sensor shows is no number
        time.sleep(0.3)
        file.write_text("20")

    other = threading.Thread(target=meanwhile)
    other.start()
    summary, _ = sample(tmp_path, 1.5, Numbers("power", [number(file)]))
    other.join()
    values = read_samples(tmp_path).source("power").values[:, 0]
    there = values[np.isfinite(values)]
    assert (there[0], there[-1]) == (5.0, 10.0)
    assert np.isnan(values).any()
    assert set(there) == {5.0, 10.0}
    assert any("power could not be read" in note for note in summary.notes)


def test_what_is_no_number_is_no_value(tmp_path: Path) -> None:
    for place, text in enumerate(["", " ", "1 2", "0x10", "1.5", "9" * 40, "nan"]):
        file = tmp_path / f"f{place}"
        file.write_text(text)
        sample(tmp_path, 0.05, Numbers("files", [number(file)]))
        assert np.isnan(read_samples(tmp_path).source("files").values).all(), text


def test_a_source_for_python_is_read_after_a_run(tmp_path: Path) -> None:
    slow = Fake()
    stop = Stop()
    threading.Timer(0.6, stop.say, ["asked"]).start()
    task = Task((Paced(ProcessClock(os.getpid()), 1), Paced(slow, 8)), str(tmp_path), PERIOD_NS, 1, os.getpid())
    record(task, stop, Clock(), lambda: None)
    samples = read_samples(tmp_path)
    fast, rows = (len(one.values) for one in samples.series)
    assert rows == pytest.approx(fast / 8, abs=2)


def test_a_source_for_python_at_every_tick_keeps_python(tmp_path: Path) -> None:
    clock = Series(0, Paced(ProcessClock(os.getpid()), 1), 0.0, PERIOD_NS)
    fake = Series(1, Paced(Fake(), 1), 0.0, PERIOD_NS)
    assert possible([clock])
    assert not possible([clock, fake])


def test_a_stop_does_not_wait_for_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_ticks, "MAX_RUN_NS", 3_000_000_000)
    stop = Stop()
    task = Task((Paced(ProcessClock(os.getpid()), 1),), str(tmp_path), 50_000_000, 1, os.getpid())
    threading.Timer(0.3, stop.say, ["asked"]).start()
    began = time.monotonic()
    record(task, stop, Clock(), lambda: None)
    assert time.monotonic() - began < 2


def test_files_of_words_are_read_in_c_as_in_python(tmp_path: Path) -> None:
    """Of /proc: what C brings is parsed by the same code."""
    sources = {name: source for name, source in here().items() if isinstance(source, Direct) and source.inputs()}
    assert {"core time", "process memory", "memory", "process power model", "power model"} <= sources.keys()
    before = {name: source.read() for name, source in sources.items()}
    sample(tmp_path, 0.3, *here().values())
    for name, source in here().items():
        if name not in sources:
            continue
        rows = read_samples(tmp_path).source(name).values
        there = [value is not None for value in before[name]]
        assert len(rows) > 20
        assert (np.isfinite(rows[1:]).all(axis=0) == there).all(), name
        for channel, first, last, now in zip(source.channels, before[name], rows[-1], source.read(), strict=True):
            if channel.counter and channel.kind == "measured" and first is not None and now is not None:
                assert first <= last <= now, channel.name
            elif channel.unit == "B" and first is not None:
                assert last == pytest.approx(first, rel=0.5), channel.name


def here() -> dict[str, Source]:
    found = with_model(find(pid=os.getpid(), reads=0), pid=os.getpid(), reads=0)
    return {source.name: source for _, source in found if source is not None}


def test_a_run_ends_early_where_files_hold_more_than_there_is_room(tmp_path: Path) -> None:
    class Length(Files):
        def read(self) -> tuple[float | None, ...]:
            return (None if (told := self.files[0].read()) is None else float(len(told)),)

    (tmp_path / "long").write_text("x" * 50_000)
    (tmp_path / "longer").write_text("x" * 70_000)
    channel = Channel("n", "1", False, "measured")
    long, longer = (Length(name, (channel,), (OpenFile(tmp_path / name),)) for name in ("long", "longer"))
    summary, _ = sample(tmp_path, 0.5, long, longer)
    samples = read_samples(tmp_path)
    assert (samples.source("long").values == 50_000).all()
    assert len(samples.source("long").values) == summary.ticks_delivered
    assert (samples.source("longer").values == 1 << 16).all()  # from its beginning, as in Python
