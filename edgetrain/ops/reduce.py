"""Sums, means and products of many numbers."""

from __future__ import annotations

from dataclasses import replace

from edgetrain.graph.ir import Graph, Op
from edgetrain.ops.c import CKernel, CSource, Scene, called, function
from edgetrain.ops.entry import AlongBatch, Entry, of_torch, own
from edgetrain.ops.work import each


def _backward(graph: Graph, op: Op) -> bool:
    """Plain PyTorch divides by each element where none of them is zero."""
    return op.phase == "backward"


_SUM = Entry(category="pooling and reduction", raises="never", along=AlongBatch(linear="all", sums="sum"))
of_torch(_SUM, "sum")
of_torch(replace(_SUM, along=AlongBatch(linear="all", sums="mean")), "mean")
of_torch(Entry(category="pooling and reduction"), "amax amin")
of_torch(Entry(category="pooling and reduction", along=AlongBatch(every=True)), "all _is_all_true")
of_torch(Entry(category="pooling and reduction", by_value=_backward), "prod cumprod")


def _bias(s: Scene, op: Op) -> list[str]:
    return called(function(op), [s.name(op.creates[0]), s.name(op.reads[0]), *s.rows(op.reads[0])])


# A sum over many numbers carries along what rounding loses.
own(
    Entry(
        kernels=(), category="pooling and reduction", raises="never", work=each(4),
        c=CKernel(CSource("bias", (), ("channels",)), _bias),
    ),
    "bias.backward",
)  # fmt: skip
