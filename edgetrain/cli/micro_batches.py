"""The options of micro-batches, which several commands have."""

from __future__ import annotations

from typing import Literal

import typer

from edgetrain.cli.output import notes
from edgetrain.ranges import BATCH, shown

_DIGITS = 20

MICRO_BATCHES = (
    "Take each batch in so many parts, gradients added up: a number, or auto for as many as the budget asks for. By "
    "default 1; the planner sage takes more where evicting does not keep the budget."
)
ALLOW_INEXACT = "Take micro-batches though batch norm or dropout then give other numbers than the whole batch."


def number_of_micro_batches(words: str | None, batch: int) -> int | Literal["auto"] | None:
    """No more than there are samples, which is said where more are asked for."""
    if words is None or words == "auto":
        return words  # type: ignore[return-value]
    if not (words.isascii() and words.isdecimal()) or len(words) > _DIGITS or int(words) not in BATCH:
        raise typer.BadParameter(f"{shown(words)} is neither {BATCH} nor auto", param_hint="--micro-batches")
    if int(words) > batch:
        notes.print(
            f"a batch of {batch} has at most {batch} micro-batches: --micro-batches {words} is taken as {batch}",
            soft_wrap=True,
        )
    return min(int(words), batch)
