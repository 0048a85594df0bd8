"""What `et.prepare` is asked for, checked: whatever cannot be is a `UserError` that says what can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from edgetrain.errors import UserError
from edgetrain.graph.capture.training import Unused
from edgetrain.graph.mean_loss import has_samples
from edgetrain.plan.planner import Number
from edgetrain.plan.registry import named
from edgetrain.ranges import BATCH, NORM, SECONDS, STEPS, number, shown, whole

StepFormat = Literal["auto", "preserve", "channels_last"]


@dataclass(frozen=True)
class Options:
    unused: Unused = "error"
    memory_format: StepFormat = "auto"
    check_finite: bool = False
    clip_norm: float | None = None
    keep_memory: bool = True
    use_cache: bool = True
    memory_bytes: int | None = None
    process_memory_bytes: int | None = None
    planner: str = "auto"
    plan_time_s: float = 10.0
    page_to: str | None = None
    follow: Callable[[], object] | Literal["auto"] | None = None
    micro_batches: int | Literal["auto"] | None = None
    allow_inexact: bool = False
    max_shapes: int = 8
    max_shapes_bytes: int = 256_000_000
    apart: bool = False  # capture in a process of its own, where this one is not bounded too
    runs: bool = True  # here; a step that is only planned may be larger than this machine

    def __post_init__(self) -> None:
        named(self.planner)
        _one_of("unused", self.unused, Unused)
        _one_of("memory_format", self.memory_format, StepFormat)
        if self.clip_norm is not None:
            number("clip_norm", self.clip_norm, NORM)
        number("plan_time_s", self.plan_time_s, SECONDS)
        count = self.micro_batches
        if count is not None and count != "auto" and count not in BATCH:
            raise UserError("micro_batches cannot be that", expected=f'{BATCH}, or "auto"', received=shown(count))
        whole("max_shapes", self.max_shapes, STEPS)
        needs = self.memory_bytes is None and self.process_memory_bytes is None and self.follow is None
        if self.follow is not None and self.process_memory_bytes is not None:
            raise UserError("a budget that moves is one of tensors", next_step="leave process_memory out")
        if needs and named(self.planner).needs_budget:
            raise UserError(f"the planner {self.planner} needs a budget", next_step="give memory= or process_memory=")
        if needs and self.page_to is not None:
            raise UserError("without a budget nothing is paged", next_step="give memory= or process_memory=")

    @property
    def keeps_all(self) -> bool:
        bounded = (self.memory_bytes, self.process_memory_bytes, self.follow) != (None, None, None)
        return not bounded and not named(self.planner).needs_budget

    def count(self, batch: Sequence[object]) -> Number:
        """Of micro-batches. SAGE leaves the batch whole where nothing in it can be cut."""
        count = named(self.planner).number_of(self.micro_batches)
        return 1 if count == "fewest" and not has_samples(batch) else count


def _one_of(name: str, given: object, allowed: Any) -> None:
    if given not in get_args(allowed):
        expected = " or ".join(repr(value) for value in get_args(allowed))
        raise UserError(f"{name} cannot be that", expected=expected, received=shown(given))
