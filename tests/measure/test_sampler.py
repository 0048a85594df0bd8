"""The sampler as a real process: what it records, what it loads, and that it ends with its parent whatever happens."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import edgetrain
from edgetrain.errors import InternalError, UserError
from edgetrain.measure.sampler import Sampler
from edgetrain.measure.samples import read_samples, read_summary
from edgetrain.measure.sensors.process_time import ProcessClock
from edgetrain.measure.sensors.source import Source
from tests.measure.fake_sources import Fake, Loaded, Prints, Raises, Watts

HERE = Path(__file__).parent


def recorded(folder: Path, seconds: float, *sources: Source) -> Sampler:
    with Sampler(sources, folder) as sampler:
        time.sleep(seconds)
    return sampler


def test_records_on_the_clock_of_this_process(tmp_path: Path) -> None:
    before = time.monotonic_ns()
    sampler = recorded(tmp_path, 0.5, Watts(5.0), Loaded("loaded"), Prints("prints"))
    after = time.monotonic_ns()
    samples, summary = read_samples(tmp_path), sampler.summary
    meter = samples.source("meter")
    assert before < meter.before_ns[0] <= meter.after_ns[0] <= meter.before_ns[-1] < after
    _, joules = meter.column("meter0")
    # The meter's own reading lies between the two times, so its power is known to within a reading's length.
    slack = (meter.after_ns - meter.before_ns)[[0, -1]].sum() / np.diff(meter.at_ns[[0, -1]])
    assert np.diff(joules[[0, -1]])[0] / (np.diff(meter.at_ns[[0, -1]])[0] * 1e-9) == pytest.approx(5, rel=slack[0])
    assert summary == read_summary(tmp_path)
    assert summary.ended == "asked"
    assert summary.ticks_delivered == len(joules)
    assert not samples.cut_off


def test_what_this_machine_has_is_read_in_the_other_process(tmp_path: Path) -> None:
    """CPU time and memory are those of this process, not of the sampler."""
    with Sampler(None, tmp_path) as sampler:
        busy = time.process_time() + 0.3
        while time.process_time() < busy:
            pass
    samples = read_samples(tmp_path)
    _, seconds = samples.source("process time").column("process_time_s")
    assert 0.25 < np.nanmax(seconds) - np.nanmin(seconds) < 3
    _, resident = samples.source("process memory").column("process_resident_bytes")
    assert np.nanmax(resident) > 100e6  # PyTorch is loaded here
    assert sampler.summary.resident_bytes is not None
    assert sampler.summary.resident_bytes < 50e6


def test_its_process_is_small(tmp_path: Path) -> None:
    sampler = recorded(tmp_path, 0.1, Loaded("loaded"))
    assert (read_samples(tmp_path).series[0].values == 0).all()
    assert sampler.summary.resident_bytes is not None
    assert sampler.summary.resident_bytes < 40e6


def test_seeds_give_the_same_places(tmp_path: Path) -> None:
    assert Sampler([], tmp_path, seed=3).task.seed == 3
    assert len({Sampler([], tmp_path).task.seed for _ in range(5)}) > 1


def test_broken_sources_and_interrupts_do_not_end_it(tmp_path: Path) -> None:
    with Sampler([Raises("raises"), Fake("good")], tmp_path) as sampler:
        os.kill(sampler.pid, signal.SIGINT)
        time.sleep(0.2)
    assert sampler.summary.ended == "asked"
    assert len(read_samples(tmp_path).source("good").values) > 3
    assert "no such luck" in sampler.summary.notes[0]


def test_a_sampler_that_is_killed_costs_its_samples_only(tmp_path: Path) -> None:
    with Sampler([Fake()], tmp_path) as sampler:
        time.sleep(1.3)
        os.kill(sampler.pid, signal.SIGKILL)
    assert sampler.summary.ended == "killed"
    assert "killed" in sampler.summary.notes[0]
    assert len(read_samples(tmp_path).series[0].values) > 20


def test_a_disk_that_is_full_ends_the_recording_alone(tmp_path: Path) -> None:
    with Sampler([Fake(units=("J",) * 20)], tmp_path) as sampler:
        # The kernel refuses to let its file grow: a write that fails as on a full disk.
        resource.prlimit(sampler.pid, resource.RLIMIT_FSIZE, (8192, 8192))
        time.sleep(1.4)
    assert sampler.summary.ended == "disk"
    assert any("disk is full" in note for note in sampler.summary.notes)
    assert read_samples(tmp_path).series[0].channels


def test_a_folder_that_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="nothing can be recorded"), Sampler([Fake()], tmp_path / "file"):
        pass
    with pytest.raises(UserError, match="nothing can be recorded"), Sampler([Fake()], tmp_path / "none"):
        pass


@pytest.mark.parametrize("period_s", [0.0, -1.0, float("nan"), 1e-6, 1e6])
def test_periods(tmp_path: Path, period_s: float) -> None:
    with pytest.raises(UserError, match="period"):
        Sampler([], tmp_path, period_s)


def test_the_summary_is_there_at_the_end(tmp_path: Path) -> None:
    with Sampler([Fake()], tmp_path) as sampler, pytest.raises(InternalError, match="ended"):
        _ = sampler.summary
    assert sampler.summary.ended == "asked"


def test_the_thread_that_started_it_may_end(tmp_path: Path) -> None:
    sampler = Sampler([Fake()], tmp_path)
    thread = threading.Thread(target=sampler.__enter__)
    thread.start()
    thread.join()
    time.sleep(0.3)
    sampler.__exit__(None, None, None)
    assert sampler.summary.ended == "asked"


# A parent that is light, as the sampler is.
PARENT = """
import os, sys, time, types
package = types.ModuleType("edgetrain")
package.__path__ = [sys.argv[1]]
sys.modules["edgetrain"] = package
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from edgetrain.measure.sampler import Sampler
from fake_sources import Fake, Sticks
mode, folder = sys.argv[3], Path(sys.argv[4])
sampler = Sampler([Fake(), Sticks(folder / "stick")], folder)
sampler.__enter__()
if mode == "copied" and os.fork() == 0:
    time.sleep(8)       # holds the pipe open
    os._exit(0)
time.sleep(0.3)
print(sampler.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("mode", ["plain", "copied", "stuck"])
def test_it_ends_when_its_parent_is_killed(tmp_path: Path, mode: str) -> None:
    package = str(Path(edgetrain.__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, package, str(HERE), mode, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        if mode == "stuck":
            (tmp_path / "stick").touch()
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)
    if mode != "stuck":
        assert read_summary(tmp_path).ended == "parent ended"
        assert len(read_samples(tmp_path).series[0].values) > 3


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_a_sampler_can_be_paused(tmp_path: Path) -> None:
    with Sampler([ProcessClock(os.getpid())], tmp_path, 0.005) as sampler:
        time.sleep(0.2)
        sampler.pause()
        paused_ns = time.monotonic_ns()
        time.sleep(0.4)
        resumed_ns = time.monotonic_ns()
        sampler.resume()
        time.sleep(0.2)
        sampler.pause()  # and left so: the end does not hang
    at = read_samples(tmp_path).source("process time").at_ns
    assert not ((at > paused_ns + 20_000_000) & (at < resumed_ns)).any()
    assert (at < paused_ns).any()
    assert (at > resumed_ns).any()
    assert sampler.summary.ended == "asked"
