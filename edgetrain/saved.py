"""Plain data in files of ours: read back with one kind of error, whatever is wrong with the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from edgetrain.errors import UserError

T = TypeVar("T")


def load(path: str | Path, what: str, read: Callable[[Any], T], *, next_step: str | None = None) -> T:
    """what: the kind of file, such as "plan file". read: from JSON data to what it holds; whatever plain error it meets
    says that the file holds something else. next_step: what to do then."""
    try:
        return read(json.loads(Path(path).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise UserError(f"there is no {what} {path}") from error
    except OSError as error:
        raise UserError(f"the {what} {path} cannot be read", received=str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        told = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is not a {what} of edgetrain", received=told, next_step=next_step) from error
