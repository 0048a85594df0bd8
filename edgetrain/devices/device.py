"""What a device can do, as plain data from a small TOML file.

In:  the name of a file in this folder ("rpi4"), or the path of one of your own.
Out: `Device`: processors with operations a second by kind of op, memory in regions, flash, storage to page to, power,
     and the library that trains there. Every number is a `Quantity`: a value in SI units, where it comes from, and how
     far off it may be.

A file is checked strictly: a key that is missing or unknown, a number that is negative or none at all, a quantity
without a source is a `UserError` that names the file and the place in it.

    name = "Raspberry Pi 4B"
    kind = "board"                                  phone, board or microcontroller
    chip = "Broadcom BCM2711"
    runs_on = "cpu"                                 the processor that trains, unless another is asked for
    notes = ["…"]                                   what a reader should know                          (optional)

    [processors.cpu]                                one table a processor: cores of one type, a GPU, an integer unit
    kind = "cpu"                                    cpu, gpu or integer
    core = "Cortex-A72"
    cores = 4
    source = "BCM2711 data sheet"                   of core and cores
    frequency_hz = { value = 1.5e9, source = "…" }
    conv_flop_s = { value = 1.7e10, source = "estimate: …", plus_minus = 0.6 }
    depthwise_flop_s, dense_flop_s, elementwise_flop_s, int8_op_s, power_w      (those that are known)

    [memory]
    bandwidth_bytes_s = { … }
    power_w = { … }                                 while it moves data                                (optional)
    [[memory.ram]]                                  one a region; microcontrollers have several
    name = "LPDDR4"
    n_bytes = { … }
    address = 0x20000000                            (optional, for firmware)
    [[memory.flash]]                                the same, where programs lie in flash               (optional)
    page_bytes = { … }                              what is erased at once, at the end of the region    (optional)
    paged_bytes = { … }                             how much of its end is in pages of that size; else all of it

    [storage]                                       what tensors can be paged to                       (optional)
    name = "SD card"
    in_bytes_s, out_bytes_s, in_latency_s, out_latency_s, power_w
    n_bytes = { … }                                 what it has free for pages                         (optional)

    [power]
    idle_w = { … }                                                                                     (optional)

    [library]                                       what runs the training there: see `Library`
    [firmware]                                      how C is built for it and emulated: see `Firmware`  (optional)
    [[published]]                                   numbers in print that contradict those above       (optional)
    of = "cpu.dense_flop_s"
    value, source
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from edgetrain.closest import unknown
from edgetrain.errors import UserError
from edgetrain.files import read
from edgetrain.ranges import shown
from edgetrain.saved import Fields, in_words, is_number

FOLDER = Path(__file__).parent
DeviceKind = Literal["phone", "board", "microcontroller"]
ProcessorKind = Literal["cpu", "gpu", "integer"]
FirmwareKind = Literal["cortex-m", "linux"]
FLASH_DRIVERS = ("flash_nvmc.c",)
T = TypeVar("T")
MAX_BYTES = 1 << 20  # of a device file
# What a device file or a project may have run: these programs, with these words, and nothing else.
COMPILERS = (
    "gcc", "clang", "arm-none-eabi-gcc", "aarch64-linux-gnu-gcc", "arm-linux-gnueabihf-gcc", "arm-linux-gnueabi-gcc",
    "riscv64-linux-gnu-gcc", "x86_64-linux-gnu-gcc",
)  # fmt: skip
EMULATORS = ("qemu-system-arm", "qemu-arm", "qemu-aarch64", "qemu-x86_64", "qemu-riscv64")
_WORDS = {
    "-machine": r"[\w.-]+", "-M": r"[\w.-]+", "-cpu": r"[\w.+-]+", "-global": r"[\w.-]+=[\w.-]+", "-m": r"\d+[kKMG]?",
    "-L": r"/usr/[\w-]+",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number in SI units.

    plus_minus: the true value lies within this part of it, two times of three; 0 where it is exact.
    """

    value: float
    source: str
    plus_minus: float = 0.0


@dataclass(frozen=True)
class Processor:
    """Cores of one type, all of them together. Rates are what a training library reaches, not what the data sheet says.

    conv, depthwise, dense, elementwise: float32 operations a second (an addition is one, a multiplication is one).
    int8_op_s: the same for 8-bit integers. power_w: at full load, above what the device takes when it idles.
    """

    name: str
    kind: ProcessorKind
    core: str
    cores: int
    source: str
    frequency_hz: Quantity | None = None
    conv_flop_s: Quantity | None = None
    depthwise_flop_s: Quantity | None = None
    dense_flop_s: Quantity | None = None
    elementwise_flop_s: Quantity | None = None
    int8_op_s: Quantity | None = None
    power_w: Quantity | None = None

    @property
    def trains(self) -> bool:
        """Every rate that a float32 training step needs is known."""
        return None not in (self.conv_flop_s, self.depthwise_flop_s, self.dense_flop_s, self.elementwise_flop_s)


@dataclass(frozen=True)
class Region:
    """A block of memory that a program can use.

    page_bytes:  of flash: what is erased at once. Where pages differ in size: those at its end.
    paged_bytes: how much of its end is in pages of that size; None for all of it.
    """

    name: str
    n_bytes: Quantity
    address: int | None = None
    page_bytes: Quantity | None = None
    paged_bytes: Quantity | None = None


@dataclass(frozen=True)
class Memory:
    """
    bandwidth_bytes_s: what a training library reaches, reads and writes together.
    power_w: while it moves data, above idle; None where it is part of the processor's (one number was measured).
    """

    bandwidth_bytes_s: Quantity
    ram: tuple[Region, ...]
    flash: tuple[Region, ...] = ()
    power_w: Quantity | None = None

    @property
    def ram_bytes(self) -> int:
        return int(sum(region.n_bytes.value for region in self.ram))

    @property
    def flash_bytes(self) -> int:
        return int(sum(region.n_bytes.value for region in self.flash))


@dataclass(frozen=True)
class Storage:
    """power_w: of a transfer, above what the device takes when it idles. n_bytes: what it has free for pages."""

    name: str
    in_bytes_s: Quantity
    out_bytes_s: Quantity
    in_latency_s: Quantity
    out_latency_s: Quantity
    power_w: Quantity | None = None
    n_bytes: Quantity | None = None


@dataclass(frozen=True)
class Library:
    """What runs the training there.

    overhead_s:  the time of an op that computes nothing.
    overlaps:    an op computes while it moves its data, so that the slower of the two is its time. A library that lays
                 data out by ops of their own, before and after the arithmetic, takes the sum of the two.
    What its process holds at the peak of a step that keeps all (`costs.model.resident_bytes`), where that is known:
    base_bytes + lasting × parameters + held × results of the forward pass + columns × what convolutions lay out.
    """

    name: str
    overhead_s: Quantity
    overlaps: bool
    base_bytes: Quantity | None = None
    lasting: Quantity | None = None
    held: Quantity | None = None
    columns: Quantity | None = None


@dataclass(frozen=True)
class Firmware:
    """How a C program is built for the device, and which emulator runs it.

    target:    the name by which `et.export` knows the device, beside its own.
    compiler, flags: of the C compiler; the flags name the core and its floating point.
    fast_flags: for the kernels of the vectorised program, which Linux boards have; they may name a newer core.
    emulator:  the command that runs a program, which is added to it; nothing where this machine runs it as it is.
    emulated:  region of flash or RAM → its address in the emulator, for those that lie elsewhere there.
    stack_bytes: what is kept for the stack; 0 where an operating system sees to it.
    flash_driver: the file of `firmware/boards` that erases and programs the flash of the board itself; none by default.
    """

    target: str
    kind: FirmwareKind
    source: str
    compiler: str
    flags: tuple[str, ...] = ()
    emulator: tuple[str, ...] = ()
    emulated: Mapping[str, int] = field(default_factory=dict)
    stack_bytes: int = 0
    fast_flags: tuple[str, ...] = ()
    flash_driver: str | None = None


@dataclass(frozen=True)
class Published:
    """A number in print that contradicts the one used; `of` names that one, as `Device.quantities` does."""

    of: str
    value: float
    source: str


@dataclass(frozen=True)
class Device:
    """key: the name that `load` takes."""

    key: str
    name: str
    kind: DeviceKind
    chip: str
    runs_on: str
    processors: Mapping[str, Processor]
    memory: Memory
    library: Library
    storage: Storage | None = None
    idle_w: Quantity | None = None
    notes: tuple[str, ...] = ()
    published: tuple[Published, ...] = ()
    firmware: Firmware | None = None

    @property
    def processor(self) -> Processor:
        return self.processors[self.runs_on]

    def quantities(self) -> Iterator[tuple[str, Quantity]]:
        """Every number with a name: `cpu.dense_flop_s`, `memory.bandwidth_bytes_s`, `storage.in_latency_s`, …"""
        for name, processor in self.processors.items():
            yield from _named(name, processor)
        yield from _named("memory", self.memory)
        for sort, regions in (("ram", self.memory.ram), ("flash", self.memory.flash)):
            for region in regions:
                yield f"{sort}.{region.name}", region.n_bytes
                yield from (
                    (key, q) for key, q in _named(f"{sort}.{region.name}", region) if not key.endswith("n_bytes")
                )
        if self.storage is not None:
            yield from _named("storage", self.storage)
        if self.idle_w is not None:
            yield "power.idle_w", self.idle_w
        yield from _named("library", self.library)


def _named(prefix: str, part: Processor | Memory | Region | Storage | Library) -> Iterator[tuple[str, Quantity]]:
    for entry in fields(part):
        value = getattr(part, entry.name)
        if isinstance(value, Quantity):
            yield f"{prefix}.{entry.name}", value


# ---- from a name to a device


def names() -> tuple[str, ...]:
    """The devices that come with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load(name_or_path: str | Path) -> Device:
    """The device of that name, or the one that a file of your own describes (a path that ends with .toml)."""
    if isinstance(name_or_path, Path) or name_or_path.endswith(".toml"):
        return _read(Path(name_or_path))
    key = name_or_path.strip().lower().replace("-", "_").replace(" ", "_")
    if key in names():
        return _read(FOLDER / f"{key}.toml")
    also, list_them = "the path of a .toml file", "`edgetrain devices`"
    raise unknown("device named", name_or_path, names(), also=also, list_them=list_them)


def _read(path: Path) -> Device:
    try:
        data = tomllib.loads(read(path, "device file", MAX_BYTES).decode())
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a TOML file", received=in_words(error)[:200]) from error
    return _device(_Table(path, data), path.stem)


# ---- from a file to data, strictly


@dataclass(frozen=True)
class _Table(Fields):
    """One table of a file. What was asked for is ticked off; `end` refuses what is left."""

    asked: set[str] = field(default_factory=set)

    def inside(self, name: str) -> _Table:
        if not isinstance(self.values.get(name), dict):
            raise self.wrong(name, "a table")
        return _Table(self.file, self.get(name, dict), f"{self.prefix}{name}.")

    def get(self, name: str, kind: type[T]) -> T:
        self.asked.add(name)
        return super().get(name, kind)

    def text(self, name: str) -> str:
        text = self.get(name, str)
        if not text.strip():
            raise self.wrong(name, "a text")
        return text

    def whole(self, name: str, least: int) -> int:
        value = self.get(name, int)
        if value < least:
            raise self.wrong(name, f"a whole number, {least} or more")
        return value

    def number(self, name: str, *, positive: bool) -> float:
        self.asked.add(name)
        value = self.values.get(name)
        if not is_number(value) or value < 0 or (positive and value == 0):
            raise self.wrong(name, "a number above 0" if positive else "a number, 0 or more")
        return float(value)

    def word(self, name: str, words: tuple[str, ...]) -> Any:
        self.asked.add(name)
        return self.choice(name, words)

    def texts_if_there(self, name: str) -> tuple[str, ...]:
        return self.texts(name) if name in self.values else ()

    def tables(self, name: str) -> list[_Table]:
        return self.each(name) if name in self.values else []

    def quantity(self, name: str, *, positive: bool = True) -> Quantity:
        if not isinstance(self.values.get(name), dict):
            raise self.wrong(name, 'a number with its source: { value = 1e9, source = "data sheet", plus_minus = 0.2 }')
        table = self.inside(name)
        value, source = table.number("value", positive=positive), table.text("source")
        plus_minus = table.number("plus_minus", positive=False) if "plus_minus" in table.values else 0.0
        table.end()
        return Quantity(value, source, plus_minus)

    def quantity_if_there(self, name: str, *, positive: bool = True) -> Quantity | None:
        return self.quantity(name, positive=positive) if name in self.values else None

    def end(self) -> None:
        unknown_keys = sorted(set(self.values) - self.asked)
        if unknown_keys:
            raise UserError(
                f"{self.file}: {self.prefix}{unknown_keys[0]} is no key of a device file",
                received=", ".join(unknown_keys),
                next_step="correct its spelling or leave it out; edgetrain/devices/device.py lists what is known",
            )


def _device(table: _Table, key: str) -> Device:
    parts = table.inside("processors")
    processors = {name: _processor(parts.inside(name), name) for name in parts.values}
    power = table.inside("power") if "power" in table.values else None
    device = Device(
        key=key,
        name=table.text("name"),
        kind=table.word("kind", get_args(DeviceKind)),
        chip=table.text("chip"),
        runs_on=table.word("runs_on", tuple(name for name, p in processors.items() if p.trains) or ("(none trains)",)),
        processors=processors,
        memory=_memory(table.inside("memory")),
        library=_ended(table.inside("library"), _library),
        storage=_ended(table.inside("storage"), _storage) if "storage" in table.values else None,
        idle_w=None if power is None else power.quantity_if_there("idle_w", positive=False),
        notes=table.texts_if_there("notes"),
        published=tuple(_ended(item, _published) for item in table.tables("published")),
        firmware=_ended(table.inside("firmware"), _firmware) if "firmware" in table.values else None,
    )
    if power is not None:
        power.end()
    table.end()
    known = dict(device.quantities())
    for item in device.published:
        if item.of not in known:
            raise UserError(f"{table.file}: published.of names no number of the file", received=repr(item.of))
    return device


def _ended(table: _Table, read: Callable[[_Table], T]) -> T:
    part = read(table)
    table.end()
    return part


def _processor(table: _Table, name: str) -> Processor:
    rates = ("frequency_hz", "conv_flop_s", "depthwise_flop_s", "dense_flop_s", "elementwise_flop_s", "int8_op_s")
    processor = Processor(
        name=name,
        kind=table.word("kind", get_args(ProcessorKind)),
        core=table.text("core"),
        cores=table.whole("cores", 1),
        source=table.text("source"),
        power_w=table.quantity_if_there("power_w", positive=False),
        **{rate: table.quantity_if_there(rate) for rate in rates},
    )
    table.end()
    return processor


def _memory(table: _Table) -> Memory:
    bandwidth = table.quantity("bandwidth_bytes_s")
    power = table.quantity_if_there("power_w", positive=False)
    ram = tuple(_ended(item, _region) for item in table.tables("ram"))
    flash = tuple(_ended(item, _region) for item in table.tables("flash"))
    table.end()
    if not ram:
        raise table.wrong("ram", "at least one region")
    return Memory(bandwidth, ram, flash, power)


def _region(table: _Table) -> Region:
    address = table.whole("address", 0) if "address" in table.values else None
    region = Region(
        table.text("name"), table.quantity("n_bytes"), address,
        table.quantity_if_there("page_bytes"), table.quantity_if_there("paged_bytes"),
    )  # fmt: skip
    page = region.page_bytes
    for key, whole in (("paged_bytes", region.paged_bytes), ("n_bytes", region.n_bytes)):
        if page is not None and whole is not None and whole.value % page.value:
            raise table.wrong(key, f"a multiple of page_bytes, {page.value:.0f}")
    if page is not None and page.value % 256:
        raise table.wrong("page_bytes", "a multiple of 256")
    if region.paged_bytes is not None and (page is None or region.paged_bytes.value > region.n_bytes.value):
        raise table.wrong("paged_bytes", "no more than n_bytes, beside page_bytes")
    return region


def _storage(table: _Table) -> Storage:
    return Storage(
        table.text("name"), table.quantity("in_bytes_s"), table.quantity("out_bytes_s"),
        table.quantity("in_latency_s", positive=False), table.quantity("out_latency_s", positive=False),
        table.quantity_if_there("power_w", positive=False), table.quantity_if_there("n_bytes"),
    )  # fmt: skip


def _library(table: _Table) -> Library:
    held = {key: table.quantity_if_there(key, positive=False) for key in ("base_bytes", "lasting", "held", "columns")}
    if len({value is None for value in held.values()}) > 1:
        missing = next(key for key, value in held.items() if value is None)
        raise table.wrong(missing, "all of base_bytes, lasting, held and columns, or none")
    return Library(
        table.text("name"), table.quantity("overhead_s", positive=False), table.get("overlaps", bool), **held
    )


def _firmware(table: _Table) -> Firmware:
    places = table.inside("emulated") if "emulated" in table.values else None
    wrong = unknown_command(table.text("compiler"), table.texts_if_there("emulator"))
    if wrong is not None:
        raise UserError(f"{table.file}: {table.prefix[:-1]} names a program that is not run", received=wrong)
    for key in ("flags", "fast_flags"):
        if any(re.fullmatch(r"-m[\w=.+,-]+", flag) is None for flag in table.texts_if_there(key)):
            raise table.wrong(key, "flags that name the processor, as -mcpu=cortex-m4")
    return Firmware(
        table.text("target"), table.word("kind", get_args(FirmwareKind)), table.text("source"), table.text("compiler"),
        table.texts_if_there("flags"), table.texts_if_there("emulator"),
        {} if places is None else {name: places.whole(name, 0) for name in places.values},
        table.whole("stack_bytes", 0), table.texts_if_there("fast_flags"),
        table.word("flash_driver", FLASH_DRIVERS) if "flash_driver" in table.values else None,
    )  # fmt: skip


def unknown_command(compiler: str, emulator: Sequence[str]) -> str | None:
    """What of the two is no program, or no word of one, that is known here; None where all is."""
    if compiler not in COMPILERS:
        return f"the compiler {shown(compiler)} is none of {', '.join(COMPILERS)}"
    program, words = (emulator[0], emulator[1:]) if emulator else (EMULATORS[0], ())
    if program not in EMULATORS:
        return f"the emulator {shown(program)} is none of {', '.join(EMULATORS)}"
    for option, value in zip_longest(words[::2], words[1::2], fillvalue=""):
        if option not in _WORDS or re.fullmatch(_WORDS[option], value) is None:
            return f"the emulator's words {shown(option)} {shown(value)} are none that are known: {', '.join(_WORDS)}"
    return None


def _published(table: _Table) -> Published:
    return Published(table.text("of"), table.number("value", positive=True), table.text("source"))
