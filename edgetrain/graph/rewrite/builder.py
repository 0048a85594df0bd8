"""One way to build a graph: capture, every rewrite and the lowering for firmware add to a `Builder` and change it.

In:  nothing, or a graph. Out: `build()`: a graph that `verify` accepts.

Storages, tensors and ops keep their numbers until then, so they are referred to by number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgetrain.graph.ir import Graph, Op, Role, Storage, Tensor, replace_refs
from edgetrain.graph.verify import verify

_EMPTY = Graph((), (), (), {}, ())


class Builder:
    word_bytes = 1  # the sizes of new storages are multiples of it

    def __init__(self, graph: Graph = _EMPTY) -> None:
        self.storages, self.tensors, self.ops = list(graph.storages), list(graph.tensors), list(graph.ops)
        self.sources, self.outputs = dict(graph.sources), list(graph.outputs)
        self.gradients, self.constants = dict(graph.gradients), dict(graph.constants)
        self.unused, self.about = graph.unused, dict(graph.about)
        self._names = {op.name for op in graph.ops}
        self._counts: Counter[str] = Counter()

    def build(self, *, compact: bool = False) -> Graph:
        """The graph, verified. compact: without the tensors and storages that nothing refers to any more."""
        graph = Graph(
            tuple(self.storages), tuple(self.tensors), tuple(self.ops), self.sources, tuple(self.outputs),
            self.gradients, self.constants, self.unused, self.about,
        )  # fmt: skip
        graph = _compact(graph) if compact else graph
        verify(graph)
        return graph

    def add_storage(self, n_bytes: int, role: Role, device: str = "cpu") -> int:
        self.storages.append(Storage(-(-n_bytes // self.word_bytes) * self.word_bytes, role, device))
        return len(self.storages) - 1

    def add_tensor(self, tensor: Tensor) -> int:
        """In a storage that exists, or that is the next to be added."""
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def add(
        self, name: str, role: Role, shape: Sequence[int], dtype: str,
        stride: tuple[int, ...] | None = None, device: str = "cpu",
    ) -> int:  # fmt: skip
        """A tensor that fills a storage of its own; in the order of its shape, or with these dense strides."""
        tensor = Tensor(name, len(self.storages), tuple(shape), contiguous(shape) if stride is None else stride, dtype)
        self.add_storage(tensor.n_bytes, role, device)
        return self.add_tensor(tensor)

    def add_like(self, t: int, name: str, role: Role, dtype: str | None = None) -> int:
        """A tensor as `torch.empty_like` creates it: with the shape, layout and device of another."""
        tensor = self.tensors[t]
        stride = dense_strides(tensor)
        return self.add(name, role, tensor.shape, dtype or tensor.dtype, stride, self.device(t))

    def add_op(self, op: Op) -> None:
        """Under its name and a number, as in relu_2."""
        self.ops.append(replace(op, name=self.numbered(op.name)))

    def replace_ops(self, by: Mapping[int, Sequence[Op]]) -> None:
        """Put these ops in the places of those with the numbers given."""
        self.ops = [new for number, op in enumerate(self.ops) for new in by.get(number, (op,))]

    def numbered(self, name: str) -> str:
        """The next of name_1, name_2, … that no op has."""
        while True:
            self._counts[name] += 1
            numbered = f"{name}_{self._counts[name]}"
            if numbered not in self._names:
                self._names.add(numbered)
                return numbered

    def device(self, t: int) -> str:
        return self.storages[self.tensors[t].storage].device


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(n, 1) for n in shape[at + 1 :]) for at in range(len(shape)))


def dense_strides(like: Tensor) -> tuple[int, ...]:
    """Those of `torch.empty_like`: dense strides as they are; of others the order of the dimensions, by the same
    insertion sort, since a stride of 0 has no place in the order."""
    if like.dense:
        return like.stride
    order = list(reversed(range(len(like.shape))))
    for last in range(1, len(order)):
        moving = last
        for at in reversed(range(last)):
            outer, inner = order[at], order[moving]
            if not like.stride[outer] or not like.stride[inner]:
                continue
            if (like.stride[outer], like.shape[outer]) > (like.stride[inner], like.shape[inner]):
                order[at], order[moving], moving = inner, outer, at
            elif like.stride[outer] < like.stride[inner]:
                break
    stride, step = [0] * len(order), 1
    for dim in order:
        stride[dim] = step
        step *= max(like.shape[dim], 1)
    return tuple(stride)


def _compact(graph: Graph) -> Graph:
    touched = {t for op in graph.ops for t in (*op.reads, *op.creates)}
    tensors = sorted({*graph.sources, *graph.outputs, *touched})
    storages = sorted({graph.tensors[t].storage for t in tensors})
    tensor_at = {old: new for new, old in enumerate(tensors)}
    storage_at = {old: new for new, old in enumerate(storages)}
    return replace(
        graph,
        storages=tuple(graph.storages[s] for s in storages),
        tensors=tuple(replace(graph.tensors[t], storage=storage_at[graph.tensors[t].storage]) for t in tensors),
        ops=tuple(
            replace(
                op,
                args=tuple(replace_refs(value, tensor_at) for value in op.args),
                kwargs=tuple((key, replace_refs(value, tensor_at)) for key, value in op.kwargs),
                outputs=tuple(None if t is None else tensor_at[t] for t in op.outputs),
                writes=tuple(storage_at[s] for s in op.writes),
            )
            for op in graph.ops
        ),
        sources={tensor_at[t]: source for t, source in graph.sources.items()},
        outputs=tuple(tensor_at[t] for t in graph.outputs),
        gradients={tensor_at[p]: tensor_at[g] for p, g in graph.gradients.items()},
        constants={tensor_at[t]: value for t, value in graph.constants.items()},
    )
