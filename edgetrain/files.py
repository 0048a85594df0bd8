"""Files and folders that somebody names: read within limits, and never written through a link.

In:  a path from outside. Out: its bytes, or a file opened for writing; a `UserError` for what cannot be.
Promised: only regular files are read, so that no device, pipe or socket can hang a command, and never more than a
limit; what is written lands in the named file itself, whole, or nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import stat
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from edgetrain.errors import UserError

TEMPORARY = ".tmp-"  # begins the names of files that are not whole yet
MAX_BYTES = 1 << 30  # of a file that is read whole
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


def require_regular(path: str | os.PathLike[str], what: str = "file", limit_bytes: int = MAX_BYTES) -> Path:
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


def read(path: str | os.PathLike[str], what: str = "file", limit_bytes: int = MAX_BYTES) -> bytes:
    """All bytes of a regular file."""
    path = require_regular(path, what, limit_bytes)
    try:
        with open(path, "rb") as file:
            return file.read(limit_bytes)
    except OSError as error:
        raise UserError(f"the {what} {path} cannot be read", received=error.strerror or str(error)) from error


def plain_json(data: bytes, *, any_number: bool = False) -> Any:
    """JSON as a program writes it: each key once, finite numbers, whole numbers that a machine can hold.

    A ValueError or RecursionError says what is wrong. any_number: leave it to the caller to say which field holds a
    number that is too large.
    """
    numbers: dict[str, Any] = {} if any_number else {"parse_float": finite, "parse_int": _short}
    return json.loads(data.decode(), parse_constant=_no_constant, object_pairs_hook=_each_key_once, **numbers)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.60} stands there twice")
    return data


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


def real(path: str | os.PathLike[str]) -> Path:
    """Where a path leads, as far as it can be followed: `Path.resolve` fails at a link that leads to itself."""
    return Path(os.path.realpath(path))


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


@contextlib.contextmanager
def explained(place: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn an OSError of the block into a UserError that names the place and, on a full disk, the room needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"cannot write {place}: {error.strerror or error}") from error
        need = f"{needed_bytes} bytes" if needed_bytes is not None else "more room"
        raise UserError(
            f"the disk is full: cannot write {place}",
            expected=f"{need} free",
            received=f"{_free_bytes(place)} bytes free",
            next_step="free some room, or name a folder on another disk; what was there before is intact",
        ) from error


def write_atomic(path: str | os.PathLike[str], content: bytes | Iterable[bytes]) -> None:
    """Write a file whole, or leave what was there before.

    That holds after power loss and on a full disk, too. content: at once or in parts.
    """
    path = checked_path(path)
    refuse_link(path)
    # Cut to what a name may have; of one that was killed, the next removes what it left behind.
    temporary = path.with_name(os.fsdecode(os.fsencode(f"{TEMPORARY}{path.name}")[:_NAME_BYTES]))
    parts = [content] if isinstance(content, bytes) else content
    with explained(path, len(content) if isinstance(content, bytes) else None):
        try:
            temporary.unlink(missing_ok=True)
            with writable(temporary, "xb") as out:
                for part in parts:
                    out.write(part)
                out.flush()
                if path.exists():
                    os.fchmod(out.fileno(), stat.S_IMODE(path.stat().st_mode))
                os.fsync(out.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    write_atomic(path, text.encode())


def write_cache(path: Path, text: str) -> None:
    """Write what can be computed again, whole or not at all.

    Several processes may do so at once. Where there is no room for it, it is not kept.
    """
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Return when a file or folder is on the disk itself."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free_bytes(place: Path) -> int:
    existing = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISLNK, "a symbolic link"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"))
    return next((words for test, words in kinds if test(mode)), "a device or a socket")
