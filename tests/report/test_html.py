"""A page is self-contained, and nothing in a run folder can become markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from edgetrain.errors import UserError
from edgetrain.measure.record import RunFolder, Value, new_record
from edgetrain.report.html import write_page
from edgetrain.report.numbers import number

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
    assert '<td>energy</td><td class="number soft">—</td>' in page


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
    whole = run.metrics_file.read_text()
    run.metrics_file.write_text(whole[:-9])  # the last line was cut off
    assert "Loss" in write_page([run], tmp_path / "page.html").read_text()
    run.metrics_file.write_text("not json\n")
    with pytest.raises(UserError, match="line 1"):
        write_page([run], tmp_path / "page.html")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.25, "0.25"), (12.5, "12.5"), (99.6, "100"), (999.9, "1,000"), (1600, "1,600"), (-2e6, "-2,000,000")],
)
def test_numbers_have_commas_and_no_powers(value: float, shown: str) -> None:
    assert number(value) == shown


def test_more_digits_where_asked() -> None:
    assert number(99.64, 4) == "99.64"
    assert number(12345.6, 4) == "12,346"


def test_axes_have_round_numbers_and_marks_have_names(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    line = {"name": "held", "values": [200, 1580, 900]}
    bars = [{"name": "plain", "value": 1715.4}, {"name": "ours", "value": 349.2}]
    marks = [{"name": "budget 300 MB", "value": 300}]
    charts = [
        {"title": "a", "note": "", "x": "op", "y": "MB", "lines": [line], "marks": marks},
        {"title": "b", "note": "", "y": "MB", "bars": bars, "marks": marks},
    ]
    (run.path / "charts.json").write_text(json.dumps(charts))
    page = write_page([run], tmp_path / "page.html").read_text()
    texts = re.findall(r"<(?:text|b|em|span)\b[^>]*>([^<]+)</", page)
    assert {"0", "500", "1,000", "1,500", "1,715 MB", "349 MB", "plain", "ours", "held"} <= set(texts)
    assert texts.count("budget 300 MB") == 2
    assert not re.search(r"\de[+-]\d", "".join(texts))
    widths = [float(w) for w in re.findall(r"width:([\d.]+)%", page)]
    assert widths[1] / widths[0] == pytest.approx(349.2 / 1715.4, rel=1e-2)
    (mark,) = {float(w) for w in re.findall(r'class="mark" style="left:([\d.]+)%', page)}
    assert mark / widths[0] == pytest.approx(300 / 1715.4, rel=1e-2)


def test_a_page_opens_with_the_figures_that_matter_then_pictures_then_tables(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    figures = [{"name": "memory", "value": "0.5 ×", "note": EVIL}, {"name": "time", "value": "1.1 ×", "note": ""}]
    charts = [
        {"title": "Against plain PyTorch", "figures": figures},
        {"title": "b", "note": "", "y": "MB", "bars": [{"name": "plain", "value": 1}]},
    ]
    (run.path / "charts.json").write_text(json.dumps(charts))
    page = write_page([run], tmp_path / "page.html").read_text()
    places = [page.index(text) for text in ("Against plain", "0.5 ×", "1.1 ×", 'class="bars"', "<h2>Results")]
    assert places == sorted(places)
    assert EVIL not in page
    (run.path / "charts.json").write_text(json.dumps([{"title": "a", "figures": [{"name": "memory"}]}]))
    with pytest.raises(UserError, match=r"charts\.json is not a file of charts"):
        write_page([run], tmp_path / "page.html")


def test_bars_that_are_not_ours_are_refused_and_text_in_them_is_escaped(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    chart = {"title": EVIL, "note": EVIL, "y": EVIL, "bars": [{"name": EVIL, "value": 1}]}
    (run.path / "charts.json").write_text(json.dumps([chart | {"marks": [{"name": EVIL, "value": 1}]}]))
    assert EVIL not in write_page([run], tmp_path / "page.html").read_text()
    for value in ("1", None, float("nan"), float("inf"), 10**400, 1.7e308):
        (run.path / "charts.json").write_text(json.dumps([chart | {"bars": [{"name": "a", "value": value}]}]))
        with pytest.raises(UserError, match="charts"):
            write_page([run], tmp_path / "page.html")


@pytest.mark.parametrize(("second", "dashed"), [([1.0, 2.01, 3.0], True), ([1.0, 2.0, 1.0], False)])
def test_lines_that_lie_on_each_other_all_show(tmp_path: Path, second: list[float], dashed: bool) -> None:
    run = folder(tmp_path / "run")
    lines = [{"name": "a", "values": [1, 2, 3]}, {"name": "b", "values": second}]
    (run.path / "charts.json").write_text(json.dumps([{"title": "", "note": "", "x": "", "y": "", "lines": lines}]))
    page = write_page([run], tmp_path / "page.html").read_text()
    assert ("stroke-dasharray=" in page) is dashed
