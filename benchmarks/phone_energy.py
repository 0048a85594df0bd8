"""The power traces of EMDL'21's Meizu 16T, replayed: gross power beside the published one, and net energy a batch.

    EDGETRAIN_DATA=… python -m benchmarks.phone_energy     prints the table and keeps it in results/phone_energy.*

    trace  ──replay──▶  power of USB and battery, by the sources that read a phone
    ░░░░░░░░▒▒▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▒▒▒▒▒▒ ░        one batch size: idle, start, training, inference
            ╰─╯╰── training ──╯                 the published number of batches × the published time of one

Gross power is published as the highest current and the highest voltage seen while training; so it is taken here. Left
out of the training window are its first sample (the process starts) and one sampling period at each end (half in, half
out). Inference is told from training by the CPU use, which is lower.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.contenders import RESULTS, about
from benchmarks.markdown import head, line, made
from benchmarks.replay import Played, Trace, read_trace, replay

FOLDER = "MEIZU_Freq_1708800"
NETS = {
    "Lenet": "LeNet",
    "Alexnet": "AlexNet",
    "GoogLenet": "GoogLeNet",
    "Mobilenet": "MobileNetV2",
    "Squeezenet": "SqueezeNet",
}
BATCHES = (1, 2, 4, 8, 16)  # those with a published energy


@dataclass(frozen=True)
class Published:
    """What EMDL'21 gives for one network at one batch size. n_batches: how many were trained in the trace."""

    net: str
    batch: int
    usb_current_a: float
    usb_voltage_v: float
    virtual_mb: float
    step_s: float
    net_j: float
    n_batches: int

    @property
    def gross_w(self) -> float:
        return self.usb_current_a * self.usb_voltage_v


@dataclass(frozen=True)
class Energy:
    """One network at one batch size: published and replayed.

    gross_w: of USB, the highest current × the highest voltage, as published. mean_*: over the training window.
    idle_*: median before the training process starts. net_usb_j and net_j: above that, USB alone and with the battery.
    implied_idle_w: what must have been subtracted from USB's mean power to get the published joules.
    """

    published: Published
    samples: int
    gross_w: float
    mean_usb_w: float
    mean_battery_w: float
    idle_usb_w: float
    idle_w: float

    @property
    def gross_off(self) -> float:
        return self.gross_w / self.published.gross_w - 1

    @property
    def net_usb_j(self) -> float:
        return (self.mean_usb_w - self.idle_usb_w) * self.published.step_s

    @property
    def net_j(self) -> float:
        return (self.mean_usb_w + self.mean_battery_w - self.idle_w) * self.published.step_s

    @property
    def implied_idle_w(self) -> float:
        return self.mean_usb_w - self.published.net_j / self.published.step_s


def published(data: Path, net: str) -> list[Published]:
    performance = _rows(data / FOLDER / net / f"performance_{net}.csv")
    times = {
        row["batchsize"]: float(row["expr_train"]) / 1e3 for row in _rows(data / FOLDER / net / f"time_table_{net}.csv")
    }
    each = _rows(data / f"singleBatch_energy_{FOLDER}.csv")
    whole = _rows(data / f"batchsize_energy_{FOLDER}.csv")
    return [
        Published(
            net, batch, float(row["usb_current"]) / 1e6, float(row["usb_voltage"]) / 1e6, float(row["VIRT"]),
            times[row["batchsize"]], float(one[net]), round(float(all_[net]) / float(one[net])),
        )
        for batch, row, one, all_ in zip(BATCHES, performance, each, whole, strict=False)
    ]  # fmt: skip


def _rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def runs(trace: Trace, rows: Sequence[Published]) -> list[list[int]]:
    """The samples of each batch size, in order: a new one begins after a gap without a process, or where the process
    is larger than the one before ever was."""
    found: list[list[int]] = [[]]
    for n, virtual in enumerate(trace.virtual_bytes):
        limit = rows[min(len(found), len(rows)) - 1].virtual_mb * 1.01 * 2**20
        if found[-1] and (virtual is None or virtual > limit):
            found.append([])
        if virtual is not None:
            found[-1].append(n)
    return found[: len(rows)]


def training(trace: Trace, run: list[int], duration_s: float) -> list[int]:
    """The samples of a run that lie in its training: the window of that length with the most CPU use."""
    times = trace.recording.times_s
    period_s = statistics.median(times[b] - times[a] for a, b in itertools.pairwise(run))
    length_s = duration_s - 2 * period_s
    windows = [[n for n in run[a:] if times[n] < times[run[a]] + length_s] for a in range(1, len(run))]
    inside = [w for w in windows if times[w[0]] + length_s <= times[run[-1]] + period_s] or windows[:1]
    return max(inside, key=lambda window: statistics.fmean(trace.cpu[n] or 0.0 for n in window))


def energies(data: Path, net: str) -> list[Energy]:
    trace = read_trace(data / FOLDER / net / f"processed_data_{net}.csv")
    played, rows = replay(trace.recording), published(data, net)
    before = list(range(next(n for n, size in enumerate(trace.virtual_bytes) if size is not None)))
    idle_usb, idle = (statistics.median(_known(played, name, before)) for name in ("usb_power_w", "supply_power_w"))
    found = []
    for row, run in zip(rows, runs(trace, rows), strict=True):
        window = training(trace, run, row.n_batches * row.step_s)
        current, voltage = (max(_known(played, f"usb_{what}", window)) for what in ("current_a", "voltage_v"))
        usb, battery = (statistics.fmean(_known(played, f"{of}_power_w", window)) for of in ("usb", "battery"))
        found.append(Energy(row, len(window), current * voltage, usb, battery, idle_usb, idle))
    return found


def _known(played: Played, name: str, window: Sequence[int]) -> list[float]:
    column = played.column(name)
    return [value for n in window if (value := column[n]) is not None]


# ---- on paper


def page(found: Sequence[Energy], source: str) -> Iterator[str]:
    yield "# Power traces of a Meizu 16T (EMDL'21), replayed\n"
    yield f"{source}\n"
    yield from table(found)
    yield ""
    yield from summary(found)


def table(found: Sequence[Energy]) -> Iterator[str]:
    yield from head(
        "network", "batch", "gross W published", "replayed", "off", "USB mean W", "battery W",
        "net J published", "USB above idle", "USB + battery above idle", "implied idle W",
    )  # fmt: skip
    for e in found:
        p = e.published
        yield line(
            NETS[p.net], str(p.batch), f"{p.gross_w:.3f}", f"{e.gross_w:.3f}", f"{100 * e.gross_off:+.2f} %",
            f"{e.mean_usb_w:.2f}", f"{e.mean_battery_w:.2f}", f"{p.net_j:.3g}", f"{e.net_usb_j:.3g}",
            f"{e.net_j:.3g}", f"{e.implied_idle_w:.2f}",
        )  # fmt: skip


def summary(found: Sequence[Energy]) -> Iterator[str]:
    worst = max(abs(e.gross_off) for e in found)
    implied = [e.implied_idle_w for e in found]
    low, middle, high = statistics.quantiles(implied, n=4)
    battery = [e.mean_battery_w for e in found if e.published.net != "Lenet"]
    ratio = [e.net_j / e.published.net_j for e in found if e.published.net != "Lenet"]
    idle = sorted({round(e.idle_w, 2) for e in found})
    yield f"Gross power: off by {100 * worst:.2f} % at most, over {len(found)} pairs of network and batch."
    yield f"Idle power that the published joules imply: median {middle:.2f} W, half of them {low:.2f} to {high:.2f} W."
    yield f"Idle power in the traces, medians before training: {', '.join(f'{w:.2f}' for w in idle)} W."
    yield (
        f"The battery beside USB, without LeNet: median {statistics.median(battery):.2f} W, {min(battery):.2f} to "
        f"{max(battery):.2f} W; net energy with it: {statistics.median(ratio):.2f} times the published, in the median."
    )


def main() -> None:
    if "EDGETRAIN_DATA" not in os.environ:
        sys.exit("EDGETRAIN_DATA must name the folder that holds emdl21-phones")
    data = Path(os.environ["EDGETRAIN_DATA"]) / "emdl21-phones"
    found = [energy for net in NETS for energy in energies(data, net)]
    told = about()
    text = "\n".join(page(found, made(told))) + "\n"
    print(text)
    (RESULTS / "phone_energy.md").write_text(text)
    rows = [
        {**asdict(e), "net_j": e.net_j, "net_usb_j": e.net_usb_j, "implied_idle_w": e.implied_idle_w} for e in found
    ]
    (RESULTS / "phone_energy.json").write_text(json.dumps({"about": told, "energies": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
