"""The arguments of public functions, checked against their annotations before the function begins.

In:  a function with annotations. Out: the same function, which raises one `UserError` that names an argument of a type
that it cannot take. What a value means (a range, a name, a file) the function checks itself.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from edgetrain.errors import UserError
from edgetrain.ranges import shown

P = ParamSpec("P")
T = TypeVar("T")


def checked(*elsewhere: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Check the arguments of a function. elsewhere: names of those that the function itself checks, in better words."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        hints = functools.cache(lambda: typing.get_type_hints(function))

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                hint = hints().get(name, Any)
                if name not in elsewhere and not _fits(value, hint):
                    raise UserError(
                        f"{function.__name__} cannot take this as {name}", expected=_words(hint),
                        received=_received(value), next_step=f"see help({function.__name__})",
                    )  # fmt: skip
            return function(*args, **kwargs)

        return call

    return decorate


def _fits(value: object, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in typing.get_args(hint))
    if origin is typing.Literal:  # before ==, which an array answers with an array
        return any(type(value) is type(each) and value == each for each in typing.get_args(hint))
    if hint is float or hint is int:
        kind = numbers.Real if hint is float else numbers.Integral
        return isinstance(value, kind) and not isinstance(value, bool)
    if origin is collections.abc.Callable:
        return callable(value) and not isinstance(value, type)
    kind = hint if origin is None else origin
    if kind is Path:
        return isinstance(value, os.PathLike)
    if getattr(kind, "_is_protocol", False):
        return callable(value)
    return not isinstance(kind, type) or isinstance(value, kind)


def _words(hint: Any) -> str:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(each) for each in parts)
    if origin is typing.Literal:
        return " or ".join(repr(each) for each in parts)
    if origin is collections.abc.Callable:
        return "a function"
    if hint is type(None):
        return "None"
    return str(getattr(origin or hint, "__name__", hint))


def _received(value: object) -> str:
    words = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    plain = value is None or isinstance(value, (str, bytes, int, float, complex))
    return shown(value) if plain else words
