"""What a kernel would give, told without running it: torch's fake kernels, put right where the real ones differ.

In:  a kernel and its arguments as fake tensors.
Out: fake results of the shape, type and strides that the CPU's kernel gives.

A layout that is foretold wrongly makes a wrong graph: the calls that follow depend on it. A `contiguous` is left out
because there seems to be nothing to do, and a kernel that counts on it (the backward of a group norm) gives wrong
numbers without a word. So each difference known is listed here; a compiled step checks every result the first time that
it runs; and what it finds is learnt, so that the next capture is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten

Layout = tuple[tuple[int, ...], tuple[int, ...], str]  # shape, strides, type
# Kind and layouts of the arguments → output → the strides that the kernel was seen to give it.
_learnt: dict[tuple[str, tuple[Layout, ...]], dict[int, tuple[int, ...]]] = {}
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


def result_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _known(func, args, kwargs)
    if _learnt and (seen := _learnt.get((str(func), _layouts((*args, *kwargs.values()))))):
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        for position, stride in seen.items():
            results[position] = _with_stride(results[position], stride)
        return results[0] if isinstance(result, torch.Tensor) else tuple(results)
    return result


def learn(kind: str, inputs: tuple[Layout, ...], outputs: Mapping[int, tuple[int, ...]]) -> bool:
    """Note the strides that a kernel gave to its outputs. False if that was known: noting it again is no help."""
    known = _learnt.setdefault((kind, tuple(dict.fromkeys(inputs))), {})
    new = any(known.get(position) != stride for position, stride in outputs.items())
    known.update(outputs)
    while len(_learnt) > MAX_LEARNT:
        _learnt.pop(next(iter(_learnt)))
    return new


def learnt() -> str:
    """All that was learnt, as one text: a graph depends on it."""
    return repr(sorted((key, sorted(strides.items())) for key, strides in _learnt.items()))


def _layouts(value: Any) -> tuple[Layout, ...]:
    """The layouts of the tensors among the arguments, each once, in order."""
    return tuple(
        dict.fromkeys((tuple(t.shape), t.stride(), str(t.dtype).removeprefix("torch.")) for t in _tensors(value))
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _with_stride(like: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(like.shape, stride, dtype=like.dtype, device=like.device)


def _known(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in _AS_PRODUCT:
        return aten.mul.Tensor(*(a for a in args if isinstance(a, torch.Tensor)))
    result = func(*args, **kwargs)
    if func in _CONTIGUOUS and args[0].device.type == "cpu":
        return _each(result, lambda t: torch.empty_like(t, memory_format=torch.contiguous_format))
    if func in _NORMS:
        kept = next((p.dtype for p in args[_NORMS[func]] if p is not None), args[0].dtype)
        return result[0], *(torch.empty_like(t, dtype=kept) for t in result[1:])
    if func in _AS_INPUT:
        return torch.empty_like(args[1], memory_format=suggest_memory_format(args[1])), *result[1:]
    return result


def _each(result: Any, change: Any) -> Any:
    return change(result) if isinstance(result, torch.Tensor) else tuple(change(t) for t in result)


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Laid out channels-last, and not contiguous at the same time."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
