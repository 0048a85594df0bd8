"""What measuring costs: MobileNetV2 at batch 16 with nothing, with sampling, with sampling and tracing.

    python -m benchmarks.overhead [--rounds 60] [--threads N] [--cores 0-7] [--without nvidia]

kept in benchmarks/results/overhead.json

The ways take turns step by step, in random order (`edgetrain/measure/protocol.py`), with two steps of nothing in each
round. An overhead is the mean over the middle half of the rounds of the ratio within each, to the mean of its two steps
of nothing; the interval is a bootstrap's over rounds. (`edgetrain profile` shows medians: with few rounds they are the
safer figure, with hundreds this one tells more.) Asked: at most 1 % for sampling, at most 3 % with tracing. `again` is
nothing against nothing, which should be 0: how far it is off shows how well this machine can tell.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import edgetrain as et
from benchmarks.contenders import RESULTS, Case, about, build
from edgetrain.measure.processor import Processor, parse_cores, using
from edgetrain.measure.profile import found_sources
from edgetrain.measure.protocol import SETTLE_S
from edgetrain.measure.sampler import Sampler
from edgetrain.measure.sensors import Source
from edgetrain.measure.timeline import Tracer

WAYS = ("nothing", "again", "sampling", "tracing")
ASKED = {"sampling": 0.01, "tracing": 0.03}
WARM_UP = 5


def times(rounds: int, sources: Sequence[Source]) -> dict[str, list[float]]:
    """Seconds of a step of each way in each round."""
    built = build(Case("mobilenet_v2", 16, "sgd"))
    step = et.prepare(built.model, built.loss, built.optimizer, built.batch)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        tracer = Tracer(step, Path(folder))
        tracer(*built.batch)
        for _ in range(WARM_UP):
            step(*built.batch)
        with Sampler(sources, folder) as sampler:
            for _ in range(rounds):
                for way in random.sample(WAYS, len(WAYS)):
                    (sampler.resume if way in ASKED else sampler.pause)()
                    time.sleep(SETTLE_S)
                    began = time.perf_counter()
                    (tracer if way == "tracing" else step)(*built.batch)
                    found[way].append(time.perf_counter() - began)
    return found


def overhead(found: dict[str, list[float]], way: str) -> tuple[float, float, float]:
    """What a way adds to the time of a step, and the 95 % interval of it."""
    own, nothing, again = (np.array(found[name]) for name in (way, "nothing", "again"))
    ratios = own / (nothing if way == "again" else (nothing + again) / 2)
    drawn = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
    low, high = np.quantile(_middle(drawn), [0.025, 0.975])
    return float(_middle(ratios)) - 1, float(low) - 1, float(high) - 1


def _middle(ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of the middle half, along the last axis."""
    n = ratios.shape[-1]
    ordered = np.sort(ratios, axis=-1)
    return np.asarray(ordered[..., n // 4 : n - n // 4].mean(axis=-1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cores", help="to train on, such as 0-7; the sampler then keeps to the others")
    parser.add_argument("--without", nargs="*", default=[], help="sources that are not read")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    random.seed(0)
    sources = [source for source in found_sources(None) if source.name not in given.without]
    with using(Processor(given.threads, parse_cores(given.cores) if given.cores else None)):
        found = times(given.rounds, sources)
    rows: dict[str, Any] = {}
    for way in WAYS[1:]:
        value, low, high = overhead(found, way)
        rows[way] = {"overhead": value, "low": low, "high": high, "asked": ASKED.get(way)}
        print(f"{way}: {value:+.2%} ({low:+.2%} to {high:+.2%})")
    step_s = statistics.median(found["nothing"])
    print(f"a step takes {1e3 * step_s:.0f} ms on {given.threads} threads, {given.rounds} rounds")
    data = {
        "about": about(),
        "rounds": given.rounds,
        "threads": given.threads,
        "cores": given.cores,
        "sources": [source.name for source in sources],
        "step_s": step_s,
        "seconds": {way: [round(s, 6) for s in each] for way, each in found.items()},
        "ways": rows,
    }
    (given.results / "overhead.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
