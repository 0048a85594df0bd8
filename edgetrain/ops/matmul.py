"""Matrix products: PyTorch's, and the dense layers of firmware."""

from __future__ import annotations

from edgetrain.graph.ir import Graph, Op
from edgetrain.ops import c_features
from edgetrain.ops.c import CKernel, CSource, Scene, called, function
from edgetrain.ops.entry import Entry, of_torch, own
from edgetrain.ops.work import Rule, Work, done, product, tensor

# ---- PyTorch

for _names, _a, _b in (("mm bmm", 0, 1), ("addmm baddbmm", 1, 2)):
    of_torch(Entry(category="matrix product", one_type=True, raises="never", work=product(_a, _b)), _names)
for _names, _a, _b in (("mv dot", 0, 1), ("addmv", 1, 2)):
    of_torch(Entry(category="matrix product", one_type=True, work=product(_a, _b)), _names)
of_torch(Entry(category="matrix product", one_type=True), "addbmm vdot")

# ---- firmware

GEMM = ("gemm", "microkernel", "gemm_nt", "gemm_tn", "gemm_nn")
FAST_GEMM = ("convolve", "convolve_backward_weight", "convolve_backward_weight_narrow", "microkernel")
DENSE = CSource("dense", GEMM, FAST_GEMM)


def _multiplied(rows_of: int) -> Rule:
    """Each number of the first tensor, with as many of the second as it has there."""

    def rule(graph: Graph, op: Op) -> Work:
        flops = 2 * tensor(graph, op, 0).n_elements * tensor(graph, op, 1).shape[rows_of]
        return done("dense", flops, graph, op)

    return rule


def _forward(s: Scene, op: Op) -> list[str]:
    B, In = s.shape(op.reads[0])
    names = [s.name(op.creates[0]), *s.pointers(*op.args)]
    return called(function(op), [*names, s.batched(B), In, s.shape(op.reads[1])[0]])


def _backward_weight(s: Scene, op: Op) -> list[str]:
    dy, x = op.reads
    B, In = s.shape(x)
    return called(function(op), [s.name(op.creates[0]), s.name(dy), s.name(x), s.batched(B), In, s.shape(dy)[1]])


def _backward_input(s: Scene, op: Op) -> list[str]:
    dy, weight = op.reads
    Out, In = s.shape(weight)
    names = [s.name(op.creates[0]), s.name(dy), s.name(weight)]
    return called(function(op), [*names, s.batched(s.shape(dy)[0]), In, Out])


for _what, _rows_of, _call in (
    ("forward", 0, _forward), ("backward_weight", 1, _backward_weight), ("backward_input", 1, _backward_input),
):  # fmt: skip
    own(
        Entry(
            kernels=(), category="matrix product", raises="never", work=_multiplied(_rows_of),
            c=CKernel(DENSE, _call, c_features.dense),
        ),
        f"dense.{_what}",
    )  # fmt: skip
