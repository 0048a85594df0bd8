"""Are the firmware's numbers right? Every gradient and every tensor, held against PyTorch in float64.

In:  a project, the model, loss and optimizer that it was exported from (as they were then), batches.
Out: `Row`s: the error of each tensor in the firmware, and the error of PyTorch's own float32.

    error         the largest |firmware - float64| of a tensor
    own           the largest |PyTorch float32 - float64| of it, over several runs that are equally right
    allowed       FACTOR × own, and never less than the spacing of floats there

One run of PyTorch is one draw of a random error, and may be lucky. So there are several (`references.py`): oneDNN's
kernels and PyTorch's own, channels-last, the samples in reverse. And a float is not all that rounding decides: an
activation nearer to the bend of a ReLU than float32's own error there may come to lie on either side, with all of its
gradient or none. Two runs in float64 put such activations, and no others, on the other side.

Dropout draws its masks otherwise than PyTorch does: a model that has it is compared by its parts, not here.
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
from edgetrain.firmware.references import Batch, References, Tensors

FACTOR = 4.0
_EPS = torch.finfo(torch.float32).eps


class WrongNumbers(EdgetrainError):
    """Some tensor of the firmware is further from float64 than it may be."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        shown = "\n".join(f"  {row}" for row in rows[:8])
        super().__init__(f"{len(rows)} tensors of the firmware are wrong:\n{shown}")


@dataclass(frozen=True, slots=True)
class Row:
    """what: "gradient" or "tensor". step: counted from 1.

    torch_error: the largest of PyTorch's float32 runs. bend_error: the largest of those with undecided activations on
    their other side. scale: the largest number of the tensor.
    """

    what: str
    name: str
    step: int
    error: float
    torch_error: float
    scale: float
    bend_error: float = 0.0

    @property
    def own(self) -> float:
        return max(self.torch_error, self.bend_error)

    @property
    def allowed(self) -> float:
        return max(FACTOR * self.own, 2 * _EPS * self.scale)

    @property
    def right(self) -> bool:
        return self.error <= self.allowed  # NaN is not

    @property
    def ratio(self) -> float:
        """The error in PyTorch's own errors; at most FACTOR where it is right. 0 where it is no more than spacing."""
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

    Model and optimizer stay as they are.
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
    longest, shown = runs[max(runs)], runs if shown is None else shown
    rows: list[Row] = []
    for step, batch in enumerate(batches[: max(runs)], 1):
        references.step(batch)
        if longest.gradients and step in shown:
            rows += _rows("gradient", step, longest.gradients[step - 1], references.gradients())
        if step in runs:
            rows += _rows("tensor", step, runs[step].tensors, references.tensors())
    return rows


def require_right(rows: Sequence[Row]) -> None:
    wrong = [row for row in rows if not row.right]
    if wrong:
        raise WrongNumbers(wrong)


def _rows(what: str, step: int, found: Tensors, known: tuple[Tensors, list[Tensors], list[Tensors]]) -> Iterator[Row]:
    exact, plain, bent = known
    for name, value in found.items():
        if name not in exact:
            continue
        right = exact[name].double()

        def furthest(runs: Sequence[Tensors], name: str = name, right: torch.Tensor = right) -> float:
            return max((_furthest(run[name], right) for run in runs), default=0.0)

        error, own, bend = _furthest(value, right), furthest(plain), furthest(bent)
        yield Row(what, name, step, error, own, _furthest(right, torch.zeros_like(right)), bend)


def _furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).abs().max()) if a.numel() else 0.0
