"""Threads, cores and frequency are set for a block, told, and put back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from edgetrain.errors import UserError
from edgetrain.measure.processor import Processor, parse_cores, spare_cores, using
from edgetrain.measure.sampler import Sampler

LEAST, MOST = 600_000, 1_500_000  # kHz, as a Raspberry Pi 4 has


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree as the kernel of a board with cpufreq shows it, for the cores of this machine."""
    for core in os.sched_getaffinity(0):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/cpufreq"
        folder.mkdir(parents=True)
        for name, value in (("scaling_min_freq", LEAST), ("scaling_max_freq", MOST), ("cpuinfo_min_freq", LEAST),
                            ("cpuinfo_max_freq", MOST)):  # fmt: skip
            (folder / name).write_text(f"{value}\n")
    return tmp_path


def frequencies(root: Path) -> set[tuple[str, int]]:
    return {(f.name, int(f.read_text())) for f in root.glob("sys/devices/system/cpu/cpu*/cpufreq/scaling_*")}


@pytest.mark.parametrize(
    ("text", "cores"), [("0", (0,)), ("0-2,4", (0, 1, 2, 4)), ("3,1", (1, 3)), ("2, 0-2", (0, 1, 2))]
)
def test_cores_as_people_write_them(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "-1", "1;2", "99999999"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="cores"):
        parse_cores(text)


def test_threads_and_cores_hold_in_the_block_alone() -> None:
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    first = min(cores)
    with using(Processor(threads=1, cores=(first,))) as now:
        assert now == Processor(1, (first,))
        assert torch.get_num_threads() == 1
        assert all(os.sched_getaffinity(int(task)) == {first} for task in os.listdir("/proc/self/task"))
    assert torch.get_num_threads() == threads
    assert os.sched_getaffinity(0) == cores


def test_what_is_not_asked_for_stays_and_is_told() -> None:
    with using(Processor()) as now:
        assert now == Processor(torch.get_num_threads(), tuple(sorted(os.sched_getaffinity(0))))


def test_a_core_that_is_not_there() -> None:
    with pytest.raises(UserError, match="cannot use those cores"), using(Processor(cores=(4000,))):
        pass


def test_threads_from_one_on() -> None:
    with pytest.raises(UserError, match="threads"):
        Processor(threads=0)


def test_a_frequency_is_held_and_put_back(root: Path) -> None:
    before = frequencies(root)
    with using(Processor(frequency_hz=1_000_000_000), root=root) as now:
        assert now.frequency_hz == 1_000_000_000
        assert frequencies(root) == {("scaling_min_freq", 1_000_000), ("scaling_max_freq", 1_000_000)}
    assert frequencies(root) == before


def test_it_is_put_back_after_an_error_too(root: Path) -> None:
    before = frequencies(root)
    with pytest.raises(ZeroDivisionError), using(Processor(threads=1, frequency_hz=1_000_000_000), root=root):
        _ = 1 / 0
    assert frequencies(root) == before


def test_a_frequency_that_the_core_does_not_have(root: Path) -> None:
    with pytest.raises(UserError, match="600 to 1500 MHz"), using(Processor(frequency_hz=10**10), root=root):
        pass
    assert frequencies(root) == {("scaling_min_freq", LEAST), ("scaling_max_freq", MOST)}


def test_a_machine_without_cpufreq(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no cpufreq"), using(Processor(frequency_hz=10**9), root=tmp_path):
        pass


def test_a_user_who_may_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", refused)
    with pytest.raises(UserError, match="sudo"), using(Processor(frequency_hz=10**9), root=root):
        pass


def test_a_sampler_keeps_off_the_cores_of_the_training(tmp_path: Path) -> None:
    given = sorted(os.sched_getaffinity(0))
    if len(given) < 2:
        pytest.skip("one core is for both")
    with using(Processor(cores=(given[0],))):
        assert spare_cores() == tuple(given[1:])
        with Sampler([], tmp_path) as sampler:
            assert os.sched_getaffinity(sampler.pid) == set(given[1:])
    assert spare_cores() == ()
    with Sampler([], tmp_path) as sampler:
        assert os.sched_getaffinity(sampler.pid) == set(given)
