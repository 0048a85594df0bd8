"""C kernels of an op: what `Entry.c` holds, and what the call of one is written with.

In:  an op of a lowered graph (docs/firmware.md) and its tensors as C names. Out: C calls, one for an op (a concat has
     one for each of its parts), and the source files that they need.

The kernels are those of float32. The int8 kernels that come stand beside them, under names with their type
(`conv2d_forward_s8`), in files of their own.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgetrain.graph.ir import Graph, Op, Ref, Value


@dataclass(frozen=True, slots=True)
class CSource:
    """A file of C, and its header; in a folder `fast` beside it may be the same functions for vectors and threads.

    file:       its name, without ending.
    needs:      other files of the folder that it includes beside its own header, or calls.
    fast_needs: the same for the vectorised file, beside parallel and vector.
    folder:     None: that of edgetrain's own kernels, where all others find what they need, too.
    """

    file: str
    needs: tuple[str, ...] = ()
    fast_needs: tuple[str, ...] = ()
    folder: str | Path | None = None


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

    def batched(self, n: int) -> int | str:
        return "BATCH" if n == self.batch else n

    def elements(self, t: int) -> str:
        return self.count(self.graph.tensors[t].n_elements)

    def rows(self, t: int) -> tuple[str, int]:
        """A tensor as rows of its channels."""
        C = self.shape(t)[1]
        return self.count(self.graph.tensors[t].n_elements // C), C

    def pointer(self, value: Value) -> str:
        return self.name(value.tensor) if isinstance(value, Ref) else "NULL"

    def results(self, op: Op) -> list[str]:
        """All that the op makes; NULL for what nothing reads."""
        return ["NULL" if t is None else self.name(t) for t in op.outputs]

    def stream(self, op: Op) -> int:
        """A number of its own for an op that draws random numbers, the same each time that it runs in a step: with
        `model_seed` and `step_number` it says which numbers these are."""
        return zlib.crc32(op.name.encode()) & 0x7FFFFFFF

    def pointers(self, *values: Value) -> list[str]:
        return [self.pointer(value) for value in values]


Call = Callable[[Scene, Op], list[str]]
Features = Callable[[Graph, Op], Sequence[float]]


@dataclass(frozen=True)
class CKernel:
    """How firmware runs a kind of op.

    call:     the lines of C that do it.
    features: what its instructions grow with, beside the call itself (firmware/instructions.py fits them).
    bends:    the numbers between which a result is what comes in; its gradient jumps there, and a debug build tells
              which way each number went.
    chooses:  its second result is the place that it chose for each number of the first; that is told too.
    labels:   the tensor of class labels that it reads, how many, and below which number each lies.
    """

    source: CSource
    call: Call
    features: Features | None = None
    bends: Callable[[Op], tuple[Value, Value]] | None = None
    chooses: bool = False
    labels: Callable[[Graph, Op], tuple[int, int, int]] | None = None


def function(op: Op, prefix: str | None = None) -> str:
    """edgetrain.conv2d.forward → conv2d_forward; with another prefix, dense_forward. Of an op from outside
    library.softsign.default → library_softsign."""
    library, name, what = op.kind.split(".")
    if library != "edgetrain":
        return f"{library}_{name}".removesuffix("_") + ("" if what == "default" else f"_{what}")
    return f"{prefix or name}_{what}"


def called(name: str, arguments: Sequence[str | int]) -> list[str]:
    return [f"{name}({', '.join(map(str, arguments))});"]


def elementwise_call(s: Scene, op: Op) -> list[str]:
    """The result, the tensors that it is computed from, how many numbers, and the op's own numbers."""
    tensors = [s.name(op.creates[0]), *(s.name(ref.tensor) for ref in op.args if isinstance(ref, Ref))]
    own = [number(value) for value in op.args if not isinstance(value, Ref)]
    return called(function(op), [*tensors, s.elements(op.creates[0]), *own])


def number(value: Value) -> str:
    """A float as C writes it; the same bits when it is read."""
    assert isinstance(value, int | float)
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    if math.isnan(value):
        return "NAN"
    text = str(np.float32(value))
    return (text if "." in text or "e" in text else f"{text}.0") + "f"


def ints(values: Sequence[Value]) -> list[int]:
    numbers = [value for value in values if isinstance(value, int)]
    assert len(numbers) == len(values)
    return numbers


def identifier(name: str) -> str:
    """A name of a graph as a name in C."""
    text = "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
    return f"m_{text}" if not text or text[0].isdigit() or text in _RESERVED else text


_WORDS = """
auto break case char const continue default do double else enum extern float for goto if inline int long register
restrict return short signed sizeof static struct switch typedef union unsigned void volatile while main arena weights
settings step_number train_step predict model_init model_tensors BATCH NULL memcpy memset memcmp INFINITY NAN bool
complex asm typeof model_seed model_weights model_inputs model_arena show_tensor show_sides show_places labels_in_range
abs labs div round index signal exit abort
"""
_RESERVED = {*_WORDS.split(), *(name for name in dir(math) if name[0] != "_")}
