"""Global switches of torch that change which kernels a model calls, or that leave nothing to capture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from edgetrain.errors import UserError


def _packs_saved_tensors() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _precisions() -> list[Callable[[], object]]:
    """How exactly products are computed. Where some were set by the newer switches and some by the older, torch
    refuses to tell by the older."""
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    if get is None:
        return [torch.get_float32_matmul_precision]
    return [partial(get, backend, op) for backend in ("mkldnn", "cuda") for op in ("matmul", "conv", "rnn")]


# Asked before each step: C functions themselves where torch.backends would go through a property.
_SWITCHES: tuple[Callable[[], object], ...] = (
    torch.get_default_dtype,
    torch.get_default_device,
    partial(torch.is_autocast_enabled, "cpu"),
    partial(torch.is_autocast_enabled, "cuda"),
    partial(torch.get_autocast_dtype, "cpu"),
    partial(torch.get_autocast_dtype, "cuda"),
    torch.is_inference_mode_enabled,
    torch.is_anomaly_enabled,
    torch.is_anomaly_check_nan_enabled,
    _packs_saved_tensors,
    torch._C._autograd._saved_tensors_hooks_is_enabled,  # type: ignore[attr-defined]
    torch._C._get_deterministic_algorithms,
    torch._C._get_deterministic_algorithms_warn_only,
    torch.get_num_threads,
    torch.get_num_interop_threads,
    torch._C._len_torch_function_stack,
    torch._C._len_torch_dispatch_stack,
    torch._C._get_mkldnn_enabled,
    torch._C._get_cudnn_enabled,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch.backends.mha.get_fastpath_enabled,
    *_precisions(),
)


def function_modes() -> list[object]:
    """The modes that are around the step and see each function of torch that is called: `with torch.device(…)` is one.
    A step is captured again where another one stands there, or its attributes are other."""
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(number) for number in range(count)] if count else []


def settings() -> tuple[object, ...]:
    """All of them, to be compared."""
    return tuple([get() for get in _SWITCHES])


def require_trainable() -> None:
    """Refuse the switches under which no training step can be captured."""
    if torch.is_inference_mode_enabled():
        raise UserError(
            "nothing can be trained within torch.inference_mode()",
            next_step="prepare and call the step outside of it; torch.no_grad() around a step does no harm",
        )
    if _packs_saved_tensors():
        raise UserError(
            "torch.autograd.graph.saved_tensors_hooks (or save_on_cpu) is around the step, and a captured step saves "
            "no tensors for it",
            next_step="leave it out; memory= of et.prepare bounds what a step takes",
        )
    if torch._C._len_torch_dispatch_stack():
        mode = type(torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1)).__name__
        raise UserError(
            f"a dispatch mode ({mode}) is around the step, and what it does to each op would not be captured",
            next_step="prepare and call the step outside of it",
        )
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise UserError(
            "torch.autograd.detect_anomaly() looks at the values of each gradient, and a captured step would not",
            next_step="turn it off; check_finite=True of et.prepare refuses what is not finite",
        )
