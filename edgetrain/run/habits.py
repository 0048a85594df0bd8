"""Calls that plain training needs and that do nothing after a step of ours: `optimizer.step()`.

A step has updated the parameters and leaves no gradients behind, so an optimizer that is called right after it would
do nothing in silence. A hook of torch.optim, for all optimizers, warns once.
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from edgetrain.graph import optimizers

_stepped: WeakSet[torch.optim.Optimizer] = WeakSet()
_warned: WeakSet[torch.optim.Optimizer] = WeakSet()


class NothingToDoWarning(UserWarning):
    """A call that does nothing, because the step has done it."""


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """A step has updated the parameters of this optimizer."""
    if not optimizers.own_hooks:
        optimizers.own_hooks.append(_before_step)
        register_optimizer_step_pre_hook(_before_step)
    _stepped.add(optimizer)


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
