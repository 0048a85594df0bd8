"""Calls that plain training needs and that do nothing around a step of ours: `optimizer.step()`, `loss.backward()`.

A step has updated the parameters and leaves no gradients behind, so an optimizer that is called right after it would
do nothing in silence. A hook of torch.optim, for all optimizers, warns once. Gradients that are there before a step
have no part in it, where plain training would add to them: that is warned of once too.
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from edgetrain.graph.capture import optimizers

_stepped: WeakSet[torch.optim.Optimizer] = WeakSet()
_warned: WeakSet[torch.optim.Optimizer] = WeakSet()
_dropped: WeakKeyDictionary[torch.optim.Optimizer, list[torch.Tensor]] = WeakKeyDictionary()
_warned_of_dropped: WeakSet[torch.optim.Optimizer] = WeakSet()


class NothingToDoWarning(UserWarning):
    """A call that does nothing, because the step has done it."""


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """A step has updated the parameters of this optimizer."""
    if not optimizers.own_hooks:
        optimizers.own_hooks.append(_before_step)
        register_optimizer_step_pre_hook(_before_step)
    _stepped.add(optimizer)
    there = _dropped.pop(optimizer, None) if _dropped else None
    if there and optimizer not in _warned_of_dropped and any(map(_is_some, there)):
        _warned_of_dropped.add(optimizer)
        warnings.warn(
            "there were gradients in .grad of the parameters before step(...): it computes its own and has dropped "
            "those, where plain training would have added to them. Leave loss.backward() out; micro_batches= of "
            "et.prepare adds the gradients of parts of a batch up.",
            NothingToDoWarning, stacklevel=4,
        )  # fmt: skip


def note_dropped(optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    """A step has dropped gradients that were there before it; `stepped` warns of them."""
    if optimizer not in _warned_of_dropped:
        _dropped[optimizer] = gradients


def _is_some(gradient: torch.Tensor) -> bool:
    """Adding to zeros, as zero_grad(set_to_none=False) leaves them, makes no difference."""
    return gradient.layout is not torch.strided or bool(gradient.detach().any())


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _stepped or optimizer in _warned or args[1:] or kwargs:  # a closure computes gradients first
        return
    if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        _warned.add(optimizer)
        warnings.warn(
            "optimizer.step() does nothing here: there are no gradients, since step(...) has updated the parameters "
            "already. Leave optimizer.step(), loss.backward() and zero_grad() out; clip_norm= of et.prepare clips the "
            "gradients, and step.gradients(...) gives them.",
            NothingToDoWarning, stacklevel=3,
        )  # fmt: skip
