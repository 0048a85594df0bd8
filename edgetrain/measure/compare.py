"""Is a run worse than another? Pass, fail or inconclusive, with intervals: for use in CI.

In:  the records of two runs, and how much worse the second may be (`tolerance`, a part of the first).
Out: `Compared`, one a figure, and a verdict for all.

    ratio of the second to the first, for a figure of which less is better:

      1          1 + tolerance
      ┼────────────┼──────────────▶
        ├──────┤                        pass: all of the interval is within what is allowed
                     ├──────┤           fail: all of it is beyond
              ├──────┤                  inconclusive: more steps or repeats would decide

A count (bytes, instructions) has no spread and is compared as it is. A figure whose spread nobody knows, and one that
was measured in one run and modelled in the other, is inconclusive unless both are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from edgetrain.errors import UserError
from edgetrain.measure.intervals import Interval
from edgetrain.measure.record import Record, Value
from edgetrain.ranges import TOLERANCE, number

Verdict = Literal["pass", "fail", "inconclusive"]
EXIT_CODES: dict[Verdict, int] = {"pass": 0, "fail": 1, "inconclusive": 3}

# What is compared unless something is asked for, where both runs have it.
USUAL = (
    "step_time_s", "inference_time_s", "cpu_s_per_step", "peak_bytes", "process_peak_bytes", "energy_per_step_j",
    "net_energy_per_step_j", "instructions",
)  # fmt: skip
MORE_IS_BETTER = ("samples_per_s", "flops_per_s", "accuracy", "utilisation", "samples_delivered")


@dataclass(frozen=True)
class Compared:
    """ratio: of the second to the first; None where it cannot be had. why: of a verdict that needs a word."""

    name: str
    first: Value
    second: Value
    ratio: Interval | None
    verdict: Verdict
    why: str = ""


def compare(
    first: Record, second: Record, *, tolerance: float = 0.05, names: Sequence[str] = ()
) -> tuple[Compared, ...]:
    """names: figures of the summaries; by default the usual ones that both runs have."""
    require_tolerance(tolerance)
    asked = names or [name for name in USUAL if _is_there(first, name) and _is_there(second, name)]
    for name in asked:
        for record in (first, second):
            if name not in record.summary:
                raise UserError(
                    f"a run has no figure {name}", expected=", ".join(sorted(record.summary)) or "a run that has ended",
                )  # fmt: skip
    if not asked:
        raise UserError(
            "the two runs have no figure in common", expected=" or ".join(USUAL), next_step="name one with --figure"
        )
    return tuple(compare_values(name, first.summary[name], second.summary[name], tolerance) for name in asked)


def require_tolerance(tolerance: float) -> None:
    number("tolerance", tolerance, TOLERANCE)


def verdict(figures: Iterable[Compared]) -> Verdict:
    """One that fails is enough; so is one that is inconclusive, where none fails."""
    verdicts = {figure.verdict for figure in figures}
    return "fail" if "fail" in verdicts else "inconclusive" if "inconclusive" in verdicts else "pass"


def _is_there(record: Record, name: str) -> bool:
    return name in record.summary and record.summary[name].value is not None


def compare_values(name: str, first: Value, second: Value, tolerance: float) -> Compared:
    if first.value is None or second.value is None:
        return Compared(name, first, second, None, "inconclusive", "one of the runs does not have it")
    if isinstance(first.value, str | bool) or isinstance(second.value, str | bool):
        same = first.value == second.value
        return Compared(name, first, second, None, "pass" if same else "fail", "" if same else "not the same")
    if first.unit != second.unit:
        return Compared(name, first, second, None, "inconclusive", "not in the same unit")
    ratio = _ratio(first, second)
    if first.value == second.value:
        return Compared(name, first, second, ratio, "pass")
    if (first.origin == "modelled") != (second.origin == "modelled"):
        return Compared(name, first, second, ratio, "inconclusive", "modelled in one run, measured in the other")
    if ratio is None:
        return Compared(name, first, second, None, "inconclusive", "no ratio of such numbers")
    if math.isinf(ratio.high):
        return Compared(name, first, second, ratio, "inconclusive", "its spread is not known")
    return Compared(name, first, second, ratio, _judged(ratio, tolerance, more=name in MORE_IS_BETTER))


def _judged(ratio: Interval, tolerance: float, *, more: bool) -> Verdict:
    worst, best = (1 / ratio.low, 1 / ratio.high) if more else (ratio.high, ratio.low)
    if worst <= 1 + tolerance:
        return "pass"
    return "fail" if best > 1 + tolerance else "inconclusive"


def _ratio(first: Value, second: Value) -> Interval | None:
    """The two are independent: what their logarithms may be off by adds up in squares."""
    assert isinstance(first.value, int | float)
    assert isinstance(second.value, int | float)
    if first.value <= 0 or second.value <= 0:
        return None
    value = second.value / first.value
    if isinstance(first.value, int) and isinstance(second.value, int):
        return Interval(value, value, value)
    if first.low is None or second.low is None or first.low <= 0 or second.low <= 0:
        return Interval(value, 0.0, math.inf)
    assert first.high is not None
    assert second.high is not None
    below = math.hypot(math.log(second.value / second.low), math.log(first.high / first.value))
    above = math.hypot(math.log(second.high / second.value), math.log(first.value / first.low))
    return Interval(value, value * math.exp(-below), value * math.exp(above))
