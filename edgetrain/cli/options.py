"""Options that hold a number or one of a few names: each is checked here, before a command begins.

A range stands in `edgetrain/ranges.py`, once for commands and Python. What is outside of it is wrong use: exit code 2
and one message that names the option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from edgetrain import ranges
from edgetrain.cli.optimizers import OPTIMIZERS
from edgetrain.closest import closest
from edgetrain.errors import UserError
from edgetrain.files import checked_path
from edgetrain.plan.registry import help_text, names
from edgetrain.ranges import Range, shown


def numeric(allowed: Range, help: str, *names: str) -> Any:  # noqa: A002  # Typer's own word
    """A numeric option with a range."""
    return typer.Option(*names, help=help, parser=_parser(allowed), metavar="<int>" if allowed.whole else "<float>")


def _parser(allowed: Range) -> Callable[[Any], float]:
    def parse(given: Any) -> float:
        """The words of the user, or the default, which is a number already."""
        with suppress(ValueError):
            value = written(given, int if allowed.whole else float)
            if value in allowed:
                return value
        raise typer.BadParameter(f"{shown(given)} is not {allowed}")

    return parse


def written(given: Any, kind: Callable[[Any], float]) -> float:
    """The number that words stand for; a ValueError where they stand for none.

    In the digits of programs alone: Python reads ٣, 1_0 and " 3 " as numbers too.
    """
    if isinstance(given, str) and (not given.isascii() or "_" in given or given != given.strip()):
        raise ValueError(given)
    return kind(given)


def choice(names: Iterable[str], help: str) -> Any:  # noqa: A002  # Typer's own word
    """An option that holds one of a few names."""
    known = tuple(names)

    def parse(given: str) -> str:
        if given in known:
            return given
        match = closest(given, known)
        meant = f"; did you mean {match}?" if match else ""
        raise typer.BadParameter(f"{shown(given)} is none of {', '.join(known)}{meant}")

    return typer.Option(help=help, parser=parse, metavar=f"[{'|'.join(known)}]")


def check_names(options: Mapping[str, object]) -> None:
    """Refuse a path that no file can have, among the options of a command."""
    for name, value in options.items():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, Path) or (name in _NAMES and isinstance(path, str)):
                try:
                    checked_path(path, "file or folder")
                except UserError as error:
                    raise typer.BadParameter(str(error), param_hint=name.replace("_", "-")) from error


_NAMES = ("model", "data", "device", "target")  # a name, or a path

# Options that several commands share.
Batch = Annotated[int, numeric(ranges.BATCH, "Samples in a batch.")]
Classes = Annotated[int | None, numeric(ranges.CLASSES, "Number of classes.")]
Optimizer = Annotated[str, choice(OPTIMIZERS, "Optimizer of the step.")]
PlannerName = Annotated[str, choice(names(), f"Planning algorithm: {help_text()}.")]
Seed = Annotated[int, numeric(ranges.SEED, "Seed of all random numbers.")]
Side = Annotated[int | None, numeric(ranges.SIDE, "Side of an image in pixels, or length of a sequence.")]
Threads = Annotated[int | None, numeric(ranges.THREADS, "Threads of PyTorch's kernels.")]
Width = Annotated[float | None, numeric(ranges.WIDTH, "Width multiplier of a zoo model.")]
