"""The page of benchmarks/sage.py. In: what is kept in sage.json. Out: Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.markdown import head, line, made
from edgetrain.devices.device import load

Result = Mapping[str, Any]
PAPER = {"accumulation": "−50 %", "eviction": "−76 %", "neither": "20×"}  # ResNet-50, at its best


def page(kept: Mapping[str, Mapping[str, Result]]) -> str:
    lines: list[str] = []
    for section, show in SHOWN.items():
        if kept.get(section):
            lines += [f"## {section}", "", *show(kept[section]), ""]
            lines += [f"- {model}: {made(result['about'])}" for model, result in kept[section].items()]
            lines.append("")
    return "\n".join(lines)


def _modelled(results: Mapping[str, Result]) -> str:
    names = {load(result["device"]).name for result in results.values()}
    return f"Bytes are planned, times modelled for {', '.join(sorted(names))}; nothing was run."


def _smallest(results: Mapping[str, Result]) -> Iterator[str]:
    yield _modelled(results)
    yield ""
    yield (
        "SAGE's least memory against that of the others: all tensors, and in parentheses what is above the lasting "
        "tensors of a whole batch (accumulators count). The paper's figures are of ResNet-50, at its best; which batch "
        "they are of is not known here. What SAGE saves over eviction alone and over neither grows with the batch; "
        "where it is 0 % over eviction alone, the accumulators would take more than smaller micro-batches save."
    )
    yield ""
    yield from head(
        "net, batch", "SAGE", f"against accumulation alone (paper {PAPER['accumulation']})",
        f"against its eviction alone (paper {PAPER['eviction']})", "against segments alone",
        f"against neither (paper {PAPER['neither']})", "against ours, fast in parts",
    )  # fmt: skip
    for model, result in results.items():
        for batch in dict.fromkeys(row["batch"] for row in result["rows"]):
            rows = {row["way"]: row for row in result["rows"] if row["batch"] == batch}
            sage = rows["SAGE"]
            less = [_less(sage, rows[way]) for way in ("accumulation", "eviction", "segments")]
            yield line(
                f"{model}, {batch}", _held(sage), *less, _times(rows["neither"], sage),
                _less(sage, rows["fast in parts"]) if "fast in parts" in rows else "—",
            )  # fmt: skip
    yield ""
    yield "Each way in its least memory; times as a part of the time of neither."
    yield ""
    yield from head("net, batch", "way", "memory", "micro-batches", "time", "numbers")
    for model, result in results.items():
        for row in result["rows"]:
            first = (f"{model}, {row['batch']}", row["way"], _held(row), str(row["micro_batches"]))
            yield line(*first, f"{row['time']:.2f}", _numbers(row))
    yield ""


def _budgets(results: Mapping[str, Result]) -> Iterator[str]:
    yield _modelled(results)
    yield ""
    yield (
        "Times as a part of the time of neither; behind × the number of micro-batches. A fraction is one of what "
        "neither holds above its lasting tensors. “—”: no plan was found by that way that keeps the budget."
    )
    yield ""
    ways = list(dict.fromkeys(row["way"] for result in results.values() for row in result["rows"]))
    yield from head("net, batch", "fraction", "budget", *ways)
    for model, result in results.items():
        for fraction in dict.fromkeys(row["fraction"] for row in result["rows"]):
            rows = {row["way"]: row for row in result["rows"] if row["fraction"] == fraction}
            budget = next(iter(rows.values()))["budget_bytes"]
            cells = (_cell(rows[way]) if way in rows else "" for way in ways)
            yield line(f"{model}, {result['batch']}", f"{fraction:g}", _mb(budget), *cells)
    yield ""


def _ran(results: Mapping[str, Result]) -> Iterator[str]:
    yield (
        "Run on the machine below, costs of ops measured there; the step of SAGE and that of neither took turns. Bytes "
        "that were run: what the arena served at most and all that lasts. Load: how many processes wanted one of its "
        "cores; above their number the times are of a busy machine."
    )
    yield ""
    yield from head(
        "net, batch", "neither", "eviction alone keeps", "budget", "micro-batches", "planned", "ran",
        "time, of neither's (95 %)", "load", "numbers",
    )  # fmt: skip
    for model, result in results.items():
        took = result["measured"]
        yield line(
            f"{model}, {result['batch']}", _mb(result["neither_bytes"]), _mb(result["eviction_bytes"]),
            _mb(result["budget_bytes"]), f"{len(result['sizes'])} of {max(result['sizes'])}",
            f"{result['planned_bytes']} B", f"{result['ran_bytes']} B",
            f"{took['median']:.2f} ({took['low']:.2f}–{took['high']:.2f}), {result['rounds']} rounds",
            f"{result['load']:.1f}" if "load" in result else "not recorded", _numbers(result),
        )  # fmt: skip
    yield ""


SHOWN: dict[str, Callable[[Mapping[str, Result]], Iterator[str]]] = {
    "smallest": _smallest,
    "budgets": _budgets,
    "ran": _ran,
}


def _held(row: Result) -> str:
    return f"{_mb(row['bytes'])} ({_mb(row['above_bytes'])})"


def _less(ours: Result, theirs: Result) -> str:
    found = (round(100 * (ours[key] / theirs[key] - 1)) for key in ("bytes", "above_bytes"))
    all_of_it, above = (f"{percent:+d} %".replace("-", "−") if percent else "0 %" for percent in found)
    return f"{all_of_it} ({above})"


def _times(theirs: Result, ours: Result) -> str:
    return f"{theirs['bytes'] / ours['bytes']:.1f}× ({theirs['above_bytes'] / ours['above_bytes']:.0f}×)"


def _cell(row: Result) -> str:
    if row["bytes"] is None:
        return "—"
    count = row["micro_batches"]
    return f"{row['time']:.2f}{f' ×{count}' if count > 1 else ''}"


def _numbers(row: Result) -> str:
    said = {"bitwise": "bitwise", "rounding": "to rounding", "no": "others (allow_inexact)"}
    return said[row["exact"]]


def _mb(n_bytes: float) -> str:
    return f"{n_bytes / 1e6:.0f} MB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"
