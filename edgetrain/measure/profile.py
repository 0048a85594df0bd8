"""`et.profile`: one training step measured, op by op, in a run folder.

In:  a prepared step and a batch.
Out: `Profile`, and a run folder: record.json (the summary), timeline.json and .bin, samples.bin and .json,
     attribution.json, memory.json. `edgetrain report` draws it.

How it is measured stands in `protocol.py`. Every value of the summary says whether it was measured, derived or
modelled; what this machine cannot measure is "unavailable", never 0.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgetrain.arguments import checked
from edgetrain.errors import UserError
from edgetrain.measure import likeness, metrics
from edgetrain.measure.attribute import attribute
from edgetrain.measure.attributed import Attributed, groups, op_names, save_attributed
from edgetrain.measure.intervals import Interval, median_interval
from edgetrain.measure.metrics import Energy, Span
from edgetrain.measure.picture import save as save_picture
from edgetrain.measure.picture import traced
from edgetrain.measure.power_model import with_model
from edgetrain.measure.processor import Processor, using
from edgetrain.measure.protocol import WAYS, Measured, Progress, Protocol, measure
from edgetrain.measure.record import Origin, Record, RunFolder, Value, default_path, new_record
from edgetrain.measure.samples import Floats, Samples, Times
from edgetrain.measure.sensors import Source, find
from edgetrain.measure.sensors.modelled_power import PROCESS_ENERGY
from edgetrain.measure.sensors.source import Channel, outermost
from edgetrain.measure.timeline import Timeline
from edgetrain.measure.windows import Ops, Windows, counted, gauged
from edgetrain.run.memory import MemoryTrace, allocated_peak
from edgetrain.run.step import Step

INFERENCES = 7  # forward passes that are timed at least; the first ones are left out
MAX_INFERENCES, INFERENCES_S = 60, 1.0  # as many as take so long: a few short ones say little
INFERENCES_LEFT_OUT = 2
BUSY = "not known: the machine was busy"
_NOT_HAD: Origin = "unavailable"

Summary = dict[str, Value]


@dataclass(frozen=True, repr=False)
class Profile:
    """memory: the bytes at each op of one step, and what is alive at the peak."""

    folder: Path
    record: Record
    measured: Measured
    memory: MemoryTrace
    attributed: tuple[Attributed, ...]

    @property
    def timeline(self) -> Timeline:
        return self.measured.timeline

    @property
    def summary(self) -> Summary:
        return dict(self.record.summary)

    def __repr__(self) -> str:
        """The headlines; the rest is thousands of numbers."""
        parts = [f"Profile in {self.folder}"]
        for name in ("step_time_s", "peak_bytes", "energy_per_step_j"):
            value = self.record.summary.get(name)
            if value is not None and value.value is not None:
                parts.append(f"{name} {value.value:.4g} ({value.origin})")
        return ", ".join(parts)


@checked("batch")
def profile(
    step: Step,
    batch: Sequence[Any],
    *,
    steps: int | None = None,
    out: str | Path | None = None,
    threads: int | None = None,
    cores: Sequence[int] | None = None,
    frequency_hz: int | None = None,
    device: str | Path | None = None,
    protocol: Protocol | None = None,
    sources: Sequence[Source] | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Profile:
    """Train on the batch again and again, and measure what a step takes.

    steps: measured ones, after the warm-up; by default at least 30, and 3 s of them.
    out: the run folder; by default a new one under runs/.
    threads, cores, frequency_hz: how the processor is used meanwhile; put back afterwards.
    device: a device file to model energy with, where no sensor measures it.
    protocol: idle time, sampling period, rounds; `steps` of it is not read. sources: sensors in place of those found.
    The model is trained by these steps.
    """
    folder = RunFolder.create(out or default_path("profile"))
    how = replace(protocol or Protocol(), steps=steps)
    asked = Processor(threads, None if cores is None else tuple(cores), frequency_hz)
    record = new_record(
        sys.argv, timeline="timeline.json", samples="samples.bin", attribution="attribution.json", memory="memory.json"
    )
    with folder.locked(), using(asked) as processor:
        record = replace(record, machine=replace(record.machine, torch_threads=torch.get_num_threads()))
        folder.save(record)
        try:
            sensors = found_sources(device) if sources is None else tuple(sources)
            measured = measure(step, batch, sensors, folder.path, how, on_progress)
            traces = step.trace_micro_batches(*batch)
            memory = max(traces, key=lambda trace: trace.peak_with_workspace_bytes)
            attributed = tuple(_attributed(measured))
            save_attributed(attributed, folder.path)
            save_picture(traced(traces, {op.name for op in measured.timeline.ops}), folder.path)
            summary = {**_summary(measured, memory, step, batch), **_processor(processor)}
            record = replace(record, status="finished", summary=summary)
        except BaseException as error:
            status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            folder.save(replace(record, status=status))  # type: ignore[arg-type]
            raise
        folder.save(record)
    return Profile(folder.path, record, measured, memory, attributed)


def found_sources(device: str | Path | None = None) -> tuple[Source, ...]:
    """The sensors of this machine that can be read, and the power model where none measures power."""
    sources = with_model(find(), pid=os.getpid(), device=device)
    return tuple(source for _, source in sources if source is not None)


# ---- attribution


def _attributed(measured: Measured) -> Iterator[Attributed]:
    """Energy and CPU time over the ops, from the channels that resolve them best."""
    ops = _instances(measured.timeline)
    for quantity, unit, resolved in (
        ("energy", "J", _energy_windows(measured)),
        ("cpu time", "s", _counter_windows(measured, "process_time_s")),
    ):
        if resolved is not None:
            channel, windows = resolved
            attribution = attribute(ops, windows)
            # Idle time that cannot be told apart from some ops is in their share already.
            alone = attribution.idle is not None and attribution.idle not in attribution.shares
            shares = (*attribution.shares, *((attribution.idle,) if alone and attribution.idle is not None else ()))
            origin: Origin = "modelled" if channel.kind == "modelled" else "derived"
            yield Attributed(
                quantity, unit, origin, channel.name, groups(shares, measured.timeline.steps), attribution.windows,
                attribution.noise if np.isfinite(attribution.noise) else None,
            )  # fmt: skip


def _instances(timeline: Timeline) -> Ops:
    steps, n = timeline.begin_ns.shape
    places = np.tile(np.arange(n, dtype=np.int64), steps)
    return Ops(op_names(n), places, timeline.begin_ns.ravel(), timeline.end_ns.ravel())


def _energy_windows(measured: Measured) -> tuple[Channel, Windows] | None:
    """Of the source that speaks for the machine. The model resolves the process's own part more finely."""
    chosen = metrics.chosen(metrics.energies(measured.samples, measured.measured))
    if chosen is None:
        return None
    if chosen.kind == "modelled":
        return _counter_windows(measured, PROCESS_ENERGY)
    for series in measured.samples.series:
        if series.name == chosen.source.split(" + ")[0]:
            for unit in ("J", "W"):
                outer = outermost(series.channels, "J" if unit == "J" else "W")
                if outer:
                    total = np.sum([series.column(channel.name)[1] for channel in outer], axis=0)
                    return outer[0], _windows(outer[0], series.at_ns, total, measured.measured)
    return None


def _counter_windows(measured: Measured, name: str) -> tuple[Channel, Windows] | None:
    for series, channel in metrics.channels(measured.samples):
        if channel.name == name:
            return channel, _windows(channel, series.at_ns, series.column(name)[1], measured.measured)
    return None


def _windows(channel: Channel, at_ns: Times, values: Floats, span: Span) -> Windows:
    inside = (at_ns >= span.begin_ns) & (at_ns <= span.end_ns)
    if channel.counter:
        return counted(at_ns[inside], values[inside], least_window_s=channel.least_window_s)
    return gauged(at_ns[inside], values[inside])


# ---- summary


def _summary(measured: Measured, memory: MemoryTrace, step: Step, batch: Sequence[Any]) -> Summary:
    samples, span, steps = measured.samples, measured.measured, measured.timeline.steps
    n = _samples_in(batch)
    return {
        **_times(measured, n),
        **_work(measured.timeline),
        **_memory(memory, samples, span),
        **_use(samples, span, steps),
        **_energy(measured, n),
        **_climate(samples, span),
        **_inference(step, batch, measured, memory),
        **_trust(measured),
    }


def _times(measured: Measured, n: int) -> Summary:
    step = median_interval(measured.timeline.step_s.tolist())
    return {
        "step_time_s": _interval(step, "s", "measured"),
        "samples_per_s": _interval(Interval(n / step.value, n / step.high, n / step.low), "1/s", "derived"),
        "steps": Value(measured.timeline.steps, "1", "measured"),
        "steps_left_out": Value(measured.timeline.left_out, "1", "measured"),
        "warm_up_steps": Value(len(measured.warm_up_s), "1", "measured"),
        "steady": Value(measured.steady.of_measured(measured.timeline.step_s.tolist()), "", "derived"),
        "batch": Value(n, "1", "measured"),
    }


def _work(timeline: Timeline) -> Summary:
    """Where the time of a step goes: medians over steps of the sums of ops."""
    op_s = timeline.op_s
    summary: Summary = {}
    for phase in ("forward", "backward", "update"):
        summary[f"{phase}_s"] = _sum(op_s, [op.phase == phase and op.why == "first" for op in timeline.ops])
    summary["recomputed_s"] = _sum(op_s, [op.why == "recomputed" for op in timeline.ops])
    summary["paging_s"] = _sum(op_s, [op.why == "paged" for op in timeline.ops])
    between = timeline.step_s - op_s.sum(axis=1)
    summary["between_ops_s"] = _interval(median_interval(between.tolist()), "s", "derived")
    flops = sum(op.flops for op in timeline.ops)
    summary["flops"] = Value(flops, "1", "derived")
    summary["flops_per_s"] = Value(flops / float(np.median(timeline.step_s)), "1/s", "derived")
    return summary


def _sum(op_s: Floats, which: Sequence[bool]) -> Value:
    return _interval(median_interval(op_s[:, np.array(which, dtype=bool)].sum(axis=1).tolist()), "s", "measured")


def _memory(memory: MemoryTrace, samples: Samples, span: Span) -> Summary:
    """What is taken at the peak, by role, and what the process takes."""
    roles = ("parameter", "buffer", "state", "input", "constant", "activation", "gradient", "undo", "workspace")
    by_role = {role: sum(a.n_bytes for a in memory.alive if a.role == role) for role in roles}
    summary = {
        "peak_bytes": Value(memory.peak_with_workspace_bytes, "B", "measured"),
        "peak_op": Value(memory.peak_op, "", "measured"),
        **{f"peak_{role}_bytes": Value(n_bytes, "B", "measured") for role, n_bytes in by_role.items() if n_bytes},
    }
    summary["process_peak_bytes"] = _maybe(metrics.most(samples, "process_resident_bytes", span), "B", "measured")
    return summary


def _use(samples: Samples, span: Span, steps: int) -> Summary:
    cores = metrics.utilisation(samples, span)
    cpu_s = metrics.growth(samples, "process_time_s", span)
    mean = statistics.fmean(cores.values()) if cores else None
    summary = {
        "cpu_s_per_step": _maybe(None if cpu_s is None else cpu_s / steps, "s", "derived"),
        "utilisation": _maybe(mean, "1", "derived"),
        "idle_ratio": _maybe(None if mean is None else 1 - mean, "1", "derived"),
        **{f"utilisation_{core}": Value(part, "1", "derived") for core, part in sorted(cores.items())},
    }
    for _, channel in metrics.channels(samples):
        if channel.unit == "1" and channel.name.endswith("utilisation"):
            summary[channel.name] = _maybe(metrics.mean(samples, channel.name, span), "1", "measured")
    return summary


def _energy(measured: Measured, n: int) -> Summary:
    """Gross: all that the machine took. Net: above what it takes when it idles, and so that of this process alone."""
    samples, steps, span = measured.samples, measured.timeline.steps, measured.measured
    busy = metrics.chosen(metrics.energies(samples, span))
    names = ("energy_per_step_j", "energy_per_sample_j", "net_energy_per_step_j", "net_energy_per_sample_j", "power_w",
             "idle_power_w")  # fmt: skip
    if busy is None:
        return {name: Value(None, name.rpartition("_")[2].upper(), _NOT_HAD) for name in names}
    idle_w, net = _idle_w(measured), _net_j(measured, busy)
    amounts = (
        busy.energy_j / steps, busy.energy_j / steps / n,
        None if net is None else net / steps, None if net is None else net / steps / n,
        busy.energy_j / span.time_s, idle_w,
    )  # fmt: skip
    summary = {name: _joules(amount, name, busy) for name, amount in zip(names, amounts, strict=True)}
    summary["energy_source"] = Value(busy.source, "", "modelled" if busy.kind == "modelled" else "measured")
    if not _alone(measured, span):
        summary["energy_note"] = Value(_OTHERS, "", "derived")
    return summary


_OTHERS = (
    "other programs were at work: the energy of a step is the machine's, with theirs in it; above idle it is known "
    "only where it is modelled from this process's own CPU time"
)


def _alone(measured: Measured, span: Span) -> bool:
    """Nobody else is known to have been at work."""
    return metrics.quiet(measured.samples, span).verdict != "noisy"


def _idle_w(measured: Measured) -> float | None:
    """What the machine took before the steps; None where it was not idle then."""
    idle = metrics.chosen(metrics.energies(measured.samples, measured.idle))
    if idle is None or not measured.idle.time_s or not _alone(measured, measured.idle):
        return None
    return idle.energy_j / measured.idle.time_s


def _net_j(measured: Measured, busy: Energy) -> float | None:
    """Modelled energy is known for this process, whatever else ran; a sensor's only where nothing else did."""
    if busy.kind == "modelled":
        own = metrics.growth(measured.samples, PROCESS_ENERGY, measured.measured)
        if own is not None:
            return own
    idle_w = _idle_w(measured)
    if idle_w is None or not _alone(measured, measured.measured):
        return None
    return max(busy.energy_j - idle_w * measured.measured.time_s, 0.0)


def _joules(amount: float | None, name: str, energy: Energy) -> Value:
    unit = name.rpartition("_")[2].upper()
    if amount is None:
        return Value(None, unit, _NOT_HAD)
    origin: Origin = "modelled" if energy.kind == "modelled" else "derived"
    if energy.plus_minus is None:
        return Value(amount, unit, origin)
    # Two times of three lie within plus_minus; twice as far is about 95 %.
    off = 2 * energy.plus_minus * amount
    return Value(amount, unit, origin, max(amount - off, 0.0), amount + off)


def _climate(samples: Samples, span: Span) -> Summary:
    """Temperatures and clocks: the mean, and the highest of temperatures."""
    summary: Summary = {}
    for _, channel in metrics.channels(samples):
        if channel.unit == "°C":
            summary[f"{channel.name}_most"] = _maybe(metrics.most(samples, channel.name, span), "°C", "measured")
        if channel.unit == "Hz":
            summary[f"{channel.name}_mean"] = _maybe(metrics.mean(samples, channel.name, span), "Hz", "derived")
    return summary


def _inference(step: Step, batch: Sequence[Any], measured: Measured, memory: MemoryTrace) -> Summary:
    """The forward pass alone, in evaluation mode, as plain PyTorch runs it."""

    def forward() -> None:
        began = time.perf_counter()
        step.evaluate(*batch)
        times.append(time.perf_counter() - began)

    times: list[float] = []
    grown = allocated_peak(forward)
    while len(times) < INFERENCES or (len(times) < MAX_INFERENCES and sum(times) < INFERENCES_S):
        forward()
    taken = median_interval(times[INFERENCES_LEFT_OUT:])
    trained = median_interval(measured.timeline.step_s.tolist())
    peak = memory.persistent_bytes - sum(a.n_bytes for a in memory.alive if a.role == "state") + grown
    return {
        "inference_time_s": _interval(taken, "s", "measured"),
        "inference_peak_bytes": Value(peak, "B", "derived"),
        "time_over_inference": Value(trained.value / taken.value, "1", "derived"),
        "memory_over_inference": Value(memory.peak_with_workspace_bytes / peak, "1", "derived"),
    }


def _trust(measured: Measured) -> Summary:
    """How much to believe: what measuring costs, whether the machine was quiet, how alike steps are."""
    summary: Summary = {}
    costs = {f"overhead_{way}": measured.overhead(way) for way in WAYS[1:]}
    known = [cost for cost in costs.values() if cost is not None]
    # Nothing makes a step faster than no measuring: what says so was disturbed, and so was what ran in turns with it.
    busy = not _alone(measured, measured.measured) or any(cost.high < 0 for cost in known)
    for name, cost in costs.items():
        sure = cost is not None and not busy
        summary[name] = _interval(cost, "1", "measured") if cost is not None and sure else Value(None, "1", _NOT_HAD)
    if known and busy:
        summary["overhead_note"] = Value(BUSY, "", "derived")
    summary["noise"] = Value(str(metrics.quiet(measured.samples, measured.measured)), "", "derived")
    summary |= _likeness(measured)
    sampler = measured.sampler
    if sampler.ticks_due:
        summary["samples_delivered"] = Value((sampler.ticks_delivered or 0) / sampler.ticks_due, "1", "measured")
    for number, note in enumerate(sampler.notes):
        summary[f"note_{number + 1}"] = Value(note, "", "measured")
    return summary


def _likeness(measured: Measured) -> Summary:
    """How much one step is like the next: in its time, and in the course of its CPU use and of its power."""
    timeline = measured.timeline
    times = likeness.of_times(timeline.step_s.tolist())
    values = {"steps_differ": _maybe(None if times is None else times.difference, "1", "derived")}
    begins, ends = timeline.step_ns[:, 0], timeline.step_ns[:, 1]
    for name, resolved in (
        ("cpu_course_alike", _counter_windows(measured, "process_time_s")),
        ("power_course_alike", _energy_windows(measured)),
    ):
        alike = None if resolved is None else likeness.of_windows(resolved[1], begins, ends)
        origin: Origin = "modelled" if resolved is not None and resolved[0].kind == "modelled" else "derived"
        values[name] = _maybe(None if alike is None else alike.correlation, "1", origin)
    return values


def _processor(used: Processor) -> Summary:
    cores = "" if used.cores is None else ",".join(map(str, used.cores))
    return {
        "threads": Value(used.threads, "1", "measured"),
        "cores": Value(cores, "", "measured"),
        "frequency_held_hz": _maybe(used.frequency_hz, "Hz", "measured"),
    }


def _samples_in(batch: Sequence[Any]) -> int:
    for item in batch:
        if isinstance(item, torch.Tensor) and item.dim():
            return len(item)
    raise UserError("the batch holds no samples", expected="tensors whose first dimension counts samples")


def _interval(interval: Interval, unit: str, origin: Origin) -> Value:
    if not (np.isfinite(interval.low) and np.isfinite(interval.high)):
        return Value(interval.value, unit, origin)
    return Value(interval.value, unit, origin, interval.low, interval.high)


def _maybe(value: float | None, unit: str, origin: Origin) -> Value:
    return Value(None, unit, _NOT_HAD) if value is None else Value(value, unit, origin)
