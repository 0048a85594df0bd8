"""The device model against phones: read what EMDL'21 measured, count what the networks do, fit, predict.

In:  the folder emdl21-phones (`EDGETRAIN_DATA`): time and memory of a training step for five networks at five batch
     sizes on two phones.
Out: `Fit`: three numbers a phone for time, four for the memory of a process, none that belongs to one network.

    time of a step = operations ÷ flop_s + bytes ÷ bandwidth_bytes_s + ops × overhead_s          (one of each a phone)
    peak memory    = base_bytes + lasting × parameters + held × forward results + columns × columns of convolutions

The first line is `costs.model` for a library whose ops lay their data out apart from the arithmetic; the second is
`costs.model.resident_bytes`. Both are linear in what is fitted (in 1/rate), which makes the fit quick and repeatable:
the squares of log(modelled ÷ measured) are made least, all weights above zero.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import edgetrain as et
from benchmarks.phone_nets import NETS, Nets, example
from edgetrain.costs.model import held
from edgetrain.errors import UserError
from edgetrain.ops.entry import work

PHONES: Mapping[str, str] = {"meizu_16t": "MEIZU_Freq_1708800", "xiaomi_mi_9": "XIAOMI"}
BATCHES = (1, 2, 4, 8, 16)
# The order in which pairs are dealt to the two halves: networks as EMDL'21 lists them, batches rising.
MODELS = ("Lenet", "Alexnet", "Mobilenet", "Squeezenet", "GoogLenet")
Pair = tuple[str, int]
PAIRS: tuple[Pair, ...] = tuple((model, batch) for model in MODELS for batch in BATCHES)
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

COUNTED_AT = (2, 8)
MIB = 2**20  # `top` on Android prints 1.3G where the data says 1331


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    phone: str
    model: str
    batch: int
    time_s: float
    peak_bytes: float

    @property
    def pair(self) -> Pair:
        return self.model, self.batch


@dataclass(frozen=True, slots=True)
class Counts:
    """What a step of one network at one batch does and holds; see `costs.work` and `costs.model.Held`."""

    flops: float
    moved_bytes: float
    ops: float
    parameters: float
    forward: float
    columns: float

    @property
    def for_time(self) -> tuple[float, ...]:
        return self.flops, self.moved_bytes, self.ops

    @property
    def for_memory(self) -> tuple[float, ...]:
        return 1.0, self.parameters, self.forward, self.columns


@dataclass(frozen=True)
class PhoneFit:
    flop_s: float
    bandwidth_bytes_s: float
    overhead_s: float


@dataclass(frozen=True)
class Fit:
    phones: Mapping[str, PhoneFit]
    base_bytes: float
    lasting: float
    held: float
    columns: float

    def time_s(self, phone: str, counts: Counts) -> float:
        found = self.phones[phone]
        weights = (1 / found.flop_s, 1 / found.bandwidth_bytes_s, found.overhead_s)
        return math.fsum(w * x for w, x in zip(weights, counts.for_time, strict=True))

    def peak_bytes(self, counts: Counts) -> float:
        weights = (self.base_bytes, self.lasting, self.held, self.columns)
        return math.fsum(w * x for w, x in zip(weights, counts.for_memory, strict=True))


Count = Callable[[Pair], Counts]


# ---- what was measured


def read(data: Path) -> list[Row]:
    """All rows of both phones; batch 32 too, where it was measured."""
    rows = []
    for phone, folder in PHONES.items():
        for model in MODELS:
            times = _column(data / folder / model / f"time_table_{model}.csv", "expr_train")
            peaks = _column(data / folder / model / f"performance_{model}.csv", "RES")
            rows += [Row(phone, model, b, times[b] / 1e3, peaks[b] * MIB) for b in times if b in peaks]
    return rows


def energies(data: Path) -> dict[Pair, float]:
    """Joules of a batch as published for the Meizu: what came in by USB, above what came in before."""
    file = data / f"singleBatch_energy_{PHONES['meizu_16t']}.csv"
    return {(model, batch): joules for model in MODELS for batch, joules in _column(file, model, key="").items()}


def _column(file: Path, name: str, key: str = "batchsize") -> dict[int, float]:
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            return {int(float(row[key])): float(row[name]) for row in csv.DictReader(opened)}
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"{file} does not hold what EMDL'21 measured", expected=f"a table with columns {key!r} and {name!r}",
            received=f"{type(error).__name__}: {error}",
        ) from error  # fmt: skip


# ---- what the networks do


def count(model: str, batch: int, nets: Nets = NETS) -> Counts:
    """Counts of one captured step: SGD with momentum and weight decay, as the phones ran it."""
    net = nets[model]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    graph = et.capture(net, loss, optimizer, example(model, batch))
    done = [work(graph, op) for op in graph.ops if not op.view]
    parts = held(graph)
    return Counts(
        sum(w.flops for w in done if w.kind in ("conv", "depthwise", "dense")),
        sum(w.moved_bytes for w in done), len(done), parts.parameters, parts.forward, parts.columns,
    )  # fmt: skip


def loss(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(x), y)


def counter(nets: Nets = NETS) -> Count:
    """Counts of any pair. They are affine in the batch, so each network is captured at two batch sizes."""
    first, second = COUNTED_AT
    ends = {model: [_vector(count(model, batch, nets)) for batch in COUNTED_AT] for model in MODELS}

    def counts(pair: Pair) -> Counts:
        low, high = ends[pair[0]]
        return Counts(*(low + (high - low) * (pair[1] - first) / (second - first)))

    return counts


def _vector(counts: Counts) -> Array:
    return np.array([getattr(counts, name) for name in Counts.__slots__], dtype=np.float64)


# ---- the fit


def fit(rows: Sequence[Row], counts: Count, *, simple: bool = False) -> Fit:
    """simple: for comparison, with operations alone for time and without columns for memory."""
    left = slice(0, 1) if simple else slice(None)
    phones = {}
    for phone in PHONES:
        own = [row for row in rows if row.phone == phone]
        X = np.array([counts(row.pair).for_time for row in own])
        slow, *others = weights(X[:, left], np.array([row.time_s for row in own]))
        per_byte, overhead_s = others or (0.0, 0.0)
        phones[phone] = PhoneFit(1 / slow, 1 / per_byte if per_byte else math.inf, overhead_s)
    X = np.array([counts(row.pair).for_memory for row in rows])
    found = weights(X[:, :3] if simple else X, np.array([row.peak_bytes for row in rows]))
    return Fit(phones, *found, *([0.0] if simple else []))


def weights(X: Array, y: Array) -> list[float]:
    """Positive w with the least squares of log(Xw ÷ y): Levenberg–Marquardt in log w, from three starts."""
    even = np.log(np.median(y[:, None] / X.clip(1e-12), axis=0) / X.shape[1])
    best, least = even, math.inf
    for start in (even, even - 1, even + np.linspace(-1, 1, len(even))):
        found, left = _descend(X, y, start)
        if left < least:
            best, least = found, left
    return [float(w) for w in np.exp(best)]


def _descend(X: Array, y: Array, log_w: Array) -> tuple[Array, float]:
    damping = 1e-2
    misses = np.log(X @ np.exp(log_w) / y)
    for _ in range(200):
        parts = X * np.exp(log_w)
        J = parts / parts.sum(axis=1, keepdims=True)
        step = np.linalg.solve(J.T @ J + damping * np.eye(len(log_w)), -J.T @ misses)
        tried = log_w + step.clip(-1, 1)
        new = np.log(X @ np.exp(tried) / y)
        if new @ new < misses @ misses:
            log_w, misses, damping = tried, new, max(damping / 3, 1e-9)
            if np.abs(step).max() < 1e-7:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    return log_w, float(misses @ misses)


# ---- how well it predicts


@dataclass(frozen=True)
class Errors:
    """|modelled ÷ measured − 1| of rows that were not fitted."""

    time: tuple[float, ...]
    memory: tuple[float, ...]

    @property
    def median_time(self) -> float:
        return float(np.median(self.time))

    @property
    def median_memory(self) -> float:
        return float(np.median(self.memory))


def errors(found: Fit, rows: Sequence[Row], counts: Count) -> Errors:
    return Errors(
        tuple(abs(found.time_s(row.phone, counts(row.pair)) / row.time_s - 1) for row in rows),
        tuple(abs(found.peak_bytes(counts(row.pair)) / row.peak_bytes - 1) for row in rows),
    )


def halves() -> tuple[frozenset[Pair], frozenset[Pair]]:
    """The fixed split: pairs dealt out in turns. The first half is fitted, the second predicted."""
    return frozenset(PAIRS[::2]), frozenset(PAIRS[1::2])


def held_out(rows: Sequence[Row], counts: Count, fitted: frozenset[Pair], *, simple: bool = False) -> Errors:
    """The errors on the pairs that are not fitted; both phones' rows of a pair are on the same side."""
    inside = [row for row in rows if row.pair in fitted]
    outside = [row for row in rows if row.pair not in fitted]
    return errors(fit(inside, counts, simple=simple), outside, counts)
