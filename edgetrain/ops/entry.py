"""What is known of a kind of op: one `Entry`, in one file a family.

In:  entries, as the families (and programs from outside, see docs/adding.md) register them.
Out: `entry_of(kind)`. Capture, verify, costs, planners, the executor, micro-batches, the profiler, reports and firmware
     ask it, and know no op by name.

An entry stands for a kind (`aten.div.Scalar_mode`), or for all overloads of a name (`aten.div`); in-place forms
(`aten.div_`) share it. An op of PyTorch that has no entry of its own is taken to be anything: it may raise, overwrites
nothing, computes one operation an element; so is one of another library, which a graph file may not name at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edgetrain.graph.ir import Graph, Op, Tensor
from edgetrain.ops.c import CKernel
from edgetrain.ops.work import Rule, Work, each

Category = Literal[
    "convolution", "matrix product", "normalisation", "activation", "elementwise", "pooling and reduction", "loss",
    "copy and layout", "update", "wait for storage", "other",
]  # fmt: skip
ONE_EACH = each(1)
TRUSTED = ("aten", "prims", "edgetrain")  # whose ops a graph file may name, entry or not


@dataclass(frozen=True)
class Kernel:
    """One way to compute an op on PyTorch.

    run:    None: PyTorch's own kernel of that kind.
    takes:  whether it is for these tensors, those that the op reads: their types, shapes and strides.
    exact:  "bitwise": it gives the bits of the entry's first kernel, which every op can run.
    over:   it takes a keyword `out`, the tensor that `Entry.overwrites` names, and puts its result there.
    single: it returns a tensor, and not a sequence of them; for kernels of PyTorch their schema says it.
    """

    name: str
    run: Callable[..., Any] | None = None
    takes: Callable[[tuple[Tensor, ...]], bool] = lambda tensors: True
    exact: Literal["bitwise", "rounding"] = "bitwise"
    over: bool = False
    single: bool = True


TORCH = Kernel("torch")


@dataclass(frozen=True, slots=True)
class Overwrite:
    """The result may take the memory of an argument that nothing else needs; the bits are the same.

    form:      the kind that does it, from that of the op: aten.relu.default is a {name} and an {overload}.
    keyword:   by which it takes the argument's tensor beside the arguments of the op; None: that one is its first.
    exchanges: the first two arguments may be exchanged, so the second may be overwritten too.
    strict:    no other argument may be a view of the same memory, and there is one result.
    """

    form: str = "{name}.{overload}"
    keyword: str | None = None
    exchanges: bool = False
    strict: bool = True


IN_PLACE = Overwrite("{name}_.{overload}")
GRAD_INPUT = Overwrite("{name}.grad_input", "grad_input")
OUT = Overwrite(keyword="out", strict=False)  # a kernel of our own


@dataclass(frozen=True, slots=True)
class State:
    """Running statistics, counts and the like that the op changes beside its results. Where None stands for them it
    computes the same results and changes nothing: so it runs a second time.

    arguments: their places. training: the place of a flag without which nothing is changed.
    """

    arguments: tuple[int, ...]
    training: int | None = None

    def changes(self, args: tuple[Any, ...]) -> bool:
        return self.training is None or (len(args) > self.training and bool(args[self.training]))

    def given(self, args: tuple[Any, ...]) -> list[Any]:
        """What it changes, among these arguments of the op."""
        return [args[place] for place in self.arguments if place < len(args) and args[place] is not None]


@dataclass(frozen=True, slots=True)
class Limits:
    """Values that an argument of an op may have, from low to high. what: it is, in words.

    ignored: the place of an argument that is one more such value.
    """

    tensor: int
    low: float
    high: float
    what: Literal["label", "token", "index", "probability", "target"]
    ignored: int | None = None


@dataclass(frozen=True, slots=True)
class AlongBatch:
    """What the op does along a batch: by it a loss is known to be a mean over samples, or not.

    linear:      in what it reads: in all of it together, in each factor of a product, in the dividend of a quotient.
    sums:        takes samples together by a sum or a mean.
    reduction:   of a loss: the place of the argument that says how it takes them together.
    labels:      of a loss: the places of class labels, of weights of the classes, and of the label that is ignored.
    places:      the place of an argument that says where in another tensor it reads, which nothing checks.
    shape_alone: what it makes depends on the shape of what it reads, and on nothing else of it.
    copies:      the same numbers, perhaps in another type.
    normalises:  by the statistics of the whole batch, where it trains.
    """

    linear: Literal["", "all", "product", "quotient"] = ""
    sums: Literal["", "sum", "mean"] = ""
    reduction: int | None = None
    labels: tuple[int, int, int] | None = None
    places: int | None = None
    shape_alone: bool = False
    copies: bool = False
    normalises: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """
    optimizer:     by the name that captured steps have for it; "" for one that adds gradients up.
    rounds_on_gpu: plain PyTorch's own update there has other roundings.
    """

    optimizer: str
    rounds_on_gpu: bool = False


Predict = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """
    kernels:    on PyTorch; the first is what the op means. None: firmware alone has the op.
    legal:      may stand in a graph, which may come from anywhere.
    predicts:   the results of a call over fake tensors, where PyTorch's own fake kernel lays them out otherwise than
                the real one: of the kernel, its arguments and keywords.
    one_type:   on a CPU it takes tensors of one type alone, where its fake kernel takes any.
    oversized:  it computes all elements of a loss into its result, reduces them, and shrinks the result to a scalar
                that still holds the memory of all elements.
    state:      what it changes beside its results.
    overwrites: the argument whose memory its result may take.
    reruns:     it can run a second time in the forward pass, with the same results; one that draws random numbers only
                where it takes a `generator`.
    raises:     "never" for any value, "perhaps", or "for values" that a batch may well hold (indices, labels,
                probabilities, matrices): a forward pass then calls it for what it refuses, whoever reads its results.
    limits:     the values that it takes, for what is said of those that it refuses.
    by_value:   plain PyTorch chooses a formula by the values of a tensor here; a captured step has the one that fits
                all, and rounds otherwise.
    work:       operations and bytes.
    frugal:     its kernels take little memory beside their results.
    columns:    its gradient lays out columns of one sample in memory from malloc, in each thread.
    category:   in reports.
    along:      along a batch.
    update:     of an optimizer, for the ops that are one.
    c:          in firmware; None: firmware has no kernel for it.
    """

    kernels: tuple[Kernel, ...] = (TORCH,)
    legal: bool = True
    predicts: Predict | None = None
    one_type: bool = False
    oversized: bool = False
    state: State | None = None
    overwrites: Overwrite | None = None
    reruns: bool = True
    raises: Literal["never", "perhaps", "for values"] = "perhaps"
    limits: Callable[[Graph, Op], Iterator[Limits]] | None = None
    by_value: Callable[[Graph, Op], bool] | None = None
    work: Rule = ONE_EACH
    frugal: bool = False
    columns: bool = False
    category: Category = "other"
    along: AlongBatch = field(default_factory=AlongBatch)
    update: Update | None = None
    c: CKernel | None = None


_entries: dict[str, Entry] = {}


def register(entry: Entry, *kinds: str) -> None:
    """The entry of these kinds, `library.name.overload`, or of all overloads of these names, `library.name`."""
    _entries.update(dict.fromkeys(kinds, entry))
    _forget()


def unregister(*kinds: str) -> None:
    for kind in kinds:
        _entries.pop(kind, None)
    _forget()


def registered() -> tuple[str, ...]:
    """The kinds and names that have an entry."""
    return tuple(_entries)


def _forget() -> None:
    registered_entry.cache_clear()
    entry_of.cache_clear()
    entry_of_function.cache_clear()


def of_torch(entry: Entry, names: str) -> None:
    """The entry of these ops of PyTorch."""
    register(entry, *(f"aten.{name}" for name in names.split()))


def own(entry: Entry, names: str) -> None:
    """The entry of these ops of ours."""
    register(replace(entry, frugal=True), *(f"edgetrain.{name}" for name in names.split()))


@functools.cache
def registered_entry(kind: str) -> Entry | None:
    """The entry that was registered for this kind."""
    space, _, rest = kind.partition(".")
    name, _, overload = rest.partition(".")
    plain = name.removesuffix("_")
    names = (kind, f"{space}.{name}", f"{space}.{plain}.{overload}", f"{space}.{plain}")
    return next((_entries[name] for name in names if name in _entries), None)


@functools.cache
def entry_of(kind: str) -> Entry:
    return registered_entry(kind) or Entry(category=_category(kind))


@functools.cache
def entry_of_function(function: Any) -> Entry:
    """Of a kernel of torch, as it is called."""
    return entry_of(str(function))


def work(graph: Graph, op: Op) -> Work:
    """What the op does when it runs for the first time."""
    return Work("nothing") if op.view else entry_of(op.kind).work(graph, op)


def short_name(kind: str) -> str:
    """aten.convolution.default → convolution; edgetrain.norm.apply → norm.apply."""
    space, _, name = kind.partition(".")
    return name if space == "edgetrain" else name.partition(".")[0]


# What the name of an op tells that has no entry of its own; the first line with a word that is in it counts.
_WORDS: tuple[tuple[Category, str], ...] = (
    ("normalisation", "_norm norm."),
    ("convolution", "conv"),
    ("loss", "loss cross_entropy"),
    ("matrix product", "mm. matmul attention linear lstm"),
    ("activation", "softmax relu elu silu swish sigmoid tanh threshold dropout"),
    ("pooling and reduction", "pool sum mean amax"),
    ("copy and layout", "clone copy cat. stack embedding select slice gather index pad transpose"),
    ("elementwise", "mul add sub div where pow sqrt exp neg"),
)


def _category(kind: str) -> Category:
    return next((category for category, words in _WORDS if any(word in kind for word in words.split())), "other")
