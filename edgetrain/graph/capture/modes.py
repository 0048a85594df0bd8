"""Training flags and settings of PyTorch, put back: whatever is done to a model meanwhile, and whatever ends it.

with evaluating(model): …                          in evaluation mode
with flags_kept(model): …                          in any mode
surely(work, Surroundings(model).put_back)         every setting that capturing and measuring change on the way
"""

from __future__ import annotations

import logging
import random as python_random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils import _python_dispatch as dispatch

from edgetrain.native import arena

_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")
# What PyTorch notes of the modes that are entered, beside their stack.
_NOTED = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


@contextmanager
def flags_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards each module has the training flag that it had; they need not be all the same."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside."""
    with flags_kept(model):
        model.eval()
        yield


class Surroundings:
    """What a piece of work finds: training flags, random generators, settings of PyTorch, modes and hooks.

    Each context manager that changes one of them puts it back itself; but Ctrl-C may come in the middle of that.
    `put_back` may be called again where something interrupted it.
    """

    def __init__(self, model: nn.Module | None = None, *, random: bool = True) -> None:
        self._flags = [(module, module.training) for module in model.modules()] if model is not None else []
        self._random = _generators() if random else None
        self._set = torch.is_grad_enabled(), torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
        self._nnpack, self._lifts = torch._C._get_nnpack_enabled(), torch._C._only_lift_cpu_tensors()
        self._scripts = torch._C._jit_get_num_profiled_runs()  # type: ignore[attr-defined]
        self._autocast = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
        self._hooks = {name: dict(getattr(nn.modules.module, name)) for name in _HOOKS}
        self._filters = list(_log().filters)
        self._dispatch = dispatch._get_current_dispatch_mode_stack()
        self._functions = _get_current_function_mode_stack()
        self._noted = {name: getattr(dispatch, name) for name in _NOTED if hasattr(dispatch, name)}
        self._watches = arena.watching()

    def put_back(self) -> None:
        self._put_back_modes()
        if not self._watches:
            arena.end_watch()
        for module, flag in self._flags:
            module.training = flag
        for name, before in self._hooks.items():
            hooks = getattr(nn.modules.module, name)
            for key in [key for key in hooks if key not in before]:
                hooks.pop(key, None)
        _log().filters[:] = self._filters
        grad, mkldnn, cudnn = self._set
        torch._C._set_grad_enabled(grad)
        torch._C._set_mkldnn_enabled(mkldnn)
        torch._C._set_cudnn_enabled(cudnn)
        torch._C._set_nnpack_enabled(self._nnpack)
        torch._C._jit_set_num_profiled_runs(self._scripts)
        for device, enabled in self._autocast.items():
            torch.set_autocast_enabled(device, enabled)
        if self._random is not None:
            _set_generators(self._random)

    def _put_back_modes(self) -> None:
        if [*map(id, dispatch._get_current_dispatch_mode_stack())] != [*map(id, self._dispatch)]:
            while torch._C._len_torch_dispatch_stack():
                dispatch._pop_mode()
            for mode in self._dispatch:
                dispatch._push_mode(mode)
        if [*map(id, _get_current_function_mode_stack())] != [*map(id, self._functions)]:
            while torch._C._len_torch_function_stack():
                _pop_function_mode()
            for function_mode in self._functions:
                _push_function_mode(function_mode)
        for name, value in self._noted.items():
            setattr(dispatch, name, value)
        torch._C._set_only_lift_cpu_tensors(self._lifts)


def _log() -> logging.Logger:
    return logging.getLogger(FakeTensorMode.__module__)


def _generators() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return python_random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state(), cuda


def _set_generators(states: tuple[Any, ...]) -> None:
    python, numpy, cpu, cuda = states
    python_random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


@contextmanager
def without_fused_recurrence(model: nn.Module) -> Iterator[None]:
    """The recurrent layers of oneDNN and cuDNN hide a workspace whose size only a run can tell; their parts do not.

    NNPACK, which the choice of a convolution falls to from a batch of 16 on, must not be what takes its place: it
    makes contiguous results only, where oneDNN and the plain kernels keep images channels-last.
    """
    enabled, enabled_cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        torch._C._set_cudnn_enabled(False)
    try:
        with torch.backends.nnpack.flags(enabled=False):
            yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)
        torch._C._set_cudnn_enabled(enabled_cudnn)


@contextmanager
def empty_autocast_cache() -> Iterator[None]:
    """Inside an autocast block of the caller's, neither we may meet weights that it cast before nor it those we did."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
