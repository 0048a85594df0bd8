"""What every command shares: where text goes, and how errors end.

Results go to standard output, everything else to standard error. With `--json` standard output is one JSON object and
nothing else. Exit codes: 0 done, 1 a failure that was explained, 2 wrong use, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape

from edgetrain import interrupts
from edgetrain.run.activity import shown_by

notes = Console(stderr=True, highlight=False)
results = Console(highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner that says what is being done; nothing where standard error is no terminal.

    What it says changes as the work goes on (`run/activity.py`).
    """
    if not notes.is_terminal:
        yield
        return
    with notes.status(escape(what)) as spinner, shown_by(lambda words: spinner.update(escape(words))):
        yield


# What Python calls otherwise than commands do.
_OPTIONS = (
    "memory", "process_memory", "planner", "page_to", "micro_batches", "allow_inexact", "batch", "epochs", "lr", "seed",
    "classes", "input_size", "width", "threads", "device", "steps", "optimizer", "keep_every", "check", "resume",
    "resize_head", "objective", "time_limit", "warmup_steps", "eval_every",
)  # fmt: skip
_GIVEN = re.compile(rf"\b({'|'.join(_OPTIONS)})=(True|\"[^\"]*\"|'[^']*'|[\w.+-]+)?")
_PLAIN = re.compile(rf"(?<![\w./'-])({'|'.join(name for name in _OPTIONS if '_' in name)})(?![\w./'-])")
_CALLS = {
    "example=(x, y)": "a batch", "et.prepare": "edgetrain train", "et.measure_costs": "edgetrain plan",
    "run loss(model, *example) by itself to see the whole traceback": "call it in Python to see the whole traceback",
    'pass unused="freeze" to accept it': "freeze them in the model",
    "et.model_costs(graph, device=\"…\")": "give --device",
    "plan without paging: page=False": "leave --page out", "give a budget: memory_bytes": "give --memory",
}  # fmt: skip


def readable(message: str) -> str:
    """A message that no terminal takes for orders, and that ends: parts of it come from files and code of others."""
    plain = "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in message)
    return plain if len(plain) <= _LONGEST else f"{plain[:_LONGEST]}…"


_LONGEST = 4000


def in_words_of_commands(message: str) -> str:
    """An error as a command says it: of options, not of arguments in Python. allow_inexact=True → --allow-inexact."""
    for call, words in _CALLS.items():
        message = message.replace(call, words)
    message = _GIVEN.sub(lambda match: _option(match[1], match[2]), message)
    return _PLAIN.sub(lambda match: _option(match[1], None), message)


def _option(name: str, value: str | None) -> str:
    option = f"--{name.replace('_', '-')}"
    return option if value in (None, "True") else f"{option} {value.strip(_QUOTES)}"


_QUOTES = "\"'"


def stopped(how_to_go_on: str) -> typer.Exit:
    """To raise after Ctrl-C, in every command: says so, and ends with the exit code that shells give it."""
    interrupts.over()
    notes.print(f"stopped by Ctrl-C; {how_to_go_on}", markup=False, soft_wrap=True)
    return typer.Exit(130)


@contextmanager
def json_alone() -> Iterator[None]:
    """Standard output is for `print_json` alone: what a model of the user's own prints goes to standard error."""
    token = _for_json.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _for_json.reset(token)


_for_json: ContextVar[TextIO | None] = ContextVar("for_json", default=None)


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2), file=_for_json.get())
