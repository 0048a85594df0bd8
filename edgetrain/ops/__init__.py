"""What is known of each kind of op, and how ops are executed.

`register(Entry(…), kind)` tells edgetrain of an op of your own: docs/adding.md.
"""

from edgetrain.ops import activation as activation
from edgetrain.ops import attention as attention
from edgetrain.ops import convolution as convolution
from edgetrain.ops import elementwise as elementwise
from edgetrain.ops import indexing as indexing
from edgetrain.ops import loss as loss
from edgetrain.ops import matmul as matmul
from edgetrain.ops import normalisation as normalisation
from edgetrain.ops import other as other
from edgetrain.ops import pool as pool
from edgetrain.ops import random as random
from edgetrain.ops import reduce as reduce
from edgetrain.ops import shape as shape
from edgetrain.ops import update as update
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

__all__ = [
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
