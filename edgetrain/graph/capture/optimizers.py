"""The optimizers whose update edgetrain knows: what state each keeps, and which of its settings shape the step.

In:  a `torch.optim` optimizer, left as it is.
Out: `Trained` parameters with the keys of their state, and the settings that decide which tensors exist (momentum or
     not, amsgrad or not). Learning rate, betas and the like are no part of a graph: a step reads them from the
     optimizer's parameter groups each time it runs, so schedulers work.

`ops/update.py` executes the updates.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim import optimizer as of_torch

from edgetrain.errors import UserError
from edgetrain.graph.ir import Op, Ref, Source
from edgetrain.graph.rewrite.builder import Builder
from edgetrain.ops import update
from edgetrain.ops.settings import check_settings, overlaps, rounds, state_keys

_TORCH, _PYTHON = str(Path(torch.__file__).parent), str(Path(types.__file__).parent)
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
_SCHEDULERS = str(Path(lr_scheduler.__file__))
own_hooks: list[Any] = []  # ours, for all optimizers

KNOWN: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
}


@dataclass(frozen=True)
class Trained:
    """One parameter that the optimizer holds and that asks for a gradient."""

    group: int
    index: int
    parameter: nn.Parameter
    state_keys: tuple[str, ...]  # tensors shaped like the parameter
    counts_steps: bool  # a 0-d `step` beside them

    @property
    def path(self) -> str:
        return f"{self.group}.{self.index}"


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """`sgd`, `adam` or `adamw`; a UserError for any other."""
    kind = KNOWN.get(type(optimizer))
    if kind is None:
        raise UserError(
            f"the update of {type(optimizer).__name__} is not known",
            expected="torch.optim.SGD, Adam or AdamW themselves (a subclass may update otherwise)",
            received=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            next_step="use one of these, or ask for this optimizer in an issue",
        )
    return kind


def trained(optimizer: torch.optim.Optimizer) -> list[Trained]:
    """The parameters that a step trains, in the optimizer's order. Parameters that need no gradient are constants."""
    kind = kind_of(optimizer)
    _check_hooks(optimizer)
    found = []
    for g, group in enumerate(optimizer.param_groups):
        _check_group(kind, g, group)
        keys = state_keys(kind, group)
        found += [
            Trained(g, i, p, keys, counts_steps=kind != "sgd") for i, p in enumerate(group["params"]) if p.requires_grad
        ]
    if not found:
        raise UserError(
            "the optimizer holds no parameter that needs a gradient",
            next_step="give it the parameters to train, with requires_grad=True",
        )
    return found


def add_update(builder: Builder, kind: str, trained: Trained, parameter: int, gradient: int) -> None:
    """Add the op that updates a parameter, and its optimizer state as persistent tensors."""
    name = builder.tensors[parameter].name
    state = {key: builder.add_like(parameter, f"{name}.{key}", "state") for key in trained.state_keys}
    if trained.counts_steps:
        state["step"] = builder.add(f"{name}.step", "state", (), "float32")
    builder.sources |= {t: Source("state", f"{trained.path}.{key}") for key, t in state.items()}
    builder.gradients[parameter] = gradient
    written = dict.fromkeys(builder.tensors[t].storage for t in (parameter, *state.values()))
    builder.add_op(
        Op(
            name=kind,
            kind=update.kind_of(kind),
            args=(Ref(parameter), Ref(gradient), *(Ref(t) for t in state.values())),
            kwargs=(("group", trained.group), ("index", trained.index)),
            outputs=(),
            phase="update",
            module=name.rpartition(".")[0],
            writes=tuple(written),
        )
    )


def structure(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Which state the optimizer keeps, and whether its updates round otherwise than a step's: a change of it (momentum
    switched on) asks for another capture."""
    kind = kind_of(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        check_settings(kind, number, group)
    return (kind, *((state_keys(kind, group), rounds(kind, group)) for group in optimizer.param_groups))


def _check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """A captured step calls neither `optimizer.step()` nor `backward()`, so what stands in their place would never
    run."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    of_all = (*of_torch._global_optimizer_pre_hooks.values(), *of_torch._global_optimizer_post_hooks.values())
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        [hook for hook in of_all if hook not in own_hooks],
    )
    if replaced := _replaced(optimizer):
        raise UserError(
            f"{replaced} of the optimizer is not torch's, and a captured step never calls it",
            next_step="do what it does between steps, and leave the optimizer's own in its place",
        )
    if any(hooks) or any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters):
        raise UserError(
            "the optimizer or a parameter has hooks of step() or backward(), which a captured step never calls",
            next_step="do what the hooks do in the loss or between steps, and remove them",
        )


def _replaced(optimizer: torch.optim.Optimizer) -> str | None:
    """The function that does not come from torch.optim, if any. A scheduler may wrap `step` to count the calls."""
    own = {name: method for name, method in vars(optimizer).items() if callable(method)}
    for name in [name for name in own if hasattr(type(optimizer), name)]:
        if not _is_of_torch(own[name], _SCHEDULERS if name == "step" else _TORCH):
            return name
    for name in ("step", "_init_group"):
        if not _is_of_torch(getattr(type(optimizer), name), _TORCH):  # torch.compile wraps them
            return name
    module = sys.modules[type(optimizer).__module__]
    for name, function in vars(module).items():
        if isinstance(function, types.FunctionType) and not _is_of_torch(function, _TORCH, _PYTHON):
            return name
    return None


def _is_of_torch(function: Any, *folders: str) -> bool:
    """Is it written in these folders, and all that it wraps too? Its names do not tell: a wrapper takes them over."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith((*folders, _OPTIMIZERS)):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _check_group(kind: str, number: int, group: dict[str, Any]) -> None:
    check_settings(kind, number, group)
    if len(set(map(id, group["params"]))) < len(group["params"]):
        raise UserError(
            f"parameter group {number} of the {kind} optimizer holds a parameter twice, which would update it twice",
            next_step="give the optimizer each parameter once",
        )
    if any(p.layout != torch.strided or p.is_complex() or p.is_meta or overlaps(p) for p in group["params"]):
        raise UserError(
            f"parameter group {number} of the {kind} optimizer holds parameters that are sparse or complex, have no "
            "memory (meta), or numbers that share memory with each other",
            expected="dense real parameters",
        )
