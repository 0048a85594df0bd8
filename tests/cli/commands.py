"""A command as a user gives it, in this process: what it printed, and the code that it ended with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from edgetrain.cli import main


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def told(self) -> str:
        """Standard error, however its lines were broken."""
        return told(self.err)


Run = Callable[..., Ended]


def told(text: str) -> str:
    return " ".join(text.split())


def commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *first: str) -> Run:
    """run("train", "lenet") is `edgetrain train lenet`; `first` are words that all of them begin with."""

    def go(*words: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["edgetrain", *first, *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return Ended(code if isinstance(code, int) else 0, *capsys.readouterr())

    return go
