"""What a model or a loss does that a captured step could not do, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils.checkpoint import CheckpointFunction

from edgetrain.errors import UserError
from edgetrain.graph.capture import batches
from edgetrain.graph.capture.observe import Observed, code_of

LABELS = "class labels (and other indices) must be int64: pass y.long()"
_NO_VALUES = "its data is not allocated yet"


class ExampleRefused(UserError):
    """Model and loss cannot be run on the example. `where`: what failed, in words."""

    def __init__(self, where: str, *, received: str, next_step: str) -> None:
        self.where = where
        super().__init__(
            f"{where} cannot be run on the example",
            expected="an example batch that model and loss accept, in the order in which the loss takes it",
            received=received,
            next_step=next_step,
        )


def reentrant(seen: Observed) -> bool:
    return code_of(CheckpointFunction.forward.__code__) in seen.codes


def no_reentrance() -> UserError:
    return UserError(
        "torch.utils.checkpoint with use_reentrant=True runs a backward pass of its own, which a captured step cannot "
        "follow",
        next_step="pass use_reentrant=False, or leave torch.utils.checkpoint out; edgetrain plans recomputation",
    )


def check_loss(value: Any, seen: Observed) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
        received, next_step = batches.no_scalar(value)
        raise UserError(
            "the loss is not a scalar", expected="one floating-point number, a 0-d tensor", received=received,
            next_step=next_step,
        )  # fmt: skip
    if not value.requires_grad and reentrant(seen):
        raise no_reentrance()
    if not value.requires_grad:
        raise UserError(
            "the loss depends on no parameter that needs a gradient",
            next_step="check for .detach(), torch.no_grad() or requires_grad=False between the parameters and the loss",
        )
    return value if value.dim() == 0 else value.reshape(())


def unreached(names: list[str], frozen: list[str]) -> UserError:
    why = ""
    if frozen:
        why = f" (the loss sets requires_grad=False for {', '.join(frozen[:5])}{', …' if len(frozen) > 5 else ''})"
    modules = ", ".join(sorted({name.rpartition(".")[0] or name for name in names})[:5])
    return UserError(
        f"the loss does not reach {len(names)} parameter(s) that the optimizer holds, in {modules}: "
        + ", ".join(names[:5]) + (", …" if len(names) > 5 else "") + why,
        expected="every parameter of the optimizer gets a gradient",
        next_step='leave them out of the optimizer, use them in the loss, or pass unused="freeze" to accept it',
    )  # fmt: skip


def explain(error: Exception, module: str, model: nn.Module, batch: Sequence[Any]) -> UserError:
    where = batches.place_of(module, type(model).__name__)
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    values = _NO_VALUES in first  # read in C++
    if values or isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        op = getattr(error, "func", "its memory is read")
        return UserError(
            f"{where} decides by the values of a tensor ({op}), which a step captured once cannot follow",
            expected="control flow and shapes that depend on shapes and settings alone",
            next_step="replace `if tensor:`, .item(), .tolist() or masked indexing by torch.where or a mask; give "
            "torch's own layers what they would look for (is_causal=, validate_args=False)",
        )
    if "_will_engine_execute_node" in first:
        return UserError(
            "a hook waits for the gradients of several parameters together (register_multi_grad_hook), and a captured "
            "step could not call it",
            next_step="remove it, and use register_hook on each parameter or step.gradients(...)",
        )
    if "use_reentrant=True" in first:
        return no_reentrance()
    if isinstance(error, UnsupportedOperatorException):
        return UserError(f"{where} calls {error.func}, which cannot be traced without running it", received=str(error))
    labels, mixed = "Expected dtype int32/int64 for index" in first, getattr(error, "types", ())
    return ExampleRefused(
        where,
        received=first if mixed else f"{type(error).__name__}: {first}",
        next_step=LABELS
        if labels
        else batches.other_type(model, batch, mixed)
        or "run loss(model, *example) by itself to see the whole traceback",
    )


def random_backward(where: str, what: str) -> UserError:
    return UserError(
        f"{where} draws random numbers in the backward pass ({what}); "
        "torch.utils.checkpoint over dropout does so, and the masks would not be those of the forward pass",
        next_step="capture the model without torch.utils.checkpoint; edgetrain plans recomputation",
    )


def exchanged(path: str) -> UserError:
    return UserError(
        f"the model or the loss gives {path} other memory (`.data = …`, set_ or swap_tensors), which a captured step "
        "does not do again",
        next_step="write p.copy_(…) under torch.no_grad() in place of `p.data = …`, or do it between steps",
    )
