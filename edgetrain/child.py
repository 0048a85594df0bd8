"""Run a function of edgetrain in a process of its own, which is gone when it returns.

What the work loads and allocates goes with the process: solvers take 50 MB and more and cannot be loaded beside each
other, and capturing leaves memory behind that a small device does not have.

    forked   a copy of this process, which shares its memory: for work that runs no kernels
             (the threads of kernels do not come along)
    run      a fresh one, given a function by name and plain JSON data: for work that does

    command  a program, such as a compiler

The first two give back plain JSON data.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from edgetrain.errors import InternalError
from edgetrain.files import write_text
from edgetrain.machine import process_bytes

Progress = Callable[[int, int], None]
_CODE = "import sys; sys.path[:] = sys.argv[3:]; from edgetrain.child import main; main(sys.argv[1], sys.argv[2])"


_PROGRESS = re.compile(r"progress (\d+) (\d+)\n")
_PR_SET_PDEATHSIG = 1
_SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


class Ended(InternalError):
    """The other process was killed, for lack of memory or of time."""


def forked(work: Callable[[], Any], *, most_bytes: int | None = None, time_limit_s: float | None = None) -> Any:
    """What `work` returns in a copy of this process.

    `Ended` if it takes more than `most_bytes` of its own, or more time than the limit.
    """
    reader, writer = os.pipe()
    pid, mask = 0, signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forking beside threads: see above
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the copy must not run the handlers of this process
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                _answer(work, writer, most_bytes)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read() if _answers(reader, time_limit_s) else b""
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = _killed(pid)
    if not said:
        raise Ended(f"a process that worked for this one ended without an answer (status {status})")
    answer = json.loads(said)
    if "failed" in answer:
        raise InternalError(f"a process that worked for this one failed: {answer['failed']}")
    return answer["found"]


def _killed(pid: int) -> int | None:
    """How the process ended, at the latest now."""
    if not pid:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _answers(reader: int, time_limit_s: float | None) -> bool:
    """Wait for the first byte, or the end; the answer comes in one piece."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    return bool(poll.poll(None if time_limit_s is None else 1e3 * max(time_limit_s, 0.0)))


def _answer(work: Callable[[], Any], writer: int, most_bytes: int | None) -> NoReturn:
    """The copy's side; nothing of the original runs on in it."""
    try:
        for number in _SIGNALS:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ctrl-C goes to the parent, which ends this process
        _die_with_parent()
        gc.freeze()  # a collection would write to every object, and so copy all pages of the original
        if most_bytes is not None:
            _limit(most_bytes)
        try:
            answer = json.dumps({"found": work()})
        except BaseException as error:
            if isinstance(error, MemoryError) or (most_bytes is not None and isinstance(error, ImportError | OSError)):
                os._exit(1)  # a library that cannot be mapped is an ImportError
            answer = json.dumps({"failed": traceback.format_exc()[-2000:]})
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer.encode())
    finally:
        os._exit(0)


def _limit(most_bytes: int) -> None:
    """Refuse this process memory above what it has now and so much more.

    Addresses count that were only reserved; those that it has already are in what it has now.
    """
    now = process_bytes("VmData")
    if now is not None:
        limit = now + max(most_bytes, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _die_with_parent() -> None:
    """Linux ends this process when the one that it works for ends, however that happens."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run(
    function: str, data: Any, *, progress: Progress | None = None, environment: Mapping[str, str] | None = None
) -> Any:
    """Call `function(data, progress)` there. `progress` gets how many parts are done, and of how many."""
    with tempfile.TemporaryDirectory(prefix="edgetrain-") as folder:
        (Path(folder) / "data.json").write_text(json.dumps(data), encoding="utf-8")
        # -c and not -m: the package may have been found through a path that only this process knows.
        errors = Path(folder) / "errors"
        with errors.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", _CODE, function, folder, *sys.path],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, text=True,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                match = _PROGRESS.fullmatch(line)  # a library may print too
                if match is not None and progress is not None:
                    progress(int(match[1]), int(match[2]))
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        said = errors.read_text(encoding="utf-8", errors="replace")
        result = Path(folder) / "result.json"
        if not result.exists():
            raise InternalError(f"{function} failed in its process ({process.returncode}): {said[-2000:]}")
        return json.loads(result.read_text(encoding="utf-8"))


def command(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. Whatever ends the wait ends the program, and what it has started."""
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        process_group=0,
    )  # fmt: skip
    try:
        out, said = process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return subprocess.CompletedProcess(words, process.returncode, out, said)


def main(function: str, folder: str) -> None:
    """The other side."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends this process
    module, _, name = function.partition(":")
    data = json.loads((Path(folder) / "data.json").read_text(encoding="utf-8"))
    result = getattr(importlib.import_module(module), name)(
        data, lambda done, total: print(f"progress {done} {total}", flush=True)
    )
    write_text(Path(folder) / "result.json", json.dumps(result))
