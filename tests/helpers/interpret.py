"""A graph run word by word, to hold the clever ways of running it against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from edgetrain.graph.ir import Atom, Graph, Ref, Value
from edgetrain.ops import call


class Interpreter:
    """Runs a graph op by op, in order, with nothing freed and nothing overwritten: what its words mean, and no more."""

    def __init__(self, graph: Graph, model: nn.Module, *batch: Any) -> None:
        self.graph, self.values = graph, dict[int, Any]()
        for t, source in graph.sources.items():
            if source.sort == "input":
                self.values[t] = batch[int(source.path)]
            elif source.sort == "constant":
                tensor = graph.tensors[t]
                raw = torch.frombuffer(bytearray(graph.constants[t]), dtype=getattr(torch, tensor.dtype))
                self.values[t] = raw.reshape(tensor.shape)
            else:
                kept = dict(model.named_parameters()) if source.sort == "parameter" else dict(model.named_buffers())
                self.values[t] = kept[source.path]

    def outputs(self) -> list[Tensor]:
        with torch.no_grad():
            for op in self.graph.ops:
                args = [self._value(a) for a in op.args]
                result = call.resolve(op.kind)(*args, **{key: self._value(value) for key, value in op.kwargs})
                made = [result] if isinstance(result, Tensor) else list(result or [])
                self.values |= {t: r for t, r in zip(op.outputs, made, strict=False) if t is not None}
        return [self.values[t] for t in self.graph.outputs]

    def _value(self, value: Value) -> Any:
        if isinstance(value, Ref):
            return self.values[value.tensor]
        if isinstance(value, tuple):
            return tuple(self._value(item) for item in value)
        if isinstance(value, Atom):
            return torch.device(value.name) if value.sort == "device" else getattr(torch, value.name)
        return value
