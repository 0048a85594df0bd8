"""What a machine's files held, moment by moment: a recording, to be read by the same sources as the machine itself.

    time_s      battery/current_now   battery/voltage_now   cpu0/…/scaling_cur_freq
    0.000       -181152               4320301               1785600
    0.519       -510253               4282459               1785600
    …

In:  the text that the sampler on a phone writes (`parse`), or published traces (`benchmarks/replay.py`).
Out: `Recording`; `Stage` puts its moments one after the other under a folder, where sources read them.
A text that was cut off in the middle is read up to its last whole line.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from edgetrain.errors import UserError

FORMAT = "edgetrain-samples 1"
MISSING = "?"
_MAX_FILES = 4096


@dataclass(frozen=True)
class Recording:
    """
    times_s: of one clock that does not jump; rising.
    files: path under the root → what it held at each time; None where it could not be read.
    constant: files that do not change (types, labels).
    """

    name: str
    times_s: tuple[float, ...]
    files: Mapping[str, tuple[str | None, ...]]
    constant: Mapping[str, str] = field(default_factory=dict)


class Stage:
    """A folder in which a recording is played: `show(n)` makes its files those of moment n."""

    def __init__(self, root: Path, recording: Recording) -> None:
        self.root, self._recording = root, recording
        self._shown: dict[str, str | None] = {}
        for path, content in recording.constant.items():
            self._write(path, content)

    def show(self, n: int) -> None:
        for path, contents in self._recording.files.items():
            if path not in self._shown or self._shown[path] != contents[n]:
                self._write(path, contents[n])
                self._shown[path] = contents[n]

    def _write(self, path: str, content: str | None) -> None:
        """Into the same file, as sources keep theirs open; one that is gone is emptied first, for the same reason."""
        file = self.root / path
        if content is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content + "\n")
        elif file.exists():
            file.write_text("")
            file.unlink()


def parse(text: str, name: str) -> Recording:
    """From the lines of the sampler: its format, constant files (#path\\tcontent), a header, one line a sample."""
    lines = text.split("\n")[:-1]  # what follows the last line feed was cut off
    if not lines or lines[0].strip() != FORMAT:
        raise UserError(
            f"{name} was not written by edgetrain's sampler",
            expected=f"a first line {FORMAT!r}",
            received=repr(lines[0][:60]) if lines else "nothing",
        )
    constant = dict(line[1:].split("\t", 1) for line in lines[1:] if line.startswith("#") and "\t" in line)
    rows = [line.rstrip("\r").split("\t") for line in lines[1:] if not line.startswith("#")]
    if not rows or rows[0][:2] != ["uptime_s", "wall_s"]:
        raise UserError(f"{name} has no header line", expected="uptime_s, wall_s and the files' paths")
    paths, rows = rows[0][2:], rows[1:]
    for path in (*paths, *constant):
        _checked(path, name)
    if len(paths) > _MAX_FILES or any(len(row) != len(paths) + 2 for row in rows):
        raise UserError(f"{name} has lines of different lengths", expected=f"{len(paths) + 2} values in each line")
    columns = [tuple(None if row[n + 2] == MISSING else row[n + 2] for row in rows) for n in range(len(paths))]
    return Recording(name, _times(rows, name), dict(zip(paths, columns, strict=True)), constant)


def _checked(path: str, name: str) -> None:
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or not path.isprintable():
        raise UserError(f"{name} names a file outside of its root", received=repr(path[:80]))


def _times(rows: list[list[str]], name: str) -> tuple[float, ...]:
    """Seconds since the start, by the finer of two clocks where both agree.

    The wall clock has microseconds and may be set; the time since the start has 10 ms and may not.
    """
    try:
        coarse = [float(row[0]) for row in rows]
        fine = [None if row[1] == MISSING else float(row[1]) for row in rows]
    except ValueError as error:
        raise UserError(f"{name} has a time that is no number", received=str(error)) from error
    times = coarse
    known = [value for value in fine if value is not None]
    if known and len(known) == len(coarse):
        offsets = [wall - up for wall, up in zip(known, coarse, strict=True)]
        middle = statistics.median(offsets)
        if max(abs(offset - middle) for offset in offsets) <= 0.02:
            times = [wall - middle for wall in known]
    if any(later < earlier for earlier, later in itertools.pairwise(times)):
        raise UserError(f"{name} has times that go backwards")
    return tuple(times)
