"""What a kernel would give, told without running it: torch's fake kernels, put right where the real ones differ.

In:  a kernel and its arguments as fake tensors.
Out: fake results of the shape, type and strides that the CPU's kernel gives.

A layout that is foretold wrongly makes a wrong graph: the calls that follow depend on it. A `contiguous` is left out
because there seems to be nothing to do, and a kernel that counts on it (the backward of a group norm) gives wrong
numbers without a word. So each difference known is listed here; a compiled step checks every result the first time that
it runs; and what it finds is learnt, so that the next capture is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from edgetrain.dtypes import dtype_name, dtype_of
from edgetrain.graph import ir

aten = torch.ops.aten

Layout = tuple[tuple[int, ...], tuple[int, ...], str, int]  # shape, strides, type, bytes of the storage
# A call (`key_of`) → output → what the kernel was seen to give there.
_learnt: dict[str, dict[int, Layout]] = {}
MAX_LEARNT = 4096  # calls; the oldest is dropped, and learnt again where it comes again

# Element by element, and laid out as the first argument (as any product is); the fake follows the second.
_AS_PRODUCT = (
    aten.hardtanh_backward.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.softplus_backward.default,
    aten.elu_backward.default,
)
# Contiguous on a CPU, whatever comes in.
_CONTIGUOUS = (
    aten.log_sigmoid_forward.default,
    aten.glu_backward.default,
    aten.mse_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
)
# The gradient of the input is laid out as the input is, whatever the gradient that comes in.
_AS_INPUT = (aten.native_batch_norm_backward.default, aten.native_group_norm_backward.default)
# Norms keep their statistics in the type of their parameters where that is not the type of the input (autocast); where
# those parameters stand among the arguments.
_NORMS = {
    aten.native_batch_norm.default: slice(1, 5),
    aten.native_layer_norm.default: slice(2, 4),
    aten.native_group_norm.default: slice(1, 3),
}
# These take tensors of one type alone, on a CPU, where their fakes take any.
_OF_ONE_TYPE = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addbmm.default, aten.mv.default,
    aten.addmv.default, aten.dot.default, aten.vdot.default, aten.convolution.default, aten._prelu_kernel.default,
    aten.rrelu_with_noise.default, aten.binary_cross_entropy.default, aten._cdist_forward.default,
    aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, aten.linalg_cross.default, aten.complex.default,
    aten.heaviside.default,
}  # fmt: skip


class MixedTypes(RuntimeError):
    """What the kernel itself would raise."""

    def __init__(self, func: Any, types: set[torch.dtype]) -> None:
        self.types = types
        names = " and ".join(sorted(map(str, types)))
        super().__init__(f"{func} takes tensors of one dtype, and gets {names}")


def result_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _known(func, args, kwargs)
    if _learnt and (seen := _learnt.get(key_of(str(func), args, kwargs))):
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        for position, layout in seen.items():
            results[position] = _laid_out(results[position], layout)
        return results[0] if isinstance(result, torch.Tensor) else tuple(results)
    return result


def key_of(kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The same for calls that a kernel answers with the same layouts: shapes, strides and types of the tensors, and all
    other arguments. They are those of a recording or, with `Tensor` in the place of `Ref`, those of a graph."""
    return repr((kind, _text(args), sorted((name, _text(value)) for name, value in kwargs.items())))


def layout_of(real: torch.Tensor) -> Layout:
    """How a tensor that a kernel gave lies in memory."""
    name = dtype_name(real.dtype)
    return tuple(real.shape), real.stride(), name, real.untyped_storage().nbytes()


def learn(key: str, outputs: Mapping[int, Layout]) -> bool:
    """Note what a kernel gave. False if that is no help: it was known, or the same call gave something else before."""
    known = _learnt.setdefault(key, {})
    new = {position: layout for position, layout in outputs.items() if position not in known}
    known.update(new)
    while len(_learnt) > MAX_LEARNT:
        _learnt.pop(next(iter(_learnt)))
    return bool(new) and all(known[position] == layout for position, layout in outputs.items())


def learnt() -> str:
    """All that was learnt, as one text: a graph depends on it."""
    return repr(sorted((key, sorted(layouts.items())) for key, layouts in _learnt.items()))


def _text(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), dtype_name(value.dtype)
    if isinstance(value, ir.Tensor):
        return value.shape, value.stride, value.dtype
    if isinstance(value, ir.Atom):
        return value.name
    if isinstance(value, list | tuple):
        # Truth values alone say which results are asked for; each of them is laid out alike whatever the others are.
        return () if value and all(isinstance(item, bool) for item in value) else tuple(_text(item) for item in value)
    return value if isinstance(value, bool | int | str | None) else str(value).removeprefix("torch.")


def _laid_out(like: torch.Tensor, layout: Layout) -> torch.Tensor:
    shape, stride, name, n_bytes = layout
    dtype = dtype_of(name)
    room = torch.empty(-(-n_bytes // dtype.itemsize), dtype=dtype, device=like.device)
    return room.as_strided(shape, stride)


def _known(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten._ctc_loss.default:
        return _ctc_loss(args[0], args[1], (args[2], args[3]))
    if func in _OF_ONE_TYPE and args[0].device.type == "cpu":
        types = {t.dtype for t in args if isinstance(t, torch.Tensor)}
        if len(types) > 1:
            raise MixedTypes(func, types)
    if func in _AS_PRODUCT:
        return aten.mul.Tensor(*(a for a in args if isinstance(a, torch.Tensor)))
    result = func(*args, **kwargs)
    if func in _CONTIGUOUS and args[0].device.type == "cpu":
        return _each(result, lambda t: torch.empty_like(t, memory_format=torch.contiguous_format))
    if func is aten._embedding_bag.default and args[0].device.type == "cpu":
        return _bags(result, args)
    if func in _NORMS:
        kept = next((p.dtype for p in args[_NORMS[func]] if p is not None), args[0].dtype)
        return result[0], *(torch.empty_like(t, dtype=kept) for t in result[1:])
    if func in _AS_INPUT:
        return torch.empty_like(args[1], memory_format=suggest_memory_format(args[1])), *result[1:]
    return result


def _ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, lengths: tuple[Sequence[int], Sequence[int]]) -> Any:
    """The loss of each sample, and the table that its backward reads; as the lengths are numbers, its shape is known.

    The backward checks nothing, so what the forward would refuse is refused here.
    """
    steps, samples = log_probs.shape[:2]
    longest = max(lengths[1], default=0)
    room = len(targets) >= sum(lengths[1]) if targets.dim() == 1 else targets.shape[1] >= longest
    if {len(lengths[0]), len(lengths[1])} != {samples} or not room or max(lengths[0], default=0) > steps:
        raise ValueError(f"ctc_loss: the lengths do not fit {samples} samples of {steps} steps and their targets")
    return log_probs.new_empty(samples), log_probs.new_empty(samples, steps, 2 * longest + 1)


def _bags(result: Any, args: tuple[Any, ...]) -> Any:
    """What an embedding bag on a CPU keeps for its backward: the bag of each index, with room for one more, or nothing
    where a sum is computed at once; and the sizes of the bags, with room for the last offset."""
    given = dict(zip((a.name for a in aten._embedding_bag.default._schema.arguments), args, strict=False))
    weight, indices, offsets, scales = *args[:3], given.get("per_sample_weights")
    at_once = given.get("mode", 0) == 0 and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
    at_once = at_once and given.get("padding_idx", -1) < 0 and weight.stride(1) == 1
    at_once = at_once and (scales is None or scales.stride(0) == 1)
    bag_of = result[1].new_empty(0 if at_once else indices.numel() + 1)
    sizes = result[2].new_empty(offsets.numel())
    return result[0], bag_of[: indices.numel()], sizes[: result[2].numel()], result[3]


def _each(result: Any, change: Any) -> Any:
    return change(result) if isinstance(result, torch.Tensor) else tuple(change(t) for t in result)


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Laid out channels-last, and not contiguous at the same time."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
