"""What hooks of pruning, weight and spectral norm compute before a forward pass: plain PyTorch leaves it in the module.

In:  a walk over the model and the loss. Out: for each such attribute a tensor of its own, which the step writes.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from edgetrain.graph.capture.made import computed_by_hooks
from edgetrain.graph.capture.objects import is_a
from edgetrain.graph.capture.reach import Reach, reach_of

Computed = tuple[nn.Module, str, torch.Tensor]  # module, attribute, the tensor that it is to be after a step
_own_tensors: WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]] = WeakKeyDictionary()


def reach_with_computed(*roots: tuple[Any, str]) -> tuple[Reach, dict[str, Computed]]:
    """And what hooks compute, by its path: each in a tensor of its own, which is the same in all captures."""
    reach, computed = reach_of(*roots), dict[str, Computed]()
    for path, module in reach.modules.items():
        for key in computed_by_hooks(module):
            value: Any = vars(module).get(key)
            if is_a(value, torch.Tensor):
                computed[f"{path}.{key}"] = module, key, _own_tensor(module, key, value)
    own = [(tensor, path) for path, (_, _, tensor) in computed.items()]
    return (reach_of(*own, *roots) if own else reach), computed


def _own_tensor(module: nn.Module, key: str, like: torch.Tensor) -> torch.Tensor:
    """Of the type that it is computed in: the parameters may have been moved to another since."""
    dtype = next((p.dtype for p in module.parameters(recurse=False)), like.dtype)
    tensors = _own_tensors.setdefault(module, {})
    own = tensors.get(key)
    if own is None or (own.shape, own.stride(), own.dtype) != (like.shape, like.stride(), dtype):
        own = tensors[key] = like.detach().to(dtype, copy=True)
    return own
