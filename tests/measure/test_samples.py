"""Reading samples back: cut off anywhere, from a newer version, or made by somebody who means harm."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import UserError
from edgetrain.measure.samples import Samples, read_samples, read_summary

CHANNEL = {
    "name": "a", "unit": "J", "counter": True, "kind": "measured", "least_window_s": 0.0, "plus_minus": None,
    "part_of": None,
}  # fmt: skip
HEADER: dict[str, Any] = {
    "format": "edgetrain samples", "schema": 1, "clock": "monotonic", "period_ns": 10**7, "started_ns": 5,
    "wall_offset_ns": 77, "sources": [{"name": "one", "channels": [CHANNEL]}, {"name": "two", "channels": []}],
}  # fmt: skip


def rows(*times: int) -> bytes:
    return b"".join(struct.pack("<qqd", t, t + 1, t / 2) for t in times)


def block(number: int, count: int, data: bytes) -> bytes:
    return struct.pack("<ii", number, count) + data


BODY = block(0, 2, rows(10, 20)) + block(1, 1, struct.pack("<qq", 11, 12)) + block(0, 1, rows(30))


def written(folder: Path, body: bytes = BODY, header: bytes | None = None, **changes: Any) -> Path:
    line = json.dumps({**HEADER, **changes}).encode() if header is None else header
    (folder / "samples.bin").write_bytes(line + b"\n" + body)
    return folder


def test_blocks_of_a_source_are_joined(tmp_path: Path) -> None:
    samples = read_samples(written(tmp_path))
    one = samples.source("one")
    assert (samples.period_ns, samples.started_ns, samples.wall_offset_ns, samples.cut_off) == (10**7, 5, 77, False)
    assert one.before_ns.tolist() == [10, 20, 30]
    assert one.after_ns.tolist() == [11, 21, 31]
    assert one.at_ns.tolist() == [10, 20, 30]
    channel, values = one.column("a")
    assert (channel.unit, channel.counter, values.tolist()) == ("J", True, [5, 10, 15])
    assert samples.source("two").values.shape == (1, 0)
    with pytest.raises(UserError, match="no source 'three'"):
        samples.source("three")
    with pytest.raises(UserError, match="no channel 'b'"):
        one.column("b")


@pytest.mark.parametrize("length", range(len(BODY)))
def test_a_file_that_was_cut_off_is_read_up_to_there(tmp_path: Path, length: int) -> None:
    samples = read_samples(written(tmp_path, BODY[:length]))
    whole = [10, 20, 30]
    found = samples.source("one").before_ns.tolist()
    assert found == whole[: len(found)]
    ends = {0, 8 + 48, 8 + 48 + 8 + 16}
    assert samples.cut_off == (length not in ends)
    assert len(found) >= min(max(0, length - 8) // 24, 2)


@pytest.mark.parametrize(
    "tail",
    [bytes(4096), block(7, 1, rows(40)), block(-1, 1, rows(40)), block(0, 0, b""), block(0, -5, rows(40))],
)
def test_a_damaged_end_is_left_out(tmp_path: Path, tail: bytes) -> None:
    samples = read_samples(written(tmp_path, BODY + tail))
    assert samples.source("one").before_ns.tolist() == [10, 20, 30]
    assert samples.cut_off


def test_a_count_larger_than_the_file_takes_no_memory(tmp_path: Path) -> None:
    samples = read_samples(written(tmp_path, BODY + block(0, 2**31 - 1, rows(40))))
    assert samples.source("one").before_ns.tolist() == [10, 20, 30, 40]
    assert samples.cut_off


@pytest.mark.parametrize("bad", [(25, 26), (40, 39), (-5, 41)])
def test_time_does_not_run_backwards(tmp_path: Path, bad: tuple[int, int]) -> None:
    body = BODY + block(0, 2, struct.pack("<qqd", *bad, 1.0) + rows(50))
    assert read_samples(written(tmp_path, body)).source("one").before_ns.tolist() == [10, 20, 30]


def test_infinite_is_missing(tmp_path: Path) -> None:
    body = block(0, 2, struct.pack("<qqd", 1, 2, float("inf")) + struct.pack("<qqd", 3, 4, float("nan")))
    assert np.isnan(read_samples(written(tmp_path, body)).source("one").values).all()


def changed(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": "one", "channels": [{**CHANNEL, **changes}]}]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": 2}, "schema 2"),
        ({"schema": "1"}, "'schema'"),
        ({"clock": "wall"}, "'clock'"),
        ({"period_ns": 0}, "'period_ns'"),
        ({"period_ns": 10**30}, "'period_ns'"),
        ({"period_ns": 1.5}, "'period_ns'"),
        ({"started_ns": -1}, "'started_ns'"),
        ({"wall_offset_ns": 2**80}, "'wall_offset_ns'"),
        ({"sources": {}}, "'sources'"),
        ({"sources": [1]}, "'sources[0]'"),
        ({"sources": [{"name": f"{n}", "channels": []} for n in range(1001)]}, "at most 1,000"),
        ({"sources": [{"name": "a", "channels": [CHANNEL] * 20_001}]}, "at most 20,000"),
        ({"sources": [{"name": "a", "channels": []}] * 2}, "differ"),
        ({"sources": [{"name": "a", "channels": [CHANNEL] * 2}]}, "differ"),
        ({"sources": changed(name="../../etc/passwd")}, "without slashes"),
        ({"sources": changed(name="a\\b")}, "without slashes"),
        ({"sources": changed(name="")}, "without slashes"),
        ({"sources": changed(name="x" * 201)}, "without slashes"),
        ({"sources": changed(name="a\nb")}, "without slashes"),
        ({"sources": changed(part_of="a/b")}, "part_of"),
        ({"sources": changed(part_of=1)}, "part_of"),
        ({"sources": changed(unit="furlong")}, "unit"),
        ({"sources": changed(kind="guessed")}, "kind"),
        ({"sources": changed(counter=1)}, "counter"),
        ({"sources": changed(least_window_s=float("nan"))}, "least_window_s"),
        ({"sources": changed(plus_minus=-1.0)}, "plus_minus"),
        ({"sources": changed(plus_minus="3 %")}, "plus_minus"),
    ],
)
def test_a_hostile_header_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        read_samples(written(tmp_path, **changes))
    assert said in str(caught.value)
    assert "samples.bin" in str(caught.value)


@pytest.mark.parametrize(
    "header", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"format": "other"}', b'{"format": 9' + b"9" * 9000]
)
def test_what_is_no_header(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(UserError, match=r"samples\.bin holds no samples"):
        read_samples(written(tmp_path, header=header))
    with pytest.raises(UserError, match=r"none/samples\.bin cannot be read"):
        read_samples(tmp_path / "none")
    (tmp_path / "samples.bin").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="without a header"):
        read_samples(tmp_path)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, len(BODY)))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: int) -> None:
    folder = tmp_path_factory.mktemp("noise")
    samples: Samples = read_samples(written(folder, BODY[:place] + noise))
    for series in samples.series:
        assert len(series.before_ns) == len(series.after_ns) == len(series.values)
        assert (series.before_ns <= series.after_ns).all()
    (folder / "samples.bin").write_bytes(noise)
    with pytest.raises(UserError):
        read_samples(folder)


SUMMARY: dict[str, Any] = {
    "ended": "asked", "elapsed_s": 1, "ticks_due": 10, "ticks_delivered": 9, "lateness_p50_s": 0.1,
    "lateness_p95_s": 0.1, "lateness_max_s": None, "cpu_s": 0.5, "core_share": 0.5, "startup_cpu_s": 0.1,
    "resident_bytes": 5, "wall_offset_start_ns": 1, "wall_offset_end_ns": 1, "keeps_up": True,
    "scheduling": "preferred", "notes": ["a"],
    "sources": [{"name": "a", "every": 1, "cost_s": 0.1, "reads": 9, "failed": 0}],
}  # fmt: skip


def test_a_summary_is_checked_field_by_field(tmp_path: Path) -> None:
    file = tmp_path / "samples.json"
    file.write_text(json.dumps(SUMMARY))
    assert read_summary(tmp_path).sources[0].reads == 9
    assert read_summary(tmp_path).lateness_max_s is None
    bad: list[tuple[str, Any]] = [("ended", 1), ("ticks_due", 1.5), ("notes", [1]), ("sources", [{}]), ("cpu_s", "1")]
    for name, value in bad:
        file.write_text(json.dumps({**SUMMARY, name: value}))
        with pytest.raises(UserError, match=r"samples\.json"):
            read_summary(tmp_path)
