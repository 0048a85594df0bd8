"""Where plain PyTorch chooses a formula by the values of a tensor, and a captured step has the one that fits all.

In:  a graph. Out: whether it holds such a formula (`Entry.by_value`); its numbers are then plain PyTorch's but for
     rounding.
"""

from __future__ import annotations

from edgetrain.graph.ir import Graph
from edgetrain.ops.entry import entry_of


def rounds_otherwise(graph: Graph) -> bool:
    rules = ((op, entry_of(op.kind).by_value) for op in graph.ops)
    return any(rule is not None and rule(graph, op) for op, rule in rules)
