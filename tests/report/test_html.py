"""A page is self-contained, and nothing in a run folder can become markup."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edgetrain.errors import UserError
from edgetrain.measure.record import RunFolder, Value, new_record
from edgetrain.report.html import write_page

EVIL = "<script>alert(1)</script>"


def folder(path: Path) -> RunFolder:
    made = RunFolder.create(path)
    record = new_record(["edgetrain", "train", EVIL])
    summary = {EVIL: Value(1.5, "s", "measured"), "energy": Value(None, "J", "unavailable")}
    made.save(replace(record, status="finished", summary=summary))
    return made


def test_text_is_escaped_and_nothing_is_fetched(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    charts = [{"title": EVIL, "note": EVIL, "x": EVIL, "y": EVIL, "lines": [{"name": EVIL, "values": [1, 2, 3]}]}]
    (run.path / "charts.json").write_text(json.dumps(charts))
    page = write_page([run], tmp_path / "page.html").read_text()
    assert EVIL not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "<polyline" in page


def test_a_missing_value_is_not_zero(tmp_path: Path) -> None:
    page = write_page([folder(tmp_path / "run")], tmp_path / "page.html").read_text()
    assert "unavailable" in page
    assert '<td>energy</td><td class="number">—</td>' in page


@pytest.mark.parametrize(
    "text",
    ["nonsense", '[{"title": 1}]', '[{"title":"a","note":"","x":"","y":"","lines":[{"name":"a","values":["b"]}]}]'],
)
def test_charts_that_are_not_ours_are_refused(tmp_path: Path, text: str) -> None:
    run = folder(tmp_path / "run")
    (run.path / "charts.json").write_text(text)
    with pytest.raises(UserError, match="charts"):
        write_page([run], tmp_path / "page.html")


def test_metrics_become_a_chart(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    lines = [{"event": "train", "step": n, "loss": 1 / n} for n in range(1, 9)]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "Loss" in write_page([run], tmp_path / "page.html").read_text()
    run.metrics_file.write_text("not json\n")
    with pytest.raises(UserError, match="line 1"):
        write_page([run], tmp_path / "page.html")
