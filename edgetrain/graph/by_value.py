"""Where plain PyTorch chooses a formula by the values of a tensor, and a captured step has the one that fits all.

In:  a graph. Out: whether it holds such a formula; its numbers are then plain PyTorch's but for rounding.

    backward of prod and cumprod      plain PyTorch divides by each element where none of them is zero
    cross entropy, weighted and       plain PyTorch takes the ignored labels out before it adds the weights up
    with label smoothing
"""

from __future__ import annotations

from edgetrain.graph.ir import Graph, Op


def rounds_otherwise(graph: Graph) -> bool:
    return any(_is_product(op) or _masks_weights(graph, op) for op in graph.ops)


def _is_product(op: Op) -> bool:
    return op.phase == "backward" and op.kind.split(".")[1] in ("prod", "cumprod")


def _masks_weights(graph: Graph, op: Op) -> bool:
    """Weights of labels, gathered, with those of ignored labels set to zero."""
    if op.phase != "forward" or op.kind != "aten.masked_fill.Scalar":
        return False
    maker = graph.made_by.get(op.reads[0])
    return maker is not None and graph.ops[maker].kind == "aten.gather.default"
