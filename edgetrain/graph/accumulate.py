"""The graph of one micro-batch, in two forms: one that only adds its gradients up, and one that ends the step.

In:  the captured step of a slice of a batch (forward, backward, one update for each trained parameter), and how many
     samples the slice and the whole batch have.
Out: two graphs. Each trained parameter has an accumulator, a lasting tensor of its shape.

    accumulating    forward, backward, accumulate(sum, gradient) …            sum ← weight · gradient, or added to it
    ending          forward, backward, accumulate(sum, gradient), sgd(parameter, sum, state) …

    step of k micro-batches:   accumulating, accumulating, …, ending          the parameters change in the last alone

What lasts is the same in both: the optimizer's state, which the first form does not read, and the whole batch, of which
the slice is a part. So whatever plans a graph counts them without being told. The weight of a micro-batch, its part of
the samples, is given when it runs: the graphs do not depend on the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edgetrain.graph.ir import ITEM_BYTES, Graph, Op, Ref, Source, Storage, Tensor
from edgetrain.graph.verify import verify

ACCUMULATE = "edgetrain.accumulate.update"
_SUM = "gradient_sum"


def accumulating(graph: Graph, whole: Mapping[int, tuple[int, ...]]) -> Graph:
    """The step that changes accumulators alone. whole: position in the batch → the shape of the whole item."""
    return _rewritten(graph, whole, ending=False)


def ending(graph: Graph, whole: Mapping[int, tuple[int, ...]]) -> Graph:
    """The step that adds its gradients to those of the micro-batches before, and updates the parameters by the sums."""
    return _rewritten(graph, whole, ending=True)


def accumulators(graph: Graph) -> dict[str, tuple[int, int]]:
    """The name of each accumulator among the externals of such a graph → group and index of its parameter."""
    found = {}
    for op in graph.ops:
        if op.kind == ACCUMULATE:
            at = dict(op.kwargs)
            group, index = at["group"], at["index"]
            assert isinstance(group, int)
            assert isinstance(index, int)
            found[graph.sources[op.reads[0]].path] = (group, index)
    return found


def accumulates_only(graph: Graph) -> bool:
    """Its updates change accumulators and nothing that the caller can see."""
    kinds = {op.kind for op in graph.ops if op.phase == "update"}
    return kinds == {ACCUMULATE}


def _rewritten(graph: Graph, whole: Mapping[int, tuple[int, ...]], *, ending: bool) -> Graph:
    storages, tensors, sources = list(graph.storages), list(graph.tensors), dict(graph.sources)
    for t, source in graph.sources.items():
        shape = whole.get(int(source.path)) if source.sort == "input" else None
        if shape is not None:
            s = tensors[t].storage
            storages[s] = replace(storages[s], n_bytes=max(storages[s].n_bytes, _span_bytes(tensors[t], shape)))
    ops = [op for op in graph.ops if op.phase != "update"]
    for number, op in enumerate(op for op in graph.ops if op.phase == "update"):
        p, g = op.reads[:2]
        total = len(tensors)
        at = dict(op.kwargs)
        sources[total] = Source("external", f"{_SUM}.{at['group']}.{at['index']}")
        tensors.append(_dense(tensors[p], f"{tensors[p].name}.{_SUM}", len(storages)))
        storages.append(Storage(tensors[total].n_bytes, "state", storages[tensors[p].storage].device))
        ops.append(
            replace(
                op, name=f"accumulate_{number + 1}", kind=ACCUMULATE, args=(Ref(total), Ref(g)),
                writes=(tensors[total].storage,),
            )
        )  # fmt: skip
        if ending:
            ops.append(_by_sum(op, total))
    made = replace(graph, storages=tuple(storages), tensors=tuple(tensors), sources=sources, ops=tuple(ops))
    verify(made)
    return made


def _by_sum(op: Op, total: int) -> Op:
    """The update with the accumulator as its gradient."""
    return replace(op, args=(op.args[0], Ref(total), *op.args[2:]))


def _dense(like: Tensor, name: str, storage: int) -> Tensor:
    """A tensor laid out as `torch.empty_like` lays it out: dense strides are kept, others become contiguous."""
    order = sorted(range(len(like.shape)), key=lambda d: (like.stride[d], like.shape[d]))
    step, dense = 1, True
    for d in order:
        dense &= like.shape[d] == 1 or like.stride[d] == step
        step *= like.shape[d]
    stride = like.stride
    if not dense:
        step, strides = 1, []
        for n in reversed(like.shape):
            strides.append(step)
            step *= max(n, 1)
        stride = tuple(reversed(strides))
    return Tensor(name, storage, like.shape, stride, like.dtype)


def _span_bytes(tensor: Tensor, shape: tuple[int, ...]) -> int:
    """The bytes of the whole item, of which the tensor is a slice with the same strides."""
    if 0 in shape:
        return 0
    last = sum((n - 1) * step for n, step in zip(shape, tensor.stride, strict=True))
    return (last + 1) * ITEM_BYTES[tensor.dtype]
