"""How a run uses the processor: threads, cores, frequency; set for a block, put back after it, and reported.

In:  `Processor`, what is asked for; None leaves a thing as it is.
Out: `Processor`, what is in force in the block, for the record.

Cores are set for every thread of the process, those of PyTorch's pool too. The frequency is held by writing the same
least and most to cpufreq, which the system allows root alone, and a governor may still go below it when a core is hot:
what really was is in the samples (sensors/cpu_frequency.py).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from edgetrain.errors import UserError
from edgetrain.ranges import THREADS, shown, whole

_AT_START = frozenset(os.sched_getaffinity(0))  # what this process was given


@dataclass(frozen=True)
class Processor:
    """threads: of PyTorch. cores: by number. frequency_hz: of each of these cores; None where nobody holds it."""

    threads: int | None = None
    cores: tuple[int, ...] | None = None
    frequency_hz: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None:
            whole("threads", self.threads, THREADS)


def parse_cores(text: str) -> tuple[int, ...]:
    """ "0-2,4" → (0, 1, 2, 4)."""
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,4})(?:-([0-9]{1,4}))?\s*", part)
        if match is None:
            raise UserError(
                "invalid value for cores", expected="numbers and ranges, such as 0-2,4", received=shown(text)
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UserError("invalid value for cores", expected="ranges from low to high", received=shown(text))
        cores |= set(range(first, last + 1))
    return tuple(sorted(cores))


@contextlib.contextmanager
def using(asked: Processor, *, root: Path = Path("/")) -> Iterator[Processor]:
    """Set what is asked for; yields what is in force."""
    with contextlib.ExitStack() as after:
        if asked.threads is not None:
            after.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(asked.threads)
        cores = tuple(sorted(os.sched_getaffinity(0)))
        if asked.cores is not None:
            _require_cores(asked.cores, cores)
            after.callback(_move_to, cores)
            _move_to(asked.cores)
            cores = asked.cores
        if asked.frequency_hz is not None:
            after.enter_context(_held_at(asked.frequency_hz, cores, root))
        yield Processor(torch.get_num_threads(), cores, asked.frequency_hz)


def spare_cores() -> tuple[int, ...]:
    """Those that this process was given and does not use now: a sampler on them takes nothing from the training."""
    return tuple(sorted(_AT_START - os.sched_getaffinity(0)))


def _require_cores(asked: tuple[int, ...], usable: tuple[int, ...]) -> None:
    missing = [core for core in asked if core not in usable]
    if missing or not asked:
        raise UserError(
            "this process cannot use those cores",
            expected=f"some of {', '.join(map(str, usable))}",
            received=", ".join(map(str, asked)) or "none",
        )


def _move_to(cores: tuple[int, ...]) -> None:
    """Every thread that there is; one that ends meanwhile needs no core."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), cores)


@contextlib.contextmanager
def _held_at(frequency_hz: int, cores: tuple[int, ...], root: Path) -> Iterator[None]:
    folders = {core: root / f"sys/devices/system/cpu/cpu{core}/cpufreq" for core in cores}
    before = {core: _limits(folder) for core, folder in folders.items()}
    for core, folder in folders.items():
        _require_frequency(folder, core, frequency_hz)
    try:
        for folder in folders.values():
            _hold(folder, {"scaling_min_freq": frequency_hz // 1000, "scaling_max_freq": frequency_hz // 1000})
        yield
    finally:
        for core, folder in folders.items():
            _hold(folder, before[core])


def _limits(folder: Path) -> dict[str, int]:
    try:
        return {name: int((folder / name).read_text()) for name in ("scaling_min_freq", "scaling_max_freq")}
    except (OSError, ValueError) as error:
        raise UserError(
            "the frequency cannot be set on this machine: the kernel offers no cpufreq",
            received=f"{folder}: {error}",
            next_step="leave the frequency out; the samples hold what it was, where the machine says so",
        ) from error


def _require_frequency(folder: Path, core: int, frequency_hz: int) -> None:
    least, most = (int((folder / f"cpuinfo_{end}_freq").read_text()) * 1000 for end in ("min", "max"))
    if not least <= frequency_hz <= most:
        raise UserError(
            f"core {core} cannot run at that frequency",
            expected=f"{least / 1e6:.0f} to {most / 1e6:.0f} MHz",
            received=f"{frequency_hz / 1e6:.0f} MHz",
        )


def _hold(folder: Path, limits: Mapping[str, int]) -> None:
    """The most first where it grows, the least first where it falls: the kernel refuses a least above the most."""
    names = ["scaling_max_freq", "scaling_min_freq"]
    if limits["scaling_max_freq"] < _limits(folder)["scaling_min_freq"]:
        names.reverse()
    try:
        for name in names:
            (folder / name).write_text(f"{limits[name]}\n")
    except PermissionError as error:
        raise UserError(
            "this user may not set the frequency", received=str(error), next_step="run the same command with sudo"
        ) from error
