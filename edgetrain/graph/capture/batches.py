"""What comes in from a user's loop, a batch and a loss, put in words where a step cannot take it.

In:  an item of a batch, the value of a loss, a model. Out: nothing, or what is wrong and what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from edgetrain.dtypes import dtype_name
from edgetrain.errors import UserError
from edgetrain.graph.ir import ITEM_BYTES
from edgetrain.ranges import shown

_OF_TORCH = ("_dynamo", "_is_param", "_is_buffer")  # attributes that torch itself gives to tensors
_PLAIN = (bool, int, float, str, type(None))
_NESTED = "pass nested batches as separate tensors, and put them together inside the loss"


def check_model(model: object, loss: object) -> None:
    """Refuse what is no model and no loss."""
    if not isinstance(model, nn.Module):
        built = isinstance(model, type) and issubclass(model, nn.Module)
        raise UserError(
            "a step is captured from a model", expected="an nn.Module",
            received=f"the class {model.__name__} itself" if isinstance(model, type) else type(model).__name__,
            next_step="build it first: model = Net()" if built else "pass the module whose parameters are trained",
        )  # fmt: skip
    if not callable(loss):
        raise UserError(
            "a step is captured with a loss", expected="a function of the model and a batch: loss(model, *batch)",
            received=shown(loss), next_step="write lambda model, x, y: F.cross_entropy(model(x), y), say",
        )  # fmt: skip
    check_parameters(model)


def check_parameters(model: nn.Module) -> None:
    """Refuse a model whose parameters have no shape yet."""
    for name, module in model.named_modules():
        if any(is_lazy(t) for t in (*module._parameters.values(), *module._buffers.values())):
            raise UserError(
                f"module {name or type(module).__name__} ({type(module).__name__}) is lazy: its parameters have no "
                "shape before it has run",
                next_step="run the model once, with torch.no_grad(): model(x), and create the optimizer after that",
            )


def check_item(position: int, item: object) -> None:
    """Refuse an item that no step can be captured with."""
    if not isinstance(item, torch.Tensor):
        if not isinstance(item, _PLAIN):
            arrays = isinstance(item, np.ndarray | np.generic)
            raise UserError(
                f"item {position} of the example cannot be captured",
                expected="a tensor, a number, a string or None",
                received=type(item).__name__,
                next_step=f"pass {_as_tensor(arrays)}" if arrays or _is_numbers(item) else _NESTED,
            )
        return
    if type(item) is not torch.Tensor and not (isinstance(item, nn.Parameter) and item.requires_grad):
        raise UserError(
            f"item {position} of the batch is a tensor of a class of its own, and a captured step has plain ones",
            expected="a torch.Tensor", received=f"{type(item).__module__}.{type(item).__qualname__}",
            next_step="pass x.as_subclass(torch.Tensor)",
        )  # fmt: skip
    if own := [name for name in item.__dict__ if not name.startswith(_OF_TORCH)]:
        raise UserError(
            f"item {position} of the batch has an attribute {own[0]}, which a captured step would not see",
            next_step="pass what it holds as an item of its own, and the tensor as .detach()",
        )
    if item.layout != torch.strided or item.is_quantized or item.is_meta or item.is_nested:
        kind = "a meta" if item.is_meta else "a nested" if item.is_nested else "a quantized"
        raise UserError(
            f"item {position} of the batch is no dense tensor with numbers in it",
            expected="a tensor with layout torch.strided, on a device",
            received=f"{item.layout}" if item.layout != torch.strided else f"{kind} tensor",
            next_step="pass .to_dense(), or .dequantize()",
        )
    if item.requires_grad:
        raise UserError(
            f"item {position} of the batch needs a gradient, and a step gives gradients to the parameters that the "
            "optimizer holds alone",
            received="a parameter" if isinstance(item, nn.Parameter)
            else f"the result of {item.grad_fn.name()}" if item.grad_fn is not None else "requires_grad=True",
            next_step="pass it as .detach(), or make what computes it part of the model; where the loss itself asks "
            "for gradients by its input, let it call x.detach().requires_grad_()",
        )  # fmt: skip
    if dtype_name(item.dtype) not in ITEM_BYTES:
        raise UserError(
            f"item {position} of the batch has a type that a step cannot hold",
            expected=f"one of {', '.join(ITEM_BYTES)}", received=str(item.dtype), next_step="pass it as another type",
        )  # fmt: skip


def sames(batch: Sequence[object]) -> tuple[int, ...]:
    """Of each item where it came first: a loss may ask whether two are one and the same tensor."""
    ids = [position if type(item) in _PLAIN else id(item) for position, item in enumerate(batch)]
    return tuple([ids.index(one) for one in ids])


def changed(batch: Sequence[Any], change: Callable[[int, Any], Any]) -> tuple[Any, ...]:
    """The batch with each item changed, an item that comes twice once: it stays one and the same."""
    first = sames(batch)
    made = {position: change(position, batch[position]) for position in dict.fromkeys(first)}
    return tuple(made[position] for position in first)


def _is_numbers(item: object) -> bool:
    """A list of numbers, or of lists of them: what torch.tensor takes."""
    for _ in range(8):
        if not isinstance(item, list | tuple) or not item:
            break
        item = item[0]
    return isinstance(item, bool | int | float)


def _as_tensor(arrays: bool) -> str:
    return "torch.from_numpy(array)" if arrays else "torch.tensor(numbers)"


def place_of(module: str, outermost: str) -> str:
    """Where an op is called, in words. module: its path, empty in code outside of all parts of the model."""
    return f"module {module}" if module else f"the loss or the outermost forward of {outermost}"


def other_type(model: nn.Module, batch: Sequence[Any], mixed: Collection[torch.dtype] = ()) -> str | None:
    """What to do where the batch has numbers of another type than the model's parameters; None where it has not.
    mixed: the types that some kernel has met together; integers may count then too."""
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    for position, item in enumerate(batch):
        if not isinstance(item, torch.Tensor) or len(types) != 1 or item.dtype in types:
            continue
        if item.is_floating_point() or item.dtype in mixed:
            (own,) = types
            return (
                f"item {position} of the batch is {dtype_name(item.dtype)}, the model's parameters are "
                f"{dtype_name(own)}: pass it as .to({own})"
                + (f", or call model.to({item.dtype}) before the optimizer is made" if item.is_floating_point() else "")
            )
    return None


def no_scalar(value: object) -> tuple[str, str]:
    """What a loss gave that is no number to differentiate, and what to do."""
    reduce = "reduce it, for example with .mean()"
    if isinstance(value, torch.Tensor):
        whole = value.numel() == 1
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}", "give it as float32" if whole else reduce
    if isinstance(value, tuple | list):
        kinds = ", ".join("a tensor" if isinstance(v, torch.Tensor) else type(v).__name__ for v in value[:4])
        return f"a {type(value).__name__} of {len(value)}: {kinds}", "return the loss alone; compute the rest outside"
    if isinstance(value, Mapping):
        return f"a dictionary with {', '.join(shown(k) for k in list(value)[:4])}", "return the loss alone, out of it"
    if value is None:
        return "None", "return the loss from the function"
    return shown(value), "return the tensor itself, without .item() or float()"


def no_parameter_of(model: nn.Module) -> UserError:
    return UserError(
        f"the loss reaches no parameter that the optimizer holds: it is no optimizer of this {type(model).__name__}",
        expected="an optimizer over the parameters of the model that is trained",
        next_step="make it with the model's own parameters, as in torch.optim.SGD(model.parameters(), lr=…)",
    )
