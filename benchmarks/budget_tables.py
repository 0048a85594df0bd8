"""The results of `budget.py` as Markdown.

In:  what it keeps: section → model → its result. Out: one page with a table for each section.

A number with a limit reads "5.2 % (≤ 12 %)"; one that does not keep it says "missed".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.markdown import head, line, made

Result = Mapping[str, Any]
ERROR_LIMIT = 0.10  # mean error of the predicted times


def page(kept: Mapping[str, Mapping[str, Result]]) -> str:
    parts = []
    for section, show in SECTIONS.items():
        if section in kept:
            parts += [f"## {section}", "", *show(kept[section]), "", *_made(kept[section]), ""]
    return "\n".join(parts)


def _plans(results: Mapping[str, Result]) -> Iterator[str]:
    yield from head("model, batch", "fraction", "bytes of tensors", "extra time", "ops again", "planned in", "gap")
    for model, result in results.items():
        for row in result["rows"]:
            asked, fraction = row["asked_fraction"], row["fraction"]
            smallest = "" if row["refused_s"] is None else f" ({asked:g} infeasible, said in {row['refused_s']:.0f} s)"
            yield line(
                f"{model}, {result['batch']}",
                f"{asked:g}" if row["refused_s"] is None else f"{fraction:.2f}{smallest}",
                f"{_mb(result['keep_all_bytes'])} → {_mb(row['planned_bytes'])}",
                _against(row["extra"], row["extra_limit"], _percent),
                str(row["recomputed_ops"]),
                _against(row["plan_s"], result["plan_limit_s"], lambda s: f"{s:.1f} s"),
                _against(row["gap"], result["gap_limit"], _percent),
            )


def _measured(results: Mapping[str, Result]) -> Iterator[str]:
    for model, result in results.items():
        yield f"{model}, batch {result['batch']}, {result['rounds']} rounds, against {result['faster_eager']}:"
        yield ""
        yield from head(
            "", "step", "time ratio (95 %)", "memory growth, ratio", "allocator served", "predicted extra",
            "measured extra (95 %)", "difference",
        )  # fmt: skip
        for row in result["rows"]:
            earlier = f" (run of {row['earlier']})" if "earlier" in row else ""
            yield line(
                row["name"] + earlier,
                _ms(row["median_s"]),
                _ratio(row["time_ratio"], row.get("time_ratio_limit")),
                f"{_mb(row['grown_bytes'])}, {_memory_ratio(row)}",
                _mb(row["allocated_bytes"]),
                *_extra(row),
            )
        yield ""


def _memory_ratio(row: Result) -> str:
    """With the limit that the limit of time beside it is for; kept to two digits, as the budget is found by trying."""
    return _against(round(row["memory_ratio"], 2), row.get("memory_ratio_limit"), lambda part: f"{part:.2f}")


def _extra(row: Result) -> tuple[str, str, str]:
    if "predicted_extra" not in row:
        return "—", "—", "—"
    predicted, measured = row["predicted_extra"], row["measured_extra"]
    shown = f"{_percent(measured['median'])} ({_percent(measured['low'])} to {_percent(measured['high'])})"
    return _percent(predicted), shown, f"{100 * (measured['median'] - predicted):+.1f} points"


def _prediction(results: Mapping[str, Result]) -> Iterator[str]:
    errors = []
    yield from head("model, batch", "fraction", "predicted", "measured", "error")
    for model, result in results.items():
        for row in result["rows"]:
            errors.append(abs(row["error"]))
            yield line(
                f"{model}, {result['batch']}",
                f"{row['fraction']:.2f}",
                _ms(row["predicted_s"]),
                _ms(row["measured_s"]),
                f"{100 * row['error']:+.1f} %",
            )
    yield ""
    mean = _against(statistics.mean(errors), ERROR_LIMIT, _percent)
    yield f"Mean absolute error of {len(errors)} plans: {mean}."


def _batch(results: Mapping[str, Result]) -> Iterator[str]:
    for model, result in results.items():
        room = result["base_peak_bytes"]
        yield f"{model} in the {_mb(room)} of process memory that plain PyTorch takes for batch {result['base_batch']}:"
        yield ""
        yield from head("batch", "process at most", "step", "a sample")
        for row in result["rows"]:
            if "refused" in row:
                yield line(str(row["batch"]), "refused: no plan was found", "—", "—")
                continue
            over = "" if row["fits"] else ", too much"
            each = _ms(row["median_s"] / row["batch"])
            yield line(str(row["batch"]), f"{_mb(row['peak_bytes'])}{over}", _ms(row["median_s"]), each)
        largest = max((row["batch"] for row in result["rows"] if row["fits"]), default=None)
        yield ""
        yield f"Largest batch that fits: {'none that was tried' if largest is None else largest}."
        yield ""
        yield _large(result["large"])


def _large(row: Result) -> str:
    what = f"Batch {row['batch']} under {_mb(row['process_bytes'])} of process memory"
    if "refused" in row:
        return f"{what}: refused, no plan was found."
    kept = "" if row["fits"] else " (too much)"
    return (
        f"{what}: {_mb(row['peak_bytes'])}{kept}, {_ms(row['median_s'])} a step; {row['faster_eager']} takes "
        f"{_mb(row['eager_peak_bytes'])} and {_ms(row['eager_median_s'])}: {row['rounds']} rounds, time ratio "
        f"{_ratio(row['time_ratio'], row['time_ratio_limit'])}."
    )


SECTIONS: dict[str, Callable[[Mapping[str, Result]], Iterator[str]]] = {
    "plans": _plans,
    "measured": _measured,
    "prediction": _prediction,
    "batch": _batch,
}


def _made(results: Mapping[str, Result]) -> Iterator[str]:
    """Where, when and from what each result is."""
    for model, result in results.items():
        yield f"- {model}: {made(result['about'])}"


def _against(value: float | None, limit: float | None, show: Callable[[float], str]) -> str:
    if value is None:
        return "—"
    if limit is None:
        return show(value)
    return f"{show(value)} (≤ {show(limit)}{'' if value <= limit else ', missed'})"


def _ratio(found: Mapping[str, float], limit: float | None) -> str:
    interval = f"{found['median']:.2f} ({found['low']:.2f}–{found['high']:.2f})"
    if limit is None:
        return interval
    return f"{interval}, asked ≤ {limit:g}{'' if found['median'] <= limit else ', missed'}"


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _mb(n_bytes: float) -> str:
    return f"{n_bytes / 1e6:.0f} MB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
