"""When each op of a step began and ended, on the clock that the samples have too.

In:  a prepared step and batches.
Out: `Timeline`: what ran, in order (`OpRun`), and for each step the nanoseconds at which each of it began and ended.

    step 0   ├─conv─┤├norm┤  ├─conv again─┤├wait┤├─conv backward──┤
    step 1   ├──conv──┤├norm┤├─conv again─┤├wait┤├─conv backward─┤        the same ops, other times

A step whose plan changed in its middle (a budget fell, a transfer failed) ran other ops than the rest: it is counted
in `left_out` and has no row. Times are of CLOCK_MONOTONIC; on a GPU they are the device's own, taken by its events and
laid on that clock.

In a run folder: timeline.json (what ran) and timeline.bin (one row of little-endian int64 a step: begin and end of the
step, then all begins, then all ends). Rows are appended every second, so a file that was cut off is read up to there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from edgetrain.errors import UserError
from edgetrain.files import explained, writable, write_text
from edgetrain.graph.ir import PHASES, Graph, Phase
from edgetrain.native.marks import Marks as Marker
from edgetrain.ops.entry import entry_of, work
from edgetrain.ops.other import WAIT
from edgetrain.plan.plan import Compute, Plan
from edgetrain.run.compile import PART, WAITING
from edgetrain.run.compiled import CompiledStep
from edgetrain.run.micro_step import MicroStep
from edgetrain.run.step import Step
from edgetrain.saved import Fields, read_object, read_whole

SCHEMA = 1
WHAT_FILE, WHEN_FILE = "timeline.json", "timeline.bin"
MAX_OPS = 1_000_000
KEPT_EVERY_S = 1.0  # rows are written together: a file that is opened for each takes as long as a small op

Why = Literal["first", "recomputed", "paged"]
Marks: TypeAlias = NDArray[np.int64]  # place, nanoseconds, place, nanoseconds, …; ~place where an op ends


@dataclass(frozen=True, slots=True)
class OpRun:
    """One op as it runs in every step.

    why:         "first": for the first time in this micro-batch; "recomputed": again; "paged": no op, a wait for a
                 transfer to storage or back.
    micro_batch: its number, from 0.
    flops, read_bytes, written_bytes: what the op does (ops/work.py); of a wait, the bytes that are transferred.
    kernel:      which of the op's kernels runs it, where it is not the first.
    category:    of the op, in reports.
    """

    name: str
    kind: str
    module: str
    phase: Phase
    why: Why
    micro_batch: int
    flops: int
    read_bytes: int
    written_bytes: int
    kernel: str = ""
    category: str = ""

    @property
    def shown_kind(self) -> str:
        return f"{self.kind} by {self.kernel}" if self.kernel else self.kind


@dataclass(frozen=True)
class Timeline:
    """begin_ns, end_ns: one row a step, one column an op. step_ns: begin and end of each step."""

    ops: tuple[OpRun, ...]
    step_ns: NDArray[np.int64]
    begin_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    left_out: int = 0

    @property
    def steps(self) -> int:
        return len(self.step_ns)

    @property
    def op_s(self) -> NDArray[np.float64]:
        """Seconds of each op in each step."""
        return np.asarray((self.end_ns - self.begin_ns) / 1e9)

    @property
    def step_s(self) -> NDArray[np.float64]:
        return np.asarray((self.step_ns[:, 1] - self.step_ns[:, 0]) / 1e9)


class Tracer:
    """Runs steps under the clock and collects their rows.

    With a folder it writes them there, KEPT_EVERY_S apart, and the last ones when `keep` or `result` is called.
    """

    def __init__(self, step: Step, folder: Path | None = None) -> None:
        self._step, self._folder, self._clock = step, folder, _Clock(step.graph)
        self._places: NDArray[np.int64] | None = None
        self._ops: tuple[OpRun, ...] = ()
        self._rows: list[NDArray[np.int64]] = []
        self._left_out = 0
        self._marked: list[tuple[int, int, Marks]] = []  # steps that are no rows yet
        self._kept_ns = time.monotonic_ns()

    def __call__(self, *batch: Any) -> torch.Tensor:
        """One step, as `step(*batch)`."""
        clock = self._clock
        clock.begin()
        began = time.monotonic_ns()
        loss = self._step.timed(clock.mark, *batch)
        marks = clock.settle()
        self._take(began, time.monotonic_ns(), marks, self._step.used)
        return loss

    def keep(self) -> None:
        """Make rows of the steps since the last time, and write them."""
        new = [row for began, ended, marks in self._marked if (row := self._row(began, ended, marks)) is not None]
        self._left_out += len(self._marked) - len(new)
        self._rows += new
        self._marked, self._kept_ns = [], time.monotonic_ns()
        if self._folder is not None and new:
            with explained(self._folder / WHEN_FILE), writable(self._folder / WHEN_FILE, "ab") as file:
                file.write(np.concatenate(new).astype("<i8").tobytes())

    def result(self) -> Timeline:
        self.keep()
        return _timeline(self._ops, self._rows, self._left_out)

    def _take(self, began: int, ended: int, marks: Marks, step: CompiledStep | MicroStep) -> None:
        """As little as can be while steps are measured: a row is made of the marks later."""
        if self._places is None:
            self._places = places = marks[::2]
            self._ops = tuple(_ops(places.tolist(), step))
            self._begins, self._ends = np.flatnonzero((places >= 0) & (places != PART)), np.flatnonzero(places < 0)
            self._write_ops()
        self._marked.append((began, ended, marks))
        if ended - self._kept_ns > KEPT_EVERY_S * 1e9:
            self.keep()

    def _row(self, began: int, ended: int, marks: Marks) -> NDArray[np.int64] | None:
        """None where the step ran other ops than the first one."""
        if self._places is None or not np.array_equal(marks[::2], self._places):
            return None
        times = marks[1::2]
        return np.concatenate([(began, ended), times[self._begins], times[self._ends]])

    def _write_ops(self) -> None:
        if self._folder is not None:
            data = {"schema": SCHEMA, "ops": [asdict(op) for op in self._ops]}
            write_text(self._folder / WHAT_FILE, json.dumps(data))
            (self._folder / WHEN_FILE).unlink(missing_ok=True)


class _Clock:
    """Marks of a step: of this processor's clock, or events of a GPU, which are turned into times by `settle`."""

    def __init__(self, graph: Graph) -> None:
        self._device = next((s.device for s in graph.storages if s.device.startswith("cuda")), None)
        self._events: list[
            torch.cuda.Event
        ] = []  # used again by every step: to make one takes longer than to record it
        self._places: list[int] = []
        self._marks = Marker()
        self.mark: Callable[[int], None] = self._by_event

    def begin(self) -> None:
        if self._device is None:
            self._marks = Marker()
            self.mark = self._marks.mark
            return
        torch.cuda.synchronize(self._device)
        self._places.clear()
        self._first = torch.cuda.Event(enable_timing=True)
        self._first.record()
        self._first.synchronize()
        self._first_ns = time.monotonic_ns()

    def _by_event(self, place: int) -> None:
        if len(self._places) == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[len(self._places)].record()
        self._places.append(place)

    def settle(self) -> Marks:
        """All marks of the step, which is over."""
        if self._device is None:
            return np.frombuffer(bytes(self._marks), dtype=np.int64)
        torch.cuda.synchronize(self._device)
        times = [
            round(1e6 * self._first.elapsed_time(event)) for event, _ in zip(self._events, self._places, strict=False)
        ]
        pairs = [(place, self._first_ns + time_ns) for place, time_ns in zip(self._places, times, strict=True)]
        return np.array(pairs, dtype=np.int64).ravel()


def _ops(places: Sequence[int], step: CompiledStep | MicroStep) -> list[OpRun]:
    """What ran, by the places that the first step passed."""
    parts = list(step.parts) if isinstance(step, MicroStep) else [step]
    number = -1 if isinstance(step, MicroStep) else 0
    runs: list[OpRun] = []
    done: set[int] = set()
    for place in places:
        if place == PART:
            number, done = number + 1, set()
        elif place >= WAITING:
            runs.append(_wait(parts[number].graph, place - WAITING, number, runs))
        elif place >= 0:
            runs.append(_run(parts[number].graph, parts[number].plan, place, number, done))
    return runs


def _run(graph: Graph, plan: Plan, place: int, number: int, done: set[int]) -> OpRun:
    action = plan.schedule[place]
    assert isinstance(action, Compute)
    op, does = graph.ops[action.op], work(graph, graph.ops[action.op])
    why: Why = "recomputed" if action.op in done else "first"
    kernel = plan.kernel_of(action, again=action.op in done)
    done.add(action.op)
    return OpRun(
        op.name, op.kind, op.module, op.phase, why, number, does.flops, does.read_bytes, does.written_bytes, kernel,
        entry_of(op.kind).category,
    )  # fmt: skip


def _wait(graph: Graph, storage: int, number: int, before: Sequence[OpRun]) -> OpRun:
    name = next(tensor.name for tensor in graph.tensors if tensor.storage == storage)
    n_bytes = graph.storages[storage].n_bytes
    phase: Phase = before[-1].phase if before else "forward"
    return OpRun(f"wait for {name}", WAIT, "", phase, "paged", number, 0, n_bytes, 0)


def _timeline(ops: tuple[OpRun, ...], rows: Sequence[NDArray[np.int64]], left_out: int) -> Timeline:
    n = len(ops)
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 2 + 2 * n)
    return Timeline(ops, table[:, :2], table[:, 2 : 2 + n], table[:, 2 + n :], left_out)


def load_timeline(folder: Path) -> Timeline | None:
    """What a run folder holds of a timeline, up to its last whole step; None where it holds none."""
    if not (folder / WHAT_FILE).exists():
        return None
    data = read_object(folder / WHAT_FILE)
    data.schema(SCHEMA)
    ops = tuple(_op_from(entry) for entry in data.each("ops", MAX_OPS))
    raw = read_whole(folder / WHEN_FILE)
    width = 2 + 2 * len(ops)
    table = np.frombuffer(raw[: len(raw) // (8 * width) * 8 * width], dtype="<i8").astype(np.int64).reshape(-1, width)
    timeline = _timeline(ops, list(table), 0)
    if (timeline.end_ns < timeline.begin_ns).any() or (timeline.step_ns[:, 1] < timeline.step_ns[:, 0]).any():
        raise UserError(f"{folder / WHEN_FILE} is damaged: an op ends before it begins")
    if len(table) and not (table.min() >= 0 and table.max() < 2**62):
        raise UserError(f"{folder / WHEN_FILE} is damaged: it holds times that no clock shows")
    return timeline


def _op_from(data: Fields) -> OpRun:
    names = ("micro_batch", "flops", "read_bytes", "written_bytes")
    counts = [data.get(name, int) for name in names]
    for name, value in zip(names, counts, strict=True):
        if not 0 <= value < 2**63:
            raise data.wrong(name, "a number from 0 on", str(value)[:60])
    micro_batch, flops, read_bytes, written_bytes = counts
    kernel, category = (data.get(name, str) if name in data.values else "" for name in ("kernel", "category"))
    return OpRun(
        data.get("name", str), data.get("kind", str), data.get("module", str),
        cast(Phase, data.choice("phase", PHASES)), cast(Why, data.choice("why", get_args(Why))), micro_batch, flops,
        read_bytes, written_bytes, kernel, category,
    )  # fmt: skip
