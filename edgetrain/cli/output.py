"""What every command shares: where text goes, and how errors end.

Results go to standard output, everything else to standard error. With `--json` standard output is one JSON object and
nothing else. Exit codes: 0 done, 1 a failure that was explained, 2 wrong use, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from edgetrain.run.activity import shown_by

notes = Console(stderr=True, highlight=False)
results = Console(highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else there.")]


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner that says what is being done, which changes as the work goes on (`run/activity.py`); nothing where
    standard error is no terminal."""
    if not notes.is_terminal:
        yield
        return
    with notes.status(escape(what)) as spinner, shown_by(lambda words: spinner.update(escape(words))):
        yield


def stopped(how_to_go_on: str) -> typer.Exit:
    """To raise after Ctrl-C, in every command: says so, and ends with the exit code that shells give it."""
    notes.print(f"stopped by Ctrl-C; {how_to_go_on}", markup=False, soft_wrap=True)
    return typer.Exit(130)


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))
