"""What `et.prepare` is asked for, checked once: whatever cannot be is a `UserError` that says what can."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from edgetrain.errors import UserError
from edgetrain.graph.capture.training import Unused
from edgetrain.graph.mean_loss import has_samples
from edgetrain.plan.budget import parse_bytes
from edgetrain.plan.planner import Number, Planner
from edgetrain.plan.registry import named
from edgetrain.ranges import BATCH, NORM, SECONDS, STEPS, number, shown, whole

StepFormat = Literal["auto", "preserve", "channels_last"]
Amount = int | float | str  # of memory, as `parse_bytes` takes it
MAX_SHAPES = 8
MAX_SHAPES_BYTES = 256_000_000


@dataclass(frozen=True)
class Options:
    """The arguments of `et.prepare` under their own names, and two that commands set.

    apart: capture in a process of its own, though this one is not bounded. runs: here; a step that is only planned may
    be larger than this machine.
    """

    memory: Amount | Callable[[], Amount] | None = None
    process_memory: Amount | None = None
    planner: str = "auto"
    unused: Unused = "error"
    memory_format: StepFormat = "auto"
    check_finite: bool = False
    clip_norm: float | None = None
    keep_memory: bool = True
    use_cache: bool = True
    plan_time_s: float = 10.0
    page_to: str | os.PathLike[str] | None = None
    micro_batches: int | Literal["auto"] | None = None
    allow_inexact: bool = False
    max_shapes: int = MAX_SHAPES
    max_shapes_bytes: Amount = MAX_SHAPES_BYTES
    apart: bool = False
    runs: bool = True

    def __post_init__(self) -> None:
        if self.page_to is not None and not isinstance(self.page_to, str | os.PathLike):
            raise UserError("page_to cannot be that", expected="the path of a folder", received=shown(self.page_to))
        _ = self.memory_bytes, self.process_memory_bytes, self.kept_shapes_bytes
        _one_of("unused", self.unused, Unused)
        _one_of("memory_format", self.memory_format, StepFormat)
        if self.clip_norm is not None:
            number("clip_norm", self.clip_norm, NORM)
        number("plan_time_s", self.plan_time_s, SECONDS)
        count = self.micro_batches
        if count is not None and count != "auto" and count not in BATCH:
            raise UserError("micro_batches cannot be that", expected=f'{BATCH}, or "auto"', received=shown(count))
        whole("max_shapes", self.max_shapes, STEPS)
        if self.follow is not None and self.process_memory is not None:
            raise UserError("a budget that moves is one of tensors", next_step="leave process_memory out")
        if not self._bounded and self.planning.needs_budget:
            raise UserError(f"the planner {self.planner} needs a budget", next_step="give memory= or process_memory=")
        if not self._bounded and self.page_to is not None:
            raise UserError("without a budget nothing is paged", next_step="give memory= or process_memory=")

    @cached_property
    def planning(self) -> Planner:
        """Who plans; where the budget moves there are many plans to be made."""
        planner = named(self.planner)
        return named(planner.when_moving) if self.follow is not None and planner.when_moving else planner

    @property
    def follow(self) -> Callable[[], Amount] | Literal["auto"] | None:
        """The budget, where it moves."""
        memory: Any = self.memory
        return memory if callable(memory) or memory == "auto" else None

    @cached_property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None or self.follow is not None else parse_bytes(self.memory)  # type: ignore[arg-type]

    @cached_property
    def process_memory_bytes(self) -> int | None:
        return None if self.process_memory is None else parse_bytes(self.process_memory)

    @cached_property
    def kept_shapes_bytes(self) -> int:
        return parse_bytes(self.max_shapes_bytes)

    @cached_property
    def page_folder(self) -> str | None:
        return None if self.page_to is None else os.fspath(self.page_to)

    @property
    def _bounded(self) -> bool:
        return self.memory is not None or self.process_memory is not None

    @property
    def keeps_all(self) -> bool:
        return not self._bounded and not self.planning.needs_budget

    def count(self, batch: Sequence[object]) -> Number:
        """Of micro-batches. SAGE leaves the batch whole where nothing in it can be cut."""
        count = self.planning.number_of(self.micro_batches)
        return 1 if count == "fewest" and not has_samples(batch) else count


def _one_of(name: str, given: object, allowed: Any) -> None:
    if given not in get_args(allowed):
        expected = " or ".join(repr(value) for value in get_args(allowed))
        raise UserError(f"{name} cannot be that", expected=expected, received=shown(given))
