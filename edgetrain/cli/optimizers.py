"""The optimizer of a command: made in one place, so that what cannot be trained is refused in one way."""

from __future__ import annotations

from typing import Any

import torch
import typer
from torch import nn

from edgetrain.errors import UserError

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
}  # fmt: skip
MOMENTUM = 0.9  # of sgd, where nothing else is asked for


def make_optimizer(
    name: str, net: nn.Module, model: str, *, lr: float = 0.01, momentum: float = MOMENTUM, **settings: Any
) -> torch.optim.Optimizer:
    """model: the name by which the user called it. momentum: of sgd alone."""
    parameters = list(net.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise UserError(
            f"there is nothing to train in {model}", expected="a model with parameters, not all of them frozen",
            received=f"{len(parameters)} parameters, all frozen" if parameters else "a model without parameters",
            next_step="give another model, or leave some of its layers unfrozen",
        )  # fmt: skip
    if name == "sgd":
        settings["momentum"] = momentum
    return OPTIMIZERS[name](trained, lr=lr, **settings)  # type: ignore[call-arg]


def momentum_of(optimizer: str, asked: float | None, default: float = MOMENTUM) -> float:
    """What --momentum says, which is wrong use with another optimizer than sgd."""
    if asked is not None and optimizer != "sgd":
        raise typer.BadParameter(f"{optimizer} has none; it is for --optimizer sgd", param_hint="--momentum")
    return default if asked is None else asked
