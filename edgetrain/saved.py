"""Plain data in files of ours, read back; what is read may come from anywhere.

    load         a whole file by one function; a plain error that it meets says that the file holds something else
    read_object  a JSON object as `Fields`, for files that people open and edit: a bad field is named

In:  a path, and how to read the data. Out: what it holds, or a `UserError` that names the file, and never a traceback.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeGuard, TypeVar, cast

from edgetrain.errors import UserError
from edgetrain.files import plain_json, read
from edgetrain.ranges import shown

T = TypeVar("T")

_MAX_NUMBER = 10**300
_KINDS: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def load(path: str | Path, what: str, from_data: Callable[[Any], T], *, next_step: str | None = None) -> T:
    """What a whole file holds, by one function.

    what: the kind of file, such as "plan file". from_data: from JSON data to what it holds; whatever plain error it
    meets says that the file holds something else. next_step: what to do then.
    """
    try:
        return from_data(plain_json(read(path, what)))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, ArithmeticError) as error:
        raise UserError(
            f"{path} is not a {what} of edgetrain", received=in_words(error), next_step=next_step
        ) from error


def in_words(error: Exception) -> str:
    """What is wrong with plain data, by the error that reading it met, without Python's own names and code."""
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


def is_finite(value: object) -> bool:
    """Can it be shown and computed with? A whole number of any length is JSON, too."""
    if isinstance(value, int):
        return abs(value) < _MAX_NUMBER
    return not isinstance(value, float) or math.isfinite(value)


def is_number(value: object) -> TypeGuard[int | float]:
    """True is none."""
    return type(value) in (int, float) and is_finite(value)


@dataclass(frozen=True)
class Fields:
    """One object of a file; each read checks the type, and a wrong one names the file and the field."""

    file: Path
    values: Mapping[str, object]
    prefix: str = ""

    def get(self, name: str, kind: type[T]) -> T:
        """The field, which must be there and of this type; a whole number is a number, true is not 1."""
        value = self.values.get(name, ...)
        if is_number(value) if kind is float else type(value) is kind and is_finite(value):
            return cast(T, value)
        raise self.wrong(name, _KINDS[kind])

    def maybe(self, name: str, kind: type[T]) -> T | None:
        """The field, or None where the file says null."""
        return None if self.values.get(name, ...) is None else self.get(name, kind)

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        """A text out of a list."""
        value = self.values.get(name)
        if not isinstance(value, str) or value not in allowed:
            raise self.wrong(name, " or ".join(allowed))
        return value

    def inside(self, name: str) -> Self:
        """The object in a field."""
        return type(self)(self.file, self.get(name, dict), f"{self.prefix}{name}.")

    def each(self, name: str, most: int | None = None) -> list[Self]:
        """The objects in a list, `most` of them at most."""
        items = self.get(name, list)
        if most is not None and len(items) > most:
            raise self.wrong(name, f"at most {most:,} {name}", f"{len(items):,}")
        places = {f"{name}[{place}]": item for place, item in enumerate(items)}
        listed = type(self)(self.file, places, self.prefix)
        return [listed.inside(place) for place in places]

    def texts(self, name: str) -> tuple[str, ...]:
        """The texts in a list."""
        items = self.get(name, list)
        if not all(isinstance(item, str) for item in items):
            raise self.wrong(name, "a list of texts")
        return tuple(items)

    def schema(self, newest: int) -> int:
        """The schema of the file, from 1 up to the newest that is known; any other is a UserError."""
        schema = self.get("schema", int)
        if 1 <= schema <= newest:
            return schema
        newer = schema > newest
        raise UserError(
            f"{self.file} was written by {'a newer' if newer else 'another'} version of edgetrain",
            expected=f"schema {newest}" if newest == 1 else f"schema 1 to {newest}",
            received=f"schema {shown(schema)}",
            next_step="update edgetrain, or read it with the version that wrote it" if newer else None,
        )

    def wrong(self, name: str, expected: str, received: str | None = None) -> UserError:
        """The error for a field that is not what it should be."""
        value = self.values.get(name, ...)
        words = "nothing" if value is ... else f"{_kind(value)}: {shown(value)}"
        return UserError(
            f"{self.file}: field '{self.prefix}{name}' is wrong", expected=expected, received=received or words
        )


def _kind(value: object) -> str:
    return "null" if value is None else _KINDS[type(value)]


def read_object(file: Path) -> Fields:
    """Read a file that should hold one JSON object; NaN and infinity are no JSON."""
    content = read_whole(file)
    try:
        data = plain_json(content, any_number=True)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON", received=in_words(error)) from error
    if not isinstance(data, dict):
        raise UserError(f"{file} does not hold a JSON object", received=_kind(data))
    return Fields(file, data)


def read_whole(file: Path) -> bytes:
    """All bytes of a file of a run folder."""
    try:
        return read(file)
    except UserError as error:
        raise UserError(f"{file} cannot be read", received=error.received or error.what) from error
