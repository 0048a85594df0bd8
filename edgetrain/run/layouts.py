"""Do kernels lay their results out as capture predicted?

In:  an op of a step that runs, and the tensors that it has made. Out: `LayoutMismatch` where one of them has another
     layout, which is noted for the next capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from edgetrain.dtypes import dtype_name
from edgetrain.errors import UserError
from edgetrain.graph.capture import predicted_layouts
from edgetrain.graph.capture.batches import place_of
from edgetrain.graph.ir import PERSISTENT, Graph, Op, Ref, Tensor, Value


class LayoutMismatch(UserError):
    """A kernel gave a tensor of another layout than capture predicted. The step was taken back.

    learnt: the next capture will be another; there is reason to try again.
    """

    def __init__(self, graph: Graph, op: Op, predicted: str, measured: str, *, learnt: bool) -> None:
        where = place_of(op.module, str(graph.about.get("model", "the model")))
        super().__init__(
            f"{where} calls {op.kind} ({op.name}), and how its result lies in memory cannot be predicted",
            expected=predicted,
            received=measured,
            next_step="capture the model again" if learnt else "write this part of the model with another op",
        )
        self.learnt = learnt


def check_layouts(graph: Graph, op: int, live: object = None, results: Sequence[torch.Tensor] = ()) -> None:
    """Called by a program that looks at what each op has made."""
    for t, real in zip(graph.ops[op].creates, results, strict=False):
        tensor = graph.tensors[t].carrier
        n_bytes = graph.storages[tensor.storage].n_bytes
        measured = (tuple(real.shape), dtype_name(real.dtype), real.untyped_storage().nbytes())
        if graph.storages[tensor.storage].role in PERSISTENT:
            n_bytes = measured[2]  # a view of something that may itself be a part of something larger
        if measured != (tensor.shape, tensor.dtype, n_bytes) or _steps(real) != _steps(tensor):
            raise LayoutMismatch(
                graph,
                graph.ops[op],
                f"{tensor}, stride {tensor.stride}, {n_bytes} bytes",
                f"{measured[1]}{list(measured[0])}, stride {real.stride()}, {measured[2]} bytes",
                learnt=_learn(graph, graph.ops[op], results),
            )


def _learn(graph: Graph, op: Op, results: Sequence[torch.Tensor]) -> bool:
    if op.view or any(real.storage_offset() for real in results):
        return False
    positions = [position for position, t in enumerate(op.outputs) if t is not None]
    args, kwargs = (_with_tensors(graph, value) for value in (op.args, tuple(op.kwargs)))
    measured = {position: predicted_layouts.layout_of(real) for position, real in zip(positions, results, strict=True)}
    return predicted_layouts.learn(predicted_layouts.key_of(op.kind, args, dict(kwargs)), measured)


def _with_tensors(graph: Graph, value: Value) -> Any:
    """Arguments of an op with the tensors that they refer to."""
    if isinstance(value, Ref):
        return graph.tensors[value.tensor]
    return tuple(_with_tensors(graph, item) for item in value) if isinstance(value, tuple) else value


def _steps(tensor: torch.Tensor | Tensor) -> tuple[int, ...]:
    """The strides that matter: one along a dimension of a single element is never taken, of no element none."""
    if 0 in tensor.shape:
        return ()
    stride = tensor.stride if isinstance(tensor, Tensor) else tensor.stride()
    return tuple(step for step, n in zip(stride, tensor.shape, strict=True) if n > 1)
