"""Losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from edgetrain.graph.ir import Graph, Op, Ref
from edgetrain.ops.c import CKernel, CSource, Scene, called, function
from edgetrain.ops.entry import OUT, AlongBatch, Entry, Limits, of_torch, own
from edgetrain.ops.predicted import contiguous
from edgetrain.ops.work import each

# ---- values that they take


def _labels(classes: int, low: int = 0) -> Callable[[Graph, Op], Iterator[Limits]]:
    """classes: the dimension of the first argument that holds them."""

    def limits(graph: Graph, op: Op) -> Iterator[Limits]:
        scores, labels = op.args[:2]
        if isinstance(scores, Ref) and isinstance(labels, Ref):
            yield Limits(labels.tensor, low, graph.tensors[scores.tensor].shape[classes] - 1, "label", ignored=4)

    return limits


def _probabilities(graph: Graph, op: Op) -> Iterator[Limits]:
    given, target = op.args[:2]
    if isinstance(given, Ref):
        yield Limits(given.tensor, 0, 1, "probability")
    if isinstance(target, Ref):
        yield Limits(target.tensor, 0, 1, "target")


def _ctc_loss(kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss of each sample, and the table that its backward reads; as the lengths are numbers, its shape is known.

    The backward checks nothing, so what the forward would refuse is refused here.
    """
    log_probs, targets = args[:2]
    lengths: tuple[Sequence[int], Sequence[int]] = (args[2], args[3])
    steps, samples = log_probs.shape[:2]
    longest = max(lengths[1], default=0)
    room = len(targets) >= sum(lengths[1]) if targets.dim() == 1 else targets.shape[1] >= longest
    if {len(lengths[0]), len(lengths[1])} != {samples} or not room or max(lengths[0], default=0) > steps:
        raise ValueError(f"ctc_loss: the lengths do not fit {samples} samples of {steps} steps and their targets")
    shapes = (samples,), (samples, steps, 2 * longest + 1)
    result: list[torch.Tensor] = [log_probs.new_empty(shape) for shape in shapes]
    return tuple(result)


# ---- PyTorch

_LOSS = Entry(category="loss")
_BACKWARD = replace(_LOSS, raises="never")
_NLL = replace(_LOSS, raises="for values", along=AlongBatch(reduction=3, labels=(1, 2, 4)))
of_torch(replace(_NLL, limits=_labels(-1)), "nll_loss_forward")
of_torch(replace(_NLL, limits=_labels(1)), "nll_loss2d_forward")
of_torch(_BACKWARD, "nll_loss_backward nll_loss2d_backward")
of_torch(replace(_LOSS, raises="for values", limits=_labels(-1)), "multi_margin_loss")
of_torch(replace(_LOSS, raises="for values", limits=_labels(-1, low=-1)), "multilabel_margin_loss_forward")
_REDUCED = replace(_LOSS, along=AlongBatch(reduction=2))
of_torch(replace(_REDUCED, oversized=True), "mse_loss smooth_l1_loss soft_margin_loss")
of_torch(_REDUCED, "huber_loss")
of_torch(replace(_BACKWARD, predicts=contiguous), "mse_loss_backward")
of_torch(replace(_LOSS, predicts=contiguous), "huber_loss_backward smooth_l1_loss_backward")
of_torch(
    replace(
        _LOSS, along=AlongBatch(reduction=3), raises="for values", limits=_probabilities, oversized=True, one_type=True
    ),
    "binary_cross_entropy",
)
of_torch(replace(_LOSS, along=AlongBatch(reduction=4)), "binary_cross_entropy_with_logits")
of_torch(replace(_LOSS, predicts=_ctc_loss), "_ctc_loss.default")
of_torch(replace(_BACKWARD, work=each(12)), "_log_softmax _log_softmax_backward_data")

# ---- firmware


def _cross_entropy(s: Scene, op: Op) -> list[str]:
    B, C = s.shape(op.reads[0])
    return called(function(op), [*map(s.name, (*op.creates, *op.reads)), s.batched(B), C, int(bool(op.args[2]))])


def _classes(graph: Graph, op: Op) -> tuple[int, int, int]:
    samples, classes = graph.tensors[op.reads[0]].shape
    return op.reads[1], samples, classes


def _mse(s: Scene, op: Op) -> list[str]:
    names = map(s.name, (*op.creates, *op.reads))
    return called(function(op), [*names, s.elements(op.reads[0]), int(bool(op.args[2]))])


_FIRMWARE = Entry(kernels=(), category="loss", raises="never")
_SOURCE = CSource("softmax_cross_entropy", ("functions",))
own(
    replace(_FIRMWARE, work=each(30), c=CKernel(_SOURCE, _cross_entropy, labels=_classes)),
    "softmax_cross_entropy.forward",
)
own(
    replace(_FIRMWARE, work=each(20), overwrites=OUT, c=CKernel(_SOURCE, _cross_entropy)),
    "softmax_cross_entropy.backward",
)
own(replace(_FIRMWARE, work=each(6), c=CKernel(CSource("mse"), _mse)), "mse.forward")
own(replace(_FIRMWARE, work=each(2), c=CKernel(CSource("mse"), _mse)), "mse.backward")
