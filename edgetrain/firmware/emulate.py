"""Run a project: on this machine, or in the emulator of its board.

In:  the folder of a project, batches. Out: `Run`: losses, trained tensors, gradients of a debug build, the memory that
     the program measured itself, instructions if the emulator counts them.

A program with a nonzero exit code raises `FirmwareFailed`, which has the code.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from edgetrain import ranges
from edgetrain.errors import EdgetrainError, UserError
from edgetrain.files import checked_path, read, real, refuse_link
from edgetrain.firmware import counts
from edgetrain.firmware.build import SILENT, Built, Variant, build, load_project, require
from edgetrain.firmware.counts import CountedCall
from edgetrain.firmware.values import from_memory, to_memory
from edgetrain.measure.sensors.room import require_room

CODES = {
    2: "a file cannot be opened, or is not for this model",
    3: "a batch ends before it is complete, or a result cannot be written",
    4: "a label is no class",
    5: "an access that the board does not allow: a stray write, or a stack overflow",
    6: "the stack was used to its end",
    7: "the flash does not keep what is written to it",
    9: "the power was cut in a trial",
    16: "this processor lacks the vectors that the program was built for (make fast VECTORS= builds it without)",
}
_TRAIN, _PREDICT = 0, 1
_POLL_S = 0.05


class FirmwareFailed(EdgetrainError):
    """The program failed. code: its exit code (negative: killed by that signal)."""

    def __init__(self, code: int, output: str) -> None:
        self.code, self.output = code, output
        why = CODES.get(code, "the program was stopped" if code < 0 else "an unknown reason")
        super().__init__(f"the firmware ended with exit code {code}: {why}\n  {output.strip()[-2000:]}")


@dataclass(frozen=True)
class Run:
    """
    tensors:   everything that a step changes, after the last step, by name, in PyTorch's layout.
    gradients: of a debug build: for each step, by the name of the parameter.
    sides:     the same for the functions with bends, in the order in which the model calls them (`sides.py`).
    results:   when predicting: one array a batch.
    steps_before: of the checkpoint in flash that it started from; losses and gradients are those of the steps after.
    arena_used_bytes, stack_used_bytes: measured by the program; the stack is 0 if it is not known.
    resident_bytes: the peak, as Linux counts it; None if an emulator ran the program.
    instructions_by: by function, counted by the emulator of a microcontroller; else empty.
    calls:     the same by call of the training step.
    """

    built: Built
    losses: tuple[float, ...]
    tensors: Mapping[str, torch.Tensor]
    gradients: tuple[Mapping[str, torch.Tensor], ...] = ()
    results: tuple[np.ndarray[Any, np.dtype[np.float32]], ...] = ()
    arena_used_bytes: int = 0
    stack_used_bytes: int = 0
    resident_bytes: int | None = None
    instructions_by: Mapping[str, int] = field(default_factory=dict)
    calls: tuple[CountedCall, ...] = ()
    steps_before: int = 0
    time_s: float = field(default=0.0, compare=False)
    sides: tuple[Sequence[torch.Tensor], ...] = field(default=(), compare=False)

    @property
    def instructions(self) -> int | None:
        """In total; the same for every run over the same batches. None if they were not counted."""
        return sum(self.instructions_by.values()) or None

    @property
    def instructions_per_step(self) -> float | None:
        """The mean over the run, of the ops of a step."""
        return sum(call.instructions for call in self.calls) / len(self.losses) if self.calls and self.losses else None


Progress = Callable[[int, float], None]


class Batches(Protocol):
    """A sequence of batches, or an iterable of known length."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence[torch.Tensor]]: ...


def run_firmware(
    folder: str | Path,
    batches: Batches,
    *,
    variant: Variant = "plain",
    predict: bool = False,
    compiler: str | None = None,
    threads: int | None = None,
    flash: str | Path | None = None,
    progress: Progress | None = None,
    time_limit_s: float = 600.0,
) -> Run:
    """Build the program and run it over the batches.

    threads:  of a fast program; by default one for each core.
    flash:    the file that is the board's flash, for a program with checkpoints: the run goes on from the newest one
              and skips the batches of the steps before it. None: a new flash, deleted afterwards.
    progress: called with each step's number and loss while the program runs.
    time_limit_s: for building, writing the batches and running together.
    """
    started = time.monotonic()
    deadline = started + time_limit_s
    ranges.number("time_limit_s", time_limit_s, ranges.SECONDS)
    if threads is not None:
        ranges.whole("threads", threads, ranges.THREADS)
    project = load_project(folder)
    if flash is not None and not project["keep_every"]:
        raise UserError("this firmware keeps nothing in flash", next_step="export it with keep_every=10, say")
    if flash is not None:
        _require_flash(checked_path(flash, "file of flash"))
    _require_room(project, len(batches), variant, predict)
    built = build(folder, variant, compiler=compiler)
    with tempfile.TemporaryDirectory(prefix="edgetrain-firmware-") as place:
        where = Path(place)
        with _on_time(time_limit_s):
            write_batches(where / "batches.bin", project, batches, predict=predict, deadline=deadline)
        if flash is not None:
            (where / "flash.bin").symlink_to(real(flash))
        started = time.monotonic()
        environment = os.environ | ({} if threads is None else {"FIRMWARE_THREADS": str(threads)})
        counted = counts.plugin(project, built.program, where) if project["is_board"] else []
        words = [*command(project, built.program.resolve()), *counted]
        with _on_time(time_limit_s):
            _execute(words, where, progress, deadline, environment)
        return _read(project, built, where, len(batches), variant, predict, time.monotonic() - started)


def _require_flash(file: Path) -> None:
    """Refuse a file that is something else than flash: the run would write over it."""
    refuse_link(file)
    if not file.exists():
        return
    content = read(file, "file of flash")
    # A copy is there, or the first was being written: its commit word comes last.
    if content and COMMIT not in content and not content.startswith(_NEVER_WRITTEN):
        raise UserError(
            f"{file} is no flash of a firmware, and a run would write over it",
            expected="the file of an earlier run, or the name of a new one", next_step="name another file",
        )  # fmt: skip


COMMIT = (0x20C0DE01).to_bytes(4, "little")  # begins each copy, as checkpoint.c writes it
_NEVER_WRITTEN = b"\xff\xff\xff\xff"


class _TooLate(Exception):
    """The time is up."""


@contextlib.contextmanager
def _on_time(limit_s: float) -> Iterator[None]:
    try:
        yield
    except _TooLate:
        raise UserError(
            f"the firmware did not end within {limit_s:g} s, building it and writing its batches included",
            next_step="run fewer steps at once, or give more time",
        ) from None


def _require_room(project: dict[str, Any], count: int, variant: Variant, predict: bool) -> None:
    """Batches take disk space, and so does what a debug build reports, which is read into memory as a whole. A program
    for this machine also takes the memory of its step."""
    sizes = {described["name"]: math.prod(described["shape"]) for described in project["tensors"]}
    reports = variant not in SILENT and not predict
    each = sum(4 * sizes.get(name, 0) for name in project["gradients"])
    reported_bytes = count * (each + sum(math.prod(d["shape"]) for d in project["sides"])) if reports else 0
    written = (
        count * sum(np.dtype(d["dtype"]).itemsize * math.prod(d["shape"]) for d in project["inputs"]) + reported_bytes
    )
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if written > free:
        raise UserError(
            f"a run over {count:,} batches writes {written / 1e9:,.3g} GB to {folder}",
            expected=f"at most {free / 1e9:,.3g} GB, which is free", next_step="run fewer steps at once",
        )  # fmt: skip
    require_room(f"a run over {count:,} batches", 2 * reported_bytes, next_step="run fewer steps at once")
    if not project["is_board"]:
        own = project["arena_bytes"] + project["lasting_bytes"]
        require_room("this firmware", own, next_step="export it with a smaller batch, or with a budget of memory")


def write_batches(
    file: Path, project: dict[str, Any], batches: Batches, *, predict: bool = False, deadline: float = math.inf
) -> None:
    """Write the file that main.c reads. deadline: of `time.monotonic`."""
    with file.open("wb") as out:
        count = 0
        for batch in batches:
            content = batch_bytes(project, count, batch)
            if not count:
                what = _PREDICT if predict else _TRAIN
                out.write(struct.pack("<4sIII", b"ETB1", what, len(batches), len(content)))
            out.write(content)
            count += 1
            if time.monotonic() > deadline:
                raise _TooLate
    if not count:
        raise UserError("there is no batch to run on")


def batch_bytes(project: dict[str, Any], number: int, batch: Sequence[torch.Tensor]) -> bytes:
    """A batch as the program reads it. number: of the batch, for messages."""
    inputs = project["inputs"]
    if len(batch) <= max(described["position"] for described in inputs):
        raise UserError(f"batch {number} has {len(batch)} tensors", expected=str(len(inputs)))
    content = b""
    for described in inputs:
        value = batch[described["position"]]
        if list(value.shape) != described["shape"]:
            raise UserError(
                f"batch {number} does not fit the firmware", expected=f"{described['name']}: {described['shape']}",
                received=str(list(value.shape)),
            )  # fmt: skip
        content += to_memory(value, described["dtype"])
    return content


def command(project: dict[str, Any], program: Path) -> list[str]:
    """The command that runs the program in the working directory, in its emulator if it needs one."""
    emulator = list(project["emulator"])
    if not emulator:
        return [str(program)]
    require(emulator[0])
    if not project["is_board"]:
        return [*emulator, str(program)]
    console = ["-display", "none", "-monitor", "none", "-serial", "none"]
    clock = ["-icount", "shift=0"]  # an instruction is a nanosecond of the board's time
    files = ["-semihosting-config", "enable=on,target=native"]
    return [*emulator, *console, *clock, *files, "-kernel", str(program)]


def _execute(
    command: list[str], where: Path, progress: Progress | None, deadline: float, environment: Mapping[str, str]
) -> None:
    with (where / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=where, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            n_reported = 0
            while process.poll() is None:
                n_reported = _report_losses(where / "losses.bin", n_reported, progress)
                if time.monotonic() > deadline:
                    raise _TooLate
                time.sleep(_POLL_S if progress is not None else _POLL_S / 10)
            _report_losses(where / "losses.bin", n_reported, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        raise FirmwareFailed(process.returncode, (where / "output.txt").read_text(errors="replace"))


def _report_losses(file: Path, n_reported: int, progress: Progress | None) -> int:
    if progress is None or not file.exists():
        return n_reported
    losses = np.fromfile(file, dtype=np.float32, offset=4 * n_reported)
    for number, loss in enumerate(losses.tolist(), n_reported + 1):
        progress(number, loss)
    return n_reported + len(losses)


def _read(
    project: dict[str, Any], built: Built, where: Path, steps: int, variant: Variant, predict: bool, time_s: float
) -> Run:
    _, arena, stack, before = struct.unpack("<IIII", (where / "report.bin").read_bytes())
    losses: tuple[float, ...] = ()
    results: tuple[np.ndarray[Any, np.dtype[np.float32]], ...] = ()
    if predict:
        results = tuple(np.frombuffer((where / "results.bin").read_bytes(), dtype=np.float32).reshape(steps, -1))
    else:
        losses = tuple(np.frombuffer((where / "losses.bin").read_bytes(), dtype=np.float32).tolist())
    gradients: tuple[Mapping[str, torch.Tensor], ...] = ()
    sides: tuple[Sequence[torch.Tensor], ...] = ()
    if variant not in SILENT and not predict:
        gradients = tuple(_shown(project, _Tensors(where / "shown.bin"), max(steps - before, 0)))
        sides = tuple(_sides(project, _Tensors(where / "sides.bin"), max(steps - before, 0)))
    trained = _Tensors(where / "trained.bin")
    tensors = {tensor["name"]: trained.next(tensor["shape"], tensor["dtype"]) for tensor in project["tensors"]}
    counted = counts.read(project, built.program, where)
    resident = None if project["emulator"] else _resident_bytes(where / "resident.txt")
    return Run(
        built, losses, tensors, gradients, results, arena, stack, resident, counted.by_function, counted.calls, before,
        time_s, sides,
    )  # fmt: skip


def _resident_bytes(file: Path) -> int | None:
    words = file.read_text().split() if file.exists() else []
    return int(words[1]) * 1024 if len(words) == 3 and words[1].isdecimal() else None


class _Tensors:
    """The tensors of a file, in their order."""

    def __init__(self, file: Path) -> None:
        self._data, self._at = file.read_bytes(), 0

    def skip(self, n_bytes: int) -> None:
        self._at += n_bytes

    def next(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        start = self._at
        self.skip(math.prod(shape) * np.dtype(dtype).itemsize)
        return from_memory(self._data[start : self._at], shape, dtype)


def _shown(project: dict[str, Any], shown: _Tensors, steps: int) -> Iterator[Mapping[str, torch.Tensor]]:
    shapes = {tensor["name"]: tensor["shape"] for tensor in project["tensors"]}
    for _ in range(steps):
        gradients = {}
        for name in project["gradients"]:
            shown.skip(4)  # the number of its bytes
            gradients[name] = shown.next(shapes[name], "float32")
        yield gradients


def _sides(project: dict[str, Any], sides: _Tensors, steps: int) -> Iterator[Sequence[torch.Tensor]]:
    for _ in range(steps):
        by_call = {entry["call"]: sides.next(entry["shape"], "uint8") for entry in project["sides"]}
        yield [by_call[call] for call in sorted(by_call)]
