"""`edgetrain devices`: the devices whose costs can be modelled, and every number of one with its source."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from edgetrain.cli.output import Json, print_json, results
from edgetrain.devices.device import Device, Quantity, load, names
from edgetrain.plan.budget import show_bytes

_UNITS = (("_flop_s", "FLOP/s"), ("_op_s", "op/s"), ("bytes_s", "B/s"), ("_hz", "Hz"), ("_s", "s"), ("_w", "W"))
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))


def devices(
    name: Annotated[
        str | None, typer.Argument(help="Device to show in full: a name, or the path of a .toml file.")
    ] = None,
    json: Json = False,
) -> None:
    """List the devices that training can be modelled for; with a name, every number of one and its source.

    `edgetrain plan --device NAME` computes its times from these numbers. A device of your own is a file like those in
    edgetrain/devices: give its path in place of a name.

    Example: edgetrain devices rpi4
    """
    if name is None:
        known = [load(key) for key in names()]
        if json:
            print_json({"devices": [_row(device) for device in known]})
            return
        results.print(_table(known))
        results.print("\nEvery number and its source: edgetrain devices NAME")
        return
    device = load(name)
    if json:
        print_json({"device": asdict(device)})
        return
    _show(device)


# ---- all of them


def _row(device: Device) -> dict[str, Any]:
    processor, rate = device.processor, device.processor.conv_flop_s
    assert rate is not None
    return {
        "name": device.key,
        "device": device.name,
        "kind": device.kind,
        "processor": f"{processor.cores} × {processor.core}",
        "ram_bytes": device.memory.ram_bytes,
        "flash_bytes": device.memory.flash_bytes or None,
        "conv_flop_s": rate.value,
        "bandwidth_bytes_s": device.memory.bandwidth_bytes_s.value,
        "power_w": None if processor.power_w is None else processor.power_w.value,
        "plus_minus": rate.plus_minus,
        "library": device.library.name,
    }


def _table(known: list[Device]) -> Table:
    """Fits 80 columns: the name of the device takes what the others leave."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("name", no_wrap=True)
    table.add_column("device")
    for heading in ("RAM", "FLOP/s", "±", "bytes/s", "power"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kind in ("phone", "board", "microcontroller"):
        for row in (_row(device) for device in known if device.kind == kind):
            power = "" if row["power_w"] is None else _amount(row["power_w"], "W")
            table.add_row(
                row["name"], row["device"], _binary(row["ram_bytes"]), _amount(row["conv_flop_s"], ""),
                f"{100 * row['plus_minus']:.0f} %", _amount(row["bandwidth_bytes_s"], ""), power,
            )  # fmt: skip
    return table


# ---- one of them


def _show(device: Device) -> None:
    results.print(Text(f"{device.name} ({device.key}): {device.kind}, {device.chip}", style="bold"))
    for processor in device.processors.values():
        trains = ", trains here" if processor.name == device.runs_on else "" if processor.trains else ", rates unknown"
        words = f"{processor.name}: {processor.cores} × {processor.core}{trains} ({processor.source})"
        results.print(Padding(Text(words), (0, 0, 0, 2)))
    results.print(Padding(Text(f"library: {device.library.name}, {_overlap(device)}"), (0, 0, 0, 2)))
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("number", no_wrap=True)
    for heading in ("value", "±"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("source")
    for name, quantity in device.quantities():
        off = f"{100 * quantity.plus_minus:.0f} %" if quantity.plus_minus else ""
        table.add_row(Text(name), Text(_value(name, quantity)), off, Text(quantity.source))
    results.print()
    results.print(table)
    if device.published:
        results.print("\nIn print too, and not used:", style="bold")
        for item in device.published:
            words = f"{item.of} {_value(item.of, Quantity(item.value, ''))}: {item.source}"
            results.print(Padding(Text(words), (0, 0, 0, 2)))
    for note in device.notes:
        results.print()
        results.print(Padding(Text(note), (0, 0, 0, 2)))


def _overlap(device: Device) -> str:
    return "computes while it moves data" if device.library.overlaps else "computes and moves data one after the other"


def _value(name: str, quantity: Quantity) -> str:
    """In the unit that the name says: bytes for regions of memory, nothing for factors."""
    if name.startswith(("ram.", "flash.")):
        return _binary(int(quantity.value))
    if name.endswith("_bytes"):
        return show_bytes(int(quantity.value))
    unit = next((unit for ending, unit in _UNITS if name.endswith(ending)), None)
    return f"{quantity.value:.3g}" if unit is None else _amount(quantity.value, unit)


def _amount(value: float, unit: str) -> str:
    if value == 0:
        return f"0 {unit}"
    size, prefix = next(((s, p) for s, p in _PREFIXES if value >= s), (1e-9, "n"))
    number = f"{value / size:.0f}" if value / size >= 100 else f"{value / size:.3g}"
    return f"{number} {prefix}{unit}".rstrip()


def _binary(n_bytes: int) -> str:
    """RAM is sold in powers of two: 4 GiB, 256 KiB."""
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n_bytes >= size:
            return f"{n_bytes / size:g} {name}"
    return f"{n_bytes} B"
