"""Does the device model tell the time and the memory of training on a phone that it was not fitted on?

    EDGETRAIN_DATA=… python -m benchmarks.phones      prints the tables and keeps them in benchmarks/results/phones.*

Measured by EMDL'21 on two phones: five networks at five batch sizes. The 25 pairs of network and batch are dealt out
in turns; one half is fitted (`phone_fit.py`), the other predicted, both phones' rows of a pair on the same side. Beside
it: the halves exchanged, 200 random halves, each network left out whole, batch 32, a phone on which nothing is fitted.
Last, the numbers fitted to all pairs, which are those of the device files; a test compares.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders import RESULTS, about
from benchmarks.phone_drawing import Dot, drawing
from benchmarks.phone_fit import (
    BATCHES,
    MODELS,
    PAIRS,
    PHONES,
    Count,
    Errors,
    Fit,
    Pair,
    Row,
    counter,
    energies,
    errors,
    fit,
    halves,
    held_out,
    read,
)
from benchmarks.phone_nets import ZOO
from edgetrain.devices.device import load

LIMITS = {"time": 0.30, "memory": 0.20}  # that the project set itself, for the median error of the half not fitted
RANDOM_HALVES = 200
# EMDL'21, Table 1: MobileNetV2 by MNN on a Samsung Note 10, batch → seconds. Nothing here is fitted to it.
NOTE_10 = {1: 0.516, 2: 0.812, 4: 1.365}


def study(data: Path) -> dict[str, Any]:
    print("counting what the networks do …", file=sys.stderr, flush=True)
    counts = counter()
    all_rows = read(data)
    rows = [row for row in all_rows if row.batch in BATCHES]
    first, second = halves()
    whole = fit(rows, counts)
    return {
        "about": about(),
        "limits": LIMITS,
        "split": {"fitted": sorted(first), "predicted": sorted(second)},
        "predicted": _told(held_out(rows, counts, first)),
        "halves exchanged": _told(held_out(rows, counts, second)),
        "simple": _told(held_out(rows, counts, first, simple=True)),
        "published networks": _told(held_out(rows, counter(ZOO), first)),
        "random halves": random_halves(rows, counts),
        "left out whole": {model: _told(held_out(rows, counts, _without(model))) for model in MODELS},
        "batch 32": _told(errors(whole, [row for row in all_rows if row.batch == 32], counts)),
        "rows": predictions(rows, counts, fit([row for row in rows if row.pair in first], counts), first),
        "batch 32 rows": predictions([row for row in all_rows if row.batch == 32], counts, whole, frozenset()),
        "note 10": note_10(counts),
        "energy": energy(data, counts),
        "fitted to all": asdict(whole) | {"plus_minus": spread(rows, counts)},
    }


def _without(model: str) -> frozenset[Pair]:
    return frozenset(pair for pair in PAIRS if pair[0] != model)


def _told(found: Errors) -> dict[str, Any]:
    return {
        "median_time": found.median_time, "median_memory": found.median_memory, "rows": len(found.time),
        "largest_time": max(found.time), "largest_memory": max(found.memory),
    }  # fmt: skip


def _random(seed: int) -> frozenset[Pair]:
    order = np.random.default_rng(seed).permutation(len(PAIRS))
    return frozenset(PAIRS[n] for n in order[: (len(PAIRS) + 1) // 2])


def random_halves(rows: Sequence[Row], counts: Count) -> dict[str, Any]:
    """The median errors over many splits: their mean, and the one that 19 of 20 are below."""
    found = [held_out(rows, counts, _random(seed)) for seed in range(RANDOM_HALVES)]
    time, memory = [e.median_time for e in found], [e.median_memory for e in found]
    return {
        "splits": RANDOM_HALVES,
        "mean_time": float(np.mean(time)), "p95_time": float(np.quantile(time, 0.95)), "worst_time": max(time),
        "mean_memory": float(np.mean(memory)), "p95_memory": float(np.quantile(memory, 0.95)),
        "worst_memory": max(memory),
    }  # fmt: skip


def spread(rows: Sequence[Row], counts: Count) -> dict[str, float]:
    """How far each fitted number lies from its median in two of three random halves, as a part of it."""
    found = [fit([r for r in rows if r.pair in _random(seed)], counts) for seed in range(RANDOM_HALVES)]
    values = {name: [getattr(f, name) for f in found] for name in ("base_bytes", "lasting", "held", "columns")}
    for phone in PHONES:
        for name in ("flop_s", "bandwidth_bytes_s", "overhead_s"):
            values[f"{phone}.{name}"] = [getattr(f.phones[phone], name) for f in found]
    return {name: _two_thirds(np.array(v)) for name, v in values.items()}


def _two_thirds(values: np.ndarray[Any, Any]) -> float:
    return float(np.quantile(np.abs(values / np.median(values) - 1), 2 / 3))


def predictions(rows: Sequence[Row], counts: Count, found: Fit, fitted: frozenset[Pair]) -> list[dict[str, Any]]:
    return [
        asdict(row)
        | {
            "modelled_time_s": found.time_s(row.phone, counts(row.pair)),
            "modelled_peak_bytes": found.peak_bytes(counts(row.pair)),
            "fitted": row.pair in fitted,
        }
        for row in rows
    ]


def note_10(counts: Count) -> list[dict[str, float]]:
    """The device file of another phone, whose numbers are estimates, against three published times."""
    device = load("samsung_note_10")
    rate, bandwidth = device.processor.conv_flop_s, device.memory.bandwidth_bytes_s.value
    assert rate is not None
    weights = (1 / rate.value, 1 / bandwidth, device.library.overhead_s.value)
    return [
        {
            "batch": batch, "time_s": time_s,
            "modelled_time_s": sum(w * x for w, x in zip(weights, counts(("Mobilenet", batch)).for_time, strict=True)),
        }
        for batch, time_s in NOTE_10.items()
    ]  # fmt: skip


def energy(data: Path, counts: Count) -> dict[str, Any]:
    """Joules of a batch on the Meizu: measured time and modelled time × power of the device file, beside what was
    published, which counts what came in by USB and not what the battery gave."""
    device = load("meizu_16t")
    assert device.processor.power_w is not None
    watts = device.processor.power_w.value
    rows = [row for row in read(data) if row.phone == "meizu_16t" and row.batch in BATCHES]
    found = fit(rows + [row for row in read(data) if row.phone != "meizu_16t" and row.batch in BATCHES], counts)
    published = energies(data)
    table = [
        {
            "model": row.model, "batch": row.batch, "published_j": published[row.pair],
            "modelled_j": watts * found.time_s(row.phone, counts(row.pair)),
            "published_w": published[row.pair] / row.time_s,
        }
        for row in rows
    ]  # fmt: skip
    ratios = [watts * found.time_s(row.phone, counts(row.pair)) / published[row.pair] for row in rows]
    return {"power_w": watts, "source": device.processor.power_w.source, "rows": table,
            "median_ratio": float(np.median(ratios))}  # fmt: skip


# ---- as text


def page(found: dict[str, Any]) -> str:
    lines = [
        "# The device model against two phones", "",
        "Median of |modelled ÷ measured − 1| over rows that were not fitted; by `python -m benchmarks.phones`.", "",
        "| rows predicted | time | peak memory | largest error of time | of memory |", "|---|---|---|---|---|",
        _line("the half not fitted (fixed split)", found["predicted"]),
        _line("the halves exchanged", found["halves exchanged"]),
    ]  # fmt: skip
    r = found["random halves"]
    lines.append(
        f"| {r['splits']} random halves, mean (19 of 20 are below) | {_pc(r['mean_time'])} ({_pc(r['p95_time'])}) | "
        f"{_pc(r['mean_memory'])} ({_pc(r['p95_memory'])}) | | |"
    )
    lines += [_line(f"{model} left out whole", row) for model, row in found["left out whole"].items()]
    lines.append(_line("batch 32 (Meizu; fitted to all smaller ones)", found["batch 32"]))
    lines.append(
        _line("for comparison, fixed split: time by operations alone, memory without columns", found["simple"])
    )
    lines.append(_line("for comparison, fixed split: the published networks (our zoo)", found["published networks"]))
    limits = found["limits"]
    lines += ["", f"Limits: {_pc(limits['time'])} of time, {_pc(limits['memory'])} of memory.", ""]
    lines += ["![modelled against measured](phones.svg)", "", *_numbers(found), *_rows(found), *_others(found)]
    return "\n".join(lines) + "\n"


def _line(name: str, row: dict[str, Any]) -> str:
    return (
        f"| {name} | **{_pc(row['median_time'])}** | **{_pc(row['median_memory'])}** | {_pc(row['largest_time'])} | "
        f"{_pc(row['largest_memory'])} |"
    )


def _pc(part: float) -> str:
    return f"{100 * part:.1f} %"


def _numbers(found: dict[str, Any]) -> list[str]:
    whole = found["fitted to all"]
    off = whole["plus_minus"]
    lines = ["## What is fitted", "", "To all 25 pairs; these numbers are in the device files. In brackets: how far a "
             "number lies from its median in two of three random halves.", "",
             "| phone | operations a second | bytes a second | overhead of an op |", "|---|---|---|---|"]  # fmt: skip
    for phone, row in whole["phones"].items():
        told = [off[f"{phone}.{name}"] for name in ("flop_s", "bandwidth_bytes_s", "overhead_s")]
        lines.append(
            f"| {phone} | {row['flop_s'] / 1e9:.1f} G ({_pc(told[0])}) | {row['bandwidth_bytes_s'] / 1e9:.2f} G "
            f"({_pc(told[1])}) | {row['overhead_s'] * 1e6:.0f} µs ({_pc(told[2])}) |"
        )
    parts = [f"{whole['base_bytes'] / 1e6:.1f} MB ({_pc(off['base_bytes'])})"]
    parts += [f"{whole[name]:.2f} ({_pc(off[name])})" for name in ("lasting", "held", "columns")]
    return [
        *lines, "",
        "| memory of the process (both phones) | × parameters | × forward results | × columns of convolutions |",
        "|---|---|---|---|", f"| {' | '.join(parts)} |", "",
    ]  # fmt: skip


def _rows(found: dict[str, Any]) -> list[str]:
    lines = ["## Every row", "", "Fitted rows have a star; the others are predicted from them.", "",
             "| phone | network, batch | time, measured | modelled | memory, measured | modelled |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for row in [*found["rows"], *found["batch 32 rows"]]:
        star = " *" if row["fitted"] or row["batch"] == 32 else ""
        time, peak = row["modelled_time_s"] / row["time_s"] - 1, row["modelled_peak_bytes"] / row["peak_bytes"] - 1
        lines.append(
            f"| {row['phone']} | {row['model']}, {row['batch']}{star if row['batch'] != 32 else ' (all fitted)'} | "
            f"{_ms(row['time_s'])} | {_ms(row['modelled_time_s'])} ({100 * time:+.0f} %) | "
            f"{row['peak_bytes'] / 1e6:.0f} MB | {row['modelled_peak_bytes'] / 1e6:.0f} MB ({100 * peak:+.0f} %) |"
        )
    return [*lines, ""]


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:.3g} ms" if time_s < 1 else f"{time_s:.2f} s"


def _others(found: dict[str, Any]) -> list[str]:
    lines = ["## Samsung Note 10, on which nothing is fitted", "",
             "MobileNetV2 (EMDL'21, Table 1), from the estimates of its device file.", "",
             "| batch | measured | modelled |", "|---|---|---|"]  # fmt: skip
    for row in found["note 10"]:
        change = row["modelled_time_s"] / row["time_s"] - 1
        lines.append(
            f"| {row['batch']} | {_ms(row['time_s'])} | {_ms(row['modelled_time_s'])} ({100 * change:+.0f} %) |"
        )
    e = found["energy"]
    lines += [
        "", "## Energy, compared and not fitted", "",
        f"Joules of a batch on the Meizu: modelled time × {e['power_w']:g} W ({e['source']}). Published is what came "
        "in by USB, above what came in before training. USB gives 2.36 W at most, and the traces show the battery "
        f"giving the rest, so the published figures are too low: the modelled ones are {e['median_ratio']:.2f} times "
        "as much in the median.", "",
        "| network, batch | published (USB alone) | modelled | published ÷ measured time |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in e["rows"]:
        lines.append(
            f"| {row['model']}, {row['batch']} | {row['published_j']:.3g} J | {row['modelled_j']:.3g} J | "
            f"{row['published_w']:.2f} W |"
        )
    return lines


def _dots(found: dict[str, Any], measured: str, modelled: str) -> list[Dot]:
    return [
        Dot(row[measured], row[modelled], row["model"], row["phone"], row["fitted"],
            f"{row['model']}, batch {row['batch']}, {row['phone']}")
        for row in found["rows"]
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if "EDGETRAIN_DATA" not in os.environ:
        sys.exit("EDGETRAIN_DATA must name the folder that holds emdl21-phones")
    found = study(Path(os.environ["EDGETRAIN_DATA"]) / "emdl21-phones")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "phones.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "phones.md").write_text(page(found))
    panels = [
        ("time of a step, s", _dots(found, "time_s", "modelled_time_s")),
        ("peak memory, bytes", _dots(found, "peak_bytes", "modelled_peak_bytes")),
    ]
    (RESULTS / "phones.svg").write_text(drawing(panels))
    print(page(found))
    over = [name for name, limit in LIMITS.items() if found["predicted"][f"median_{name}"] > limit]
    if over:
        sys.exit(f"over the limit: {', '.join(over)}")


if __name__ == "__main__":
    main()
