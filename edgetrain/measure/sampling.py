"""The sampler's own process: reads every source tick by tick, and writes what it says.

In:  sources (`Task`, pickled by the parent on stdin).
Out: samples.bin and samples.json (`samples_file.py`), and one line of JSON on stdout when sampling begins and one when
     it ends.

Promised: one clock (CLOCK_MONOTONIC, `time.monotonic_ns`). It ends when its parent ends, however that happens. No error
of a source or of the disk reaches the training; each is said in `Summary.notes`. This module is loaded without PyTorch
and without NumPy (see `sampler.py`): whatever it imports must stay so.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgetrain.files import write_text
from edgetrain.machine import process_bytes
from edgetrain.measure.pacing import costs_s, pace
from edgetrain.measure.recorder import MAX_CORE_SHARE, Recorder, disk_words
from edgetrain.measure.samples_file import SAMPLES, SUMMARY, File, Read, Summary, header
from edgetrain.measure.series import Notes, Paced, Series
from edgetrain.measure.ticks import Clock, Stop, Ticks
from edgetrain.native.ticks import load

# What is promised for a quiet machine; a sampler that misses one of them says so.
MIN_DELIVERED, MAX_LATE_S = 0.99, 0.002

_PLACES = 4096  # random places of ticks, then they come again


@dataclass(frozen=True)
class Task:
    """What a sampler is to do. seed: of the random places of the ticks. cores: to run on; none: any."""

    sources: tuple[Paced, ...]
    folder: str
    period_ns: int
    seed: int
    parent: int
    in_c: bool = True  # where the library is there
    cores: tuple[int, ...] = ()

    def library(self) -> ctypes.CDLL | None:
        return load() if self.in_c else None


def begin(task: Task, clock: Clock) -> list[Series]:
    """Open the sources, and decide how often each is read."""
    for paced in task.sources:
        with contextlib.suppress(Exception):  # said where it is sampled
            paced.source.open()
    costs = costs_s([paced.source for paced in task.sources], clock)
    series = [
        Series(number, paced, cost, task.period_ns)
        for number, (paced, cost) in enumerate(zip(task.sources, costs, strict=True))
    ]
    pace(series, task.period_ns)
    return series


def record(task: Task, stop: Stop, clock: Clock, on_begin: Callable[[], None]) -> Summary:
    """Sample as the task says; how it went. OSError: not even the header could be written."""
    series = begin(task, clock)
    file = File(Path(task.folder) / SAMPLES)
    notes, draw = Notes(), random.Random(task.seed)
    recorder = Recorder(series, file, clock, notes, task.period_ns)
    try:
        file.write(header([each.source for each in series], task.period_ns, clock.now_ns(), clock.wall_ns()))
        on_begin()
        gc.freeze()
        wall, cpu, started = clock.wall_ns() - clock.now_ns(), clock.cpu_ns(), clock.now_ns()
        ended = recorder.run(stop, [draw.random() for _ in range(_PLACES)], task.library())
        elapsed, cpu_after = clock.now_ns() - started, clock.cpu_ns()
    finally:
        file.close()
        for each in series:
            with contextlib.suppress(Exception):
                each.source.close()
    ticks, spent = recorder.ticks, (cpu_after - cpu) / 1e9
    share = spent / (elapsed / 1e9) if elapsed else None
    return Summary(
        ended=ended,
        elapsed_s=elapsed / 1e9,
        ticks_due=ticks.due,
        ticks_delivered=ticks.delivered,
        lateness_p50_s=ticks.quantile_s(0.5),
        lateness_p95_s=ticks.quantile_s(0.95),
        lateness_max_s=ticks.max_late_ns / 1e9,
        cpu_s=spent,
        core_share=share,
        startup_cpu_s=cpu / 1e9,
        resident_bytes=process_bytes("VmRSS"),
        wall_offset_start_ns=wall,
        wall_offset_end_ns=clock.wall_ns() - clock.now_ns(),
        keeps_up=_keeps_up(ticks, share, notes),
        sources=tuple(Read(each.source.name, each.every, each.cost_s, each.reads, each.failed) for each in series),
        notes=tuple(notes.said),
    )


def _keeps_up(ticks: Ticks, share: float | None, notes: Notes) -> bool:
    """Were the promises kept? Each that was not is said."""
    late = ticks.quantile_s(0.95) or 0.0
    kept = True
    if ticks.delivered < MIN_DELIVERED * ticks.due:
        kept = False
        notes.say(
            f"The sampler could not keep up: {ticks.delivered} of {ticks.due} ticks were delivered "
            f"(at least {MIN_DELIVERED:.0%} are promised on a quiet machine)."
        )
    if late > MAX_LATE_S:
        kept = False
        notes.say(f"The sampler was late: by more than {late * 1e3:.1f} ms in one tick of twenty.")
    if share is not None and share > MAX_CORE_SHARE:
        notes.say(f"The sampler itself took {share:.1%} of one core (at most {MAX_CORE_SHARE:.1%} is promised).")
    return kept


def _listen(stop: Stop) -> None:
    """Wait until the parent says stop or is gone (its end of the pipe closes); a stuck sensor does not outlive it."""
    word = os.read(0, 16)
    stop.say("asked" if word else "parent ended")
    time.sleep(3)
    os._exit(1)


def main() -> None:
    """The other side of `sampler.Sampler`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library may print
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends this process
    stop = Stop()
    signal.signal(signal.SIGTERM, lambda *_: stop.say("asked"))
    task: Task = pickle.loads(_exactly(int.from_bytes(_exactly(8), "little")))  # from our own parent, over a pipe
    scheduling, stop.parent = _go_first(), task.parent
    if task.cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, task.cores)
    threading.Thread(target=_listen, args=(stop,), daemon=True).start()

    def say(data: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            print(json.dumps(data), file=answers, flush=True)

    try:
        summary = record(task, stop, Clock(), lambda: say({"ready": True}))
        summary = replace(summary, scheduling=scheduling)
        with contextlib.suppress(OSError):  # a full disk: the parent has it, too
            write_text(Path(task.folder) / SUMMARY, json.dumps(asdict(summary), indent=1) + "\n")
        say({"summary": asdict(summary)})
    except OSError as error:
        say({"cannot": disk_words(error)})
    except BaseException:
        say({"failed": traceback.format_exc()[-4000:]})
    os._exit(0)  # without waiting for the thread that listens


def _go_first() -> str:
    """Run before others when a tick is due, as far as the system allows.

    Beside training on every core, a process like any other would be late by milliseconds.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        return "real time"
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
        return "preferred"
    return "as any process"


def _exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            sys.exit(1)
        data += more
    return data
