"""Ops of known power, and what a sensor would have said of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgetrain.measure.windows import Ops, Windows

MS = 1_000_000


@dataclass(frozen=True)
class Truth:
    """level: of each op. energy: of each op, over all steps."""

    ops: Ops
    windows: Windows
    level: npt.NDArray[np.float64]
    energy: npt.NDArray[np.float64]


def truth(
    seed: int,
    *,
    count: int = 20,
    steps: int = 100,
    noise: float = 0.03,
    window_ms: tuple[float, float] = (10.0, 10.0),
    jitter: float = 0.05,
    gap_ms: float = 0.0,
    wander: float = 0.0,
    step_ms: float | None = None,
    lengths_ms: tuple[float, float] = (0.3, 8.0),
) -> Truth:
    """Ops of `lengths_ms`, uniform, that take turns; each is `jitter` longer or shorter each time. `gap_ms` of 1 W
    follow each step. Each instance takes `wander` more or less power. step_ms: every step takes just that.
    Windows of `window_ms`, uniform, one after the other from a random moment on."""
    draw = np.random.default_rng(seed)
    length = draw.uniform(*lengths_ms, count) * MS
    level = draw.uniform(1.0, 10.0, count)
    if step_ms is not None:
        length, jitter = length * step_ms * MS / length.sum(), 0.0
    taken = length * (1 + jitter * draw.uniform(-1, 1, (steps, count)))
    taken = np.concatenate([taken, np.full((steps, 1), gap_ms * MS)], axis=1)
    ends = np.cumsum(taken.ravel().round().astype(np.int64))
    starts = np.concatenate([[0], ends[:-1]])
    levels = np.tile(np.append(level, 1.0), steps)
    levels = levels * (1 + wander * draw.standard_normal(len(levels))).clip(0)
    edges = window_edges(draw, int(ends[-1]), window_ms)
    spent = np.concatenate([[0.0], np.cumsum((ends - starts) * 1e-9 * levels)])
    meter = np.interp(edges, np.concatenate([[0], ends]), spent)
    amount = np.diff(meter) * (1 + noise * draw.standard_normal(len(edges) - 1))
    op = np.tile(np.arange(count + 1), steps)
    real = op < count
    ops = Ops(tuple(f"op{n}" for n in range(count)), op[real], starts[real], ends[real])
    energy = np.bincount(op, (ends - starts) * 1e-9 * levels)[:count].astype(np.float64)
    return Truth(ops, Windows(edges[:-1], edges[1:], amount), level, energy)


def window_edges(draw: np.random.Generator, end: int, window_ms: tuple[float, float]) -> npt.NDArray[np.int64]:
    lengths = draw.uniform(*window_ms, int(end / (window_ms[0] * MS)) + 2) * MS
    edges = np.cumsum(lengths.round().astype(np.int64)) - int(draw.uniform(0, lengths[0]))
    found: npt.NDArray[np.int64] = edges[(edges >= 0) & (edges <= end)]
    return found if len(found) else np.zeros(1, dtype=np.int64)
