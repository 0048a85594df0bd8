"""Random numbers and dropout. (What draws from torch's generator says so by its own tag.)"""

from __future__ import annotations

from dataclasses import replace

from edgetrain.graph.ir import Op
from edgetrain.ops.c import CKernel, CSource, Scene, called, function, number
from edgetrain.ops.entry import OUT, Entry, of_torch, own
from edgetrain.ops.work import each

of_torch(Entry(category="elementwise", work=each(10)), "bernoulli")
of_torch(Entry(category="activation", raises="never"), "native_dropout_backward")


def _mask(s: Scene, op: Op) -> list[str]:
    """A function of the number of the step: nothing is drawn from a stream, so it can be computed again."""
    keep, which = op.args
    mask = op.creates[0]
    return called(function(op), [s.name(mask), s.elements(mask), number(keep), "model_seed", "step_number", str(which)])


def _apply(s: Scene, op: Op) -> list[str]:
    (x, mask), y = op.reads, op.creates[0]
    return called(function(op), [s.name(y), s.name(x), s.name(mask), s.elements(y), number(op.args[2])])


_FIRMWARE = Entry(kernels=(), category="activation", raises="never")
own(replace(_FIRMWARE, work=each(10), c=CKernel(CSource("dropout"), _mask)), "dropout.mask")
own(replace(_FIRMWARE, overwrites=OUT, c=CKernel(CSource("dropout"), _apply)), "dropout.apply")
