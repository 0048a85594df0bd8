"""The settings of an optimizer: which of them an update can be made with, and what state they ask for.

In:  a parameter group of `torch.optim`. Out: a `UserError` for settings that no update can be made with; the tensors of
     state beside a parameter.
"""

from __future__ import annotations

from typing import Any

import torch

from edgetrain.errors import UserError
from edgetrain.ranges import Range, shown

_ANY = Range(-1e30, 1e30, whole=False)
_NOT_NEGATIVE = Range(0, 1e30, whole=False)
_SETTINGS: dict[str, dict[str, Range]] = {
    "sgd": {"lr": _NOT_NEGATIVE, "momentum": _NOT_NEGATIVE, "dampening": _ANY, "weight_decay": _NOT_NEGATIVE},
    "adam": {"lr": _NOT_NEGATIVE, "eps": _NOT_NEGATIVE, "weight_decay": _NOT_NEGATIVE},
}
_SETTINGS["adamw"] = _SETTINGS["adam"]
_FLAGS = {"sgd": ("maximize", "nesterov"), "adam": ("maximize", "amsgrad"), "adamw": ("maximize", "amsgrad")}


def check_settings(kind: str, number: int, group: dict[str, Any]) -> None:
    """Refuse settings of a parameter group that no update can be made with; they may have changed since the last."""
    for name in (*_SETTINGS[kind], *_FLAGS[kind], *(("betas",) if kind != "sgd" else ())):
        if name not in group:
            raise UserError(
                f"parameter group {number} of the {kind} optimizer has no setting {name}",
                expected=", ".join((*_SETTINGS[kind], *_FLAGS[kind])), received=", ".join(map(shown, group)),
                next_step="load the state of the same kind of optimizer, or start with a fresh one",
            )  # fmt: skip
    for name, allowed in _SETTINGS[kind].items():
        _check_setting(kind, number, name, group[name], allowed)
    for option in ("differentiable", "capturable"):
        if group.get(option):
            raise UserError(
                f"parameter group {number} asks for {option}=True, which a captured step cannot honour",
                next_step=f"make the optimizer without {option}",
            )
    if kind == "adamw" and not group.get("decoupled_weight_decay", True):
        raise _no_setting(kind, number, "decoupled_weight_decay", "True, as AdamW has it", False)
    if kind != "sgd":
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise _no_setting(kind, number, "betas", "two numbers, from 0 to below 1", betas)
        for beta in betas:
            _check_setting(kind, number, "betas", beta, _BETA)


_BETA = Range(0, 1 - 2**-53, whole=False)


def _check_setting(kind: str, number: int, name: str, value: object, allowed: Range) -> None:
    plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta else value
    if plain not in allowed:
        expected = "a number from 0 to below 1" if allowed is _BETA else str(allowed)
        raise _no_setting(kind, number, name, expected, value)


def _no_setting(kind: str, number: int, name: str, expected: str, received: object) -> UserError:
    return UserError(
        f"{name} of parameter group {number} of the {kind} optimizer cannot be that",
        expected=expected, received=shown(received), next_step=f"set optimizer.param_groups[{number}][{name!r}]",
    )  # fmt: skip


def state_keys(kind: str, group: dict[str, Any]) -> tuple[str, ...]:
    """The tensors of state that are shaped like the parameter."""
    if kind == "sgd":
        return ("momentum_buffer",) if group["momentum"] != 0 else ()
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def rounds(kind: str, group: dict[str, Any]) -> bool:
    """Whether plain PyTorch's update of this group differs from a step's in the last bits: it has one kernel for all
    parameters (fused), or computes with a setting in float32 that is a tensor or a number of NumPy's."""
    if group.get("fused"):
        return True
    if kind == "sgd":
        return not isinstance(group["dampening"], int | float)
    settings = (group["lr"], group["eps"], group["weight_decay"], *group["betas"])
    return not all(isinstance(value, int | float) for value in settings)


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two numbers of the tensor lie in the same place, as in an expanded one: it cannot be updated in place."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False
