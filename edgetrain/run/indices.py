"""What a kernel has refused, in words: labels and other indices in a batch that lie outside of what they count, and
tensors of types that it does not take.

In:  a graph and the inputs of a step that failed. Out: the error to tell instead, or None where no index is to blame.

Looked at only when a step fails, so it costs a good one nothing. The step was taken back by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from edgetrain.errors import UserError
from edgetrain.graph.ir import Graph, Op, Ref

_SAME = ("aten._to_copy.", "aten.clone.", "aten.contiguous.", "aten.detach.", "aten.view.", "aten.reshape.")


@dataclass(frozen=True, slots=True)
class _Index:
    """position: of the argument that is the index. counted: of that which it counts along; dim: of its dimensions."""

    position: int
    counted: int
    dim: int
    what: str


_INDICES = {
    "aten.nll_loss_forward.default": _Index(1, 0, -1, "label"),
    "aten.nll_loss2d_forward.default": _Index(1, 0, 1, "label"),
    "aten.embedding.default": _Index(1, 0, 0, "token"),
}


class OutOfRange(UserError, IndexError):
    """The error of plain PyTorch, in words."""


class Refused(UserError, RuntimeError):
    """A kernel takes no such tensors. The error of plain PyTorch, in words."""


def refused(op: Op | None, error: BaseException, next_step: str | None) -> Refused:
    """Of the first run of a step; fake kernels have taken what this one did not."""
    first = str(error).strip().partition("\n")[0]
    where = "" if op is None else f" in module {op.module}" if op.module else " in the loss"
    return Refused(
        f"{'an op' if op is None else op.kind}{where} refuses the tensors that it gets; nothing was changed",
        received=f"{type(error).__name__}: {first}",
        next_step=next_step or "run loss(model, *batch) by itself to see the whole traceback",
    )


def out_of_range(graph: Graph, inputs: Mapping[int, torch.Tensor]) -> UserError | None:
    """inputs: by tensor of the graph."""
    for op in graph.ops:
        index = _INDICES.get(op.kind)
        value = None if index is None else _input_of(graph, op, index, inputs)
        if index is None or value is None:
            continue
        position, numbers = value
        counted = op.args[index.counted]
        assert isinstance(counted, Ref)
        count = graph.tensors[counted.tensor].shape[index.dim]
        ignored = op.args[4] if index.what == "label" and len(op.args) > 4 else None
        wrong = numbers[(numbers < 0) | (numbers >= count)]
        wrong = wrong[wrong != ignored] if isinstance(ignored, int) else wrong
        if wrong.numel():
            where = f"module {op.module}" if op.module else "the loss"
            return OutOfRange(
                f"item {position} of the batch holds a {index.what} that {where} does not know; nothing was changed",
                expected=f"numbers from 0 to {count - 1}", received=f"{int(wrong[0])}, {wrong.numel()} such in all",
                next_step=f"correct this batch, or build the model for more {index.what}s",
            )  # fmt: skip
    return None


def _input_of(
    graph: Graph, op: Op, index: _Index, inputs: Mapping[int, torch.Tensor]
) -> tuple[int, torch.Tensor] | None:
    """The item of the batch that an argument is, or is a view or a copy of."""
    ref = op.args[index.position]
    by_storage = {graph.tensors[t].storage: t for t in inputs}
    made_by = {graph.tensors[t].storage: other for other in graph.ops if not other.view for t in other.creates}
    tensor = ref.tensor if isinstance(ref, Ref) else None
    while tensor is not None:
        storage = graph.tensors[tensor].storage
        if storage in by_storage:
            item = by_storage[storage]
            return int(graph.sources[item].path), inputs[item]
        maker = made_by.get(storage)
        tensor = maker.reads[0] if maker is not None and maker.kind.startswith(_SAME) and maker.reads else None
    return None
