"""`edgetrain doctor`: this machine, its sensors, and what each of them measures."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from edgetrain.cli.output import Json, print_json, results
from edgetrain.measure import power_model
from edgetrain.measure.record import Machine, this_machine
from edgetrain.measure.sensors import Channel, Finding, Source, find
from edgetrain.plan.budget import show_bytes

READS = 50
_WINDOW_S = 0.25  # counters are shown as what they grow by in a second; ticks of 10 ms need this much
_SHOWN = 3  # values of one source in the table
_KEY = ("supply_power_w", "rail_VDD_IN_power_w", "pmic_power_w", "rapl_psys_energy_j")  # shown before others

Values = dict[str, float | None]


def doctor(
    json: Json = False,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Model energy with this device's power figures (see `edgetrain devices`)."),
    ] = None,
    root: Annotated[Path, typer.Option("--root", help="Look for sensors under this folder.", hidden=True)] = Path("/"),
) -> None:
    """Show this machine, its sensors, what each measures here and what a read costs.

    A sensor that you may not read is listed with the command that opens it. Where no sensor measures power, energy is
    modelled from CPU time and marked as modelled; `edgetrain calibrate` fits the model to this machine.

    Example: edgetrain doctor
    """
    pid = os.getpid()
    findings = find(root, pid=pid, reads=READS, phones=root == Path("/"))
    findings = power_model.with_model(findings, root, pid=pid, device=device, reads=READS)
    values = _values([source for _, source in findings if source is not None])
    if json:
        print_json(_data(findings, values))
        return
    results.print(Text(_facts(this_machine()), style="bold"))
    results.print()
    results.print(_table(findings, values))
    _print_rest(findings)


# ---- values


def _values(sources: list[Source]) -> dict[str, Values]:
    """By source and channel, what it shows now: a gauge's value, a counter's growth in a second."""
    for source in sources:
        source.open()
    start, before = time.monotonic(), [source.read() for source in sources]
    time.sleep(_WINDOW_S)
    passed, after = time.monotonic() - start, [source.read() for source in sources]
    for source in sources:
        source.close()
    return {
        source.name: {
            channel.name: _now(channel, first, last, passed)
            for channel, first, last in zip(source.channels, firsts, lasts, strict=True)
        }
        for source, firsts, lasts in zip(sources, before, after, strict=True)
    }


def _now(channel: Channel, first: float | None, last: float | None, passed_s: float) -> float | None:
    if not channel.counter:
        return last
    return None if first is None or last is None else (last - first) / passed_s


def _shown(channel: Channel, value: float | None) -> str:
    """A value with its unit; energy a second is power, CPU seconds a second are cores."""
    if value is None:
        return "no value now"
    if channel.unit == "B":
        return show_bytes(int(value))
    if channel.unit == "Hz":
        return f"{value / 1e9:.2f} GHz"
    if channel.unit == "s":
        return f"{value:.2f} cores" if "time" in channel.name else f"{100 * value:.1f} % of time"
    if channel.unit == "1":
        return f"{100 * value:.0f} %" if "utilisation" in channel.name else f"{value:g}"
    unit = "W" if channel.unit == "J" else channel.unit
    return f"{value:.3g} {unit}"


def _readings(finding: Finding, values: Values) -> list[str]:
    """The first values that are known, with their names."""
    order = sorted(finding.channels, key=lambda channel: channel.name not in _KEY)
    order.sort(key=lambda channel: values.get(channel.name) is None)
    readings = [f"{channel.label} {_shown(channel, values.get(channel.name))}" for channel in order[:_SHOWN]]
    more = len(order) - _SHOWN
    return readings + ([f"{more} more"] if more > 0 else [])


# ---- on paper


def _facts(machine: Machine) -> str:
    """This machine in one line; what is not known is left out."""
    cores = None if machine.cores is None else f"{machine.cores} cores"
    if cores and machine.usable_cores != machine.cores:
        cores += f" ({machine.usable_cores} usable)"
    memory = None if machine.memory_bytes is None else show_bytes(machine.memory_bytes)
    facts = (machine.cpu, cores, memory, machine.accelerator, f"{machine.os} {machine.architecture}")
    return ", ".join(fact for fact in facts if fact)


def _table(findings: list[tuple[Finding, Source | None]], values: dict[str, Values]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("sensor", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("gives, how finely, and now")
    table.add_column("a read", justify="right", no_wrap=True)
    for finding, source in sorted(findings, key=lambda each: (not each[0].readable, not each[0].found)):
        if source is None:
            state = Text("closed", style="yellow") if finding.found else Text("no", style="dim")
            table.add_row(Text(finding.name, style="" if finding.found else "dim"), state, Text(finding.gives, "dim"))
            continue
        gives = Text(finding.gives)
        gives.append(f"\n{finding.resolution}", "dim")
        gives.append("\nnow: " + ", ".join(_readings(finding, values[finding.name])), "cyan")
        table.add_row(Text(finding.name), Text("yes", style="green"), gives, _cost(finding))
    return table


def _cost(finding: Finding) -> str:
    if finding.read_s is None:
        return ""
    return f"{finding.read_s * 1e6:.0f} µs" if finding.read_s < 0.01 else f"{finding.read_s * 1e3:.0f} ms"


def _print_rest(findings: list[tuple[Finding, Source | None]]) -> None:
    fixes = [(finding.name, finding.fix) for finding, _ in findings if finding.fix]
    if fixes:
        results.print("\nTo have more:", style="bold")
    for name, fix in fixes:
        # A command must be there in one piece, to be copied.
        results.print(Text(f"  {name}: {fix}"), soft_wrap=True)


def _data(findings: list[tuple[Finding, Source | None]], values: dict[str, Values]) -> dict[str, Any]:
    rows = []
    for finding, source in findings:
        row = asdict(finding)
        known = values.get(source.name, {}) if source is not None else {}
        for channel, described in zip(finding.channels, row["channels"], strict=True):
            value = known.get(channel.name)
            described["per_second" if channel.counter else "value"] = value
            described["kind"] = "unavailable" if value is None else channel.kind
        rows.append(row)
    return {"machine": asdict(this_machine()), "sources": rows}
