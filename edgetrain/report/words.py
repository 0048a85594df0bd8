"""The values of a summary in words: what each is called, and which stand together.

In:  the names that runs write into their records. Out: labels, and groups in the order of a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

OTHER = "other"
GROUPS: dict[str, dict[str, str]] = {
    "time": {
        "step_time_s": "time of a step",
        "samples_per_s": "samples a second",
        "forward_s": "forward pass",
        "backward_s": "backward pass",
        "update_s": "update of the parameters",
        "recomputed_s": "recomputed ops",
        "paging_s": "waiting for paged tensors",
        "between_ops_s": "between ops",
        "inference_time_s": "forward pass alone, in evaluation mode",
        "time_over_inference": "a step over a forward pass alone, time",
        "flops": "floating-point operations of a step",
        "flops_per_s": "floating-point operations a second",
    },
    "memory": {
        "peak_bytes": "peak of all tensors",
        "peak_op": "op at the peak",
        "peak_parameter_bytes": "parameters at the peak",
        "peak_buffer_bytes": "buffers at the peak",
        "peak_state_bytes": "optimizer state at the peak",
        "peak_input_bytes": "batch at the peak",
        "peak_constant_bytes": "constants at the peak",
        "peak_activation_bytes": "activations at the peak",
        "peak_gradient_bytes": "gradients at the peak",
        "peak_undo_bytes": "copies to undo a failed step, at the peak",
        "peak_workspace_bytes": "workspace of kernels at the peak",
        "process_peak_bytes": "peak of the process",
        "peak_resident_bytes": "peak of the process",
        "inference_peak_bytes": "peak of a forward pass alone",
        "memory_over_inference": "a step over a forward pass alone, memory",
    },
    "energy": {
        "energy_per_step_j": "energy of a step",
        "energy_per_sample_j": "energy of a sample",
        "net_energy_per_step_j": "energy of a step, above idle",
        "net_energy_per_sample_j": "energy of a sample, above idle",
        "power_w": "power",
        "idle_power_w": "power when idle",
        "energy_source": "source of the energy figures",
        "energy_note": "about the energy figures",
    },
    "processor": {
        "cpu_s_per_step": "CPU seconds of a step",
        "utilisation": "part of the time that cores are busy, mean",
        "idle_ratio": "part of the time that cores are idle, mean",
        "threads": "threads of PyTorch",
        "cores": "cores it may run on",
        "frequency_held_hz": "clock that the cores are held at",
    },
    "learning": {
        "train_loss": "training loss",
        "test_loss": "test loss",
        "test_accuracy": "test accuracy",
    },
    "run": {
        "batch": "batch size",
        "steps": "steps",
        "samples": "samples",
        "switches": "switches of the plan",
        "steps_left_out": "steps left out: their plan changed",
        "warm_up_steps": "steps of the warm-up",
        "repeats": "processes it was measured in",
    },
    "how sure it is": {
        "steady": "step times steady",
        "noise": "load of other programs",
        "steps_differ": "difference from one step to the next, time",
        "cpu_course_alike": "likeness of CPU use from step to step (correlation)",
        "power_course_alike": "likeness of power from step to step (correlation)",
        "overhead_sampling": "slow-down by sampling",
        "overhead_tracing": "slow-down by sampling and tracing",
        "overhead_note": "about the slow-down",
        "samples_delivered": "part of the sensor samples that came in time",
    },
}
LABELS = {name: label for labels in GROUPS.values() for name, label in labels.items()}
_GROUP_OF = {name: group for group, labels in GROUPS.items() for name in labels}
_PLACES = {name: place for place, name in enumerate(LABELS)}
_UNIT = re.compile(r"(?<!_per)_(s|j|w|c|hz)$")
_CORE = re.compile(r"utilisation_cpu(\d+)")
_SENSOR = re.compile(r"(.+?)_(frequency_hz|temperature_c|c)?_?(mean|most)")

# Channels of sensors, by the name that their lines have without a unit (`Channel.label`).
CHANNELS = {
    "model": "whole machine",
    "model process": "this process",
    "process": "this process",
    "process wait": "waiting for a core",
    "process resident": "resident",
    "process peak": "its peak",
    "cpu": "all cores together",
    "group": "container or service",
    "mem available": "available to this process",
    "steal": "taken by other virtual machines",
    "pressure cpu": "somebody waits for a core",
    "pressure memory": "for memory",
    "pressure io": "for storage",
}


def label(name: str) -> str:
    """What a value of a summary is called. The unit is with the value."""
    if name in LABELS:
        return LABELS[name]
    if core := _CORE.fullmatch(name):
        return f"part of the time that core {core[1]} is busy"
    if (sensor := _SENSOR.fullmatch(name)) and sensor[3] in ("mean", "most"):
        return f"{sensor[1].replace('_', ' ')}, {'mean' if sensor[3] == 'mean' else 'highest'}"
    if note := re.fullmatch(r"note_(\d+)", name):
        return f"note {note[1]}"
    name = f"{name.removesuffix('_bytes')}_memory" if name.endswith("_bytes") else _UNIT.sub("", name)
    return name.replace("_", " ").strip() or name


def grouped(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """The names in groups, each with its heading, in the order of a table.

    Unknown names come first, as the run wrote them: a study's own results.
    """
    groups: dict[str, list[str]] = {OTHER: [], **{group: [] for group in GROUPS}}
    for name in names:
        groups[_group(name)].append(name)
    for members in groups.values():
        members.sort(key=lambda name: _PLACES.get(name, len(_PLACES)))  # stable: the rest stays in order
    return [(group, members) for group, members in groups.items() if members]


def _group(name: str) -> str:
    if name in _GROUP_OF:
        return _GROUP_OF[name]
    if re.fullmatch(r"note_\d+", name):
        return "how sure it is"
    return "processor" if _CORE.fullmatch(name) or _SENSOR.fullmatch(name) or "utilisation" in name else OTHER
