"""The command line. One file a command; this one puts them together and turns errors into messages and exit codes.

0: done. 1: a failure that was explained. 2: wrong use. 130: stopped by Ctrl-C, with a line that says how to go on.
A user's mistake never shows a traceback.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from edgetrain import __version__
from edgetrain.cli.calibrate import calibrate
from edgetrain.cli.compare import compare
from edgetrain.cli.demo import demo
from edgetrain.cli.devices import devices
from edgetrain.cli.doctor import doctor
from edgetrain.cli.emulate import emulate
from edgetrain.cli.export import export
from edgetrain.cli.graph import graph
from edgetrain.cli.models import models
from edgetrain.cli.options import check_names
from edgetrain.cli.output import in_words_of_commands, json_alone, notes, readable, stopped
from edgetrain.cli.plan import plan
from edgetrain.cli.profile import profile
from edgetrain.cli.report import report
from edgetrain.cli.train import train
from edgetrain.errors import EdgetrainError, InternalError
from edgetrain.interrupts import START_AGAIN, interruptible, over


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """An empty word is a variable of a shell that is not set: as a path it would be the folder one is in."""
        for before, word in zip(["", *args], args, strict=False):
            option = word[:-1] if word.startswith("--") and word.endswith("=") else before if not word else ""
            if not word or option:
                raise typer.BadParameter(
                    "it is empty", ctx, param_hint=option if option.startswith("-") else "an argument"
                )
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="edgetrain",
    help="Train neural networks on small devices inside a budget, and measure what training costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def run(*args: object, **options: object) -> None:
        check_names(options)
        try:
            with json_alone() if options.get("json") else nullcontext():
                interruptible(lambda: command(*args, **options))
        except KeyboardInterrupt:
            raise stopped(START_AGAIN) from None

    return run


for command in (
    train, plan, profile, export, emulate, graph, models, devices, doctor, calibrate, report, compare, demo,
):  # fmt: skip
    app.command(cls=_Command)(_interruptible(command))


def _version(asked: bool) -> None:
    if asked:
        print(f"edgetrain {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train neural networks on small devices inside a budget, and measure what training costs."""


def main() -> None:
    """The entry point of the `edgetrain` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # × and µ where the locale has none; standard error does so
    try:
        try:
            app()  # exits by itself: 0, or 2 on wrong use
        finally:
            over()
    except InternalError:
        raise
    except EdgetrainError as error:
        _end(in_words_of_commands(str(error)))
    except OSError as error:
        _end(f"{error.filename or 'a file'}: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        _end("there is not enough memory for this\n  next step: give a smaller batch, or --memory")


def _end(message: str) -> NoReturn:
    notes.print(f"error: {readable(message)}", markup=False, soft_wrap=True)
    sys.exit(1)
