"""The demo's ways see the same batch from the same weights and learn it alike; the planned one in less memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edgetrain.bench.demo import CHANNELS_LAST, PLAIN, DemoResult, Settings, Side, about_exact, about_memory, demo
from edgetrain.measure.record import RunFolder


def test_the_demo_compares_like_with_like(tmp_path: Path) -> None:
    turns: list[tuple[str, int, int]] = []
    settings = Settings(memory="64MB", side=96, width=0.5, batch=16, steps=4)
    result = demo(tmp_path / "demo", settings, lambda *turn: turns.append(turn))
    first = result.sides[PLAIN].losses
    for side in result.sides.values():
        assert len(side.losses) == 4
        assert all(later < 0.95 * earlier for earlier, later in zip(side.losses, side.losses[1:], strict=False))
        assert side.losses == pytest.approx(first, rel=1e-2)
    assert result.exact
    assert result.ours.digests != result.sides[PLAIN].digests  # channels-last: what the check compares can differ
    assert result.recomputed > 0
    assert result.ours.growth_bytes < result.sides[PLAIN].growth_bytes
    assert [done for _, done, _ in turns] == list(range(len(turns)))
    assert turns[-1][1] == turns[-1][2]
    record = RunFolder(tmp_path / "demo").load()
    assert record.status == "finished"
    assert record.summary["planned peak of tensors"].value <= 64e6  # type: ignore[operator]
    assert record.summary[f"{PLAIN}: growth of the process"].origin == "measured"
    charts = {chart["title"]: chart for chart in json.loads((tmp_path / "demo" / "charts.json").read_text())}
    assert charts["Tensors during one step of edgetrain"]["marks"] == [{"name": "budget 64 MB", "value": 64.0}]
    bars = {bar["name"]: bar["value"] for bar in charts["Growth of the process"]["bars"]}
    assert bars == {name: side.growth_bytes / 1e6 for name, side in result.sides.items()}
    memory, time = charts["edgetrain within 64 MB, against plain PyTorch"]["figures"]
    assert memory["value"] == f"{result.ratios(PLAIN)[0]:.2f} ×"
    assert time["value"] == f"{result.ratios(PLAIN)[1]:.2f} ×"
    profiled = RunFolder(result.profile).load()
    assert profiled.status == "finished"
    assert profiled.summary["step_time_s"].value > 0  # type: ignore[operator]


def result_of(ours: Side) -> DemoResult:
    sides = {
        PLAIN: Side((2.0, 1.0), ("a", "b"), 2.0, 1000),
        CHANNELS_LAST: Side((2.0, 1.25), ("a", "c"), 1.0, 800),
        "edgetrain, 300MB": ours,
    }
    return DemoResult(sides, Settings(), "a plan", 299_800_000, 5, exact=True, folder=Path(), profile=Path())


def test_ratios_say_to_whom() -> None:
    result = result_of(Side((2.0, 1.1), ("a", "d"), 0.5, 200))
    assert result.ratios(PLAIN) == (0.2, 0.25)
    assert result.ratios(CHANNELS_LAST) == (0.25, 0.5)
    assert result.apart == pytest.approx(0.2)


def test_the_notes_say_what_was_found() -> None:
    result = result_of(Side((2.0, 1.1), ("a", "d"), 0.5, 200))
    assert "299.8 MB" in about_memory(result)
    assert "were bitwise" in about_exact(result)
    assert "were NOT bitwise" in about_exact(replace(result, exact=False))
