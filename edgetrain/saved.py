"""Plain data in files of ours: read back with one kind of error, whatever is wrong with the file."""

from __future__ import annotations

import json
import re
import tomllib
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
        raise UserError(
            f"{path} is not a {what} of edgetrain", received=in_words(error), next_step=next_step
        ) from error


def in_words(error: Exception) -> str:
    """What is wrong with plain data, by the error that reading it met: of Python's own no name and no code is told."""
    if isinstance(error, KeyError):
        return f"the field {error.args[0]!r:.60} is missing"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, ArithmeticError):
        return "a number is too large"
    if type(error) is ValueError and not re.search("unpack|literal|zip\\(|could not convert|is not in ", str(error)):
        return str(error)[:400]
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON: {error}"
    if isinstance(error, tomllib.TOMLDecodeError):
        return f"no TOML: {error}"
    return "no text" if isinstance(error, UnicodeDecodeError) else "a field holds something else than it should"
