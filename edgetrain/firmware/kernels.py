"""Which kernel runs an op, and how it is called.

In:  an op of a lowered graph and its tensors as C names. Out: C calls, one for an op (a concat has one for each of its
     parts), and the source files that they need.

The table is by kind and by type of the numbers: the int8 kernels that come stand beside the float32 ones, under names
with their type (`conv2d_forward_s8`), in files of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgetrain.errors import InternalError
from edgetrain.graph.ir import Graph, Op, Ref, Value

FOLDER = Path(__file__).parent / "kernels"
_GEMM = ("gemm", "microkernel", "gemm_nt", "gemm_tn", "gemm_nn")
# What a file includes beside its own header, or calls.
_NEEDS = {
    "sigmoid": ("functions",), "tanh": ("functions",), "softmax_cross_entropy": ("functions",),
    "max_pool2d": ("pool2d",), "avg_pool2d": ("pool2d",), "conv2d": _GEMM, "dense": _GEMM,
    "depthwise": ("conv2d", *_GEMM),
}  # fmt: skip
_HEADERS_ONLY = ("pool2d", "gemm", "kernel", "microkernel")
_WITHOUT_HEADER = ("gemm_nt", "gemm_tn", "gemm_nn")


@dataclass
class Scene:
    """What a call is written with.

    name:   tensor → its C name. batch: the number of samples, which calls name BATCH.
    fresh:  the optimizer has no state yet; the first step starts it.
    shapes: C definitions of shape structs, by their text; each is declared once and shared by all ops that have it.
    """

    graph: Graph
    name: Callable[[int], str]
    batch: int
    fresh: bool = True
    shapes: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def declare(self, struct: str, hint: str, fields: Mapping[str, int | str]) -> str:
        """The name of a shape struct with these numbers."""
        text = f"{struct} {{{', '.join(f'.{key} = {value}' for key, value in fields.items())}}}"
        if text not in self.shapes:
            name, count = hint, 1
            while name in self.taken:
                count += 1
                name = f"{hint}_{count}"
            self.taken.add(name)
            self.shapes[text] = name
        return self.shapes[text]

    def shape(self, t: int) -> tuple[int, ...]:
        return self.graph.tensors[t].shape

    def count(self, n: int) -> str:
        """A number of elements, as a product with BATCH where it is one."""
        if n == self.batch:
            return "BATCH"
        return f"BATCH * {n // self.batch}" if n % self.batch == 0 and n > self.batch else str(n)

    def elements(self, t: int) -> str:
        return self.count(self.graph.tensors[t].n_elements)

    def pointer(self, value: Value) -> str:
        return self.name(value.tensor) if isinstance(value, Ref) else "NULL"


Call = Callable[[Scene, Op], list[str]]


@dataclass(frozen=True)
class Kernel:
    """file: of its source, without the ending."""

    file: str
    call: Call


def kernel_of(op: Op, dtype: str = "float32") -> Kernel:
    found = _TABLE.get((op.kind, dtype))
    if found is None:
        raise InternalError(f"{op.name} of kind {op.kind} has no {dtype} kernel, and lowering let it pass")
    return found


def files_of(kernels: Sequence[str]) -> list[str]:
    """The files that these kernels are built from: sources first, then headers; names with their endings."""
    parts = {part for name in kernels for part in (name, *_NEEDS.get(name, ()))}
    sources = sorted(f"{part}.c" for part in parts if part not in _HEADERS_ONLY)
    return sources + sorted({f"{part}.h" for part in {*parts, "kernel"} - {*_WITHOUT_HEADER}})


def number(value: Value) -> str:
    """A float as C writes it; the same bits when it is read."""
    assert isinstance(value, int | float)
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    if math.isnan(value):
        return "NAN"
    text = str(np.float32(value))
    return (text if "." in text or "e" in text else f"{text}.0") + "f"


def double(value: float) -> str:
    return repr(float(value))


def identifier(name: str) -> str:
    """A name of a graph as a name in C."""
    found = "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
    return f"m_{found}" if not found or found[0].isdigit() or found in _RESERVED else found


_RESERVED = {
    "auto", "break", "case", "char", "const", "continue", "default", "do", "double", "else", "enum", "extern", "float",
    "for", "goto", "if", "inline", "int", "long", "register", "restrict", "return", "short", "signed", "sizeof",
    "static", "struct", "switch", "typedef", "union", "unsigned", "void", "volatile", "while", "main", "arena",
    "weights", "settings", "step_number", "train_step", "predict", "model_init", "model_tensors", "BATCH", "NULL",
    "memcpy", "memset", "memcmp", "INFINITY", "NAN", "bool", "complex", "asm", "typeof", "model_seed",
    "model_weights", "model_inputs", "model_arena", "show_tensor", "show_sides", "show_places",
    "labels_in_range",
    *(name for name in dir(math) if name[0] != "_"), "abs", "labs", "div", "round", "index", "signal", "exit", "abort",
}  # fmt: skip

_TABLE: dict[tuple[str, str], Kernel] = {}


def _kernel(kind: str, file: str | None = None) -> Callable[[Call], Call]:
    def keep(call: Call) -> Call:
        _TABLE[f"edgetrain.{kind}", "float32"] = Kernel(file or kind.partition(".")[0], call)
        return call

    return keep


def _ints(values: Sequence[Value]) -> list[int]:
    found = [value for value in values if isinstance(value, int)]
    assert len(found) == len(values)
    return found


def _batched(s: Scene, n: int) -> int | str:
    return "BATCH" if n == s.batch else n


# ---- convolutions and dense layers


@dataclass(frozen=True)
class _Convolution:
    """The tensors of a convolution, and where in the arguments of its op the numbers of its window begin."""

    x: int
    y: int
    weight: int
    window: tuple[Value, ...]
    names: tuple[str, ...]  # as the C function takes them


def _convolution(s: Scene, op: Op) -> _Convolution:
    made = op.creates[0]
    if op.kind.endswith(".forward"):
        x, weight = op.reads[:2]
        return _Convolution(x, made, weight, op.args[3:], (s.name(made), *map(s.pointer, op.args[:3])))
    names = (s.name(made), *map(s.name, op.reads))
    if op.kind.endswith(".backward_weight"):
        dy, x = op.reads
        return _Convolution(x, dy, made, op.args[2:], names)
    dy, weight = op.reads
    return _Convolution(made, dy, weight, op.args[2:], names)


def _called(op: Op, names: Sequence[str], *rest: str) -> list[str]:
    """edgetrain.conv2d.forward → conv2d_forward(…);"""
    return [f"{'_'.join(op.kind.split('.')[1:])}({', '.join((*names, *rest))});"]


def _conv2d(s: Scene, op: Op) -> list[str]:
    conv = _convolution(s, op)
    (B, C, H, W), (K, _, R, S), (_, _, P, Q) = s.shape(conv.x), s.shape(conv.weight), s.shape(conv.y)
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups = _ints(conv.window)
    fields: dict[str, int | str] = {
        "B": _batched(s, B), "H": H, "W": W, "C": C, "P": P, "Q": Q, "K": K, "R": R, "S": S, "groups": groups,
        "stride_h": stride_h, "stride_w": stride_w, "pad_h": pad_h, "pad_w": pad_w,
        "dilation_h": dilation_h, "dilation_w": dilation_w,
    }  # fmt: skip
    shape = s.declare("conv2d_shape", f"{identifier(op.module or 'conv2d')}_shape", fields)
    return _called(op, conv.names, f"&{shape}")


def _depthwise3x3(s: Scene, op: Op) -> list[str]:
    conv = _convolution(s, op)
    (B, C, H, W), (_, _, P, Q) = s.shape(conv.x), s.shape(conv.y)
    stride, _, pad_h, pad_w, *_ = _ints(conv.window)
    fields: dict[str, int | str] = {
        "B": _batched(s, B), "H": H, "W": W, "C": C, "P": P, "Q": Q, "stride": stride, "pad_h": pad_h, "pad_w": pad_w,
    }  # fmt: skip
    shape = s.declare("depthwise3x3_shape", f"{identifier(op.module or 'depthwise')}_shape", fields)
    return _called(op, conv.names, f"&{shape}")


def _pointwise(s: Scene, op: Op) -> list[str]:
    """A dense layer, of which each place of each image is a sample."""
    conv = _convolution(s, op)
    (B, C, H, W), K = s.shape(conv.x), s.shape(conv.weight)[0]
    function = f"dense_{op.kind.rpartition('.')[2]}"
    return [f"{function}({', '.join(conv.names)}, {s.count(B * H * W)}, {C}, {K});"]


for _pass in ("forward", "backward_weight", "backward_input"):
    _kernel(f"conv2d.{_pass}")(_conv2d)
    _kernel(f"depthwise.{_pass}")(_conv2d)
    _kernel(f"depthwise3x3.{_pass}")(_depthwise3x3)
    _kernel(f"pointwise.{_pass}", "dense")(_pointwise)


def _dense(s: Scene, function: str, names: Sequence[str], B: int, In: int, Out: int) -> list[str]:
    return [f"dense_{function}({', '.join(names)}, {_batched(s, B)}, {In}, {Out});"]


@_kernel("dense.forward")
def _dense_forward(s: Scene, op: Op) -> list[str]:
    names = [s.name(op.creates[0]), *map(s.pointer, op.args)]
    B, In = s.shape(op.reads[0])
    return _dense(s, "forward", names, B, In, s.shape(op.reads[1])[0])


@_kernel("dense.backward_weight")
def _dense_backward_weight(s: Scene, op: Op) -> list[str]:
    dy, x = op.reads
    names = [s.name(op.creates[0]), s.name(dy), s.name(x)]
    B, In = s.shape(x)
    return _dense(s, "backward_weight", names, B, In, s.shape(dy)[1])


@_kernel("dense.backward_input")
def _dense_backward_input(s: Scene, op: Op) -> list[str]:
    dy, weight = op.reads
    names = [s.name(op.creates[0]), s.name(dy), s.name(weight)]
    return _dense(s, "backward_input", names, s.shape(dy)[0], s.shape(weight)[1], s.shape(weight)[0])


def _rows(s: Scene, t: int) -> tuple[str, int]:
    """A tensor as rows of its channels."""
    C = s.shape(t)[1]
    return s.count(s.graph.tensors[t].n_elements // C), C


@_kernel("bias.backward")
def _bias_backward(s: Scene, op: Op) -> list[str]:
    rows, C = _rows(s, op.reads[0])
    return [f"bias_backward({s.name(op.creates[0])}, {s.name(op.reads[0])}, {rows}, {C});"]


# ---- element by element


def _elementwise(kind: str) -> None:
    def call(s: Scene, op: Op) -> list[str]:
        function = kind.replace(".", "_")
        tensors = [s.name(op.creates[0]), *(s.name(ref.tensor) for ref in op.args if isinstance(ref, Ref))]
        limits = [number(value) for value in op.args if not isinstance(value, Ref)]
        return [f"{function}({', '.join([*tensors, s.elements(op.creates[0]), *limits])});"]

    _kernel(kind)(call)


for _name in ("relu", "clamp", "sigmoid", "tanh"):
    _elementwise(f"{_name}.forward")
    _elementwise(f"{_name}.backward")
_elementwise("add.forward")


@_kernel("counter.add")
def _counter_add(s: Scene, op: Op) -> list[str]:
    return [f"counter_add({s.name(op.reads[0])}, {op.args[1]});"]


@_kernel("dropout.mask")
def _dropout_mask(s: Scene, op: Op) -> list[str]:
    keep, which = op.args
    mask = op.creates[0]
    return [f"dropout_mask({s.name(mask)}, {s.elements(mask)}, {number(keep)}, model_seed, step_number, {which});"]


@_kernel("dropout.apply")
def _dropout_apply(s: Scene, op: Op) -> list[str]:
    x, mask = op.reads
    y = op.creates[0]
    return [f"dropout_apply({s.name(y)}, {s.name(x)}, {s.name(mask)}, {s.elements(y)}, {number(op.args[2])});"]


# ---- layouts


def _permute(s: Scene, op: Op) -> list[str]:
    B, C, H, W = s.shape(op.reads[0])
    function = f"permute_{op.kind.rpartition('.')[2]}"
    return [f"{function}({s.name(op.creates[0])}, {s.name(op.reads[0])}, {_batched(s, B)}, {H}, {W}, {C});"]


_kernel("permute.to_nchw")(_permute)
_kernel("permute.to_nhwc")(_permute)


@_kernel("concat.forward")
def _concat_forward(s: Scene, op: Op) -> list[str]:
    y = op.creates[0]
    rows, C = _rows(s, y)
    calls, start = [], 0
    for ref in op.args:
        assert isinstance(ref, Ref)
        width = s.shape(ref.tensor)[1]
        calls.append(f"concat_forward({s.name(y)}, {s.name(ref.tensor)}, {rows}, {C}, {start}, {width});")
        start += width
    return calls


@_kernel("concat.backward")
def _concat_backward(s: Scene, op: Op) -> list[str]:
    rows, C, start, end = _ints(op.args[1:])
    given = f"{s.count(rows)}, {C}, {start}, {end - start}"
    return [f"concat_backward({s.name(op.creates[0])}, {s.name(op.reads[0])}, {given});"]


# ---- pools


def _pool2d(s: Scene, op: Op, x: int, y: int, window: Sequence[Value]) -> str:
    B, C, H, W = s.shape(x)
    _, _, P, Q = s.shape(y)
    R, S, stride_h, stride_w, pad_h, pad_w = _ints(window)
    fields: dict[str, int | str] = {
        "B": _batched(s, B), "H": H, "W": W, "C": C, "P": P, "Q": Q, "R": R, "S": S,
        "stride_h": stride_h, "stride_w": stride_w, "pad_h": pad_h, "pad_w": pad_w,
    }  # fmt: skip
    return s.declare("pool2d_shape", f"{identifier(op.module or 'pool2d')}_shape", fields)


@_kernel("max_pool2d.forward")
def _max_pool_forward(s: Scene, op: Op) -> list[str]:
    (x,), (y, where) = op.reads, op.creates
    shape = _pool2d(s, op, x, y, op.args[1:])
    return [f"max_pool2d_forward({s.name(y)}, {s.name(where)}, {s.name(x)}, &{shape});"]


@_kernel("max_pool2d.backward")
def _max_pool_backward(s: Scene, op: Op) -> list[str]:
    (dy, where), dx = op.reads, op.creates[0]
    shape = _pool2d(s, op, dx, dy, op.args[2:])
    return [f"max_pool2d_backward({s.name(dx)}, {s.name(dy)}, {s.name(where)}, &{shape});"]


@_kernel("avg_pool2d.forward")
def _avg_pool_forward(s: Scene, op: Op) -> list[str]:
    x, y = op.reads[0], op.creates[0]
    shape = _pool2d(s, op, x, y, op.args[1:7])
    return [f"avg_pool2d_forward({s.name(y)}, {s.name(x)}, &{shape}, {int(bool(op.args[7]))});"]


@_kernel("avg_pool2d.backward")
def _avg_pool_backward(s: Scene, op: Op) -> list[str]:
    dy, dx = op.reads[0], op.creates[0]
    shape = _pool2d(s, op, dx, dy, op.args[1:7])
    return [f"avg_pool2d_backward({s.name(dx)}, {s.name(dy)}, &{shape}, {int(bool(op.args[7]))});"]


def _global_avg_pool(s: Scene, op: Op) -> list[str]:
    image = op.reads[0] if op.kind.endswith("forward") else op.creates[0]
    B, C, H, W = s.shape(image)
    function = f"global_avg_pool_{op.kind.rpartition('.')[2]}"
    return [f"{function}({s.name(op.creates[0])}, {s.name(op.reads[0])}, {_batched(s, B)}, {H * W}, {C});"]


_kernel("global_avg_pool.forward")(_global_avg_pool)
_kernel("global_avg_pool.backward")(_global_avg_pool)


# ---- norms


@_kernel("norm.statistics")
def _norm_statistics(s: Scene, op: Op) -> list[str]:
    rows, C = _rows(s, op.reads[0])
    names = [*map(s.name, op.creates), *map(s.pointer, op.args[:3])]
    return [f"norm_statistics({', '.join(names)}, {rows}, {C}, {number(op.args[3])}, {number(op.args[4])});"]


@_kernel("norm.invstd")
def _norm_invstd(s: Scene, op: Op) -> list[str]:
    var, made = op.reads[0], op.creates[0]
    return [f"norm_invstd({s.name(made)}, {s.name(var)}, {s.shape(var)[0]}, {number(op.args[1])});"]


def _channels(s: Scene, args: Sequence[Value]) -> str:
    mean, invstd, weight, bias = map(s.pointer, args[:4])
    return f"(norm_channels){{{mean}, {invstd}, {weight}, {bias}, {number(args[4])}, {number(args[5])}}}"


@_kernel("norm.apply")
def _norm_apply(s: Scene, op: Op) -> list[str]:
    rows, C = _rows(s, op.reads[0])
    return [f"norm_apply({s.name(op.creates[0])}, {s.name(op.reads[0])}, {_channels(s, op.args[1:])}, {rows}, {C});"]


def _norm_backward(s: Scene, op: Op) -> list[str]:
    rows, C = _rows(s, op.reads[0])
    function = f"norm_{op.kind.rpartition('.')[2]}"
    names = ", ".join([*map(s.name, op.creates), *map(s.pointer, op.args[:2])])
    return [f"{function}({names}, {_channels(s, op.args[2:])}, {rows}, {C});"]


_kernel("norm.backward")(_norm_backward)
_kernel("norm.backward_frozen")(_norm_backward)


def _group_norm(s: Scene, op: Op, x: int, groups: Value) -> str:
    B, C, *places = s.shape(x)
    assert isinstance(groups, int)
    fields: dict[str, int | str] = {"B": _batched(s, B), "places": math.prod(places), "C": C, "groups": groups}
    return s.declare("group_norm_shape", f"{identifier(op.module or 'group_norm')}_shape", fields)


@_kernel("group_norm.forward")
def _group_norm_forward(s: Scene, op: Op) -> list[str]:
    shape = _group_norm(s, op, op.reads[0], op.args[3])
    names = [*map(s.name, op.creates), *map(s.pointer, op.args[:3])]
    return [f"group_norm_forward({', '.join(names)}, &{shape}, {number(op.args[4])});"]


@_kernel("group_norm.backward")
def _group_norm_backward(s: Scene, op: Op) -> list[str]:
    shape = _group_norm(s, op, op.reads[1], op.args[5])
    names = [*map(s.name, op.creates), *map(s.pointer, op.args[:5])]
    return [f"group_norm_backward({', '.join(names)}, &{shape});"]


# ---- losses and updates


def _cross_entropy(s: Scene, op: Op) -> list[str]:
    B, C = s.shape(op.reads[0])
    function = f"softmax_cross_entropy_{op.kind.rpartition('.')[2]}"
    names = ", ".join(map(s.name, (*op.creates, *op.reads)))
    return [f"{function}({names}, {_batched(s, B)}, {C}, {int(bool(op.args[2]))});"]


_kernel("softmax_cross_entropy.forward")(_cross_entropy)
_kernel("softmax_cross_entropy.backward")(_cross_entropy)


def _mse(s: Scene, op: Op) -> list[str]:
    function = f"mse_{op.kind.rpartition('.')[2]}"
    names = ", ".join(map(s.name, (*op.creates, *op.reads)))
    return [f"{function}({names}, {s.elements(op.reads[0])}, {int(bool(op.args[2]))});"]


_kernel("mse.forward")(_mse)
_kernel("mse.backward")(_mse)


def _group(op: Op) -> int:
    group = dict(op.kwargs)["group"]
    assert isinstance(group, int)
    return group


@_kernel("sgd.update")
def _sgd(s: Scene, op: Op) -> list[str]:
    w, g = map(s.name, op.reads[:2])
    buffer = s.name(op.reads[2]) if len(op.reads) > 2 else "NULL"
    n, first = s.graph.tensors[op.reads[0]].n_elements, "step_number == 1" if s.fresh else "0"
    return [f"sgd_update({w}, {g}, {buffer}, {n}, &settings[{_group(op)}], {first});"]


def _adam(s: Scene, op: Op) -> list[str]:
    w, g, mean, square, *largest, step = map(s.name, op.reads)
    n = s.graph.tensors[op.reads[0]].n_elements
    names = ", ".join((w, g, mean, square, largest[0] if largest else "NULL", step))
    return [f"adam_update({names}, {n}, &settings[{_group(op)}]);"]


_kernel("adam.update")(_adam)
_kernel("adamw.update", "adam")(_adam)
