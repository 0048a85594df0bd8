"""Compare every gradient and every tensor of the firmware with PyTorch in float64.

In:  a project, the model, loss and optimizer that it was exported from (as they were then), batches.
Out: `Row`s: the error of each tensor in the firmware, and the error of PyTorch's own float32.

    error         the largest |firmware - float64| of a tensor
    torch_error   the largest |PyTorch float32 - float64| of it, over several equally valid runs
    allowed       FACTOR × torch_error, at least the spacing of floats there

One float32 run is one sample of a random error: so there are several, with the same sums in another order. And
rounding decides on which side of a ReLU's bend an activation next to it lies: so each float64 run takes the sides of
the run that it is compared with; a debug build reports its own. Both are in `references.py`.

Dropout draws other masks than PyTorch: a model that has it cannot be compared here.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from edgetrain.errors import EdgetrainError
from edgetrain.firmware.build import Variant
from edgetrain.firmware.emulate import Run, run_firmware
from edgetrain.firmware.references import FACTOR, Batch, Found, References, Tensors, furthest

_EPS = torch.finfo(torch.float32).eps


class WrongNumbers(EdgetrainError):
    """Tensors of the firmware are further from float64 than allowed."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        shown = "\n".join(f"  {row}" for row in rows[:8])
        super().__init__(f"{len(rows)} tensors of the firmware are wrong:\n{shown}")


@dataclass(frozen=True, slots=True)
class Row:
    """what: "gradient" or "tensor". step: counted from 1. scale: the largest magnitude in the tensor."""

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

    @property
    def ratio(self) -> float:
        """The error as a multiple of PyTorch's; at most FACTOR if it is right."""
        return FACTOR * self.error / self.allowed if self.allowed else (0.0 if self.error == 0.0 else float("inf"))

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

    Model and optimizer are not changed.
    """
    run = run_firmware(folder, batches, variant=variant, compiler=compiler)
    references = References(model, loss, optimizer)
    return run, rows_of({len(batches): run}, references, batches, shown=range(1, len(batches) + 1))


def rows_of(
    runs: Mapping[int, Run], references: References, batches: Sequence[Batch], *, shown: Container[int] | None = None
) -> list[Row]:
    """Runs of the firmware by their number of steps, all over the same batches, against the same runs of PyTorch.

    The tensors after the last step of each. shown: the steps whose gradients are compared; by default the same ones.
    """
    (rows,) = rows_of_each([runs], references, batches, shown=shown)
    return rows


def rows_of_each(
    programs: Sequence[Mapping[int, Run]],
    references: References,
    batches: Sequence[Batch],
    *,
    shown: Container[int] | None = None,
) -> list[list[Row]]:
    """The same for several programs, with the same numbers of steps: PyTorch runs once for all of them."""
    steps = programs[0].keys()
    longest = [runs[max(steps)] for runs in programs]
    rows: list[list[Row]] = [[] for _ in programs]
    for step, batch in enumerate(batches[: max(steps)], 1):
        references.step(batch, [run.sides[step - 1] if run.sides else None for run in longest])
        for n, (runs, run) in enumerate(zip(programs, longest, strict=True)):
            if run.gradients and step in (steps if shown is None else shown):
                rows[n] += _rows("gradient", step, run.gradients[step - 1], references.gradients(), n)
            if step in steps:
                rows[n] += _rows("tensor", step, runs[step].tensors, references.tensors(), n)
    return rows


def require_right(rows: Sequence[Row]) -> None:
    wrong = [row for row in rows if not row.right]
    if wrong:
        raise WrongNumbers(wrong)


def _rows(what: str, step: int, tensors: Tensors, references: Found, program: int) -> Iterator[Row]:
    exact = references.exact[program]
    for name, value in tensors.items():
        if name in exact:
            torch_error = max(furthest(single[name], double[name]) for single, double in references.pairs)
            scale = furthest(exact[name], torch.zeros_like(exact[name]))
            yield Row(what, name, step, furthest(value, exact[name]), torch_error, scale)
