"""The demo's ways start from the same weights and see the same batches; the planned one takes less memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgetrain.bench.demo import PLAIN, Settings, demo
from edgetrain.measure.record import RunFolder


def test_the_demo_compares_like_with_like(tmp_path: Path) -> None:
    turns: list[tuple[str, int, int]] = []
    settings = Settings(memory="32MB", side=96, width=0.5, batch=8, steps=3)
    result = demo(tmp_path / "demo", settings, lambda *turn: turns.append(turn))
    assert result.ours.losses[0] == pytest.approx(result.sides[PLAIN].losses[0], rel=1e-4)
    assert all(len(side.losses) == 3 for side in result.sides.values())
    assert result.recomputed > 0
    assert result.ours.growth_bytes < result.sides[PLAIN].growth_bytes
    assert [done for _, done, _ in turns] == list(range(len(turns)))
    record = RunFolder(tmp_path / "demo").load()
    assert record.status == "finished"
    assert record.summary["planned peak of tensors"].value <= 32e6  # type: ignore[operator]
    assert record.summary[f"{PLAIN}: growth of the process"].origin == "measured"
