"""A training step planned for a firmware target, for `edgetrain plan` and `edgetrain export`.

In:  a model, its loss and optimizer, an example batch, a target. Out: `FirmwareStep`: the lowered graph and its costs;
     for a budget the plan and the bytes of its program, or `Infeasible`.

A plan is bounded by RAM, for the step and the prediction, which share the arena, and by flash, for code, initial values
and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from edgetrain.costs.table import Costs
from edgetrain.firmware.export import Assembled, Project, assemble, prediction
from edgetrain.firmware.fit import plan_for
from edgetrain.firmware.instructions import firmware_costs
from edgetrain.firmware.lower import lower_for_firmware
from edgetrain.firmware.target import Target
from edgetrain.graph.capture.training import capture
from edgetrain.graph.ir import Graph
from edgetrain.plan.budget import Budget
from edgetrain.plan.plan import Plan

# By default plain SGD, whose state takes no memory.
MOMENTUM = 0.0


@dataclass(frozen=True)
class FirmwareStep:
    graph: Graph
    target: Target
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @cached_property
    def costs(self) -> Costs:
        return firmware_costs(self.graph, self.target)

    @cached_property
    def _prediction_bytes(self) -> int:
        return prediction(self.graph, self.model).arena.height_bytes

    def plan(
        self,
        memory_bytes: int | None = None,
        *,
        limits: Budget | None = None,
        planner: str = "auto",
        time_limit_s: float = 10.0,
        left_s: float | None = None,
    ) -> Plan:
        """memory_bytes: RAM for the step; by default what the target has. left_s: what is left of the time."""
        return plan_for(
            self.graph, self.target, memory_bytes=memory_bytes, arena_bytes=self._prediction_bytes, limits=limits,
            planner=planner, time_limit_s=time_limit_s, left_s=left_s,
        )  # fmt: skip

    def project(self, plan: Plan, *, keep_every: int | None = None) -> Project:
        """The bytes of the program."""
        return self.assemble(plan, keep_every=keep_every).project

    def assemble(self, plan: Plan, *, keep_every: int | None = None) -> Assembled:
        """The program of the plan."""
        return assemble(self.graph, plan, self.model, self.optimizer, self.target, keep_every=keep_every)


def firmware_step(
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    example: Sequence[Any],
    target: Target,
) -> FirmwareStep:
    graph = lower_for_firmware(capture(model, loss, optimizer, example), model)
    return FirmwareStep(graph, target, model, optimizer)
