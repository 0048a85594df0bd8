"""What a step may claim of its numbers, beside those of plain PyTorch.

In:  a model, its loss and optimizer, the layout of images. Out: "bitwise", or "rounding" where plain PyTorch would run
     other kernels than the ones that were captured:

    LSTM                             plain PyTorch has one fused kernel; a captured one runs gate by gate
    channels-last images             kernels that sum in another order
    fused optimizers                 one kernel for all parameters
    settings that are tensors        Adam computes the step size in float32 then, and not in float64; NumPy's too
    scripted or compiled code        fused and reordered by a compiler: of the model, of the loss, of what they call
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from edgetrain.graph.capture.objects import holds_many_plain, is_a
from edgetrain.graph.capture.optimizers import kind_of
from edgetrain.graph.capture.training import MemoryFormat
from edgetrain.native.signals import raised_by_handler
from edgetrain.ops.settings import rounds
from edgetrain.plan.plan import Exact

ONEDNN = (torch.float32, torch.bfloat16, torch.float16)
_DEPTH = 4  # functions that call each other, as far as they are looked into


def exactness_of(
    model: nn.Module, loss: Callable[..., Any], optimizer: torch.optim.Optimizer, memory_format: MemoryFormat
) -> Exact:
    other = any(isinstance(m, nn.LSTM) and next(m.parameters()).dtype in ONEDNN for m in model.modules())
    other = other or memory_format == "channels_last"
    kind = kind_of(optimizer)
    other = other or any(rounds(kind, group) for group in optimizer.param_groups)
    return "rounding" if other or _compiled(model, loss) else "bitwise"


def _compiled(model: nn.Module, loss: Callable[..., Any]) -> bool:
    """A compiler made some of the code that plain PyTorch would run."""
    seen: set[int] = set()
    return any(_is_compiled(part, seen, _DEPTH) for part in (*model.modules(), loss))


def _is_compiled(part: Any, seen: set[int], depth: int) -> bool:
    if is_a(part, torch.jit.ScriptModule | torch.jit.ScriptFunction) or _of_compile(part):
        return True
    if depth == 0 or id(part) in seen:
        return False
    seen.add(id(part))
    try:
        return any(_is_compiled(called, seen, depth - 1) for called in _called(part))
    except Exception as error:  # a proxy, or a container of the user's, that raises when it is looked at
        if raised_by_handler(error):
            raise
        return False


def _of_compile(part: Any) -> bool:
    """What torch.compile gives back: a module of its own, or a function that knows which one it was made from."""
    own = part.__dict__ if isinstance(part, types.FunctionType) else {}
    return type(part).__name__ == "OptimizedModule" or callable(own.get("_torchdynamo_orig_callable"))


def _called(part: Any) -> Iterator[Any]:
    """What may run when this does: a module's parts and forward, and of a function of the user's what it names and
    encloses."""
    if isinstance(part, functools.partial):
        yield from (part.func, *part.args, *part.keywords.values())
    elif isinstance(part, types.MethodType):
        yield from (part.__func__, part.__self__)
    elif isinstance(part, list | tuple | dict):
        yield from () if holds_many_plain(part) else part.values() if isinstance(part, dict) else part
    elif isinstance(part, types.FunctionType):
        yield from _named(part)
    elif isinstance(part, nn.Module):
        yield from (type(part).forward, *vars(part).values())
    elif callable(part) and not isinstance(part, type):
        yield from (type(part).__call__, *getattr(part, "__dict__", {}).values())


def _named(function: types.FunctionType) -> Iterator[Any]:
    if (function.__module__ or "").partition(".")[0] in ("torch", "edgetrain"):
        return
    names = set(_names(function.__code__))
    objects = [function.__globals__[name] for name in names if name in function.__globals__]
    yield from objects
    for module in objects:
        if isinstance(module, types.ModuleType) and module.__name__.partition(".")[0] != "torch":
            yield from (vars(module)[name] for name in names if name in vars(module))
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a cell that is not filled yet
            yield cell.cell_contents


def _names(code: types.CodeType) -> Iterator[str]:
    """Those of the functions inside it too."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)
