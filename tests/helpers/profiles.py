"""Run folders of profile runs, for tests: the timeline of a real small step, and samples whose truth is known.

The samples are not of a sensor. They are computed from the timeline: power by the kind of op, cores busy while a step
runs, memory that follows the steps; written in the format of `measure/samples_file.py`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.measure.attributed import FILE as ATTRIBUTION
from edgetrain.measure.attributed import Attributed, Group, save_attributed
from edgetrain.measure.picture import save as save_picture
from edgetrain.measure.picture import traced
from edgetrain.measure.record import RunFolder, Value, new_record
from edgetrain.measure.samples_file import FORMAT, SAMPLES, SCHEMA, SUMMARY, Read, Summary
from edgetrain.measure.sensors.source import Channel
from edgetrain.measure.series import BLOCK
from edgetrain.measure.timeline import WHAT_FILE, Timeline, Tracer
from edgetrain.run.step import Step

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BATCH = (torch.linspace(-1, 1, 8 * 3 * 16 * 16).reshape(8, 3, 16, 16), torch.arange(8) % 5)
EVIL = "</script><script>alert(1)</script>"


class Block(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm = nn.BatchNorm2d(outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(Block(3, 8), Block(8, 8), Block(8, 16))
        self.classifier = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.classifier(self.features(x).mean((2, 3)))
        return found


def prepared() -> Step:
    """A step that recomputes something."""

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    def step(memory: int | None) -> Step:
        torch.manual_seed(0)
        model = Net()
        return et.prepare(model, loss, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), BATCH, memory=memory)

    plan = step(None).plan
    return step(plan.persistent_bytes + int(0.7 * (plan.peak_bytes - plan.persistent_bytes)))


def profiled(path: Path, step: Step, batch: tuple[torch.Tensor, ...], *, steps: int, period_s: float) -> RunFolder:
    """A whole profile run of this step."""
    folder = RunFolder.create(path)
    tracer = Tracer(step, folder.path)
    for _ in range(steps):
        tracer(*batch)
    timeline = tracer.result()
    write_samples(folder.path, timeline, period_s)
    save_attributed([energies(timeline)], folder.path)
    save_picture(traced(step.trace_micro_batches(*batch), {op.name for op in timeline.ops}), folder.path)
    record = new_record(["edgetrain", "profile", "net", "--batch", "8"], timeline="timeline.json", samples=SAMPLES)
    folder.save(replace(record, status="finished", summary=summary(timeline, step)))
    return folder


def summary(timeline: Timeline, step: Step) -> dict[str, Value]:
    low, middle, high = (float(q) for q in np.quantile(timeline.step_s, (0.05, 0.5, 0.95)))
    return {
        "time of a step": Value(middle, "s", "measured", low, high),
        "throughput": Value(8 / middle, "samples/s", "derived", 8 / high, 8 / low),
        "peak memory of a step": Value(step.plan.peak_bytes, "bytes", "derived"),
        "energy a batch, net": Value(4.1 * middle, "J", "modelled", 3.3 * middle, 4.9 * middle),
        "mean power": Value(4.1, "W", "modelled", 3.3, 4.9),
        "mean utilisation of the cores": Value(0.31, "1", "measured", 0.29, 0.33),
        "steps": Value(timeline.steps, "steps", "measured"),
        "GPU utilisation": Value(None, "1", "unavailable"),
        "steady": Value(True, "", "derived"),
        "noise": Value("quiet", "", "derived"),
    }


def level_w(timeline: Timeline) -> Floats:
    """The true power of each op."""
    return np.array([6.0 if "conv" in op.kind else 4.5 if op.phase != "update" else 3.0 for op in timeline.ops])


def energies(timeline: Timeline) -> Attributed:
    """As an attribution would find them: neighbours that are short are merged, the last op has no figure."""
    amounts = timeline.op_s.mean(axis=0) * level_w(timeline)
    n = len(timeline.ops)
    single = [Group((place,), float(a), 0.9 * float(a), 1.1 * float(a)) for place, a in enumerate(amounts[: n - 4])]
    both = float(amounts[n - 4] + amounts[n - 3])
    merged = Group((n - 4, n - 3), both, 0.5 * both, 1.5 * both)
    open_ended = Group((n - 2,), float(amounts[n - 2]), 0.0, None)
    return Attributed(
        "energy", "J", "measured", "rapl: package_energy_j",
        (*single, merged, open_ended, Group((n - 1,), None, None, None)), 100, 0.03,
    )  # fmt: skip


# Samples


def write_samples(folder: Path, timeline: Timeline, period_s: float) -> None:
    """samples.bin and samples.json, from some time before the first step to some time after the last."""
    period_ns = round(period_s * 1e9)
    begin, end = int(timeline.step_ns[0, 0]) - 20 * period_ns, int(timeline.step_ns[-1, 1]) + 20 * period_ns
    jitter = np.random.default_rng(0).integers(0, period_ns // 2, len(range(begin, end, period_ns)))
    at = np.arange(begin, end, period_ns) + jitter
    sources = [*_power(timeline, at), *_cores(timeline, at), *_rest(timeline, at)]
    header = {
        "format": FORMAT, "schema": SCHEMA, "clock": "monotonic", "period_ns": period_ns, "started_ns": begin,
        "wall_offset_ns": 10**18,
        "sources": [{"name": name, "channels": [asdict(c) for c in channels]} for name, channels, _ in sources],
    }  # fmt: skip
    blocks = [json.dumps(header).encode() + b"\n"]
    for number, (_, channels, values) in enumerate(sources):
        rows = np.zeros(len(at), [("before", "<i8"), ("after", "<i8"), ("values", "<f8", (len(channels),))])
        rows["before"], rows["after"], rows["values"] = at, at + 20_000, values
        for part in np.array_split(rows, 3):
            blocks += [BLOCK.pack(number, len(part)), part.tobytes()]
    (folder / SAMPLES).write_bytes(b"".join(blocks))
    reads = tuple(Read(name, 1, 2e-5, len(at), 0) for name, _, _ in sources)
    said = Summary(
        "asked", (end - begin) / 1e9, len(at), len(at), keeps_up=True, sources=reads, notes=("It is warm here.",)
    )
    (folder / SUMMARY).write_text(json.dumps(asdict(said)))


Source = tuple[str, tuple[Channel, ...], Floats]


def _spent(timeline: Timeline, at: Ints, level: Floats, idle: float) -> Floats:
    """The integral, up to each time, of a level that each op has while it runs."""
    begin, end = timeline.begin_ns.ravel(), timeline.end_ns.ravel()
    levels = np.tile(level - idle, timeline.steps)
    edges = np.stack([begin, end], axis=1).ravel()
    total = np.cumsum(np.stack([np.zeros(len(begin)), levels * (end - begin) * 1e-9], axis=1).ravel())
    return np.asarray(np.interp(at, edges, total) + idle * (at - at[0]) * 1e-9)


def _power(timeline: Timeline, at: Ints) -> list[Source]:
    spent = _spent(timeline, at, level_w(timeline), 1.2)
    spent[len(spent) // 2] = np.nan  # a reading that failed
    return [("rapl", (Channel("package_energy_j", "J", True, "measured"),), spent[:, None])]


def _cores(timeline: Timeline, at: Ints) -> list[Source]:
    n = len(timeline.ops)
    busy = [_spent(timeline, at, np.full(n, level), 0.02) for level in (0.97, 0.12, 0.08, 0.05)]
    names = [f"cpu{core}_time_s" for core in range(4)]
    channels = tuple(Channel(name, "s", True, "measured") for name in names)
    process = _spent(timeline, at, np.full(n, 0.99), 0.0)
    return [
        ("core time", channels, np.stack(busy, axis=1)),
        ("process time", (Channel("process_time_s", "s", True, "measured"),), process[:, None]),
    ]


def _rest(timeline: Timeline, at: Ints) -> list[Source]:
    step = np.searchsorted(timeline.step_ns[:, 0], at) % 2
    seconds = (at - at[0]) * 1e-9
    resident = 4.1e8 + 2e6 * np.sin(at / 3e6) + 1e6 * step
    warm = 48 + 9 * (1 - np.exp(-seconds / max(seconds[-1] / 3, 1e-9)))
    clock = np.where(seconds > 0.7 * seconds[-1], 1.2e9, 1.5e9)
    return [
        ("process memory", (Channel("process_resident_bytes", "B", False, "measured"),), resident[:, None]),
        ("thermal", (Channel("temp_cpu_c", "°C", False, "measured"),), warm[:, None]),
        ("cpu frequency", (Channel("cpu0_frequency_hz", "Hz", False, "measured"),), clock[:, None]),
        ("nothing", (Channel("gpu_utilisation", "1", False, "unavailable"),), np.full((len(at), 1), np.nan)),
    ]


# Hostile runs: script in every name, numbers of any size


def evil_ops(folder: RunFolder) -> None:
    file = folder.path / WHAT_FILE
    told = json.loads(file.read_text())
    for op in told["ops"]:
        op |= {"name": EVIL, "module": f"a.{EVIL}", "kind": EVIL, "flops": 2**63 - 1}
    file.write_text(json.dumps(told))


def evil_record(folder: RunFolder) -> None:
    record = folder.load()
    summary = {
        EVIL: Value(EVIL, EVIL, "measured"),
        "huge": Value(1.7e308, "s", "measured"),
        "long": Value(10**299, "B", "derived"),
    }
    machine = replace(record.machine, cpu=EVIL, cores=10**200, memory_bytes=10**200, os=EVIL)
    versions = replace(record.versions, torch=EVIL)
    folder.save(
        replace(
            record, command=(EVIL,), created=EVIL, commit=EVIL, summary=summary, machine=machine, versions=versions,
            notes=(EVIL, "long " * 10_000),
        )
    )  # fmt: skip


def evil_samples(folder: RunFolder) -> None:
    head, _, rest = (folder.path / SAMPLES).read_bytes().partition(b"\n")
    told = json.loads(head)
    for n, source in enumerate(told["sources"]):
        source["name"] = EVIL.replace("/", "") + str(n)
        for m, channel in enumerate(source["channels"]):
            channel["name"] = f"<b onload=x>{m}"
    rows = np.frombuffer(rest[8:32], dtype="<f8").copy()
    rows[2] = 1e308
    (folder.path / SAMPLES).write_bytes(json.dumps(told).encode() + b"\n" + rest[:8] + rows.tobytes() + rest[32:])


def evil_energy(folder: RunFolder) -> None:
    told = json.loads((folder.path / ATTRIBUTION).read_text())
    told["attributed"][0] |= {"source": EVIL, "quantity": EVIL}
    told["attributed"][0]["groups"][0] |= {"amount": 1e308, "low": -1e308, "high": 1.7e308}
    (folder.path / ATTRIBUTION).write_text(json.dumps(told))


HOSTILE = (evil_ops, evil_record, evil_samples, evil_energy)
