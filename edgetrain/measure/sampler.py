"""Sampling beside a training run: `with Sampler(sources, folder) as sampler: …`, then `sampler.summary`.

    this process, which trains             the sampler (sampling.py)
      Sampler.__enter__  ── sources ──▶    opens the files, says it is ready
      train                                reads, 100 times a second     ──▶ folder/samples.bin
      Sampler.__exit__   ── stop ─────▶    writes its summary            ──▶ folder/samples.json
                         ◀─ summary ───

In:  sources (sensors/source.py) that were not opened yet, and a folder. Out: two files there; `samples.py` reads them.

Promised: both processes share one clock, `time.monotonic_ns`. Whatever happens to the sampler while it samples, the
training goes on; `summary.notes` says what happened. The sampler holds about 15 MB and no PyTorch.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import edgetrain.measure
from edgetrain.errors import InternalError, UserError
from edgetrain.measure.processor import spare_cores
from edgetrain.measure.samples_file import Read, Summary
from edgetrain.measure.sampling import Task
from edgetrain.measure.sensors import Source, find
from edgetrain.measure.series import Paced

MIN_PERIOD_S, MAX_PERIOD_S = 0.001, 60.0
_PATIENCE_S = 20.0  # a driver's library can take seconds to start

# edgetrain/__init__.py loads PyTorch. A package of that name with the same folder and nothing in it takes its place,
# so that only what sampling.py names is loaded. -S: the search path is handed over, nothing needs to be looked for.
_CODE = """
import sys, types
package = types.ModuleType("edgetrain")
package.__path__ = [sys.argv[1]]
sys.modules["edgetrain"] = package
sys.path[:] = sys.argv[2:]
from edgetrain.measure.sampling import main
main()
"""


class Sampler:
    """A sampler, from entering a block to leaving it.

    sources: what to read; None: all that this machine has, of this process. period_s: between two ticks.
    seed: of the random places of the ticks in their slots; any by default.
    """

    def __init__(
        self,
        sources: Sequence[Source | Paced] | None,
        folder: Path | str,
        period_s: float = 0.01,
        *,
        seed: int | None = None,
    ) -> None:
        if not MIN_PERIOD_S <= period_s <= MAX_PERIOD_S:
            raise UserError(
                "the sampler cannot sample at this period",
                expected=f"{MIN_PERIOD_S:g} to {MAX_PERIOD_S:g} seconds",
                received=f"{period_s:g}",
            )
        if sources is None:
            sources = [source for _, source in find(pid=os.getpid(), reads=0) if source is not None]
        self.folder = Path(folder)
        self.task = Task(
            tuple(each if isinstance(each, Paced) else Paced(each) for each in sources),
            str(self.folder.absolute()),
            round(period_s * 1e9),
            random.getrandbits(32) if seed is None else seed,
            os.getpid(),
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._summary: Summary | None = None

    @property
    def summary(self) -> Summary:
        """How it went; there after the block."""
        if self._summary is None:
            raise InternalError("a sampler's summary is there when its block has ended")
        return self._summary

    @property
    def pid(self) -> int:
        """Of the sampler's process."""
        assert self._process is not None
        return self._process.pid

    def pause(self) -> None:
        """Stop reading at once; the ticks until `resume` are missed."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Read on. What it had to do meanwhile it does in the first milliseconds."""
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Sampler:
        """Return when sampling has begun."""
        data = pickle.dumps(replace(self.task, parent=os.getpid(), cores=spare_cores()))
        package = str(Path(edgetrain.measure.__file__).parent.parent)
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _CODE, package, *sys.path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it failed: the answer says why
            self._process.stdin.write(len(data).to_bytes(8, "little") + data)
            self._process.stdin.flush()
        try:
            answer = self._answer()
            self._check(answer)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self.resume()
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"stop")
            self._process.stdin.close()
        try:
            answer = self._answer()
        finally:
            self._end()
        self._summary = _summary(answer)

    def _answer(self) -> dict[str, Any] | None:
        """The next line that the sampler says; None if it ended without one, or says nothing for too long."""
        assert self._process is not None
        assert self._process.stdout is not None
        watchdog = _killed_after(self._process, _PATIENCE_S)
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        return dict(json.loads(line)) if line.endswith(b"\n") else None

    def _check(self, answer: dict[str, Any] | None) -> None:
        if answer is not None and "ready" in answer:
            return
        if answer is not None and "cannot" in answer:
            raise UserError(
                f"nothing can be recorded in {self.folder}: {answer['cannot']}",
                next_step="free some room, or name another folder",
            )
        assert self._errors is not None
        self._errors.seek(0)
        said = (answer or {}).get("failed") or self._errors.read().decode(errors="replace")
        raise InternalError(f"the sampler did not start: {said[-2000:]}")

    def _end(self) -> None:
        """Leave no process and no open file behind."""
        process, self._process = self._process, None
        assert process is not None
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        if self._errors is not None:
            self._errors.close()


def _killed_after(process: subprocess.Popen[bytes], seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def _summary(answer: dict[str, Any] | None) -> Summary:
    if answer is None:
        return Summary("killed", notes=("The sampler was killed; its last second is lost.",))
    if "summary" not in answer:
        message = str(answer.get("failed") or answer.get("cannot"))
        return Summary("failed", notes=(f"The sampler failed: {message.strip().splitlines()[-1][:200]}",))
    data = answer["summary"]
    reads = tuple(Read(**read) for read in data.pop("sources"))
    return Summary(**{**data, "sources": reads, "notes": tuple(data["notes"])})
