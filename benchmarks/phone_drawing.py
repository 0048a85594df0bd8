"""Modelled against measured, as one SVG: log scales, the line on which both are equal, a band of 30 % around it.

In: panels of dots. Out: text of an SVG that stands alone. Colour is the network, shape the phone; a filled dot was
predicted, a hollow one fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2563a6", "#c2571a", "#2f7d4f", "#8a3f8f", "#8a6d1a")
_SIDE, _LEFT, _TOP, _GAP, _BELOW = 380, 70, 34, 90, 92
BAND = 0.30
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"))


@dataclass(frozen=True, slots=True)
class Dot:
    measured: float
    modelled: float
    model: str
    phone: str
    fitted: bool
    told: str


@dataclass(frozen=True)
class _Scale:
    """Decades from low to high on both axes of a panel whose left end is at `left`."""

    low: float
    high: float
    left: float

    def x(self, value: float) -> float:
        return self.left + _SIDE * self._part(value)

    def y(self, value: float) -> float:
        return _TOP + _SIDE * (1 - self._part(value))

    def _part(self, value: float) -> float:
        part = (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return min(1.0, max(0.0, part))


def drawing(panels: Sequence[tuple[str, Sequence[Dot]]]) -> str:
    width = _LEFT + len(panels) * (_SIDE + _GAP) - _GAP + 20
    height = _TOP + _SIDE + _BELOW
    models = list(dict.fromkeys(dot.model for _, dots in panels for dot in dots))
    phones = list(dict.fromkeys(dot.phone for _, dots in panels for dot in dots))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="modelled against measured">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, (name, dots) in enumerate(panels):
        parts += _panel(name, dots, _LEFT + number * (_SIDE + _GAP), models, phones)
    parts += _legend(models, phones, _TOP + _SIDE + 60)
    return "\n".join([*parts, "</svg>", ""])


def _panel(name: str, dots: Sequence[Dot], left: float, models: list[str], phones: list[str]) -> Iterator[str]:
    values = [v for dot in dots for v in (dot.measured, dot.modelled)]
    scale = _Scale(min(values) / 1.6, max(values) * 1.6, left)
    yield f'<text x="{left}" y="{_TOP - 12}" font-weight="bold">{escape(name)}</text>'
    yield from _band(scale)
    for decade in range(math.ceil(math.log10(scale.low)), math.floor(math.log10(scale.high)) + 1):
        value = 10.0**decade
        x, y = scale.x(value), scale.y(value)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + _SIDE}" stroke="#e3e3e3"/>'
        yield f'<line x1="{left}" x2="{left + _SIDE}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e3e3"/>'
        yield f'<text x="{x:.1f}" y="{_TOP + _SIDE + 16}" text-anchor="middle" fill="#444">{_short(value)}</text>'
        yield f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#444">{_short(value)}</text>'
    yield f'<rect x="{left}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#888"/>'
    yield f'<text x="{left + _SIDE / 2}" y="{_TOP + _SIDE + 34}" text-anchor="middle">measured</text>'
    middle = _TOP + _SIDE / 2
    yield (
        f'<text x="{left - 52}" y="{middle}" text-anchor="middle" transform="rotate(-90 {left - 52} {middle})">'
        "modelled</text>"
    )
    for dot in dots:
        colour = COLOURS[models.index(dot.model) % len(COLOURS)]
        mark = _mark(scale.x(dot.measured), scale.y(dot.modelled), colour, phones.index(dot.phone), dot.fitted)
        change = 100 * (dot.modelled / dot.measured - 1)
        yield f"<g>{mark}<title>{escape(dot.told)}: {change:+.0f} %</title></g>"


def _band(scale: _Scale) -> Iterator[str]:
    """Where the modelled value is within BAND of the measured one."""
    low, high = scale.low, scale.high
    corners = [(low, low * (1 + BAND)), (high / (1 + BAND), high), (high, high), (high, high * (1 - BAND)),
               (low / (1 - BAND), low), (low, low)]  # fmt: skip
    points = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in corners)
    yield f'<polygon points="{points}" fill="#eef3f8"/>'
    yield (
        f'<line x1="{scale.x(low):.1f}" y1="{scale.y(low):.1f}" x2="{scale.x(high):.1f}" y2="{scale.y(high):.1f}" '
        'stroke="#888" stroke-dasharray="4 3"/>'
    )


def _mark(x: float, y: float, colour: str, shape: int, hollow: bool) -> str:
    style = f'fill="{"#fff" if hollow else colour}" stroke="{colour}" stroke-width="1.5"'
    if shape == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {style}/>'
    return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" {style}/>'


def _legend(models: list[str], phones: list[str], y: float) -> Iterator[str]:
    entries = [(COLOURS[n % len(COLOURS)], 0, False, model) for n, model in enumerate(models)]
    entries += [("#444", shape, False, phone) for shape, phone in enumerate(phones)]
    entries.append(("#444", 0, True, "fitted (filled: predicted)"))
    left = float(_LEFT)
    for colour, shape, hollow, name in entries:
        yield _mark(left, y - 4, colour, shape, hollow)
        yield f'<text x="{left + 10}" y="{y}">{escape(name)}</text>'
        left += 34 + 7 * len(name)
    yield f'<text x="{_LEFT}" y="{y + 20}" fill="#444">shaded: within {100 * BAND:.0f} % of what was measured</text>'


def _short(value: float) -> str:
    for size, name in _UNITS:
        if value >= size:
            return f"{value / size:g}{name}"
    return f"{value:g}"
