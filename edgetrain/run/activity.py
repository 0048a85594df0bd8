"""What is being done at the moment, in words, for whoever shows it: a spinner on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_show: ContextVar[Callable[[str], None] | None] = ContextVar("show", default=None)


def doing(what: str) -> None:
    """Say what begins now, if anybody listens."""
    show = _show.get()
    if show is not None:
        show(what)


@contextmanager
def shown_by(show: Callable[[str], None]) -> Iterator[None]:
    before = _show.set(show)
    try:
        yield
    finally:
        _show.reset(before)
