"""Embeddings, and whatever reads or writes at places that a tensor says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch

from edgetrain.graph.ir import Graph, Op, Ref, Value
from edgetrain.ops.entry import IN_PLACE, AlongBatch, Entry, Limits, of_torch
from edgetrain.ops.work import moves

Rule = Callable[[Graph, Op], Iterator[Limits]]


def _among(value: Value, count: int, what: Literal["token", "index"], *, negative: bool) -> Iterator[Limits]:
    """negative: -1, -2, … count from the end."""
    if isinstance(value, Ref):
        yield Limits(value.tensor, -count if negative else 0, count - 1, what)


def _shape(graph: Graph, op: Op) -> tuple[int, ...]:
    first = op.args[0]
    return graph.tensors[first.tensor].shape if isinstance(first, Ref) else ()


def _tokens(graph: Graph, op: Op) -> Iterator[Limits]:
    yield from _among(op.args[1], _shape(graph, op)[0], "token", negative=False)


def _in_all(graph: Graph, op: Op) -> Iterator[Limits]:
    """Among all elements of the first argument."""
    yield from _among(op.args[1], graph.tensors[op.reads[0]].n_elements, "index", negative=True)


def _in_each(graph: Graph, op: Op) -> Iterator[Limits]:
    """A tensor of places for each dimension."""
    places = op.args[1]
    for value, count in zip(places if isinstance(places, tuple) else (), _shape(graph, op), strict=False):
        yield from _among(value, count, "index", negative=True)


def _along(*, negative: bool) -> Rule:
    """Along the dimension that the second argument names."""

    def limits(graph: Graph, op: Op) -> Iterator[Limits]:
        dim, shape = op.args[1], _shape(graph, op)
        if isinstance(dim, int):
            yield from _among(op.args[2], shape[dim] if shape else 1, "index", negative=negative)

    return limits


def _bags(kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an embedding bag on a CPU keeps for its backward: the bag of each index, with room for one more, or nothing
    where a sum is computed at once; and the sizes of the bags, with room for the last offset."""
    result = kernel(*args, **kwargs)
    if args[0].device.type != "cpu":
        return result
    names = (a.name for a in torch.ops.aten._embedding_bag.default._schema.arguments)
    given = dict(zip(names, args, strict=False))
    weight, indices, offsets, scales = *args[:3], given.get("per_sample_weights")
    at_once = given.get("mode", 0) == 0 and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
    at_once = at_once and given.get("padding_idx", -1) < 0 and weight.stride(1) == 1
    at_once = at_once and (scales is None or scales.stride(0) == 1)
    bag_of = result[1].new_empty(0 if at_once else indices.numel() + 1)
    sizes = result[2].new_empty(offsets.numel())
    return result[0], bag_of[: indices.numel()], sizes[: result[2].numel()], result[3]


_ENTRY = Entry(category="copy and layout", raises="for values")
_MOVES = replace(_ENTRY, work=moves)
_BAG = replace(_ENTRY, along=AlongBatch(places=2), limits=_tokens)

of_torch(replace(_MOVES, limits=_tokens), "embedding")
of_torch(replace(_BAG, predicts=_bags), "_embedding_bag")
of_torch(_BAG, "_embedding_bag_forward_only")
of_torch(Entry(category="copy and layout", raises="never"), "embedding_dense_backward")
of_torch(Entry(category="copy and layout", limits=_tokens), "embedding_bag embedding_renorm")
of_torch(replace(_MOVES, limits=_along(negative=False)), "gather index_select")
of_torch(replace(_MOVES, limits=_along(negative=False), overwrites=IN_PLACE), "scatter")
of_torch(replace(_ENTRY, limits=_along(negative=False)), "index_add index_copy index_reduce scatter_add scatter_reduce")
of_torch(replace(_ENTRY, limits=_along(negative=True)), "index_fill")
of_torch(replace(_MOVES, limits=_in_each), "index index_put")
of_torch(replace(_ENTRY, limits=_in_all), "take put")
of_torch(_ENTRY, "masked_scatter repeat_interleave segment_reduce searchsorted")
