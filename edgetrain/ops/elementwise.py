"""Arithmetic, comparisons and choices, element by element."""

from __future__ import annotations

from dataclasses import replace

from edgetrain.graph.ir import Graph, Op
from edgetrain.ops.c import CKernel, CSource, Scene, called, elementwise_call, function
from edgetrain.ops.entry import IN_PLACE, OUT, AlongBatch, Entry, Overwrite, of_torch, own
from edgetrain.ops.work import each


def _without_ignored_weights(graph: Graph, op: Op) -> bool:
    """Weights of labels, gathered, with those of ignored labels set to zero: for cross entropy, weighted and with label
    smoothing, plain PyTorch takes the ignored labels out before it adds the weights up."""
    maker = graph.made_by.get(op.reads[0])
    return op.phase == "forward" and maker is not None and graph.ops[maker].kind == "aten.gather.default"


# ---- PyTorch

_ENTRY = Entry(category="elementwise")
_TOTAL = replace(_ENTRY, raises="never")
_UNARY = replace(_ENTRY, overwrites=IN_PLACE)
_UNARY_TOTAL = replace(_UNARY, raises="never")
_LINEAR = AlongBatch(linear="all")

of_torch(replace(_UNARY, work=each(10)), "log")
of_torch(replace(_UNARY_TOTAL, work=each(10)), "exp")
of_torch(_UNARY, "square clamp_min clamp_max sin cos erf")
of_torch(_UNARY_TOTAL, "sqrt rsqrt abs clamp reciprocal pow")
of_torch(replace(_UNARY_TOTAL, along=_LINEAR), "neg")
of_torch(replace(_UNARY_TOTAL, along=_LINEAR), "add sub")
of_torch(replace(_ENTRY, along=_LINEAR), "rsub")
_EITHER = Overwrite(IN_PLACE.form, exchanges=True)
of_torch(replace(_UNARY_TOTAL, along=_LINEAR, overwrites=_EITHER), "add.Tensor")
of_torch(replace(_UNARY_TOTAL, along=AlongBatch(linear="product")), "mul")
of_torch(replace(_UNARY_TOTAL, along=AlongBatch(linear="product"), overwrites=_EITHER), "mul.Tensor")
of_torch(replace(_UNARY_TOTAL, along=AlongBatch(linear="quotient")), "div")
of_torch(_UNARY_TOTAL, "div.Tensor_mode div.Scalar_mode masked_fill")
of_torch(replace(_UNARY_TOTAL, by_value=_without_ignored_weights), "masked_fill.Scalar")
of_torch(_TOTAL, "where sign gt lt ge le eq ne logical_and logical_not")
of_torch(replace(_ENTRY, one_type=True), "complex heaviside")

# ---- firmware


def _count(s: Scene, op: Op) -> list[str]:
    counter = s.name(op.reads[0])
    return called(function(op), [counter, str(op.args[1])])


_FIRMWARE = Entry(kernels=(), category="elementwise", raises="never")
own(
    replace(_FIRMWARE, overwrites=OUT, c=CKernel(CSource("add", (), ("numbers",)), elementwise_call)),
    "add.forward",
)
own(replace(_FIRMWARE, c=CKernel(CSource("counter"), _count)), "counter.add")
