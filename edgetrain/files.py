"""Files and folders that somebody names: read within limits, and never written through a link.

In:  a path from outside. Out: its bytes, or a file opened for writing; a `UserError` for what cannot be.
Promised: only regular files are read, so that no device, pipe or socket can hang a command, and never more than a
limit; what is written lands in the named file itself, or nowhere.
"""

from __future__ import annotations

import json
import math
import os
import stat
import unicodedata
from pathlib import Path
from typing import Any, BinaryIO

from edgetrain.errors import UserError

LARGEST_BYTES = 1 << 30  # of a file that is read whole
_NAME_BYTES, _PATH_BYTES = 255, 4096  # what Linux allows
_DIGITS = 20  # of a whole number that has a use; 2⁶⁴ has as many


def checked_path(path: str | os.PathLike[str], what: str = "file") -> Path:
    """The path, if a file could have such a name; nothing is looked at on the disk."""
    text = os.fspath(path)
    controls = [c for c in text if unicodedata.category(c) in ("Cc", "Cs")]
    longest = max((len(os.fsencode(part)) for part in text.split("/")), default=0) if not controls else 0
    if not text or controls or longest > _NAME_BYTES or len(os.fsencode(text)) > _PATH_BYTES:
        received = f"{text[:60]!a}{'…' if len(text) > 60 else ''}, {len(text)} characters"
        raise UserError(
            f"this cannot be the name of a {what}",
            expected=f"a path without control characters, of names of at most {_NAME_BYTES} bytes",
            received=received, next_step="check the path",
        )  # fmt: skip
    return Path(path)


def require_regular(path: str | os.PathLike[str], what: str = "file", limit_bytes: int = LARGEST_BYTES) -> Path:
    """The path of a regular file within the limit, which may be the target of a link; its content is not looked at."""
    path = checked_path(path, what)
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise UserError(f"there is no {what} {path}", received=error.strerror) from error
    except OSError as error:
        raise UserError(f"the {what} {path} cannot be read", received=error.strerror or str(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"the {what} {path} cannot be read", received=f"{_kind(status.st_mode)}, and no file")
    if status.st_size > limit_bytes:
        raise UserError(
            f"the {what} {path} is too large", expected=f"at most {limit_bytes:,} bytes",
            received=f"{status.st_size:,} bytes",
        )  # fmt: skip
    return path


def read(path: str | os.PathLike[str], what: str = "file", limit_bytes: int = LARGEST_BYTES) -> bytes:
    """All bytes of a regular file."""
    path = require_regular(path, what, limit_bytes)
    try:
        with open(path, "rb") as file:
            return file.read(limit_bytes)
    except OSError as error:
        raise UserError(f"the {what} {path} cannot be read", received=error.strerror or str(error)) from error


def plain_json(data: bytes) -> Any:
    """JSON as a program writes it: each key once, finite numbers, whole numbers that a machine can hold. A ValueError
    or RecursionError says what is wrong."""
    return json.loads(
        data.decode(), parse_constant=_no_constant, parse_float=finite, parse_int=_short,
        object_pairs_hook=each_key_once,
    )  # fmt: skip


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.60} stands there twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _short(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def refuse_links(folder: Path) -> None:
    """Refuse a folder of ours in which something is a link: what is written there would land elsewhere."""
    if not folder.is_dir():
        return
    link = next((Path(entry.path) for entry in os.scandir(folder) if entry.is_symlink()), None)
    if link is not None:
        raise UserError(
            f"{link} is a symbolic link, and nothing is written through it",
            expected=f"files and folders in {folder} itself", received=f"a link to {os.readlink(link)}",
            next_step="remove the link, or name another folder",
        )  # fmt: skip


def refuse_link(path: Path) -> None:
    """Refuse to write where a link, a device or a folder lies."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # nothing there; what else is wrong, writing finds out
    if not stat.S_ISREG(mode):
        raise UserError(f"{path} cannot be written: it is no file, but {_kind(mode)}", next_step="name another file")


def writable(path: Path, mode: str) -> BinaryIO:
    """The file itself, opened: "wb", "xb", "ab" or "a+b". An OSError is the caller's to explain."""
    refuse_link(path)
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))  # type: ignore[return-value]


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file that the user named."""
    with writable(checked_path(path), "wb") as file:
        file.write(text.encode())


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISLNK, "a symbolic link"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"))
    return next((words for test, words in kinds if test(mode)), "a device or a socket")
