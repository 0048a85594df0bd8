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

What lasts is the same in both: the optimizer's state, which the first form does not read, and the whole batch, of which
the slice is a part. So whatever plans a graph counts them without being told. The weight of a micro-batch, its part of
the samples, is given when it runs: the graphs do not depend on the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edgetrain.graph.ir import Graph, Op, Ref, Source, Storage, Tensor, Value
from edgetrain.graph.rewrite.fuse import compact
from edgetrain.graph.verify import verify
from edgetrain.ops.update import ACCUMULATE

_SUM = "gradient_sum"


def accumulating(graph: Graph, whole: Mapping[int, tuple[int, ...]]) -> Graph:
    """The step that changes accumulators alone. whole: position in the batch → the shape of the whole item."""
    return _rewritten(graph, whole, ending=False)


def ending(graph: Graph, whole: Mapping[int, tuple[int, ...]]) -> Graph:
    """The step that adds its gradients to those of the micro-batches before, and updates the parameters by the sums."""
    return _rewritten(graph, whole, ending=True)


def clipping(graph: Graph, whole: Mapping[int, tuple[int, ...]], most: float) -> Graph:
    """What follows where the norm of the gradients, all sums together, is to be at most `most`: scaling and updates, by
    the arithmetic of clip_grad_norm_. Its first output is that norm."""
    summed = ending(graph, whole)
    builder = _Clipping(summed)
    updates = [op for op in summed.ops if op.phase == "update" and op.kind != ACCUMULATE]
    scaled = builder.scaled([op.reads[1] for op in updates], most)
    ops = [_by_sum(op, c) for op, c in zip(updates, scaled, strict=True)]
    for t, source in summed.sources.items():
        shape = whole.get(int(source.path)) if source.sort == "input" else None
        if shape is not None:
            builder.tensors[t] = replace(builder.tensors[t], shape=shape)
    made = compact(
        replace(
            summed, storages=tuple(builder.storages), tensors=tuple(builder.tensors), ops=(*builder.ops, *ops),
            outputs=(builder.norm, builder.norm),
            gradients={op.reads[0]: c for op, c in zip(updates, scaled, strict=True)},
        )
    )  # fmt: skip
    verify(made)
    return made


class _Clipping:
    """Adds ops to a graph, all of them over what lasts."""

    def __init__(self, graph: Graph) -> None:
        self.storages, self.tensors = list(graph.storages), list(graph.tensors)
        self.ops: list[Op] = []
        self.norm = -1

    def scaled(self, sums: list[int], most: float) -> list[int]:
        norms = [self._op("linalg_vector_norm.default", (Ref(t),), self.tensors[t], ()) for t in sums]
        one = self.tensors[norms[0]]
        stacked = self._op("stack.default", (tuple(Ref(t) for t in norms),), one, (len(norms),))
        self.norm = self._op("linalg_vector_norm.default", (Ref(stacked),), one, ())
        above = self._op("add.Tensor", (Ref(self.norm), 1e-6), one, ())
        part = self._op("reciprocal.default", (Ref(above),), one, ())
        wanted = self._op("mul.Tensor", (Ref(part), most), one, ())
        scale = self._op("clamp.default", (Ref(wanted), None, 1.0), one, ())
        return [
            self._op("mul.Tensor", (Ref(t), Ref(scale)), self.tensors[t], self.tensors[t].shape) for t in sums
        ]  # fmt: skip

    def _op(self, kind: str, args: tuple[Value, ...], like: Tensor, shape: tuple[int, ...]) -> int:
        """A tensor that a kernel makes, of the type and device of another and, where it has its shape, its layout."""
        name, number = f"clip_{len(self.ops) + 1}", len(self.tensors)
        stride = like.stride if shape == like.shape else (1,) * len(shape)
        tensor = Tensor(name, len(self.storages), shape, stride, like.dtype)
        self.tensors.append(tensor)
        self.storages.append(Storage(tensor.n_bytes, "gradient", self.storages[like.storage].device))
        self.ops.append(Op(name, f"aten.{kind}", args, (), (number,), "backward"))
        return number


def accumulators(graph: Graph) -> dict[str, tuple[int, int]]:
    """The name of each accumulator among the externals of such a graph → group and index of its parameter."""
    found = {}
    for source in graph.sources.values():
        sort, _, place = source.path.partition(".")
        if source.sort == "external" and sort == _SUM:
            group, _, index = place.partition(".")
            found[source.path] = (int(group), int(index))
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
            storages[s] = replace(
                storages[s], n_bytes=max(storages[s].n_bytes, replace(tensors[t], shape=shape).end_bytes)
            )
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
