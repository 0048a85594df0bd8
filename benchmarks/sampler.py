"""What the sampler delivers and what it takes, on this machine.

    python -m benchmarks.sampler [--seconds 60]     prints it and keeps it in benchmarks/results/sampler.json

Two cases: beside a process that sleeps, and beside one that keeps every core busy, as training does. Asked on a quiet
machine: at least 99 % of ticks delivered, lateness p95 at most 2 ms, at most 1.5 % of one core. How quiet it was stands
beside the result: the CPU time of everybody else, as cores, and the pressure on the processor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders import RESULTS, about
from edgetrain.measure.recorder import MAX_CORE_SHARE
from edgetrain.measure.sampler import Sampler
from edgetrain.measure.samples import Samples, read_samples
from edgetrain.measure.sampling import MAX_LATE_S, MIN_DELIVERED

ASKED = {"delivered": MIN_DELIVERED, "lateness_p95_s": MAX_LATE_S, "core_share": MAX_CORE_SHARE}


def spin() -> None:
    """One core, busy until it is ended."""
    values = np.random.default_rng(0).standard_normal((200, 200))
    while True:
        values = np.tanh(values @ values)


@contextlib.contextmanager
def busy(cores: int) -> Iterator[None]:
    workers = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(cores)]
    try:
        for worker in workers:
            worker.start()
        time.sleep(2)  # until they have loaded
        yield
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def grown(samples: Samples, source: str, channel: str) -> float | None:
    """What a counter grew by each second."""
    with contextlib.suppress(Exception):
        series = samples.source(source)
        _, values = series.column(channel)
        there = np.isfinite(values)
        return float(np.ptp(values[there]) / (np.ptp(series.at_ns[there]) * 1e-9))
    return None


def case(name: str, workers: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        with busy(workers), Sampler(None, folder) as sampler:
            time.sleep(seconds)
        samples, summary = read_samples(folder), sampler.summary
        written = (Path(folder) / "samples.bin").stat().st_size
    assert summary.ticks_due is not None
    assert summary.ticks_delivered is not None
    return {
        "case": name,
        "busy_workers": workers,
        "delivered": summary.ticks_delivered / summary.ticks_due,
        "cores_busy": grown(samples, "core time", "cpu_time_s"),
        "cores_stolen": grown(samples, "core time", "steal_time_s"),
        "cpu_pressure": grown(samples, "pressure", "pressure_cpu_s"),
        "bytes_a_second": written / seconds,
        "summary": asdict(summary),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    load = os.getloadavg()[0]
    rows = [case("beside a process that sleeps", 0, seconds), case("beside busy cores", os.cpu_count() or 1, seconds)]
    for row in rows:
        found = row["summary"]
        print(
            f"{row['case']}: {row['delivered']:.2%} of {found['ticks_due']} ticks, late by "
            f"{found['lateness_p50_s'] * 1e3:.2f} ms (p50) {found['lateness_p95_s'] * 1e3:.2f} ms (p95) "
            f"{found['lateness_max_s'] * 1e3:.1f} ms (most), {found['core_share']:.2%} of one core, "
            f"{found['resident_bytes'] / 1e6:.0f} MB; cores busy {row['cores_busy'] or 0:.2f}, "
            f"pressure {row['cpu_pressure'] or 0:.1%}"
        )
    data = {"about": about(), "seconds": seconds, "load_before": load, "asked_on_a_quiet_machine": ASKED, "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "sampler.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
