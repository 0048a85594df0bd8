"""The walk from a captured graph to one for firmware: what each tensor has become, and how the new graph is built.

In:  a captured graph, and a rule for each kind of op (`lower.py`).
Out: the new graph, without the ops that nobody needs.

A tensor of the captured graph is a tensor of the new one (`Dense`), or something that its readers take as it is: a
matrix seen transposed, some channels of a tensor, the mask of a dropout. It becomes a tensor where a rule needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from edgetrain.errors import InternalError, UserError
from edgetrain.firmware.instead import LAYERS, instead
from edgetrain.graph.ir import Graph, Op, Phase, Ref, Role, Source, Value
from edgetrain.graph.rewrite.builder import Builder, contiguous
from edgetrain.graph.rewrite.dead_ops import remove_dead_ops
from edgetrain.names import take_free_name

ABOUT = "firmware"  # the key in `Graph.about` by which a lowered graph is known
WORD_BYTES = 4


def nhwc(shape: Sequence[int]) -> tuple[int, ...]:
    _, C, H, W = shape
    return (H * W * C, 1, W * C, C)


# ---- what a tensor of the captured graph has become


@dataclass(frozen=True)
class Dense:
    """A tensor of the new graph."""

    tensor: int


@dataclass(frozen=True)
class Transposed:
    """A matrix, its rows and columns exchanged."""

    tensor: int


@dataclass(frozen=True)
class Expanded:
    """[B, C, 1, 1] shown as [B, C, H, W]."""

    tensor: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """Some channels of a tensor."""

    tensor: int
    start: int
    end: int


@dataclass(frozen=True)
class Mask:
    """What a dropout multiplies with: 1 / keep where the mask is 1; before it was divided, 1."""

    tensor: int
    keep: float
    divided: bool


@dataclass(frozen=True)
class LogSoftmax:
    """The logarithms of a softmax, which the op of the loss computes. log_probabilities: its result, once it exists."""

    logits: int
    log_probabilities: int | None = None


@dataclass(frozen=True)
class LossGradient:
    """The gradient of a loss with respect to log-probabilities, before the softmax's own gradient is taken."""

    labels: int
    mean: bool


@dataclass(frozen=True)
class One:
    """The gradient of the loss with respect to itself."""


@dataclass(frozen=True)
class Nothing:
    """Memory whose content does not matter."""


Held = Dense | Transposed | Expanded | Slice | Mask | LogSoftmax | LossGradient | One | Nothing


Rule = Callable[["Lowering", Op], None]


class Rules(dict[str, Rule]):
    """A rule for each kind of op of the captured graph."""

    def of(self, *kinds: str) -> Callable[[Rule], Rule]:
        def keep(rule: Rule) -> Rule:
            self.update(dict.fromkeys(kinds, rule))
            return rule

        return keep


class Lowering(Builder):
    """Walks the ops of a captured graph; a rule for each kind adds ops to the new one."""

    word_bytes = WORD_BYTES

    def __init__(self, graph: Graph, rules: Mapping[str, Rule], layers: Mapping[str, str] | None = None) -> None:
        """layers: class by path of the model's modules, for what is said of one that has no kernel."""
        super().__init__()
        self.graph, self.rules, self.layers = graph, rules, layers or {}
        self.unused, self.about = graph.unused, {**graph.about, ABOUT: "float32"}
        self.value: dict[int, Held] = {}  # by tensor of the captured graph
        self.copies: dict[tuple[int, str], int] = {}  # a tensor in another layout
        self.inverse: dict[tuple[int, float], int] = {}  # running variance, eps → 1 / sqrt(variance + eps)
        self.before: dict[int, int] = {}  # result of an op → what it was made from, for names of gradients
        self.names: set[str] = set()
        self.counts: dict[str, int] = {}
        self.op: Op = graph.ops[0]

    def run(self) -> Graph:
        for t, source in self.graph.sources.items():
            self._source(t, source)
        for op in self.graph.ops:
            self.op = op
            rule = self.rules.get(op.kind)
            if rule is None:
                raise self.refuse(f"there is no kernel for {op.kind}")
            rule(self, op)
        self.gradients = {self.dense(p): self._gradient(p, g) for p, g in self.graph.gradients.items()}
        self.outputs = [self.dense(t) for t in self.graph.outputs]
        remove_dead_ops(self)
        return self.build(compact=True)

    def _gradient(self, parameter: int, gradient: int) -> int:
        updates = (op for op in self.ops if op.phase == "update" and op.reads[0] == self.dense(parameter))
        update = next(updates, None)
        return self.dense(gradient) if update is None else update.reads[1]

    def _source(self, t: int, source: Source) -> None:
        old = self.graph.tensors[t]
        if source.sort in ("external", "constant"):
            raise UserError(
                f"{old.name} is no part of the model, and firmware would not know its value",
                expected="a loss that reads the model and the batch alone",
                next_step="register it as a buffer of the model, or leave it out of the loss",
            )
        dtype = "int32" if source.sort == "input" and old.dtype == "int64" else old.dtype
        if dtype not in ("float32", "int32", "int64"):
            raise UserError(f"{old.name} is of type {old.dtype}, and firmware has float32 kernels", expected="float32")
        number = self._tensor(identifier(old.name), old.shape, self.graph.storages[old.storage].role, dtype)
        self.tensors[number] = replace(self.tensors[number], name=old.name)
        self.sources[number] = source
        self.value[t] = Dense(number)

    # ---- building

    def _tensor(self, name: str, shape: Sequence[int], role: Role, dtype: str = "float32") -> int:
        """A new tensor in a storage of its own."""
        stride = nhwc(shape) if len(shape) == 4 else contiguous(shape)
        return self.add(take_free_name(name, self.names), role, shape, dtype, stride)

    def call(
        self, kind: str, args: Sequence[Value], outputs: Sequence[int | None], *,
        writes: Sequence[int] = (), kwargs: Sequence[tuple[str, Value]] = (), view: bool = False,
    ) -> None:  # fmt: skip
        """Add an op, of the phase and the module of the captured one."""
        name = kind.removeprefix("edgetrain.").removeprefix("aten.").replace(".", "_")
        phase, module = self.op.phase, self.op.module
        self.add_op(Op(name, kind, tuple(args), tuple(kwargs), tuple(outputs), phase, module, tuple(writes), view=view))

    def result(self, name: str, shape: Sequence[int], dtype: str = "float32") -> int:
        phase: Phase = self.op.phase
        return self._tensor(name, shape, "gradient" if phase == "backward" else "activation", dtype)

    def forward_result(self, kind: str, shape: Sequence[int]) -> int:
        """Named by its kind and its number, as relu_3."""
        self.counts[f"results of {kind}"] = count = self.counts.get(f"results of {kind}", 0) + 1
        return self.result(f"{kind}_{count}", shape)

    def gradient_of(self, t: int) -> int:
        """A result that is the gradient of this tensor, as d_relu_3."""
        return self.result(f"d_{identifier(self.tensors[t].name)}", self.tensors[t].shape)

    def gives(self, position: int, t: int) -> None:
        """This result of the captured op is that tensor."""
        old = self.op.outputs[position]
        if old is not None:
            self.value[old] = Dense(t)

    # ---- reading

    def refuse(self, what: str, next_step: str | None = None) -> UserError:
        layer = self.layers.get(self.op.module, "")
        where = f", module {self.op.module}" if self.op.module else ""
        where += f" ({layer})" if layer else ""
        return UserError(
            f"{what} (op {self.op.name}{where}) in firmware", expected=LAYERS,
            received=self.op.kind, next_step=next_step or instead(self.op.kind, layer),
        )  # fmt: skip

    def held(self, position: int) -> Held:
        ref = self.op.args[position]
        if not isinstance(ref, Ref):
            raise self.refuse(f"{self.op.kind} with {ref!r} in place of a tensor has no kernel")
        return self.value[ref.tensor]

    def arg(self, position: int) -> int:
        """The tensor at that place of the op's arguments, dense, an image as [B, H, W, C]."""
        ref = self.op.args[position]
        if not isinstance(ref, Ref):
            raise self.refuse(f"{self.op.kind} with {ref!r} in place of a tensor has no kernel")
        return self.dense(ref.tensor)

    def optional(self, position: int) -> int | None:
        return None if len(self.op.args) <= position or self.op.args[position] is None else self.arg(position)

    def dense(self, old: int) -> int:
        value = self.value[old]
        if isinstance(value, Dense):
            return self.image(value.tensor)
        if isinstance(value, Slice):
            part = self._sliced(value)
            self.value[old] = Dense(part)
            return part
        raise self.refuse(f"{self.op.kind} of a tensor that is {_WORDS[type(value)]} has no kernel")

    def _sliced(self, value: Slice) -> int:
        whole = self.tensors[value.tensor]
        C, *rest = whole.shape[1:]
        part = self.result(f"{identifier(whole.name)}_part", (whole.shape[0], value.end - value.start, *rest))
        rows = whole.n_elements // C
        self.call("edgetrain.concat.backward", (Ref(value.tensor), rows, C, value.start, value.end), (part,))
        return part

    def image(self, t: int) -> int:
        """The tensor with its channels innermost, if it is an image."""
        tensor = self.tensors[t]
        if len(tensor.shape) != 4 or tensor.stride == nhwc(tensor.shape) or same_in_memory(tensor.shape):
            return t
        return self._copy(t, "nhwc")

    def in_order(self, t: int) -> int:
        """The tensor in the order of its shape."""
        tensor = self.tensors[t]
        if len(tensor.shape) != 4 or tensor.stride == contiguous(tensor.shape) or same_in_memory(tensor.shape):
            return t
        return self._copy(t, "nchw")

    def _copy(self, t: int, layout: str) -> int:
        if (t, layout) not in self.copies:
            tensor = self.tensors[t]
            stride = nhwc(tensor.shape) if layout == "nhwc" else contiguous(tensor.shape)
            role: Role = "gradient" if self.op.phase == "backward" else "activation"
            name = take_free_name(f"{identifier(tensor.name)}_{layout}", self.names)
            copy = self.add(name, role, tensor.shape, tensor.dtype, stride)
            self.call(f"edgetrain.permute.to_{layout}", (Ref(t),), (copy,))
            self.copies[t, layout] = copy
            self.copies[copy, "nchw" if layout == "nhwc" else "nhwc"] = t
        return self.copies[t, layout]

    def shape(self, t: int) -> tuple[int, ...]:
        return self.tensors[t].shape

    def before_or(self, t: int) -> int:
        """What the tensor was made from; itself where that is not known."""
        return self.before.get(t, t)


def bias_name(w: Lowering, weight: int) -> str:
    return f"d_{identifier(w.tensors[weight].name.removesuffix('weight') + 'bias')}"


def pair(value: Value, default: int | None = None) -> tuple[int, int]:
    """A pair of numbers from one, from two, or from none, where a default is known."""
    numbers = (value,) if isinstance(value, int) else value
    if not isinstance(numbers, tuple) or not all(isinstance(n, int) for n in numbers) or len(numbers) > 2:
        raise InternalError(f"expected one or two numbers, received {value!r}")
    if not numbers and default is not None:
        return default, default
    first, last = numbers[0], numbers[-1]
    assert isinstance(first, int)
    assert isinstance(last, int)
    return first, last


def as_float(value: Value) -> float:
    assert isinstance(value, int | float)
    return float(value)


def identifier(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in name)


def same_in_memory(shape: Sequence[int]) -> bool:
    """[B, C, H, W] and [B, H, W, C] are the same numbers in the same order."""
    return shape[1] == 1 or shape[2] * shape[3] == 1


_WORDS = {
    Transposed: "a matrix transposed", Expanded: "one number shown many times", Mask: "a dropout's mask",
    LogSoftmax: "the logarithm of a softmax", LossGradient: "the gradient of a loss", One: "the constant one",
    Nothing: "memory without content",
}  # fmt: skip
