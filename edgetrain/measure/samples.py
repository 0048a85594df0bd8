"""Samples read back: what the sampler wrote, as arrays.

In:  samples.bin and samples.json of a run folder, from anywhere: nothing in them is trusted.
Out: `Samples`, one `Series` a source: when each reading began and ended, and a column of values a channel.

Promised: a file that was cut off is read up to there (`cut_off`), and so is one whose end a lost battery has damaged;
a file of a newer version, or one whose header is not ours, is a `UserError`. A value that was not there is NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt

from edgetrain import saved
from edgetrain.errors import UserError
from edgetrain.measure.samples_file import FORMAT, MAX_NAME, SAMPLES, SCHEMA, SUMMARY, Read, Summary
from edgetrain.measure.sensors.source import Channel, Kind, Unit
from edgetrain.measure.series import BLOCK
from edgetrain.saved import Fields, read_object, read_whole

Floats = npt.NDArray[np.float64]
Times = npt.NDArray[np.int64]

# Far more than any machine has: what is above was not written by a sampler.
MAX_SOURCES, MAX_CHANNELS, MAX_HEADER_BYTES = 1000, 20_000, 8 << 20
_MAX_PERIOD_NS = 3600 * 10**9


@dataclass(frozen=True)
class Series:
    """What one source said.

    before_ns, after_ns: of the monotonic clock, around each reading. values: a row a reading, a column a channel, NaN
    where there was none.
    """

    name: str
    channels: tuple[Channel, ...]
    before_ns: Times
    after_ns: Times
    values: Floats

    def column(self, name: str) -> tuple[Channel, Floats]:
        """One channel, by its name."""
        for place, channel in enumerate(self.channels):
            if channel.name == name:
                return channel, self.values[:, place]
        raise UserError(
            f"the source {self.name} has no channel {name!r}", expected=_list([c.name for c in self.channels])
        )

    @property
    def at_ns(self) -> Times:
        """The middle of each reading: the best guess of when it was true."""
        return cast(Times, self.before_ns + (self.after_ns - self.before_ns) // 2)


@dataclass(frozen=True)
class Samples:
    """All that a sampler wrote. cut_off: the file does not end where a block ends."""

    period_ns: int
    started_ns: int
    wall_offset_ns: int
    series: tuple[Series, ...]
    cut_off: bool

    def source(self, name: str) -> Series:
        """One source, by its name."""
        for series in self.series:
            if series.name == name:
                return series
        raise UserError(f"the samples have no source {name!r}", expected=_list([series.name for series in self.series]))


def read_samples(folder: Path | str) -> Samples:
    """Of a run folder."""
    file = Path(folder) / SAMPLES
    data = read_whole(file)
    end = data.find(b"\n", 0, MAX_HEADER_BYTES)
    if end < 0:
        raise UserError(f"{file} holds no samples of edgetrain", received=f"{len(data)} bytes without a header")
    head = _header(file, data[:end])
    sources = _sources(head)
    blocks, cut_off = _blocks(data, end + 1, [_row(channels) for _, channels in sources])
    return Samples(
        _whole(head, "period_ns", 1, _MAX_PERIOD_NS),
        _whole(head, "started_ns", 0, 1 << 62),
        _whole(head, "wall_offset_ns", -(1 << 62), 1 << 62),
        tuple(_series(*source, rows) for source, rows in zip(sources, blocks, strict=True)),
        cut_off,
    )


def read_summary(folder: Path | str) -> Summary:
    """How the sampler of a run folder fared."""
    data = read_object(Path(folder) / SUMMARY)
    kinds: dict[str, type] = {"ended": str, "keeps_up": bool, "ticks_due": int, "ticks_delivered": int}
    kinds |= {"scheduling": str, "resident_bytes": int, "wall_offset_start_ns": int, "wall_offset_end_ns": int}
    values: dict[str, Any] = {"ended": data.get("ended", str)}
    for field in fields(Summary):
        if field.name not in ("ended", "sources", "notes"):
            values[field.name] = data.maybe(field.name, kinds.get(field.name, float))
    return Summary(**values, sources=tuple(map(_read, data.each("sources"))), notes=data.texts("notes"))


def _read(data: Fields) -> Read:
    counts = (data.get("reads", int), data.get("failed", int))
    return Read(data.get("name", str), data.get("every", int), data.get("cost_s", float), *counts)


# The header


def _header(file: Path, line: bytes) -> Fields:
    try:
        data = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} holds no samples of edgetrain", received=saved.in_words(error)[:200]) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"{file} holds no samples of edgetrain", expected=f"a header of the format '{FORMAT}'")
    head = Fields(file, data)
    head.schema(SCHEMA)
    head.choice("clock", ("monotonic",))
    return head


def _sources(head: Fields) -> list[tuple[str, tuple[Channel, ...]]]:
    sources = [_source(entry) for entry in head.each("sources", MAX_SOURCES)]
    _distinct(head, "sources", [name for name, _ in sources])
    return sources


def _source(data: Fields) -> tuple[str, tuple[Channel, ...]]:
    channels = tuple(map(_channel, data.each("channels", MAX_CHANNELS)))
    _distinct(data, "channels", [channel.name for channel in channels])
    return _name(data, "name"), channels


def _channel(data: Fields) -> Channel:
    plus_minus = data.maybe("plus_minus", float)
    for name, value in (("least_window_s", data.get("least_window_s", float)), ("plus_minus", plus_minus)):
        if value is not None and not 0 <= value <= 1e9:
            raise data.wrong(name, "a number of 0 and more", repr(value))
    return Channel(
        name=_name(data, "name"),
        unit=cast(Unit, data.choice("unit", get_args(Unit))),
        counter=data.get("counter", bool),
        kind=cast(Kind, data.choice("kind", get_args(Kind))),
        least_window_s=float(data.get("least_window_s", float)),
        plus_minus=plus_minus,
        part_of=None if data.values.get("part_of", ...) is None else _name(data, "part_of"),
    )


def _name(data: Fields, field: str) -> str:
    """Names become keys, lines of a table, perhaps files: nothing in one may lead anywhere."""
    name = data.get(field, str)
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or set(name) & set("/\\"):
        raise data.wrong(field, f"1 to {MAX_NAME} printable characters without slashes", repr(name[:60]))
    return name


def _distinct(data: Fields, field: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise data.wrong(field, "names that differ", f"{max(names, key=names.count)!r} more than once")


def _whole(head: Fields, name: str, least: int, most: int) -> int:
    value = head.get(name, int)
    if not least <= value <= most:
        raise head.wrong(name, f"{least} to {most}", str(value)[:60])
    return value


# Blocks


def _row(channels: tuple[Channel, ...]) -> np.dtype[np.void]:
    return np.dtype([("before", "<i8"), ("after", "<i8"), ("values", "<f8", (len(channels),))])


def _blocks(data: bytes, place: int, rows: Sequence[np.dtype[np.void]]) -> tuple[list[list[Any]], bool]:
    """The rows of each source, block by block; True if something stands there that is no whole block."""
    blocks: list[list[Any]] = [[] for _ in rows]
    while place + BLOCK.size <= len(data):
        number, count = BLOCK.unpack_from(data, place)
        if not (0 <= number < len(rows) and count > 0):
            return blocks, True
        place += BLOCK.size
        whole = min(count, (len(data) - place) // rows[number].itemsize)
        blocks[number].append(np.frombuffer(data, rows[number], whole, place))
        if whole < count:
            return blocks, True
        place += whole * rows[number].itemsize
    return blocks, place < len(data)


def _series(name: str, channels: tuple[Channel, ...], blocks: list[Any]) -> Series:
    rows = np.concatenate([np.empty(0, _row(channels)), *blocks])
    before, after = rows["before"].astype(np.int64), rows["after"].astype(np.int64)
    good = _in_order(before, after)
    values = np.where(np.isfinite(rows["values"]), rows["values"], math.nan).astype(np.float64)
    return Series(name, channels, before[:good], after[:good], values.reshape(len(rows), len(channels))[:good])


def _in_order(before: Times, after: Times) -> int:
    """How many rows there are before time runs backwards, which it does only in a damaged file."""
    bad = (after < before) | (before < 0)
    bad[1:] |= before[1:] < after[:-1]
    return int(np.argmax(bad)) if bad.any() else len(bad)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") if names else "none"
