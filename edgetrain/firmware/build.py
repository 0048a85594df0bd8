"""Build a project with its own Makefile, and measure its sections.

In:  the folder that `export` wrote. Out: `Built`: the program, and its sections by size.

A missing compiler is a `UserError` that says what to install; code that does not compile is an `InternalError`.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgetrain import child, saved
from edgetrain.devices.device import unknown_command
from edgetrain.errors import InternalError, UserError
from edgetrain.files import refuse_links
from edgetrain.firmware.export import SCHEMA
from edgetrain.ranges import shown

# The fast ones are vectorised, for Linux boards: as exact, but not the same bits. fast_races detects data races.
Variant = Literal["plain", "debug", "sanitize", "fast", "fast_debug", "fast_sanitize", "fast_races"]
SILENT: tuple[Variant, ...] = ("plain", "fast")  # these do not report gradients
PROGRAMS: Mapping[Variant, str] = {
    "plain": "firmware", "debug": "firmware_debug", "sanitize": "firmware_sanitize", "fast": "firmware_fast",
    "fast_debug": "firmware_fast_debug", "fast_sanitize": "firmware_fast_sanitize",
    "fast_races": "firmware_fast_races",
}  # fmt: skip
_PACKAGES = {
    "arm-none-eabi-gcc": "gcc-arm-none-eabi libnewlib-arm-none-eabi", "qemu-system-arm": "qemu-system-arm",
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross", "qemu-aarch64": "qemu-user",
    "qemu-arm": "qemu-user",
}  # fmt: skip
_IN_FLASH = (".vectors", ".text", ".rodata", ".ARM.exidx", ".ARM.extab", ".data")
_IN_RAM = (".stack", ".data", ".bss", ".arena")
_DTYPES = ("float32", "int32", "int64")
_MAX_INPUTS = 1000
_MAX_ELEMENTS, _MAX_DIMS = 1 << 31, 8  # of a tensor of firmware


@dataclass(frozen=True)
class Built:
    """sections: their bytes in the linked program. A microcontroller's flash also holds the initial values of .data."""

    program: Path
    sections: Mapping[str, int]

    @property
    def ram_bytes(self) -> int:
        return sum(self.sections.get(name, 0) for name in _IN_RAM)

    @property
    def flash_bytes(self) -> int:
        return sum(self.sections.get(name, 0) for name in _IN_FLASH)


def load_project(folder: str | Path) -> dict[str, Any]:
    """What `project.json` says."""
    file = Path(folder) / "project.json"
    return saved.load(file, "firmware project", _project, next_step="write it again with `edgetrain export`")


def _project(data: Any) -> dict[str, Any]:
    if data["edgetrain firmware"] != SCHEMA:
        raise ValueError(f"schema {data['edgetrain firmware']!r}, expected {SCHEMA}")
    for key in ("inputs", "tensors"):
        for tensor in data[key]:
            is_valid = all(type(n) is int and n >= 0 for n in tensor["shape"]) and tensor["dtype"] in _DTYPES
            is_valid = is_valid and math.prod(tensor["shape"]) <= _MAX_ELEMENTS and len(tensor["shape"]) <= _MAX_DIMS
            is_valid &= key != "inputs" or (type(tensor["position"]) is int and tensor["position"] >= 0)
            is_valid &= type(tensor.get("below", 1)) is int and tensor.get("below", 1) > 0
            if not is_valid or not isinstance(tensor["name"], str):
                raise ValueError(f"a tensor is {json.dumps(tensor)}")
    if not data["inputs"] or max(tensor["position"] for tensor in data["inputs"]) > _MAX_INPUTS:
        raise ValueError(f"inputs are {json.dumps(data['inputs'])[:200]}")
    for key in ("keep_every", "kept_bytes", "arena_bytes", "lasting_bytes"):
        if type(data[key]) is not int:
            raise ValueError(f"{key} is {data[key]!r}")
    for key in ("compiler", "target", "graph_key"):
        if not isinstance(data[key], str):
            raise ValueError(f"{key} is {data[key]!r}")
    for call in data.get("calls", []):
        texts = all(isinstance(call[key], str) for key in ("op", "kind", "module", "function"))
        if not texts or type(call["multiply_adds"]) is not int:
            raise ValueError(f"a call is {json.dumps(call)}")
    for sides in data["sides"]:
        if any(type(n) is not int or n < 0 for n in (sides["call"], *sides["shape"])):
            raise ValueError(f"sides are {json.dumps(sides)}")
    if sorted(sides["call"] for sides in data["sides"]) != list(range(len(data["sides"]))):
        raise ValueError("the calls of sides are not numbered from 0")
    if not all(isinstance(word, str) for word in (*data["emulator"], *data["gradients"])):
        raise ValueError("emulator and gradients must be texts")
    emulator, *options = data["emulator"] or [""]
    name = Path(emulator).name
    is_on_path = emulator == shutil.which(name)  # then the path is as good as the name
    wrong = unknown_command(data["compiler"], [name if is_on_path else emulator, *options] if emulator else [])
    if wrong is not None:
        raise ValueError(f"{wrong}; nothing else is run")
    if type(data["is_board"]) is not bool or re.fullmatch(r"[\w.-]+", data["target"]) is None:
        raise ValueError(f"is_board is {shown(data['is_board'])} and target {shown(data['target'])}")
    return dict(data)


def build(folder: str | Path, variant: Variant = "plain", *, compiler: str | None = None) -> Built:
    """Build the program. compiler: in place of the project's, such as clang."""
    folder = Path(folder)
    refuse_links(folder)
    refuse_links(folder / "build")
    project = load_project(folder)
    if variant.startswith("fast") and project["is_board"]:
        raise UserError("a microcontroller has no vectorised program", next_step="export for linux-x86_64")
    if variant.endswith(("sanitize", "races")) and project["compiler"].startswith("arm-none-eabi"):
        raise UserError(f"{project['target']} has no sanitizers", next_step="export for linux-x86_64 and run it there")
    tool = compiler or project["compiler"]
    require(tool)
    require("make")
    program = f"build/{PROGRAMS[variant]}"
    command = ["make", "-s", "-j2", "-C", str(folder), program] + ([f"CC={compiler}"] if compiler else [])
    completed = child.command(command)
    if completed.returncode:
        if "overflowed by" in completed.stderr or "will not fit in region" in completed.stderr:
            raise UserError("the program does not fit the board", received=_first_lines(completed.stderr))
        raise InternalError(f"{' '.join(command)} failed:\n{completed.stderr[-3000:]}")
    return Built(folder / program, sections(folder / program, tool))


def require(tool: str) -> None:
    if shutil.which(tool) is None:
        packages = _PACKAGES.get(tool, tool)
        raise UserError(f"{tool} is not installed", next_step=f"on Debian: apt-get install {packages}")


def sections(program: Path, compiler: str) -> dict[str, int]:
    """The sections of a linked program that take memory, by size."""
    prefix = compiler.removesuffix("gcc") if compiler.endswith("-gcc") else ""
    completed = subprocess.run([f"{prefix}size", "-A", str(program)], capture_output=True, text=True, check=True)
    sizes = {}
    for line in completed.stdout.splitlines():
        words = line.split()
        if len(words) == 3 and words[0].startswith(".") and words[1].isdecimal():
            sizes[words[0]] = int(words[1])
    return sizes


def _first_lines(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines()[:4])
