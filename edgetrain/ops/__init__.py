"""What is known of each kind of op, and how ops are executed.

`register(Entry(…), kind)` tells edgetrain of an op of your own: docs/adding.md.
"""

from edgetrain.ops import (
    activation,
    attention,
    convolution,
    elementwise,
    indexing,
    loss,
    matmul,
    normalisation,
    other,
    pool,
    random,
    reduce,
    shape,
    update,
)
from edgetrain.ops.c import CKernel, CSource, Scene, called, elementwise_call, number
from edgetrain.ops.entry import (
    GRAD_INPUT,
    IN_PLACE,
    OUT,
    TORCH,
    AlongBatch,
    Entry,
    Kernel,
    Limits,
    Overwrite,
    State,
    entry_of,
    register,
    unregister,
)
from edgetrain.ops.work import Work, done, each, moves

FAMILIES = (
    activation, attention, convolution, elementwise, indexing, loss, matmul, normalisation, other, pool, random, reduce,
    shape, update,
)  # fmt: skip

__all__ = [
    "FAMILIES",
    "GRAD_INPUT",
    "IN_PLACE",
    "OUT",
    "TORCH",
    "AlongBatch",
    "CKernel",
    "CSource",
    "Entry",
    "Kernel",
    "Limits",
    "Overwrite",
    "Scene",
    "State",
    "Work",
    "called",
    "done",
    "each",
    "elementwise_call",
    "entry_of",
    "moves",
    "number",
    "register",
    "unregister",
]
