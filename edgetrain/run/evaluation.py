"""How well a model does on test data, in no more memory than a training step takes.

In: a model, test data and a function that scores one batch. Out: an `Evaluation`; None when a stop was asked for.
Promised: weights, random numbers and every module's training flag are afterwards as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from edgetrain.graph.capture.modes import Surroundings, evaluating
from edgetrain.native.surely import surely
from edgetrain.run.arena import from_arena

Evaluate = Callable[..., tuple[float | Tensor, float | Tensor, int]]


class Split(Protocol):
    """One part of a data set: `batch` gives the tensors of the samples with these numbers."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class Evaluation:
    """What the model does on the test data. `epoch`: whole epochs trained by then. accuracy: None where nothing is
    predicted, and so the number correct is NaN."""

    step: int
    epoch: int
    loss: float | None
    accuracy: float | None
    count: int


@dataclass(frozen=True)
class Evaluator:
    """
    evaluate:   (model, *batch) → (sum of losses, number correct or NaN, number of predictions).
    batch:      samples at once, at most.
    room_bytes: what evaluation may take; None where training has no budget.
    stopped:    whether a stop was asked for.
    report:     is told of the samples done, and the accuracy of these.
    """

    model: nn.Module
    test: Split
    evaluate: Evaluate
    batch: int
    room_bytes: int | None
    stopped: Callable[[], bool]
    report: Callable[[int, float], None]

    def run(self, step: int, epoch: int) -> Evaluation | None:
        """Loss and accuracy over the test data; None when a stop was asked for meanwhile."""

        def work() -> Evaluation | None:
            with evaluating(self.model), torch.no_grad():
                return self._run(step, epoch)

        return surely(work, Surroundings(self.model).put_back)

    def _run(self, step: int, epoch: int) -> Evaluation | None:
        loss_sum, correct, count = 0.0, 0.0, 0
        at_once = self._at_once()
        for start in range(0, len(self.test), at_once):
            if self.stopped():
                return None
            numbers = torch.arange(start, min(start + at_once, len(self.test)))
            # The arena lies idle between steps; so evaluation takes no memory of its own.
            with from_arena(self.room_bytes or 0):
                results = self.evaluate(self.model, *self.test.batch(numbers))
                loss_sum, correct = loss_sum + float(results[0]), correct + float(results[1])
                count += int(results[2])
                del results
            self.report(start + len(numbers), correct / max(count, 1))
        loss, accuracy = loss_sum / max(count, 1), correct / max(count, 1)
        return Evaluation(
            step, epoch, loss if math.isfinite(loss) else None, None if math.isnan(accuracy) else accuracy, count
        )

    def _at_once(self) -> int:
        """A batch; where training has a budget, no more samples than fit into what a step takes."""
        if self.room_bytes is None:
            return self.batch
        with from_arena(self.room_bytes) as taken:
            self.evaluate(self.model, *self.test.batch(torch.arange(1)))
        fit = self.room_bytes // taken.most_bytes if taken.most_bytes else self.batch
        return max(1, min(self.batch, fit))
