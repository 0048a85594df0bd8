"""The sampler's own process: reads every source tick by tick, and writes what it says.

    slot       0            1            2            3
          |──x─────────|─────x──────|x───────────|···          x: a tick, at a random place in the first half
             └─ due          └─ due                            of its slot of 10 ms

The places are random so that a step whose length is a multiple of the period is not always met at the same ops. Slots
hang on the start, so nothing drifts. A slot that is over before its tick came is missed: counted, never caught up.

In:  sources (`Task`, pickled by the parent on stdin). Out: samples.bin (below), samples.json (`Summary`), and one line
     of JSON on stdout when sampling begins and one when it ends.

    samples.bin:  one line of JSON, the header (`header`), then blocks
        block:    int32 source, int32 rows, rows × (int64 before_ns, int64 after_ns, float64 a channel), little-endian
        A value that was not there is NaN. A block is written once a second, so a killed sampler loses one second.

Promised: one clock (CLOCK_MONOTONIC, `time.monotonic_ns`). It ends when its parent ends, however that happens. No error
of a source or of the disk reaches the training; each is said in `Summary.notes`. This module is loaded without PyTorch
and without NumPy (see `sampler.py`): whatever it imports must stay so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import math
import os
import pickle
import random
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from edgetrain.files import write_text
from edgetrain.machine import process_bytes
from edgetrain.measure.batched_ticks import BatchedTicks, possible
from edgetrain.measure.pacing import costs_s, pace, share, slow_down, useful
from edgetrain.measure.sensors.source import Source
from edgetrain.native.ticks import load

FORMAT, SCHEMA = "edgetrain samples", 1
SAMPLES, SUMMARY = "samples.bin", "samples.json"
BLOCK = struct.Struct("<ii")
MOST_NAME = 200  # characters

# What is promised for a quiet machine; a sampler that misses one of them says so.
LEAST_DELIVERED, MOST_LATE_S, MOST_CORE = 0.99, 0.002, 0.015

_FLUSH_NS = 900_000_000  # a little less than whole runs of ticks in C take
_RETRY_READS = 9  # a source that is gone is left alone for so many reads
_MOST_NOTES = 50
_LITTLE_SHARE = 0.0005  # reads that take no more than this are not what makes a sampler dear
_BIN_NS, _BINS = 10_000, 10_000  # lateness in bins of 10 µs up to 100 ms
_LATEST_NS = _BIN_NS * _BINS
_PLACES = 4096  # random places of ticks, then they come again
_JUMP_NS = 20_000_000  # a clock that is only adjusted gains 0.5 ms a second at most


@dataclass(frozen=True)
class Paced:
    """A source, and how often it is read: every n-th tick, or as often as its cost allows."""

    source: Source
    every: int | None = None


@dataclass(frozen=True)
class Task:
    """What a sampler is told. seed: of the random places of the ticks. cores: to run on; none: any."""

    sources: tuple[Paced, ...]
    folder: str
    period_ns: int
    seed: int
    parent: int
    in_c: bool = True  # where the library is there
    cores: tuple[int, ...] = ()

    def library(self) -> ctypes.CDLL | None:
        return load() if self.in_c else None


@dataclass(frozen=True)
class Read:
    """How one source was read: every so many ticks (at the end), with so many CPU seconds a read (at the start)."""

    name: str
    every: int
    cost_s: float
    reads: int
    failed: int


@dataclass(frozen=True)
class Summary:
    """How the sampling went.

    ended: "asked", "parent ended", "disk" (it could not write on), "failed" or "killed". None: not known, because the
        sampler was killed.
    core_share: CPU seconds of the sampler over the seconds it sampled.
    wall_offset_*_ns: wall clock minus monotonic clock.
    scheduling: "real time", "preferred" or "as any process": what the system let it have.
    notes: what the reader of the record must know, as sentences.
    """

    ended: str
    elapsed_s: float | None = None
    ticks_due: int | None = None
    ticks_delivered: int | None = None
    lateness_p50_s: float | None = None
    lateness_p95_s: float | None = None
    lateness_max_s: float | None = None
    cpu_s: float | None = None
    core_share: float | None = None
    startup_cpu_s: float | None = None
    resident_bytes: int | None = None
    wall_offset_start_ns: int | None = None
    wall_offset_end_ns: int | None = None
    keeps_up: bool | None = None
    scheduling: str | None = None
    sources: tuple[Read, ...] = ()
    notes: tuple[str, ...] = ()


class Clock:
    """The clocks of this machine; tests have their own."""

    now_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)
    cpu_ns = staticmethod(time.process_time_ns)

    def sleep_until(self, due_ns: int) -> None:
        left = due_ns - time.monotonic_ns()
        if left > 0:
            time.sleep(left / 1e9)


class Out(Protocol):
    """Where blocks go."""

    def write(self, data: bytes | memoryview) -> None: ...


class File:
    """A file that keeps its whole blocks when a write fails."""

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self.whole = 0

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self.handle, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.handle, self.whole)
            raise
        self.whole += len(data)

    def close(self) -> None:
        os.close(self.handle)


@dataclass
class Notes:
    """Sentences, each said once and not too many of them."""

    said: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        if text not in self.said and len(self.said) < _MOST_NOTES:
            self.said.append(text)


class Series:
    """One source, and the rows that are not written yet.

    A tick finds cold caches: what `sample` does in the usual case is one line of calls that were looked up before.
    """

    def __init__(self, number: int, asked: Paced, cost_s: float, period_ns: int) -> None:
        self.number, self.source, self.cost_s = number, asked.source, cost_s
        self.every, self.free = asked.every or useful(asked.source, period_ns), asked.every is None
        self.row = struct.Struct(f"<qq{len(self.source.channels)}d")
        room = 2 * _FLUSH_NS // (period_ns * self.every) + 2
        self.buffer, self.place = bytearray(BLOCK.size + room * self.row.size), BLOCK.size
        self.read, self.pack, self.size = self.source.read, self.row.pack_into, self.row.size
        self.reads = self.failed = self.wait = 0
        self.gone = False

    def sample(self, now_ns: Callable[[], int], notes: Notes) -> None:
        """Read once, with the time before and after."""
        if self.wait:
            self.wait -= 1
            return
        before = now_ns()
        try:
            values = self.read()
            after = now_ns()
            self.pack(self.buffer, self.place, before, after, *values)
            self.gone = False
        except (struct.error, OverflowError):  # a None among them: looked for only where it happens
            self._pack_what_is_there(before, after, values, notes)
        except Exception as error:  # whatever a source does, sampling goes on
            self._nothing(before, now_ns(), f"{type(error).__name__}: {error}", notes)
        self.place += self.size
        self.reads += 1

    def _pack_what_is_there(self, before: int, after: int, values: Sequence[float | None], notes: Notes) -> None:
        count = len(self.source.channels)
        numbers = [_number(value) for value in values]
        if len(numbers) != count:
            self._nothing(before, after, f"{len(numbers)} values for {count} channels", notes)
        elif all(map(math.isnan, numbers)):
            self._nothing(before, after, "it gives nothing", notes)
        else:
            self.pack(self.buffer, self.place, before, after, *numbers)
            self.gone = False

    def _nothing(self, before: int, after: int, why: str, notes: Notes) -> None:
        """The source is gone. That is said once, and it is asked again now and then."""
        self.pack(self.buffer, self.place, before, after, *[math.nan] * len(self.source.channels))
        if not self.gone:
            when = "from some moment on" if self.reads > self.failed else "from the start"
            notes.say(f"The source {self.source.name} could not be read {when} ({why[:200]}).")
        self.failed += 1
        self.gone, self.wait = True, _RETRY_READS

    def block(self) -> memoryview | None:
        """The rows so far as one block, and the buffer empty again."""
        end, self.place = self.place, BLOCK.size
        if end == BLOCK.size:
            return None
        BLOCK.pack_into(self.buffer, 0, self.number, (end - BLOCK.size) // self.size)
        return memoryview(self.buffer)[:end]


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


# Ticks


@dataclass
class Ticks:
    """Which ticks came, and how late. The lateness of every one is kept in bins, so that a day takes no more room."""

    due: int = 0
    delivered: int = 0
    most_ns: int = 0
    bins: list[int] = field(default_factory=lambda: [0] * (_BINS + 1))

    def quantile_s(self, part: float) -> float | None:
        """The upper end of the bin that holds it."""
        left = part * sum(self.bins)
        for place, count in enumerate(self.bins):
            left -= count
            if count and left <= 0:
                return min((place + 1) * _BIN_NS, self.most_ns) / 1e9 if place < _BINS else self.most_ns / 1e9
        return None


@dataclass
class Stop:
    """Why to stop; None: go on. parent: the process to end with. The pipe to it tells its end, but a copy of it may
    hold that open; so it is looked for, too."""

    reason: str | None = None
    parent: int | None = None
    flag: ctypes.c_int = field(default_factory=ctypes.c_int)  # the same for C

    def say(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.flag.value = 1

    def look(self) -> None:
        if self.parent is not None and self.reason is None and os.getppid() != self.parent:
            self.say("parent ended")


@dataclass
class Recorder:
    """All sources of one run, and the file that they are written to."""

    series: Sequence[Series]
    out: Out
    clock: Clock
    notes: Notes
    period_ns: int
    ticks: Ticks = field(default_factory=Ticks)
    offset_ns: int = 0
    flushed_ns: int = 0
    flushed_cpu_ns: int = 0

    def run(self, stop: Stop, places: Sequence[float], library: ctypes.CDLL | None = None) -> str:
        """Sample until told to stop; the reason. places: where in the first half of their slots ticks lie, 0 to 1, over
        and over. library: reads in C what it can."""
        offsets = [int(place * self.period_ns / 2) for place in places]
        first = self.clock.now_ns()
        self.flushed_ns, self.flushed_cpu_ns = first, self.clock.cpu_ns()
        self.offset_ns = self.clock.wall_ns() - first
        batches = BatchedTicks(self, library, offsets) if library is not None and possible(self.series) else None
        slot = 0
        while True:
            if batches is not None:
                slot, whole = batches.run(stop, first, slot)
            else:
                slot, whole = self._tick(stop, first, slot, offsets[slot % len(offsets)])
            if not whole or stop.reason is not None:
                self.ticks.due = slot
                return (stop.reason or "asked") if self._flush() else "disk"
            if self.clock.now_ns() - self.flushed_ns >= _FLUSH_NS:
                stop.look()
                if not self._flush():
                    return "disk"

    def _tick(self, stop: Stop, first: int, slot: int, offset: int) -> tuple[int, bool]:
        """One tick in Python: the next slot, and whether to go on."""
        due = first + slot * self.period_ns + offset
        self.clock.sleep_until(due)
        woke = self.clock.now_ns()
        if stop.reason is not None:
            return slot, False
        passed = self.note(due, woke, first, slot)
        if passed > slot:  # its slot is over
            return passed, True
        for one in self.series:
            if (slot + one.number) % one.every == 0:  # not all of the slow ones at once
                one.sample(self.clock.now_ns, self.notes)
        return slot + 1, True

    def note(self, due: int, woke: int, first: int, slot: int) -> int:
        """Count a tick, and how late it came: the slot in which it did. A tick whose slot is over is not delivered."""
        ticks = self.ticks
        late = woke - due if woke > due else 0  # a sleep is rounded to a nanosecond or two
        ticks.bins[late // _BIN_NS if late < _LATEST_NS else _BINS] += 1
        if late > ticks.most_ns:
            ticks.most_ns = late
        passed = max(slot, (woke - first) // self.period_ns)
        if passed == slot:
            ticks.delivered += 1
            ticks.due = slot + 1
        return passed

    def _flush(self) -> bool:
        """Write what is there, and look whether all is well. False: the disk takes no more."""
        now, cpu = self.clock.now_ns(), self.clock.cpu_ns()
        self._watch_the_wall_clock(now)
        passed, spent = now - self.flushed_ns, cpu - self.flushed_cpu_ns
        dear = passed >= _FLUSH_NS and spent > MOST_CORE * passed
        if dear and share(self.series, self.period_ns) > _LITTLE_SHARE:
            slow_down(self.series)
        self.flushed_ns, self.flushed_cpu_ns = now, cpu
        try:
            for series in self.series:
                block = series.block()
                if block is not None:
                    self.out.write(block)
        except OSError as error:
            self.notes.say(f"Recording stopped: {_disk(error)} What was recorded before can be read.")
            return False
        return True

    def _watch_the_wall_clock(self, now_ns: int) -> None:
        offset = self.clock.wall_ns() - now_ns
        jump, self.offset_ns = offset - self.offset_ns, offset
        if abs(jump) > _JUMP_NS:
            self.notes.say(
                f"The wall clock jumped by {jump / 1e9:+.2f} s (it was set, or the machine slept); times in the "
                "samples are of the monotonic clock and are right."
            )


def _disk(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "the disk is full." if full else f"the samples cannot be written ({error.strerror or error})."


# The process


def header(series: Sequence[Series], period_ns: int, clock: Clock) -> bytes:
    """The first line of samples.bin."""
    now = clock.now_ns()
    names = distinct([one.source.name for one in series])
    data = {
        "format": FORMAT,
        "schema": SCHEMA,
        "clock": "monotonic",
        "period_ns": period_ns,
        "started_ns": now,
        "wall_offset_ns": clock.wall_ns() - now,
        "sources": [{"name": name, "channels": _channels(one.source)} for name, one in zip(names, series, strict=True)],
    }
    return json.dumps(data, allow_nan=False).encode() + b"\n"


def _channels(source: Source) -> list[dict[str, object]]:
    names = distinct([channel.name for channel in source.channels])
    renamed = dict(zip([channel.name for channel in source.channels], names, strict=True))
    return [
        {**asdict(channel), "name": name, "part_of": renamed.get(channel.part_of or "", channel.part_of)}
        for channel, name in zip(source.channels, names, strict=True)
    ]


def distinct(names: Sequence[str]) -> list[str]:
    """The names as a file may hold them: hardware gives itself the strangest ones, and two chips the same one."""
    found: list[str] = []
    for name in names:
        plain = "".join(c if c.isprintable() and c not in "/\\" else "_" for c in name)[: MOST_NAME - 10] or "_"
        count = sum(1 for other in found if other == plain or other.startswith(f"{plain}#"))
        found.append(f"{plain}#{count + 1}" if count else plain)
    return found


def begin(task: Task, clock: Clock) -> list[Series]:
    """Open the sources, and decide how often each is read."""
    for one in task.sources:
        with contextlib.suppress(Exception):  # said where it is sampled
            one.source.open()
    costs = costs_s([one.source for one in task.sources], clock)
    series = [
        Series(number, one, cost, task.period_ns)
        for number, (one, cost) in enumerate(zip(task.sources, costs, strict=True))
    ]
    pace(series, task.period_ns)
    return series


def record(task: Task, stop: Stop, clock: Clock, ready: Callable[[], None]) -> Summary:
    """Sample as told; how it went. OSError: not even the header could be written."""
    series = begin(task, clock)
    file = File(Path(task.folder) / SAMPLES)
    notes, draw = Notes(), random.Random(task.seed)
    recorder = Recorder(series, file, clock, notes, task.period_ns)
    try:
        file.write(header(series, task.period_ns, clock))
        ready()
        gc.freeze()
        wall, cpu, started = clock.wall_ns() - clock.now_ns(), clock.cpu_ns(), clock.now_ns()
        ended = recorder.run(stop, [draw.random() for _ in range(_PLACES)], task.library())
        elapsed, cpu_after = clock.now_ns() - started, clock.cpu_ns()
    finally:
        file.close()
        for one in series:
            with contextlib.suppress(Exception):
                one.source.close()
    ticks, spent = recorder.ticks, (cpu_after - cpu) / 1e9
    share = spent / (elapsed / 1e9) if elapsed else None
    return Summary(
        ended=ended,
        elapsed_s=elapsed / 1e9,
        ticks_due=ticks.due,
        ticks_delivered=ticks.delivered,
        lateness_p50_s=ticks.quantile_s(0.5),
        lateness_p95_s=ticks.quantile_s(0.95),
        lateness_max_s=ticks.most_ns / 1e9,
        cpu_s=spent,
        core_share=share,
        startup_cpu_s=cpu / 1e9,
        resident_bytes=process_bytes("VmRSS"),
        wall_offset_start_ns=wall,
        wall_offset_end_ns=clock.wall_ns() - clock.now_ns(),
        keeps_up=_keeps_up(ticks, share, notes),
        sources=tuple(Read(one.source.name, one.every, one.cost_s, one.reads, one.failed) for one in series),
        notes=tuple(notes.said),
    )


def _keeps_up(ticks: Ticks, share: float | None, notes: Notes) -> bool:
    """Were the promises kept? Each that was not is said."""
    late = ticks.quantile_s(0.95) or 0.0
    kept = True
    if ticks.delivered < LEAST_DELIVERED * ticks.due:
        kept = False
        notes.say(
            f"The sampler could not keep up: {ticks.delivered} of {ticks.due} ticks were delivered "
            f"(at least {LEAST_DELIVERED:.0%} are promised on a quiet machine)."
        )
    if late > MOST_LATE_S:
        kept = False
        notes.say(f"The sampler was late: by more than {late * 1e3:.1f} ms in one tick of twenty.")
    if share is not None and share > MOST_CORE:
        notes.say(f"The sampler itself took {share:.1%} of one core (at most {MOST_CORE:.1%} is promised).")
    return kept


def _listen(stop: Stop) -> None:
    """Wait until the parent says stop or is gone (its end of the pipe closes); a stuck sensor does not outlive it."""
    told = os.read(0, 16)
    stop.say("asked" if told else "parent ended")
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
        say({"cannot": _disk(error)})
    except BaseException:
        say({"failed": traceback.format_exc()[-4000:]})
    os._exit(0)  # without waiting for the thread that listens


def _go_first() -> str:
    """Be run before others when a tick is due, as far as the system allows: beside training on every core, a process
    like any other would be late by milliseconds."""
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
