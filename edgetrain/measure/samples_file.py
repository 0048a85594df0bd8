"""The files of a sampling run as the sampler writes them; `samples.py` reads them back.

    samples.bin:  one line of JSON, the header (`header`), then blocks
        block:    int32 source, int32 rows, rows × (int64 before_ns, int64 after_ns, float64 a channel), little-endian
        A value that was not there is NaN. A block is written once a second, so a killed sampler loses one second.
    samples.json: `Summary`, how the sampling went

Loads neither PyTorch nor NumPy: the sampler's process does without.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from edgetrain.measure.sensors.source import Source

FORMAT, SCHEMA = "edgetrain samples", 1
SAMPLES, SUMMARY = "samples.bin", "samples.json"
MAX_NAME = 200  # characters


@dataclass(frozen=True)
class Read:
    """How one source was read: every so many ticks (at the end), with so many CPU seconds a read (at the start)."""

    name: str
    every: int
    cost_s: float
    reads: int
    failed: int


@dataclass(frozen=True)
class Summary:
    """How the sampling went.

    ended: "asked", "parent ended", "disk" (it could not write on), "failed" or "killed". None: not known, because the
        sampler was killed.
    core_share: CPU seconds of the sampler over the seconds it sampled.
    wall_offset_*_ns: wall clock minus monotonic clock.
    scheduling: "real time", "preferred" or "as any process": what the system let it have.
    notes: what the reader of the record must know, as sentences.
    """

    ended: str
    elapsed_s: float | None = None
    ticks_due: int | None = None
    ticks_delivered: int | None = None
    lateness_p50_s: float | None = None
    lateness_p95_s: float | None = None
    lateness_max_s: float | None = None
    cpu_s: float | None = None
    core_share: float | None = None
    startup_cpu_s: float | None = None
    resident_bytes: int | None = None
    wall_offset_start_ns: int | None = None
    wall_offset_end_ns: int | None = None
    keeps_up: bool | None = None
    scheduling: str | None = None
    sources: tuple[Read, ...] = ()
    notes: tuple[str, ...] = ()


class File:
    """A file that keeps its whole blocks when a write fails."""

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self.whole = 0

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self.handle, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.handle, self.whole)
            raise
        self.whole += len(data)

    def close(self) -> None:
        os.close(self.handle)


def header(sources: Sequence[Source], period_ns: int, now_ns: int, wall_ns: int) -> bytes:
    """The first line of samples.bin."""
    names = distinct([source.name for source in sources])
    data = {
        "format": FORMAT,
        "schema": SCHEMA,
        "clock": "monotonic",
        "period_ns": period_ns,
        "started_ns": now_ns,
        "wall_offset_ns": wall_ns - now_ns,
        "sources": [{"name": name, "channels": _channels(source)} for name, source in zip(names, sources, strict=True)],
    }
    return json.dumps(data, allow_nan=False).encode() + b"\n"


def _channels(source: Source) -> list[dict[str, object]]:
    names = distinct([channel.name for channel in source.channels])
    renamed = dict(zip([channel.name for channel in source.channels], names, strict=True))
    return [
        {**asdict(channel), "name": name, "part_of": renamed.get(channel.part_of or "", channel.part_of)}
        for channel, name in zip(source.channels, names, strict=True)
    ]


def distinct(names: Sequence[str]) -> list[str]:
    """The names as a file may hold them: hardware gives itself the strangest ones, and two chips the same one."""
    written: list[str] = []
    for name in names:
        plain = "".join(c if c.isprintable() and c not in "/\\" else "_" for c in name)[: MAX_NAME - 10] or "_"
        count = sum(1 for other in written if other == plain or other.startswith(f"{plain}#"))
        written.append(f"{plain}#{count + 1}" if count else plain)
    return written
