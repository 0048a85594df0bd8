"""What a kernel refuses in a step, told as an error of ours: which op of which module, and which values.

In:  a graph, the op whose kernel raised, what it raised, and the inputs of the step, which was taken back by then.
Out: a `Refused`, which is an error of plain PyTorch's type too: `except IndexError` goes on to work.

Looked at only when a step fails, so it costs a good one nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch

from edgetrain.errors import UserError
from edgetrain.graph.capture.value_checks import OF_DISTRIBUTIONS
from edgetrain.graph.ir import Graph, Op
from edgetrain.native.surely import surely
from edgetrain.ops import call
from edgetrain.ops.entry import Limits, entry_of

# What kernels raise.
OF_KERNELS = (RuntimeError, LookupError, ValueError, TypeError, ArithmeticError)
_NO_MEMORY = ("DefaultCPUAllocator", "allocate memory", "not enough memory", "out of memory")
_FOLDERS = (str(Path(torch.__file__).parent), str(Path(call.__file__).parent))


class Refused(UserError):
    """A kernel refused the values that it was given; the step was taken back. (Its class is one of the type of the
    kernel's error, too.)"""


def by_kernel(error: BaseException, trace: TracebackType | None, op: Op) -> bool:
    """A kernel raised it for the values that it was given: no handler of a signal, and no lack of memory. trace: from
    the step's own frame on."""
    if isinstance(error, UserError | torch.OutOfMemoryError):
        return False
    files = [] if trace is None else list(_files(trace.tb_next))
    if not files or any(text in str(error) for text in _NO_MEMORY):
        return False
    own = op.kind.partition(".")[0] not in ("aten", "edgetrain")  # a kernel of the user's, in Python perhaps
    return own or all(file.startswith(_FOLDERS) for file in files)


def _files(trace: TracebackType | None) -> Iterator[str]:
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(("<step of ", "<string>")):  # lines of the step itself
            yield file
        trace = trace.tb_next


def refused(
    graph: Graph, op: Op, error: BaseException, inputs: Mapping[int, torch.Tensor], *, next_step: str | None = None
) -> UserError:
    """inputs: by tensor of the graph. next_step: what to do where it is not the values that are refused."""
    kind, where = _kind_of(type(error)), f"module {op.module}" if op.module else "the loss"
    rule = entry_of(op.kind).limits
    for limits in () if rule is None else rule(graph, op):
        try:
            wrong = _wrong(graph, op, limits, inputs)
        except Exception:  # what the values are made of is refused, too
            continue
        if wrong is not None:
            return kind(f"{wrong[0]} that {where} does not know; nothing was changed", **wrong[1])
    text = str(error).strip().splitlines()
    if text and text[0].startswith(OF_DISTRIBUTIONS):
        why = text[0].removeprefix(OF_DISTRIBUTIONS)
        return _kind_of(ValueError)(
            f"{where} works with a distribution that refuses what it is given; nothing was changed",
            received=why, next_step="correct this batch, or look at what the distribution is made of",
        )  # fmt: skip
    return kind(
        f"{where} calls {op.kind} ({op.name}), which refuses the tensors that it is given; nothing was changed",
        received=f"{type(error).__name__}: {text[0] if text else ''}",
        next_step=next_step
        or "correct this batch, or look at what it is made into; loss(model, *batch) by itself shows where",
    )


def _wrong(
    graph: Graph, op: Op, limits: Limits, inputs: Mapping[int, torch.Tensor]
) -> tuple[str, dict[str, str]] | None:
    """What is wrong with the values of an argument, as far as they are made of the batch alone."""
    values, items = _from_batch(graph, graph.ops.index(op), limits.tensor, inputs)
    outside = values[~((values >= limits.low) & (values <= limits.high))]
    ignored = None if limits.ignored is None or limits.ignored >= len(op.args) else op.args[limits.ignored]
    if isinstance(ignored, int):
        outside = outside[outside != ignored]
    if not outside.numel():
        return None
    article = "an" if limits.what == "index" else "a"
    given = graph.tensors[limits.tensor].storage in {graph.tensors[t].storage for t in inputs}
    subject = f"item {items} of the batch holds {article} {limits.what}"
    many = "indices" if limits.what == "index" else f"{limits.what}s"
    counts = limits.what in ("label", "token", "index")
    return subject if given else f"item {items} of the batch is made into {article} {limits.what}", {
        "expected": f"numbers from {limits.low} to {limits.high}",
        "received": f"{outside[0].item()}, {outside.numel()} such in all",
        "next_step": f"correct this batch, or build the model for more {many}" if counts else "correct this batch",
    }


def _from_batch(graph: Graph, at: int, t: int, inputs: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor, str]:
    """The values that a tensor had before op number `at`, and of which items of the batch they are made. LookupError
    where something else has part in them."""
    given = {graph.tensors[i].storage: i for i in inputs}
    needed, numbers = {graph.tensors[t].storage}, []
    for number in range(at - 1, -1, -1):
        op = graph.ops[number]
        if needed & ({graph.tensors[o].storage for o in op.creates} | set(op.writes)):
            if op.random:
                raise LookupError(op.name)
            numbers.append(number)
            needed |= {graph.tensors[r].storage for r in op.reads}
    persistent = needed & {graph.tensors[s].storage for s in graph.sources}
    if not persistent or not persistent <= given.keys():
        raise LookupError(t)
    items = sorted(int(graph.sources[given[s]].path) for s in persistent)
    return computed(graph, numbers[::-1], t, inputs), " and ".join(map(str, items))


def computed(graph: Graph, numbers: Iterable[int], t: int, inputs: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """A tensor that a few ops make of the batch, or an item of the batch itself."""
    values = {i: value.detach() for i, value in inputs.items()}

    def compute() -> torch.Tensor:
        call.set_autocast(devices, False)
        for number in numbers:
            op = graph.ops[number]
            args, kwargs = (
                [call.argument(a, values) for a in op.args],
                {k: call.argument(v, values) for k, v in op.kwargs},
            )
            try:
                result = call.resolve(op.kind)(*args, **kwargs)
            except OF_KERNELS as error:
                raise refused(graph, op, error, inputs) from error
            result = result if isinstance(result, tuple | list) else (result,)
            values.update((at, value) for at, value in zip(op.outputs, result, strict=False) if at is not None)
        return values[t]

    devices = call.autocast_devices()
    return surely(compute, lambda: call.set_autocast(devices, True))


def _kind_of(error: type[BaseException]) -> Callable[..., UserError]:
    """`Refused`, and the nearest class of the error that is Python's or torch's."""
    plain: Sequence[type] = [c for c in error.__mro__ if c.__module__.partition(".")[0] in ("builtins", "torch")]
    return type(Refused.__name__, (Refused, plain[0]), {"__module__": __name__, "__doc__": Refused.__doc__})
