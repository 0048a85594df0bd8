"""The graph of one micro-batch, in two forms: one that only adds its gradients up, and one that ends the step.

In:  the captured step of a slice of a batch (forward, backward, one update for each trained parameter), and how many
     samples the slice and the whole batch have.
Out: two graphs. Each trained parameter has an accumulator, a lasting tensor of its shape.

    accumulating    forward, backward, accumulate(sum, gradient) …            sum ← weight · gradient, or added to it
    ending          forward, backward, accumulate(sum, gradient), sgd(parameter, sum, state) …

    step of k micro-batches:   accumulating, accumulating, …, ending          the parameters change in the last alone

Where gradients are clipped by their norm, no update can be made before the last gradient is there: all micro-batches
accumulate then, and a third graph follows, which has no samples:

    clipping        norm of all sums, sum · scale, sgd(parameter, scaled sum, state) …

The same tensors persist in both: the optimizer's state, which the first form does not read, and the whole batch, of
which the slice is a part. So every planner counts their bytes. The weight of a micro-batch, its part of the samples, is
given when it runs: the graphs do not depend on the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edgetrain.graph.ir import INTEGERS, Graph, Op, Ref, Source, Tensor
from edgetrain.graph.rewrite.builder import Builder
from edgetrain.graph.rewrite.clip import clip
from edgetrain.ops.update import ACCUMULATE

_SUM = "gradient_sum"


def accumulating(graph: Graph, whole: Mapping[int, tuple[int, ...]]) -> Graph:
    """The step that changes accumulators alone. whole: position in the batch → the shape of the whole item."""
    return _accumulated(graph, whole, ending=False).build()


def ending(graph: Graph, whole: Mapping[int, tuple[int, ...]]) -> Graph:
    """The step that adds its gradients to those of the micro-batches before, and updates the parameters by the sums."""
    return _accumulated(graph, whole, ending=True).build()


def clipping(graph: Graph, whole: Mapping[int, tuple[int, ...]], max_norm: float) -> Graph:
    """What follows where the norm of the gradients, all sums together, is to be at most `max_norm`: scaling, updates.
    Its outputs are that norm."""
    builder = _accumulated(graph, whole, ending=True)
    updates = [op for op in builder.ops if op.phase == "update" and op.kind != ACCUMULATE]
    builder.ops = []
    scaled, norm = clip(builder, [op.reads[1] for op in updates], max_norm)
    builder.ops += [_by(op, t) for op, t in zip(updates, scaled, strict=True)]
    builder.gradients = {op.reads[0]: t for op, t in zip(updates, scaled, strict=True)}
    builder.outputs = [norm, norm]
    for t, tensor in _whole_items(builder, whole).items():
        builder.tensors[t] = tensor
    return builder.build(compact=True)


def accumulators(graph: Graph) -> dict[str, tuple[int, int]]:
    """The name of each accumulator among the externals of such a graph → group and index of its parameter."""
    place_of = {}
    for source in graph.sources.values():
        sort, _, place = source.path.partition(".")
        if source.sort == "external" and sort == _SUM:
            group, _, index = place.partition(".")
            place_of[source.path] = (int(group), int(index))
    return place_of


def accumulates_only(graph: Graph) -> bool:
    """Its updates change accumulators and nothing that the caller can see."""
    kinds = {op.kind for op in graph.ops if op.phase == "update"}
    return kinds == {ACCUMULATE}


def _accumulated(graph: Graph, whole: Mapping[int, tuple[int, ...]], *, ending: bool) -> Builder:
    builder = Builder(graph)
    for tensor in _whole_items(builder, whole).values():
        storage = builder.storages[tensor.storage]
        builder.storages[tensor.storage] = replace(storage, n_bytes=max(storage.n_bytes, tensor.end_bytes))
    updates = [op for op in graph.ops if op.phase == "update"]
    builder.ops = [op for op in graph.ops if op.phase != "update"]
    for op in updates:
        total = _accumulator(builder, op)
        args, writes = (Ref(total), Ref(op.reads[1])), (builder.tensors[total].storage,)
        builder.add_op(replace(op, name="accumulate", kind=ACCUMULATE, args=args, writes=writes))
        if ending:
            builder.ops.append(_by(op, total))
    return builder


def _whole_items(builder: Builder, whole: Mapping[int, tuple[int, ...]]) -> dict[int, Tensor]:
    """The items of the batch of which the graph has a slice, whole."""
    inputs = {int(source.path): t for t, source in builder.sources.items() if source.sort == "input"}
    return {inputs[at]: replace(builder.tensors[inputs[at]], shape=whole[at]) for at in inputs.keys() & whole.keys()}


def _accumulator(builder: Builder, update: Op) -> int:
    """A lasting tensor in the layout of the parameter. Sums of integers need more room than each of them: they are
    floats."""
    parameter, gradient = update.reads[:2]
    dtype = builder.tensors[gradient].dtype
    name = f"{builder.tensors[parameter].name}.{_SUM}"
    total = builder.add_like(parameter, name, "state", "float32" if dtype in INTEGERS else dtype)
    at = dict(update.kwargs)
    builder.sources[total] = Source("external", f"{_SUM}.{at['group']}.{at['index']}")
    return total


def _by(update: Op, gradient: int) -> Op:
    """The update with another tensor as its gradient."""
    return replace(update, args=(update.args[0], Ref(gradient), *update.args[2:]))
