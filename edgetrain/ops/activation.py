"""Activations and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from edgetrain.graph.ir import Op, Value
from edgetrain.ops.c import CKernel, CSource, elementwise_call
from edgetrain.ops.entry import GRAD_INPUT, IN_PLACE, OUT, Entry, of_torch, own
from edgetrain.ops.predicted import contiguous
from edgetrain.ops.work import each


def _as_product(kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Element by element, and laid out as the first argument (as any product is); the fake follows the second."""
    return torch.ops.aten.mul.Tensor(*(a for a in args if isinstance(a, torch.Tensor)))


# ---- PyTorch

_ACTIVATION = Entry(category="activation")
_FORWARD = replace(_ACTIVATION, overwrites=IN_PLACE)
_TOTAL = replace(_ACTIVATION, raises="never")
_BACKWARD = replace(_TOTAL, overwrites=GRAD_INPUT)

of_torch(replace(_FORWARD, raises="never"), "relu hardtanh")
of_torch(_FORWARD, "elu leaky_relu hardswish hardsigmoid")
of_torch(replace(_FORWARD, raises="never", work=each(12)), "sigmoid tanh")
of_torch(replace(_FORWARD, work=each(14)), "silu")
of_torch(replace(_FORWARD, work=each(20)), "gelu")
of_torch(_BACKWARD, "threshold_backward leaky_relu_backward")
of_torch(replace(_BACKWARD, predicts=_as_product), "hardtanh_backward")
of_torch(
    replace(_TOTAL, predicts=_as_product),
    "hardswish_backward hardsigmoid_backward softplus_backward elu_backward",
)
of_torch(replace(_BACKWARD, work=each(3)), "sigmoid_backward tanh_backward")
of_torch(replace(_BACKWARD, work=each(18)), "silu_backward")
of_torch(replace(_BACKWARD, work=each(30)), "gelu_backward")
of_torch(replace(_ACTIVATION, predicts=contiguous), "log_sigmoid_forward glu_backward")
of_torch(replace(_ACTIVATION, one_type=True), "_prelu_kernel rrelu_with_noise")
of_torch(replace(_ACTIVATION, work=each(12)), "_safe_softmax")
of_torch(replace(_TOTAL, work=each(12)), "_softmax")
of_torch(replace(_TOTAL, work=each(4)), "_softmax_backward_data")

# ---- firmware


def _above_zero(op: Op) -> tuple[Value, Value]:
    return 0.0, math.inf


def _clamped(op: Op) -> tuple[Value, Value]:
    return op.args[-2], op.args[-1]


for _family, _fast_needs, _bends, _flops in (
    ("relu", ("numbers",), _above_zero, (1, 1)),
    ("clamp", ("numbers",), _clamped, (1, 1)),
    ("sigmoid", (), None, (20, 3)),
    ("tanh", (), None, (20, 3)),
):
    _source = CSource(_family, () if _bends else ("functions",), _fast_needs)
    _firmware = Entry(kernels=(), category="activation", overwrites=OUT, raises="never")
    for _what, _n, _c in (
        ("forward", _flops[0], CKernel(_source, elementwise_call, bends=_bends)),
        ("backward", _flops[1], CKernel(_source, elementwise_call)),
    ):
        own(replace(_firmware, work=each(_n), c=_c), f"{_family}.{_what}")
