"""How a step is measured: the order of things, so that a number means the same everywhere.

    │ idle │ warm-up … steady │ measured: sampled and traced │ nothing │ sampling │ sampling and tracing │ sampling │ …
    └───────────── one sampler, one clock ──────────────────┘ in random order, step by step: its cost

In:  a prepared step and a batch, sensors, a run folder.
Out: `Measured`: the timeline of the measured steps, the samples of all of it, where each part lies on the clock, the
     times of the blocks.

The model is trained by all of these steps. Warm-up ends when a change-point test says that times are steady, or at
MAX_WARM_UP steps: `steady` says which.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from edgetrain import ranges
from edgetrain.measure.intervals import Interval, ratio_interval
from edgetrain.measure.metrics import Span
from edgetrain.measure.sampler import Sampler
from edgetrain.measure.samples import Samples, read_samples
from edgetrain.measure.samples_file import Summary
from edgetrain.measure.sensors.source import Source
from edgetrain.measure.steady import Steady, warm_up
from edgetrain.measure.timeline import Timeline, Tracer
from edgetrain.run.step import Step

Way = Literal["nothing", "sampling", "tracing"]
WAYS: tuple[Way, ...] = ("nothing", "sampling", "tracing")
Stage = Literal["idle", "warm-up", "measuring", "overhead"]

MAX_WARM_UP = 40  # steps
# Without a number of steps: enough of them for an interval, and time in which sensors that are read once a second and
# counters that tick a hundred times a second have something to say.
MIN_STEPS, MIN_TIME_S = 30, 3.0
MIN_BLOCK_S, MAX_BLOCK_S = 0.5, 1.0
SETTLE_S = 0.02  # after a sampler was paused or resumed


@dataclass(frozen=True)
class Protocol:
    """
    steps:  measured ones; None: MIN_STEPS, and as many more as take MIN_TIME_S.
    idle_s: of the baseline. period_s: of the sampler.
    rounds: of blocks that measure what measuring itself costs; 0 leaves them out.
    """

    steps: int | None = None
    idle_s: float = 3.0
    period_s: float = 0.01
    rounds: int = 12
    most_warm_up: int = MAX_WARM_UP
    seed: int = 0

    def __post_init__(self) -> None:
        ranges.whole("steps", MIN_STEPS if self.steps is None else self.steps, ranges.STEPS)
        ranges.number("idle_s", self.idle_s, ranges.IDLE_SECONDS)
        ranges.number("period_s", self.period_s, ranges.SECONDS)
        ranges.whole("rounds", self.rounds, ranges.ROUNDS)
        ranges.whole("seed", self.seed, ranges.SEED)


@dataclass(frozen=True)
class Progress:
    """What a live view shows. step: of `steps` in this stage."""

    stage: Stage
    step: int
    steps: int
    loss: float | None = None
    time_s: float | None = None


@dataclass(frozen=True)
class Measured:
    """
    warm_up_s: times of the steps before, and whether they had become steady.
    blocks: for each way, the median time of a step in each round.
    """

    timeline: Timeline
    samples: Samples
    sampler: Summary
    idle: Span
    measured: Span
    warm_up_s: tuple[float, ...]
    steady: Steady
    blocks: dict[Way, tuple[float, ...]] = field(default_factory=dict)

    def overhead(self, way: Way) -> Interval | None:
        """What a way of measuring adds to the time of a step, as a part of it."""
        if not self.blocks:
            return None
        ratio = ratio_interval(self.blocks[way], self.blocks["nothing"])
        return Interval(ratio.value - 1, ratio.low - 1, ratio.high - 1)


def measure(
    step: Step,
    batch: Sequence[Any],
    sources: Sequence[Source],
    folder: Path,
    protocol: Protocol | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Measured:
    how = protocol or Protocol()
    with step.not_captured_again():
        with Sampler(sources, folder, how.period_s, seed=how.seed) as sampler:
            idle = _idle(how, on_progress)
            steady, warm_up_s = _warm_up(step, batch, how, on_progress)
            measured, tracer = _measured(step, batch, folder, how, on_progress)
        timeline = tracer.result()
        blocks = _blocks(step, batch, sources, how, float(statistics.median(timeline.step_s)), on_progress)
    return Measured(timeline, read_samples(folder), sampler.summary, idle, measured, tuple(warm_up_s), steady, blocks)


def _measured(
    step: Step, batch: Sequence[Any], folder: Path, how: Protocol, on_progress: Callable[[Progress], None]
) -> tuple[Span, Tracer]:
    """The measured steps. Neither the sampler nor what watches the progress of them is part of a step's time."""
    tracer = Tracer(step, folder)
    began, done, taken = time.monotonic_ns(), 0, 0.0
    while _more(how, done, (time.monotonic_ns() - began) / 1e9):
        at = time.perf_counter()
        loss = float(tracer(*batch))
        taken = time.perf_counter() - at
        done += 1
        on_progress(Progress("measuring", done, _expected(how, done, taken), loss, taken))
    ended = time.monotonic_ns()
    tracer.keep()
    return Span(began, ended), tracer


def _more(how: Protocol, done: int, time_s: float) -> bool:
    if how.steps is not None:
        return done < how.steps
    return done < MIN_STEPS or time_s < MIN_TIME_S


def _expected(how: Protocol, done: int, step_s: float) -> int:
    """How many steps there will be, by the time of the last one."""
    return how.steps or max(MIN_STEPS, done, math.ceil(MIN_TIME_S / step_s))


def _idle(how: Protocol, on_progress: Callable[[Progress], None]) -> Span:
    on_progress(Progress("idle", 0, 1))
    began = time.monotonic_ns()
    time.sleep(how.idle_s)
    return Span(began, time.monotonic_ns())


def _warm_up(
    step: Step, batch: Sequence[Any], how: Protocol, on_progress: Callable[[Progress], None]
) -> tuple[Steady, list[float]]:
    """Steps until their times are steady."""
    done = 0

    def one() -> float:
        nonlocal done
        done += 1
        taken = _timed(step, batch)
        on_progress(Progress("warm-up", done, how.most_warm_up, None, taken))
        return taken

    return warm_up(one, most_steps=how.most_warm_up)


def _block(step: Callable[..., Any], batch: Sequence[Any], length: int) -> float:
    """The median time of a step. On a machine that has become slower since, a block has fewer steps."""
    until = time.monotonic() + MAX_BLOCK_S
    times = [_timed(step, batch)]
    while len(times) < length and time.monotonic() < until:
        times.append(_timed(step, batch))
    return statistics.median(times)


def _timed(step: Callable[..., Any], batch: Sequence[Any]) -> float:
    began = time.perf_counter()
    float(step(*batch))  # waits for a GPU
    return time.perf_counter() - began


def _blocks(
    step: Step,
    batch: Sequence[Any],
    sources: Sequence[Source],
    how: Protocol,
    step_s: float,
    on_progress: Callable[[Progress], None],
) -> dict[Way, tuple[float, ...]]:
    """Steps without measuring, with sampling, with sampling and tracing, taking turns."""
    if not how.rounds:
        return {}
    times_s: dict[Way, list[float]] = {way: [] for way in WAYS}
    length = max(1, round(MIN_BLOCK_S / step_s))
    shuffle = random.Random(how.seed)
    with tempfile.TemporaryDirectory(prefix="edgetrain-overhead-") as scratch:
        tracer = Tracer(step, Path(scratch))
        tracer(*batch)  # the first one also writes down what the ops are
        runs: dict[Way, Callable[..., Any]] = {"nothing": step, "sampling": step, "tracing": tracer}
        with Sampler(sources, scratch, how.period_s) as sampler:
            for number in range(how.rounds):
                for way in shuffle.sample(WAYS, len(WAYS)):
                    (sampler.pause if way == "nothing" else sampler.resume)()
                    time.sleep(SETTLE_S)
                    times_s[way].append(_block(runs[way], batch, length))
                on_progress(Progress("overhead", number + 1, how.rounds))
    return {way: tuple(times) for way, times in times_s.items()}
