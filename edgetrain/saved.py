"""Plain data in files of ours: read back with one kind of error, whatever is wrong with the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from edgetrain import files
from edgetrain.errors import UserError

T = TypeVar("T")


def load(path: str | Path, what: str, read: Callable[[Any], T], *, next_step: str | None = None) -> T:
    """what: the kind of file, such as "plan file". read: from JSON data to what it holds; whatever plain error it meets
    says that the file holds something else. next_step: what to do then."""
    try:
        return read(files.plain_json(files.read(path, what)))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, ArithmeticError) as error:
        told = f"{type(error).__name__}: {error}"[:400]
        raise UserError(f"{path} is not a {what} of edgetrain", received=told, next_step=next_step) from error
