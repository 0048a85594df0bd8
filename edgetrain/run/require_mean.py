"""Is the loss a mean over samples? Asked once for each model and loss, before a batch is taken in micro-batches.

In:  a batch. Out: what makes the numbers of micro-batches others than those of the whole batch, if that is allowed; a
     `UserError` where it is not, or where the loss is no mean: by its structure (`structure`, nothing is run), or by a
     test with numbers (`require`, the model is run many times).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from edgetrain import child
from edgetrain.errors import EdgetrainError, InternalError, UserError
from edgetrain.graph import mean_loss
from edgetrain.graph.capture.batches import sames
from edgetrain.graph.capture.training import Captured
from edgetrain.graph.ir import Graph
from edgetrain.graph.mean_loss import sample_items
from edgetrain.native.signals import raised_by_handler
from edgetrain.run.capturing import Batch, Capturing
from edgetrain.run.mean_test import why_no_mean

Reasons = tuple[str, ...]


@dataclass
class MeanLoss:
    """
    apart:   the process is short of memory: test the loss in a process of its own.
    reasons: what was seen, and the capture that it was seen with.
    """

    capturing: Capturing
    allow_inexact: bool
    apart: bool = False
    reasons: dict[Any, tuple[Reasons, Captured]] = field(default_factory=dict)

    def forget_oldest(self, max_reasons: int) -> None:
        while len(self.reasons) > max_reasons:
            self.reasons.pop(next(iter(self.reasons)))

    def require(self, batch: Batch) -> Reasons:
        """What makes the numbers others than those of the whole batch."""
        _, cut = sample_items(batch)
        rows = tuple(
            (i.shape[1:], i.dtype) if p in cut else i.shape if isinstance(i, torch.Tensor) else i
            for p, i in enumerate(batch)
        )
        key = (rows, sames(batch), tuple(module.training for module in self.capturing.model.modules()))
        if key not in self.reasons or not self.reasons[key][1].watch.holds():
            two, reasons = self.structure(batch)
            self.reasons[key] = self._require_mean(two.graph, reasons, batch, cut), two
        return self.reasons[key][0]

    def structure(self, batch: Batch) -> tuple[Captured, Reasons]:
        """What is known without running anything: the step of two samples, and what makes other numbers in it."""
        two, three = (self.capturing.picked(batch, n).captured for n in (2, 3))
        mean_loss.require_mean(two.graph, three.graph)
        reasons = mean_loss.inexact(two.graph)
        self._require_allowed(reasons)
        return two, reasons

    def _require_mean(self, two: Graph, reasons: Reasons, batch: Batch, cut: Sequence[int]) -> Reasons:
        norms = mean_loss.batch_norms(two)
        why: str | None = None
        if not reasons:
            try:
                why = self._tested(two, batch, cut, evaluate=False)
            except UserError as error:  # batch norm refuses a single sample
                if not norms:
                    raise
                why = str(error)
        if why is not None and norms:
            reasons = tuple(f"batch norm in training mode in {name}" for name in norms)
        self._require_allowed(reasons)
        if reasons:
            why = self._tested(two, batch, cut, evaluate=True)
        if why is not None:
            raise UserError(
                "the loss is not a mean over samples, so micro-batches would train otherwise than the whole batch",
                expected="loss and gradients of a batch that are the mean of those of its parts, weighted by samples",
                received=why,
                next_step="train without micro_batches, or write the loss as a mean over samples",
            )
        return reasons

    def _require_allowed(self, reasons: Reasons) -> None:
        if reasons and not self.allow_inexact:
            raise UserError(
                "micro-batches would give other numbers than the whole batch: the step has " + "; ".join(reasons[:3])
                + ("; …" if len(reasons) > 3 else ""),
                expected="a step in which each sample is computed alone",
                next_step="train without micro_batches, put those modules in eval mode, or accept other numbers with "
                "allow_inexact=True",
            )  # fmt: skip

    def _tested(self, two: Graph, batch: Batch, cut: Sequence[int], *, evaluate: bool) -> str | None:
        """two: the step of two samples."""
        forward = [op for op in two.ops if op.phase == "forward"]
        created = {two.tensors[t].storage for op in forward for t in op.creates}
        written = {s for op in forward for s in op.writes}
        buffers = [(t, source.path) for t, source in two.sources.items() if source.sort == "buffer"]
        changed = {path for t, path in buffers if two.tensors[t].storage in written}
        sample_bytes = sum(two.storages[s].n_bytes for s in created) // 2

        def test() -> str | None:
            return why_no_mean(
                self.capturing.model, self.capturing.loss, batch, cut, evaluate=evaluate, sample_bytes=sample_bytes,
                changed=changed,
            )  # fmt: skip

        def alone() -> str | None:
            torch.set_num_threads(1)  # the threads of this process are not there in its copy
            return test()

        try:
            if self.apart:
                try:
                    why: str | None = child.forked(alone)
                    return why
                except InternalError:
                    pass  # what goes wrong goes wrong again here
            return test()
        except EdgetrainError:
            raise
        except Exception as error:
            if raised_by_handler(error):
                raise
            first = str(error).strip().splitlines()
            raise UserError(
                "the loss cannot be run on single samples of the batch, so it cannot be told whether it is a mean over "
                "them",
                received=f"{type(error).__name__}: {first[0] if first else ''}",
                next_step="train without micro_batches, or let model and loss take batches of any size",
            ) from error
