"""The demo's two sides compute the same, to the bit, and the captured one takes less memory."""

from __future__ import annotations

from pathlib import Path

from edgetrain.bench.demo import demo
from edgetrain.measure.record import RunFolder


def test_the_demo_compares_like_with_like(tmp_path: Path) -> None:
    seen: list[int] = []
    result = demo(tmp_path / "demo", epochs=1, on_step=lambda done, total: seen.append(done))
    assert result.largest_loss_difference == 0
    assert result.step.accuracy == result.eager.accuracy
    assert result.step.peak_bytes < result.eager.peak_bytes
    assert seen == list(range(1, result.steps + 1))
    record = RunFolder(tmp_path / "demo").load()
    assert record.status == "finished"
    assert record.summary["edgetrain: peak memory of a step"].origin == "measured"
