"""CPU time of one process, all its threads together, in nanoseconds.

    the process's CPU clock        one system call; up to date at every read      (on this machine)
    /proc/<pid>/task/*/schedstat   one file a thread: "run_ns wait_ns slices"     (recorded trees, other kernels)

schedstat is brought up to date at the scheduler's ticks (1 to 10 ms) and when a thread stops. Threads come and go: what
an ended one had used stays in the total.
"""

from __future__ import annotations

import os
from pathlib import Path

from edgetrain.measure.sensors.source import (
    Channel,
    Counter,
    Found,
    OpenFile,
    SystemClock,
    digits,
    not_readable,
    readable,
)

NAME = "process time"
GIVES = "CPU time of the process, all threads"


class ProcessClock:
    """The kernel's clock of a process, as clock_getcpuclockid(3) would name it."""

    def __init__(self, pid: int) -> None:
        self.name = NAME
        self.channels: tuple[Channel, ...] = (Channel("process_time_s", "s", True, "measured"),)
        self._clock = SystemClock((~pid << 3) | 2)  # 2: the scheduler's own account, exact at every moment

    def open(self) -> None:
        pass

    def read(self) -> tuple[float | None, ...]:
        return (self._clock.read(),)

    def inputs(self) -> tuple[SystemClock]:
        return (self._clock,)

    def close(self) -> None:
        pass


class ProcessTasks:
    """The sum over the threads' schedstat files. Also how long they were ready and had no core."""

    def __init__(self, folder: Path) -> None:
        self.name = NAME
        names = ("process_time_s", "process_wait_s")
        self.channels = tuple(Channel(name, "s", True, "measured", least_window_s=0.01) for name in names)
        self._folder = folder
        self._files: dict[str, OpenFile] = {}
        self._used: dict[str, tuple[int, int]] = {}  # by thread, ended ones too
        self._totals = Counter(), Counter()

    def open(self) -> None:
        self._look()

    def read(self) -> tuple[float | None, ...]:
        if not self._look():
            return None, None
        shown = {thread: parse(file.read()) for thread, file in self._files.items()}
        now = {thread: used for thread, used in shown.items() if used is not None}
        if not now:
            return None, None
        self._used.update(now)
        sums = (sum(used[n] for used in self._used.values()) for n in (0, 1))
        return tuple(total.add(n * 1e-9) for total, n in zip(self._totals, sums, strict=True))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _look(self) -> bool:
        """Which threads there are now; False when the process is gone."""
        try:
            threads = set(os.listdir(self._folder))
        except OSError:
            return False
        for thread in self._files.keys() - threads:
            self._files.pop(thread).close()
        for thread in threads - self._files.keys():
            self._files[thread] = OpenFile(self._folder / thread / "schedstat")
        return True


def parse(data: bytes | None) -> tuple[int, int] | None:
    """Nanoseconds run and nanoseconds waited, from "123 45 6"."""
    numbers = [digits(word) for word in (data or b"").split()]
    if len(numbers) != 3 or numbers[0] is None or numbers[1] is None:
        return None
    return numbers[0], numbers[1]


def find(root: Path, pid: int) -> Found:
    clock = ProcessClock(pid)
    if root == Path("/") and clock.read() != (None,):
        return readable(clock, GIVES, "1 ns, up to date at every read")
    folder, resolution = root / "proc" / str(pid) / "task", "1 ns, up to date at ticks of 1 to 10 ms"
    file = folder / str(pid) / "schedstat"
    bad = not_readable(NAME, GIVES, resolution, [file], "a kernel with CONFIG_SCHED_INFO" if folder.is_dir() else None)
    if bad is not None:
        return bad
    return readable(ProcessTasks(folder), GIVES + ", and their waiting for a core", resolution)
