"""Files of batches that are not what they should be: the program says so with its code, and reads nothing past them.

On this machine it runs with the address and undefined-behaviour sanitizers, in the emulator behind the MPU's fence.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgetrain.firmware.build import build, load_project
from edgetrain.firmware.emulate import command, write_batches
from tests.firmware.firmware_nets import NETS, make, plain_sgd

HEADER, IMAGES, LABELS = 16, 4 * 12 * 4, 4 * 4  # bytes: of the header, and of each part of a batch
BATCH = IMAGES + LABELS
PLACES = {
    "no header": 0, "in the magic": 3, "in the header": 15, "after the header": HEADER, "in a number": HEADER + 1,
    "in the first batch": HEADER + 100, "before its labels": HEADER + IMAGES, "in its labels": HEADER + IMAGES + 5,
    "after the first batch": HEADER + BATCH, "in the second": HEADER + BATCH + 8,
    "before its last labels": HEADER + 2 * BATCH - LABELS, "its last byte": HEADER + 2 * BATCH - 1,
}  # fmt: skip


@dataclass(frozen=True)
class Program:
    words: list[str]
    whole: bytes  # two batches
    where: Path

    def run(self, content: bytes) -> tuple[int, bytes]:
        """The exit code, and the trained weights: nothing where none were written."""
        trained = self.where / "trained.bin"
        trained.unlink(missing_ok=True)
        (self.where / "batches.bin").write_bytes(content)
        done = subprocess.run(self.words, cwd=self.where, capture_output=True, timeout=60)
        assert b"Sanitizer" not in done.stderr
        assert b"runtime error" not in done.stderr
        return done.returncode, trained.read_bytes() if trained.exists() else b""


@pytest.fixture(scope="module", params=["linux-x86_64", "nrf52840"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    board = request.param != "linux-x86_64"
    if board and (shutil.which("qemu-system-arm") is None or shutil.which("arm-none-eabi-gcc") is None):
        pytest.skip("qemu-system-arm or arm-none-eabi-gcc is not installed")
    where = tmp_path_factory.mktemp("batches")
    exported = make(NETS["mlp"], where / "fw", optimizer=plain_sgd, target=request.param)
    described = load_project(where / "fw")
    built = build(where / "fw", "plain" if board else "sanitize")
    write_batches(where / "whole.bin", described, exported.batches(2))
    return Program(command(described, built.program.resolve()), (where / "whole.bin").read_bytes(), where)


def header(what: int = 0, batches: int = 2, batch_bytes: int = BATCH, magic: bytes = b"ETB1") -> bytes:
    return struct.pack("<4sIII", magic, what, batches, batch_bytes)


def test_a_file_that_ends_early_anywhere_is_refused(program: Program) -> None:
    assert program.whole[:HEADER] == header()
    code, trained = program.run(program.whole)
    assert (code, len(trained)) == (0, 4 * 147)
    for place, at in PLACES.items():
        assert program.run(program.whole[:at]) == (2 if at < HEADER else 3, b""), place
    (program.where / "batches.bin").unlink()
    assert subprocess.run(program.words, cwd=program.where, capture_output=True).returncode == 2


def test_a_header_that_is_wrong_is_refused(program: Program) -> None:
    data = program.whole[HEADER:]
    wrong = (
        header(magic=b"ETB2"), header(magic=b"\0\0\0\0"), header(what=2), header(what=2**32 - 1),
        header(batch_bytes=BATCH - 1), header(batch_bytes=BATCH + 4), header(batch_bytes=0),
    )  # fmt: skip
    for prefix in wrong:
        assert program.run(prefix + data) == (2, b""), prefix
    for batches in (3, 2**31, 2**32 - 1):  # more than there are
        assert program.run(header(batches=batches) + data) == (3, b"")


def test_what_follows_the_batches_that_the_header_counts_is_not_read(program: Program) -> None:
    result = program.run(header(batches=1) + program.whole[HEADER : HEADER + BATCH])
    assert result[0] == 0
    assert program.run(header(batches=1) + program.whole[HEADER:]) == result
    assert program.run(header(batches=1) + program.whole[HEADER:] + b"\xff" * 1000) == result
    assert program.run(header(batches=0))[0] == 0


def test_a_label_that_is_no_class_is_refused(program: Program) -> None:
    for place in (IMAGES, BATCH - 4, BATCH + IMAGES, 2 * BATCH - 4):
        for label in (3, -1, 2**31 - 1, -(2**31)):
            content = bytearray(program.whole)
            struct.pack_into("<i", content, HEADER + place, label)
            assert program.run(bytes(content)) == (4, b""), (place, label)
