"""Asking a Raspberry Pi's firmware: what `vcgencmd` does, without starting a process for each question.

    /dev/vcio  ◀── ioctl ──  one message:  size · request · tag 0x30080 · room · 0 · error · text … · end
               ── answer ─▶  the same message with the text replaced

So a question costs one system call. Where /dev/vcio cannot be opened, vcgencmd is started for each question, which
costs a process every time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

Ioctl = Callable[[int, int, bytearray], object]

_TAG, _ROOM = 0x30080, 1024
_HEAD = struct.Struct("=6I")  # size, request, tag, room, length of the answer, error
_REQUEST = (3 << 30) | (struct.calcsize("P") << 16) | (100 << 8)  # _IOWR(100, 0, char *)


def message(command: str) -> bytearray:
    """The message that asks for the answer to a command."""
    said = command.encode()
    size = _HEAD.size + _ROOM + 4
    return bytearray(_HEAD.pack(size, 0, _TAG, _ROOM, 0, 0) + said.ljust(_ROOM, b"\0") + b"\0\0\0\0")


def answer(data: bytes) -> str | None:
    """The text of an answer; None where the firmware knows no such command."""
    error = _HEAD.unpack_from(data)[5]
    said = bytes(data[_HEAD.size : _HEAD.size + _ROOM]).split(b"\0", 1)[0].decode(errors="replace")
    return said if error == 0 and said else None


def _ioctl(handle: int, request: int, data: bytearray) -> object:
    import fcntl

    return fcntl.ioctl(handle, request, data)


class Firmware:
    """Open for questions. Each answer is None where the firmware does not answer now."""

    def __init__(self, device: Path, ioctl: Ioctl = _ioctl) -> None:
        self.device, self._ioctl, self._handle = device, ioctl, -1

    def open(self) -> None:
        if self._handle < 0:
            with contextlib.suppress(OSError):
                self._handle = os.open(self.device, os.O_RDONLY | os.O_CLOEXEC)

    def ask(self, command: str) -> str | None:
        self.open()
        if self._handle < 0:
            return _run(command)
        data = message(command)
        try:
            self._ioctl(self._handle, _REQUEST, data)
        except OSError:
            self.close()
            return None
        return answer(bytes(data))

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _run(command: str) -> str | None:
    program = shutil.which("vcgencmd")
    if program is None:
        return None
    try:
        done = subprocess.run([program, *command.split()], capture_output=True, text=True, timeout=2, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    # It ends with 0 even where the firmware does not know the command.
    return None if done.stdout.startswith("error=") else done.stdout


def fix(root: Path) -> str | None:
    """What lets this user ask, where the device is there and closed."""
    device = root / "dev/vcio"
    if not device.exists() or os.access(device, os.R_OK):
        return None
    return "sudo usermod -aG video $USER, then log in again"
