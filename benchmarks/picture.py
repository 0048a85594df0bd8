"""The picture at the top of the README: memory and time of one training step beside plain PyTorch.

    python -m benchmarks.picture       reads benchmarks/results/budget.json, writes docs/images/memory-and-time.svg

Bars are drawn from the kept results alone, so the picture shows what was measured, and names the commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.contenders import RESULTS

PICTURE = Path(__file__).parent.parent / "docs/images/memory-and-time.svg"
MODEL = "mobilenet_v2"
# The row of the results, and what the picture calls it.
ROWS = (
    ("eager channels-last", "plain PyTorch, channels-last"),
    ("checkpoint per block", "torch.utils.checkpoint, each block"),
    ("torch.compile, activation budget 0.5", "torch.compile, memory budget 0.5"),
    ("edgetrain", "edgetrain, no budget"),
    ("edgetrain in 0.33 of eager's memory", "edgetrain, within a third"),
    ("edgetrain in 0.18 of eager's memory", "edgetrain, within a fifth"),
)
_NAMES, _PANEL, _GAP, _TOP, _STEP, _BAR = 245, 200, 130, 58, 30, 18
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f } .quiet { fill: #57606a }
.theirs { fill: #9aa4ae } .ours { fill: #1f7a4d } .interval { stroke: #24292f }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .quiet { fill: #9ba6b1 } .theirs { fill: #66707a } .ours { fill: #3fb27f }
  .interval { stroke: #e6edf3 }
}
"""


def main() -> None:
    kept = json.loads((RESULTS / "budget.json").read_text())["measured"][MODEL]
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(drawing(kept))
    print(PICTURE)


def drawing(kept: Mapping[str, Any]) -> str:
    by_name = {row["name"]: row for row in kept["rows"]}
    rows = [(label, by_name[name]) for name, label in ROWS]
    width, height = _NAMES + 2 * (_PANEL + _GAP), _TOP + _STEP * len(rows) + 34
    title = f"One training step of MobileNetV2 at 224×224, batch {kept['batch']}: memory and time beside plain PyTorch"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(title)}">',
            f"<style>{_STYLE}</style>",
            f'<text x="0" y="16" font-weight="bold">{escape(title)}</text>',
            *_labels(rows),
            *_memory(rows, _NAMES),
            *_times(rows, _NAMES + _PANEL + _GAP),
            f'<text x="0" y="{height - 6}" class="quiet">{escape(_source(kept))}</text>',
            "</svg>",
            "",
        ]
    )


def _source(kept: Mapping[str, Any]) -> str:
    about = kept["about"]
    return (
        f"measured: {about['machine']}, {about['cores']} cores, torch {about['torch']}, {kept['rounds']} interleaved "
        f"rounds, commit {about['commit'][:10]}; lines are 95 % intervals"
    )


def _middle(row: int) -> float:
    return _TOP + _STEP * row + _STEP / 2


def _labels(rows: Sequence[tuple[str, Any]]) -> Iterator[str]:
    for number, (label, _) in enumerate(rows):
        yield f'<text x="{_NAMES - 12}" y="{_middle(number) + 4:.1f}" text-anchor="end">{escape(label)}</text>'


def _memory(rows: Sequence[tuple[str, Any]], left: float) -> Iterator[str]:
    yield f'<text x="{left}" y="{_TOP - 12}" class="quiet">memory the process grew by</text>'
    largest = max(row["grown_bytes"] for _, row in rows)
    for number, (label, row) in enumerate(rows):
        length = _PANEL * row["grown_bytes"] / largest
        yield _bar(left, number, length, label)
        text = f"{row['grown_bytes'] / 1e6:,.0f} MB · {row['memory_ratio']:.2f}×"
        yield _value(left + length, number, text)


def _times(rows: Sequence[tuple[str, Any]], left: float) -> Iterator[str]:
    yield f'<text x="{left}" y="{_TOP - 12}" class="quiet">time of a step</text>'
    largest = max(row["time_ratio"]["high"] for _, row in rows)
    for number, (label, row) in enumerate(rows):
        ratio = row["time_ratio"]
        yield _bar(left, number, _PANEL * ratio["median"] / largest, label)
        low, high, y = left + _PANEL * ratio["low"] / largest, left + _PANEL * ratio["high"] / largest, _middle(number)
        if high > low:
            yield f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}" class="interval"/>'
        yield _value(high, number, f"{ratio['median']:.2f}×")


def _bar(left: float, row: int, length: float, label: str) -> str:
    kind = "ours" if label.startswith("edgetrain") else "theirs"
    y = _middle(row) - _BAR / 2
    return f'<rect x="{left}" y="{y:.1f}" width="{length:.1f}" height="{_BAR}" rx="2" class="{kind}"/>'


def _value(right: float, row: int, text: str) -> str:
    return f'<text x="{right + 8:.1f}" y="{_middle(row) + 4:.1f}">{escape(text)}</text>'


if __name__ == "__main__":
    main()
