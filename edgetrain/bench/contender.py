"""A contender: one way to do a piece of work, in a process of its own, that takes turns with others.

    Contender(name, command)      a program that reads a word a line and answers each with a line of JSON
    python_contender(name, …)     a function of Python in place of the program (`serve` is the other side)

In its own process none sees another's allocator; taking turns, noise of the machine meets all of them alike. The first
line of a contender says {"ready": true}, or {"refused": why} where it cannot do the work; "quit" ends it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from edgetrain.errors import Infeasible, InternalError, UserError
from edgetrain.interrupts import not_for_children
from edgetrain.machine import process_bytes

Answers = Callable[[str], Any]
# -c and not -m: the package may have been found through a path that only this process knows.
_CODE = "import sys; sys.path[:] = sys.argv[3:]; from edgetrain.bench.contender import serve; serve(*sys.argv[1:3])"
_PATIENCE_S = 10.0  # torch.compile ends its own processes


class Refused(UserError):
    """A contender cannot do the work: no plan keeps its budget, for example."""


class Contender:
    """Use it in a `with` block: entering waits until it is ready, so that none starts while another is measured."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        with not_for_children():
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip

    def __enter__(self) -> Self:
        try:
            first = self._answer()
            if "refused" in first:
                raise Refused(first["refused"])
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.communicate("quit\n", timeout=_PATIENCE_S)
        self._end()

    def ask(self, word: str) -> Any:
        """What it answers to one line of text."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise InternalError(f"the process of “{self.name}” ended with exit code {self._process.wait()}")
        return json.loads(line)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def python_contender(name: str, function: str, arguments: Any) -> Contender:
    """A contender that is a function of Python.

    function: "module:name" of a function that takes `arguments` (plain JSON data), prepares the work and gives back
    what answers each word.
    """
    return Contender(name, [sys.executable, "-c", _CODE, function, json.dumps(arguments), *sys.path])


def serve(function: str, arguments: str) -> None:
    """The other side of `python_contender`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library may print

    def say(answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    module, _, name = function.partition(":")
    try:
        answer: Answers = getattr(importlib.import_module(module), name)(json.loads(arguments))
    except (Infeasible, UserError) as error:
        say({"refused": str(error)})
        return
    say({"ready": True})
    for line in sys.stdin:
        if line.strip() == "quit":
            return
        say(answer(line.strip()))


class Growth:
    """How far the resident memory of this process grows at most from now on."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # the peak begins anew; where it cannot, it counts from the start
            Path("/proc/self/clear_refs").write_text("5")
        self._before_bytes = process_bytes("VmRSS") or 0

    @property
    def n_bytes(self) -> int:
        return (process_bytes("VmHWM") or 0) - self._before_bytes
