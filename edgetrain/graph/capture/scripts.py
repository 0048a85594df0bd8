"""TorchScript while a step is recorded: functions that run alike each time, however often they ran before.

TorchScript watches the first runs of a function and makes other kernels of it afterwards. So what it knows is forgotten
before a recording, and within the recording it watches for ever; afterwards that is forgotten too, for it was watching
tensors without data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from edgetrain.errors import UserError
from edgetrain.graph.capture.objects import is_a

_FOR_EVER = 2**31 - 1
# Written straight into memory, which tensors without data do not have: the process would crash.
_WRITES = ("aten::tensor(", "aten::as_tensor(")


@contextmanager
def watched_for_ever(reached: Iterable[Any]) -> Iterator[None]:
    """reached: all objects among which scripted ones may be."""
    functions = list(_functions(reached))
    for function in functions:
        _refuse_writes(function)
    before = torch._C._jit_set_num_profiled_runs(_FOR_EVER)  # type: ignore[arg-type]  # its stub is wrong
    try:
        _forget(functions)
        yield
    finally:
        torch._C._jit_set_num_profiled_runs(before)
        _forget(functions)


def _functions(reached: Iterable[Any]) -> Iterator[Any]:
    for value in reached:
        if is_a(value, torch.jit.ScriptModule) and "_c" in vars(value):
            yield from (value._c._get_method(name) for name in value._c._method_names())
        elif is_a(value, torch.jit.ScriptFunction | torch._C.ScriptMethod):
            yield value


def _forget(functions: Iterable[Any]) -> None:
    for function in functions:
        function._debug_flush_compilation_cache()


def _refuse_writes(function: Any) -> None:
    graph = str(function.inlined_graph)
    if any(name in graph for name in _WRITES):
        raise UserError(
            f"the scripted function {function.name} makes a tensor of numbers (torch.tensor), which cannot be traced "
            "without running it",
            next_step="make that tensor with torch.full or torch.zeros, or keep it in a buffer (register_buffer)",
        )
