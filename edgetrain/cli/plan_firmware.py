"""`edgetrain plan` for a device that firmware serves: when it plans the firmware's step, and what is shown of it.

In:  a device, and what the command was given. Out: the target, or None where the device's own library trains; the bytes
     of the program as rows and as data, the same that `edgetrain export` writes.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edgetrain.devices.device import Device
from edgetrain.devices.device import load as load_device
from edgetrain.errors import UserError
from edgetrain.firmware.export import Project
from edgetrain.firmware.fit import own_bytes
from edgetrain.firmware.target import Target, load_target, target_names

RUNTIMES = ("firmware", "library")


def device_of(name: str) -> Device:
    """By its own name, or by the one that it has as a target of firmware."""
    return load_target(name).device if name in target_names() else load_device(name)


def target_of(device: Device, runtime: str | None, *, pages: bool, micro_batches: bool) -> Target | None:
    """What firmware is planned for: wherever there is some, unless something is asked for that it does not do."""
    if runtime == "library" or (device.firmware is None and runtime is None):
        return None
    if device.firmware is None:
        raise UserError(
            f"there is no firmware for {device.name}", expected="a device of " + ", ".join(target_names()),
            next_step="leave --runtime out",
        )  # fmt: skip
    target = Target(device, device.firmware)
    wish = "page tensors to storage" if pages else "train in micro-batches" if micro_batches else None
    if wish is None:
        return target
    if target.is_board or runtime == "firmware":
        raise UserError(
            f"firmware for {device.name} does not {wish}",
            next_step="leave that option out, or plan for a library instead with --runtime library",
        )
    return None


def facts(project: Project, target: Target) -> list[tuple[str, str]]:
    """The bytes of the program, as rows."""
    parts = f"arena {project.arena_bytes}, weights, state and batch {project.lasting_bytes}"
    rows = [("firmware", f"{target.name}, C as `edgetrain export --target {target.name}` writes it")]
    if not target.is_board:
        return [*rows, ("RAM of the program", f"{project.ram_bytes} bytes: {parts}")]
    whole = sum(memory.n_bytes for memory in target.ram)
    own = own_bytes(target)
    rows.append(
        ("RAM of the program", f"{project.ram_bytes + own} of {whole} bytes: {parts}, stack and variables {own}")
    )
    return [*rows, ("flash", f"first values {project.weights_bytes} bytes, and the code")]


def as_data(project: Project) -> dict[str, Any]:
    """Under the names that `edgetrain export --json` has for them."""
    fields = asdict(project) | {"ram_bytes": project.ram_bytes}
    return {name: value for name, value in fields.items() if name != "folder"}
