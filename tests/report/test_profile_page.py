"""The page of a profile run: complete, in one file, honest about what is missing, safe to open whatever is in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgetrain.cli import main
from edgetrain.errors import UserError
from edgetrain.measure.attributed import FILE as ATTRIBUTION
from edgetrain.measure.record import RunFolder, Value
from edgetrain.measure.samples_file import SAMPLES, SUMMARY
from edgetrain.measure.timeline import WHAT_FILE, WHEN_FILE, OpRun, Timeline
from edgetrain.report import embedded
from edgetrain.report.html import write_page
from edgetrain.report.profile import script
from edgetrain.report.run import load_run
from edgetrain.report.tables import as_json, write_csv
from tests.helpers.profiles import HOSTILE


def page(tmp_path: Path, *folders: RunFolder) -> str:
    return write_page(folders, tmp_path / "page.html").read_text()


def data(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_everything_is_in_one_file(tmp_path: Path, profile: RunFolder) -> None:
    text = page(tmp_path, profile)
    for heading in (
        "One step, op by op",
        "Phases",
        "The whole run",
        "Where the time goes",
        "Memory over a step",
        "Results",
    ):
        assert f"<h2>{heading}</h2>" in text
    assert "Alive at the peak" in text
    assert "http" not in text.replace("http-equiv", "")
    assert not re.search(r"<(link|img|iframe|script)[^>]+(src|href)=[\"'](?!data:)", text)
    code = text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'" in text  # else the browser would not run it
    assert len(text) - len(json.dumps(data(text))) < 400_000


def test_the_embedded_step_is_the_median_one_with_statistics_of_all(tmp_path: Path, profile: RunFolder) -> None:
    timeline = load_run(profile).timeline
    assert timeline is not None
    step = data(page(tmp_path, profile))["runs"][0]["step"]
    times = timeline.step_s
    assert abs(times[step["number"]] - np.median(times)) == np.abs(times - np.median(times)).min()
    assert [step["texts"][n] for n in step["op"]["name"]] == [op.name for op in timeline.ops]
    assert step["op"]["middle"] == pytest.approx((np.median(timeline.op_s, axis=0) * 1e6).tolist(), rel=1e-3)
    assert step["op"]["begin"][3] == pytest.approx(
        (timeline.begin_ns[step["number"], 3] - timeline.step_ns[step["number"], 0]) / 1e3
    )
    assert all(isinstance(held, int) for held in step["op"]["held"])
    assert step["energy"]["power"][0] == pytest.approx(4.5, rel=1e-3)  # the truth of the first op
    assert {track["quantity"] for track in step["tracks"]} >= {"power", "utilisation", "memory"}


def test_what_is_missing_is_said_and_never_zero(tmp_path: Path, profile: RunFolder) -> None:
    text = page(tmp_path, profile)
    assert '<td>GPU utilisation</td><td class="number soft">—</td>' in text
    assert '<span class="tag unavailable">unavailable</span>' in text
    assert '<span class="tag modelled">modelled</span>' in text
    assert re.search(r'<td class="number">4\.1 W</td><td class="number soft wide">3\.3 to 4\.9</td>', text)
    last = data(text)["runs"][0]["step"]
    assert last["energy"]["amount"][last["op"]["group"][-1]] is None
    (profile.path / ATTRIBUTION).unlink()
    without = page(tmp_path, profile)
    assert data(without)["runs"][0]["step"]["energy"] is None
    assert ">energy</button>" not in without


def test_merged_energy_is_marked(tmp_path: Path, profile: RunFolder) -> None:
    assert "≈ " in page(tmp_path, profile)
    step = data(page(tmp_path, profile))["runs"][0]["step"]
    assert step["op"]["group"][-4] == step["op"]["group"][-3]
    assert step["energy"]["count"][step["op"]["group"][-3]] == 2


def test_several_runs_stand_side_by_side(tmp_path: Path, profile: RunFolder) -> None:
    other = RunFolder.create(tmp_path / "other")
    record = profile.load()
    slow = {**record.summary, "mean power": Value(8.2, "W", "measured"), "only here": Value(3, "", "derived")}
    other.save(replace(record, summary=slow))
    text = page(tmp_path, profile, other)
    row = re.search(r"<tr><td>mean power</td>.*?</tr>", text)
    assert row is not None
    assert "4.1 W" in row[0]
    assert "8.2 W" in row[0]
    assert "2×" in row[0]
    assert '<tr><td>only here</td><td class="number soft">—</td>' in text
    assert [run["step"] is None for run in data(text)["runs"]] == [False, True]


def test_a_large_timeline_stays_small(tmp_path: Path, profile: RunFolder) -> None:
    """100 steps of 1,000 ops: one step in full and statistics of all."""
    ops = tuple(
        OpRun(f"op_{n}", "aten.mul.Tensor", f"layer.{n // 7}", "forward", "first", 0, n, n, n) for n in range(1000)
    )
    begin = np.arange(100_000, dtype=np.int64).reshape(100, 1000) * 1000
    steps = np.stack([begin[:, 0], begin[:, -1] + 900], axis=1)
    run = replace(load_run(profile), timeline=Timeline(ops, steps, begin, begin + 900), attributed=(), picture=None)
    assert len(script([run])) < 400_000


def test_too_many_ops_to_draw_are_the_longest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profile: RunFolder
) -> None:
    monkeypatch.setattr(embedded, "MAX_OPS", 10)
    timeline, text = load_run(profile).timeline, page(tmp_path, profile)
    assert timeline is not None
    step = data(text)["runs"][0]["step"]
    times = timeline.op_s[step["number"]]
    assert step["op"]["place"] == sorted(np.argsort(-times, kind="stable")[:10].tolist())
    assert "The 10 longest ops are drawn." in text


# Bad days


def test_a_run_that_was_cut_off_is_read_up_to_there(tmp_path: Path, profile: RunFolder) -> None:
    whole = load_run(profile)
    assert whole.timeline is not None
    assert whole.samples is not None
    for name in (WHEN_FILE, SAMPLES):
        raw = (profile.path / name).read_bytes()
        (profile.path / name).write_bytes(raw[: int(len(raw) * 0.9) - 3])
    (profile.path / SUMMARY).unlink()
    profile.save(replace(profile.load(), status="running"))
    cut = load_run(profile)
    assert cut.timeline is not None
    assert 0 < cut.timeline.steps < whole.timeline.steps
    text = page(tmp_path, profile)
    for told in (
        "timeline.bin was cut off in the middle of a step; the 7 steps before it are shown.",
        "samples.bin was cut off", "The sampler did not say how it fared", "The run did not end by itself",
    ):  # fmt: skip
        assert told in text
    assert "It is warm here." not in text


def test_a_run_cut_off_in_its_first_step(tmp_path: Path, profile: RunFolder) -> None:
    (profile.path / WHEN_FILE).write_bytes(b"\0" * 40)
    text = page(tmp_path, profile)
    assert "No step was recorded whole" in text
    assert data(text)["runs"][0]["step"] is None
    assert as_json(load_run(profile))["tracks"]


@pytest.mark.parametrize("name", ["record.json", WHAT_FILE, ATTRIBUTION, SAMPLES])
def test_a_newer_version_is_a_clear_sentence(tmp_path: Path, profile: RunFolder, name: str) -> None:
    file = profile.path / name
    head, line, rest = file.read_bytes().partition(b"\n") if name == SAMPLES else (file.read_bytes(), b"", b"")
    file.write_bytes(json.dumps(json.loads(head) | {"schema": 99}).encode() + line + rest)
    with pytest.raises(UserError, match=rf"{name} was written by (a newer|another) version of edgetrain") as caught:
        page(tmp_path, profile)
    assert "schema 99" in str(caught.value)
    assert "Read it with the version" in str(caught.value) or "read it with the version" in str(caught.value)


@pytest.mark.parametrize("change", HOSTILE)
def test_nothing_in_a_hostile_run_becomes_markup(
    tmp_path: Path, profile: RunFolder, change: Callable[[RunFolder], None]
) -> None:
    change(profile)
    text = page(tmp_path, profile, profile)
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert "alert(1)</script" not in text
    assert "<b onload" not in text
    data(text)  # is still JSON
    assert len(text) < 1_500_000
    write_csv([load_run(profile)], tmp_path / "csv")
    json.dumps(as_json(load_run(profile)), allow_nan=False)


# Tables for other programs, and the command


def test_csv_holds_what_was_recorded(tmp_path: Path, profile: RunFolder) -> None:
    run = load_run(profile)
    assert run.timeline is not None
    assert run.samples is not None
    files = {file.name: file.read_text().splitlines() for file in write_csv([run], tmp_path / "csv")}
    n_ops, steps = len(run.timeline.ops), run.timeline.steps
    assert {name: len(lines) - 1 for name, lines in files.items()} == {
        "summary.csv": len(run.record.summary), "ops.csv": n_ops, "times.csv": n_ops * steps,
        "samples.csv": sum(series.values.size for series in run.samples.series),
    }  # fmt: skip
    assert files["times.csv"][1] == f"profile,0,0,{run.timeline.begin_ns[0, 0]},{run.timeline.end_ns[0, 0]}"
    assert "profile,GPU utilisation,,1,unavailable,," in files["summary.csv"]
    assert files["ops.csv"][-1].endswith(",,,,,")  # no figure is an empty cell
    assert sum(line.endswith(",") for line in files["samples.csv"]) > 0  # so is a reading that failed


def test_a_text_that_a_spreadsheet_would_run_is_a_text(tmp_path: Path, profile: RunFolder) -> None:
    profile.save(
        replace(profile.load(), summary={"=1+1": Value("@x", "", "measured"), "a": Value(-1.5, "", "derived")})
    )
    lines = write_csv([load_run(profile)], tmp_path / "csv")[0].read_text().splitlines()
    assert lines[1:] == ["profile,'=1+1,'@x,,measured,,", "profile,a,-1.5,,derived,,"]


def command(*words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["edgetrain", *words])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


def test_the_command_writes_what_is_asked_for(
    tmp_path: Path, profile: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run, trace, csv = str(profile.path), tmp_path / "trace.json", tmp_path / "csv"
    assert command("report", run, "--trace", str(trace), "--csv", str(csv), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["trace"] == str(trace)
    assert json.loads(trace.read_text())["traceEvents"]
    assert sorted(file.name for file in csv.iterdir()) == ["ops.csv", "samples.csv", "summary.csv", "times.csv"]
    assert not (profile.path / "report.html").exists()
    assert told["runs"][0]["phases"][0]["name"] == "forward"
    assert told["runs"][0]["record"]["summary"]["GPU utilisation"]["value"] is None
    assert command("report", run, run, "-o", str(tmp_path / "both.html")) == 0
    assert "Side by side" in (tmp_path / "both.html").read_text()


def test_no_trace_of_a_run_that_recorded_nothing(
    tmp_path: Path, profile: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = RunFolder.create(tmp_path / "bare")
    bare.save(profile.load())
    assert command("report", str(bare.path), "--trace", str(tmp_path / "trace.json")) == 1
    assert "no op timeline" in capsys.readouterr().err
