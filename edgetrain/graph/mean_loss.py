"""Is the loss a mean over samples? The answer that the structure of the forward pass gives.

In:  the step captured twice, over two and over three samples.
Out: nothing, or a `UserError` that names the op that stands in the way; and `Check`s: what must hold of the values of a
     batch, which only a run can tell.

A dimension whose size differs between the two captures is one of samples. With that, each value of the forward pass
that depends on the batch is

    by sample    one dimension of samples                     x [2, 8] and [3, 8]
    reduced      none: the samples were taken together        a scalar, or [8]
    crossed      two: samples are compared with each other    [2, 2] and [3, 3], as in a contrastive loss

and the loss is a mean, up to a factor that a test with numbers finds (run/mean_test.py), where

- nothing is crossed;
- values by sample become reduced by sums and means alone, among them those of the known losses, without class weights
  (they divide by the weights of the labels that there are);
- what all of them must be (a distribution checks its parameters) is only asserted, which each part does for itself;
- what is reduced is only added, or multiplied by what does not depend on the batch; it meets values by sample nowhere;
- no kernel takes from the batch the places in another tensor where it reads (the bags of an EmbeddingBag that begin at
  `offsets`): in a part of the batch these would be other places, and the kernels do not check them;
- where it is divided by a count of the samples that count (labels that are not ignored), all of them count: a `Check`.

What this cannot see is a kernel that mixes samples and keeps their dimension: batch norm, a softmax over samples, a
roll. The test with numbers sees those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edgetrain.errors import UserError
from edgetrain.graph.ir import PERSISTENT, Graph, Op, Ref
from edgetrain.names import short_name
from edgetrain.ops.entry import AlongBatch, entry_of

_MEAN, _SUM = 1, 2  # torch's numbers of the reductions


@dataclass(frozen=True)
class Check:
    """What must hold of a tensor in each micro-batch: no value is `ignored`, or, where that is None, every one is 1.

    ops: those that make the tensor from the batch, in order.
    """

    tensor: int
    ignored: int | None
    ops: tuple[int, ...]
    module: str


def require_mean(two: Graph, three: Graph) -> None:
    """UserError where the structure of the loss is not that of a mean over samples. The captures of two and of three
    samples."""
    _Pair(two, three).require()


def inexact(graph: Graph) -> tuple[str, ...]:
    """What in the step depends on how a batch is cut into micro-batches, in words."""
    norms = {op.module for op in graph.ops if _is_batch_norm(op)}
    reasons: dict[str, None] = {}
    for op in graph.ops:
        where = f" in {op.module}" if op.module else ""
        if op.random:
            reasons[f"random numbers{where} ({short_name(op.kind)}), which are drawn anew for each micro-batch"] = None
        elif op.phase == "forward" and any(graph.storages[s].role in PERSISTENT for s in op.writes):
            if op.module in norms:  # its running statistics, or the count of its batches
                reasons[f"batch norm in training mode{where}"] = None
            else:
                reasons[f"a tensor that {short_name(op.kind)}{where} changes, once for each micro-batch"] = None
    return tuple(reasons)


def batch_norms(graph: Graph) -> tuple[str, ...]:
    """The modules that normalise by the statistics of the batch, running statistics or not."""
    return tuple(dict.fromkeys(op.module or short_name(op.kind) for op in graph.ops if _is_batch_norm(op)))


def checks(graph: Graph) -> tuple[Check, ...]:
    """What is to be looked at before each micro-batch runs."""
    return tuple(_Flow(graph).checks())


def _is_batch_norm(op: Op) -> bool:
    entry = entry_of(op.kind)
    return entry.along.normalises and op.phase == "forward" and (entry.state is None or entry.state.changes(op.args))


def _along(op: Op) -> AlongBatch:
    return entry_of(op.kind).along


def _refused(op: Op, what: str) -> UserError:
    where = f" in {op.module}" if op.module else " in the loss"
    return UserError(
        f"the loss is not a mean over samples that micro-batches could take part by part: {op.name}{where} {what}",
        expected="a loss that is the mean, over the samples, of something of each sample alone "
        "(terms that do not depend on the batch may be added)",
        next_step="train without micro_batches, or write the loss as such a mean",
    )


class _Flow:
    """What depends on the batch in the forward pass of one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops = [(number, op) for number, op in enumerate(graph.ops) if op.phase == "forward"]
        self.maker = {t: number for number, op in self.ops for t in op.creates}
        self.batch = self._reached(lambda t: graph.role(t) == "input")
        # What a parameter, a buffer or a random number has part in.
        self.trained = self._reached(lambda t: graph.role(t) in ("parameter", "buffer", "state"))

    def _reached(self, begins: Callable[[int], bool]) -> set[int]:
        """The storages that depend on those lasting tensors, or on random numbers."""
        reached = {self.graph.tensors[t].storage for t in self.graph.sources if begins(t)}
        for _, op in self.ops:
            read = {self.graph.tensors[t].storage for t in op.reads}
            if (read & reached and not _along(op).shape_alone) or op.random:
                reached |= {self.graph.tensors[t].storage for t in op.creates} | set(op.writes)
        return reached

    def depends(self, t: int) -> bool:
        return self.graph.tensors[t].storage in self.batch

    def checks(self) -> Iterator[Check]:
        for number, op in self.ops:
            along = _along(op)
            if along.labels is not None and along.reduction is not None and op.args[along.reduction] == _MEAN:
                labels, ignored = op.args[along.labels[0]], op.args[along.labels[2]]
            else:
                labels = ignored = None
            if isinstance(labels, Ref) and self.depends(labels.tensor):
                assert isinstance(ignored, int)
                yield self._check(number, labels.tensor, ignored)
            counted = self.counted(number)
            if counted is not None:
                yield self._check(number, counted, None)

    def counted(self, number: int) -> int | None:
        """The tensor whose sum the op divides by, where that is made of the batch alone: a mask."""
        op = self.graph.ops[number]
        if _along(op).linear != "quotient" or len(op.args) < 2 or not isinstance(op.args[1], Ref):
            return None
        t = op.args[1].tensor
        while self.depends(t) and t in self.maker and self.graph.tensors[t].storage not in self.trained:
            maker = self.graph.ops[self.maker[t]]
            if _along(maker).sums == "sum" and len(maker.args) == 1:
                return maker.reads[0]
            if not (maker.view or _along(maker).copies) or len(maker.reads) != 1:
                return None
            t = maker.reads[0]
        return None

    def _check(self, at: int, t: int, ignored: int | None) -> Check:
        op = self.graph.ops[at]
        if self.graph.tensors[t].storage in self.trained:
            raise _refused(op, "takes labels or a mask that depend on parameters, buffers or random numbers")
        needed, ops = {self.graph.tensors[t].storage}, []
        for number, maker in reversed(self.ops):
            touched = {self.graph.tensors[o].storage for o in maker.creates} | set(maker.writes)
            if touched & needed and number < at:
                ops.append(number)
                needed |= {self.graph.tensors[r].storage for r in maker.reads}
        return Check(t, ignored, tuple(reversed(ops)), op.module)


def _asserting(flow: _Flow) -> Iterator[int]:
    """The assertions that something is so for all samples, and the ops that take them together for those alone."""
    readers: dict[int, list[int]] = {}
    for number, op in flow.ops:
        for t in op.reads:
            readers.setdefault(t, []).append(number)
    for number, op in flow.ops:
        read = {reader for t in op.creates for reader in readers.get(t, ())}
        if _along(op).every and read and all(_along(flow.graph.ops[reader]).asserts for reader in read):
            yield from (number, *read)


class _Pair:
    """The same step over two and over three samples."""

    def __init__(self, two: Graph, three: Graph) -> None:
        self.graph, self.other = two, three
        self.flow = _Flow(two)
        self.asserting: frozenset[int] = frozenset()
        self.same: dict[int, int] = {}  # tensor of one → the same of the other

    def require(self) -> None:
        self._align()
        self.asserting = frozenset(_asserting(self.flow))
        used = {t for _, op in self.flow.ops for t in op.reads} | {self.graph.loss}
        for number, op in self.flow.ops:
            for t in op.creates:
                if len(self.samples(t)) > 1 and self.flow.depends(t):
                    raise _refused(op, "compares samples with each other")
            at = _along(op).places
            places = None if at is None else op.args[at]
            if isinstance(places, Ref) and self.flow.depends(places.tensor):
                raise _refused(op, "reads where an item of the batch says, which holds for the whole batch alone")
            if number in self.asserting:
                continue
            if _is_batch_norm(op):
                continue  # the test with numbers decides; instance norm runs this kernel too, and mixes nothing
            read = [t for t in op.reads if self.flow.depends(t)]
            reduced = [t for t in read if not self.samples(t)]
            if reduced and len(reduced) < len(read):
                raise _refused(op, "brings what was taken over all samples back to each of them")
            if reduced and not self._linear(number, op):
                raise _refused(op, "is not linear in what was taken over all samples")
            without_samples = [t for t in op.creates if t in used and self.flow.depends(t) and not self.samples(t)]
            if without_samples and read and not reduced:
                self._require_reduction(op)
        if not self.flow.depends(self.graph.loss):
            raise UserError("the loss does not depend on the batch", next_step="train without micro_batches")

    def _align(self) -> None:
        at = {source: t for t, source in self.other.sources.items()}
        self.same = {t: at[source] for t, source in self.graph.sources.items() if source in at}
        others = [op for op in self.other.ops if op.phase == "forward"]
        mine = [op for _, op in self.flow.ops]
        for a, b in zip(mine, others, strict=False):
            if a.kind != b.kind or len(a.outputs) != len(b.outputs):
                raise self._other(a)
            self.same |= {x: y for x, y in zip(a.outputs, b.outputs, strict=True) if x is not None and y is not None}
        if len(mine) != len(others):
            raise self._other(mine[-1])

    def _other(self, op: Op) -> UserError:
        return UserError(
            f"the model computes two samples otherwise than three (from {op.name} of {op.module or 'the loss'} on), so "
            "edgetrain cannot tell whether its loss is a mean over samples",
            next_step="train without micro_batches",
        )

    def samples(self, t: int) -> tuple[int, ...]:
        """The dimensions of samples of a tensor."""
        a = self.graph.tensors[t].shape
        b = self.other.tensors[self.same[t]].shape if t in self.same else a
        if len(a) != len(b):
            return tuple(range(len(a)))
        return tuple(d for d, (n, m) in enumerate(zip(a, b, strict=True)) if n != m)

    def _linear(self, number: int, op: Op) -> bool:
        """In all that depends on the batch."""
        linear = _along(op).linear
        read = [a.tensor for a in op.args if isinstance(a, Ref)]
        by = [self.flow.depends(t) for t in read]
        if linear == "product":
            return sum(by) == 1
        if linear == "quotient":
            return not any(by[1:]) or self.flow.counted(number) is not None
        return op.view or linear == "all"

    def _require_reduction(self, op: Op) -> None:
        along = _along(op)
        if along.reduction is not None:
            how = op.args[along.reduction] if len(op.args) > along.reduction else _MEAN
            if along.labels is not None and op.args[along.labels[1]] is not None and how == _MEAN:
                raise _refused(op, "has class weights, so it divides by the weights of the labels that there are")
            if how in (_MEAN, _SUM):
                return
        if not along.sums:
            raise _refused(op, "takes samples together otherwise than by a sum or a mean")


def has_samples(batch: Sequence[object]) -> bool:
    return any(getattr(item, "shape", ()) for item in batch)


def sample_items(batch: Sequence[object]) -> tuple[int, tuple[int, ...]]:
    """The number of samples of a batch, and the positions of the tensors that are cut: those with as many rows as the
    first tensor has."""
    shapes = [(position, tuple(getattr(item, "shape", ()))) for position, item in enumerate(batch)]
    first = next((shape for _, shape in shapes if shape), None)
    if first is None:
        raise UserError("the batch has no tensor with a dimension of samples", next_step="train without micro_batches")
    return first[0], tuple(position for position, shape in shapes if shape and shape[0] == first[0])
