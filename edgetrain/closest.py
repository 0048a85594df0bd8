"""Names that somebody may have meant: one error for a name that is not known, whatever it is a name of.

In:  what was given and the names there are. Out: a `UserError` that asks after the closest name where one is truly
     close, as a slip of the keyboard is, and lists the names where none is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from edgetrain.errors import UserError
from edgetrain.ranges import shown

CLOSE = 0.72  # of difflib: a letter or two of a word are wrong
_MAX_LENGTH = 64  # no name is as long; to compare a longer one takes time for nothing


def closest(given: str, names: Iterable[str]) -> str | None:
    """The one name that was most likely meant; None where nothing is truly close."""
    by_plain = {_plain(name): name for name in names}
    plain = _plain(given[: _MAX_LENGTH + 1])
    close = difflib.get_close_matches(plain, by_plain, n=1, cutoff=CLOSE) if len(plain) <= _MAX_LENGTH else []
    return by_plain[close[0]] if close else None


def unknown(what: str, given: object, names: Iterable[str], *, also: str = "", list_them: str = "") -> UserError:
    """The error. what: "device named". also: what may stand in place of a name. list_them: the command that does."""
    known = tuple(names)
    match = closest(given, known) if isinstance(given, str) else None
    choose = "choose one of these" + (f": {list_them}" if list_them else "")
    return UserError(
        f"there is no {what} {shown(given)}",
        expected="one of " + ", ".join(known) + (f", or {also}" if also else ""),
        next_step=f"did you mean {match}?" if match else choose,
    )


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_")
