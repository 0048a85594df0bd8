"""A board that loses its power: what it does until then, what its flash holds, and how it goes on.

A trial is a program in a folder of its own, whose flash.bin outlasts every loss of power. Copies of the flash are
checked by a reader of its own, which shares no code with checkpoint.c.
"""

from __future__ import annotations

import random
import re
import shutil
import struct
import subprocess
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgetrain.firmware.build import build, load_project
from edgetrain.firmware.emulate import command, write_batches
from tests.firmware.firmware_nets import Exported

CUT = 9  # the exit code of a trial whose power was cut
COMMIT, LINE_BYTES, PAGE_BYTES = 0x20C0DE01, 64, 256


@dataclass(frozen=True)
class Ended:
    code: int
    steps_before: int = -1
    trained: bytes = b""


@dataclass
class Trial:
    """where: the folder it runs in. words: its command. steps: in batches.bin."""

    where: Path
    words: list[str]
    slot_bytes: int
    page_bytes: int

    @property
    def flash(self) -> Path:
        return self.where / "flash.bin"

    def run(self, steps: int, cut: tuple[int, int] | None = None) -> Ended:
        """cut: the number of the write to flash in which the power goes, and a seed."""
        self.prepare(steps, cut)
        done = subprocess.run(self.words, cwd=self.where, capture_output=True)
        return self.ended(done.returncode)

    def prepare(self, steps: int, cut: tuple[int, int] | None = None) -> None:
        with (self.where / "batches.bin").open("r+b") as file:
            file.seek(8)
            file.write(struct.pack("<I", steps))
        (self.where / "trial.bin").write_bytes(struct.pack("<II", *(cut or (0, 0))))

    def ended(self, code: int) -> Ended:
        if code:
            return Ended(code)
        before = struct.unpack("<IIII", (self.where / "report.bin").read_bytes())[3]
        return Ended(code, before, (self.where / "trained.bin").read_bytes())

    def writes_of_a_save(self) -> int:
        """Pages that are erased and words that are programmed."""
        n_bytes: int = struct.unpack_from("<IIII", self.flash.read_bytes(), LINE_BYTES)[2]
        lines = 2 + -(-n_bytes // LINE_BYTES)
        return self.slot_bytes // self.page_bytes + lines * LINE_BYTES // 4

    def whole(self) -> list[bool | None]:
        """For each slot: its copy is whole; None: not committed."""
        data = self.flash.read_bytes()
        return [_whole(data[at : at + self.slot_bytes]) for at in (0, self.slot_bytes)]


def _whole(slot: bytes) -> bool | None:
    if struct.unpack_from("<I", slot)[0] != COMMIT:
        return None
    _, _, n_bytes, checksum = struct.unpack_from("<IIII", slot, LINE_BYTES)
    data = slot[2 * LINE_BYTES : 2 * LINE_BYTES + n_bytes]
    return zlib.crc32(data, zlib.crc32(slot[LINE_BYTES : LINE_BYTES + 12])) == int(checksum)


def trial(exported: Exported, steps: int, where: Path, changes: Iterable[tuple[str, str]] = ()) -> Trial:
    """The project with a flash that can be cut off, built in a copy. changes: of the text of checkpoint.c.

    On Linux the pages of the file are made smaller, so that a slot has many.
    """
    project = shutil.copytree(exported.project.folder, where / "fw", ignore=shutil.ignore_patterns("build"))
    driver, keeper = project / "board/flash_file.c", project / "checkpoint.c"
    driver.write_text("#define FLASH_TRIALS 1\n" + driver.read_text())
    text = keeper.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    keeper.write_text(text)
    layout = project / "board/flash_layout.h"
    described = load_project(project)
    if not described["is_board"]:
        layout.write_text(layout.read_text().replace("PAGE_BYTES 4096u", f"PAGE_BYTES {PAGE_BYTES}u"))
    words = command(described, build(project).program.resolve())
    write_batches(where / "batches.bin", described, exported.batches(steps))
    slot, page = (int(re.findall(rf"FLASH_{what}_BYTES (\d+)", layout.read_text())[0]) for what in ("SLOT", "PAGE"))
    return Trial(where, words, slot, page)


def uninterrupted(device: Trial, steps: int) -> list[bytes]:
    """Everything that changes, after 0, 1, 2, … steps without a loss of power."""
    expected = []
    for n in range(steps + 1):
        device.flash.unlink(missing_ok=True)
        ended = device.run(n)
        assert ended.code == 0
        expected.append(ended.trained)
    return expected


def first_wrong(
    device: Trial, expected: list[bytes], cuts: Iterable[int], *, saves: int, to_end: int = 1
) -> str | None:
    """Cut the power in the midst of a save, the one after so many others, at each of these writes. What is wrong after
    the first of them that something is wrong after; None where all is well.

    to_end: every so many trials go on to the last step.
    """
    device.flash.unlink(missing_ok=True)
    if saves:
        device.run(saves)
    before = device.flash.read_bytes() if saves else b""
    for cut in cuts:
        device.flash.write_bytes(before)
        said = _wrong(device, expected, cut, saves, cut % to_end == 0)
        if said is not None:
            return f"cut at write {cut}: {said}"
    return None


def _wrong(device: Trial, expected: list[bytes], cut: int, saves: int, to_end: bool) -> str | None:
    writes = device.writes_of_a_save() if saves else cut + LINE_BYTES
    step = saves + (cut > writes - LINE_BYTES // 4 + 1)  # the commit word is the first of the last line
    code = device.run(saves + 1, (cut, cut)).code
    if code != CUT:
        return f"exit code {code}"
    if False in device.whole():
        return "a copy is committed and not whole"
    restarted = device.run(0)
    if restarted.code or restarted.steps_before != step:
        return f"exit code {restarted.code}, starts from step {restarted.steps_before}"
    if restarted.trained != expected[step]:
        return "it does not start from a whole copy"
    if to_end and device.run(len(expected) - 1).trained != expected[-1]:
        return "it does not end as an uninterrupted run does"
    return None


def killed_at_random(
    device: Trial, expected: list[bytes], *, longest_s: float, least: int, draw: random.Random
) -> tuple[int, int]:
    """Kill the program, start it again, and so on until it was killed so often, and within a save once; then let it
    end. How often it was killed, and how often within a save."""
    steps, kills, within = len(expected) - 1, 0, 0
    while kills < least or (not within and kills < 20 * least):
        device.prepare(steps)
        process = subprocess.Popen(device.words, cwd=device.where, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(0, longest_s))
        process.kill()
        if process.wait() == 0:
            device.flash.unlink()  # it was done: from the start again
            continue
        kills += 1
        if not device.flash.exists():
            continue
        if device.flash.stat().st_size == 2 * device.slot_bytes:
            states = device.whole()
            within += None in states and True in states
        restarted = device.run(0)
        assert restarted.code == 0
        assert restarted.trained == expected[restarted.steps_before]
    assert device.run(steps).trained == expected[-1]
    return kills, within
