"""The first stages of a step: a batch is captured, and its graph rewritten.

In:  a model, a loss, an optimizer, the options; a batch, whole or to be cut into micro-batches.
Out: `Part`: a graph that is ready to be planned, and what was captured; for micro-batches a graph for each size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from edgetrain.graph.by_value import rounds_otherwise
from edgetrain.graph.capture.batches import changed, sames
from edgetrain.graph.capture.training import Captured, MemoryFormat, capture_with_externals
from edgetrain.graph.ir import Graph
from edgetrain.graph.mean_loss import sample_items
from edgetrain.graph.rewrite.accumulate import accumulating, clipping, ending
from edgetrain.graph.rewrite.fuse import fuse_batch_norm, trains_unfused
from edgetrain.ops import norm
from edgetrain.plan.micro_batches import MicroGraphs, sizes_of
from edgetrain.plan.plan import Exact
from edgetrain.plan.unmeasured import is_heavy
from edgetrain.run.activity import doing
from edgetrain.run.exact import ONEDNN, exactness_of
from edgetrain.run.options import Options

SLOW_S = 0.4  # of CPU time: a model that takes longer to capture is not looked at in other ways at once

Batch = tuple[Any, ...]


@dataclass(frozen=True)
class Part:
    """A batch, or a slice of one, captured."""

    graph: Graph
    captured: Captured
    exact: Exact


@dataclass
class Capturing:
    """
    channels_last: images may run so, until a kernel shows that it does not keep that layout.
    ended_at:      when the last capture ended, by `time.monotonic`.
    slow:          looking at another graph of this model may take seconds.
    slices:        of the batch that is being prepared, each captured once.
    """

    model: nn.Module
    loss: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer
    options: Options
    channels_last: bool = True
    ended_at: float = 0.0
    slow: bool = False
    slices: dict[Any, Part] = field(default_factory=dict)

    def capture(self, batch: Batch, *, clips: bool = True) -> Part:
        """clips: the gradients of this batch alone, if that is asked for at all."""
        doing("capturing the step")
        begin, options = time.process_time(), self.options
        memory_format = self._memory_format(batch)
        captured = capture_with_externals(
            self.model, self.loss, self.optimizer, batch,
            unused=options.unused, memory_format=memory_format, clip_norm=options.clip_norm if clips else None,
            apart=options.apart or options.process_memory_bytes is not None,
        )  # fmt: skip
        graph = captured.graph
        self.ended_at = time.monotonic()
        self.slow = is_heavy(graph) or time.process_time() - begin > SLOW_S
        if memory_format == "channels_last" and options.memory_format == "auto" and norm.available():
            graph = fuse_batch_norm(graph)
            if trains_unfused(graph):
                self.channels_last = False
                return self.capture(batch, clips=clips)
        exact = exactness_of(self.model, self.loss, self.optimizer, memory_format)
        return Part(graph, captured, "rounding" if rounds_otherwise(graph) else exact)

    def slice(self, batch: Batch) -> Part:
        key = (tuple((t.shape, t.stride(), t.dtype) if isinstance(t, torch.Tensor) else t for t in batch), sames(batch))
        if key not in self.slices or not self.slices[key].captured.watch.holds():
            self.slices[key] = self.capture(batch, clips=False)
        return self.slices[key]

    def picked(self, batch: Batch, n: int) -> Part:
        """So many samples from the start of the batch, over again where there are fewer."""
        _, cut = sample_items(batch)
        rows = torch.arange(n) % len(batch[cut[0]])
        return self.slice(changed(batch, lambda p, item: item[rows.to(item.device)] if p in cut else item))

    def micro_graphs(self, batch: Batch, count: int) -> tuple[MicroGraphs, Part]:
        """The batch cut into so many micro-batches, each size of them captured once; and the last of them."""
        samples, cut = sample_items(batch)
        sizes = sizes_of(samples, count)
        shapes = {position: tuple(batch[position].shape) for position in cut}
        part_of = {size: self.slice(_first(batch, cut, size)) for size in dict.fromkeys(sizes)}
        last = part_of[sizes[-1]]
        if self.options.clip_norm is None:
            end = ending(last.graph, shapes)
        else:
            end, sizes = clipping(last.graph, shapes, self.options.clip_norm), (*sizes, 0)
        sums = {size: accumulating(part_of[size].graph, shapes) for size in dict.fromkeys(sizes[:-1])}
        return MicroGraphs(sizes, sums, end), last

    def _memory_format(self, batch: Batch) -> MemoryFormat:
        if self.options.memory_format != "auto":
            return self.options.memory_format
        # oneDNN runs convolutions of these types, and channels-last without reordering every activation.
        fast = any(
            isinstance(t, torch.Tensor)
            and t.dim() == 4
            and t.shape[1] > 1
            and t.dtype in ONEDNN
            and t.device.type == "cpu"
            for t in batch
        )
        modules = list(self.model.modules())
        convolves = any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in modules)
        # PyTorch's channels-last kernel of batch norm sums in float32, the other in float64: errors a hundred times as
        # large. Ours does not.
        normalises = any(isinstance(m, nn.BatchNorm2d) for m in modules) and not norm.available()
        return "channels_last" if fast and convolves and not normalises and self.channels_last else "preserve"


def _first(batch: Batch, cut: Sequence[int], n: int) -> Batch:
    """The first samples of the batch."""
    return changed(batch, lambda p, item: item[:n] if p in cut else item)
