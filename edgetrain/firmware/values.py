"""The initial values of persistent tensors, and the bytes of a tensor in firmware's layout.

In:  the tensors of a graph, the model and the optimizer that it was captured from.
Out: `with_values`: the content of weights.bin; `to_memory` and `from_memory`: bytes of a tensor, and back.

Images and filters have their channels innermost; everything else is dense in the order of its shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from edgetrain.dtypes import dtype_name, dtype_of
from edgetrain.errors import UserError
from edgetrain.firmware.program import Persistent
from edgetrain.graph.ir import Graph, Source


def with_values(
    persistent: list[Persistent], graph: Graph, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[list[Persistent], bytes]:
    """The tensors with their offsets in weights.bin, and its content. Zeros are not stored."""
    placed, content = [], bytearray()
    for item in persistent:
        if item.role == "input":
            placed.append(item)
            continue
        value = to_memory(_value(graph, item, model, optimizer), graph.tensors[item.tensor].dtype)
        if not any(value) and item.changes:
            placed.append(item)
            continue
        content += b"\0" * (-len(content) % 8)
        placed.append(replace(item, offset=len(content)))
        content += value
    return placed, bytes(content)


def _value(graph: Graph, item: Persistent, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    tensor, source = graph.tensors[item.tensor], graph.sources[item.tensor]
    try:
        value = _source(source, model, optimizer)
    except (AttributeError, IndexError, KeyError) as error:
        raise _mismatch(item.name) from error
    if value is None:
        return torch.zeros(tensor.shape, dtype=dtype_of(tensor.dtype))
    if tuple(value.shape) != tensor.shape or dtype_name(value.dtype) != tensor.dtype:
        raise _mismatch(item.name)
    return value


def _source(source: Source, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    if source.sort == "parameter":
        return model.get_parameter(source.path)
    if source.sort == "buffer":
        return model.get_buffer(source.path)
    group, index, *key = source.path.split(".")
    parameter = optimizer.param_groups[int(group)]["params"][int(index)]
    if source.sort == "optimizer":
        return torch.as_tensor(parameter)
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    value = state.get(key[0])
    return None if value is None else torch.as_tensor(value)


def _mismatch(name: str) -> UserError:
    return UserError(
        f"{name} is not in this model or optimizer as the graph has it",
        expected="the model and the optimizer that the graph was captured from",
    )


def to_memory(value: torch.Tensor, dtype: str) -> bytes:
    value = value.detach().to("cpu", dtype_of(dtype))
    return (value.permute(0, 2, 3, 1) if value.dim() == 4 else value).contiguous().numpy().tobytes()


def from_memory(data: bytes, shape: Sequence[int], dtype: str) -> torch.Tensor:
    flat = torch.from_numpy(np.frombuffer(data, dtype=dtype).copy())
    if len(shape) != 4:
        return flat.reshape(tuple(shape))
    B, C, H, W = shape
    return flat.reshape(B, H, W, C).permute(0, 3, 1, 2).contiguous()
