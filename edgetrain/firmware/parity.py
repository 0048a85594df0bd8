"""Are the firmware's numbers right? Every gradient and every tensor, held against PyTorch in float64.

In:  a project, the model, loss and optimizer that it was exported from (as they were then), batches.
Out: `Row`s: the error of each tensor in the firmware, and the error of PyTorch's own float32.

    error         the largest |firmware - float64| of a tensor
    allowed       FACTOR × the largest |PyTorch float32 - float64|, and never less than the spacing of floats there

Dropout draws its masks otherwise than PyTorch does: a model that has it is compared by its parts, not here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgetrain.errors import EdgetrainError
from edgetrain.firmware.build import Variant
from edgetrain.firmware.emulate import Run, run_firmware

FACTOR = 4.0
Batch = Sequence[torch.Tensor]
_EPS = torch.finfo(torch.float32).eps


class WrongNumbers(EdgetrainError):
    """Some tensor of the firmware is further from float64 than it may be."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        shown = "\n".join(f"  {row}" for row in rows[:8])
        super().__init__(f"{len(rows)} tensors of the firmware are wrong:\n{shown}")


@dataclass(frozen=True, slots=True)
class Row:
    """what: "gradient" or "tensor". step: counted from 1."""

    what: str
    name: str
    step: int
    error: float
    torch_error: float
    scale: float

    @property
    def allowed(self) -> float:
        return max(FACTOR * self.torch_error, 2 * _EPS * self.scale)

    @property
    def right(self) -> bool:
        return self.error <= self.allowed  # NaN is not

    def __str__(self) -> str:
        return f"{self.what} {self.name} after step {self.step}: off by {self.error:.3g}, allowed {self.allowed:.3g}"


def compare(
    folder: str | Path,
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    variant: Variant = "debug",
    compiler: str | None = None,
) -> tuple[Run, list[Row]]:
    """Run the firmware and PyTorch over the batches: every gradient of every step, every tensor after the last.

    Model and optimizer stay as they are.
    """
    run = run_firmware(folder, batches, variant=variant, compiler=compiler)
    single, double = _Twin(model, optimizer, torch.float32), _Twin(model, optimizer, torch.float64)
    rows: list[Row] = []
    for step, batch in enumerate(batches, 1):
        right, plain = double.step(loss, batch), single.step(loss, batch)
        if run.gradients:
            rows += _rows("gradient", step, run.gradients[step - 1], plain, right)
    rows += _rows("tensor", len(batches), run.tensors, single.tensors(), double.tensors())
    return run, rows


def require_right(rows: Sequence[Row]) -> None:
    wrong = [row for row in rows if not row.right]
    if wrong:
        raise WrongNumbers(wrong)


def _rows(
    what: str, step: int, found: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor],
    right: Mapping[str, torch.Tensor],
) -> list[Row]:  # fmt: skip
    rows = []
    for name, value in found.items():
        if name not in right:
            continue
        exact = right[name].double()
        error, own = (_furthest(value.double(), exact), _furthest(plain[name].double(), exact))
        rows.append(Row(what, name, step, error, own, _furthest(exact, torch.zeros_like(exact))))
    return rows


def _furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0


class _Twin:
    """A copy of model and optimizer in another precision, with all state of the optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
        both: tuple[nn.Module, torch.optim.Optimizer] = copy.deepcopy((model, optimizer))
        self.model, self.optimizer = both
        self.model.to(dtype)
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and key != "step":
                    state[key] = value.to(dtype)
        self.dtype = dtype

    def step(self, loss: Callable[..., torch.Tensor], batch: Batch) -> dict[str, torch.Tensor]:
        self.optimizer.zero_grad()
        given = [t.to(self.dtype) if t.is_floating_point() else t for t in batch]
        loss(self.model, *given).backward()
        found = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and the optimizer's state, by the names that a graph gives them."""
        found: dict[str, Any] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        names: dict[torch.Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        for p, state in self.optimizer.state.items():
            found.update({f"{names[p]}.{key}": torch.as_tensor(value) for key, value in state.items() if p in names})
        return {name: value.detach() for name, value in found.items() if value is not None}
