"""What firmware is built for: a device with a [firmware] table, and the layout of its memory.

In:  the name of a target ("nrf52840", "linux-x86_64"), or the path of a device file of your own.
Out: `Target`; `place`: which region holds the arena, and which the rest; `keep`: where checkpoints lie in flash.

    RAM of a microcontroller        stack | .data | persistent tensors, the batch | the arena | free
                                    ↑ grows down: an overflow leaves RAM and faults
    its flash                       code | initial values | free | slot | slot     checkpoints: whole pages, at its end
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from edgetrain.closest import closest
from edgetrain.devices import device as devices
from edgetrain.devices.device import Device, Firmware, Region
from edgetrain.errors import UserError
from edgetrain.ranges import shown

# Of .data and .bss besides the model: the board's own few variables.
OWN_BYTES = 256
# Pages of the file that is flash on Linux.
FILE_PAGE_BYTES = 4096
# Of a checkpoint besides its data: a line for the commit word, and one for the head.
_HEAD_BYTES = 2 * 64


@dataclass(frozen=True, slots=True)
class Memory:
    """A contiguous piece of memory."""

    name: str
    address: int
    n_bytes: int


@dataclass(frozen=True)
class Target:
    device: Device
    firmware: Firmware

    @property
    def name(self) -> str:
        return self.firmware.target

    @property
    def is_board(self) -> bool:
        """A microcontroller, without an operating system."""
        return self.firmware.kind == "cortex-m"

    @property
    def board(self) -> str:
        """The file in `boards` that implements board.h. A compiler for bare machines builds for Linux without a C
        library."""
        bare = self.firmware.compiler.startswith("arm-none-eabi")
        return "cortex_m" if self.is_board else "linux_bare" if bare else "linux"

    @property
    def link(self) -> str:
        """Flags of the linker, for the emulator; the boards themselves have a script of their own."""
        if self.is_board:
            return "-nostartfiles -T board/link_emulated.ld -Wl,-z,noexecstack"
        return "-nostartfiles -static -Wl,-Ttext-segment=0x10000,-z,noexecstack" if self.board == "linux_bare" else ""

    @property
    def ram(self) -> tuple[Memory, ...]:
        """Adjacent regions joined, the largest first."""
        return tuple(sorted(_joined(self.device.memory.ram), key=lambda memory: -memory.n_bytes))

    @property
    def flash(self) -> Memory | None:
        return next(iter(_joined(self.device.memory.flash)), None)


@dataclass(frozen=True)
class Placed:
    """arena, rest: the memories that they lie in, which may be the same."""

    arena: Memory
    rest: Memory

    @property
    def apart(self) -> bool:
        return self.arena != self.rest


@dataclass(frozen=True)
class Kept:
    """Two slots in flash. address: of the first on the board; 0 on Linux, where they lie in a file."""

    address: int
    page_bytes: int
    slot_bytes: int

    @property
    def n_bytes(self) -> int:
        return 2 * self.slot_bytes


def keep(target: Target, data_bytes: int) -> Kept:
    """Two slots for so many bytes: at the end of flash, in pages of their own. Room in flash is not checked."""
    regions = target.device.memory.flash if target.is_board else ()
    region = max(regions, key=lambda region: region.address or 0, default=None)
    if target.is_board and (region is None or region.page_bytes is None):
        raise UserError(
            f"how to erase the flash of {target.device.name} is not known", expected="page_bytes of its flash",
            next_step="export without checkpoints in flash, or give page_bytes in a device file of your own",
        )  # fmt: skip
    page_bytes = FILE_PAGE_BYTES if region is None or region.page_bytes is None else int(region.page_bytes.value)
    slot_bytes = -(-(data_bytes + _HEAD_BYTES) // page_bytes) * page_bytes
    end = 0 if target.flash is None else target.flash.address + target.flash.n_bytes
    return Kept(max(end - 2 * slot_bytes, 0), page_bytes, slot_bytes)


def paged_bytes(target: Target) -> int:
    """How much of the end of flash has pages of the size of the last ones."""
    region = max(target.device.memory.flash, key=lambda region: region.address or 0)
    return int((region.paged_bytes or region.n_bytes).value)


def emulated(target: Target, memory: Memory) -> Memory:
    """The memory at the emulator's address."""
    return replace(memory, address=target.firmware.emulated.get(memory.name, memory.address))


def load_target(name_or_path: str | Path | Target) -> Target:
    if isinstance(name_or_path, Target):
        return name_or_path
    name = str(name_or_path)
    if not name.endswith(".toml"):
        for key in devices.names():
            device = devices.load(key)
            if device.firmware is not None and name in (device.firmware.target, key):
                return Target(device, device.firmware)
    if name.endswith(".toml") or name.replace("-", "_") in devices.names():
        device = devices.load(name)
        if device.firmware is not None:
            return Target(device, device.firmware)
    match = closest(name, target_names())
    raise UserError(
        f"firmware cannot be built for {shown(name)}", expected="one of " + ", ".join(target_names()),
        next_step=f"did you mean {match}?" if match
        else "choose one of these, or add a [firmware] table to the file of your device",
    )  # fmt: skip


def target_names() -> tuple[str, ...]:
    tables = (devices.load(name).firmware for name in devices.names())
    return tuple(sorted(firmware.target for firmware in tables if firmware is not None))


def place(target: Target, *, arena_bytes: int, rest_bytes: int) -> Placed | None:
    """Where the arena lies, and where the rest; None if they do not fit. An arena lies within one memory."""
    need = rest_bytes + target.firmware.stack_bytes + OWN_BYTES
    for rest in target.ram:
        for arena in target.ram:
            taken = need + arena_bytes if arena == rest else need
            if taken <= rest.n_bytes and arena_bytes <= arena.n_bytes:
                return Placed(arena, rest)
    return None


def _joined(regions: tuple[Region, ...]) -> list[Memory]:
    joined: list[Memory] = []
    for region in sorted(regions, key=lambda region: region.address or 0):
        address, n_bytes = region.address or 0, int(region.n_bytes.value)
        if joined and region.address is not None and joined[-1].address + joined[-1].n_bytes == address:
            last = joined.pop()
            joined.append(Memory(f"{last.name}, {region.name}", last.address, last.n_bytes + n_bytes))
        else:
            joined.append(Memory(region.name, address, n_bytes))
    return joined
