"""Global switches of torch that change which kernels a model calls."""

from __future__ import annotations

import torch


def settings() -> tuple[object, ...]:
    """All of them, to be compared."""
    backends = torch.backends
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        torch.get_float32_matmul_precision(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),  # type: ignore[attr-defined]
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        backends.mkldnn.enabled,
        backends.cudnn.enabled,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.mha.get_fastpath_enabled(),
    )
