"""Attention."""

from __future__ import annotations

import math

from edgetrain.graph.ir import Graph, Op
from edgetrain.ops.entry import Entry, of_torch
from edgetrain.ops.work import Rule, Work, done, tensor


def _products(first: int, queries: int, values: int) -> Rule:
    """Products of a query with every key: so many as wide as a query, and so many as wide as a value. first: the place
    of the queries among the arguments."""

    def rule(graph: Graph, op: Op) -> Work:
        query, key, value = (tensor(graph, op, first + n) for n in range(3))
        widths = queries * query.shape[-1] + values * value.shape[-1]
        return done("dense", 2 * math.prod(query.shape[:-1]) * key.shape[-2] * widths, graph, op)

    return rule


_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
# Scores, and their product with the values.
of_torch(Entry(category="matrix product", work=_products(0, 1, 1)), _FLASH)
# Scores again, then the gradients of scores, values, queries and keys.
of_torch(Entry(category="matrix product", work=_products(1, 3, 2)), f"{_FLASH}_backward")
