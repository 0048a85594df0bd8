"""What the system says of this machine and of a process on it. Loads neither PyTorch nor NumPy.

In:  files of /proc, under a root folder that tests replace.
Out: names, bytes, counts; None where the system does not say.
"""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

_MAX_DIGITS = 20  # of a number that a kernel writes


def processor_name(root: Path = Path("/")) -> str | None:
    """The board, where there is one (ARM boards name themselves better than their cores), else the processor."""
    with contextlib.suppress(OSError):
        board = (root / "proc/device-tree/model").read_text(errors="replace").strip("\0 \n")
        if board:
            return board
    with contextlib.suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_bytes(field: str, pid: int | None = None) -> int | None:
    """A field of /proc/<pid>/status in bytes, of this process by default: VmRSS (resident now), VmHWM (its peak), …"""
    with contextlib.suppress(OSError):
        kilobytes = amount(Path(f"/proc/{pid or 'self'}/status").read_bytes(), f"{field}:".encode())
        return None if kilobytes is None else kilobytes * 1024
    return None


def amount(data: bytes, key: bytes) -> int | None:
    """The number after a word at the start of a line: quicker than to split a long file into all its lines."""
    _, match, rest = (b"\n" + data).partition(b"\n" + key)
    word = rest.split(None, 1)[:1] if match and rest[:1].isspace() else []
    return int(word[0]) if word and word[0].isdigit() and len(word[0]) <= _MAX_DIGITS else None
