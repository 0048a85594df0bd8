"""Drawings of memory: the numbers are where they should be, the file is not trusted, text is never markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from edgetrain.errors import UserError
from edgetrain.measure.picture import Curve, Frontier, Instant, Picture, Point, Table, load, save
from edgetrain.measure.record import RunFolder, new_record
from edgetrain.report.memory import blocks, curves_svg, frontier_svg, top_bytes, write_page

EVIL = "<script>alert('1')</script>"
MB = 1_000_000


def curve(name: str, held: list[int], *, forward: int, again: frozenset[int] = frozenset()) -> Curve:
    instants = [
        Instant(f"op_{n}", "a.0", "forward" if n < forward else "backward", value * MB, n in again)
        for n, value in enumerate(held)
    ]
    return Curve(name, 1 * MB, tuple(instants))


KEEP_ALL = curve("keep all", [2, 4, 8, 6, 3], forward=3)
PLAN = curve("plan", [2, 4, 4, 4, 4, 4, 2], forward=3, again=frozenset({4}))
FRONTIER = Frontier(
    (Point(8 * MB, 1.0, 0.0, 0, "keep-all"), Point(4 * MB, 0.5, 0.2, 1, "optimal", 0.05), Point(2 * MB, 0.1)),
    3 * MB, 2 * MB,
)  # fmt: skip
TABLE = Table("title", "note", ("", "before"), (("peak", "8 MB"), ("  of it", "1 MB")))
PICTURE = Picture("title", "note", 4 * MB, (KEEP_ALL, PLAN), FRONTIER, (TABLE,), TABLE)


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter("text")]


def test_a_picture_is_read_back_equal(tmp_path: Path) -> None:
    save(PICTURE, tmp_path)
    assert load(tmp_path) == PICTURE
    bare = replace(PICTURE, budget_bytes=None, frontier=None, frontier_table=None)
    save(bare, tmp_path)
    assert load(tmp_path) == bare


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("edgetrain memory", 2),
        ("title", 1),
        ("budget_bytes", -1),
        ("budget_bytes", "much"),
        ("curves", [{"name": "a", "lasting_bytes": 1, "instants": []}]),
        ("curves", [{"name": "a", "lasting_bytes": 1, "instants": [["op", "", "forward", 1e9, False]]}]),
        ("curves", [{"name": "a", "lasting_bytes": 1, "instants": [["op", "", "forward"]]}]),
        ("frontier", {"points": [{"memory_bytes": 1, "part": float("nan")}]}),
        ("frontier", {"points": [{"memory_bytes": 1, "part": 10**400}]}),
        ("curves", [{"name": "a", "lasting_bytes": 10**400, "instants": [["op", "", "forward", 1, False]]}]),
        ("tables", [{"title": "a"}]),
        ("tables", 3),
    ],
)
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, field: str, value: object) -> None:
    save(PICTURE, tmp_path)
    file = tmp_path / "memory.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(UserError, match="not a picture of memory"):
        load(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match="there is no picture of memory"):
        load(tmp_path)


def test_text_is_escaped_and_nothing_is_fetched(tmp_path: Path) -> None:
    evil = replace(KEEP_ALL, name=EVIL, instants=(Instant(EVIL, EVIL, EVIL, 8 * MB, False),))
    point = replace(FRONTIER.points[1], planner=EVIL)
    table = Table(EVIL, EVIL, (EVIL,), ((EVIL,),))
    picture = Picture(EVIL, EVIL, 4 * MB, (evil,), Frontier((point,)), (table,), table)
    folder = RunFolder.create(tmp_path / "run")
    folder.save(new_record(["edgetrain", "plan", EVIL]))
    save(picture, folder.path)
    page = write_page(folder, tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page
    ElementTree.fromstring(curves_svg(picture.curves, picture.budget_bytes))
    ElementTree.fromstring(frontier_svg(Frontier((point,))))


def test_curves_have_round_ticks_phases_a_budget_and_titles() -> None:
    svg = curves_svg((KEEP_ALL, PLAN), 4 * MB)
    words = texts(svg)
    assert words.count("2 MB") == 2
    assert words.count("8 MB") == 2
    assert words.count("budget 4 MB") == 2
    assert {"forward", "backward", "keep all: peak 8 MBat op_2 of a.0", "while an op is recomputed"} <= set(words)
    titles = [element.text or "" for element in ElementTree.fromstring(svg).iter("title")]
    assert len(titles) == len(KEEP_ALL.instants) + len(PLAN.instants)
    assert titles[2] == "op_2 · a.0 · forward\n8 MB"
    assert titles[5 + 4] == "op_4 · a.0 · backward, recomputed\n4 MB"


def test_a_budget_far_above_is_not_drawn() -> None:
    assert top_bytes((KEEP_ALL, PLAN), 9 * MB) == 9 * MB
    assert top_bytes((KEEP_ALL, PLAN), 100 * MB) == 8 * MB
    assert not any("budget" in text for text in texts(curves_svg((KEEP_ALL,), 100 * MB)))


def test_many_ops_share_places_to_point_at() -> None:
    many = curve("many", [n % 7 + 1 for n in range(5000)], forward=2500)
    assert curves_svg((many,), None).count("<title>") < 1000


def test_the_frontier_shows_what_is_infeasible() -> None:
    svg = frontier_svg(FRONTIER)
    assert svg.count("<circle") == 2
    assert svg.count('class="no"') == 1
    words = " ".join(texts(svg))
    assert "no plan found (below 3 MB)" in words
    assert "none possible (below 2 MB)" in words
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', svg)]
    assert heights[0] < heights[1]  # less memory takes more time
    assert frontier_svg(Frontier(())) == ""
    ElementTree.fromstring(frontier_svg(Frontier((Point(1, 1.0),))))


def test_phases_where_updates_come_early_and_where_they_come_together() -> None:
    phases = ("forward", "backward", "update", "backward", "update")
    early = Curve("early", 0, tuple(Instant("op", "", phase, 1, False) for phase in phases))
    assert early.spans == (("forward", 0, 1), ("backward and updates", 1, 5))
    late = replace(early, instants=tuple(sorted(early.instants, key=lambda i: "fbu".index(i.phase[0]))))
    assert late.spans == (("forward", 0, 1), ("backward", 1, 3), ("updates", 3, 5))


def test_blocks_show_levels_and_the_budget() -> None:
    rows = blocks(KEEP_ALL, 4 * MB, top=8 * MB, longest=10, width=10, height=2)
    assert [row.text for row in rows[:2]] == ["  █▄", "▄███▆╌╌╌╌╌"]
    assert [row.label for row in rows[:2]] == ["8 MB", "4 MB"]
    assert [row.above for row in rows[:2]] == [True, False]
    assert len(rows[2].text) == 5
    wide = blocks(KEEP_ALL, None, top=8 * MB, longest=5, width=60)
    assert len(wide[0].text.strip()) == 12  # one op in five, at its full height
    assert wide[-1].text.startswith("└ forward ─")
    assert "└ backward ─" in wide[-1].text
