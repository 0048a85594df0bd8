"""Gradients scaled down where their norm, all of them taken together, is above a limit.

    norms of the gradients → their norm → scale = min(1, limit / (norm + 1e-6)) → gradient · scale, for each

This is the arithmetic of torch.nn.utils.clip_grad_norm_. No scaled gradient is there before the last gradient is.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgetrain.graph.ir import ITEM_BYTES, Op, Ref, Value
from edgetrain.graph.rewrite.builder import Builder

_REAL = {"complex64": "float32", "complex128": "float64"}


def clip(builder: Builder, gradients: Sequence[int], max_norm: float) -> tuple[list[int], int]:
    """Add the ops. The scaled gradients, and the norm as it was before."""
    types = [_REAL.get(builder.tensors[g].dtype, builder.tensors[g].dtype) for g in gradients]
    dtype, device = _promoted(types), builder.device(gradients[0])

    def kernel(kind: str, *args: Value, shape: tuple[int, ...] = (), dtype: str = dtype, device: str = device) -> int:
        name = builder.numbered(kind.partition(".")[0])
        t = builder.add(name, "gradient", shape, dtype, device=device)
        builder.ops.append(_op(name, kind, args, t))
        return t

    norms = tuple(
        Ref(kernel("linalg_vector_norm.default", Ref(g), dtype=own, device=builder.device(g)))
        for g, own in zip(gradients, types, strict=True)
    )
    stacked = kernel("stack.default", norms, shape=(len(norms),))
    norm = kernel("linalg_vector_norm.default", Ref(stacked))
    above = kernel("add.Tensor", Ref(norm), 1e-6)
    inverse = kernel("reciprocal.default", Ref(above))
    quotient = kernel("mul.Tensor", Ref(inverse), max_norm)
    scale = kernel("clamp.default", Ref(quotient), None, 1.0)
    return [_scaled(builder, g, scale) for g in gradients], norm


def _scaled(builder: Builder, gradient: int, scale: int) -> int:
    name = builder.numbered("mul")
    t = builder.add_like(gradient, name, "gradient")
    builder.ops.append(_op(name, "mul.Tensor", (Ref(gradient), Ref(scale)), t))
    return t


def _op(name: str, kind: str, args: tuple[Value, ...], result: int) -> Op:
    return Op(name, f"aten.{kind}", args, (), (result,), "backward")


def _promoted(types: Sequence[str]) -> str:
    """The type of all of them together, as torch promotes real types."""
    if len(set(types)) > 1 and max(ITEM_BYTES[dtype] for dtype in types) < ITEM_BYTES["float32"]:
        return "float32"  # float16 and bfloat16
    return max(types, key=lambda dtype: ITEM_BYTES[dtype])
