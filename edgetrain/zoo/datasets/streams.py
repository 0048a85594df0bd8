"""Reading files that are not trusted: plain, .gz or .xz, as a stream and never past a limit.

In: a path and the most bytes it may hold once unpacked. Out: its bytes.
Promised: nothing is written to disk; memory stays within the limit plus a chunk, whatever a file would unpack
to; what is wrong with the file is a UserError that names it.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

from edgetrain.errors import UserError
from edgetrain.files import require_regular

CHUNK_BYTES = 1 << 20
PACKED_BYTES = 4 << 30  # of any file of a data set, packed or not
# `xz -9` needs 65 MiB to unpack; a header may ask for 4 GiB.
XZ_MEMORY_BYTES = 128 << 20


def head(path: Path, count: int) -> bytes:
    """The first `count` unpacked bytes of the file, or fewer where it ends before."""
    start = b""
    with closing(_chunks(path)) as chunks:
        for chunk in chunks:
            start += chunk
            if len(start) >= count:
                break
    return start[:count]


def whole(path: Path, limit_bytes: int, *, limit_is: str) -> bytearray:
    """All unpacked bytes; a UserError once they are more than `limit_bytes`, which `limit_is` explains."""
    content = bytearray()
    with closing(_chunks(path)) as chunks:
        for chunk in chunks:
            content += chunk
            if len(content) > limit_bytes:
                raise UserError(
                    f"{path} is too long",
                    expected=f"at most {limit_bytes:,} bytes ({limit_is})",
                    received="more than that, unpacked",
                )
    return content


def _chunks(path: Path) -> Generator[bytes, None, None]:
    """The unpacked bytes, a chunk at a time; the suffix says how they are packed."""
    suffix = path.suffix.lower()
    require_regular(path, limit_bytes=PACKED_BYTES)
    try:
        with path.open("rb") as file:
            if suffix == ".gz":
                yield from _gz_chunks(file)
            elif suffix == ".xz":
                yield from _xz_chunks(file)
            else:
                yield from iter(lambda: file.read(CHUNK_BYTES), b"")
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        packed = suffix in (".gz", ".xz")
        raise UserError(
            f"{path} cannot be read{' to its end' if packed else ''}: {error}",
            expected=f"a complete {suffix[1:]} file" if packed else "a readable file",
            next_step="the file may be cut off or damaged: fetch it again",
        ) from error


def _gz_chunks(file: BinaryIO) -> Generator[bytes, None, None]:
    with gzip.GzipFile(fileobj=file) as unpacked:
        yield from iter(lambda: unpacked.read(CHUNK_BYTES), b"")


def _xz_chunks(file: BinaryIO) -> Generator[bytes, None, None]:
    # lzma.open would be shorter, but takes no limit on the memory that a file's header asks for.
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES)
    while not unpacker.eof:
        packed = file.read(CHUNK_BYTES) if unpacker.needs_input else b""
        if unpacker.needs_input and not packed:
            raise EOFError("the file ends before the end of its xz stream")
        yield unpacker.decompress(packed, CHUNK_BYTES)
    if unpacker.unused_data or file.read(1):
        raise lzma.LZMAError("there are bytes after the end of the xz stream")
